"""The HTTP layer: bodies and their limits, errors in each protocol's form, streams."""
