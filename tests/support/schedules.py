"""Random schedules on a real backend: the same requests, batched in different ways."""

from __future__ import annotations

import random
from collections import deque
from typing import TYPE_CHECKING, cast

from msgspec.structs import replace

from support.drafts import add_random_drafts
from support.invariants import check_scheduler
from support.vectors import embedder_of
from twostroke.core.frozen import Frozen
from twostroke.core.request import FinishReason, Request
from twostroke.core.sampling import SamplingParams
from twostroke.engine.kv_cache import PagePool, PrefixIndex, StatePool
from twostroke.engine.scheduler import Batched, Continuous, Policy, Scheduler, SchedulerConfig

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from twostroke.backends.interface import Backend, StartRunner
    from twostroke.core.step import StepPlan, TokenLogprobs

    Answer = tuple[tuple[int, ...], tuple[TokenLogprobs | None, ...]]


class Setting(Frozen):
    """The options under which a batch of requests is run."""

    num_pages: int
    token_budget: int
    max_running: int
    prefix_cache: bool
    policy: Policy
    max_scored_rows: int = 128
    draft_seed: int | None = None  # the seed of random drafts, if there are to be some
    draws_ahead: int = 0  # steps
    cancels: int | None = None  # the seed of requests that end early, if some are to

    @classmethod
    def chosen_by(cls, rng: random.Random, fewest_pages: int, most_pages: int) -> Setting:
        """Return a random setting; small pools preempt, small budgets cut prompts into chunks."""
        max_running = rng.choice((1, 2, 5, 32))
        policies: tuple[Policy, ...] = (
            Continuous(),
            Continuous(),
            Batched(min(4, max_running), 0.0),
            Batched(min(3, max_running)),
        )
        num_pages = rng.randint(fewest_pages, most_pages)
        return cls(
            num_pages=num_pages,
            token_budget=max(max_running, rng.choice((1, 7, 16, 33, 100, 1000))),
            max_running=max_running,
            prefix_cache=rng.random() < 0.7,
            policy=rng.choice(policies),
            max_scored_rows=(1, 3, 40, 128)[num_pages % 4],
            draft_seed=num_pages if num_pages % 2 else None,
        )

    def alone(self, num_pages: int) -> Setting:
        """Return the plainest setting: one request at a time, whole prompts, nothing cached."""
        return replace(
            self,
            num_pages=num_pages,
            token_budget=100_000,
            max_running=1,
            prefix_cache=False,
            policy=Continuous(),
            draft_seed=None,
        )


def random_requests(
    rng: random.Random, count: int, vocab_size: int, longest: int, most_output: int
) -> list[Request]:
    """Return requests with shared prefixes, of several lengths, greedy and sampled.

    Some want their prompts' log-probabilities, too, and some of these nothing else. Now and then
    none of them has penalties, so that rows of the sampler go from step to step.
    """
    prefixes = [
        [rng.randrange(vocab_size) for _ in range(rng.randint(1, longest // 2))] for _ in range(3)
    ]
    requests = []
    for number in range(count):
        prefix = rng.choice([[], *prefixes])
        num_more = rng.randint(1, longest - len(prefix))
        tokens = prefix + [rng.randrange(vocab_size) for _ in range(num_more)]
        params = SamplingParams(
            max_tokens=rng.randint(1, most_output),
            temperature=rng.choice((0.0, 0.0, 0.8, 1.5)),
            top_k=rng.choice((0, 5)),
            top_p=rng.choice((1.0, 0.9)),
            repetition_penalty=rng.choice((1.0, 1.2)),
            logprobs=2,
        )
        requests.append(
            Request(
                f"q{number}",
                tokens,
                len(tokens),
                params,
                seed=rng.getrandbits(64),
                priority=rng.choice((0, 0, 0, 1, -1)),
            )
        )
    if requests[0].seed % 2:
        for request in requests:
            request.params = replace(request.params, repetition_penalty=1.0)
    for request in requests:
        if request.seed % 3 == 1:
            request.params = replace(request.params, prompt_logprobs=request.seed % 5)
        if request.seed % 36 == 1:
            request.params = replace(request.params, max_tokens=0)
    return requests


def fresh(request: Request) -> Request:
    """Return the request as it was before it ran."""
    return Request(
        request.id,
        request.prompt,
        request.num_prompt,
        request.params,
        request.seed,
        priority=request.priority,
        pooling=request.pooling,
    )


def run_schedule(
    backend: Backend,
    setting: Setting,
    requests: Sequence[Request],
    context_length: int,
    known_answers: Mapping[str, Answer] | None = None,
    vectors: dict[str, bytes] | None = None,
) -> tuple[dict[str, Answer], int]:
    """Run requests to their end; return their tokens and log-probabilities, and preemptions.

    A prompt's log-probabilities precede those of its answer. Drafts,
    if the setting wants them, are made from `known_answers`. Embeddings are put into `vectors`.
    Requests that are cancelled keep what they have.
    """
    pool = PagePool(setting.num_pages, backend.facts.page_size, backend.facts.windows)
    reuse = backend.facts.one_arithmetic
    index = PrefixIndex(pool, reuse_generated=reuse) if setting.prefix_cache else None
    config = SchedulerConfig(
        context_length,
        max_running=setting.max_running,
        token_budget=setting.token_budget,
        max_scored_rows=setting.max_scored_rows,
        steps_ahead=setting.draws_ahead,
        samples_ahead=setting.draws_ahead > 0,
    )
    states = StatePool(count) if (count := backend.facts.num_states) else None
    scheduler = Scheduler(config, pool, index, setting.policy, states=states)
    rng, ends = random.Random(setting.draft_seed), random.Random(setting.cancels)
    outputs = {name: tokens for name, (tokens, _) in (known_answers or {}).items()}
    logprobs: dict[str, list[TokenLogprobs | None]] = {r.id: [] for r in requests}
    embedders = {r.id: embedder_of(r) for r in requests if r.pooling is not None}
    for request in requests:
        scheduler.add(request)
    open_ = list(requests)
    scheduler.flush()
    in_flight: deque[StepPlan] = deque()
    while scheduler.has_work or in_flight:
        plan = scheduler.plan() if len(in_flight) <= setting.draws_ahead else None
        if plan is not None:
            if setting.draft_seed is not None and known_answers is not None:
                add_random_drafts(rng, plan, scheduler, outputs, vocab_size=200)
            in_flight.append(plan)
            if setting.draws_ahead:
                cast("StartRunner", backend).start(plan)
                continue
        if not in_flight:
            scheduler.flush()
            continue
        if setting.cancels is not None and ends.random() < 0.2:
            scheduler.finish(ends.choice(requests), FinishReason.CANCEL)
        plan = in_flight.popleft()
        runner = cast("StartRunner", backend)
        result = runner.finish() if setting.draws_ahead else backend.run(plan)
        for delta in scheduler.commit(plan, result):
            logprobs[delta.request.id] += delta.scores + delta.logprobs
            if vectors is not None and delta.request.id in embedders:
                output = embedders[delta.request.id].take(delta, 0.0)
                if output is not None and output.embedding is not None:
                    vectors[delta.request.id] = output.embedding.tobytes()
        for request in [r for r in open_ if r.is_finished and not r.is_in_flight]:
            open_.remove(request)
            backend.forget(request)
    check_scheduler(scheduler)
    answers = {r.id: (tuple(r.output), tuple(logprobs[r.id])) for r in requests}
    return answers, sum(r.num_preemptions for r in requests)
