"""Compare the tokens of 500 prompts prefilled by another process with those of one engine.

Run it with `make long SUITE=disaggregation-nixl`.

Engines on a real model and on tiny ones with windows and experts, with every format of keys and
values, hand prompts over in shared memory and by TCP, or with `--nixl` by NIXL. Answers are greedy
or drawn, constrained, speculative, one or three for a prompt. Tokens, texts and log-probabilities
must be those of one engine without a prefix cache. A case in which few prompts were handed over
fails, too.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import time
from itertools import cycle
from pathlib import Path

from support.disaggregated_tokens import Case, compare
from support.tiny import tiny_of, write_tiny_gguf

_FORMATS = ("f16", "bf16", "int16", "int8")
_FAMILIES = ("llama", "gemma2", "gemma3", "qwen3-moe")
_NIXL_WAYS = (("127.0.0.2", "off", "nixl-read"), ("127.0.0.2", "ngram", "nixl-write"))
_WAYS = (("127.0.0.1", "off"), ("127.0.0.2", "ngram"), ("127.0.0.1", "ngram"))
_LEAST_SHARE = 0.5  # of the prompts that must be handed over


def main() -> int:
    """Compare all cases; return 1 if an answer differs, or too little was handed over."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--prompts", type=int, default=500, help="in all")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--nixl", action="store_true", help="let NIXL move the pages")
    args = parser.parse_args()
    os.environ["TWOSTROKE_PEER_SECRET"] = "a secret of the tests"
    num_wrong, began_s = 0, time.monotonic()
    with tempfile.TemporaryDirectory() as folder_name:
        folder = Path(folder_name)
        tiny = [write_tiny_gguf(folder / f"{name}.gguf", tiny_of(name)) for name in _FAMILIES]
        models = [args.model, *map(str, tiny)]
        cases = [
            Case(model, kv_format, *way)
            for (model, kv_format), way in zip(
                [(model, kv_format) for kv_format in _FORMATS for model in models],
                cycle(_NIXL_WAYS if args.nixl else _WAYS),
                strict=False,
            )
        ]
        for number, case in enumerate(cases):
            count = args.prompts * (number + 1) // len(cases) - args.prompts * number // len(cases)
            result = compare(case, count, args.seed + number, folder)
            is_wrong = result.different or result.transfers.get("done", 0) < _LEAST_SHARE * count
            num_wrong += bool(is_wrong)
            way = "shared memory" if case.host == "127.0.0.1" else case.link
            print(
                f"{'WRONG  ' if is_wrong else ''}{Path(case.model).stem} {case.kv_format}, "
                f"{way}, speculation {case.speculate}: {len(result.different)} of {count} prompts' "
                f"{result.num_answers} answers differ; {result.transfers} "
                f"{result.num_bytes / 1e6:.1f} MB",
                flush=True,
            )
    print(f"{num_wrong} of {len(cases)} cases went wrong, in {time.monotonic() - began_s:.0f} s.")
    return min(1, num_wrong)


if __name__ == "__main__":
    sys.exit(main())
