"""Kernels in Triton, one file for each operation (docs/adr/0047-a-gpu-step-is-planned-once.md)."""
