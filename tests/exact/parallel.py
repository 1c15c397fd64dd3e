"""`make long SUITE=parallel`: the same tokens from several ranks as from one process.

Prompts of prose and code are answered by one process with room for all. Then ranks answer them, in
each mesh that suits the model: in batches of 1 to 16, prompts in chunks, with a prefix cache, with
speculation, and with so few pages that requests are preempted. Tokens, texts and log-probabilities
must be the same. A run without accepted drafts, cache hits, chunked prompts or preemptions shows
nothing, and fails, too.

With `--kills N` ranks are killed or frozen under load instead (rank_kills.py).
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from collections import Counter
from dataclasses import dataclass, field
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING

import rank_kills
from jobs import all_of, make_job
from meshes import MESHES, TINY, cache_bytes, crowded, models, page_size, plain, suits
from processes import Traces, ranks

from twostroke import LLM
from twostroke.core.errors import TwostrokeError, UsageError
from twostroke.model.program.kv_layout import PageGroups

if TYPE_CHECKING:
    from jobs import Answer, Job

_REAL = ("smollm2", "qwen2.5-coder-0.5b")
_DRAFTS = 4
_BUDGET = 48  # tokens a step, less than a prompt of 100
_LOGPROBS = (2, 0, None)  # in turn: without any, ranks may send only their best


@dataclass
class Totals:
    """What all runs found: how many answers were compared, and which differ."""

    compared: int = 0
    differing: int = 0
    failed: list[str] = field(default_factory=list)

    def judge(
        self,
        where: str,
        answers: list[Answer],
        expected: list[Answer],
        happened: Counter[str],
        took_s: float,
    ) -> None:
        """Compare the answers of a run in which things `happened`, and print the outcome."""
        pairs = enumerate(zip(answers, expected, strict=True))
        wrong = [i for i, (ours, theirs) in pairs if repr(ours) != repr(theirs)]
        events = ", ".join(f"{count} {event}" for event, count in happened.items())
        summary = f"{where}: {len(wrong)} of {len(answers)} answers differ"
        print(f"{summary}; {events}; {took_s:.0f} s", flush=True)
        for index in wrong[:2]:
            print(f"  prompt {index}: {expected[index]} became {answers[index]}")
        self.compared += len(answers)
        self.differing += len(wrong)
        self.failed += [summary] if wrong else []
        missing = [event for event, count in happened.items() if not count]
        if missing:
            self.failed.append(f"{where}: no {', no '.join(missing)}; take more prompts")


def main() -> int:
    """Compare, and return 0 if all is well."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--models", nargs="+", metavar="MODEL",
                        help="names, files, tiny for each family, or tiny-FAMILY")  # fmt: skip
    parser.add_argument("--meshes", nargs="+", choices=list(MESHES), metavar="MESH",
                        help=", ".join(MESHES))  # fmt: skip
    parser.add_argument("--kv-formats", nargs="+", default=["int16", "int8"])
    parser.add_argument("--prompts", type=int, default=500, help="for each model, mesh and format")
    parser.add_argument("--prompt-tokens", type=int, default=100, help="at most")
    parser.add_argument("--tokens", type=int, default=24)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--kills", type=int, help="kill or freeze a rank so many times instead")
    args = parser.parse_args()
    args.models = args.models or ([_REAL[0]] if args.kills else [*_REAL, TINY])
    args.meshes = args.meshes or (rank_kills.USUAL if args.kills else list(MESHES)[1:])
    args.context = args.prompt_tokens + 3 * args.tokens
    totals = Totals()
    with tempfile.TemporaryDirectory() as folder:
        for name, path in models(args.models, Path(folder)):
            if args.kills:
                totals.failed += rank_kills.run(name, path, args)
                continue
            sizes = sorted({page_size(MESHES[mesh]) for mesh in args.meshes})
            for kv_format, size in product(args.kv_formats, sizes):
                _compare(name, path, kv_format, size, args, totals)
    if not args.kills:
        print(f"{totals.differing} of {totals.compared} answers differ")
        totals.failed += [] if totals.compared else ["nothing was compared"]
    for failure in totals.failed:
        print(f"FAILED: {failure}")
    return int(bool(totals.failed))


def _compare(
    name: str, path: str, kv_format: str, size: int, args: argparse.Namespace, totals: Totals
) -> None:
    """Answer by one process, then by each mesh with pages of `size` tokens."""
    start_s = time.monotonic()
    # What prompts have in common, one half of the longest, fills a page.
    prompt_tokens = max(args.prompt_tokens, 2 * size + 16)
    args.context = prompt_tokens + 3 * args.tokens
    with LLM(path, plain(args.context, kv_format)) as llm:
        job = make_job(llm, args.prompts, prompt_tokens, args.tokens, args.seed, _LOGPROBS)
        expected = [all_of(answer) for answer in llm.generate(job.prompts, job.params)]
        cost = llm.engine.card.cost
        groups = PageGroups(size, llm.engine.facts.windows)
        num_pages = groups.num_needed(args.context, _BUDGET)
    took_s = time.monotonic() - start_s
    print(f"{name}, {kv_format}: {len(expected)} answers by one process; {took_s:.0f} s")
    for mesh in args.meshes:
        if page_size(MESHES[mesh]) != size or not suits(MESHES[mesh], cost.program):
            continue
        args.memory = cache_bytes(MESHES[mesh], cost, num_pages)
        where, start_s = f"{name}, {kv_format}, {mesh}", time.monotonic()
        traces = Traces()
        try:
            answers, happened = _answers(path, kv_format, mesh, job, args)
        except TwostrokeError as error:
            print(f"{where}: {error}", flush=True)
            totals.failed += [] if isinstance(error, UsageError) else [f"{where}: {error}"]
            continue
        totals.judge(where, answers, expected, happened, time.monotonic() - start_s)
        left = traces.left()
        totals.failed += [f"{where}: left {', '.join(left)}"] if left else []


def _answers(
    path: str, kv_format: str, mesh: str, job: Job, args: argparse.Namespace
) -> tuple[list[Answer], Counter[str]]:
    """Return a mesh's answers, and how often each thing happened that could change them."""
    options = crowded(
        MESHES[mesh], args.context, kv_format,
        memory_bytes=args.memory, token_budget=_BUDGET, drafts=_DRAFTS,
    )  # fmt: skip
    results: list[Answer] = []
    happened = Counter({"chunked prompts": 0, "cached tokens": 0})
    with LLM(path, options) as llm:
        if (number := len(ranks())) != MESHES[mesh].num_ranks - 1:
            raise TwostrokeError(f"{number} ranks were started.")
        for prompts, params in job.batches(args.seed):
            for prompt, answer in zip(prompts, llm.generate(prompts, params), strict=True):
                results.append(all_of(answer))
                cached = answer[0].usage.cached_tokens
                happened["cached tokens"] += cached
                happened["chunked prompts"] += len(prompt) - cached > _BUDGET
        seen = llm.engine.client.loop.snapshot()
        has_states = llm.engine.facts.num_states > 0
    happened["accepted drafts"] = sum(seen.speculation.accepted.values())
    if not has_states:  # few slots for recurrent states let few requests run
        happened["preemptions"] = seen.scheduler.num_preemptions
    return results, happened


if __name__ == "__main__":
    sys.exit(main())
