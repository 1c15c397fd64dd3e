"""GGUF models in several files: read as one, and refused if the files do not belong together."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from support.gguf_writer import I32, U16, Typed, write_gguf
from support.resident_memory import resident_bytes
from support.tiny import Tiny, tiny_metadata, tiny_tensors, write_tiny_gguf, write_tiny_split
from twostroke.core.errors import ModelFormatError, ModelNotFoundError
from twostroke.model.weights import load_path
from twostroke.model.weights.gguf import read_gguf
from twostroke.model.weights.gguf_split import read_gguf_parts

if TYPE_CHECKING:
    from collections.abc import Iterable
    from pathlib import Path

TINY = Tiny(num_layers=1)


def split_keys(number: int, count: int, num_tensors: int) -> dict[str, Any]:
    return {
        "split.no": Typed(U16, number),
        "split.count": Typed(U16, count),
        "split.tensors.count": Typed(I32, num_tensors),
    }


def write_part(path: Path, keys: dict[str, Any], names: Iterable[str]) -> None:
    """Replace a part by a file with the given keys and the given tensors of the tiny model."""
    tensors = tiny_tensors(TINY)
    write_gguf(path, keys, {name: tensors[name] for name in names})


def refusal(path: Path, kind: type[ModelFormatError | ModelNotFoundError]) -> str:
    with pytest.raises(kind) as caught:
        load_path(path)
    message = str(caught.value)
    assert "\n" not in message
    assert message.endswith(".")
    return message


@pytest.mark.parametrize("num_parts", [2, 3, 12])
def test_parts_are_read_as_one_model(tmp_path: Path, num_parts: int) -> None:
    unsplit = load_path(write_tiny_gguf(tmp_path / "tiny.gguf", TINY))
    model = load_path(write_tiny_split(tmp_path / "parts", TINY, num_parts))
    assert (model.name, model.spec) == ("tiny", unsplit.spec)
    assert len(model.mappings) == num_parts
    files = list((tmp_path / "parts").iterdir())
    assert model.file_bytes == sum(path.stat().st_size for path in files)
    assert model.tensors.keys() == unsplit.tensors.keys()
    for name, tensor in model.tensors.items():
        assert np.array_equal(tensor.data, unsplit.tensors[name].data)
    num_resident = resident_bytes(*files)
    model.release(model.tensors.values())
    assert resident_bytes(*files) < num_resident
    for name, tensor in model.tensors.items():
        assert np.array_equal(tensor.data, unsplit.tensors[name].data)


def test_a_first_part_without_tensors_is_read(tmp_path: Path) -> None:
    names = list(tiny_tensors(TINY))
    keys = tiny_metadata(TINY) | split_keys(0, 2, len(names))
    write_part(tmp_path / "a-00001-of-00002.gguf", keys, [])
    write_part(tmp_path / "a-00002-of-00002.gguf", split_keys(1, 2, len(names)), names)
    assert load_path(tmp_path / "a-00001-of-00002.gguf").tensors.keys() == set(names)


@pytest.mark.parametrize("count", [0, 1])
def test_a_merged_file_is_read_alone(tmp_path: Path, count: int) -> None:
    tensors = tiny_tensors(TINY)
    keys = tiny_metadata(TINY) | split_keys(0, count, len(tensors))
    path = write_gguf(tmp_path / "merged.gguf", keys, tensors)
    assert load_path(path).mappings[0].path == path


def test_a_folder_with_one_set_of_parts_is_loaded(tmp_path: Path) -> None:
    first = write_tiny_split(tmp_path, TINY)
    write_tiny_gguf(tmp_path / "mmproj-tiny-f16.gguf", TINY)
    write_tiny_gguf(tmp_path / "tiny.imatrix.gguf", TINY)
    assert load_path(tmp_path).path == first
    write_tiny_gguf(tmp_path / "other.gguf", TINY)
    message = refusal(tmp_path, ModelNotFoundError)
    assert "has 2 GGUF files (other.gguf, tiny-00001-of-00003.gguf): name one of them" in message


def test_loading_a_later_part_names_the_first_part(tmp_path: Path) -> None:
    second = write_tiny_split(tmp_path, TINY).with_name("tiny-00002-of-00003.gguf")
    message = refusal(second, ModelFormatError)
    assert message == (
        "'tiny-00002-of-00003.gguf' is part 2 of 3: "
        "name the first part, 'tiny-00001-of-00003.gguf'."
    )


def test_a_missing_part_is_named(tmp_path: Path) -> None:
    first = write_tiny_split(tmp_path, TINY)
    first.with_name("tiny-00003-of-00003.gguf").unlink()
    assert refusal(first, ModelNotFoundError) == (
        "'tiny-00001-of-00003.gguf' is the first of 3 parts, "
        "and 'tiny-00003-of-00003.gguf' is missing."
    )
    first.unlink()
    assert "tiny-00001-of-00003.gguf" in refusal(tmp_path, ModelNotFoundError)


@pytest.mark.parametrize(
    "name", ["model.gguf", "tiny-00001-of-00004.gguf", "tiny-00002-of-00003.gguf"]
)
def test_a_renamed_part_must_have_its_original_name(tmp_path: Path, name: str) -> None:
    path = write_tiny_split(tmp_path, TINY).rename(tmp_path / name)
    assert refusal(path, ModelFormatError) == (
        f"'{name}' is part 1 of 3: it needs its original name, "
        "which ends with '-00001-of-00003.gguf'."
    )


def test_parts_out_of_place_are_refused(tmp_path: Path) -> None:
    first = write_tiny_split(tmp_path, TINY)
    second, third = (first.with_name(f"tiny-0000{n}-of-00003.gguf") for n in (2, 3))
    third.write_bytes(second.read_bytes())
    message = refusal(first, ModelFormatError)
    assert message.startswith("'tiny-00003-of-00003.gguf' says that it is part 2 of 3, not 3")
    write_part(third, split_keys(2, 4, 10), [])
    assert "says that it is part 3 of 4" in refusal(first, ModelFormatError)
    write_part(third, {}, [])
    assert "has no split.no" in refusal(first, ModelFormatError)


def test_a_tensor_in_two_parts_is_refused(tmp_path: Path) -> None:
    first = write_tiny_split(tmp_path, TINY, 2)
    second = first.with_name("tiny-00002-of-00002.gguf")
    names = [*read_gguf(second).tensors, next(iter(read_gguf(first).tensors))]
    write_part(second, split_keys(1, 2, len(names)), names)
    message = refusal(first, ModelFormatError)
    assert "'tiny-00002-of-00002.gguf' is damaged: tensor 'token_embd.weight' is in ano" in message


def test_a_wrong_tensor_count_is_refused(tmp_path: Path) -> None:
    first = write_tiny_split(tmp_path, TINY, 2)
    second = first.with_name("tiny-00002-of-00002.gguf")
    names = list(read_gguf(second).tensors)
    write_part(second, split_keys(1, 2, 11), names[1:])
    assert "split.tensors.count = 11, but its 2 parts have 10" in refusal(first, ModelFormatError)


def test_a_damaged_part_is_named(tmp_path: Path) -> None:
    first = write_tiny_split(tmp_path, TINY)
    second = first.with_name("tiny-00002-of-00003.gguf")
    second.write_bytes(second.read_bytes()[:-40])
    assert refusal(first, ModelFormatError).startswith("'tiny-00002-of-00003.gguf' is truncated")


@pytest.mark.parametrize("keys", [{"split.count": 1 << 20}, {"split.count": 2, "split.no": 2}])
def test_impossible_split_keys_are_refused(tmp_path: Path, keys: dict[str, int]) -> None:
    path = write_gguf(tmp_path / "a.gguf", tiny_metadata(TINY) | keys, tiny_tensors(TINY))
    assert "not a whole number from" in refusal(path, ModelFormatError)


def test_the_reference_writer_and_this_reader_agree_about_parts(tmp_path: Path) -> None:
    gguf = pytest.importorskip("gguf")
    writer = gguf.GGUFWriter(tmp_path / "m.gguf", "llama", split_max_tensors=2)
    values = {f"t{i}": np.full((2, 32), i, dtype=np.float32) for i in range(5)}
    for name, value in values.items():
        writer.add_tensor(name, value)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    files = read_gguf_parts(tmp_path / "m-00001-of-00003.gguf")
    assert len(files.mappings) == 3
    assert files.metadata["general.architecture"] == "llama"
    assert {n: t.dequantize().tolist() for n, t in files.tensors.items()} == {
        name: value.tolist() for name, value in values.items()
    }
