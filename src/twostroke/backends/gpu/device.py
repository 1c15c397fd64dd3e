"""Finds a usable GPU, or raises an error that says why there is none."""

from __future__ import annotations

import os
import subprocess
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

from twostroke.core import env
from twostroke.core.env import install_command
from twostroke.core.errors import BackendError
from twostroke.core.frozen import Frozen
from twostroke.core.hardware import memory_available, memory_total

if TYPE_CHECKING:
    import torch

    from twostroke.backends.gpu.launch import Gpu, Kernels

_MIN_ARCHITECTURE = 80  # sm_80: the first with bfloat16 and asynchronous copies
_DRIVER = Path("/proc/driver/nvidia/version")


class GpuDevice(Frozen, eq=False):
    """A GPU that the gpu backend can use, or the processor, which interprets kernels in tests."""

    name: str
    torch_device: torch.device
    architecture: int
    num_units: int
    is_interpreted: bool = False
    may_overlap: bool = True  # whether launches may overlap

    def gpu(
        self, element: torch.dtype, kernels: Kernels | None = None, *, same_tokens: bool = False
    ) -> Gpu:
        """Return the object by which kernels are launched on this device; see `Gpu`."""
        from twostroke.backends.gpu.launch import Gpu, Kernels

        kernels = Kernels() if kernels is None else kernels
        return Gpu(
            self.torch_device,
            self.architecture,
            num_units=self.num_units,
            element=element,
            run=kernels.start,
            is_interpreted=self.is_interpreted,
            same_tokens=same_tokens,
            call=kernels.call,
        )

    @property
    def memory_available(self) -> int:
        """Return the bytes of GPU memory that are free at the moment."""
        if self.is_interpreted:
            return memory_available()
        import torch

        from twostroke.backends.gpu.transfers import is_out_of_memory

        try:
            free: int = torch.cuda.mem_get_info(self.torch_device)[0]
        except RuntimeError as error:  # perhaps too little memory for CUDA itself
            if not is_out_of_memory(error):
                raise
            return 0
        return free

    @property
    def memory_total(self) -> int:
        """Return the bytes of memory of the GPU."""
        if self.is_interpreted:
            return memory_total()
        import torch

        total: int = torch.cuda.get_device_properties(self.torch_device).total_memory
        return total


def has_driver() -> bool:
    """Return whether an NVIDIA driver is loaded on this machine."""
    return _DRIVER.exists()


def may_exist() -> bool:
    """Return whether this machine may have a GPU, PyTorch and Triton.

    The check is quick, because PyTorch is not imported.
    """
    return _DRIVER.exists() and bool(find_spec("torch") and find_spec("triton"))


def find_device(device_name: str = "auto") -> GpuDevice:
    """Return the GPU named `device_name`: "auto", "cuda" or, for example, "cuda:1".

    With `TRITON_INTERPRET` set, the device is the processor.

    Raises:
        BackendError: no driver, or an old one; no PyTorch or Triton; no such device, or a device
            that is too old; the folder for compiled kernels is not writable; no C compiler.
    """
    for package, module in (("PyTorch", "torch"), ("Triton", "triton")):
        if find_spec(module) is None:
            raise BackendError(f"The gpu backend needs {package}: {install_command('gpu')}.")
    import torch
    import triton

    if triton.knobs.runtime.interpret:
        if device_name not in {"auto", "cpu"}:
            raise BackendError(
                "With TRITON_INTERPRET kernels are interpreted on the cpu, not on "
                f"'{device_name}': leave --device out."
            )
        return GpuDevice("interpreted kernels", torch.device("cpu"), 90, 2, is_interpreted=True)
    if torch.version.cuda is None:
        raise BackendError(
            "This PyTorch was built without CUDA: on a machine with a GPU, "
            f"{install_command('gpu')} brings another."
        )
    if not _DRIVER.exists() and not torch.cuda.is_available():
        message = "There is no NVIDIA driver here, which the gpu backend needs"
        raise BackendError(f"{message}: install one, or use --backend cpu.")
    try:
        torch.cuda.init()
        count = torch.cuda.device_count()
    except RuntimeError as error:
        reason = str(error).split(". ")[0].splitlines()[0]
        raise BackendError(f"The NVIDIA driver cannot be used: {reason}.") from None
    _prepare_cache()
    device = _device(device_name, count)
    _start_triton()
    return device


def _device(device_name: str, count: int) -> GpuDevice:
    import torch

    names = ["auto", "cuda", *(f"cuda:{index}" for index in range(count))]
    if count == 0:
        raise BackendError("The NVIDIA driver sees no GPU; is CUDA_VISIBLE_DEVICES empty?")
    if device_name not in names:
        raise BackendError(f"There is no device '{device_name}' here. Devices: {', '.join(names)}.")
    device = torch.device("cuda:0" if device_name in {"auto", "cuda"} else device_name)
    properties = torch.cuda.get_device_properties(device)
    architecture = 10 * properties.major + properties.minor
    if architecture < _MIN_ARCHITECTURE:
        raise BackendError(
            f"{properties.name} is an sm_{architecture}; the gpu backend needs "
            f"sm_{_MIN_ARCHITECTURE} or newer: use --backend torch."
        )
    return GpuDevice(properties.name, device, architecture, properties.multi_processor_count)


def _prepare_cache() -> None:
    """Make Triton store compiled kernels in Twostroke's cache folder."""
    import triton

    folder = env.cache_dir() / "triton"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        is_writable = os.access(folder, os.W_OK)
    except OSError:
        is_writable = False
    if not is_writable:
        message = f"Compiled kernels cannot be kept in {folder}, which cannot be written"
        raise BackendError(f"{message}: set TWOSTROKE_CACHE to another folder.")
    triton.knobs.cache.dir = str(folder)


def _start_triton() -> None:
    """Make Triton compile its launcher, a C module, which it does once for each installation."""
    import triton

    try:
        triton.runtime.driver.active.get_current_target()
    except subprocess.SubprocessError:
        reason = "its C code does not compile"
    except (RuntimeError, AssertionError, ImportError, OSError) as error:
        reason = str(error).split("\n")[0].split(". ")[0]
    else:
        return
    message = f"Triton cannot start here: {reason}. It needs libcuda, a C compiler and Python's"
    raise BackendError(f"{message} headers: on Debian, install gcc and python3-dev.")
