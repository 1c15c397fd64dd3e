"""The model of a plan: its Program, and how many bytes its weights take."""

from __future__ import annotations

from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Final

from twostroke.core.files import read_json
from twostroke.core.frozen import Frozen
from twostroke.engine.loading import load
from twostroke.models import build_program
from twostroke.weights import weights_identity
from twostroke.weights.hf_model import hf_fields, hf_spec

if TYPE_CHECKING:
    from collections.abc import Mapping

    from twostroke.program import Program


class StoredAs(Frozen):
    """How matrices of layers are stored: bits for each weight, and the arithmetic on them.

    Other weights have 16 bits.
    """

    bits: float
    arithmetic: str


_GROUP: Final = 128  # weights that share a float16 scale
WEIGHTS: Final = {
    "bf16": StoredAs(16, "bf16"),
    "fp8": StoredAs(8, "fp8"),
    "int8": StoredAs(8, "int8"),
    "w4a16": StoredAs(4 + 16 / _GROUP, "bf16"),
    "nvfp4": StoredAs(4.5, "fp4"),  # a scale of 8 bits for 16 weights
}


class PlannedModel(Frozen):
    """A model as a plan sees it.

    `weight_bytes` has the stored size of each weight; `stored` says how they are stored.
    """

    name: str
    program: Program
    weight_bytes: Mapping[str, int]
    stored: str
    arithmetic: str
    identity: str = ""  # of the weights, where they are here

    @property
    def num_weights(self) -> int:
        """How many weights there are, those of all experts included."""
        return sum(map(prod, self.program.weight_shapes.values()))

    @property
    def all_bytes(self) -> int:
        """The bytes of all weights."""
        return sum(self.weight_bytes.values())

    @property
    def hidden_size(self) -> int:
        """Values that a token has between layers."""
        return self.program.value_widths[self.program.layer_outputs[-1]]

    def as_(self, weights: str) -> PlannedModel:
        """Return the model with its weights stored in another way, a key of `WEIGHTS`."""
        how = WEIGHTS[weights]
        stored = {
            name: int(prod(shape) * (how.bits if _is_quantized(name, shape) else 16) / 8)
            for name, shape in self.program.weight_shapes.items()
        }
        return PlannedModel(self.name, self.program, stored, weights, how.arithmetic)


def planned_model(model: str) -> PlannedModel:
    """Return the model called `model`, or that which a config.json (or its folder) describes.

    Weights have the size that they have in the model's file, and 16 bits where there is only a
    configuration.

    Raises:
        ModelNotFoundError, ModelFormatError: as `load`.
    """
    path = Path(model).expanduser()
    config = path / "config.json" if path.is_dir() else path
    is_whole = path.is_dir() and any(path.glob("*.safetensors"))
    if config.suffix == ".json" and config.is_file() and not is_whole:
        name = config.parent.name if config.name == "config.json" else config.stem
        spec = hf_spec(hf_fields(config.name, read_json(config)), name)
        return PlannedModel(name, build_program(spec), {}, "", "").as_("bf16")
    loaded = load(model)
    program = build_program(loaded.spec)
    sizes = {name: loaded.tensors[name].num_bytes for name in program.weight_shapes}
    formats = sorted({tensor.format.name for tensor in loaded.tensors.values()})
    identity = weights_identity(loaded.tensors)
    return PlannedModel(loaded.name, program, sizes, ", ".join(formats), "bf16", identity)


def _is_quantized(name: str, shape: tuple[int, ...]) -> bool:
    return name.startswith("blk.") and len(shape) > 1
