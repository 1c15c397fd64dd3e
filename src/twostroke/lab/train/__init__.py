"""Trains heads for speculation, and smaller models (extra `[train]`)."""

from twostroke.lab.train.options import TrainOptions

__all__ = ["TrainOptions"]
