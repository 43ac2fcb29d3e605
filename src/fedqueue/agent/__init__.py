"""The login node of a facility: claims orders, submits jobs, watches them, hands in what they made."""
