"""JSON Schema: rewrites schemas for grammars, and checks answers where a grammar is not enough."""
