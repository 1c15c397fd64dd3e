"""OpenAI's API, with the additions of other servers that speak it."""
