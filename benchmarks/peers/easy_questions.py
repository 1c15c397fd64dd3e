"""Measure the share of ten easy questions that a model answers right with default sampling.

People who try a small model first ask an easy question, and judge the server by the answer. Each
question is asked with several seeds.

    python -m benchmarks.peers.easy_questions                          # this engine's defaults
    python -m benchmarks.peers.easy_questions --sampling openai greedy # other defaults, too
    python -m benchmarks.peers.easy_questions --llama PYTHON           # llama.cpp's server, too

PYTHON is an interpreter with xllamacpp.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
import urllib.request
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Final

from twostroke import LLM, EngineOptions, GenerationOptions, SamplingParams

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

# A question, and what a right answer has in it.
QUESTIONS: Final = {
    "What is the capital of France?": r"\bParis\b",
    "What is 2 + 2?": r"\b(4|four)\b",
    "What color is the sky on a clear day?": r"\bblue\b",
    "How many days are in a week?": r"\b(7|seven)\b",
    "Which planet do we live on?": r"\bEarth\b",
    "What is the opposite of hot?": r"\bcold\b",
    "What animal says 'meow'?": r"\b(cat|cats|kitten)\b",
    "What do bees make?": r"\bhoney\b",
    "How many legs does a spider have?": r"\b(8|eight)\b",
    "What is frozen water called?": r"\bice\b",
}
MAX_TOKENS: Final = 48
SAMPLINGS: Final = ("auto", "openai", "greedy")


def count_right(answer: Callable[[str, int], str], seeds: int, *, show: bool) -> int:
    """Return how many of all answers are right; `answer` gets a question and a seed."""
    total = 0
    for question, pattern in QUESTIONS.items():
        texts = [answer(question, seed) for seed in range(seeds)]
        right = [re.search(pattern, text, re.IGNORECASE) is not None for text in texts]
        total += sum(right)
        if show:
            print(f"  {sum(right):3} of {seeds}  {question}  e.g. {texts[0][:60]!r}")
    return total


def ours(model: str, sampling: str) -> LLM:
    """Return the model with one of `SAMPLINGS`."""
    config = "openai" if sampling == "openai" else "auto"
    override = {"temperature": 0.0} if sampling == "greedy" else {}
    return LLM(model, EngineOptions(generation=GenerationOptions(config, override)))


def answer_with(llm: LLM) -> Callable[[str, int], str]:
    """Return a function that asks this engine."""

    def answer(question: str, seed: int) -> str:
        params = SamplingParams(max_tokens=MAX_TOKENS, seed=seed)
        [completion] = llm.chat([{"role": "user", "content": question}], params)
        return completion.text

    return answer


# Runs in an environment with xllamacpp: serves a file until standard input ends.
_SERVE: Final = """
import sys, xllamacpp
params = xllamacpp.CommonParams()
params.model.path, params.n_ctx, params.n_parallel = sys.argv[1], 2048, 1
params.use_jinja = True
params.cpuparams.n_threads = 1  # two wait for each other where other programs run
server = xllamacpp.Server(params)
print(server.listening_address, flush=True)
sys.stdin.read()
"""


@contextmanager
def llama_server(python: str, path: Path) -> Iterator[Callable[[str, int], str]]:
    """Yield a function that asks llama.cpp's server, with its defaults."""
    command = [python, "-c", _SERVE, str(path)]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    ) as process:
        assert process.stdout is not None
        assert process.stdin is not None
        url = process.stdout.readline().strip()

        def answer(question: str, seed: int) -> str:
            body: dict[str, Any] = {
                "messages": [{"role": "user", "content": question}],
                "max_tokens": MAX_TOKENS,
                "seed": seed,
            }
            request = urllib.request.Request(
                f"{url}/v1/chat/completions",
                json.dumps(body).encode(),
                {"Content-Type": "application/json"},
            )
            with urllib.request.urlopen(request, timeout=120) as response:
                return str(json.load(response)["choices"][0]["message"]["content"])

        try:
            yield answer
        finally:
            process.stdin.close()
            process.wait(30)


def main() -> int:
    """Print the counts; exits with 1 if the first is below `--least`."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--seeds", type=int, default=16)
    parser.add_argument("--sampling", nargs="*", choices=SAMPLINGS, default=["auto"])
    parser.add_argument("--llama", metavar="PYTHON", help="an interpreter with xllamacpp")
    parser.add_argument("--least", type=int, default=0, help="fail below so many right answers")
    args = parser.parse_args()
    of, counts = len(QUESTIONS) * args.seeds, []
    for sampling in args.sampling:
        with ours(args.model, sampling) as llm:
            path = llm.engine.card.name
            counts.append(count_right(answer_with(llm), args.seeds, show=True))
        print(f"twostroke, {path}, {sampling}: {counts[-1]} of {of} right", flush=True)
    if args.llama:
        from twostroke.model.hub import resolve

        with llama_server(args.llama, resolve(args.model)) as answer:
            right = count_right(answer, args.seeds, show=True)
        print(f"llama.cpp, its defaults: {right} of {of} right")
    return 0 if min(counts, default=args.least) >= args.least else 1


if __name__ == "__main__":
    sys.exit(main())
