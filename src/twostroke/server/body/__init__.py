"""Bodies of requests: decoded, explained where they are wrong, and how much is let pass."""
