"""The server's API protocols: OpenAI, Responses, Anthropic, llama-server and Ollama."""
