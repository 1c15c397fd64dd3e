"""KV pages outside of the page pool: on disk and in Redis."""
