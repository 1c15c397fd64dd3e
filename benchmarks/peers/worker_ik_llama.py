"""ik_llama.cpp's side of a comparison: its program `llama-batched-bench`, started for each run.

The program chooses its own token ids, so that nothing compares its tokens with those of others. It
loads the model before its clock starts.
"""

from __future__ import annotations

import argparse
import subprocess
from pathlib import Path
from typing import Any

from benchmarks.common.pipe import claim_output, serve
from benchmarks.common.workload import Timing

PROGRAM = "llama-batched-bench"
_MICRO_BATCH = 512  # ik_llama.cpp's own default
_SPARE_TOKENS = 64  # the program warms up with a few tokens in the same context


def main() -> None:
    """Answer until the questions end."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", help="a GGUF file")
    parser.add_argument("--programs", type=Path, required=True, help=f"the folder of {PROGRAM}")
    parser.add_argument("--threads", type=int, required=True)
    args, answers = parser.parse_args(), claim_output()

    def run(
        prompts: list[list[int]], num_tokens: int, num_kept: int, *, run_time_repack: bool
    ) -> dict[str, Any]:
        del num_kept  # such rows are not asked of it
        command = batched_bench_command(
            program=args.programs / PROGRAM,
            model=args.model,
            num_threads=args.threads,
            num_streams=len(prompts),
            prompt_length=len(prompts[0]),
            num_tokens=num_tokens,
            run_time_repack=run_time_repack,
        )
        done = subprocess.run(command, check=True, capture_output=True, text=True)
        return read_timing(done.stdout + done.stderr).as_json()

    about = {"programs": PROGRAM}
    serve({"about": lambda: about, "run": run, "forget": dict}, answers)


def batched_bench_command(
    *,
    program: Path,
    model: str,
    num_threads: int,
    num_streams: int,
    prompt_length: int,
    num_tokens: int,
    run_time_repack: bool,
) -> list[str]:
    """Return the command that runs one job.

    The program's first generated token is part of its decode time; in a `Timing`, the first token
    ends the prefill. Therefore the program generates one token less.
    """
    num_decoded = num_tokens - 1
    context_length = num_streams * (prompt_length + num_tokens) + _SPARE_TOKENS
    command = [
        *(str(program), "--model", model),
        *("--threads", str(num_threads)),
        *("--ctx-size", str(context_length)),
        *("--batch-size", str(context_length)),
        *("--ubatch-size", str(_MICRO_BATCH)),
        *("-npp", str(prompt_length)),
        *("-ntg", str(num_decoded)),
        *("-npl", str(num_streams)),
    ]
    return [*command, "--run-time-repack"] if run_time_repack else command


def read_timing(output: str) -> Timing:
    """Read the one row of the program's table.

    Raises:
        ValueError: The output has no such row.
    """
    for line in output.splitlines():
        cells = [cell.strip() for cell in line.split("|")]
        if len(cells) == 12 and cells[1].isdigit():
            prompt_length, num_decoded, num_streams = (int(cell) for cell in cells[1:4])
            prefill_s, decode_s = float(cells[5]), float(cells[7])
            return Timing(
                prompt_tokens=num_streams * prompt_length,
                prefill_s=prefill_s,
                decode_tokens=num_streams * num_decoded,
                decode_s=decode_s,
                wall_s=prefill_s + decode_s,
                first_tokens=[],
            )
    raise ValueError(f"{PROGRAM} printed no row: {output[-200:]!r}")


if __name__ == "__main__":
    main()
