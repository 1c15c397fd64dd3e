"""The API of llama.cpp's llama-server."""
