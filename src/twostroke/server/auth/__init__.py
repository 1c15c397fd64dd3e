"""API keys and tenants: stored keys, the check of keys and limits, usage and prices."""
