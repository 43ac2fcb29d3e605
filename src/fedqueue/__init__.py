"""Federated learning across supercomputers, where every participant waits in a batch queue."""

__version__ = "0.1.0"
