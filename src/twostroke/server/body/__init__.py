"""Decodes JSON request bodies, explains errors in them, and handles unknown fields."""
