"""Callbacks that let other people's training loops take part. Nothing is imported here: each needs its own package."""
