"""Ranks: the processes that run a model together, how they start, talk and end."""
