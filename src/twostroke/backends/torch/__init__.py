"""The torch backend: interprets a Program in PyTorch, on a CPU or a GPU, with gradients."""

from twostroke.backends.torch.backend import TorchBackend
from twostroke.backends.torch.model import TorchModel, choose_device

__all__ = ["TorchBackend", "TorchModel", "choose_device"]
