"""The job: what a training script calls to take part. Python 3.9, and torch only where tensors are touched."""
