"""Measures how fast a model runs here and how near its answers are to the right ones."""
