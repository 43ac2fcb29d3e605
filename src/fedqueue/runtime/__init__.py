"""The real runtime: coordinator, agents, workers, and the batch schedulers they meet."""
