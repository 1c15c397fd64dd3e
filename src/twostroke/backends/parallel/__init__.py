"""Ranks, the processes that run a model together: how they start, communicate and end."""
