"""The reference backend, in NumPy, which defines the correct result of each operation."""

from twostroke.backends.reference.backend import ReferenceBackend

__all__ = ["ReferenceBackend"]
