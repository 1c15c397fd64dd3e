"""API keys, limits and usage that several routers share, in a Redis server."""
