"""The training side: which model, on which data, and the loop itself.

Nothing is imported here, so that reading `job` does not load torch.
"""
