"""Invalid GGUF files: each is a ModelFormatError of one sentence."""

from __future__ import annotations

import os
import struct
from typing import TYPE_CHECKING

import pytest

from support.gguf_writer import ARRAY, STRING, U8, U32, header, key_value, string, tensor_info
from support.tiny import Tiny, write_tiny_gguf
from twostroke.core.errors import ModelFormatError, ModelNotFoundError
from twostroke.model.weights import load_path
from twostroke.model.weights.gguf import read_gguf

if TYPE_CHECKING:
    from pathlib import Path

HUGE = 2**64 - 1


def fault(path: Path, data: bytes) -> str:
    path.unlink(missing_ok=True)  # quicker than cutting the old file short
    path.write_bytes(data)
    with pytest.raises(ModelFormatError) as caught:
        read_gguf(path)
    message = str(caught.value)
    assert path.name in message
    assert "\n" not in message
    assert len(message) < 400
    return message


def array_of(kind: int, count: int, rest: bytes = b"") -> bytes:
    return header(0, 1) + string("k") + struct.pack("<IIQ", ARRAY, kind, count) + rest


CASES = {
    "empty": (b"", "is empty"),
    "magic": (b"GGML" + bytes(20), "is not a GGUF file"),
    "zip": (b"PK\x03\x04" + bytes(60), "is not a GGUF file: it is a ZIP archive"),
    "web page": (b"\n<html><head></head></html>", "it is a web page; the download went wrong"),
    "pointer": (b"version https://git-lfs.github.com/spec/v1", "it is a pointer of Git LFS"),
    "ggjt": (b"tjgg" + bytes(20), "it is a file of an old version of llama.cpp"),
    "big-endian": (b"GGUF" + struct.pack(">IQQ", 3, 0, 0), "is a big-endian GGUF file"),
    "big-endian, version 2": (b"GGUF" + struct.pack(">IQQ", 2, 0, 0), "is a big-endian GGUF"),
    "version 1": (header(0, 0, 1), "GGUF version 1; versions 2 and 3"),
    "version 4": (header(0, 0, 4), "GGUF version 4; versions 2 and 3"),
    "tensor count": (header(65537, 0), "has 65537 tensors, the limit is 65536"),
    "key count": (header(0, 65537), "has 65537 metadata keys, the limit is 65536"),
    "more keys than bytes": (header(0, 60000), "metadata key 0 of 60000 needs 8 bytes"),
    "key length": (header(0, 1) + struct.pack("<Q", HUGE), "bytes of text, the limit is"),
    "key twice": (header(0, 2) + key_value("a", 1) * 2, "'a' occurs twice"),
    "key not UTF-8": (header(0, 1) + string(b"\xff") + bytes(8), "is not UTF-8"),
    "value type": (header(0, 1) + string("k") + struct.pack("<I", 13), "unknown value type 13"),
    "value missing": (header(0, 1) + string("k") + struct.pack("<I", U32), "'k' needs 4 bytes"),
    "string length": (
        header(0, 1) + string("k") + struct.pack("<IQ", STRING, 2**24 + 1),
        "'k' has 16777217 bytes of text, the limit is 16777216",
    ),
    "string past the end": (
        header(0, 1) + string("k") + struct.pack("<IQ", STRING, 1000),
        "'k' needs 1000 bytes",
    ),
    "truth value": (header(0, 1) + string("k") + struct.pack("<IB", 7, 2), "truth value"),
    "array type": (array_of(77, 1), "unknown value type 77"),
    "array length": (
        array_of(U8, 2**24 + 1),
        "'k' has 16777217 array items, the limit is 16777216",
    ),
    "array past the end": (array_of(U32, 1000), "'k' needs 4000 bytes"),
    "strings past the end": (array_of(STRING, 1000), "'k' needs 8000 bytes"),
    "string leads out": (
        array_of(STRING, 2, struct.pack("<QQ", HUGE, 0)),
        "2 strings that lead past the end",
    ),
    "last string leads out": (
        array_of(STRING, 1, struct.pack("<Q", 1)),
        "1 string that leads past the end",
    ),
    "array of arrays": (array_of(ARRAY, 2**20), "'k' needs 12582912 bytes"),
    "arrays in arrays": (
        array_of(ARRAY, 1, struct.pack("<IQ", ARRAY, 1) * 4),
        "'k' has 5 levels of arrays, the limit is 4",
    ),
    "alignment zero": (header(0, 1) + key_value("general.alignment", 0), "general.alignment is 0"),
    "alignment odd": (header(0, 1) + key_value("general.alignment", 48), "general.alignment is 48"),
    "alignment text": (
        header(0, 1) + key_value("general.alignment", "x"),
        "general.alignment is str",
    ),
    "name length": (header(1, 0) + struct.pack("<Q", 300), "the entry of tensor 0 of 1 needs 300"),
    "tensor twice": (header(2, 0) + tensor_info("a", (8,), 0, 0) * 2, "'a' occurs twice"),
    "no dimensions": (header(1, 0) + string("a") + bytes(40), "tensor 'a' has the shape []"),
    "many dimensions": (
        header(1, 0) + string("a") + struct.pack("<I", HUGE % 2**32) + bytes(40),
        "dimensions, the limit is 4",
    ),
    "dimension zero": (header(1, 0) + tensor_info("a", (0, 8), 0, 0), "has the shape [0, 8]"),
    "product overflows": (
        header(1, 0) + tensor_info("a", (2**32, 2**32), 0, 0),
        "has the shape",
    ),
    "product wraps to small": (
        header(1, 0) + tensor_info("a", (2**63 + 1, 2), 0, 0) + bytes(64),
        "has the shape",
    ),
    "bytes overflow": (
        header(1, 0) + tensor_info("a", (2**62,), 0, 0),
        "is truncated: tensor 'a' needs 18446744073709551616 bytes",
    ),
    "rows not whole blocks": (
        header(1, 0) + tensor_info("a", (2, 33), 8, 0) + bytes(256),
        "rows of 33 values, not a multiple of Q8_0's 32",
    ),
    "offset misaligned": (header(1, 0) + tensor_info("a", (8,), 0, 7), "not a multiple of 32"),
    "offset past the end": (
        header(1, 0) + tensor_info("a", (8,), 0, 2**64 - 32),
        "is truncated: tensor 'a' needs 32 bytes at offset",
    ),
    "overlap": (
        header(2, 0) + tensor_info("a", (16,), 0, 0) + tensor_info("b", (8,), 0, 32) + bytes(256),
        "tensor 'a' and tensor 'b' overlap",
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_damage_is_named(tmp_path: Path, case: str) -> None:
    data, expected = CASES[case]
    assert expected in fault(tmp_path / "broken.gguf", data)


def test_names_from_the_file_cannot_break_the_line(tmp_path: Path) -> None:
    data = header(2, 0) + tensor_info("a\n\x1b[31m", (8,), 0, 0) * 2
    assert "\x1b" not in fault(tmp_path / "broken.gguf", data)


def test_every_truncation_is_noticed(tmp_path: Path) -> None:
    content = write_tiny_gguf(tmp_path / "whole.gguf", Tiny(num_layers=1)).read_bytes()
    path = tmp_path / "cut.gguf"
    # Densely through header, metadata and table, at some places in the data.
    ends = [*range(0, 12_000, 11), *range(12_000, len(content), 9973), len(content) - 1]
    for end in ends:
        fault(path, content[:end])


def test_truncation_names_the_tensor_and_the_sizes(tmp_path: Path) -> None:
    path = write_tiny_gguf(tmp_path / "whole.gguf")
    data = path.read_bytes()
    message = fault(tmp_path / "cut.gguf", data[:-100])
    assert "is truncated: tensor 'output_norm.weight' needs 256 bytes at offset" in message
    assert f"the file has {len(data) - 100}" in message


def test_a_pipe_is_refused_without_blocking(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe.gguf")
    with pytest.raises(ModelFormatError, match="not a regular file"):
        read_gguf(tmp_path / "pipe.gguf")


def test_missing_files_and_folders_have_their_own_errors(tmp_path: Path) -> None:
    with pytest.raises(ModelNotFoundError, match="There is no file"):
        read_gguf(tmp_path / "none.gguf")
    with pytest.raises(ModelFormatError, match="cannot be read"):
        read_gguf(tmp_path)
    with pytest.raises(ModelNotFoundError, match="neither a config"):
        load_path(tmp_path)
