"""Measures the speed of a model on this machine, and the divergence of its outputs."""
