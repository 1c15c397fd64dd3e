"""Page caches of simulated replicas: what is loaded, when that pays, and what stays the same."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from msgspec.structs import replace

from support.tiny import tiny_of, write_tiny_gguf
from twostroke.core.errors import UsageError
from twostroke.core.options import BatchOptions, CacheOptions
from twostroke.engine.kv_offload.disk_index import PREFIX_BYTES
from twostroke.engine.kv_offload.rules import ComputedPages, RecentUses
from twostroke.lab.planner import Question, load_planned_model
from twostroke.lab.planner.devices import Device
from twostroke.lab.simulator import RequestArrival, SimulationSetup, Workload, simulate
from twostroke.lab.simulator.page_cache import page_name

if TYPE_CHECKING:
    from pathlib import Path

_BLOCK = 64
_PAGE = 16
_NUM_USERS = 20
_CONTEXT = 2048
_SLOW = Device("slow", memory_bytes=1e9, bandwidth=1e9, peaks={"bf16": 1e9})


def _chats(num_turns: int, gap_s: float) -> Workload:
    """Return conversations that take turns; each prompt begins with all earlier ones."""
    arrivals = []
    for turn in range(num_turns):
        for user in range(_NUM_USERS):
            blocks = tuple(1000 * user + block for block in range(8 + 4 * turn))
            at_s = gap_s * len(arrivals)
            arrival = RequestArrival(at_s, _BLOCK * len(blocks), 4, blocks, block_size=_BLOCK)
            arrivals.append(arrival)
    return Workload("chats", tuple(arrivals))


def _setup(path: Path, kind: str) -> SimulationSetup:
    write_tiny_gguf(path, tiny_of(kind, context_length=_CONTEXT))
    setup = SimulationSetup(
        load_planned_model(str(path)),
        _SLOW,
        question=Question(kv_format="f16"),
        batch=BatchOptions(token_budget=256, max_running=4),
        cache=CacheOptions(context_length=_CONTEXT, memory_bytes=100_000_000),
    )
    size = setup.size()
    state_bytes = setup.model.program.state_bytes
    page_bytes = (size.cache_bytes - size.num_states * state_bytes) // size.num_pages
    # The memory has pages for few requests, so a turn finds none of the user's earlier pages.
    num_pages = 2 * (_CONTEXT // _PAGE) if kind == "llama" else 400
    memory = num_pages * page_bytes + size.num_states * state_bytes
    return replace(setup, cache=replace(setup.cache, memory_bytes=memory))


@pytest.fixture(scope="module", params=["llama", "gemma3", "qwen3.5"])
def setup(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory):
    """Replicas of models with one kind of pages, with sliding windows, and with states."""
    return _setup(tmp_path_factory.mktemp("model") / "tiny.gguf", request.param)


def _slowed(setup: SimulationSetup) -> SimulationSetup:
    """Return the setup with a device on which a prompt of the first turn takes 0.5 s."""
    one = Workload("one", (RequestArrival(0.0, 512, 1),))
    (log,) = simulate(setup, one).logs
    factor = log.latencies["ttft"] / 0.5
    device = setup.device
    peaks = {name: peak * factor for name, peak in device.peaks.items()}
    return replace(setup, device=replace(device, bandwidth=device.bandwidth * factor, peaks=peaks))


def test_later_turns_load_the_pages_of_earlier_ones(setup: SimulationSetup) -> None:
    setup = _slowed(setup)
    load = _chats(4, gap_s=10.0)
    without = simulate(setup, load)
    cached = simulate(replace(setup, page_cache_size=1 << 30), load)
    assert without.num_page_loads == 0
    # Pages are stored when they are computed for the second time: at the second turn.
    hits = [log.num_cached for log in cached.logs]
    assert sum(hits[: 2 * _NUM_USERS]) == sum(log.num_cached for log in without.logs)
    if setup.model.program.state_bytes:  # pages count only up to a snapshot that was computed again
        assert cached.num_page_loads > 0
    else:
        assert cached.num_page_loads == 2 * _NUM_USERS
        assert hits[2 * _NUM_USERS :] == [512] * _NUM_USERS + [768] * _NUM_USERS
    assert sum(hits) > 16 * cached.num_page_loads
    ttft, loaded_ttft = (one.report.latencies["ttft"].mean for one in (without, cached))
    assert loaded_ttft < ttft
    assert [log.num_output for log in cached.logs] == [4] * len(load.arrivals)


def test_a_slow_or_small_page_cache_changes_nothing(setup: SimulationSetup) -> None:
    setup = _slowed(setup)
    load = _chats(3, gap_s=10.0)
    without = simulate(setup, load)
    for changes in ({"page_cache_speed": 1e3}, {"page_cache_size": 1}):
        other = simulate(replace(setup, **({"page_cache_size": 1 << 30} | changes)), load)
        assert other.num_page_loads == 0
        assert other.logs == without.logs


def test_quick_prefill_loads_nothing(setup: SimulationSetup) -> None:
    device = replace(_SLOW, bandwidth=1e15, peaks={"bf16": 1e15})
    cached = simulate(replace(setup, device=device, page_cache_size=1 << 30), _chats(3, gap_s=10.0))
    assert cached.num_page_loads == 0


def test_a_crowd_is_served_whatever_the_size_of_the_page_cache(setup: SimulationSetup) -> None:
    setup = _slowed(setup)
    load = _chats(4, gap_s=0.05)
    for page_cache_size in (10_000, 200_000, 1_000_000, 1 << 30):
        crowd = replace(setup, page_cache_size=page_cache_size, replicas=2)
        simulation = simulate(crowd, load)
        assert simulation.report.num_completed == len(load.arrivals)
        assert all(log.num_cached < log.num_prompt for log in simulation.logs)
        if page_cache_size == 200_000:
            assert simulate(crowd, load).logs == simulation.logs, "a simulation repeats"


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"page_cache_size": 0}, "page_cache_size must be from 1"),
        ({"page_cache_size": 1, "page_cache_speed": 0}, "page_cache_speed must be from 1"),
        (
            {"page_cache_size": 1, "replicas": 2, "prefill_replicas": 1, "link": 1e9},
            "page_cache_size cannot be combined with prefill_replicas",
        ),
        (
            {"page_cache_size": 1, "cache": CacheOptions(prefix_cache=False)},
            "page_cache_size needs the prefix cache",
        ),
    ],
)
def test_impossible_settings_are_refused(tmp_path: Path, changes, reason: str) -> None:
    setup = _setup(tmp_path / "tiny.gguf", "llama")
    with pytest.raises(UsageError, match=reason):
        replace(setup, **changes)


def test_pages_are_stored_when_they_are_computed_again() -> None:
    computed = ComputedPages()
    assert computed.add([b"a", b"b"]) == 0
    assert computed.add([b"a", b"b", b"c"]) == 2
    assert computed.add([b"c"]) == 1


def test_a_use_is_written_once_a_minute() -> None:
    uses = RecentUses()
    assert [uses.add(b"a", at_s) for at_s in (0.0, 59.0, 60.0, 61.0)] == [True, False, True, False]
    assert uses.add(b"a", 61.0, always=True)
    assert uses.add(b"b", 61.0)


def test_pages_of_different_groups_differ_in_the_bytes_that_name_a_previous_page() -> None:
    names = {page_name((group, b"0123456789"))[:PREFIX_BYTES] for group in range(4)}
    assert len(names) == 4
