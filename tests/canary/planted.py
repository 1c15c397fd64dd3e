"""Faults planted in a loaded Llama model with Q4_1 matrices, like faults of readers and writers."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import numpy as np
from msgspec.structs import replace

from twostroke.model.program import Activation
from twostroke.model.quant import FORMATS, QuantTensor

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from twostroke.model.weights import LoadedModel

    Fault = Callable[[LoadedModel], LoadedModel]
    Array = np.ndarray[Any, Any]

_BLOCK_BYTES = 20  # of Q4_1: two float16, scale and minimum, and 32 codes


def _changed(part: str, change: Callable[[QuantTensor], QuantTensor]) -> Fault:
    """Return a fault that changes each tensor whose name contains `part`."""

    def plant(loaded: LoadedModel) -> LoadedModel:
        return replace(
            loaded,
            tensors={
                name: change(tensor) if part in name else tensor
                for name, tensor in loaded.tensors.items()
            },
        )

    return plant


def _blocks(change: Callable[[Array], None], part: str = "blk.") -> Fault:
    """Return a fault in which `change` alters Q4_1 blocks, (rows, blocks, bytes), in place."""

    def changed(tensor: QuantTensor) -> QuantTensor:
        if tensor.format.name != "Q4_1":
            return tensor
        blocks = tensor.data.reshape(tensor.num_rows, -1, _BLOCK_BYTES).copy()
        change(blocks)
        return QuantTensor(tensor.format, tensor.shape, blocks.reshape(tensor.num_rows, -1))

    return _changed(part, changed)


def _values(part: str, change: Callable[[Array], Array]) -> Fault:
    def changed(tensor: QuantTensor) -> QuantTensor:
        values = np.ascontiguousarray(change(tensor.dequantize()), np.float32)
        return QuantTensor.from_floats(values, FORMATS["F32"])

    return _changed(part, changed)


def _get(blocks: Array, start: int) -> Array:
    return blocks[..., start : start + 2].copy().view(np.float16).astype(np.float32)


def _put(blocks: Array, start: int, values: Array) -> None:
    blocks[..., start : start + 2] = values.astype(np.float16).view(np.uint8)


def _minimum(shift: float, keep: float = 1.0) -> Fault:
    """Return a fault that shifts the minimum of each block by a number of steps of its scale."""
    return _blocks(lambda b: _put(b, 2, keep * _get(b, 2) + shift * _get(b, 0)))


def _swap_nibbles(blocks: Array) -> None:
    blocks[..., 4:] = blocks[..., 4:] << 4 | blocks[..., 4:] >> 4


def _neighbours(blocks: Array) -> None:
    codes = np.concatenate([blocks[..., 4:] & 15, blocks[..., 4:] >> 4], axis=-1)
    blocks[..., 4:] = codes[..., 0::2] | codes[..., 1::2] << 4


def _flip_signs(blocks: Array) -> None:
    blocks[..., 4:] ^= 0x88


def _bfloat16_scale(blocks: Array) -> None:
    bits = blocks[..., 0:2].copy().view(np.uint16).astype(np.uint32) << 16
    _put(blocks, 0, np.clip(bits.view(np.float32), -6e4, 6e4))


def _power_of_two_scale(blocks: Array) -> None:
    scale = _get(blocks, 0)
    size = np.maximum(np.abs(scale), 1e-7)
    _put(blocks, 0, np.copysign(np.exp2(np.floor(np.log2(size))), scale))


def _double(blocks: Array) -> None:
    for start in (0, 2):
        _put(blocks, start, 2 * _get(blocks, start))


def _next_group(first: int, end: int) -> Fault:
    def change(blocks: Array) -> None:
        blocks[..., first:end] = np.roll(blocks[..., first:end], 1, axis=-2)

    return _blocks(change)


def _one_byte_late(blocks: Array) -> None:
    blocks.reshape(-1)[:] = np.roll(blocks.reshape(-1), 1)


def _not_a_number(blocks: Array) -> None:
    blocks[0, 0, 0:2] = [0, 0x7E]


def _mixed_columns(values: Array) -> Array:
    return values[:, np.random.default_rng(0).permutation(values.shape[1])]


def _swapped(a: str, b: str) -> Fault:
    def plant(loaded: LoadedModel) -> LoadedModel:
        other = {
            name.replace(a, b) if a in name else name.replace(b, a): name for name in loaded.tensors
        }
        return replace(loaded, tensors={n: loaded.tensors[other[n]] for n in loaded.tensors})

    return plant


def _layers(order: Callable[[int], Iterable[int]]) -> Fault:
    """Return a fault that uses the file's layer `order(num_layers)[i]` as the model's layer i."""

    def plant(loaded: LoadedModel) -> LoadedModel:
        layer_order = list(order(loaded.spec.num_layers))
        tensors = {n: t for n, t in loaded.tensors.items() if not n.startswith("blk.")}
        for new, old in enumerate(layer_order):
            for name, tensor in loaded.tensors.items():
                if name.startswith(f"blk.{old}."):
                    tensors[name.replace(f"blk.{old}.", f"blk.{new}.")] = tensor
        return replace(
            loaded, tensors=tensors, spec=replace(loaded.spec, num_layers=len(layer_order))
        )

    return plant


def _spec(**fields: Any) -> Fault:
    return lambda loaded: replace(loaded, spec=replace(loaded.spec, **fields))


def _rope(factor: float, *, other_pairs: bool = False) -> Fault:
    def plant(loaded: LoadedModel) -> LoadedModel:
        rope = loaded.spec.rope
        pairs = rope.interleaved != other_pairs
        rope = replace(rope, base=rope.base * factor, interleaved=pairs)
        return replace(loaded, spec=replace(loaded.spec, rope=rope))

    return plant


def _half_a_file(loaded: LoadedModel) -> LoadedModel:
    for layer in range(loaded.spec.num_layers // 2, loaded.spec.num_layers):
        loaded = _values(f"blk.{layer}.", np.zeros_like)(loaded)
    return loaded


# Refused for what they write; these are the faults that take a copy of a file a few seconds.
GARBAGE: Final[dict[str, Fault]] = {
    "nibbles swapped": _blocks(_swap_nibbles),
    "halves of a block read as neighbours": _blocks(_neighbours),
    "zero point one too high": _minimum(1),
    "zero point one too low": _minimum(-1),
    "zero point always 8": _minimum(-8, keep=0),
    "zero point ignored": _minimum(0, keep=0),
    "sign bits of codes": _blocks(_flip_signs),
    "bfloat16 scale": _blocks(_bfloat16_scale),
    "E8M0 scale": _blocks(_power_of_two_scale),
    "scale doubled": _blocks(_double),
    "scales of the next group": _next_group(0, 4),
    "codes of the next group": _next_group(4, _BLOCK_BYTES),
    "one byte late": _blocks(_one_byte_late),
    "one scale not a number": _blocks(_not_a_number, "blk.3.ffn_up"),
    "wrong g_idx: down": _values("ffn_down.weight", _mixed_columns),
    "wrong g_idx: queries": _values("attn_q.weight", _mixed_columns),
    "wrong g_idx: attention's output": _values("attn_output.weight", _mixed_columns),
    "attention's output transposed": _values("attn_output.weight", lambda w: w.T),
    "gate transposed in its shape": _values("ffn_gate.weight", lambda w: w.T.reshape(w.shape)),
    "keys and values mixed up": _swapped("attn_k.", "attn_v."),
    "gate and up mixed up": _swapped("ffn_gate.", "ffn_up."),
    "heads of queries reversed": _values(
        "attn_q.weight", lambda w: w.reshape(9, 64, -1)[::-1].reshape(w.shape)
    ),
    "rows of values shifted": _values("attn_v.weight", lambda w: np.roll(w, 1, axis=0)),
    "rows of the embedding shifted": _values("token_embd", lambda w: np.roll(w, 1, axis=0)),
    "the first layer left out": _layers(lambda n: range(1, n)),
    "a third of the layers left out": _layers(lambda n: [*range(n // 3), *range(2 * n // 3, n)]),
    "layers one late": _layers(lambda n: [n - 1, *range(n - 1)]),
    "half a file": _half_a_file,
    "other pairs of values rotated": _rope(1, other_pairs=True),
    "all norms missing": _values("norm", np.ones_like),
    "norms of attention missing": _values("attn_norm", np.ones_like),
    "the last norm missing": _values("output_norm", np.ones_like),
    "one norm missing": _values("blk.3.attn_norm", np.ones_like),
}

# Plausible for a model of unknown quality; refused where a report says what it should be.
WORSE: Final[dict[str, Fault]] = {
    "rope base a tenth": _rope(0.1),
    "rope base tenfold": _rope(10),
    "rope base a hundredth": _rope(0.01),
    "a middle layer left out": _layers(lambda n: [i for i in range(n) if i != n // 2]),
    "the last layer left out": _layers(lambda n: range(n - 1)),
    "two layers swapped": _layers(
        lambda n: [*range(n // 2), n // 2 + 1, n // 2, *range(n // 2 + 2, n)]
    ),
    "one matrix zero": _values("blk.5.ffn_down.weight", np.zeros_like),
    "another epsilon": _spec(norm_epsilon=1e-2),
    "another activation": _spec(activation=Activation.GELU_TANH),
    "attention's scale doubled": _spec(attention_scale=0.25),
}
