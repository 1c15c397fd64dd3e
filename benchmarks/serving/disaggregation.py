"""Measure disaggregated prefill: KV transfers, the first token, and decoding streams.

Run it with `make bench WHAT=disaggregation`.

- transfer: pages of a cached prompt move from a prefill engine into the already used memory of a
  decode engine, from their offer until they can be used; in turn with a copy of the same size
  within one process; again without shared memory, by the socket and by NIXL if it is installed, and
  between two network namespaces if they can be created.
- first: the time from the end of a prefill engine's last step to the first token, without the
  decode engine's own step, which computes the rest of the prompt.
- streams, virtual, auto: see disaggregation_load.py.

Each part can be measured alone; earlier results of other parts stay in the table.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import subprocess
import sys
import time
from contextlib import ExitStack
from pathlib import Path
from statistics import fmean, median
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

import numpy as np

from benchmarks.common.namespaces import obstacle, two_hosts
from benchmarks.common.pipe import Worker, claim_output, serve
from benchmarks.common.report import RESULTS, caption, machine_facts, note, positive, save, table
from benchmarks.serving.disaggregation_load import LOADS, MIXES, auto, streams, virtual
from twostroke.core.distributed_options import DisaggregationOptions
from twostroke.core.options import CacheOptions, ComputeOptions, EngineOptions, SpeculationOptions
from twostroke.core.sampling import SamplingParams
from twostroke.engine.disaggregation import nixl
from twostroke.engine.engine import build

if TYPE_CHECKING:
    from collections.abc import Iterator

    from twostroke.engine.engine import Engine

PARTS = ("transfer", "first", "streams", "virtual", "auto")
_ONE_TOKEN = SamplingParams(temperature=0, max_tokens=1, ignore_eos=True)
_MEMORY = 56_000  # bytes for pages, for each token of a prompt: more than two of SmolLM2's, and
_WARM = 4  # prompts after which all of it has been used


def _options(args: argparse.Namespace, disaggregation: DisaggregationOptions) -> EngineOptions:
    return EngineOptions(
        ComputeOptions(num_threads=1),
        CacheOptions(context_length=args.tokens + 64, memory_bytes=_MEMORY * args.tokens),
        speculation=SpeculationOptions("off"),
        disaggregation=disaggregation,
    )


def _note_steps(engine: Engine) -> list[tuple[float, float]]:
    """Let an engine note when each of its steps began and ended."""
    backend, steps = engine.client.loop.backend, list[tuple[float, float]]()
    run = backend.run

    def timed(plan: Any) -> Any:
        began_s = time.monotonic()
        result = run(plan)
        steps.append((began_s, time.monotonic()))
        return result

    vars(backend)["run"] = timed
    return steps


def _prefill_worker(args: argparse.Namespace) -> None:
    """Be the prefill engine, and answer questions."""
    answers = claim_output()
    disaggregation = DisaggregationOptions("prefill", f"{args.host}:0")
    with build(args.model, _options(args, disaggregation)) as engine:
        steps, look = _note_steps(engine), engine.client.disaggregation_stats
        assert look is not None

        def address() -> dict[str, Any]:
            prefill_side = look().prefill_side
            assert prefill_side is not None
            return {"address": f"{args.host}:{prefill_side.port}"}

        def read(prompt: list[int]) -> dict[str, Any]:
            engine.client.generate(prompt, _ONE_TOKEN).wait()
            return {}

        serve({"address": address, "read": read, "last": lambda: {"end_s": steps[-1][1]}}, answers)


class Pair:
    """A decode engine in this process, and its prefill engine in another one."""

    def __init__(self, args: argparse.Namespace, stack: ExitStack, link: str = "") -> None:
        """Start both, and wait until they have met; without a `link` they share memory."""
        command = [
            sys.executable,
            "-m",
            "benchmarks.serving.disaggregation",
            "--worker",
            "--model",
            args.model,
        ]
        command += ["--tokens", str(args.tokens), "--host", args.host]
        if args.namespace:
            command = ["ip", "netns", "exec", args.namespace, *command]
        folder = Path(stack.enter_context(TemporaryDirectory()))
        self.prefill = Worker("prefill", command, folder / "log")
        stack.callback(self.prefill.close)
        address = self.prefill.call("address")["address"]
        disaggregation = DisaggregationOptions("decode", None, (address,), "always", link or "auto")
        self.engine = stack.enter_context(build(args.model, _options(args, disaggregation)))
        self.steps = _note_steps(self.engine)
        while self.view().peers[0].state != "up":
            time.sleep(0.05)
        self._rng, self._num_tokens = random.Random(args.seed), args.tokens

    def prompts(self, count: int) -> Iterator[list[int]]:
        """Yield prompts that nobody has seen, of whole pages and a token."""
        size = self.engine.card.tokenizer.vocab_size
        for _ in range(count):
            length = self._num_tokens // 16 * 16 + 1
            yield [self._rng.randrange(1000, size - 100) for _ in range(length)]

    def view(self) -> Any:
        """Return what the decode engine says of its transfers."""
        look = self.engine.client.disaggregation_stats
        assert look is not None
        return look().decode_side

    def call(self, prompt: list[int]) -> float:
        """Have the prompt answered with a token; return when it came."""
        (output,) = self.engine.client.generate(prompt, _ONE_TOKEN).wait()
        assert output.timings is not None
        return output.timings.first_token_s


def transfer(args: argparse.Namespace) -> dict[str, Any]:
    """Return bytes/s of transfers and of copies, by shared memory and by each link."""
    os.environ["TWOSTROKE_PEER_SECRET"] = "a secret of the benchmark"
    links = ("socket", *(() if nixl.obstacle() else ("nixl-read", "nixl-write")))
    between = "one host" if obstacle() else "two network namespaces"
    result = _transfer(args, "")
    return result | {
        "links": {link: _disaggregated(args, link) for link in links},
        "between": between,
    }


def _disaggregated(args: argparse.Namespace, link: str) -> dict[str, Any]:
    """Return what `_transfer` returns for engines that share no memory."""
    command = [
        sys.executable,
        "-m",
        "benchmarks.serving.disaggregation",
        "--link",
        link,
        "--model",
        args.model,
    ]
    for name in ("tokens", "rounds", "seed"):
        command += [f"--{name}", str(getattr(args, name))]
    with ExitStack() as stack:
        if obstacle() is None:
            hosts = stack.enter_context(two_hosts())
            command += ["--host", hosts.addresses[1], "--namespace", hosts.names[1]]
            command = hosts.command(0, command)
        else:
            command += ["--host", "127.0.0.2"]  # which is not known as this machine
        done = subprocess.run(command, stdout=subprocess.PIPE, check=True, text=True)
        body: dict[str, Any] = json.loads(done.stdout)
        return body


def _transfer(args: argparse.Namespace, link: str) -> dict[str, Any]:
    """Return bytes/s of transfers and of copies, the first of them into unused memory."""
    ways, request_rates, copies, num_bytes = [], [], [], 0
    with ExitStack() as stack:
        pair = Pair(args, stack, link)
        for number, prompt in enumerate(pair.prompts(_WARM + args.rounds)):
            note(f"Transfer {number + 1} of {_WARM + args.rounds} {link}")
            pair.prefill.call("read", prompt=prompt)
            before = pair.view()
            pair.call(prompt)
            after = pair.view()
            num_bytes = after.num_bytes - before.num_bytes
            ways.append(num_bytes / (after.fetch_s - before.fetch_s))
            request_rates.append(num_bytes / (after.seconds - before.seconds))
            if not number:
                source, target = (np.ones(num_bytes, np.uint8) for _ in range(2))
            began_s = time.perf_counter()
            np.copyto(target, source)
            copies.append(num_bytes / (time.perf_counter() - began_s))
    return {
        "num_bytes": num_bytes,
        "unused": ways[0],
        "bytes_per_s": ways[_WARM:],
        "asked_bytes_per_s": request_rates[_WARM:],
        "copy_bytes_per_s": copies[_WARM:],
    }


def first(args: argparse.Namespace) -> dict[str, Any]:
    """Return the seconds from the last prefill step to the first token, and of the step there."""
    lateness_s, steps_s = [], []
    with ExitStack() as stack:
        pair = Pair(args, stack)
        for number, prompt in enumerate(pair.prompts(_WARM + args.rounds)):
            note(f"First token {number + 1} of {_WARM + args.rounds}")
            token_s = pair.call(prompt)
            end_s = pair.prefill.call("last")["end_s"]
            began_s, ended_s = pair.steps[-1]
            lateness_s.append(token_s - end_s)
            steps_s.append(ended_s - began_s)
    return {"late_s": lateness_s[_WARM:], "step_s": steps_s[_WARM:]}


def _rows(result: dict[str, Any]) -> list[tuple[str, str, str]]:
    """Return a line for each figure that was measured: asked beside reached."""
    rows = []
    if outcome := result.get("transfer"):
        ratio = median(outcome["bytes_per_s"]) / median(outcome["copy_bytes_per_s"])
        size, pace = outcome["num_bytes"] / 1e6, median(outcome["bytes_per_s"]) / 1e9
        reached = f"{100 * ratio:.0f}% ({size:.0f} MB at {pace:.1f} GB/s)"
        rows += [("transfer beside memcpy", "80%", reached)]
        request_rate, unused = median(outcome["asked_bytes_per_s"]), outcome["unused"]
        rows += [("the same from the question on", "", f"{request_rate / 1e9:.1f} GB/s")]
        rows += [("the same into memory that was never used", "", f"{unused / 1e9:.1f} GB/s")]
        for link, link_outcome in outcome.get("links", {}).items():
            rate, request_rate = (
                median(link_outcome["bytes_per_s"]),
                median(link_outcome["asked_bytes_per_s"]),
            )
            share = 100 * rate / median(link_outcome["copy_bytes_per_s"])
            rates = f"{rate / 1e9:.1f} GB/s, {request_rate / 1e9:.1f} from the question on"
            reached = f"{share:.0f}% ({rates})"
            rows += [(f"{link} between {outcome['between']}, beside memcpy", "", reached)]
    if outcome := result.get("first"):
        pairs = zip(outcome["late_s"], outcome["step_s"], strict=True)
        extra = sorted(1e3 * (late_s - step) for late_s, step in pairs)
        reached = f"{median(extra):.1f} ms (at most {extra[-1]:.1f})"
        step = f"{1e3 * median(outcome['step_s']):.0f} ms"
        rows += [
            (f"first token after the last prefill step and a step of {step}", "10 ms", reached)
        ]
    if outcome := result.get("streams"):
        separate, mixed = outcome["apart"], outcome["mixed"]
        reached = f"{1e3 * separate['itl_p99_s']:.0f} ms of {1e3 * mixed['itl_p99_s']:.0f} ms"
        ratio = separate["itl_p99_s"] / mixed["itl_p99_s"]
        rows += [
            ("ITL p99 of four streams, prompts arriving", "1/5", f"1/{1 / ratio:.0f}: {reached}")
        ]
        for name, words, unit in (
            ("itl_p50_s", "ITL p50 there", "s"),
            ("ttft_p50_s", "TTFT p50 of the prompts", "s"),
            ("goodput_per_min", "goodput, prompts a minute", ""),
            ("stream_tokens_per_s", "tokens/s of the streams", ""),
        ):
            both = [f"{figures[name]:.3g}{unit and ' ' + unit}" for figures in (separate, mixed)]
            rows += [(words, "", f"{both[0]} apart, {both[1]} mixed")]
    for part in ("virtual", "auto"):
        rows += [_rule_row(part, cell) for cell in result.get(part, [])]
    return rows


def _rule_row(part: str, cell: dict[str, Any]) -> tuple[str, str, str]:
    """Return the line of a mix and a load: `auto` beside the better of `always` and `never`."""
    rounds = cell["round_s"]
    means = {name: fmean(seconds) for name, seconds in rounds.items()}
    never_s = fmean(seconds for name, seconds in means.items() if name.startswith("never"))
    share = min(means["always"], never_s) / means["auto"]
    words = ", ".join(f"{name} {seconds:.2f} s" for name, seconds in means.items())
    if part == "auto":
        pairs = zip(rounds["never"], rounds["never again"], strict=True)
        max_ratio = max(max(pair) / min(pair) for pair in pairs)
        words += f"; never beside itself up to {max_ratio:.2f} times in a round"
    where = "auto" if part == "auto" else f"auto, simulated, {cell['engines']} to write"
    name = f"{where}, {cell['mix']}, load {cell['load']:g}"
    return name, "97%", f"{100 * share:.0f}% ({words})"


def main() -> None:
    """Measure some parts, then print and keep the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--tokens", type=positive, default=3000, help="of a prompt beside streams")
    parser.add_argument("--rounds", type=positive, default=7)
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=PARTS)
    parser.add_argument("--mixes", nargs="+", choices=MIXES, default=tuple(MIXES))
    parser.add_argument("--loads", nargs="+", type=float, default=LOADS)
    parser.add_argument("--prompts", type=positive, default=4, help="that arrive beside streams")
    parser.add_argument("--seconds", type=positive, default=6, help="of arrivals, for rule auto")
    parser.add_argument("--turns", type=positive, default=4, help="of each rule, for rule auto")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--host", default="127.0.0.1", help=argparse.SUPPRESS)
    parser.add_argument("--namespace", default="", help=argparse.SUPPRESS)
    parser.add_argument("--link", default="", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.worker:
        _prefill_worker(args)
        return
    if args.link:
        answers = claim_output()
        print(json.dumps(_transfer(args, args.link)), file=answers, flush=True)
        return
    path = RESULTS / "handover.json"
    result = json.loads(path.read_text()) if path.exists() else {}
    result |= machine_facts()
    for name, measure, part in (
        ("transfer", transfer, 2),
        ("first", first, 4),
        ("streams", streams, 1),
    ):
        if name in args.parts:  # a part of a prompt says as much, sooner
            facts = vars(args) | {"tokens": args.tokens // part}
            result[name] = measure(argparse.Namespace(**facts))
    for name, weigh in (("virtual", virtual), ("auto", auto)):
        if name in args.parts:
            other_rows = [row for row in result.get(name, []) if row["mix"] not in args.mixes]
            result[name] = other_rows + weigh(args)
    lines = table(("", "asked", "reached"), _rows(result))
    save(
        "handover",
        result,
        "\n".join(["## Prefill and decode apart", "", lines, "", caption(result)]),
    )


if __name__ == "__main__":
    main()
