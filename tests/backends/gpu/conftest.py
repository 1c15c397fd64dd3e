"""Runs kernels in Triton's interpreter on the processor; tests skip without PyTorch or Triton."""

from __future__ import annotations

import os
from importlib.util import find_spec

collect_ignore_glob: list[str] = []

if find_spec("torch") and find_spec("triton"):
    os.environ.setdefault("TRITON_INTERPRET", "1")
    import torch

    torch.set_num_threads(1)
