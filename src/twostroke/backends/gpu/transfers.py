"""Asynchronous copies between host and device, and the errors of a device."""

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
    """Return a context manager that makes a GPU the current device of this thread."""
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()


def to_device(gpu: Gpu, array: NDArray[Any]) -> Tensor:
    """Copy an array to GPU memory; kernels that are launched later can read the copy."""
    if gpu.device.type != "cuda":
        return torch.from_numpy(array.copy())
    return torch.from_numpy(array).pin_memory().to(gpu.device, non_blocking=True)


def to_host(tensor: Tensor) -> Tensor:
    """Start to copy a tensor to host memory, after all launches so far.

    The copy is valid once a `DeviceEvent` that is created afterwards is reached.
    """
    if tensor.device.type != "cuda":
        return tensor.clone()
    copy = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
    return copy.copy_(tensor, non_blocking=True)


@contextmanager
def checked(gpu: Gpu) -> Iterator[None]:
    """Run the `with` block, and replace PyTorch's GPU errors by Twostroke's.

    Raises:
        MemoryLimitError: the device has no memory left; smaller steps may still succeed.
        DeviceLostError: a kernel failed; CUDA cannot be used in this process any more.
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
    """Return a DeviceLostError if an error has made CUDA unusable in this process, else None."""
    if gpu.device.type != "cuda" or _is_alive(gpu):
        return None
    return DeviceLostError(f"The GPU failed: {str(error).splitlines()[0]}.")


def is_out_of_memory(error: RuntimeError) -> bool:
    """Return whether an error says that PyTorch, CUDA or a library ran out of GPU memory."""
    text = str(error)
    has_message = "out of memory" in text or "ALLOC_FAILED" in text
    return has_message or isinstance(error, torch.OutOfMemoryError)


def _is_alive(gpu: Gpu) -> bool:
    try:
        torch.cuda.synchronize(gpu.device)
    except RuntimeError:
        return False
    return True


class DeviceEvent:
    """An event that is reached when a GPU has finished all launches before the event's creation."""

    def __init__(self, gpu: Gpu) -> None:
        self._event = torch.cuda.Event() if gpu.device.type == "cuda" else None
        if self._event is not None:
            self._event.record()

    def wait(self) -> None:
        """Block until the event is reached; return at once in Triton's interpreter."""
        if self._event is not None:
            self._event.synchronize()
