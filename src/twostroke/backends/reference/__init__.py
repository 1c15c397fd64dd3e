"""The reader that defines what a Program means."""

from twostroke.backends.reference.backend import ReferenceBackend

__all__ = ["ReferenceBackend"]
