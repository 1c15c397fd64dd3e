"""Measure the cost of a step besides its kernels, with many streams.

Run it with `make bench WHAT=overhead`.

The engine is real, except for a model that costs nothing: plans become the native executor's
arrays and results are read from them, but no kernel runs. The rest is the time of the scheduler,
of Python, and of delivery to a client.
"""

from __future__ import annotations

import argparse
import random
import statistics
import time
from dataclasses import dataclass
from itertools import pairwise
from statistics import median
from typing import TYPE_CHECKING, Any

from benchmarks.common.records import Entry, Record, keep
from benchmarks.common.report import caption, machine_facts, note, positive, save, spread, table
from benchmarks.engine.ours import run_job
from twostroke.backends.cpu.steps import StepArrays
from twostroke.core.options import BatchOptions, SpeculationOptions
from twostroke.core.process_tuning import tune_garbage_collector
from twostroke.core.step import StepResult
from twostroke.engine.client import Client
from twostroke.engine.engine import build, build_speculator
from twostroke.engine.kv_cache import PagePool, PrefixIndex
from twostroke.engine.loop import EngineLoop
from twostroke.engine.scheduler import Scheduler, SchedulerConfig, make_policy

if TYPE_CHECKING:
    from collections.abc import Iterator

    from twostroke.backends.interface import BackendFacts
    from twostroke.core.request import Request
    from twostroke.core.step import StepPlan
    from twostroke.engine.model_card import ModelCard

_PROMPT = 64
_TOKENS = 200
_ORDINARY = 256  # lower ids may end a text
_NUM_DRAWN = 1 << 16
_LIMIT_S = 1e-3  # a step


class FreeBackend:
    """Marshals steps as the cpu backend does, and computes nothing: tokens are drawn by chance.

    So no draft is accepted. If tokens repeated, all drafts would be accepted, and each step would
    have many of them, as rows that cost nothing always pay.
    """

    def __init__(self, facts: BackendFacts, max_pages: int, vocab_size: int) -> None:
        """Have the pages of `facts`, of which a request may take `max_pages` a group."""
        self.facts = facts
        rng = random.Random(7)
        self._chance = [rng.randrange(_ORDINARY, vocab_size) for _ in range(_NUM_DRAWN)]
        self.began_s: list[float] = []  # processor time of the engine's thread at each step
        self._steps = StepArrays(
            len(facts.windows), facts.page_size, max_pages, one_arithmetic=facts.one_arithmetic
        )

    @property
    def state_memory(self) -> None:
        """None, since there are no recurrent states."""

    @property
    def pages(self) -> None:
        """None: its pages contain nothing."""

    def run(self, plan: StepPlan) -> StepResult:
        """Write the plan into arrays, and read results of which tokens come from elsewhere."""
        self.began_s.append(time.thread_time())
        start_s = time.perf_counter()
        requests = self._steps.fill(plan)
        tokens, logprobs, *_ = self._steps.results(plan, requests)
        first = 997 * len(self.began_s) % (_NUM_DRAWN - len(tokens))
        tokens = self._chance[first : first + len(tokens)]
        return StepResult(tokens, logprobs, time.perf_counter() - start_s)

    def forget(self, request: Request) -> None:
        """Drop what is kept for a request."""
        self._steps.forget(request)

    def close(self) -> None:
        """Nothing is held."""


@dataclass(frozen=True, slots=True)
class Run:
    """Seconds of processor time a step: in the engine's thread, and elsewhere.

    The engine's own is the scheduler, the arrays, text and posting; elsewhere is the client that
    takes outputs from its queue. (Elapsed time would say more of who held the interpreter's lock.)
    """

    engine_s: float
    client_s: float


def measure(card: ModelCard, facts: BackendFacts, num_streams: int) -> Run:
    """Answer `num_streams` requests together, and divide by the number of decode steps."""
    num_pages = -(-card.context_length // facts.page_size)
    backend = FreeBackend(facts, num_pages, card.cost.program.vocab_size)
    pool = PagePool(facts.num_pages, facts.page_size, facts.windows)
    config = SchedulerConfig(context_length=card.context_length, max_running=num_streams)
    scheduler = Scheduler(config, pool, PrefixIndex(pool), make_policy(BatchOptions()))
    speculator = build_speculator(
        SpeculationOptions(), card.cost.per_step(), limits=None, rows_together=1
    )
    loop = EngineLoop(backend, scheduler, speculator, card.cost.per_step())
    try:
        prompts = [[1 + n % 250, *range(2, _PROMPT + 1)] for n in range(num_streams)]
        before_s = time.process_time()
        run_job(Client(card, loop), prompts, _TOKENS)
        all_s = (time.process_time() - before_s) / len(backend.began_s)
    finally:
        loop.close()
    steps_s = [later - begin_s for begin_s, later in pairwise(backend.began_s)]
    return Run(statistics.median(steps_s), all_s - statistics.fmean(steps_s))


def _rows(runs: dict[int, list[Run]]) -> Iterator[tuple[str, ...]]:
    for num_streams, row in runs.items():
        figures = [[run.engine_s for run in row], [run.client_s for run in row]]
        yield (f"{num_streams} streams", *(spread((1e3 * s for s in f), 3) for f in figures))


def _record(model: str, num_streams: int, row: list[Run]) -> Record:
    return Record(
        row=f"overhead-{num_streams}",
        name=f"scheduler and Python in a step of {num_streams} streams, kernels that cost nothing",
        model=model,
        unit="ms",
        entries=[Entry("Twostroke", "", [1e3 * run.engine_s for run in row])],
        command=f'make bench WHAT=overhead ARGS="--model {model} --streams {num_streams}"',
        lower_is_better=True,
        num_runs=len(row),
        others={"client_ms": median(1e3 * run.client_s for run in row)},
    )


def main() -> None:
    """Measure, then print and keep the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="smollm2", help="whose tokenizer and sizes to use")
    parser.add_argument("--streams", type=int, nargs="+", default=[1, 16, 64, 256])
    parser.add_argument("--rounds", type=positive, default=5)
    args = parser.parse_args()
    with build(args.model) as engine:
        card, facts = engine.card, engine.facts
    tune_garbage_collector()  # as the server does
    runs: dict[int, list[Run]] = {count: [] for count in args.streams}
    for number in range(args.rounds + 1):
        note(f"Round {number} of {args.rounds}" if number else "Warming up")
        for count in args.streams:
            run = measure(card, facts, count)
            if number:
                runs[count].append(run)
    header = ("milliseconds of a step: median (lowest to highest)", "engine", "client")
    result: dict[str, Any] = {**machine_facts(), "model": args.model, "limit_s": _LIMIT_S}
    result["seconds_a_step"] = {
        count: median(run.engine_s for run in row) for count, row in runs.items()
    }
    text = ["## A step without its kernels", "", table(header, _rows(runs)), ""]
    for count, row in runs.items():
        keep(_record(args.model, count, row))
    save("overhead", result, "\n".join([*text, caption(result, args.model)]))


if __name__ == "__main__":
    main()
