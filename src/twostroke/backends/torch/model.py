"""A Program with PyTorch weights: from tokens to logits, with or without gradients."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from twostroke.backends.torch.operations import TorchStepState, apply
from twostroke.backends.torch.pages import WholeSequences
from twostroke.core.errors import BackendError
from twostroke.model.program import ops

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping

    from torch import Tensor

    from twostroke.model.program import Op, Program
    from twostroke.model.quant import QuantTensor


class TorchModel:
    """Interprets a Program in float32.

    `weights` are tensors by the Program's names; ask autograd for the gradients of those that
    have `requires_grad` set.
    """

    def __init__(
        self, program: Program, tensors: Mapping[str, QuantTensor], device: str = "cpu"
    ) -> None:
        """Dequantize the Program's weights onto `device` ("cpu", "cuda", "cuda:1").

        Raises:
            BackendError: the device does not exist or has too little memory.
        """
        self.program = program
        self.device = torch.device(device)
        try:
            self.weights = {
                name: torch.from_numpy(tensors[name].dequantize()).to(self.device)
                for name in program.weight_shapes
            }
        except torch.OutOfMemoryError:
            count = sum(tensors[name].num_values for name in program.weight_shapes)
            message = f"{program.name} needs {4e-9 * count:.1f} GB as float32, more than {device}"
            raise BackendError(
                f"{message} has free; take a smaller model or --device cpu."
            ) from None

    def values(self, tokens: Tensor, names: Collection[str] = ()) -> dict[str, Tensor]:
        """Return values by name, (len(tokens), width), and the logits of a sequence (int64)."""
        every = torch.arange(len(tokens), device=self.device)
        keeper = WholeSequences([len(tokens)], self.program.ops)
        state = TorchStepState(tokens.to(self.device), every, every, self.weights, keeper)
        return self.run(state, (*names, self.program.ops[-1].output))

    def run(
        self, state: TorchStepState, names: Collection[str], program: Program | None = None
    ) -> dict[str, Tensor]:
        """Run the Program, or another with its weights, on a step's rows; return named values."""
        every = (program or self.program).ops
        last_use = {name: op for op in every for name in op.inputs}
        values: dict[str, Tensor] = {}
        for op in every:
            values[op.output] = apply(op, _own_rows(op, values, state), state)
            for name in set(op.inputs).difference(names):
                if last_use[name] is op:
                    del values[name]
        return {name: values[name] for name in names}


def _own_rows(op: Op, values: dict[str, Tensor], state: TorchStepState) -> Mapping[str, Tensor]:
    """Return the inputs of an operation, with this rank's rows where it does not read all."""
    num_rows, own = len(state.tokens), state.own
    if own == slice(0, num_rows) or not isinstance(op, ops.LocalOp):
        return values
    inputs = {getattr(op, field): field in op.needs_all_rows for field in op.reads}
    return {
        name: x if reads_all or len(x) < num_rows else x[own]
        for name, reads_all in inputs.items()
        for x in (values[name],)
    }


def choose_device(wanted: str, local_rank: int | None = None) -> str:
    """Return the device for `wanted`; "auto" is a GPU where PyTorch sees one.

    Of several ranks on a machine each has a GPU: the one of its number there, `local_rank`.

    Raises:
        BackendError: PyTorch does not have this device here.
    """
    has_gpu = torch.cuda.is_available()
    if local_rank is not None and wanted.startswith("cuda:"):
        raise BackendError("Each rank has a GPU of its own: set --device to cuda or cpu.")
    if local_rank is not None and has_gpu and wanted in {"auto", "cuda"}:
        wanted = f"cuda:{local_rank}"
    if wanted == "auto":
        return "cuda" if has_gpu else "cpu"
    count = torch.cuda.device_count() if has_gpu else 0
    known = ["cpu", *(["cuda"] if count else []), *(f"cuda:{index}" for index in range(count))]
    if wanted not in known:
        raise BackendError(f"PyTorch has no device '{wanted}' here. Devices: {', '.join(known)}.")
    return wanted
