"""The PyTorch reader: interprets a Program on a CPU or a GPU; gradients flow through it."""

from twostroke.backends.torch.backend import TorchBackend
from twostroke.backends.torch.model import TorchModel, choose_device

__all__ = ["TorchBackend", "TorchModel", "choose_device"]
