"""Downloads of packaged models: complete, checked, and resumed after the received parts."""

from __future__ import annotations

import errno
import hashlib
import json
import re
import shutil
import threading
import zipfile
from typing import TYPE_CHECKING

import pytest

from twostroke.core.errors import DownloadError
from twostroke.model.hub import packages
from twostroke.model.hub.catalogue import PackagedModel, WheelPart
from twostroke.model.hub.disk import DownloadProgress, locked
from twostroke.model.hub.packages import pull_package
from twostroke.model.hub.records import record_of_package

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

CONTENT = bytes(range(256)) * 20_000  # some 5 MB: several chunks
HALVES = (CONTENT[: len(CONTENT) // 2], CONTENT[len(CONTENT) // 2 :])
PARTS = tuple(WheelPart(f"half-{n}", "1.0", f"half_{n}/data.bin") for n in (1, 2))
MODEL = PackagedModel(
    name="two-halves",
    title="Two halves",
    file_name="two.gguf",
    parts=PARTS,
    file_bytes=len(CONTENT),
    sha256=hashlib.sha256(CONTENT).hexdigest(),
    licence="MIT",
)
UNLISTED = PackagedModel("pypi:half-1==1.0:half_1/data.bin", "data.bin", "two.gguf", PARTS[:1])


class FakeIndex:
    """A stand-in for pip, which builds wheels instead of fetching them."""

    def __init__(self) -> None:
        self.members = {part.requirement: (part.path, HALVES[i]) for i, part in enumerate(PARTS)}
        self.requirements: list[str] = []
        self.before: Callable[[str], None] = lambda _: None
        self.after: Callable[[Path], None] = lambda _: None

    def __call__(self, requirement: str, folder: Path, watch: Callable[[int], None]) -> Path:
        assert not list(folder.iterdir())
        self.requirements.append(requirement)
        self.before(requirement)
        member, content = self.members[requirement]
        path = folder / "some.whl"
        with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
            archive.writestr(member, content)
        watch(path.stat().st_size)
        self.after(path)
        return path


@pytest.fixture
def index() -> FakeIndex:
    return FakeIndex()


@pytest.fixture
def target(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("TWOSTROKE_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache" / "models" / MODEL.file_name


def ignore(progress: DownloadProgress) -> None:
    del progress


def left_over(target: Path) -> list[str]:
    """Return the names of files in the cache, except lock files."""
    if not target.parent.exists():
        return []
    return sorted(p.name for p in target.parent.iterdir() if not p.name.endswith(".lock"))


def refusal(
    model: PackagedModel, target: Path, index: FakeIndex, *, keeps_parts: bool = False
) -> str:
    """Pull, expect a DownloadError, check the files that are left, and return the message."""
    with pytest.raises(DownloadError) as caught:
        pull_package(model, ignore, index)
    assert left_over(target) == ([f".pull-{target.name}"] if keeps_parts else [])
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_parts_are_joined_checked_and_described(target: Path, index: FakeIndex) -> None:
    pull_package(MODEL, ignore, index)
    assert target.read_bytes() == CONTENT
    assert left_over(target) == ["two.gguf", "two.gguf.json"]
    facts = json.loads((target.parent / "two.gguf.json").read_text())
    assert facts["files"][0]["sha256"] == MODEL.sha256
    assert facts["licence"] == "MIT"
    assert facts["source"][1] == "pypi:half-2==1.0:half_2/data.bin"


def test_a_model_in_the_cache_is_not_fetched_again(target: Path, index: FakeIndex) -> None:
    pull_package(MODEL, ignore, index)
    pull_package(MODEL, ignore, index)
    assert index.requirements == ["half-1==1.0", "half-2==1.0"]


def test_a_model_of_the_catalogue_is_there_whatever_became_of_its_record(
    target: Path, index: FakeIndex
) -> None:
    pull_package(MODEL, ignore, index)
    (target.parent / "two.gguf.json").write_text("{")
    record = record_of_package(MODEL)
    assert record is not None
    assert record.is_here
    assert record.licence == "MIT"


def test_a_truncated_file_in_the_cache_is_fetched_again(target: Path, index: FakeIndex) -> None:
    target.parent.mkdir(parents=True)
    target.write_bytes(CONTENT[:1000])
    record = record_of_package(MODEL)
    assert record is not None
    assert not record.is_here
    pull_package(MODEL, ignore, index)
    assert target.read_bytes() == CONTENT


def test_progress_only_grows_and_ends_at_the_total(target: Path, index: FakeIndex) -> None:
    seen: list[DownloadProgress] = []
    pull_package(MODEL, seen.append, index)
    assert {p.phase for p in seen} == {"download", "unpack", "verify"}
    assert {p.total_bytes for p in seen} == {len(CONTENT)}
    for phase in ("download", "unpack", "verify"):
        done = [p.done_bytes for p in seen if p.phase == phase]
        assert done == sorted(done)
    assert seen[-1] == DownloadProgress("verify", len(CONTENT), len(CONTENT))


def test_a_wrong_checksum_is_refused(target: Path, index: FakeIndex) -> None:
    member, content = index.members["half-2==1.0"]
    index.members["half-2==1.0"] = (member, content[:-1] + b"\0")
    assert "sent something else than 'two-halves'" in refusal(MODEL, target, index)


def test_a_package_without_the_file_is_refused(target: Path, index: FakeIndex) -> None:
    index.members["half-2==1.0"] = ("other.bin", b"")
    assert "has no file 'half_2/data.bin'" in refusal(MODEL, target, index, keeps_parts=True)


@pytest.mark.parametrize("damage", ["no zip", "flipped bytes", "cut"])
def test_a_damaged_wheel_is_refused(target: Path, index: FakeIndex, damage: str) -> None:
    def spoil(path: Path) -> None:
        data = bytearray(path.read_bytes())
        if damage == "no zip":
            data = bytearray(b"<html>")
        elif damage == "cut":
            del data[len(data) // 2 :]
        else:
            data[200:216] = bytes(16)
        path.write_bytes(data)

    index.after = spoil
    assert "is damaged: try again" in refusal(MODEL, target, index)


def test_a_later_pull_continues_after_the_last_whole_part(target: Path, index: FakeIndex) -> None:
    def interrupt(requirement: str) -> None:
        if requirement.startswith("half-2"):
            raise KeyboardInterrupt

    index.before = interrupt
    with pytest.raises(KeyboardInterrupt, match=r"1 of 2 parts \(3 MB\) are kept: pull"):
        pull_package(MODEL, ignore, index)
    assert left_over(target) == [".pull-two.gguf"]
    index.before = lambda _: None
    index.requirements.clear()
    seen: list[DownloadProgress] = []
    pull_package(MODEL, seen.append, index)
    assert index.requirements == ["half-2==1.0"]
    assert target.read_bytes() == CONTENT
    assert left_over(target) == ["two.gguf", "two.gguf.json"]


def keep_one_part(target: Path) -> Path:
    """Leave the files of a pull that was interrupted in its second part; return their folder."""
    folder = target.parent / f".pull-{target.name}"
    folder.mkdir(parents=True)
    (folder / "whole.part").write_bytes(HALVES[0])
    (folder / "parts.json").write_text(json.dumps({"ends": [len(HALVES[0])]}))
    return folder


def test_an_interruption_while_it_waits_says_what_is_kept(target: Path, index: FakeIndex) -> None:
    keep_one_part(target)

    def interrupt(progress: DownloadProgress) -> None:
        assert progress.phase == "wait"
        raise KeyboardInterrupt

    lock = target.with_name(f".{target.name}.lock")
    with locked(lock, ignore), pytest.raises(KeyboardInterrupt, match=r"1 of 2 parts \(3 MB\) are"):
        pull_package(MODEL, interrupt, index)


def test_an_interruption_while_the_journal_is_read_deletes_nothing(
    target: Path, index: FakeIndex, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = keep_one_part(target)
    read_file, interrupts = packages.read_regular_file, [KeyboardInterrupt]

    def interrupted(path: Path) -> bytes:
        if path == folder / "parts.json" and interrupts:
            raise interrupts.pop()
        return read_file(path)

    monkeypatch.setattr(packages, "read_regular_file", interrupted)
    with pytest.raises(KeyboardInterrupt, match=r"1 of 2 parts \(3 MB\) are kept"):
        pull_package(MODEL, ignore, index)
    pull_package(MODEL, ignore, index)
    assert index.requirements == ["half-2==1.0"]
    assert target.read_bytes() == CONTENT


def test_an_interruption_of_the_first_part_leaves_nothing(target: Path, index: FakeIndex) -> None:
    def interrupt(requirement: str) -> None:
        raise KeyboardInterrupt

    index.before = interrupt
    with pytest.raises(KeyboardInterrupt, match=r"Interrupted\. Nothing was kept"):
        pull_package(MODEL, ignore, index)
    assert left_over(target) == []


@pytest.mark.parametrize("damage", ["cut off", "changed", "no journal"])
def test_a_damaged_part_of_an_earlier_pull_is_fetched_again(
    target: Path, index: FakeIndex, damage: str
) -> None:
    folder = target.parent / f".pull-{target.name}"
    folder.mkdir(parents=True)
    content = HALVES[0][:-1] if damage == "cut off" else HALVES[0]
    if damage == "changed":
        content = b"?" + content[1:]
    (folder / "whole.part").write_bytes(content)
    if damage != "no journal":
        journal = {"ends": [len(HALVES[0])]}
        (folder / "parts.json").write_text(json.dumps(journal))
    if damage == "changed":  # only the whole has a checksum: then everything goes
        assert "sent something else" in refusal(MODEL, target, index)
    pull_package(MODEL, ignore, index)
    assert target.read_bytes() == CONTENT


def test_bytes_after_the_last_whole_part_are_dropped(target: Path, index: FakeIndex) -> None:
    def fill_up(requirement: str) -> None:
        if requirement.startswith("half-2"):
            path = target.parent / f".pull-{target.name}" / "whole.part"
            with path.open("ab") as file:
                file.write(b"half of a part")
            raise OSError(errno.ENOSPC, "No space left on device")

    index.before = fill_up
    message = refusal(MODEL, target, index, keeps_parts=True)
    assert "The disk is full" in message
    assert "1 of 2 parts" in message
    index.before = lambda _: None
    pull_package(MODEL, ignore, index)
    assert target.read_bytes() == CONTENT


def test_a_download_error_passes_through(target: Path, index: FakeIndex) -> None:
    def fail(requirement: str) -> None:
        raise DownloadError(f"no network for {requirement}.")

    index.before = fail
    assert refusal(MODEL, target, index) == "no network for half-1==1.0."


def test_a_full_disk_is_detected_before_the_download(
    target: Path, index: FakeIndex, monkeypatch: pytest.MonkeyPatch
) -> None:
    usage = shutil.disk_usage("/")
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage._replace(free=10_000_000))
    assert "needs 27 MB of disk space" in refusal(MODEL, target, index)
    assert index.requirements == []


def test_a_disk_that_fills_up_during_the_download_is_one_sentence(
    target: Path, index: FakeIndex
) -> None:
    def full(requirement: str) -> None:
        raise OSError(errno.ENOSPC, "No space left on device", requirement)

    index.before = full
    assert re.search(r"disk is full\. Nothing was kept\.", refusal(MODEL, target, index))


def test_a_cache_that_cannot_be_written_is_one_sentence(target: Path, index: FakeIndex) -> None:
    target.parents[1].write_text("")
    with pytest.raises(DownloadError, match="or set TWOSTROKE_CACHE to a folder that you can"):
        pull_package(MODEL, ignore, index)


def test_a_model_of_unknown_size_is_fetched_and_recorded(target: Path, index: FakeIndex) -> None:
    record = pull_package(UNLISTED, ignore, index)
    assert record_of_package(UNLISTED) == record
    assert target.read_bytes() == HALVES[0]
    assert record.files[0].sha256 == hashlib.sha256(HALVES[0]).hexdigest()


def test_a_moved_cache_keeps_its_models(
    target: Path, index: FakeIndex, monkeypatch: pytest.MonkeyPatch
) -> None:
    pull_package(UNLISTED, ignore, index)
    moved = target.parents[1].rename(target.parents[1].with_name("moved"))
    monkeypatch.setenv("TWOSTROKE_CACHE", str(moved))
    record = record_of_package(UNLISTED)
    assert record is not None
    assert record.is_here


def test_files_of_a_killed_pull_are_removed(target: Path, index: FakeIndex) -> None:
    stale = target.parent / f".pull-{target.name}" / "tmpabc"
    stale.mkdir(parents=True)
    (stale / "some.whl").write_bytes(b"half")
    pull_package(MODEL, ignore, index)
    assert left_over(target) == ["two.gguf", "two.gguf.json"]


def test_one_of_many_concurrent_pulls_works_and_the_others_wait(
    target: Path, index: FakeIndex
) -> None:
    everyone_waits = threading.Semaphore(0)
    phases: list[str] = []
    index.before = lambda _: [everyone_waits.acquire(timeout=10) for _ in range(3)] and None

    def watch(progress: DownloadProgress) -> None:
        phases.append(progress.phase)
        if progress.phase == "wait":
            everyone_waits.release(2)  # the two parts ask three times each

    threads = [threading.Thread(target=pull_package, args=(MODEL, watch, index)) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert target.read_bytes() == CONTENT
    assert phases.count("wait") == 3
    assert index.requirements == ["half-1==1.0", "half-2==1.0"]
