"""Training of heads that guess a model's next tokens (extra `[train]`)."""

from twostroke.lab.train.options import TrainOptions

__all__ = ["TrainOptions"]
