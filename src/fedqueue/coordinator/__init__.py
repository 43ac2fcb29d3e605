"""The server: runs a strategy, keeps its ledger and its models, and answers facilities and operators."""
