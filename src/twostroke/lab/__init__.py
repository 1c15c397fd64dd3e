"""Plans, simulates, measures, compresses and trains."""
