"""Published quantized folders: values bit for bit, and one sentence for unsupported ones."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from msgspec.structs import replace

from support.published import (
    MATRIX_NAMES,
    awq,
    compressed_config,
    compressed_ints,
    fp4,
    fp8,
    gptq,
    mixed_modelopt,
    write_published,
)
from twostroke.backends.reference import ReferenceBackend
from twostroke.core.errors import ModelFormatError
from twostroke.model.families import build_program
from twostroke.model.quant import FORMATS, QuantTensor
from twostroke.model.weights import load_path
from twostroke.model.weights.model import weights_identity

if TYPE_CHECKING:
    from pathlib import Path

    from support.published import MakeModule


def gptq_config(bits: int, group: int, **other_fields: Any) -> dict[str, Any]:
    return {"quant_method": "gptq", "bits": bits, "group_size": group, **other_fields}


def int_config(kind: str, bits: int, group: int | None, symmetric: bool) -> dict[str, Any]:
    strategy = {"strategy": "group", "group_size": group} if group else {"strategy": "channel"}
    return compressed_config(kind, num_bits=bits, type="int", symmetric=symmetric, **strategy)


def float_config(kind: str, bits: int, **strategy: Any) -> dict[str, Any]:
    return compressed_config(kind, num_bits=bits, type="float", symmetric=True, **strategy)


CASES: list[tuple[str, MakeModule, dict[str, Any]]] = [
    *[(f"gptq{b}", gptq(b, 32), gptq_config(b, 32)) for b in (2, 3, 4, 5, 8)],
    ("gptq-row", gptq(4, 1 << 20), gptq_config(4, -1)),
    ("gptq-partial", gptq(4, 96), gptq_config(4, 96)),
    ("gptq_v2", gptq(4, 32, version=2), gptq_config(4, 32, checkpoint_format="gptq_v2")),
    (
        "auto-round",
        gptq(4, 32, version=2),
        {"quant_method": "auto-round", "bits": 4, "group_size": 32, "packing_format": "auto_round"},
    ),
    ("awq", awq(64), {"quant_method": "awq", "bits": 4, "group_size": 64, "zero_point": True}),
    *[
        (
            f"pack{bits}-{group}-{symmetric}",
            compressed_ints(bits, group, symmetric=symmetric, packed=True),
            int_config("pack-quantized", bits, group, symmetric),
        )
        for bits in (3, 4, 8)
        for group in (64, None)
        for symmetric in (True, False)
    ],
    *[
        (
            f"w8a8-{symmetric}",
            compressed_ints(8, None, symmetric=symmetric, packed=False),
            int_config("int-quantized", 8, None, symmetric),
        )
        for symmetric in (True, False)
    ],
    ("fp8-tensor", fp8(None, None), float_config("float-quantized", 8, strategy="tensor")),
    ("fp8-channel", fp8(1, None), float_config("naive-quantized", 8, strategy="channel")),
    (
        "fp8-block",
        fp8(96, 96),
        float_config("float-quantized", 8, strategy="block", block_structure=[96, 96]),
    ),
    (
        "fine-grained",
        fp8(128, 128, "weight_scale_inv"),
        {"quant_method": "fp8", "weight_block_size": [128, 128]},
    ),
    ("fbgemm", fp8(1, None), {"quant_method": "fbgemm_fp8"}),
    (
        "nvfp4",
        fp4("nvfp4"),
        float_config("nvfp4-pack-quantized", 4, strategy="tensor_group", group_size=16),
    ),
    ("modelopt-fp8", fp8(None, None), {"quant_algo": "FP8"}),
    ("modelopt-nvfp4", fp4("modelopt"), {"quant_method": "modelopt", "quant_algo": "NVFP4"}),
    (
        "modelopt-mixed",
        mixed_modelopt(),
        {
            "quant_method": "modelopt",
            "quant_algo": "MIXED_PRECISION",
            "quantized_layers": {
                "model.layers.0.mlp.up_proj": {"quant_algo": "W4A16_NVFP4", "group_size": 16},
                "model.layers.0.mlp.down_proj": {"quant_algo": "FP8"},
            },
        },
    ),
    (
        "mxfp4",
        fp4("mxfp4"),
        float_config("mxfp4-pack-quantized", 4, strategy="group", group_size=32),
    ),
]


@pytest.mark.parametrize(
    ("make", "config"), [case[1:] for case in CASES], ids=[case[0] for case in CASES]
)
def test_every_layout_loads_bit_for_bit(
    tmp_path: Path, make: MakeModule, config: dict[str, Any]
) -> None:
    values = write_published(tmp_path, make, config)
    tensors = load_path(tmp_path).tensors
    for module, expected in values.items():
        name = f"blk.0.{MATRIX_NAMES[module.rpartition('.')[2]]}.weight"
        assert np.array_equal(tensors[name].dequantize(), expected), module


def test_act_order_keeps_the_answer(tmp_path: Path) -> None:
    """The rows of gate and up follow the column order of down; other matrices keep their order."""
    make, config = gptq(4, 32, act_order=True), gptq_config(4, 32, desc_act=True)
    values = write_published(tmp_path, make, config)
    model = load_path(tmp_path)
    assert model.tensors["blk.0.ffn_down.weight"].format.block_size == 32
    assert model.tensors["blk.0.ffn_down.weight"].order is None
    assert model.tensors["blk.0.attn_q.weight"].format.block_size == 32
    assert model.tensors["blk.0.attn_q.weight"].order is not None
    name = "blk.0.attn_q.weight"
    turned = replace(model.tensors[name], order=model.tensors[name].order[::-1].copy())
    others = dict(model.tensors) | {name: turned}
    assert weights_identity(others) != weights_identity(model.tensors)
    plain = dict(model.tensors)
    for last in ("q_proj", "o_proj", "gate_proj", "up_proj", "down_proj"):
        module = next(name for name in values if name.endswith(last))
        name = f"blk.0.{MATRIX_NAMES[last]}.weight"
        plain[name] = QuantTensor.from_floats(values[module], FORMATS["F32"])
    program, tokens = build_program(model.spec), list(range(40))
    scores = [
        ReferenceBackend(program, weights, num_pages=1, page_size=64).score(tokens)
        for weights in (model.tensors, plain)
    ]
    assert np.allclose(*scores, rtol=1e-4, atol=1e-4)


REFUSED: list[tuple[dict[str, Any] | None, str]] = [
    (None, r"parts of quantized weights, such as '.*', and config.json has no quantization_config"),
    ({"quant_method": "bitsandbytes"}, "'bitsandbytes', which is not supported; supported: gptq"),
    (gptq_config(4, 32, checkpoint_format="marlin"), "supported: gptq, gptq_v2"),
    (gptq_config(8, 32), r"self_attn.q_proj.qweight' has not the shape of the 8 bits"),
    (gptq_config(4, 128), r"scales' has the shape \[4, 128\], .* asks for \[1, 128\]"),
    ({"quant_method": "awq", "version": "gemv"}, "supported: gemm"),
    ({"quant_method": "fp8"}, "has no quantized weights"),
    (
        {
            "quant_method": "modelopt",
            "quant_algo": "MIXED_PRECISION",
            "quantized_layers": {"lm_head": {"quant_algo": "W4A8_AWQ"}},
        },
        "lm_head' has quant_algo = 'W4A8_AWQ', which is not supported; supported: FP8, NVFP4",
    ),
    (int_config("marlin-24", 4, 32, symmetric=True), "supported: pack-quantized"),
]


@pytest.mark.parametrize(("config", "reason"), REFUSED)
def test_what_does_not_fit_is_refused_in_a_sentence(
    tmp_path: Path, config: dict[str, Any] | None, reason: str
) -> None:
    write_published(tmp_path, gptq(4, 32), config)
    with pytest.raises(ModelFormatError, match=reason) as caught:
        load_path(tmp_path)
    assert "\n" not in str(caught.value)


def test_a_tensor_that_is_missing_is_named(tmp_path: Path) -> None:
    write_published(tmp_path, gptq(4, 32), gptq_config(4, 32))
    path = tmp_path / "model.safetensors"
    raw = path.read_bytes()
    start = 8 + int.from_bytes(raw[:8], "little")
    header = json.loads(raw[8:start])
    name = "model.layers.0.mlp.up_proj.qzeros"
    header[name.replace("qzeros", "bias")] = header.pop(name)
    text = json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + raw[start:])
    with pytest.raises(ModelFormatError, match=f"lacks tensor '{name}'"):
        load_path(tmp_path)
