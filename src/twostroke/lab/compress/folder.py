"""Writes a model as a compressed-tensors folder, which vLLM and transformers load.

Source: the compressed-tensors repository, README and `compressors/pack_quantized`. Half of the
codes' range is added to codes, and they are stored in 32-bit words, lowest bits first. Each group
has a scale, and a zero point if codes have 4 bits.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import numpy as np

from twostroke.core.errors import ModelFormatError, TwostrokeError
from twostroke.core.files import require_disk_space, write_text
from twostroke.core.json_io import write_json
from twostroke.engine.canary import REPORT_FILE
from twostroke.lab.compress.equalize import ChannelEqualizer
from twostroke.lab.compress.grids import group_grid
from twostroke.lab.compress.hf_files import config_of, write_tokenizer
from twostroke.lab.compress.mixes import report_float_matrices
from twostroke.lab.compress.report import make_report
from twostroke.lab.compress.round import round_to
from twostroke.lab.compress.walk import round_products, with_progress
from twostroke.model.families import ARCHITECTURES, build_program
from twostroke.model.loader import load
from twostroke.model.program import ops
from twostroke.model.quant import FORMATS, QuantTensor, grouped
from twostroke.model.quant.format import pack_planes
from twostroke.model.quant.grouped import SCALE_BYTES
from twostroke.model.weights.safetensors import write_safetensors
from twostroke.model.weights.tensor_names import published_name
from twostroke.model.weights.tensors import StoredArray

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from pathlib import Path

    from twostroke.lab.compress.choose import CalibrationText
    from twostroke.lab.compress.report import FileReport
    from twostroke.lab.compress.round import Moments
    from twostroke.model.quant import Floats
    from twostroke.model.weights import LoadedModel

    Notice = Callable[[str], None]

FOLDER_TARGETS: Final = {"w4a16": 4, "w8a16": 8}  # bits
_GROUP_SIZES: Final = (128, 64, 32)  # that vLLM's kernels support
_CODES_PER_WORD: Final = 8  # of 4 bits


def write_folder(
    source: LoadedModel, target: str, part: Path, calibration: CalibrationText, notice: Notice
) -> FileReport:
    """Quantize a model, and write it as a folder in the compressed-tensors format.

    The folder is `part`, and `target` is one of FOLDER_TARGETS. Returns the quality report, which
    is written to the folder.

    Raises:
        TwostrokeError: the model's family cannot be written.
        QualityError: the written model writes garbage.
    """
    config = config_of(source)
    names = published_names(source)
    write_tokenizer(source, part)
    program = build_program(source.spec)
    products = [op.weight for op in program.ops if isinstance(op, ops.Linear)]
    widths = {key: source.tensors[key].shape[-1] for key in products}
    floats = {key: width for key, width in widths.items() if width % _GROUP_SIZES[-1]}
    report_float_matrices(floats, len(products), f"{_GROUP_SIZES[-1]} values", notice)
    products = [key for key in products if key not in floats]
    group = next(size for size in _GROUP_SIZES if not any(widths[key] % size for key in products))
    dtype = "F16" if config.get("torch_dtype", config.get("dtype")) == "float16" else "BF16"
    bits = FOLDER_TARGETS[target]
    fmt = grouped(bits, group, dtype.lower(), zero=bits == 4)
    grid = group_grid(bits, group, dtype)

    def round_weight(_: str, weight: Floats, moments: Moments) -> QuantTensor:
        return round_to(weight, moments, grid, fmt)

    tensors = {
        key: QuantTensor.from_floats(tensor.dequantize(), FORMATS[dtype])
        for key, tensor in source.tensors.items()
    }
    sizes = [
        (fmt if key in products else FORMATS[dtype]).num_bytes(tensor.num_values)
        for key, tensor in tensors.items()
    ]
    require_disk_space(part, sum(sizes))
    pieces = calibration.pieces
    store = calibration.saved_work.matrices(tensors, f"{fmt.name} evened", pieces)
    equalizer = ChannelEqualizer(program, round_weight, store)
    matrices = round_products(
        program,
        tensors,
        names=products,
        pieces=pieces,
        round_weight=round_weight,
        load_rounded=lambda name: store.get(name, tensors[name].shape, fmt),
        equalizer=equalizer,
    )
    tensors |= store.all_of(with_progress(matrices, len(products), notice)) | equalizer.changed
    tensors = {key: undo_rope_order(source, key, tensor) for key, tensor in tensors.items()}
    stored: dict[str, QuantTensor | StoredArray] = {}
    for key, tensor in tensors.items():
        stored |= (
            _stored_parts(names[key], tensor, dtype) if key in products else {names[key]: tensor}
        )
    write_safetensors(part / "model.safetensors", stored)
    config |= {"quantization_config": _quantization(bits, group, [names[key] for key in floats])}
    config.pop("dtype", None)  # the newer name has precedence over torch_dtype
    config["torch_dtype"] = "float16" if dtype == "F16" else "bfloat16"
    write_json(part / "config.json", config)
    _check(part, tensors)
    notice("Scoring the written folder on held-out text")
    report = make_report(source, part, target, calibration.facts)
    write_text(part / REPORT_FILE, report.encode())
    load(str(part))
    return report


def published_names(source: LoadedModel) -> dict[str, str]:
    """Return the name of each tensor in Hugging Face folders of the model's family.

    Raises:
        TwostrokeError: the model has stacked weights.
    """
    family = ARCHITECTURES[source.spec.architecture]
    spec = source.spec
    if family.fused or spec.experts is not None or spec.attends is not None:
        raise TwostrokeError(f"{source.name} has stacked weights, which cannot be quantized yet.")
    return {key: published_name(key, family.layer_names) for key in source.tensors}


def undo_rope_order(source: LoadedModel, key: str, tensor: QuantTensor) -> QuantTensor:
    """Undo the row order that GGUF files give the matrices of queries and keys.

    GGUF files order rows so that RoPE rotates adjacent rows. A folder's matrices stay as they are.
    """
    kind = key.split(".")[-2]
    is_reordered = source.spec.rope.interleaved and source.path.suffix == ".gguf"
    if not is_reordered or kind not in {"attn_q", "attn_k"}:
        return tensor
    pairs = source.spec.head_dim // 2
    rows = tensor.data.reshape(-1, pairs, 2, tensor.num_bytes // tensor.shape[0])
    data = rows.swapaxes(1, 2).reshape(tensor.data.shape)
    return QuantTensor(tensor.format, tensor.shape, np.ascontiguousarray(data))


def _stored_parts(
    name: str, tensor: QuantTensor, dtype: str
) -> dict[str, QuantTensor | StoredArray]:
    """Return the tensors by which compressed-tensors folders store a quantized matrix, by name."""
    module = name.removesuffix(".weight")
    rows = tensor.shape[0]
    blocks = tensor.data.reshape(rows, -1, tensor.format.block_bytes)
    size = SCALE_BYTES[dtype.lower()]
    scales = np.ascontiguousarray(blocks[:, :, :size]).reshape(rows, -1)
    has_zeros = tensor.format.name.endswith("_Z")
    words = np.ascontiguousarray(blocks[:, :, size + has_zeros :]).reshape(rows, -1).view(np.int32)
    parts: dict[str, QuantTensor | StoredArray] = {
        f"{module}.weight_packed": StoredArray("I32", words),
        f"{module}.weight_scale": QuantTensor(FORMATS[dtype], (rows, blocks.shape[1]), scales),
        f"{module}.weight_shape": StoredArray("I64", np.array(tensor.shape, np.int64)),
    }
    if has_zeros:
        points = np.pad(blocks[:, :, size].T, ((0, 0), (0, -rows % _CODES_PER_WORD)))
        words = pack_planes(points, 4, run=1).view(np.int32).T  # along the outputs
        parts[f"{module}.weight_zero_point"] = StoredArray("I32", np.ascontiguousarray(words))
    return parts


def _quantization(bits: int, group: int, float_weights: list[str]) -> dict[str, Any]:
    """Return the `quantization_config` of a compressed-tensors folder.

    `float_weights` are the matrices that stay in floats.
    """
    weights = {
        "num_bits": bits,
        "type": "int",
        "symmetric": bits == 8,
        "strategy": "group",
        "group_size": group,
        "dynamic": False,
    }
    scheme = {"targets": ["Linear"], "weights": weights}
    return {
        "quant_method": "compressed-tensors",
        "format": "pack-quantized",
        "quantization_status": "compressed",
        "config_groups": {"group_0": {**scheme, "input_activations": None}},
        "ignore": ["lm_head", *(name.removesuffix(".weight") for name in float_weights)],
        "kv_cache_scheme": None,
    }


def _check(folder: Path, tensors: Mapping[str, QuantTensor]) -> None:
    """Check that the tensors read from the written folder equal `tensors`, bit for bit."""
    read = load(str(folder)).tensors
    for key, tensor in tensors.items():
        if key not in read or not np.array_equal(read[key].dequantize(), tensor.dequantize()):
            raise ModelFormatError(f"{key} of the written folder differs from the rounded matrix.")
