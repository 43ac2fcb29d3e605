"""What the promises about speed and memory come to on this machine: `python -m benchmarks`."""
