"""Sampling, from logits to tokens: penalties, truncation, temperature, log-probabilities."""
