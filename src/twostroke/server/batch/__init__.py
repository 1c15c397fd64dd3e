"""Files and batches of requests, in the protocols of OpenAI and Anthropic, on kept records."""
