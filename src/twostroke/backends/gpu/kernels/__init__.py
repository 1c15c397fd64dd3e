"""Kernels in Triton, one file for each operation (ADR 0047)."""
