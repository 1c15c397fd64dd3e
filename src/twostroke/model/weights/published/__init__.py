"""Reads quantized safetensors models (GPTQ, AWQ, ...): a module's tensors become one weight.

`quant_method` in config.json's `quantization_config` names the layout. A module (linear layer) is
quantized if it has the tensors of the layout. Scales and zero points of activations, keys and
values are left out: the backends quantize these in their own way.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol, TypeVar

from msgspec.structs import replace

from twostroke.core.errors import ModelFormatError
from twostroke.model.weights.published.awq import awq_layout
from twostroke.model.weights.published.compressed import compressed_layout
from twostroke.model.weights.published.fp8 import fp8_layout, modelopt_layout
from twostroke.model.weights.published.gptq import auto_round_layout, gptq_layout
from twostroke.model.weights.published.groups import CodedMatrix, assemble_groups, reorder_columns
from twostroke.model.weights.published.module import Module
from twostroke.model.weights.published.mxfp4 import Mxfp4Layout, mxfp4_layout

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from collections.abc import Set as AbstractSet
    from typing import Any

    from numpy.typing import NDArray

    from twostroke.model.families.fields import Fields
    from twostroke.model.quant import QuantTensor
    from twostroke.model.weights.tensors import WeightFiles

    T = TypeVar("T")


class QuantLayout(Protocol):
    """How a quantization tool (GPTQ, AWQ, ...) stores a quantized module in safetensors files.

    A module is one linear layer. It has several tensors, such as `qweight` and `scales`, from which
    `read` makes its matrix.
    """

    @property
    def parts(self) -> tuple[str, ...]:
        """Return the short names of tensors that only quantized modules have, such as `qweight`."""

    def read(self, module: Module) -> CodedMatrix | QuantTensor:
        """Return the matrix of a quantized module.

        Raises ModelFormatError if the module's tensors contradict each other.
        """


_LAYOUTS: dict[str, Callable[[Fields], QuantLayout | Mxfp4Layout]] = {
    "gptq": gptq_layout,
    "auto-round": auto_round_layout,
    "intel/auto-round": auto_round_layout,
    "awq": awq_layout,
    "compressed-tensors": compressed_layout,
    "fp8": fp8_layout,
    "fbgemm_fp8": fp8_layout,
    "modelopt": modelopt_layout,
    "mxfp4": mxfp4_layout,
}

# Scales and zero points of activations, keys and values; weight scales are parts of layouts.
_IGNORED_PARTS = frozenset(
    {
        "input_scale",
        "input_scale_ub",
        "input_zero_point",
        "input_global_scale",
        "output_scale",
        "output_zero_point",
        "k_scale",
        "v_scale",
        "q_scale",
        "activation_scale",
    }
)


def published_layout(config: Fields) -> QuantLayout | Mxfp4Layout | None:
    """Return the quantization layout that a config.json names; None if it names none.

    Raises ModelFormatError for an unsupported layout.
    """
    quantization = config.part("quantization_config")
    if quantization is None:
        return None
    # Early folders of ModelOpt name only the algorithm.
    default_method = {"default": "modelopt"} if quantization.has("quant_algo") else {}
    method = quantization.text("quant_method", **default_method)
    if method not in _LAYOUTS:
        quantization.refuse(
            "quant_method", f"which is not supported; supported: {', '.join(_LAYOUTS)}"
        )
    return _LAYOUTS[method](quantization)


def assemble_published(
    file: str, files: WeightFiles, layout: QuantLayout | Mxfp4Layout
) -> WeightFiles:
    """Replace the tensors of each quantized module by one tensor, `NAME.weight`.

    Raises ModelFormatError about `file` if the tensors of a module contradict each other or the
    configuration.
    """
    if isinstance(layout, Mxfp4Layout):
        return layout.assemble(file, files)
    modules = _modules(file, files, layout)
    if not modules:
        raise ModelFormatError(
            f"{file!r} has no quantized weights, which its quantization_config asks for."
        )
    used = {f"{name}.{part}" for name, module in modules.items() for part in module.parts}
    tensors = {
        name: tensor for name, tensor in files.tensors.items() if _is_other_tensor(name, used)
    }
    unsupported = {
        name: dtype for name, dtype in files.unsupported.items() if _is_other_tensor(name, used)
    }
    orders: dict[str, NDArray[Any]] = {}
    for name, module in modules.items():
        matrix = layout.read(module)
        if isinstance(matrix, CodedMatrix):
            assembled = assemble_groups(matrix)
            matrix = assembled.tensor
            if assembled.order is not None:
                orders[f"{name}.weight"] = assembled.order
        tensors[f"{name}.weight"] = matrix
    placed = reorder_columns(tensors, orders)
    return replace(files, tensors=placed, unsupported=unsupported, arrays={})


def _modules(file: str, files: WeightFiles, layout: QuantLayout) -> dict[str, Module]:
    """Return the quantized modules of a model folder by name.

    Modules are recognized by tensors such as `qweight`, or by the type of `weight`.
    """
    parts = (*layout.parts, "weight")

    def by_module(tensors_by_name: Mapping[str, T]) -> dict[str, dict[str, T]]:
        grouped: dict[str, dict[str, T]] = {}
        for name, tensor in tensors_by_name.items():
            module, _, part = name.rpartition(".")
            if part in parts:
                grouped.setdefault(module, {})[part] = tensor
        return grouped

    tensors, arrays = by_module(files.tensors), by_module(files.arrays)
    modules = [
        Module(file, name, tensors.get(name, {}), arrays.get(name, {}))
        for name in {**tensors, **arrays}
    ]
    return {
        module.name: module
        for module in modules
        if module.parts - {"weight"} or "weight" in module.arrays
    }


def _is_other_tensor(name: str, used: AbstractSet[str]) -> bool:
    """Return whether a folder's tensor must be kept beside the assembled matrices.

    Tensors of quantized modules and scales of activations, keys and values are not kept.
    """
    return name not in used and name.rpartition(".")[2] not in _IGNORED_PARTS
