"""safetensors files: valid and damaged, single and sharded."""

from __future__ import annotations

import json
import os
import re
import struct
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from support.safetensors_writer import safetensors_bytes, with_header, write_safetensors
from support.tiny import Tiny, write_tiny_folder
from twostroke.core.errors import ModelFormatError, ModelNotFoundError
from twostroke.model.quant import FORMATS, QuantTensor
from twostroke.model.weights.safetensors import read_safetensors, read_sharded

if TYPE_CHECKING:
    from pathlib import Path


def entry(dtype: Any = "F32", shape: Any = (2,), begin: Any = 0, end: Any = 8) -> dict[str, Any]:
    shape = list(shape) if isinstance(shape, tuple) else shape
    return {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}


@pytest.mark.parametrize("fmt", ["F32", "F16", "BF16"])
def test_tensors_of_the_reference_writer_are_read_exactly(tmp_path: Path, fmt: str) -> None:
    reference = pytest.importorskip("safetensors.numpy")
    ml_dtypes = pytest.importorskip("ml_dtypes")
    dtype = {"F32": np.float32, "F16": np.float16, "BF16": ml_dtypes.bfloat16}[fmt]
    values = np.random.default_rng(0).standard_normal((5, 7)).astype(dtype)
    arrays = {"matrix": values, "vector": values[0].copy(), "stack": values.reshape(1, 5, 7)}
    reference.save_file(arrays, tmp_path / "a.safetensors")
    tensors = read_safetensors(tmp_path / "a.safetensors").tensors
    assert tensors.keys() == arrays.keys()
    for name, array in arrays.items():
        assert tensors[name].format is FORMATS[fmt]
        assert np.array_equal(tensors[name].dequantize(), array.astype(np.float32))
        assert not tensors[name].data.flags.owndata


def test_data_after_an_odd_header_is_read(tmp_path: Path) -> None:
    raw = json.dumps({"a": entry()}).encode()
    raw += b" " * (1 + len(raw) % 2)
    path = tmp_path / "a.safetensors"
    path.write_bytes(struct.pack("<Q", len(raw)) + raw + struct.pack("<2f", 1.5, -2))
    assert read_safetensors(path).tensors["a"].dequantize().tolist() == [1.5, -2.0]


def test_unsupported_dtypes_are_reported(tmp_path: Path) -> None:
    path = tmp_path / "a.safetensors"
    path.write_bytes(with_header({"a": entry(), "ids": entry("I64", (1,), 8, 16)}, bytes(16)))
    assert read_safetensors(path).unsupported == {"ids": "I64"}


TRUNCATED, WRONG_JSON = "is truncated", "its JSON is wrong"
CASES = (
    (bytes(7), TRUNCATED),
    (struct.pack("<Q", 2**63) + bytes(8), "is not a safetensors file: its header would end"),
    (b"<!DOCTYPE html><html>", "is not a safetensors file: it is a web page"),
    (b"version https://git-lfs.github.com/spec/v1\n", "it is a pointer of Git LFS"),
    (b"GGUF\3\0\0\0" + bytes(40), "its name must end with .gguf"),
    (b"PK\3\4" + b"x" * 60, "it is a ZIP archive, as of PyTorch"),
    (struct.pack("<Q", 1000) + bytes(8), TRUNCATED),
    (with_header(b"{nope", b""), WRONG_JSON),
    (with_header(b'{"\xff":1}', b""), WRONG_JSON),
    (with_header(b'{"a":' + b"[" * 200_000, b""), WRONG_JSON),
    (with_header([1], b""), WRONG_JSON),
    (with_header({"a": 1}, b""), WRONG_JSON),
    (with_header({"a": entry(None)}, bytes(8)), "dtype"),
    (with_header({"a": entry(shape=[-2])}, bytes(8)), "shape"),
    (with_header({"a": entry(shape=[True])}, bytes(8)), "shape"),
    (with_header({"a": entry() | {"data_offsets": [0, 4, 8]}}, bytes(8)), "data_offsets"),
    (with_header({"a": entry(begin=8, end=0)}, bytes(8)), "overlap or leave a gap at 0"),
    (with_header({"a": entry(shape=[2**62, 2**62])}, bytes(8)), "has the shape"),
    (with_header({"a": entry(shape=[0], end=0)}, b""), "has the shape [0]"),
    (with_header({"a": entry(shape=[3])}, bytes(8)), "has the shape [3] and 8 bytes"),
    (with_header({"a": entry()}, bytes(7)), TRUNCATED),
    (with_header({"a": entry(), "b": entry(begin=4, end=12)}, bytes(12)), "overlap or leave"),
    (with_header({"a": entry(begin=4, end=12)}, bytes(12)), "overlap or leave a gap at 0"),
    (with_header({"a": entry()}, bytes(12)), "its tensors have 8 bytes, its data 12"),
    (with_header({"a": entry("I64")}, bytes(4)), TRUNCATED),
)


def test_damage_is_refused(tmp_path: Path) -> None:
    for number, (data, expected) in enumerate(CASES):
        path = tmp_path / f"{number}.safetensors"
        path.write_bytes(data)
        with pytest.raises(ModelFormatError) as caught:
            read_safetensors(path)
        assert expected in str(caught.value)
        assert path.name in str(caught.value)
        assert "\n" not in str(caught.value)


def test_a_long_header_is_refused_unread(tmp_path: Path) -> None:
    path = tmp_path / "a.safetensors"
    path.write_bytes(struct.pack("<Q", 100_000_001))
    os.truncate(path, 100_000_009)  # sparse
    with pytest.raises(ModelFormatError, match="of 100000001 bytes, the limit is 16777216"):
        read_safetensors(path)


def test_too_many_tensors_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "a.safetensors"
    path.write_bytes(with_header({f"{number}": entry(end=0) for number in range(65537)}, b""))
    with pytest.raises(ModelFormatError, match="has 65537 tensors, the limit is 65536"):
        read_safetensors(path)


def test_every_truncation_is_noticed(tmp_path: Path) -> None:
    values = np.ones((4, 8), dtype=np.float32)
    tensors = {name: QuantTensor.from_floats(values, FORMATS["F16"]) for name in "abc"}
    content = safetensors_bytes(tensors)
    path = tmp_path / "a.safetensors"
    for end in range(len(content)):
        path.unlink(missing_ok=True)  # quicker than cutting the old file short
        path.write_bytes(content[:end])
        with pytest.raises(ModelFormatError):
            read_safetensors(path)


def test_shards_together_are_the_whole(tmp_path: Path) -> None:
    single_file = read_safetensors(write_tiny_folder(tmp_path / "one") / "model.safetensors")
    folder = write_tiny_folder(tmp_path / "three", Tiny(), num_shards=3)
    three = read_sharded(folder / "model.safetensors.index.json")
    assert len(three.mappings) == 3
    assert three.tensors.keys() == single_file.tensors.keys()
    for name, tensor in single_file.tensors.items():
        assert np.array_equal(three.tensors[name].data, tensor.data)


def test_damaged_indexes_are_refused(tmp_path: Path) -> None:
    tensor = QuantTensor.from_floats(np.ones(2, dtype=np.float32), FORMATS["F32"])
    write_safetensors(tmp_path / "a.safetensors", {"a": tensor})
    write_safetensors(tmp_path / "b.safetensors", {"a": tensor, "c": tensor})
    index = tmp_path / "model.safetensors.index.json"
    cases: list[tuple[Any, str]] = [
        *((wrong, WRONG_JSON) for wrong in (None, [], {}, {"a": 1})),
        *(
            ({"a": name}, "matching regex")
            for name in ("../a.safetensors", "/etc/a.safetensors", "a\0.safetensors", "passwd")
        ),
        ({"a": "missing.safetensors"}, "missing.safetensors'."),
        ({"b": "a.safetensors"}, "lacks tensor 'b'"),
        ({"a": "a.safetensors", "c": "b.safetensors"}, "is in another file, too"),
    ]
    for weight_map, expected in cases:
        index.write_text(json.dumps({"weight_map": weight_map}))
        with pytest.raises((ModelFormatError, ModelNotFoundError), match=re.escape(expected)):
            read_sharded(index)


def test_a_missing_file_is_not_found(tmp_path: Path) -> None:
    with pytest.raises(ModelNotFoundError):
        read_safetensors(tmp_path / "a.safetensors")
