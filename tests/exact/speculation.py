"""`make long SUITE=speculation`: the same tokens with speculation as without, on real models.

Prompts of prose and code, some of which begin alike, are answered without speculation, without a
prefix cache and with room for all. Then they are answered again with each method: in batches of 1
to 16, with a prefix cache, and with so few pages that requests are preempted and computed again.
Some are drawn, some have penalties, log-probabilities or two choices. All of every answer must be
the same. A run without accepted drafts, cache hits or preemptions shows nothing, and fails, too.
"""

from __future__ import annotations

import argparse
import sys
import time
from typing import TYPE_CHECKING

from jobs import all_of, make_job

from twostroke import LLM
from twostroke.core.options import CacheOptions, ComputeOptions, EngineOptions, SpeculationOptions

if TYPE_CHECKING:
    from jobs import Answer, Job

_PAGE_SIZE = 16
_DRAFTS = 4  # always, so that there are many; "auto" proposes only drafts that pay


def main() -> int:
    """Compare, and return 0 if all is well."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--methods", nargs="+", default=["auto", "ngram", "lookahead"])
    parser.add_argument("--draft", help="adds the method draft")
    parser.add_argument("--heads", help="adds the method of these heads, eagle or medusa")
    parser.add_argument("--prompts", type=int, default=500)
    parser.add_argument("--prompt-tokens", type=int, default=100, help="at most")
    parser.add_argument("--tokens", type=int, default=32)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    # As short as can be, for there to be pages for few requests.
    args.context = args.prompt_tokens + 3 * args.tokens
    with LLM(args.model, _options(SpeculationOptions("off"), None, args.context)) as llm:
        job = make_job(llm, args.prompts, args.prompt_tokens, args.tokens, args.seed)
        start_s = time.monotonic()
        expected = [
            all_of(answer) for answer in llm.generate(job.prompts, job.params, speculate="off")
        ]
        _say(f"{args.model}: {len(expected)} answers without speculation", start_s)
        cost = llm.engine.card.cost
        pages = -(-args.context // _PAGE_SIZE)
        memory = pages * cost.program.page_bytes(_PAGE_SIZE, cost.cache)
    methods = [*args.methods, *(["draft"] if args.draft else [])]
    methods += ["heads"] if args.heads else []
    results = [_holds(method, job, expected, memory, args) for method in methods]
    return int(not all(results))


def _holds(
    method: str, job: Job, expected: list[Answer], memory: int, args: argparse.Namespace
) -> bool:
    """Answer with a method, compare, and say how it went."""
    count = None if method == "auto" else _DRAFTS
    named = {"draft": args.draft} if method in {"draft", "auto"} else {}
    if method == "heads" or (method == "auto" and args.heads):
        named |= {"heads": args.heads}
    speculation = SpeculationOptions("auto" if method == "heads" else method, count=count, **named)
    with LLM(args.model, _options(speculation, memory, args.context)) as llm:
        start_s = time.monotonic()
        answers, cached = [], 0
        for prompts, params in job.batches(args.seed):
            for answer in llm.generate(prompts, params):
                answers.append(all_of(answer))
                cached += answer[0].usage.cached_tokens
        stats, draft_stats = (
            llm.engine.client.loop.snapshot().scheduler,
            llm.engine.client.loop.snapshot().speculation,
        )
    wrong = [i for i, pair in enumerate(zip(answers, expected, strict=True)) if pair[0] != pair[1]]
    proposed, accepted = sum(draft_stats.proposed.values()), sum(draft_stats.accepted.values())
    _say(
        f"{method}: {len(wrong)} of {len(answers)} answers differ; {accepted} of {proposed} drafts "
        f"right, {cached} tokens from the cache, {stats.num_preemptions} preemptions",
        start_s,
    )
    for index in wrong[:3]:
        print(f"  prompt {index}: {expected[index]} became {answers[index]}")
    if not (accepted or method == "auto") or not cached or not stats.num_preemptions:
        print("  too little happened for this to say anything: more prompts, or longer answers")
        return False
    return not wrong


def _options(speculation: SpeculationOptions, memory: int | None, context: int) -> EngineOptions:
    cache = CacheOptions(
        memory_bytes=memory,
        context_length=context,
        page_size=_PAGE_SIZE,
        prefix_cache=memory is not None,
    )
    return EngineOptions(ComputeOptions(), cache, speculation=speculation)


def _say(text: str, start_s: float) -> None:
    print(f"{text} ({time.monotonic() - start_s:.0f} s)", flush=True)


if __name__ == "__main__":
    sys.exit(main())
