"""Files, uploads and batches of requests, in OpenAI's and Anthropic's forms, kept on disk."""
