"""What a facility's queue did in the past: scheduler logs, read and summarised."""
