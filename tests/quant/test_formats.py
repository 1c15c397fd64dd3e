"""Every format against the reference package's arithmetic, bit for bit."""

from __future__ import annotations

import numpy as np
import pytest

from twostroke.quant import FORMATS, FORMATS_BY_GGUF_ID, UNSUPPORTED_GGUF_TYPES, Format

gguf = pytest.importorskip("gguf", reason="the gguf package (test extra) is the second opinion")

ALL = list(FORMATS.values())
BLOCK_FORMATS = [fmt for fmt in ALL if fmt.block_size > 1]


def gguf_type(fmt: Format) -> gguf.GGMLQuantizationType:
    return gguf.GGMLQuantizationType[fmt.name]


def random_blocks(fmt: Format, seed: int, num_blocks: int = 4096) -> np.ndarray:
    rng = np.random.default_rng(seed)
    return rng.integers(0, 256, (num_blocks // 32, 32 * fmt.block_bytes), dtype=np.uint8)


def random_values(seed: int) -> np.ndarray:
    """Rows of many sizes, with zeros, ties, equal values, and outliers."""
    rng = np.random.default_rng(seed)
    values = rng.standard_normal((256, 128)) * 10.0 ** rng.uniform(-4, 3, (256, 1))
    values[3] = 0
    values[4] = 1.5
    values[5, ::7] = -40
    values[6] = np.arange(128) - 64
    values[7] = np.round(values[7])
    values[8, 0], values[8, 1] = 9, -9
    return values.astype(np.float32)


@pytest.mark.parametrize("fmt", ALL, ids=lambda fmt: fmt.name)
def test_layout_is_the_reference_layout(fmt: Format) -> None:
    kind = gguf_type(fmt)
    assert fmt.gguf_id == kind.value
    assert (fmt.block_size, fmt.block_bytes) == gguf.GGML_QUANT_SIZES[kind]
    assert FORMATS_BY_GGUF_ID[fmt.gguf_id] is fmt


def test_every_type_of_the_reference_is_known_by_name() -> None:
    known = UNSUPPORTED_GGUF_TYPES | {fmt.gguf_id: fmt.name for fmt in ALL}
    for kind in gguf.GGMLQuantizationType:
        assert known[kind.value] == kind.name
    assert not UNSUPPORTED_GGUF_TYPES.keys() & FORMATS_BY_GGUF_ID.keys()


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # infinite scales in random bytes
@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("fmt", ALL, ids=lambda fmt: fmt.name)
def test_dequantization_equals_the_reference_bit_for_bit(fmt: Format, seed: int) -> None:
    data = random_blocks(fmt, seed)
    ours = fmt.dequantize(data)
    theirs = gguf.dequantize(data, gguf_type(fmt))
    assert ours.dtype == np.float32
    nan = np.isnan(theirs)
    assert np.array_equal(np.isnan(ours), nan)
    assert np.array_equal(ours.view(np.uint32)[~nan], theirs.view(np.uint32)[~nan])


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("fmt", ALL, ids=lambda fmt: fmt.name)
def test_quantization_equals_the_reference_bit_for_bit(fmt: Format, seed: int) -> None:
    values = random_values(seed)
    ours = fmt.quantize(values)
    theirs = gguf.quantize(values, gguf_type(fmt)).view(np.uint8)
    assert ours.dtype == np.uint8
    assert np.array_equal(ours, theirs.reshape(ours.shape))


@pytest.mark.parametrize("fmt", ALL, ids=lambda fmt: fmt.name)
def test_a_quantized_value_is_near_the_original(fmt: Format) -> None:
    values = np.random.default_rng(5).standard_normal((64, 256)).astype(np.float32)
    error = np.abs(fmt.dequantize(fmt.quantize(values)) - values).max()
    limit = {"F32": 0.0, "F16": 2e-3, "BF16": 2e-2, "Q4_0": 0.5, "Q4_1": 0.3, "Q8_0": 0.02}
    assert error <= limit[fmt.name]


def test_bf16_keeps_nan_and_infinity_and_rounds_to_even() -> None:
    bits = [0x7F800001, 0xFFFFFFFF, 0x7F800000, 0xFF800000, 0x3F808000, 0x3F818000, 0x7F7FFFFF]
    values = np.array(bits, dtype=np.uint32).view(np.float32)[None]
    fmt = FORMATS["BF16"]
    upper = fmt.quantize(values).view(np.uint16)[0].tolist()
    assert upper == [0x7FC0, 0xFFFF, 0x7F80, 0xFF80, 0x3F80, 0x3F82, 0x7F80]


def test_f16_overflow_becomes_infinite_without_a_warning() -> None:
    values = np.array([[1e6, -1e6, 1.0]], dtype=np.float32)
    back = FORMATS["F16"].dequantize(FORMATS["F16"].quantize(values))
    assert back.tolist() == [[np.inf, -np.inf, 1.0]]


@pytest.mark.parametrize("fmt", BLOCK_FORMATS, ids=lambda fmt: fmt.name)
def test_rows_that_do_not_fill_blocks_are_refused(fmt: Format) -> None:
    with pytest.raises(ValueError, match="do not fill"):
        fmt.quantize(np.zeros((2, 33), dtype=np.float32))
