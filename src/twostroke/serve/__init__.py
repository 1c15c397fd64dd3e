"""The HTTP face: OpenAI's protocol, streaming, health, metrics."""
