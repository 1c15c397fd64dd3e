"""JSON Schema: what of a schema a grammar can hold by construction, and what must be checked."""
