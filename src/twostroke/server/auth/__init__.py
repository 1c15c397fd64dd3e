"""API keys and tenants: stored keys, checks of keys and limits, usage and prices."""
