"""The server's OpenAPI document, made from its routes and from the structs that they read."""
