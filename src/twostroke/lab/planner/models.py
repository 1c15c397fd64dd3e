"""The model of a plan: its Program, and how many bytes its weights take."""

from __future__ import annotations

from math import prod
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Final

from msgspec.structs import replace

from twostroke.core import env
from twostroke.core.errors import ModelFormatError, UsageError, nearest
from twostroke.core.frozen import Frozen
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


_SIZES: Final = ("hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size")
_MXFP4_BITS: Final = 4.25  # a scale of 8 bits for 32 weights


class PlannedModel(Frozen):
    """A model as a plan sees it.

    `weight_bytes` has the size of each weight in memory; `stored` says how they are stored.
    `origin` is the model with its own weights, where these are others. `assumed` are the sizes that
    its configuration leaves out, so that they are those of transformers.
    """

    name: str
    program: Program
    weight_bytes: Mapping[str, int]
    stored: str
    arithmetic: str
    identity: str = ""  # of the weights, where they are here
    origin: PlannedModel | None = None
    assumed: tuple[str, ...] = ()

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
        """Return the model with its weights stored in another way, a key of `WEIGHTS`.

        Raises:
            UsageError: there is no such way.
        """
        if weights not in WEIGHTS:
            reason = f"must be one of {', '.join(WEIGHTS)}, got '{{value}}'."
            hint = nearest(weights, WEIGHTS)
            raise UsageError(f"{reason}{hint}", field="weights", value=weights)
        how = WEIGHTS[weights]
        stored = {
            name: int(prod(shape) * (how.bits if _is_quantized(name, shape) else 16) / 8)
            for name, shape in self.program.weight_shapes.items()
        }
        origin = self.origin or (self if self.weight_bytes else None)
        given = self.name, self.program, stored, weights, how.arithmetic
        return PlannedModel(*given, origin=origin, assumed=self.assumed)


def planned_model(model: str) -> PlannedModel:
    """Return the model called `model`, or that which a config.json (or its folder) describes.

    Weights have the size that the cpu backend packs them to, mostly that in the model's file. Where
    there is only a configuration, it says how matrices are quantized; in ways that plans do not
    know they have 16 bits. Of a model of the hub that is not here, headers alone are fetched.

    Raises:
        ModelNotFoundError, ModelFormatError: as `load`.
        DownloadError: the hub cannot be reached.
    """
    path = env.with_home(model)
    config = path / "config.json" if path.is_dir() else path
    is_whole = path.is_dir() and any(path.glob("*.safetensors"))
    if config.suffix == ".json" and config.is_file():
        name = config.parent.name if config.name == "config.json" else config.stem
        values = read_json(config)
        program = described_program(config.name, values, name)
        if program is None and not is_whole:
            program = build_program(hf_spec(hf_fields(config.name, values), name))
        if program is not None:
            return _configured(name, program, text_fields(config.name, values))
    remote = parse_hub_name(model)
    if remote is not None and find_record(remote) is None:
        return _from_hub(remote)
    from twostroke.model.load import load  # configurations need none of it

    loaded = load(model)
    return _of(loaded, loaded.name, weights_identity(loaded.tensors))


def _from_hub(name: HubName) -> PlannedModel:
    """Return a model of the hub, of which only headers are fetched."""
    with TemporaryDirectory(prefix="twostroke-") as folder:
        path = fetch_headers(name, Path(folder), _tables)
        if path.is_dir():
            values = read_json(path / "config.json")
            if (program := described_program("config.json", values, str(name))) is not None:
                own = str(name).removeprefix("hf:")
                return _configured(own, program, text_fields("config.json", values))
            fields = hf_fields("config.json", values)
            if published_layout(fields) is not None:
                raise ModelFormatError(
                    f"The weights of {name} are quantized in a way that headers do not show: fetch "
                    f"it with 'twostroke pull {name}'."
                )
        return _of(load_path(path, str(name)), str(name).removeprefix("hf:"), "")


def _configured(name: str, program: Program, fields: Fields) -> PlannedModel:
    """Return a model of which only the configuration is known."""
    assumed = tuple(key for key in _SIZES if not fields.has(key))
    model = PlannedModel(name, program, {}, "", "", assumed=assumed)
    quantization = fields.part("quantization_config")
    if quantization is None:
        return model.as_("bf16")
    method = quantization.text("quant_method")
    if method in {"fp8", "fbgemm_fp8"}:
        return model.as_("fp8")
    plain = model.as_("bf16")
    if method == "mxfp4":  # of the experts alone
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
        known = {4: "w4a16", 8: "int8"}
        bits = quantization.integer("bits", 16, default=4)
        if bits in known:
            return model.as_(known[bits])
    return replace(plain, stored=f"bf16 in place of {method}")


def _tables(path: Path, name: str) -> list[tuple[int, int]] | None:
    """Return where a GGUF file has numbers that its configuration needs; None if it is cut off."""
    try:
        header = read_header(path, name)
    except TruncatedError:
        return None
    entries = [one for one in header.entries if one.name in ROPE_TABLES]
    return [(one.start, one.num_bytes or 0) for one in entries]


def _of(loaded: LoadedModel, name: str, identity: str) -> PlannedModel:
    program = build_program(loaded.spec)
    sizes = {key: loaded.tensors[key].packed_bytes for key in program.weight_shapes}
    formats = sorted({tensor.format.name for tensor in loaded.tensors.values()})
    return PlannedModel(name, program, sizes, ", ".join(formats), "bf16", identity)


def _is_quantized(name: str, shape: tuple[int, ...]) -> bool:
    return name.startswith("blk.") and len(shape) > 1
