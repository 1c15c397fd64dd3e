"""Smaller models: which precision each part of a model needs, measured before it is used."""
