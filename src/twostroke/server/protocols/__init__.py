"""The protocols of the server: OpenAI, Responses, Anthropic, llama-server, Ollama."""
