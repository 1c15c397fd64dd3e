"""The PTX that converts codes to numbers is executed on the processor and compared."""

from __future__ import annotations

import re

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="needs PyTorch and Triton: make long SUITE=gpu")
pytest.importorskip("triton", reason="needs Triton: make long SUITE=gpu")

from twostroke.backends.gpu.kernels.bytes import assembly as assembly_of  # noqa: E402
from twostroke.backends.gpu.kernels.packed_codes import code_constants, number_constants  # noqa: E402
from twostroke.backends.gpu.launch import listing  # noqa: E402
from twostroke.backends.gpu.weight_layout import PackedLayout  # noqa: E402
from twostroke.model.quant.floats import E4M3  # noqa: E402

LAYOUTS = (
    PackedLayout(4, 32, half=8),
    PackedLayout(4, 32, scales="k"),
    PackedLayout(5, 32, scales="k"),
    PackedLayout(6, 16, half=32, scales="q6_k"),
    PackedLayout(8, 32),
)


def halves(words, element: torch.dtype):
    """Return the two 16-bit numbers of each word, as float64 (2, words)."""
    bits = np.stack([words & 0xFFFF, words >> 16]).astype(np.uint16).view(np.int16)
    return torch.from_numpy(bits).view(element).double().numpy()


def lookup(table: int, a, b, c):
    """Return the result of PTX's `lop3`: each bit is looked up by three input bits."""
    result = np.zeros_like(a)
    for index in range(8):
        if table >> index & 1:
            selected_bits = (a if index & 4 else ~a) & (b if index & 2 else ~b)
            result |= selected_bits & (c if index & 1 else ~c)
    return result


def permuted(word, byte_indices: int):
    """Return the result of PTX's `prmt`: bytes of a word, chosen by four bits each; 4 gives 0."""
    result = np.zeros_like(word)
    for at in range(4):
        byte_index = byte_indices >> 4 * at & 15
        if byte_index < 4:
            result |= (word >> np.uint32(8 * byte_index) & np.uint32(255)) << np.uint32(8 * at)
    return result


def execute(assembly: str, inputs: dict[str, np.ndarray], element: torch.dtype):
    registers = dict(inputs)
    size = len(next(iter(inputs.values())))

    def value(name: str):
        return registers[name] if name in registers else np.full(size, int(name, 0), np.uint32)

    for line in assembly.strip("{}").split(";"):
        if not line.strip() or line.strip().startswith(".reg"):
            continue
        name, rest = line.strip().split(" ", 1)
        target, *operands = (part.strip() for part in rest.split(","))
        match name.split(".")[0]:
            case "mov":
                result = value(operands[0])
            case "shr":
                result = value(operands[0]) >> np.uint32(int(operands[1]))
            case "shl":
                result = value(operands[0]) << np.uint32(int(operands[1]))
            case "and":
                result = value(operands[0]) & value(operands[1])
            case "xor":
                result = value(operands[0]) ^ value(operands[1])
            case "prmt":
                assert operands[1] == "0"
                result = permuted(value(operands[0]), int(operands[2], 0))
            case "lop3":
                result = lookup(int(operands[3], 0), *map(value, operands[:3]))
            case "fma":
                a, b, c = (halves(value(part), element) for part in operands)
                exact = torch.from_numpy(a * b + c).to(element)
                assert (exact.double().numpy() == a * b + c).all()
                low, high = exact.view(torch.int16).numpy().view(np.uint16).astype(np.uint32)
                result = low | high << np.uint32(16)
            case _:
                raise AssertionError(name)
        registers[target] = result.astype(np.uint32)
    return registers


def planes_of(layout: PackedLayout, word, high, step: int):
    """Return the codes of each plane of 16-bit words, int64."""
    for plane in range(layout.planes):
        code = word >> (16 // layout.planes * plane) & (255 if layout.bits == 8 else 15)
        count = layout.bits - 4
        if layout.bits in (5, 6):
            shift = count * (step * layout.planes + plane) % (8 if count == 1 else 16)
            code |= (high >> shift & ((1 << count) - 1)) << 4
        yield np.where(code > 127, code - 256, code) if layout.bits == 8 else code


@pytest.mark.parametrize("element", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda layout: f"{layout.bits}{layout.scales}")
def test_assembly_makes_the_codes(layout: PackedLayout, element: torch.dtype) -> None:
    rng = np.random.default_rng(layout.bits)
    high_limit = 256 if layout.bits == 5 else 1 << 16
    words, high = (rng.integers(0, limit, (2, 500)) for limit in (1 << 16, high_limit))
    pair = [(low | upper << 16).astype(np.uint32) for low, upper in (words, high)]
    for is_centered in (True, False):
        constants = code_constants(listing([], 90, element), layout, is_centered=is_centered)
        for step, assembly in enumerate(constants["ASSEMBLY"]):
            assert not re.search(r"\$[6-9]", assembly)
            inputs = {f"${layout.planes + index}": value for index, value in enumerate(pair)}
            result = execute(assembly, inputs, element)
            shift = 0 if layout.bits == 8 else constants["SHIFT"]
            for plane, codes in enumerate(planes_of(layout, words, high, step)):
                np.testing.assert_array_equal(halves(result[f"${plane}"], element), codes + shift)


@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda layout: f"{layout.bits}{layout.scales}")
def test_assembly_makes_the_codes_in_float32(layout: PackedLayout) -> None:
    rng = np.random.default_rng(layout.bits)
    high_limit = 256 if layout.bits == 5 else 1 << 16
    words, high = (rng.integers(0, limit, (2, 500)) for limit in (1 << 16, high_limit))
    pair = [(low | upper << 16).astype(np.uint32) for low, upper in (words, high)]
    constants = number_constants(listing([], 90), layout)
    for index, assembly in enumerate(constants["ASSEMBLY"]):
        result = execute(assembly, {"$2": pair[0], "$3": pair[1]}, torch.bfloat16)
        codes = [*planes_of(layout, words, high, index // layout.planes)][index % layout.planes]
        got = np.stack([result["$0"], result["$1"]]).view(np.float32)
        np.testing.assert_array_equal(got, codes + constants["SHIFT"] - layout.half)


def test_assembly_makes_the_numbers_of_matrices_in_float32() -> None:
    codes = np.random.default_rng(1).permutation(np.arange(256).repeat(4)).astype(np.uint8)
    codes = codes[np.isfinite(E4M3[codes])].reshape(-1, 4)  # two words of two planes
    constants = number_constants(listing([], 90), PackedLayout(8, 128, table="e4m3"))
    assert constants["SHIFT"] == 0
    for index, assembly in enumerate(constants["ASSEMBLY"]):
        result = execute(assembly, {"$2": codes.view(np.uint32)[:, 0]}, torch.bfloat16)
        got = np.stack([result["$0"], result["$1"]], 1).view(np.float32)
        np.testing.assert_array_equal(got, E4M3[codes[:, index % 2 :: 2]] / 256)


@pytest.mark.parametrize("element", [torch.float16, torch.bfloat16])
def test_assembly_makes_the_numbers_of_matrices(element: torch.dtype) -> None:
    codes = np.random.default_rng(1).permutation(np.arange(256).repeat(4)).astype(np.uint8)
    codes = codes[np.isfinite(E4M3[codes])].reshape(-1, 4)  # two words of two planes
    layout = PackedLayout(8, 128, table="e4m3")
    (text, *_) = code_constants(listing([], 90, element), layout, is_centered=True)["ASSEMBLY"]
    result = execute(text, {"$2": codes.view(np.uint32)[:, 0]}, element)
    for plane in range(2):
        numbers = halves(result[f"${plane}"], element)
        np.testing.assert_array_equal(numbers.T, E4M3[codes[:, plane::2]] / 256)


@pytest.mark.parametrize("element", [torch.float16, torch.bfloat16])
def test_assembly_makes_the_numbers_of_pages(element: torch.dtype) -> None:
    codes = np.random.default_rng(1).permutation(np.arange(256).repeat(4)).astype(np.uint8)
    codes = codes[np.isfinite(E4M3[codes])]
    text = assembly_of(listing([], 90, element), "fp8")
    result = execute(text, {"$2": codes.view(np.uint32)}, element)
    numbers = np.stack([*halves(result["$0"], element), *halves(result["$1"], element)], axis=1)
    np.testing.assert_array_equal(numbers.reshape(-1), E4M3[codes] / 256)
