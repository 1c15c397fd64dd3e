"""Copies between the processor and a device for which nobody waits, and what may go wrong there."""

from __future__ import annotations

from contextlib import contextmanager, nullcontext
from typing import TYPE_CHECKING, Any

import torch

from twostroke.core.errors import DeviceLostError, MemoryLimitError

if TYPE_CHECKING:
    from collections.abc import Iterator
    from contextlib import AbstractContextManager

    from numpy.typing import NDArray
    from torch import Tensor

    from twostroke.backends.gpu.launch import Gpu


def on(device: torch.device) -> AbstractContextManager[object]:
    """Make a GPU the current one of this thread, for launches and copies."""
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()


def to_device(gpu: Gpu, array: NDArray[Any]) -> Tensor:
    """Return a copy of an array for kernels that are launched from now on."""
    if gpu.device.type != "cuda":
        return torch.from_numpy(array.copy())
    return torch.from_numpy(array).pin_memory().to(gpu.device, non_blocking=True)


def to_host(tensor: Tensor) -> Tensor:
    """Return a copy of a tensor as it is after all launches so far, good after a `DeviceEvent`."""
    if tensor.device.type != "cuda":
        return tensor.clone()
    found = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
    return found.copy_(tensor, non_blocking=True)


@contextmanager
def checked(gpu: Gpu) -> Iterator[None]:
    """Say what an error of the device means.

    Raises:
        MemoryLimitError: it has no memory left; smaller steps may go on.
        DeviceLostError: a kernel failed, after which CUDA does nothing in this process any more.
    """
    try:
        yield
    except RuntimeError as error:
        if is_out_of_memory(error):
            message = "The GPU has no memory left for this step; another process may have taken it"
            raise MemoryLimitError(f"{message}.") from None
        if (fault := lost(gpu, error)) is not None:
            raise fault from error
        raise


def lost(gpu: Gpu, error: RuntimeError) -> DeviceLostError | None:
    """Return what to raise instead of an error that ended CUDA in this process; else None."""
    if gpu.device.type != "cuda" or _is_alive(gpu):
        return None
    return DeviceLostError(f"The GPU failed: {str(error).splitlines()[0]}.")


def is_out_of_memory(error: RuntimeError) -> bool:
    """Whether PyTorch, CUDA or one of its libraries found too little memory."""
    text = str(error)
    is_told = "out of memory" in text or "ALLOC_FAILED" in text
    return is_told or isinstance(error, torch.OutOfMemoryError)


def _is_alive(gpu: Gpu) -> bool:
    try:
        torch.cuda.synchronize(gpu.device)
    except RuntimeError:
        return False
    return True


class DeviceEvent:
    """The point that a device reaches after all that was launched so far."""

    def __init__(self, gpu: Gpu) -> None:
        self._event = torch.cuda.Event() if gpu.device.type == "cuda" else None
        if self._event is not None:
            self._event.record()

    def wait(self) -> None:
        """Wait until the device is there; interpreted kernels are done when they are launched."""
        if self._event is not None:
            self._event.synchronize()
