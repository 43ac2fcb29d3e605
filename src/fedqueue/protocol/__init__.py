"""The pure part: what happens, what is wanted, and the rules by which a strategy decides. Standard library only."""
