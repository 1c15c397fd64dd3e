"""KV pages in a folder: pages that were written are read, and damaged pages never are."""

from __future__ import annotations

import errno
import logging
import math
import os
import random
import time
from typing import TYPE_CHECKING

import pytest

from support.stored_pages import DAMAGES, OTHER_KINDS, PAGE_BYTES, PAGE_VALUE, content_of, kind
from twostroke.core.errors import UsageError
from twostroke.engine.kv_offload.disk import ABOUT, DiskTier, stored_pages
from twostroke.engine.kv_offload.folder import clean, read_folder, verify
from twostroke.engine.kv_offload.tier import KvCacheSpec, PageValue

if TYPE_CHECKING:
    from pathlib import Path

KEYS = [(0, bytes([number]) * 32) for number in range(20)]


def tier_of(folder: Path, of: KvCacheSpec | None = None, most_bytes: int = 10**9) -> DiskTier:
    tier = DiskTier(folder, of or kind(), most_bytes, "tiny")
    tier.wait()
    return tier


def put(tier: DiskTier, of: KvCacheSpec, number: int, worth: PageValue = PAGE_VALUE) -> bool:
    return tier.offer(of.name(KEYS[number]), memoryview(content_of(number)), worth)


def get(tier: DiskTier, name: bytes) -> bytes | None:
    page = bytearray(PAGE_BYTES)
    return bytes(page) if tier.fetch(name, memoryview(page)) else None


def file_of(folder: Path, name: bytes) -> Path:
    (path,) = folder.glob(f"*/{name.hex()[:2]}/{name.hex()[2:]}")
    return path


def test_a_page_is_found_by_a_later_process_and_by_another_server(tmp_path: Path) -> None:
    first, second, name = tier_of(tmp_path), tier_of(tmp_path), kind().name(KEYS[1])
    assert not first.find([name])
    assert get(first, name) is None
    assert put(first, kind(), 1)
    assert not put(second, kind(), 1), "it was written twice"
    for tier in (first, second, tier_of(tmp_path)):
        assert tier.find([name, bytes(32)]) == {name}
        assert get(tier, name) == content_of(1)
    assert tier_of(tmp_path).size() == (1, file_of(tmp_path, name).stat().st_size)


def test_other_specs_find_nothing(tmp_path: Path) -> None:
    tier = tier_of(tmp_path)
    assert put(tier, kind(), 1)
    names = {of.name(KEYS[1]) for of in (kind(), *OTHER_KINDS)}
    assert len(names) == 1 + len(OTHER_KINDS)
    for of in OTHER_KINDS:
        other = tier_of(tmp_path, of)
        assert not other.find([of.name(KEYS[1])])
    assert kind().name((1, KEYS[1][1])) not in names, "cache groups share a name"


@pytest.mark.seeds(15)
def test_damaged_pages_are_missed(
    tmp_path: Path, seed: int, caplog: pytest.LogCaptureFixture
) -> None:
    """A short form of `make long SUITE=kv-offload`, which damages 10,000 pages."""
    rng, tier, of = random.Random(seed), tier_of(tmp_path), kind()
    for number in range(4):
        put(tier, of, number)
    files = [file_of(tmp_path, of.name(key)) for key in KEYS[:4]]
    original_bytes = [path.read_bytes() for path in files]
    for damage_name, damage in DAMAGES.items():
        damaged = damage(rng, original_bytes[0], original_bytes[1:])
        files[0].write_bytes(damaged)
        result = get(tier, of.name(KEYS[0]))
        assert result is None or damaged == original_bytes[0], damage_name
    assert "A damaged page was removed from the page cache" in caplog.text
    for other in OTHER_KINDS:  # a file of another kind, under the right name
        elsewhere = tier_of(tmp_path / "o", other)
        put(elsewhere, other, 0)
        files[0].write_bytes(file_of(tmp_path / "o", other.name(KEYS[0])).read_bytes())
        assert get(tier, of.name(KEYS[0])) is None
    assert put(tier, of, 0), "it is not written again"
    assert get(tier, of.name(KEYS[0])) == content_of(0)


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EROFS, errno.EIO])
def test_a_disk_that_cannot_be_written_is_read_and_tried_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, code: int
) -> None:
    tier, of = tier_of(tmp_path), kind()
    put(tier, of, 1)

    def fail(*_: object) -> int:
        raise OSError(code, os.strerror(code))

    with monkeypatch.context() as broken:
        broken.setattr(os, "writev", fail)
        for number in (2, 3, 4):
            assert not put(tier, of, number)
    warnings = [record for record in caplog.records if record.levelno == logging.WARNING]
    assert len(warnings) == 1
    assert os.strerror(code) in warnings[0].getMessage()
    assert get(tier, of.name(KEYS[1])) == content_of(1)
    assert [path.name for path in stored_pages(tmp_path)] == [of.name(KEYS[1]).hex()[2:]]
    assert not put(tier, of, 2), "it was tried again at once"
    tier._write_again_s = 0.0
    assert put(tier, of, 2)


def test_a_page_that_fits_in_part_is_not_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tier, of, write = tier_of(tmp_path), kind(), os.writev
    monkeypatch.setattr(os, "writev", lambda file, parts: write(file, [parts[0]]))
    assert not put(tier, of, 1)
    assert not list(tmp_path.glob("*/??/*"))


def test_a_folder_that_cannot_be_made_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(UsageError, match="cannot be used: Not a directory"):
        tier_of(tmp_path / "file" / "pages")


def test_pages_are_written_again_after_the_folder_was_cleaned(tmp_path: Path) -> None:
    tier, of = tier_of(tmp_path), kind()
    assert put(tier, of, 1)
    assert clean(tmp_path, None, math.inf)[0] == 1
    assert not list(tmp_path.iterdir())
    assert put(tier, of, 2)
    assert get(tier, of.name(KEYS[2])) == content_of(2)
    (description,) = read_folder(tmp_path, 0.0)
    assert (description.model, description.num_pages) == ("tiny", 1)


@pytest.mark.parametrize("text", ["[]", '{"groups": 3}', '{"groups": {"page_size": "x"}}', "{"])
def test_a_damaged_description_is_no_hindrance(tmp_path: Path, text: str) -> None:
    put(tier_of(tmp_path), kind(), 1)
    (about,) = tmp_path.glob(f"*/{ABOUT}")
    about.write_text(text)
    (description,) = read_folder(tmp_path, 0.0)
    assert (description.model, description.page_size, description.num_pages) == ("?", 0, 1)


def test_a_damaged_page_that_cannot_be_removed_is_reported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    put(tier_of(tmp_path), kind(), 1)
    path = next(stored_pages(tmp_path))
    path.write_bytes(b"x" * 100)

    def fail(*_: object, **__: object) -> None:
        raise OSError(errno.EROFS, os.strerror(errno.EROFS))

    with monkeypatch.context() as broken:
        broken.setattr(type(path), "unlink", fail)
        ((_, _, why),) = verify(tmp_path)
    assert why == os.strerror(errno.EROFS)
    ((_, _, why),) = verify(tmp_path)
    assert (why, path.exists()) == ("", False)


def test_files_that_a_killed_server_left_are_removed_later(tmp_path: Path) -> None:
    tier, of = tier_of(tmp_path), kind()
    put(tier, of, 1)
    folder = file_of(tmp_path, of.name(KEYS[1])).parent
    new, old = folder / "7-7-1.part", folder / "7-7-2.part"
    for path in (new, old):
        path.write_bytes(b"half")
    os.utime(old, (time.time() - 3600,) * 2)
    tier_of(tmp_path)
    assert new.exists(), "another server may be writing it"
    assert not old.exists()


def test_the_least_valuable_pages_go_when_the_folder_is_full(tmp_path: Path) -> None:
    of, num_bytes, now_s = kind(), PAGE_BYTES + 64, time.time()
    tier = tier_of(tmp_path, of, 10 * num_bytes)
    for number in range(10):
        put(tier, of, number, PageValue(1.0 if number == 3 else 0.1, number, now_s))
    put(tier, of, 0, PageValue(0.1, 0, now_s, 100.0))
    put(tier, of, 15, PageValue(0.1, 15, now_s))
    left = {number for number in range(16) if tier.find([of.name(KEYS[number])])}
    assert left == {0, 1, 2, 3, 4, 5, 6, 7, 8, 15}, "9 had the latest place, 3 is worth more"
    assert tier.size()[1] <= 10 * num_bytes


def test_servers_that_share_a_folder_keep_to_its_limit_together(tmp_path: Path) -> None:
    num_bytes = PAGE_BYTES + 64
    kinds = [kind(), kind(model="other")]
    tiers = [tier_of(tmp_path, of, 8 * num_bytes) for of in kinds]
    for number in range(20):
        for tier, of in zip(tiers, kinds, strict=True):
            tier._scanned_s = -1e9
            put(tier, of, number)
    assert len(list(stored_pages(tmp_path))) <= 8
