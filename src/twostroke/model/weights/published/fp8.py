"""Models with E4M3 matrices and float scales: `fp8`, `fbgemm_fp8`, and NVIDIA's `modelopt`.

A module has `weight` E4M3 and either `weight_scale_inv`, a scale for each block of 128 x 128 (or of
`weight_block_size`), or `weight_scale` for the matrix or for each output. Despite its name,
`weight_scale_inv` is multiplied.

`modelopt` also has NVFP4: `weight` uint8 with two E2M1 codes in a byte, `weight_scale` E4M3 for
each 16 inputs, and one `weight_scale_2` for the matrix. A model may have both formats; then
`quantized_layers` lists the modules. The tensors of a module show its format.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from twostroke.core.frozen import Frozen
from twostroke.model.families.fields import Fields
from twostroke.model.quant.floats import E4M3
from twostroke.model.weights.published.compressed import block_size
from twostroke.model.weights.published.groups import (
    float32_scales,
    fp4_codes,
    fp8_matrix,
    scale_values,
)

if TYPE_CHECKING:
    from twostroke.model.quant import QuantTensor
    from twostroke.model.weights.published.groups import CodedMatrix
    from twostroke.model.weights.published.module import Module

_NVFP4_GROUP = 16
_ALGORITHMS = ("FP8", "NVFP4", "W4A16_NVFP4")
_SEVERAL = "MIXED_PRECISION"  # each module has one of the algorithms


class Fp8Layout(Frozen):
    """How FP8 models store a quantized matrix; a block of `block` weights shares a scale.

    `block` is (outputs, inputs); None if each output, or the whole matrix, has one scale.
    """

    block: tuple[int, int] | None

    parts = ("weight_scale", "weight_scale_inv", "weight_scale_2")

    def read(self, module: Module) -> CodedMatrix | QuantTensor:
        """Return the matrix of an FP8 module.

        Raises ModelFormatError if the module's tensors contradict each other.
        """
        if module.has("weight_scale_2") and module.dtype("weight") == "U8":
            return _nvfp4(module)
        codes = module.e4m3_codes("weight")
        outputs, inputs = codes.shape
        part = "weight_scale_inv" if module.has("weight_scale_inv") else "weight_scale"
        has_one_scale = module.shape(part) in {(1,), (1, 1)}
        size = (outputs, inputs) if has_one_scale else self.block or (1, inputs)
        shape = -(-outputs // size[0]), -(-inputs // size[1])
        return fp8_matrix(codes, scale_values(module.scales(part, shape)), size)


def fp8_layout(config: Fields) -> Fp8Layout:
    """Read the `fp8` or `fbgemm_fp8` settings of a config.json."""
    has_blocks = config.has("weight_block_size")
    return Fp8Layout(block_size(config, "weight_block_size") if has_blocks else None)


def modelopt_layout(config: Fields) -> Fp8Layout:
    """Read NVIDIA's `modelopt` settings of a config.json.

    Raises ModelFormatError for unsupported values.
    """
    if config.text("quant_algo") != _SEVERAL:
        _check_algorithm(config)
        return Fp8Layout(None)
    modules = config.part("quantized_layers") or Fields(config.name, {})
    for name in modules.values:
        _check_algorithm(modules.part(name) or config)
    return Fp8Layout(None)


def _check_algorithm(module: Fields) -> None:
    """Refuse a module, or a folder, with an unsupported algorithm."""
    if module.text("quant_algo") not in _ALGORITHMS:
        supported = f"which is not supported; supported: {', '.join(_ALGORITHMS)}"
        module.refuse("quant_algo", supported)


def _nvfp4(module: Module) -> CodedMatrix:
    packed = module.array("weight", ("U8",))
    shape = packed.shape[0], packed.shape[1] * 2 // _NVFP4_GROUP
    stored = module.e4m3_codes("weight_scale")
    if stored.shape != shape:
        raise module.wrong_shape("weight_scale", shape)
    scales = float32_scales(E4M3[stored] * module.scale("weight_scale_2"))
    return fp4_codes(packed, scales, _NVFP4_GROUP)
