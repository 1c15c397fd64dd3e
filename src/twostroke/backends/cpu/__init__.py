"""The CPU reader: lowers a Program to a native plan and runs a whole step in one call."""

from twostroke.backends.cpu.backend import CpuBackend

__all__ = ["CpuBackend"]
