"""Every format against the reference package's arithmetic, bit for bit."""

from __future__ import annotations

import numpy as np
import pytest

from twostroke.model.quant import FORMATS, FORMATS_BY_GGUF_ID, UNSUPPORTED_GGUF_TYPES, Format
from twostroke.model.quant.format import pack_planes, unpack_planes
from twostroke.model.quant.k_quants import pack_scales, unpack_scales

gguf = pytest.importorskip("gguf", reason="the gguf package (test extra) is the second opinion")

ALL = list(FORMATS.values())
WRITTEN = [fmt for fmt in ALL if fmt.encode is not None]
BLOCK_FORMATS = [fmt for fmt in WRITTEN if fmt.block_size > 1]

# What ggml's own quantizer (`ggml_quantize_chunk` without an importance matrix) loses, root mean
# square, on `weights()`, where the gguf package has no quantizer to compare with.
GGML_LOSS = {
    "Q2_K": 0.297291,
    "Q3_K": 0.151093,
    "Q4_K": 0.071552,
    "Q5_K": 0.036223,
    "Q6_K": 0.017776,
    "IQ4_NL": 0.076320,
    "IQ4_XS": 0.076897,
}
LARGEST_ERROR = {"F32": 0.0, "F16": 2e-3, "BF16": 2e-2, "Q4_0": 0.5, "Q4_1": 0.3, "Q8_0": 0.02}
LARGEST_ERROR |= {"Q5_0": 0.25, "Q5_1": 0.15, "Q2_K": 1.4, "Q3_K": 0.8, "Q4_K": 0.4, "Q5_K": 0.2}
LARGEST_ERROR |= {"Q6_K": 0.1, "IQ4_NL": 0.5, "IQ4_XS": 0.5, "MXFP4": 1.0, "NVFP4": 0.8}
FITTED = [FORMATS[name] for name in GGML_LOSS]
COPIED = [fmt for fmt in WRITTEN if fmt not in FITTED and fmt.name != "NVFP4"]  # gguf lacks this


def gguf_type(fmt: Format) -> gguf.GGMLQuantizationType:
    return gguf.GGMLQuantizationType[fmt.name]


def random_blocks(fmt: Format, seed: int, num_blocks: int = 4096) -> np.ndarray:
    rng = np.random.default_rng(seed)
    blocks = rng.integers(0, 256, (num_blocks // 32, 32 * fmt.block_bytes), dtype=np.uint8)
    if fmt.name == "MXFP4":  # a scale of 255 is not a number, but one in ggml
        blocks[:, :: fmt.block_bytes] %= 255
    return blocks


def random_values(seed: int) -> np.ndarray:
    """Return rows of many magnitudes, with zeros, ties, equal values, and outliers."""
    rng = np.random.default_rng(seed)
    values = rng.standard_normal((256, 256)) * 10.0 ** rng.uniform(-4, 3, (256, 1))
    values[3] = 0
    values[4] = 1.5
    values[5, ::7] = -40
    values[6] = np.arange(256) - 128
    values[7] = np.round(values[7])
    values[8, 0], values[8, 1] = 9, -9
    return values.astype(np.float32)


def weights() -> np.ndarray:
    return np.random.default_rng(0).standard_normal((64, 4096)).astype(np.float32)


def root_mean_square(values: np.ndarray) -> float:
    return float(np.sqrt(np.mean(np.square(values, dtype=np.float64))))


def test_layout_is_the_reference_layout() -> None:
    for fmt in ALL:
        kind = gguf_type(fmt)
        assert fmt.gguf_id == kind.value
        assert (fmt.block_size, fmt.block_bytes) == gguf.GGML_QUANT_SIZES[kind]
        assert FORMATS_BY_GGUF_ID[fmt.gguf_id] is fmt


def test_every_type_of_the_reference_is_known_by_name() -> None:
    name_by_id = UNSUPPORTED_GGUF_TYPES | {fmt.gguf_id: fmt.name for fmt in ALL}
    for kind in gguf.GGMLQuantizationType:
        assert name_by_id[kind.value] == kind.name
    assert not UNSUPPORTED_GGUF_TYPES.keys() & FORMATS_BY_GGUF_ID.keys()


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # infinite scales in random bytes
def test_dequantization_equals_the_reference_bit_for_bit() -> None:
    for seed in range(4):
        for fmt in ALL:
            data = random_blocks(fmt, seed)
            ours = fmt.dequantize(data)
            theirs = gguf.dequantize(data, gguf_type(fmt))
            assert ours.dtype == np.float32
            nan = np.isnan(theirs)
            assert np.array_equal(np.isnan(ours), nan)
            assert np.array_equal(ours.view(np.uint32)[~nan], theirs.view(np.uint32)[~nan])


def test_quantization_equals_the_reference_bit_for_bit() -> None:
    for seed in range(4):
        for fmt in COPIED:
            values = random_values(seed)
            ours = fmt.quantize(values)
            theirs = gguf.quantize(values, gguf_type(fmt)).view(np.uint8)
            assert ours.dtype == np.uint8
            assert np.array_equal(ours, theirs.reshape(ours.shape))


def test_a_quantized_value_is_near_the_original() -> None:
    for fmt in WRITTEN:
        values = np.random.default_rng(5).standard_normal((64, 256)).astype(np.float32)
        error = np.abs(fmt.dequantize(fmt.quantize(values)) - values).max()
        assert error <= LARGEST_ERROR[fmt.name]


def test_a_fitted_format_loses_no_more_than_ggmls_own_quantizer() -> None:
    for fmt in FITTED:
        values = weights()
        loss = root_mean_square(fmt.dequantize(fmt.quantize(values)) - values)
        assert loss <= GGML_LOSS[fmt.name]
        assert loss > GGML_LOSS[fmt.name] / 2


def test_quantizing_twice_loses_little() -> None:
    for fmt in FITTED:
        values = weights()
        once = fmt.dequantize(fmt.quantize(values))
        twice = fmt.dequantize(fmt.quantize(once))
        assert root_mean_square(twice - once) < 0.1 * root_mean_square(once - values)


def test_odd_rows_are_fitted_within_a_step_of_their_largest_value() -> None:
    for fmt in FITTED:
        values = random_values(6)
        # Near float16's smallest normal number a scale has fewer bits.
        values[14:] += np.copysign(np.float32(0.01), values[14:])
        values[9] = 7
        values[10] = -7
        values[11] = np.abs(values[11])
        values[12] = -np.abs(values[12])
        values[13] = 1e-42
        back = fmt.dequantize(fmt.quantize(values))
        error, largest = np.abs(back - values).max(axis=1), np.abs(values).max(axis=1)
        assert (error <= LARGEST_ERROR[fmt.name] / 2 * largest + 1e-40).all()
        assert not back[3].any()


def test_planes_are_unpacked_as_a_plain_loop_does() -> None:
    for bits, run in [(1, 32), (2, 1), (2, 4), (2, 32), (4, 1), (4, 64)]:
        packed = np.random.default_rng(7).integers(0, 256, (3, 2 * run), dtype=np.uint8)
        codes = unpack_planes(packed, bits, run)
        plain = [
            [
                int(block[start + i]) >> shift & ((1 << bits) - 1)
                for start in (0, run)
                for shift in range(0, 8, bits)
                for i in range(run)
            ]
            for block in packed
        ]
        assert codes.tolist() == plain
        assert np.array_equal(pack_planes(codes, bits, run), packed)


def test_the_head_of_scales_is_packed_and_unpacked_without_loss() -> None:
    for seed in range(3):
        packed = np.random.default_rng(seed).integers(0, 256, (500, 12), dtype=np.uint8)
        assert np.array_equal(pack_scales(*unpack_scales(packed)), packed)


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


def test_a_format_without_an_encoder_is_not_written() -> None:
    for fmt in set(ALL) - set(WRITTEN):
        with pytest.raises(ValueError, match=f"{fmt.name} is read, not written"):
            fmt.quantize(np.zeros((1, 256), np.float32))


def test_rows_that_do_not_fill_blocks_are_refused() -> None:
    for fmt in BLOCK_FORMATS:
        with pytest.raises(ValueError, match="do not fill"):
            fmt.quantize(np.zeros((2, 33), dtype=np.float32))
