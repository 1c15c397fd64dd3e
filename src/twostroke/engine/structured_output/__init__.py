"""Grammars and JSON Schema, token by token."""
