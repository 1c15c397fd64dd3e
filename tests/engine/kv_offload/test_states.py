"""Snapshots of recurrent states in KV offload: stored with their pages, loaded, and refused."""

from __future__ import annotations

import random
import threading
import time
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import pytest

from support.engines import tiny_client
from support.stored_pages import kind
from support.stores import SECRET, missing, store
from support.tiny import tiny_of
from support.waiting import wait_for
from twostroke.core.request import Hints
from twostroke.core.sampling import SamplingParams
from twostroke.engine.kv_offload import redis
from twostroke.engine.kv_offload.disk import DiskTier, stored_pages
from twostroke.engine.kv_offload.folder import read_folder, verify
from twostroke.engine.kv_offload.manager import OffloadManager
from twostroke.engine.kv_offload.redis import RedisTier
from twostroke.engine.kv_offload.tier import PageValue
from twostroke.model.program.kv_layout import PageGroups

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from twostroke.engine.client import Client

GREEDY = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)
PROMPT = [3 + i * i % 200 for i in range(100)]  # 6 pages, and 4 tokens
KEEP_HINTS = Hints(keep_s=3600.0)


class FaultyStates(DiskTier):
    """A disk on which reading a snapshot fails, or waits until the `gate` opens."""

    fails, hangs = False, False
    num_states = 0
    gate = threading.Event()

    def fetch(self, name: bytes, page: memoryview) -> bool:
        if len(page) == self._page_bytes:
            return super().fetch(name, page)
        if self.hangs:
            self.gate.wait(60.0)
        self.num_states += 1
        return not self.fails and super().fetch(name, page)

    def probe(self) -> float:
        return 0.002


@contextmanager
def engine(
    folder: Path,
    url: str | None = None,
    max_bytes: int = 10**9,
    num_states: int = 12,
    make_tier: type[DiskTier] = DiskTier,
    **changes: Any,
) -> Iterator[tuple[Client, OffloadManager]]:
    """Yield an engine of a model with recurrent layers, with pages on disk or in Redis."""
    folder.mkdir(exist_ok=True)
    with tiny_client(
        folder, tiny_of("qwen3.5"), num_pages=200, num_states=num_states, max_running=3
    ) as (client, backend):
        assert backend.state_memory is not None
        spec = kind(
            page_bytes=backend.pages.page_bytes,
            groups=PageGroups(16),
            state_bytes=backend.state_memory.page_bytes,
            **changes,
        )
        tiers = [
            make_tier(folder / "pages", spec, max_bytes, "tiny")
            if url is None
            else RedisTier(url, spec)
        ]
        manager = OffloadManager(
            client.loop.pages, spec, tiers, prefill_s=lambda first, end: (end - first) * 0.01
        )
        yield client, manager


def answer(client: Client, prompt: list[int], **options: Any) -> tuple[tuple[int, ...], int]:
    """Return the tokens of an answer, and how many of the prompt's were cached."""
    output = client.generate(prompt, GREEDY, **options).wait()[0]
    assert output.usage is not None
    return output.token_ids, output.usage.cached_tokens


def state_files(folder: Path, state_bytes: int) -> list[Path]:
    """Return the files of snapshots, which are larger than those of pages."""
    return [path for path in stored_pages(folder / "pages") if path.stat().st_size > state_bytes]


def num_state_bytes(client: Client) -> int:
    memory = client.loop.pages.state_memory
    assert memory is not None
    return memory.page_bytes


def write(folder: Path) -> tuple[tuple[int, ...], list[Path]]:
    """Answer the prompt, and keep its pages; return the answer and the files of snapshots."""
    with engine(folder) as (client, manager):
        tokens, num_cached = answer(client, PROMPT, hints=KEEP_HINTS)
        assert num_cached == 0
        assert manager.flush(5.0)
        (totals,) = client.loop.snapshot().tiers
        assert totals.pages_written == 6
        files = state_files(folder, num_state_bytes(client))
    assert len(files) == 1, "before the end of the prompt"
    return tokens, files


def test_a_snapshot_is_no_page_of_the_folder(tmp_path: Path) -> None:
    _, (path,) = write(tmp_path)
    (summary,) = read_folder(tmp_path / "pages", time.time())
    assert (summary.num_pages, summary.num_kept) == (6, 6)
    assert summary.num_bytes > path.stat().st_size
    assert not [*verify(tmp_path / "pages")]


def test_a_snapshot_is_found_after_a_restart(tmp_path: Path) -> None:
    tokens, _ = write(tmp_path)
    with engine(tmp_path) as (client, _):
        assert answer(client, PROMPT) == (tokens, 96)
        (totals,) = client.loop.snapshot().tiers
        assert (totals.hits, totals.pages_read) == (1, 6)
        assert totals.bytes_read > num_state_bytes(client)
        assert totals.saved_s > 0
        assert answer(client, PROMPT) == (tokens, 96), "it is in memory now"


def test_a_conversation_continues_from_the_snapshot_that_its_last_turn_used(
    tmp_path: Path,
) -> None:
    with engine(tmp_path) as (client, manager):
        first, _ = answer(client, PROMPT)
        second = [*PROMPT, *first, *range(10, 60)]
        tokens, num_cached = answer(client, second)
        assert num_cached == 96
        assert manager.flush(5.0)
        assert len(state_files(tmp_path, num_state_bytes(client))) == 1
    with engine(tmp_path) as (client, _):
        assert answer(client, second) == (tokens, 96)


def test_a_snapshot_is_loaded_for_pages_that_are_in_memory(tmp_path: Path) -> None:
    tokens, _ = write(tmp_path)
    with engine(tmp_path) as (client, _):
        answer(client, PROMPT)
        pages = client.loop.pages
        with pages.lock:
            pages.scheduler._recurrent.pool.evict_all()
        assert answer(client, PROMPT) == (tokens, 96)
        (totals,) = client.loop.snapshot().tiers
        assert totals.pages_read == 6, "the pages were not read again"


def test_pages_without_their_snapshot_are_computed(tmp_path: Path) -> None:
    tokens, files = write(tmp_path)
    for path in files:
        path.unlink()
    with engine(tmp_path) as (client, _):
        assert answer(client, PROMPT) == (tokens, 0)
        assert client.loop.snapshot().tiers[0].pages_read == 0


@pytest.mark.parametrize("damage", ["a bit flipped", "cut", "another model", "another state"])
def test_a_damaged_snapshot_is_removed_and_computed(tmp_path: Path, damage: str) -> None:
    tokens, (path,) = write(tmp_path)
    data = bytearray(path.read_bytes())
    if damage == "a bit flipped":
        data[-5] ^= 4
    elif damage == "cut":
        del data[-8:]
    else:
        with engine(tmp_path / "other", model="other") as (client, manager):
            prompt = PROMPT if damage == "another model" else PROMPT[5:]
            answer(client, prompt, hints=KEEP_HINTS)
            assert manager.flush(5.0)
            (other,) = state_files(tmp_path / "other", num_state_bytes(client))
        data[:] = other.read_bytes()
    path.write_bytes(data)
    with engine(tmp_path) as (client, _):
        assert answer(client, PROMPT) == (tokens, 0)
        assert not path.exists()


@pytest.mark.parametrize("fault", ["fails", "hangs"])
def test_a_snapshot_that_cannot_be_read_costs_no_request(tmp_path: Path, fault: str) -> None:
    tokens, _ = write(tmp_path)

    class Faulty(FaultyStates):
        gate = threading.Event()
        fails, hangs = fault == "fails", fault == "hangs"

    with engine(tmp_path, make_tier=Faulty) as (client, manager):
        tier = manager._tiers[0].tier
        assert isinstance(tier, Faulty)
        assert answer(client, PROMPT) == (tokens, 0)
        assert tier.num_states == (fault == "fails"), "it waited until the snapshot was read"
        transfers = client.loop.pages.scheduler.prefix_cache.transfers
        if fault == "hangs":
            assert transfers.num_held_states == 1, "the slot may still be written"
            assert answer(client, [*PROMPT, *PROMPT])[1] == 96, "it is in memory now"
        tier.gate.set()
        wait_for(lambda: transfers.num_held_states == 0)


def test_the_time_to_read_a_snapshot_counts_when_loading_is_compared(tmp_path: Path) -> None:
    tokens, _ = write(tmp_path)

    with engine(tmp_path, make_tier=FaultyStates) as (client, manager):
        (tier,) = manager._tiers
        assert client.loop.pages.memory is not None
        ratio = num_state_bytes(client) / client.loop.pages.memory.page_bytes
        assert tier.state_s(manager._spec) == pytest.approx(0.002 * ratio), "as pages of its size"
        tier.record_state_read(10.0)
        assert answer(client, PROMPT) == (tokens, 0)
        assert client.loop.snapshot().tiers[0].slow == 1
        tier.record_state_read(0.01)
        with client.loop.pages.lock:
            client.loop.pages.scheduler._recurrent.pool.evict_all()
        assert answer(client, PROMPT) == (tokens, 96)


def test_other_specs_and_other_models_find_no_snapshot(tmp_path: Path) -> None:
    tokens, _ = write(tmp_path)
    for changes in ({"model": "other"}, {"arithmetic": "cpu amx 15"}):
        with engine(tmp_path, **changes) as (client, _):
            assert answer(client, PROMPT) == (tokens, 0)


def test_the_limit_of_the_folder_counts_snapshots(tmp_path: Path) -> None:
    with engine(tmp_path) as (client, _):
        state_bytes = num_state_bytes(client)
    with engine(tmp_path, max_bytes=state_bytes) as (client, manager):
        answer(client, PROMPT, hints=KEEP_HINTS)
        assert manager.flush(5.0)
        assert not state_files(tmp_path, state_bytes), "larger than the folder may be"
    with engine(tmp_path, max_bytes=2 * state_bytes + 1000) as (client, manager):
        for start in range(5):
            answer(client, [start, *PROMPT], hints=KEEP_HINTS)
        assert manager.flush(5.0)
        assert len(state_files(tmp_path, state_bytes)) == 1
        assert sum(path.stat().st_size for path in stored_pages(tmp_path / "pages")) <= (
            2 * state_bytes + 1000
        )


def test_without_room_for_another_state_prompts_are_computed(tmp_path: Path) -> None:
    tokens, _ = write(tmp_path)
    with engine(tmp_path, num_states=6) as (client, _):  # as many as running requests need
        assert answer(client, PROMPT) == (tokens, 0)


class FakeRedis:
    """The calls of a Redis client that a tier makes, on a dictionary."""

    def __init__(self) -> None:
        self.entries: dict[bytes, bytes] = {}
        self._results: list[Any] = []

    def ping(self) -> None:
        pass

    def close(self) -> None:
        pass

    def set(self, key: bytes, value: bytes, ex: int) -> None:
        assert ex > 0
        self.entries[key] = value

    def getrange(self, key: bytes, first: int, last: int) -> bytes:
        return self.entries.get(key, b"")[first : last + 1]

    def delete(self, key: bytes) -> None:
        self.entries.pop(key, None)

    def pipeline(self, transaction: bool) -> FakeRedis:
        assert not transaction
        self._results = []
        return self

    def exists(self, key: bytes) -> None:
        self._results.append(int(key in self.entries))

    def expire(self, key: bytes, seconds: int, gt: bool) -> None:
        self._results.append(int(gt and seconds > 0 and key in self.entries))

    def execute(self) -> list[Any]:
        return self._results


@pytest.mark.parametrize("damage", ["none", "a bit flipped", "an entry missing", "two swapped"])
def test_a_snapshot_has_several_entries_in_a_store(
    monkeypatch: pytest.MonkeyPatch, damage: str
) -> None:
    pytest.importorskip("redis")
    pytest.importorskip("cryptography")
    monkeypatch.setenv("TWOSTROKE_STORE_KEY", SECRET)
    monkeypatch.setattr(redis, "_MAX_ENTRY_BYTES", 10_000)
    server = FakeRedis()
    monkeypatch.setattr(redis, "_client", lambda _: server)
    tier = RedisTier("redis://store", kind())
    name, state = bytes(range(32)), random.Random(1).randbytes(34_000)
    value = PageValue(1.0, 3, time.time())
    assert tier.offer(name, memoryview(state), value)
    assert not tier.offer(name, memoryview(state), value), "it is there"
    assert len(server.entries) == 4
    assert tier.find([name]) == {name}
    keys = sorted(server.entries)
    match damage:
        case "a bit flipped":
            server.entries[keys[2]] = server.entries[keys[2]][:-1] + b"!"
        case "an entry missing":
            del server.entries[keys[0]]
        case "two swapped":
            first, second = [key for key in keys if len(server.entries[key]) > 10_000][:2]
            entries = server.entries
            entries[first], entries[second] = entries[second], entries[first]
    loaded = memoryview(bytearray(len(state)))
    assert tier.fetch(name, loaded) == (damage == "none")
    assert damage != "none" or bytes(loaded) == state
    assert tier.offer(name, memoryview(state), value) == (damage != "none"), "written again"
    assert tier.fetch(name, loaded)
    assert bytes(loaded) == state


@pytest.mark.skipif(bool(missing()), reason=missing())
def test_snapshots_are_shared_by_a_store_in_several_entries(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TWOSTROKE_STORE_KEY", SECRET)
    monkeypatch.setattr("twostroke.engine.kv_offload.redis._MAX_ENTRY_BYTES", 10_000)
    with store(tmp_path) as server:
        with engine(tmp_path / "a", url=server.url) as (client, manager):
            tokens, _ = answer(client, PROMPT, hints=KEEP_HINTS)
            assert manager.flush(5.0)
            assert num_state_bytes(client) > 20_000
        with engine(tmp_path / "b", url=server.url) as (client, _):
            assert answer(client, PROMPT) == (tokens, 96)
