"""The cpu backend: lowers a Program to a native plan, and runs each step in one native call."""

from twostroke.backends.cpu.backend import CpuBackend

__all__ = ["CpuBackend"]
