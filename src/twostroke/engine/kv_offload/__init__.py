"""KV offload: KV cache pages in a folder or in Redis, for requests that come later."""
