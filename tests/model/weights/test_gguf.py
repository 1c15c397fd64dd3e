"""Valid GGUF files: metadata, tensors, and the real file compared with the reference reader."""

from __future__ import annotations

import struct
import time
from typing import TYPE_CHECKING

import numpy as np
import pytest

from support import gguf_writer
from support.gguf_writer import Typed, gguf_bytes, write_gguf
from support.random_blocks import in_format
from support.resident_memory import resident_bytes
from twostroke.model.quant import FORMATS, QuantTensor
from twostroke.model.weights.gguf import read_gguf

if TYPE_CHECKING:
    from pathlib import Path

    from twostroke.model.weights.tensors import WeightFiles

METADATA = {
    "u8": Typed(gguf_writer.U8, 255),
    "i8": Typed(gguf_writer.I8, -128),
    "u16": Typed(gguf_writer.U16, 65535),
    "i16": Typed(gguf_writer.I16, -32768),
    "u32": Typed(gguf_writer.U32, 2**32 - 1),
    "i32": Typed(gguf_writer.I32, -(2**31)),
    "u64": Typed(gguf_writer.U64, 2**64 - 1),
    "i64": Typed(gguf_writer.I64, -(2**63)),
    "f32": 0.5,
    "f64": Typed(gguf_writer.F64, 0.1),
    "bool": True,
    "string": "héllo\nworld",
    "strings": ["", "a", "Ġworld", "日本"],
    "ints": Typed(gguf_writer.I32, [3, -1, 2]),
    "floats": [0.5, -1.0],
    "bools": [True, False],
}


def values(metadata: dict) -> dict:
    return {key: v.value if isinstance(v, Typed) else v for key, v in metadata.items()}


@pytest.mark.parametrize("version", [2, 3])
def test_every_value_type_is_read_back(tmp_path: Path, version: int) -> None:
    path = write_gguf(tmp_path / "a.gguf", METADATA, {}, version=version)
    read = dict(read_gguf(path).metadata)
    read["strings"] = list(read["strings"])
    assert read == values(METADATA)


def test_the_reference_reader_agrees_about_the_written_file(tmp_path: Path) -> None:
    gguf = pytest.importorskip("gguf")
    path = write_gguf(tmp_path / "a.gguf", METADATA | {"general.architecture": "x"}, {})
    theirs = gguf.GGUFReader(path).fields
    for key, value in read_gguf(path).metadata.items():
        ours = list(value) if key == "strings" else value
        assert theirs[key].contents() == ours, key


@pytest.mark.parametrize("fmt", FORMATS)
def test_tensors_are_views_with_row_major_shapes(tmp_path: Path, fmt: str) -> None:
    rng = np.random.default_rng(0)
    tensors = {
        name: in_format(rng.standard_normal(shape).astype(np.float32), fmt)
        for name, shape in {"a": (3, 512), "b": (256,), "c": (2, 3, 256), "d": (5, 768)}.items()
    }
    file = read_gguf(write_gguf(tmp_path / "a.gguf", {}, tensors))
    assert list(file.tensors) == list(tensors)
    for name, tensor in tensors.items():
        read = file.tensors[name]
        assert (read.format, read.shape) == (tensor.format, tensor.shape)
        assert np.array_equal(read.dequantize(), tensor.dequantize())
        assert not read.data.flags.owndata
        assert not read.data.flags.writeable


def test_the_file_sets_the_alignment(tmp_path: Path) -> None:
    tensors = {
        name: QuantTensor.from_floats(np.full((1, n), n, dtype=np.float32), FORMATS["F32"])
        for name, n in {"a": 3, "b": 5}.items()
    }
    path = write_gguf(tmp_path / "a.gguf", {"general.alignment": 64}, tensors, alignment=64)
    file = read_gguf(path)
    assert file.tensors["b"].dequantize().tolist() == [[5.0] * 5]


def test_tensor_data_may_be_in_a_different_order_than_the_table(tmp_path: Path) -> None:
    data = gguf_writer.header(2, 0)
    data += gguf_writer.tensor_info("second", (8,), 0, 32)
    data += gguf_writer.tensor_info("first", (8,), 0, 0)
    data += bytes(-len(data) % 32) + struct.pack("<16f", *range(16))
    path = tmp_path / "a.gguf"
    path.write_bytes(data)
    file = read_gguf(path)
    assert list(file.tensors) == ["second", "first"]
    assert file.tensors["first"].dequantize().tolist() == list(range(8))
    assert file.tensors["second"].dequantize().tolist() == list(range(8, 16))


def test_unsupported_tensor_types_are_reported(tmp_path: Path) -> None:
    data = gguf_writer.header(3, 0)
    data += gguf_writer.tensor_info("k", (2, 256), 15, 0)
    data += gguf_writer.tensor_info("new", (2, 256), 99, 288)
    data += gguf_writer.tensor_info("f", (4,), 0, 1024)
    path = tmp_path / "a.gguf"
    path.write_bytes(data + bytes(-len(data) % 32 + 1040))
    file = read_gguf(path)
    assert file.unsupported == {"k": "Q8_K", "new": "type 99"}
    assert list(file.tensors) == ["f"]


def test_strings_that_are_not_utf8_stay_distinct(tmp_path: Path) -> None:
    metadata = {"tokens": [b"\xff", b"\xfe", b"ok"], "text": b"a\xffb"}
    read = read_gguf(write_gguf(tmp_path / "a.gguf", metadata, {})).metadata
    tokens = read["tokens"]
    assert [t.encode("utf-8", "surrogateescape") for t in tokens] == metadata["tokens"]
    assert read["text"] == "a\ufffdb"


def test_released_pages_read_the_same_again(tmp_path: Path) -> None:
    rng = np.random.default_rng(1).standard_normal((64, 4096)).astype(np.float32)
    tensors = {"a": QuantTensor.from_floats(rng, FORMATS["F32"])}
    file = read_gguf(write_gguf(tmp_path / "a.gguf", {}, tensors))
    before = file.tensors["a"].dequantize()
    assert resident_bytes(tmp_path / "a.gguf") >= rng.nbytes
    elsewhere = np.ones(8, dtype=np.uint8)
    file.mappings[0].release([file.tensors["a"].data, elsewhere])
    assert resident_bytes(tmp_path / "a.gguf") < rng.nbytes / 4
    assert np.array_equal(file.tensors["a"].dequantize(), before)
    assert elsewhere.all()


def _seconds_to_open(path: Path) -> tuple[float, WeightFiles]:
    """Return the shortest of five processor times to open a file, and the opened file."""
    seconds = []
    for _ in range(5):
        start = time.process_time()
        file = read_gguf(path)
        seconds.append(time.process_time() - start)
    return min(seconds), file


def _seconds_to_make_texts() -> float:
    """Return the processor time to make 300,000 texts, with which other times are compared."""
    seconds = []
    for _ in range(5):
        start = time.process_time()
        texts = [f"token{i}" for i in range(300_000)]
        seconds.append(time.process_time() - start)
    assert texts
    return min(seconds)


def test_a_large_vocabulary_is_walked_quickly(tmp_path: Path) -> None:
    tokens = [f"token{i}" for i in range(300_000)]
    path = tmp_path / "a.gguf"
    path.write_bytes(gguf_bytes({"tokens": tokens}, {}))
    seconds, file = _seconds_to_open(path)
    assert list(file.metadata["tokens"]) == tokens
    assert seconds < 20 * _seconds_to_make_texts()  # 1 to 2 times on a free core


@pytest.mark.model
def test_the_real_file_opens_quickly(smollm2_path: Path) -> None:
    seconds, file = _seconds_to_open(smollm2_path)
    assert seconds < 4 * _seconds_to_make_texts()
    assert len(file.tensors) == 272
    assert not file.unsupported


@pytest.mark.model
def test_real_blocks_are_dequantized_as_by_the_reference(smollm2_path: Path) -> None:
    gguf = pytest.importorskip("gguf")
    tensors = read_gguf(smollm2_path).tensors
    for name in ("token_embd.weight", *list(tensors)[1::9]):
        tensor = tensors[name]
        expected = gguf.dequantize(
            tensor.data[:2048], gguf.GGMLQuantizationType[tensor.format.name]
        )
        ours = tensor.dequantize(slice(0, 2048))
        assert np.array_equal(ours.view(np.uint32), expected.view(np.uint32)), name
