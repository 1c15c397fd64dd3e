"""Models with sliding windows: the same tokens, with a bounded number of KV pages."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING

import pytest
from msgspec.structs import replace

from support.programs import program_of_layers
from support.row_by_row import RowByRow
from support.schedules import Setting, fresh, random_requests, run_schedule
from support.tiny import Tiny, write_tiny_gguf
from twostroke.core.request import NO_PAGE, Request
from twostroke.core.sampling import SamplingParams
from twostroke.engine.kv_cache import PagePool, PrefixIndex
from twostroke.engine.scheduler import Continuous, Scheduler, SchedulerConfig
from twostroke.model.families import WindowSpec, build_program
from twostroke.model.program import FLOAT16
from twostroke.model.program.kv_layout import PageGroups
from twostroke.model.weights import load_path

if TYPE_CHECKING:
    from pathlib import Path


WINDOW = 20
CONTEXT = 500
NUM_PAGES = 300


def backend(folder: Path, slides: tuple[bool, ...], num_pages: int = NUM_PAGES) -> RowByRow:
    """Return a backend for a tiny model whose layers have a window where `slides` is true."""
    sizes = Tiny(num_layers=len(slides), hidden_size=32, ffn_size=48, num_heads=2, num_kv_heads=1)
    loaded = load_path(write_tiny_gguf(folder / "tiny.gguf", sizes))
    spec = replace(loaded.spec, window=WindowSpec(WINDOW, slides))
    return RowByRow(build_program(spec), loaded.tensors, num_pages, 16)


@pytest.mark.parametrize(
    ("slides", "num_groups"), [((True, False, True), 3), ((True, True), 1)], ids=["some", "all"]
)
def test_tokens_do_not_depend_on_the_schedule(
    tmp_path: Path, slides: tuple[bool, ...], num_groups: int
) -> None:
    model = backend(tmp_path, slides)
    assert len(model.facts.windows) == num_groups
    rng = random.Random(7)
    requests = random_requests(rng, 12, vocab_size=280, longest=80, most_output=40)
    fewest = PageGroups(16, model.facts.windows).num_needed(120)
    settings = [Setting.chosen_by(rng, fewest, 2 * fewest) for _ in range(3)]
    crowded = Setting(fewest, 64, 32, prefix_cache=True, policy=Continuous())
    expected, _ = run_schedule(
        model, settings[0].alone(NUM_PAGES), [fresh(r) for r in requests], CONTEXT
    )
    num_preemptions = num_cached = 0
    for setting in [*settings, crowded]:
        copies = [fresh(r) for r in rng.sample(requests, len(requests))]
        answers, count = run_schedule(model, setting, copies, CONTEXT)
        assert answers == expected, setting
        num_preemptions += count
        num_cached += sum(r.num_cached for r in copies)
    assert num_preemptions > 0 or None not in model.facts.windows, "where all slide, none grow"
    assert num_cached > 0


def test_a_long_answer_holds_few_pages_before_its_window(tmp_path: Path) -> None:
    """The model has Gemma 3's pattern: five layers with a window, and one without."""
    model = backend(tmp_path, (True,) * 5 + (False,))
    windows = model.facts.windows
    assert windows == (None,) + (WINDOW,) * 5
    pool = PagePool(NUM_PAGES, 16, windows)
    config = SchedulerConfig(CONTEXT)
    scheduler = Scheduler(config, pool, PrefixIndex(pool), Continuous())
    params = SamplingParams(max_tokens=400, temperature=0.0)
    request = Request("long", list(range(40)), 40, params, seed=0)
    scheduler.add(request)
    most_pages = [0] * len(windows)
    while plan := scheduler.plan():
        num_held = [sum(page != NO_PAGE for page in pages) for pages in request.pages]
        most_pages = [max(pair) for pair in zip(most_pages, num_held, strict=True)]
        scheduler.commit(plan, model.run(plan))
    assert request.num_output == 400
    assert most_pages == [28] + [3] * 5, "the window and the row itself lie on at most 3 pages"
    [second_request] = [
        Request("again", request.tokens[:-1], 439, replace(params, max_tokens=1), seed=0)
    ]
    scheduler.add(second_request)
    plan = scheduler.plan()
    assert plan is not None
    assert scheduler.commit(plan, model.run(plan))[0].tokens == (request.tokens[-1],)
    assert second_request.num_cached == 432


def test_gemma_3_270m_needs_less_than_a_quarter_of_the_memory_at_8192_tokens() -> None:
    """It has 15 layers with a window of 512 and 3 without, one KV head of 256, float16."""
    windows = [None if layer % 6 == 5 else 512 for layer in range(18)]
    program = program_of_layers(windows)
    groups = PageGroups(16, tuple(group.window for group in program.cache_groups))
    everything = 8192 * sum(layer.bytes_per_token(FLOAT16) for layer in program.cache_layers)
    decoding = groups.num_needed(8192) * program.page_bytes(16)
    prefilling = groups.num_needed(8192, 256) * program.page_bytes(16)
    print(
        f"\n8192 tokens: {everything / 1e6:.1f} MB without windows, {decoding / 1e6:.1f} MB while "
        f"decoding, {prefilling / 1e6:.1f} MB while prefilling 256 tokens a step"
    )
    assert everything == 8192 * 18 * 1024
    assert decoding < 0.23 * everything
    assert prefilling < 0.25 * everything
