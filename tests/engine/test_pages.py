"""KV pages copied between backends: the other backend continues with the same tokens."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING

import pytest

from support.invariants import check_scheduler
from support.tiny import tiny_of, write_tiny_gguf
from twostroke.backends.cpu import CpuBackend
from twostroke.backends.reference import ReferenceBackend
from twostroke.core.request import Request
from twostroke.core.sampling import SamplingParams
from twostroke.engine.kv_cache import PagePool, PrefixIndex
from twostroke.engine.scheduler import Continuous, Scheduler, SchedulerConfig
from twostroke.model.families import build_program
from twostroke.model.weights import load_path

if TYPE_CHECKING:
    from pathlib import Path

    from twostroke.backends.interface import Backend

NUM_PAGES, SIZE, PROMPT = 96, 16, 150


class Machine:
    """A backend with a scheduler."""

    def __init__(self, backend: Backend) -> None:
        self.backend = backend
        self.pool = PagePool(NUM_PAGES, SIZE, backend.facts.windows)
        config = SchedulerConfig(256, max_running=4, token_budget=48)
        self.scheduler = Scheduler(config, self.pool, PrefixIndex(self.pool), Continuous())
        self.transfers = self.scheduler.prefix_cache.transfers

    def run(self) -> None:
        while self.scheduler.has_work:
            plan = self.scheduler.plan()
            assert plan is not None
            self.scheduler.commit(plan, self.backend.run(plan))
        check_scheduler(self.scheduler)


def request(seed: int) -> Request:
    tokens = [random.Random(seed).randrange(3, 250) for _ in range(PROMPT)]
    return Request("r", tokens, PROMPT, SamplingParams(max_tokens=8, temperature=0.0), seed)


@pytest.mark.parametrize(
    ("family", "kind"),
    [
        ("llama", "f16"),
        ("llama", "int8"),
        ("llama", "int16"),
        ("gemma3", "bf16"),
        ("gemma3", "int8"),
        ("gemma3", ""),
    ],
)
def test_pages_of_one_backend_serve_another(tmp_path: Path, family: str, kind: str) -> None:
    loaded = load_path(write_tiny_gguf(tmp_path / "m.gguf", tiny_of(family)))
    program = build_program(loaded.spec)

    def make(num_threads: int) -> Machine:
        parts = program, loaded.tensors, NUM_PAGES, SIZE
        if not kind:
            return Machine(ReferenceBackend(*parts))
        return Machine(CpuBackend(*parts, num_threads, kv_format=kind))

    first, second = make(1), make(2)
    for seed in range(3):
        first_request, second_request = request(seed), request(seed)
        first.scheduler.add(first_request)
        first.run()
        state = second.scheduler.add(second_request)
        transfer = second.transfers.begin(state)
        assert transfer is not None
        index = first.scheduler.prefix_cache._index
        assert index is not None
        wanted_keys = second.transfers.select_missing(transfer, index.contains)
        lease = first.transfers.lease(wanted_keys)
        assert set(lease.pages) == set(wanted_keys)
        sources, targets = first.backend.pages, second.backend.pages
        assert sources is not None
        assert targets is not None
        for key in wanted_keys:
            (page,) = second.transfers.allocate(transfer, [key])
            with targets.filling(page) as view:
                view[:] = sources.read(lease.pages[key])
            second.transfers.add_arrived(transfer, [key])
        second.transfers.end(transfer)
        first.transfers.release(lease)
        second.run()
        assert second_request.num_cached == (PROMPT - 1) // SIZE * SIZE
        assert second_request.output == first_request.output
        assert first.pool.num_referenced == second.pool.num_referenced == 0
    second.backend.close()
    first.backend.close()


def test_a_page_s_bytes_are_its_own(tmp_path: Path) -> None:
    loaded = load_path(write_tiny_gguf(tmp_path / "m.gguf"))
    program = build_program(loaded.spec)
    backend = CpuBackend(program, loaded.tensors, 4, SIZE, 1)
    pages = backend.pages
    assert pages is not None
    assert pages.mapped is not None
    assert len(pages.mapped) == backend.facts.cache_bytes
    for page in range(4):
        with pages.filling(page) as view:
            view[:] = bytes([page + 1]) * pages.page_bytes
    backend.copy_page(2, 0)
    assert [bytes(pages.read(page)) for page in range(4)] == [
        bytes([value]) * pages.page_bytes for value in (3, 2, 3, 4)
    ]
    backend.close()
