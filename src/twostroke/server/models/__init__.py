"""The served models: their names and facts, and models that are loaded on demand."""
