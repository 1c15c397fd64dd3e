"""`TorchModel`: a Program with PyTorch weights, which computes logits and gradients."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from twostroke.backends.torch.operations import TorchStepState, apply
from twostroke.backends.torch.pages import WholeSequences
from twostroke.backends.torch.recurrent import new_sequence
from twostroke.core.errors import BackendError
from twostroke.model.program import ops

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping

    from torch import Tensor

    from twostroke.model.program import Op, Program
    from twostroke.model.quant import QuantTensor


class TorchModel:
    """A model in PyTorch for training and research: computes logits, with gradients, in float32.

    `weights`: tensors by the Program's names. Set `requires_grad` to train a weight.
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
        """Compute a sequence of tokens (int64).

        Return its logits and other named values, by name.
        """
        all_rows = torch.arange(len(tokens), device=self.device)
        keeper = WholeSequences([len(tokens)], self.program.ops)
        state = TorchStepState(
            tokens=tokens.to(self.device),
            positions=all_rows,
            sampled=all_rows,
            weights=self.weights,
            keeper=keeper,
            recurrent=new_sequence(self.program, len(tokens), self.device),
        )
        return self.run(state, (*names, self.program.ops[-1].output))

    def run(
        self, state: TorchStepState, names: Collection[str], program: Program | None = None
    ) -> dict[str, Tensor]:
        """Run the model's Program, or another `program` on the same weights.

        Return named values.
        """
        operations = (program or self.program).ops
        last_use = {name: op for op in operations for name in op.inputs}
        values: dict[str, Tensor] = {}
        for op in operations:
            values[op.output] = apply(op, _own_rows(op, values, state), state)
            for name in set(op.inputs).difference(names):
                if last_use[name] is op:
                    del values[name]
        return {name: values[name] for name in names}


def _own_rows(op: Op, values: dict[str, Tensor], state: TorchStepState) -> Mapping[str, Tensor]:
    """Return an operation's inputs, cut to this rank's rows unless the operation reads all rows."""
    num_rows, own_rows = len(state.tokens), state.own_rows
    if own_rows == slice(0, num_rows) or not isinstance(op, ops.LocalOp):
        return values
    inputs = {getattr(op, field): field in op.needs_all_rows for field in op.reads}
    return {
        name: x if reads_all or len(x) < num_rows else x[own_rows]
        for name, reads_all in inputs.items()
        for x in (values[name],)
    }


def choose_device(device: str, local_rank: int | None = None) -> str:
    """Resolve the name of a PyTorch device; "auto" is a GPU if PyTorch sees one.

    `local_rank`: the number of this rank on the machine, and of its GPU.

    Raises:
        BackendError: PyTorch does not have this device here.
    """
    has_gpu = torch.cuda.is_available()
    if local_rank is not None and device.startswith("cuda:"):
        raise BackendError("Each rank has a GPU of its own: set --device to cuda or cpu.")
    if local_rank is not None and has_gpu and device in {"auto", "cuda"}:
        device = f"cuda:{local_rank}"
    if device == "auto":
        return "cuda" if has_gpu else "cpu"
    count = torch.cuda.device_count() if has_gpu else 0
    names = ["cpu", *(["cuda"] if count else []), *(f"cuda:{index}" for index in range(count))]
    if device not in names:
        raise BackendError(f"PyTorch has no device '{device}' here. Devices: {', '.join(names)}.")
    return device
