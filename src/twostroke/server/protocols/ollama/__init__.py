"""Ollama's API: requests, responses, embeddings and models."""
