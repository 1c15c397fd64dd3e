"""Shared nouns: requests, step plans, configuration, errors; no numerics."""
