"""Models in the compressed-tensors format, as LLM Compressor writes them.

A module has `weight_packed` int32 (outputs, words of inputs) with codes of 2 to 8 bits, `weight`
int8 or E4M3, or `weight_packed` uint8 with two E2M1 codes in a byte. It has `weight_scale` for the
matrix, each output, each group of inputs or each block. If it is not symmetric, it has
`weight_zero_point`, packed along the outputs if codes are packed. Packed integers are unsigned:
half of their range was added.

The `config_groups` of config.json describe the quantization schemes. The modules that they name as
targets are ignored: a module's tensors show its scheme, and one of the groups must have that
scheme.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from twostroke.core.frozen import Frozen
from twostroke.core.message_text import counted_noun
from twostroke.model.families.fields import MAX_WIDTH
from twostroke.model.quant.floats import E4M3, E8M0
from twostroke.model.weights.published.groups import (
    CodedMatrix,
    Scales,
    float32_scales,
    fp4_codes,
    fp8_matrix,
    scale_values,
)
from twostroke.model.weights.published.module import num_words, unpack_padded_words, unpack_words

if TYPE_CHECKING:
    from typing import Any

    from numpy.typing import NDArray

    from twostroke.model.families.fields import Fields
    from twostroke.model.quant import Bytes, QuantTensor
    from twostroke.model.weights.published.module import Module

_FORMATS = (
    "pack-quantized",
    "int-quantized",
    "float-quantized",
    "naive-quantized",
    "nvfp4-pack-quantized",
    "mxfp4-pack-quantized",
    "mxfp8-quantized",
    "mixed-precision",
    "dense",
)
_STRATEGIES = ("tensor", "channel", "group", "tensor_group", "block")
_BITS = {"int": range(2, 9), "float": (4, 8)}
_E8M0 = ("U8", "F8_E8M0")
_MAX_SIZE = 1 << 20  # at least the outputs or inputs of any matrix


class Scheme(Frozen):
    """One quantization scheme of a compressed-tensors model.

    Codes are `kind` ("int" or "float") of `bits` bits. A block of `size` (outputs, inputs) weights
    shares a scale.
    """

    kind: str
    bits: int
    size: tuple[int, int]

    def scale_shape(self, outputs: int, inputs: int) -> tuple[int, int]:
        """Return the shape of a matrix's scales: (blocks along outputs, blocks along inputs)."""
        return -(-outputs // self.size[0]), -(-inputs // self.size[1])


class CompressedLayout(Frozen):
    """How compressed-tensors models store a quantized matrix, by the schemes in config.json."""

    schemes: tuple[Scheme, ...]

    parts = (
        "weight_packed",
        "weight_scale",
        "weight_zero_point",
        "weight_shape",
        "weight_global_scale",
        "weight_g_idx",
    )

    def read(self, module: Module) -> CodedMatrix | QuantTensor:
        """Return the matrix of a quantized module.

        Raises ModelFormatError if the module's tensors contradict each other.
        """
        match module.dtype("weight_packed"), module.dtype("weight"):
            case "I32", None:
                return self._packed(module)
            case "U8", None:
                return self._fp4(module)
            case None, "I8":
                return self._int8(module)
            case None, "F8_E4M3":
                return self._fp8(module)
            case None, None:
                raise module.lacks("weight_packed")
        part = "weight" if module.has("weight") else "weight_packed"
        raise module.fault(part, f"has the type {module.dtype(part)}, which is not supported")

    def _packed(self, module: Module) -> CodedMatrix:
        words = module.array("weight_packed", ("I32",))
        shape = module.array("weight_shape", ("I64", "I32"), 1)
        if shape.size != 2 or shape.min() < 1 or shape.max() > MAX_WIDTH:
            raise module.fault("weight_shape", "is not a pair of outputs and inputs")
        outputs, inputs = map(int, shape)
        width = words.shape[1]
        widths = {
            bits: (num_words(inputs, bits), -(-inputs // (32 // bits))) for bits in _BITS["int"]
        }
        possible_bits = [
            s.bits for s in self.schemes if s.kind == "int" and width in widths[s.bits]
        ]
        if words.shape[0] != outputs or not possible_bits:
            raise module.fault(
                "weight_packed",
                f"has the shape {[*words.shape]}, which no group of its quantization_config has "
                f"for {outputs} x {counted_noun(inputs, 'value')}",
            )
        scheme = self._scheme(module, "int", possible_bits[0], (outputs, inputs))
        bits = scheme.bits
        # Older files put only complete codes in a word and leave its other bits unused.
        unpack = unpack_words if width == widths[bits][0] else unpack_padded_words
        zeros = None
        if module.has("weight_zero_point"):
            zeros = _zero_points(module, scheme, (outputs, inputs))
        return _coded_matrix(module, scheme, unpack(words, bits, inputs), zeros)

    def _int8(self, module: Module) -> CodedMatrix:
        values = module.array("weight", ("I8",))
        scheme = self._scheme(module, "int", 8, values.shape)
        zeros = None
        if module.has("weight_zero_point"):
            zeros = _zero_points(module, scheme, values.shape)
        return _coded_matrix(module, scheme, _unsigned(values, 8), zeros)

    def _fp4(self, module: Module) -> CodedMatrix:
        packed = module.array("weight_packed", ("U8",))
        shape = packed.shape[0], packed.shape[1] * 2
        scheme = self._scheme(module, "float", 4, shape)
        if module.has("weight_global_scale"):
            stored = module.e4m3_codes("weight_scale")
            scales = float32_scales(E4M3[stored] / module.scale("weight_global_scale"))
        else:
            scales = Scales("e8m0", module.array("weight_scale", _E8M0))
        return fp4_codes(packed, scales, scheme.size[1])

    def _fp8(self, module: Module) -> QuantTensor:
        codes = module.e4m3_codes("weight")
        scheme = self._scheme(module, "float", 8, codes.shape)
        if module.dtype("weight_scale") in _E8M0:
            scales = E8M0[module.array("weight_scale", _E8M0)]
        else:
            shape = scheme.scale_shape(*codes.shape)
            scales = scale_values(module.scales("weight_scale", shape))
        return fp8_matrix(codes, scales, scheme.size)

    def _scheme(self, module: Module, kind: str, bits: int, shape: tuple[int, ...]) -> Scheme:
        """Return the quantization scheme of config.json that agrees with a module's tensors.

        `kind` and `bits` describe the module's codes, and `shape` its scales.
        """
        outputs, inputs = shape
        schemes = [s for s in self.schemes if (s.kind, s.bits) == (kind, bits)]
        if not schemes:
            part = "weight" if module.has("weight") else "weight_packed"
            raise module.fault(
                part,
                f"has {kind} values of {bits} bits, which its quantization_config does not name",
            )
        scale_shape = module.shape("weight_scale")
        for scheme in schemes:
            expected = scheme.scale_shape(outputs, inputs)
            if scale_shape == expected or (expected[1] == 1 and scale_shape == expected[:1]):
                return scheme
        raise module.wrong_shape("weight_scale", schemes[0].scale_shape(outputs, inputs))


def compressed_layout(config: Fields) -> CompressedLayout:
    """Read the compressed-tensors settings of a config.json.

    Raises ModelFormatError for unsupported values.
    """
    _check_format(config)
    transforms = config.part("transform_config")
    if transforms is not None and transforms.values.get("config_groups"):
        config.fault("has a transform_config, whose rotations are not supported")
    groups = config.part("config_groups")
    if groups is None or not groups.values:
        config.fault("has no config_groups")
    schemes = []
    for name in groups.values:
        group = groups.part(name)
        weights = group.part("weights") if group is not None else None
        if group is None or weights is None:
            continue
        _check_format(group)
        schemes.append(_read_scheme(weights))
    return CompressedLayout(tuple(dict.fromkeys(schemes)))


def _check_format(config: Fields) -> None:
    if config.has("format") and config.text("format") not in _FORMATS:
        config.refuse("format", f"which is not supported; supported: {', '.join(_FORMATS)}")


def _read_scheme(weights: Fields) -> Scheme:
    kind = weights.text("type", default="int")
    bits = weights.integer("num_bits", 16, default=8)
    if bits not in _BITS.get(kind, ()):
        weights.fault(
            f"has weights of the type {kind[:40]!r} and {bits} bits, which is not supported"
        )
    strategy = weights.text("strategy", default="group" if weights.has("group_size") else "tensor")
    if strategy not in _STRATEGIES:
        weights.refuse("strategy", f"which is not supported; supported: {', '.join(_STRATEGIES)}")
    match strategy:
        case "tensor":
            size = _MAX_SIZE, _MAX_SIZE
        case "channel":
            size = 1, _MAX_SIZE
        case "block":
            size = block_size(weights, "block_structure")
        case _:
            size = 1, weights.integer("group_size", _MAX_SIZE)
    return Scheme(kind, bits, size)


def block_size(fields: Fields, key: str) -> tuple[int, int]:
    """Return the two sizes of a quantization block: [128, 128] or "128x128" in a config.json."""
    value = fields.value(key)
    if isinstance(value, str):
        value = [int(part) if part.isdecimal() else part for part in value[:20].split("x")]
    sizes = value if isinstance(value, list) and len(value) == 2 else [0, 0]
    if not all(type(size) is int and 0 < size <= _MAX_SIZE for size in sizes):
        fields.refuse(key, "not two sizes of a block")
    return sizes[0], sizes[1]


def _coded_matrix(module: Module, scheme: Scheme, codes: Bytes, zeros: Bytes | None) -> CodedMatrix:
    outputs, inputs = codes.shape
    shape = scheme.scale_shape(outputs, inputs)
    scales = module.scales("weight_scale", shape)
    if 1 < shape[0] < outputs:
        rows = np.arange(outputs) // scheme.size[0]
        scales = Scales(scales.kind, scales.raw[rows])
        zeros = None if zeros is None else zeros[rows]
    groups = np.arange(inputs) // scheme.size[1]
    if module.has("weight_g_idx"):
        stored = module.array("weight_g_idx", ("I32",), 1)
        if stored.size != inputs or stored.max() >= shape[1]:
            raise module.fault(
                "weight_g_idx",
                f"does not name one of {counted_noun(shape[1], 'group')} for each input",
            )
        if stored.min() >= 0:  # -1 means unset
            groups = stored
    return CodedMatrix(codes, scheme.bits, scales, zeros, groups)


def _zero_points(module: Module, scheme: Scheme, shape: tuple[int, ...]) -> Bytes:
    """Return a module's zero points as uint8 (rows, groups).

    In the file they are packed words, or bytes. `shape` is the shape of the scales.
    """
    part, (rows, columns) = "weight_zero_point", scheme.scale_shape(*shape)
    if module.dtype(part) == "I32":
        words = module.array(part, ("I32",))
        dense, padded = num_words(rows, scheme.bits), -(-rows // (32 // scheme.bits))
        if words.shape not in {(dense, columns), (padded, columns)}:
            raise module.wrong_shape(part, (dense, columns))
        unpack = unpack_words if words.shape[0] == dense else unpack_padded_words
        return unpack(words.T, scheme.bits, rows).T
    dimensions = len(module.shape(part))
    points = _unsigned(module.array(part, ("I8",), dimensions), scheme.bits)
    if points.size != rows * columns:
        raise module.wrong_shape(part, (rows, columns))
    return points.reshape(rows, columns)


def _unsigned(values: NDArray[Any], bits: int) -> Bytes:
    """Convert signed codes of `bits` bits (in int8) to uint8, by adding half of their range."""
    return values.view(np.uint8) + np.uint8(1 << (bits - 1))
