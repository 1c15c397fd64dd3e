"""Packed weights in files: later starts map them, and no damaged file is ever used."""

from __future__ import annotations

import ctypes
import errno
import fcntl
import logging
import mmap
import os
import platform
import random
import subprocess
import sys
import threading
from typing import TYPE_CHECKING

import numpy as np
import pytest

from support.cpu import PAGE_SIZE, tiny_model
from support.native import native_dir
from twostroke.backends.cpu import CpuBackend, mapped_file, packed_store
from twostroke.backends.cpu.mapped_file import Mapping, map_file
from twostroke.backends.cpu.packed_store import MappedWeights, PackedStore

if TYPE_CHECKING:
    from pathlib import Path

TOKENS = list(range(40))


@pytest.fixture(autouse=True)
def built(monkeypatch):
    monkeypatch.setenv("TWOSTROKE_NATIVE_DIR", str(native_dir()))


@pytest.fixture(scope="module")
def model():
    return tiny_model(fmt="Q8_0", embedding_fmt="Q8_0")


@pytest.fixture(scope="module")
def expected(model):
    with_own_memory = open_backend(model, None)
    logits = with_own_memory.score(TOKENS)
    with_own_memory.close()
    return logits


def store_in(folder: Path, source: str = "file 1", **limits) -> PackedStore:
    return PackedStore(folder, source, min_bytes=0, **limits)


def open_backend(model, store, **options) -> CpuBackend:
    program, tensors = model
    return CpuBackend(
        program,
        tensors,
        num_pages=8,
        page_size=PAGE_SIZE,
        num_threads=2,
        packed_store=store,
        **options,
    )


def files_in(folder: Path) -> list[Path]:
    return sorted(folder.glob("*.packed"))


def start(model, folder, **store_options):
    """Start a backend with the store in `folder`, stop it, and return its logits."""
    backend = open_backend(model, store_in(folder, **store_options))
    try:
        return backend.score(TOKENS)
    finally:
        backend.close()


@pytest.fixture
def packed_folder(model, tmp_path):
    """Return the folder of a store that has the model's packed weights."""
    start(model, tmp_path)
    assert len(files_in(tmp_path)) == 1
    return tmp_path


@pytest.mark.parametrize("has_huge_pages", [True, False])
def test_a_later_start_reads_the_file_and_packs_nothing(
    model, packed_folder, expected, monkeypatch, has_huge_pages
):
    monkeypatch.setattr(Mapping, "has_huge_pages", lambda _: has_huge_pages)
    program, tensors = model
    released, progress = [], []
    backend = open_backend(
        (program, tensors),
        store_in(packed_folder),
        release=released.extend,
        progress=lambda done, total: progress.append((done, total)),
    )
    assert np.array_equal(backend.score(TOKENS), expected)
    assert progress == [(progress[0][1], progress[0][1])]  # all bytes are ready at once
    assert len(released) == len({id(tensor) for tensor in released}) > 0
    facts = backend.facts
    assert facts.shared_weight_bytes == (backend._weights._size if has_huge_pages else 0)
    backend.close()
    backend.close()
    assert len(files_in(packed_folder)) == 1


def test_the_first_process_shares_the_file_once_it_is_written(
    model, tmp_path, expected, monkeypatch
):
    monkeypatch.setattr(Mapping, "has_huge_pages", lambda _: True)
    moves = []
    move_to = Mapping.move_to

    def move(mapping, address, num_bytes):
        moves.append(address)
        move_to(mapping, address, num_bytes)

    monkeypatch.setattr(Mapping, "move_to", move)
    backend = open_backend(model, store_in(tmp_path))
    assert np.array_equal(backend.score(TOKENS), expected)
    backend._weights._writer._thread.join()
    backend._weights.share()
    assert moves == [backend._weights._memory]
    assert np.array_equal(backend.score(TOKENS), expected)
    backend._weights.share()  # a second time there is nothing to do
    assert len(moves) == 1
    backend.close()


def test_a_mapping_that_cannot_be_moved_changes_nothing(model, tmp_path, expected, monkeypatch):
    monkeypatch.setattr(Mapping, "has_huge_pages", lambda _: True)

    def refuse(_mapping, _address, _num_bytes):
        raise OSError(errno.ENOMEM, "no memory")

    monkeypatch.setattr(Mapping, "move_to", refuse)
    backend = open_backend(model, store_in(tmp_path))
    backend._weights._writer._thread.join()
    backend._weights.share()
    assert np.array_equal(backend.score(TOKENS), expected)
    backend.close()


def test_moved_weights_leave_the_memory_behind_them_alone(tmp_path):
    """The file also has sums and a trailer, for which there is no room in the own memory."""
    path = tmp_path / "x.packed"
    contents = random.Random(0).randbytes(4 * mmap.PAGESIZE)
    path.write_bytes(contents + bytes(100))
    memory = mmap.mmap(-1, 6 * mmap.PAGESIZE)
    memory[:] = b"\1" * len(memory)
    address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    weights = MappedWeights(map_file(path, len(contents) + 100), len(contents))
    weights.move_to(address)
    assert memory[: len(contents)] == contents
    assert memory[len(contents) :] == b"\1" * 2 * mmap.PAGESIZE
    weights.close()
    assert memory[: len(contents)] == contents


def damage_byte(path: Path, position: int) -> None:
    data = bytearray(path.read_bytes())
    data[position] ^= 1 << random.Random(position).randrange(8)
    path.write_bytes(data)


def zero_page(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[4096:8192] = bytes(4096)
    path.write_bytes(data)


def replace_by_folder(path: Path) -> None:
    path.unlink()
    path.mkdir()


def replace_by_link(path: Path) -> None:
    target = path.with_name("elsewhere")
    path.rename(target)
    path.symlink_to(target)


DAMAGES = {
    "a bit of the weights": lambda path: damage_byte(path, 70_001),
    "a bit of the sums": lambda path: damage_byte(path, path.stat().st_size - 45),
    "a bit of the trailer": lambda path: damage_byte(path, path.stat().st_size - 1),
    "a lost page": zero_page,
    "a lost end": lambda path: os.truncate(path, path.stat().st_size - 1),
    "one byte more": lambda path: path.write_bytes(path.read_bytes() + b"\0"),
    "empty": lambda path: path.write_bytes(b""),
    "another model's": lambda path: path.write_bytes(os.urandom(path.stat().st_size)),
    "a symbolic link": replace_by_link,
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_file_is_named_and_replaced(model, packed_folder, expected, caplog, damage):
    (path,) = files_in(packed_folder)
    DAMAGES[damage](path)
    with caplog.at_level(logging.WARNING, logger="twostroke.engine"):
        assert np.array_equal(start(model, packed_folder), expected)
    assert str(path) in caplog.text
    caplog.clear()
    with caplog.at_level(logging.WARNING, logger="twostroke.engine"):
        assert np.array_equal(start(model, packed_folder), expected)
    assert not caplog.text  # the file is good again


def test_a_folder_in_place_of_the_file_is_left_alone(model, packed_folder, expected):
    (path,) = files_in(packed_folder)
    replace_by_folder(path)
    assert np.array_equal(start(model, packed_folder), expected)
    assert path.is_dir()


@pytest.fixture
def summed(monkeypatch) -> list[int]:
    """Return a list that gets the number of bytes of all packed weights that are summed."""
    counts = []
    block_sums = packed_store._block_sums

    def count(values):
        counts.append(values.size)
        return block_sums(values)

    monkeypatch.setattr(packed_store, "_block_sums", count)
    return counts


def has_no_boot_id(monkeypatch):
    monkeypatch.setattr(packed_store, "_BOOT_ID", packed_store.Path("/no such file"))


def is_partly_on_the_disk(monkeypatch):
    monkeypatch.setattr(mapped_file, "_is_in_memory", lambda *_: False)


def has_started_again(monkeypatch):
    boot_id = packed_store.Path(os.environ["TWOSTROKE_CACHE"]) / "boot"
    boot_id.write_text("another boot")
    monkeypatch.setattr(packed_store, "_BOOT_ID", boot_id)


needs_cachestat = pytest.mark.skipif(
    tuple(map(int, platform.release().split(".")[:2])) < (6, 5), reason="needs Linux 6.5"
)


@needs_cachestat
def test_sums_are_not_checked_twice(model, packed_folder, expected, summed):
    for _ in range(2):
        assert np.array_equal(start(model, packed_folder), expected)
    assert summed == []


@pytest.mark.parametrize("change", [has_no_boot_id, is_partly_on_the_disk, has_started_again])
def test_sums_are_checked_again_after(
    model, packed_folder, expected, summed, monkeypatch, tmp_path, change
):
    monkeypatch.setenv("TWOSTROKE_CACHE", str(tmp_path))
    change(monkeypatch)
    assert np.array_equal(start(model, packed_folder), expected)
    assert len(summed) == 1


@needs_cachestat
@pytest.mark.parametrize("damage", ["removed", "damaged", "another file's"])
def test_sums_are_checked_again_if_the_record_of_the_check_is(
    model, packed_folder, expected, summed, damage
):
    (record,) = packed_folder.glob("*.checked")
    if damage == "removed":
        record.unlink()
    elif damage == "damaged":
        damage_byte(record, record.stat().st_size // 2)
    else:
        (path,) = files_in(packed_folder)
        copy = path.with_name("copy")
        copy.write_bytes(path.read_bytes())
        copy.replace(path)
    for _ in range(2):
        assert np.array_equal(start(model, packed_folder), expected)
    assert len(summed) == 1


@needs_cachestat
def test_pages_of_a_written_file_are_in_memory(tmp_path):
    path = tmp_path / "file"
    path.write_bytes(bytes(5 * mmap.PAGESIZE + 1))
    mapping = map_file(path, 5 * mmap.PAGESIZE + 1)
    assert mapping.is_in_memory
    mapping.populate()
    assert not mapping.array().any()
    mapping.close()


def test_random_bits_are_found_wherever_they_are(model, packed_folder, expected, caplog):
    (path,) = files_in(packed_folder)
    intact = path.read_bytes()
    rng = random.Random(0)
    num_bytes = _padded_weights(model, packed_folder)
    for _ in range(12):
        position = rng.randrange(len(intact))
        path.write_bytes(intact)
        damage_byte(path, position)
        caplog.clear()
        with caplog.at_level(logging.WARNING, logger="twostroke.engine"):
            assert np.array_equal(start(model, packed_folder), expected)
        is_padding = num_bytes[0] <= position < num_bytes[1]
        assert bool(caplog.text) != is_padding


def _padded_weights(model, folder):
    """Return the bytes of the model's packed weights, and with their padding to whole pages."""
    backend = open_backend(model, store_in(folder))
    num_bytes = backend._weights._size
    backend.close()
    return num_bytes, -(-num_bytes // 4096) * 4096


def test_other_files_of_the_model_have_other_packed_weights(model, packed_folder):
    start(model, packed_folder, source="file 2")
    assert len(files_in(packed_folder)) == 2


def test_another_build_of_the_kernels_has_other_packed_weights(tmp_path):
    store, paths = store_in(tmp_path), []
    for content in (b"build 1", b"build 2"):
        library = tmp_path / content.decode()
        library.write_bytes(content)
        paths.append(store.path_of(library, ["a Q8_0 (1, 2)"], "identity"))
    assert paths[0] != paths[1]


def test_the_least_recently_used_files_go_first(model, packed_folder):
    (first,) = files_in(packed_folder)
    size = first.stat().st_size
    start(model, packed_folder, source="file 2")
    (second,) = set(files_in(packed_folder)) - {first}
    for number, file in enumerate((first, second)):
        for kept_file in (file, file.with_suffix(".checked")):
            os.utime(kept_file, (number, number))
    start(model, packed_folder)  # a use of the first
    start(model, packed_folder, source="file 3", max_bytes=2 * size)
    assert first in files_in(packed_folder)
    assert second not in files_in(packed_folder)
    assert len(files_in(packed_folder)) == len([*packed_folder.glob("*.checked")]) == 2


def test_weights_beyond_the_limit_are_not_kept(model, tmp_path, expected, caplog):
    with caplog.at_level(logging.WARNING, logger="twostroke.engine"):
        assert np.array_equal(start(model, tmp_path, max_bytes=1000), expected)
    assert "--packed-cache" in caplog.text
    assert list(tmp_path.iterdir()) == []


def test_small_models_are_not_kept(model, tmp_path):
    backend = open_backend(model, PackedStore(tmp_path, "file"))
    backend.close()
    assert list(tmp_path.iterdir()) == []


def test_a_full_disk_leaves_no_file(model, tmp_path, expected, monkeypatch, caplog):
    def fail(_descriptor, _data):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(packed_store.os, "write", fail)
    with caplog.at_level(logging.WARNING, logger="twostroke.engine"):
        assert np.array_equal(start(model, tmp_path), expected)
    assert os.strerror(errno.ENOSPC) in caplog.text
    assert list(tmp_path.iterdir()) == []


def test_a_read_only_cache_folder_is_named_and_no_error(model, tmp_path, expected, caplog):
    (tmp_path / "cache").write_text("a file where the folder should be")
    with caplog.at_level(logging.WARNING, logger="twostroke.engine"):
        assert np.array_equal(start(model, tmp_path / "cache"), expected)
    assert str(tmp_path / "cache") in caplog.text
    assert "--packed-cache off" in caplog.text


def test_parts_of_ended_processes_are_deleted_and_parts_of_others_stay(model, tmp_path):
    abandoned, written = tmp_path / ".abandoned.part", tmp_path / ".written.part"
    abandoned.write_bytes(b"half")
    with written.open("wb") as other:
        fcntl.flock(other, fcntl.LOCK_EX)
        start(model, tmp_path)
        assert written.exists()
    assert not abandoned.exists()
    assert len(files_in(tmp_path)) == 1


def test_closing_gives_up_a_file_that_takes_long(model, tmp_path, monkeypatch):
    write = packed_store.os.write
    backend = open_backend(model, None)
    weights = backend._weights
    release = packed_store.threading.Event()

    def write_slowly(descriptor, data):
        release.wait()
        return write(descriptor, data[:64])

    monkeypatch.setattr(packed_store.os, "write", write_slowly)
    monkeypatch.setattr(packed_store, "_WRITE_BYTES", 64)
    writer = store_in(tmp_path).write_later(tmp_path / "x.packed", weights._memory, weights._size)
    writer._is_cancelled.set()
    release.set()
    writer.close(wait_s=0)
    assert list(tmp_path.iterdir()) == []
    backend.close()


ENDS_EARLY = """
import sys, time, pathlib, numpy
from twostroke.backends.cpu import packed_store
weights = numpy.zeros(1 << 20, numpy.uint8)
write_all = packed_store._write_all
packed_store._write_all = lambda *values: (time.sleep(0.3), write_all(*values))
store = packed_store.PackedStore(pathlib.Path(sys.argv[1]), "file", min_bytes=0)
path = pathlib.Path(sys.argv[1]) / "x.packed"
writer = store.write_later(path, weights.ctypes.data, weights.size)
import atexit
atexit.register(writer._thread.join)
"""


def test_a_process_that_ends_without_closing_leaves_no_part_and_no_traceback(tmp_path):
    command = [sys.executable, "-c", ENDS_EARLY, str(tmp_path)]
    finished_run = subprocess.run(command, capture_output=True, text=True, check=True)
    assert finished_run.stderr == ""
    assert list(tmp_path.iterdir()) == []


def test_numa_nodes_pack_for_themselves(model, tmp_path, monkeypatch):
    monkeypatch.setattr(packed_store, "memory_nodes", lambda: ("node 0", "node 1"))
    start(model, tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_a_closed_writer_sums_no_further_blocks():
    values = np.ones(8 << 20, np.uint8)
    is_closed = threading.Event()
    assert packed_store._block_sums(values, is_closed).all()
    is_closed.set()
    assert not packed_store._block_sums(values, is_closed).any()
