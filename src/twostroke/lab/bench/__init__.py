"""Loads an OpenAI-compatible endpoint, measures its answers, and audits the measurement."""
