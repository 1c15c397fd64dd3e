"""Models of plans: their Programs, and the bytes of their weights."""

from __future__ import annotations

from math import prod
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Final

from msgspec.structs import replace

from twostroke.core import env
from twostroke.core.errors import ModelFormatError
from twostroke.core.frozen import Frozen, check_choice
from twostroke.core.json_io import read_json
from twostroke.lab.planner.described import described_program
from twostroke.model.families import build_program
from twostroke.model.families.rope import ROPE_TABLES
from twostroke.model.hub.hub_headers import fetch_headers
from twostroke.model.hub.inventory import find_record
from twostroke.model.hub.names import parse_hub_name
from twostroke.model.program.cost import WEIGHTS
from twostroke.model.program.ops import MixtureOfExperts
from twostroke.model.weights import load_path, weights_identity
from twostroke.model.weights.gguf import TruncatedError, read_header
from twostroke.model.weights.hf_model import hf_fields, hf_spec, text_fields
from twostroke.model.weights.published import published_layout

if TYPE_CHECKING:
    from collections.abc import Mapping

    from twostroke.model.families.fields import Fields
    from twostroke.model.hub.names import HubName
    from twostroke.model.program import Program
    from twostroke.model.weights import LoadedModel


_SIZE_FIELDS: Final = (
    "hidden_size",
    "num_hidden_layers",
    "num_attention_heads",
    "intermediate_size",
)
_MXFP4_BITS: Final = 4.25  # a scale of 8 bits for 32 weights


class PlannedModel(Frozen):
    """A model as plans see it: its operations and the sizes of its weights, without weights.

    Attributes:
        name: its name in plans.
        program: its operations.
        weight_bytes: bytes of each weight in memory, by name.
        stored: the weights' number formats, as text.
        arithmetic: the arithmetic of its products, a key of `Device.peaks`.
        identity: identifies weights that are on this machine; otherwise empty.
        origin: if `weight_bytes` are of other formats than the file's, the model with the file's
            weights.
        assumed: configuration fields that are missing, so that transformers' defaults are used.
    """

    name: str
    program: Program
    weight_bytes: Mapping[str, int]
    stored: str
    arithmetic: str
    identity: str = ""
    origin: PlannedModel | None = None
    assumed: tuple[str, ...] = ()

    @property
    def num_weights(self) -> int:
        """The number of the model's weights, with all experts."""
        return sum(map(prod, self.program.weight_shapes.values()))

    @property
    def all_bytes(self) -> int:
        """The bytes of all weights of the model."""
        return sum(self.weight_bytes.values())

    @property
    def hidden_size(self) -> int:
        """The width of the planned model's hidden states between layers."""
        return self.program.value_widths[self.program.layer_outputs[-1]]

    def with_weights(self, weights: str) -> PlannedModel:
        """Return the model with its weights in another format, a key of `WEIGHTS`.

        Raises:
            UsageError: `WEIGHTS` has no such format.
        """
        check_choice("weights", weights, WEIGHTS)
        weight_type = WEIGHTS[weights]
        weight_bytes = {
            name: int(prod(shape) * (weight_type.bits if _is_quantized(name, shape) else 16) / 8)
            for name, shape in self.program.weight_shapes.items()
        }
        return PlannedModel(
            self.name,
            self.program,
            weight_bytes=weight_bytes,
            stored=weights,
            arithmetic=weight_type.arithmetic,
            origin=self.origin or (self if self.weight_bytes else None),
            assumed=self.assumed,
        )


def load_planned_model(model: str) -> PlannedModel:
    """Return the model with a name or path for plans; a config.json or its folder is enough.

    Weights have the size to which the cpu backend packs them; mostly this is their size in the
    file. If there is only a configuration, it says how matrices are quantized; for an unknown
    quantization, 16 bits are assumed. If a model is on the hub and not on this machine, only its
    headers are fetched.

    Raises:
        ModelNotFoundError, ModelFormatError: the model does not exist, or its files are damaged.
        DownloadError: the hub cannot be reached.
    """
    path = env.expand_home(model)
    config = path / "config.json" if path.is_dir() else path
    has_weights = path.is_dir() and any(path.glob("*.safetensors"))
    if config.suffix == ".json" and config.is_file():
        name = config.parent.name if config.name == "config.json" else config.stem
        values = read_json(config)
        program = described_program(config.name, values, name)
        if program is None and not has_weights:
            program = build_program(hf_spec(hf_fields(config.name, values), name))
        if program is not None:
            return _model_of_configuration(name, program, text_fields(config.name, values))
    hub_name = parse_hub_name(model)
    if hub_name is not None and find_record(hub_name) is None:
        return planned_hub_model(hub_name)
    from twostroke.model.loader import load  # not needed for configurations

    loaded = load(model)
    return _model_of_weights(loaded, loaded.name, weights_identity(loaded.tensors))


def planned_hub_model(name: HubName) -> PlannedModel:
    """Return a model of the Hugging Face hub for plans; only its headers are fetched.

    Raises the errors of `load_planned_model`.
    """
    with TemporaryDirectory(prefix="twostroke-") as folder:
        path = fetch_headers(name, Path(folder), _rope_table_ranges)
        if path.is_dir():
            values = read_json(path / "config.json")
            if (program := described_program("config.json", values, str(name))) is not None:
                model_name = str(name).removeprefix("hf:")
                return _model_of_configuration(
                    model_name, program, text_fields("config.json", values)
                )
            fields = hf_fields("config.json", values)
            if published_layout(fields) is not None:
                raise ModelFormatError(
                    f"The weights of {name} are quantized in a way that headers do not show: fetch "
                    f"it with 'twostroke pull {name}'."
                )
        return _model_of_weights(load_path(path, str(name)), str(name).removeprefix("hf:"), "")


def _model_of_configuration(name: str, program: Program, fields: Fields) -> PlannedModel:
    """Return a model for plans from its configuration alone, without weights."""
    assumed = tuple(key for key in _SIZE_FIELDS if not fields.has(key))
    model = PlannedModel(name, program, {}, "", "", assumed=assumed)
    quantization = fields.part("quantization_config")
    if quantization is None:
        return model.with_weights("bf16")
    method = quantization.text("quant_method")
    if method in {"fp8", "fbgemm_fp8"}:
        return model.with_weights("fp8")
    plain = model.with_weights("bf16")
    if method == "mxfp4":  # only the experts are quantized
        experts = set[str]()
        for op in program.ops:
            if isinstance(op, MixtureOfExperts):
                experts |= {weight.name for weight in op.weights}
        sizes = {
            key: int(size * _MXFP4_BITS / 16) if key in experts else size
            for key, size in plain.weight_bytes.items()
        }
        return replace(plain, weight_bytes=sizes, stored="experts mxfp4, bf16")
    if method in {"gptq", "awq", "auto-round", "intel/auto-round"}:
        weights_by_bits = {4: "w4a16", 8: "int8"}
        bits = quantization.integer("bits", 16, default=4)
        if bits in weights_by_bits:
            return model.with_weights(weights_by_bits[bits])
    return replace(plain, stored=f"bf16 in place of {method}")


def _rope_table_ranges(path: Path, name: str) -> list[tuple[int, int]] | None:
    """Return the offset and size of each RoPE table in a GGUF file.

    Returns None if the file is cut off within its header.
    """
    try:
        header = read_header(path, name)
    except TruncatedError:
        return None
    tables = [entry for entry in header.entries if entry.name in ROPE_TABLES]
    return [(entry.start, entry.num_bytes or 0) for entry in tables]


def _model_of_weights(loaded: LoadedModel, name: str, identity: str) -> PlannedModel:
    program = build_program(loaded.spec)
    sizes = {key: loaded.tensors[key].packed_bytes for key in program.weight_shapes}
    formats = sorted({tensor.format.name for tensor in loaded.tensors.values()})
    return PlannedModel(
        name,
        program,
        weight_bytes=sizes,
        stored=", ".join(formats),
        arithmetic="bf16",
        identity=identity,
    )


def _is_quantized(name: str, shape: tuple[int, ...]) -> bool:
    return name.startswith("blk.") and len(shape) > 1
