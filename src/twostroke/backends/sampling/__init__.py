"""From logits to a token: penalties, truncation, temperature, seeds, log-probabilities."""
