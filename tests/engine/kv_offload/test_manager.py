"""KV offload: pages are found by a later engine, waited for only while that pays, and written."""

from __future__ import annotations

import threading
import time
from contextlib import closing, contextmanager
from typing import TYPE_CHECKING, Any

import pytest

from support.cached_pages import keys_of, young_to_old
from support.engines import tiny_client
from support.stored_pages import kind
from support.stores import SECRET, missing, store
from support.tiny import write_tiny_gguf
from support.waiting import wait_for
from twostroke.core.distributed_options import OffloadOptions, ParallelOptions
from twostroke.core.errors import UsageError
from twostroke.core.options import CacheOptions, EngineOptions, SpeculationOptions
from twostroke.core.request import Hints
from twostroke.core.sampling import SamplingParams
from twostroke.engine.client import Caller
from twostroke.engine.engine import build
from twostroke.engine.kv_offload.disk import DiskTier, entry_of, stored_pages
from twostroke.engine.kv_offload.disk_index import DiskIndex
from twostroke.engine.kv_offload.manager import OffloadManager
from twostroke.engine.kv_offload.redis import RedisTier
from twostroke.model.families import build_program
from twostroke.model.loader import load
from twostroke.model.program.kv_layout import PageGroups

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path

    from twostroke.engine.client import Client
    from twostroke.engine.counters import TierTotals
    from twostroke.engine.kv_offload.tier import OffloadTier
    from twostroke.engine.scheduler.request_state import RequestState
    from twostroke.engine.scheduler.transfers import Transfer

GREEDY = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)
PROMPT = [3 + i * i % 200 for i in range(100)]  # 6 pages, and 4 tokens


@contextmanager
def engine(
    folder: Path,
    tiers: Sequence[OffloadTier] | None = None,
    token_s: float = 0.01,
    url: str | None = None,
    **changes: Any,
) -> Iterator[tuple[Client, OffloadManager]]:
    """Yield an engine with predicted `token_s` for each token, and pages on disk or in Redis.

    `tiers` are used instead of the folder.
    """
    folder.mkdir(exist_ok=True)
    with tiny_client(folder, num_pages=96) as (client, backend):
        page_bytes = backend.pages.page_bytes
        of = kind(page_bytes=page_bytes, groups=PageGroups(16), **changes)
        if tiers is None:
            tiers = [DiskTier(folder / "pages", of, 10**9, "tiny")]
            tiers += [RedisTier(url, of)] if url else []
        paging = OffloadManager(
            client.loop.pages, of, tiers, prefill_s=lambda first, end: (end - first) * token_s
        )
        yield client, paging


def answer(client: Client, prompt: list[int], **options: Any) -> tuple[tuple[int, ...], int]:
    """Return the tokens of an answer, and how many of the prompt's were cached."""
    output = client.generate(prompt, GREEDY, **options).wait()[0]
    return output.token_ids, output.usage.cached_tokens


def totals(client: Client) -> TierTotals:
    (tier_totals,) = client.loop.snapshot().tiers
    return tier_totals


def test_pages_used_twice_are_found_after_a_restart(tmp_path: Path) -> None:
    with engine(tmp_path) as (client, paging):
        tokens, cached = answer(client, PROMPT)
        assert cached == 0
        assert paging.flush(5.0)
        assert totals(client).pages_written == 0, "one use is no reason to write"
        assert answer(client, PROMPT) == (tokens, 96)
        assert paging.flush(5.0)
        assert totals(client).pages_written == 6
    with engine(tmp_path) as (client, paging):
        assert answer(client, PROMPT) == (tokens, 96)
        result = totals(client)
        assert (result.hits, result.pages_read, result.pages_stored) == (1, 6, 6)
        assert result.saved_s > 0
        assert answer(client, [*PROMPT[:40], 7, 8, 9])[1] == 32, "it is in memory now"
        wait_for(lambda: client.loop.snapshot().scheduler.num_referenced_pages == 0)


def test_a_request_that_wants_its_pages_kept_is_written_at_once(tmp_path: Path) -> None:
    with engine(tmp_path) as (client, paging):
        tokens, _ = answer(client, PROMPT, hints=Hints(keep_s=3600.0))
        assert paging.flush(5.0)
        assert totals(client).pages_written == 6
    (page, *_) = (tmp_path / "pages").glob("*/??/*")
    assert page.stat().st_mtime > time.time() + 3000
    with engine(tmp_path) as (client, _):
        assert answer(client, PROMPT) == (tokens, 96)


def test_pages_are_worth_the_measured_time_of_their_whole_prompt(tmp_path: Path) -> None:
    with tiny_client(tmp_path, num_pages=96, token_budget=32, max_running=32) as (client, backend):
        of = kind(page_bytes=backend.pages.page_bytes, groups=PageGroups(16))
        tier, time_ = DiskTier(tmp_path, of, 10**9, "tiny"), client.loop.speculator.step_time
        client.loop.speculator.times_steps = True

        def seconds(first: int, end: int) -> float:
            return (end * end - first * first) * (1e-3 if time_.num_steps else 1e-6)

        paging = OffloadManager(client.loop.pages, of, [tier], prefill_s=seconds)
        answer(client, PROMPT, hints=Hints(keep_s=60.0))
        assert paging.flush(5.0)
    entries = [entry_of(path) for path in stored_pages(tmp_path)]
    saved_s = [entry.saved_s for entry in entries if entry is not None]
    assert saved_s == pytest.approx([96 * 96 * 1e-3 / 6] * 6)


def test_pages_of_the_first_chunk_outlast_those_that_continue_it(tmp_path: Path) -> None:
    with tiny_client(tmp_path, num_pages=96, token_budget=32, max_running=32) as (client, backend):
        of = kind(page_bytes=backend.pages.page_bytes, groups=PageGroups(16))
        tier, pages = DiskTier(tmp_path, of, 10**9, "tiny"), client.loop.pages
        paging = OffloadManager(
            pages, of, [tier], prefill_s=lambda first, end: float(end * end - first * first)
        )
        for _ in range(2):  # written when they are computed again, in three chunks
            with pages.lock:
                pages.scheduler._pool.evict_all()
            keys = keys_of(client, PROMPT)
            answer(client, PROMPT)
        assert paging.flush(5.0)
        wait_for(lambda: young_to_old(client, keys) == [0, 1, 2, 3, 4, 5])
    entries = [entry_of(path) for path in stored_pages(tmp_path)]
    ledger = DiskIndex(10**9)
    for path, entry in zip(stored_pages(tmp_path), entries, strict=True):
        assert entry is not None
        ledger.add(bytes.fromhex(path.parent.name + path.name), entry)
    assert len({entry.saved_s for entry in ledger.entries.values()}) == 3
    ledger.max_bytes = 1
    removed_indices = [ledger.entries[name].index for name in ledger.surplus(time.time(), 0)]
    assert removed_indices == [5, 4, 3, 2, 1, 0]


def test_steps_are_timed_for_kv_offload_also_without_drafts(tmp_path: Path) -> None:
    tiers = OffloadOptions(page_cache=str(tmp_path / "pages"))
    options = EngineOptions(speculation=SpeculationOptions("off"), offload=tiers)
    with closing(build(str(write_tiny_gguf(tmp_path / "tiny.gguf")), options)) as engine:
        engine.client.generate(PROMPT, GREEDY).wait()
        assert engine.client.loop.speculator.step_time.num_steps > 1


def test_pages_computed_a_second_time_are_written(tmp_path: Path) -> None:
    with engine(tmp_path) as (client, paging):
        answer(client, PROMPT)
        with client.loop.pages._changed:
            client.loop.pages.scheduler._pool.evict_all()
        assert answer(client, PROMPT)[1] == 0
        assert paging.flush(5.0)
        assert totals(client).pages_written == 6


def test_other_specs_and_other_tenants_compute(tmp_path: Path) -> None:
    with engine(tmp_path) as (client, paging):
        tokens, _ = answer(client, PROMPT, hints=Hints(keep_s=60.0), caller=Caller(tenant="a"))
        assert paging.flush(5.0)
    with engine(tmp_path) as (client, _):
        assert answer(client, PROMPT, caller=Caller(tenant="b")) == (tokens, 0)
        assert answer(client, PROMPT, caller=Caller(tenant="a")) == (tokens, 96)
    with engine(tmp_path, arithmetic="other") as (client, _):
        assert answer(client, PROMPT, caller=Caller(tenant="a")) == (tokens, 0)


@pytest.mark.skipif(bool(missing()), reason=missing())
def test_machines_share_a_store_and_keep_what_they_fetched(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TWOSTROKE_STORE_KEY", SECRET)
    caller = Caller(tenant="t")
    with store(tmp_path) as server:
        with engine(tmp_path / "a", url=server.url) as (client, paging):
            tokens, _ = answer(
                client, PROMPT, hints=Hints(keep_s=3600.0), caller=Caller(tenant="t")
            )
            assert paging.flush(5.0)
        with engine(tmp_path / "b", url=server.url) as (client, paging):
            assert answer(client, PROMPT) == (tokens, 0), "of another tenant"
            assert answer(client, PROMPT, caller=caller) == (tokens, 96)
            assert paging.flush(5.0)
            disk, shared = client.loop.snapshot().tiers
            assert (disk.tier, disk.pages_read, disk.pages_written) == ("disk", 0, 6)
            assert (shared.tier, shared.pages_read, shared.pages_written) == ("store", 6, 0)
            assert shared.pages_stored is None
        with server.frozen(), engine(tmp_path / "b", url=server.url) as (client, _):
            assert answer(client, PROMPT, caller=caller) == (tokens, 96)


def test_other_engines_are_asked_for_what_the_tiers_lack(tmp_path: Path) -> None:
    with engine(tmp_path) as (client, paging):
        tokens, _ = answer(client, PROMPT)
        answer(client, PROMPT[:50], hints=Hints(keep_s=60.0))
        assert paging.flush(5.0)
    with engine(tmp_path) as (client, _):
        pages, left = client.loop.pages, []

        def other_engine(state: RequestState) -> bool:
            transfer = pages.begin(state)
            if transfer is not None:
                left.append((transfer.first_page, len(transfer.keys)))
                pages.end(transfer)
            return False

        pages.on_submit.append(other_engine)
        assert answer(client, PROMPT) == (tokens, 48)
        answer(client, PROMPT)
    assert left == [(3, 3)]


class Faulty:
    """A tier that claims to have every page, and fails to read it in a chosen way."""

    title, is_writable = "faulty", True

    def __init__(self, fault: str) -> None:
        self.fault = fault
        self.num_fetched = 0
        self.gate = threading.Event()

    def find(self, names: Sequence[bytes]) -> set[bytes]:
        if self.fault == "find":
            raise RuntimeError("broken")
        return set(names)

    def fetch(self, name: bytes, page: memoryview) -> bool:
        self.num_fetched += 1
        page[:] = b"\xff" * len(page)
        if self.fault == "fetch":
            raise RuntimeError("broken")
        if self.fault == "hangs":
            self.gate.wait(20.0)
        if self.fault == "slow":
            time.sleep(0.3)
        return False

    def offer(self, *_: object) -> bool:
        return False

    def probe(self) -> float:
        return 1000.0 if self.fault == "known to be slow" else 0.0

    def size(self) -> tuple[int, int]:
        return 0, 0

    def close(self) -> None:
        """Nothing is open."""


@pytest.mark.parametrize("fault", ["find", "fetch", "damaged", "hangs", "slow", "known to be slow"])
def test_a_tier_that_fails_or_is_slow_costs_no_request(tmp_path: Path, fault: str) -> None:
    with tiny_client(tmp_path) as (client, _):
        tokens, _ = answer(client, PROMPT)
    tier = Faulty(fault)
    with engine(tmp_path, [tier]) as (client, _):
        began_s = time.monotonic()
        assert answer(client, PROMPT) == (tokens, 0)
        assert time.monotonic() - began_s < 20.0, "it waited longer than computing takes"
        assert tier.num_fetched == (0 if fault in {"find", "known to be slow"} else 1)
        if fault == "hangs":
            num_held_pages = client.loop.pages.scheduler.prefix_cache.transfers.num_held_pages
            assert num_held_pages, "a page was given back that may still be written"
            assert answer(client, PROMPT)[0] == tokens
        tier.gate.set()


class Throttled(DiskTier):
    """A disk that becomes slow: reading a page takes `page_s` after the first `num_fast` pages."""

    page_s, num_fast = 0.0, 0

    def fetch(self, name: bytes, page: memoryview) -> bool:
        self.num_fast -= 1
        if self.num_fast < 0:
            time.sleep(self.page_s)
        return super().fetch(name, page)


@pytest.mark.parametrize(("num_fast", "page_s"), [(0, 1.5), (1, 3.0)])
def test_a_disk_that_becomes_slow_costs_at_most_a_twentieth_of_computing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, num_fast: int, page_s: float
) -> None:
    whole_s = 10.0  # that computing the prompt takes, by the engine's model
    with engine(tmp_path, token_s=whole_s / 100) as (client, paging):
        tokens, _ = answer(client, PROMPT, hints=Hints(keep_s=3600.0))
        assert paging.flush(5.0)
        page_bytes = client.loop.pages.memory.page_bytes  # type: ignore[union-attr]
    of = kind(page_bytes=page_bytes, groups=PageGroups(16))
    tier = Throttled(tmp_path / "pages", of, 10**9, "tiny")
    began_s: dict[Transfer, float] = {}
    most_s: list[float] = []  # that requests would wait
    with engine(tmp_path, [tier], token_s=whole_s / 100) as (client, _):
        transfers = client.loop.pages.scheduler.prefix_cache.transfers
        begin, drop = transfers.begin, transfers.drop

        def begun(state: RequestState, within_s: float) -> Transfer | None:
            transfer = begin(state, within_s)
            if transfer is not None:
                began_s[transfer] = transfer.expires_at_s - within_s
            return transfer

        def dropped(transfer: Transfer) -> None:
            if not transfer.is_dropped:
                most_s.append(transfer.expires_at_s - began_s[transfer])
            drop(transfer)

        assert answer(client, PROMPT) == (tokens, 96), "it was not measured as fast"
        monkeypatch.setattr(transfers, "begin", begun)
        monkeypatch.setattr(transfers, "drop", dropped)
        tier.num_fast, tier.page_s = num_fast, page_s
        for num_slow in (1, 2):
            with client.loop.pages.lock:
                client.loop.pages.scheduler._pool.evict_all()
            assert answer(client, PROMPT) == (tokens, 16 * num_fast if num_slow == 1 else 0)
            wait_for(lambda count=num_slow: totals(client).slow == count)
        assert tier.num_fast == -1, "a disk that is known to be slow was read again"
    saved_s, slack_s = 16 * num_fast * whole_s / 100, 0.04 * whole_s
    assert most_s == pytest.approx([saved_s + slack_s, slack_s], abs=0.1)


def test_a_tier_that_hangs_is_left_alone_and_delays_no_end(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    tier = Faulty("hangs")
    with engine(tmp_path, [tier]) as (client, _):
        answer(client, PROMPT)
        answer(client, [9, *PROMPT])
        assert totals(client).lookups == 1, "another request waited for a tier that hangs"
        began_s = time.monotonic()
        client.loop.close()
        assert time.monotonic() - began_s < 30.0
    assert "The page cache does not answer" in caplog.text
    tier.gate.set()


def test_the_first_request_gives_pages_more_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    waits: list[float] = []
    with engine(tmp_path) as (client, paging):
        monkeypatch.setattr(client.loop.pages, "begin", lambda _, within_s: waits.append(within_s))
        for is_measured in (False, True):
            monkeypatch.setattr(paging, "_is_measured", lambda is_measured=is_measured: is_measured)
            answer(client, [8, *PROMPT])
            answer(client, [8, *PROMPT[:8]])
    assert waits == pytest.approx([1.01 / 2, 0.1, 0.05])


def test_pages_offered_while_the_writer_goes_to_sleep_are_written(tmp_path: Path) -> None:
    with engine(tmp_path) as (client, paging):
        clear = paging._has_offers.clear

        def clear_late() -> None:
            paging._has_offers.clear = clear
            paging._offer([bytes(32)], 0, 1, 0.0)
            clear()

        paging._has_offers.clear = clear_late
        answer(client, PROMPT, hints=Hints(keep_s=60.0))
        assert paging.flush(5.0)


def test_short_prompts_are_not_looked_up(tmp_path: Path) -> None:
    tier = Faulty("damaged")
    with engine(tmp_path, [tier], token_s=0.0005) as (client, _):
        answer(client, PROMPT)
        assert totals(client).lookups == 0


def test_an_engine_without_pages_to_spare_says_so(tmp_path: Path) -> None:
    tiny_path = write_tiny_gguf(tmp_path / "tiny.gguf")
    program = build_program(load(str(tiny_path)).spec)
    tiers = OffloadOptions(page_cache=str(tmp_path))
    few = CacheOptions(32 * program.page_bytes(16), 512, kv_format="f16")
    with pytest.raises(UsageError, match="needs more pages than those of the longest request"):
        build(str(tiny_path), EngineOptions(cache=few, offload=tiers))


def test_options_that_exclude_a_page_cache_are_refused(tmp_path: Path) -> None:
    tiers = OffloadOptions(page_cache=str(tmp_path))
    with pytest.raises(UsageError, match="needs"):
        EngineOptions(cache=CacheOptions(prefix_cache=False), offload=tiers)
    with pytest.raises(UsageError, match="one process"):
        EngineOptions(parallel=ParallelOptions(tensor=2), offload=tiers)
    for wrong in ({"page_cache": ""}, {"page_cache_bytes": 10**9}, {"page_store": "http://a"}):
        with pytest.raises(UsageError):
            OffloadOptions(**wrong)  # type: ignore[arg-type]
