"""Structured output: grammars and JSON Schema, enforced by masks over the vocabulary."""
