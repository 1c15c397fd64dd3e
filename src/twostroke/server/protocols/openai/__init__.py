"""OpenAI's protocol, and the additions of other servers that speak it."""
