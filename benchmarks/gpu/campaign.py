"""Measure the gpu backend on this machine's GPU, after checks of its results.

Run it with `make bench WHAT=gpu`.

Weights of real shapes are random, so no model file is needed. Rows are measured in the order of
their importance, and results are saved after each; `--row` repeats one row, `--minutes` limits
the time, and `--continue` continues an earlier run. Each time is shown beside the prediction of
the cost model from the copy bandwidth and the matrix rate of the same run. `--dry-run` needs no
GPU: it predicts times from given figures, and marks them as predicted.
"""

from __future__ import annotations

import argparse
import faulthandler
import fnmatch
import json
import os
import statistics
import sys
import time
import traceback
from pathlib import Path
from typing import Any, Final

from benchmarks.common.report import machine_facts, note, table, write
from benchmarks.gpu.checks import CHECKS
from benchmarks.gpu.models import program_of, stored_bytes
from benchmarks.gpu.predict import predict
from benchmarks.gpu.rows import ORDER, ROWS
from twostroke.backends.gpu.lower import lower
from twostroke.core.errors import BackendError, DeviceLostError, UsageError

_BANDWIDTH, _PEAK = 4.3e12, 790e12  # of one H200 that was seen; for --dry-run
# Seconds that a part may take, so that none is cut off by the end of --minutes.
_CHECK_S, _ROW_S, _START_S, _LOADED_BYTES_S = 100.0, 15.0, 30.0, 1e9
_LONGEST_S: Final = 480  # after which a part that hangs ends the process


def main() -> None:
    """Run the campaign, or the rows that are named."""
    args = _arguments()
    names = selected_parts(args.row)
    result: dict[str, Any] = {"facts": machine_facts(), "predicted_only": args.dry_run, "rows": {}}
    if args.go_on and args.out.exists():
        result["rows"] = _known_rows(json.loads(args.out.read_text()))
        names = [name for name in names if name not in result["rows"]]
    limits = args.bandwidth, args.peak
    if not args.dry_run:
        try:
            result["device"], limits = measure_device()
        except BackendError as error:
            raise SystemExit(f"{error} `--dry-run` predicts without a GPU.") from None
    result["limits"] = limits
    args.out.parent.mkdir(parents=True, exist_ok=True)
    left = dry(names, result, args.out) if args.dry_run else Campaign(args, result).run(names)
    print(report(result, limits))
    if left:
        print(f"\n{len(left)} parts are left, from {left[0]} on: go on with --continue.")
    if args.plots is not None:
        from benchmarks.gpu.plots import draw

        try:
            for path in draw(result, args.plots):
                print(f"Drawn: {path}")
        except UsageError as error:
            raise SystemExit(str(error)) from None


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--row", action="append", help='a row or a check, or several: "rows-8-*"')
    parser.add_argument("--minutes", type=float, help="begin nothing that should end later")
    parser.add_argument(
        "--continue", action="store_true", dest="go_on", help="leave out what --out has"
    )
    parser.add_argument("--dry-run", action="store_true", help="predict; needs no GPU")
    parser.add_argument(
        "--bandwidth", type=float, default=_BANDWIDTH, help="bytes/s, for a dry run"
    )
    parser.add_argument("--peak", type=float, default=_PEAK, help="FLOPs/s, if dry")
    parser.add_argument("--out", type=Path, default=Path("build/gpu-campaign.json"))
    parser.add_argument("--plots", type=Path, help="folder for the ladder and the roofline, SVG")
    return parser.parse_args()


def selected_parts(patterns: list[str] | None) -> list[str]:
    """Return the parts that are asked for, in the order in which they are measured."""
    for pattern in patterns or ():
        if not fnmatch.filter(ORDER, pattern):
            raise SystemExit(f"There is no row {pattern!r}: {', '.join(ORDER)}.")
    wanted_patterns = patterns or ["*"]
    return [
        name for name in ORDER if any(fnmatch.fnmatch(name, pattern) for pattern in wanted_patterns)
    ]


def _known_rows(before: dict[str, Any]) -> dict[str, Any]:
    """Return what an earlier run found; what it began and did not end is not tried again."""
    rows: dict[str, Any] = before["rows"]
    running = before.get("running")
    if running and running not in rows:
        rows[running] = {"failed": "It did not end."}
    return rows


def dry(names: list[str], result: dict[str, Any], out: Path) -> list[str]:
    """Predict rows, and what each of their kernels takes; nothing is left."""
    from benchmarks.gpu.measure import costs_of

    limits = result["limits"]
    for name in names:
        if name not in ROWS:
            continue
        row = ROWS[name]
        program = program_of(row.model)
        lowered = lower(program)
        fused = *filter(None, lowered.parts), (lowered.logits,)
        result["rows"][name] = predict(row, *limits)
        if not row.less:
            result["rows"][name]["kernels"] = costs_of(row, program, fused, limits)
    write(out, json.dumps(result, indent=1) + "\n")
    return []


class Campaign:
    """Runs parts one after another, and writes the results after each.

    A part that fails is noted, and the next one begins: in a new process where a kernel's fault
    has ended CUDA in this one.
    """

    def __init__(self, args: argparse.Namespace, result: dict[str, Any]) -> None:
        from benchmarks.gpu.measure import Engines

        self._args, self._result, self._began_s = args, result, time.monotonic()
        self._engines = Engines(ROWS.values(), result["limits"])
        self._seen: set[object] = set()  # engines that were started

    def run(self, names: list[str]) -> list[str]:
        """Run parts while there is time; return those for which there was none."""
        self._write()
        for index, name in enumerate(names):
            if self._args.minutes is not None and self._left_s() < self._expected_s(name):
                return names[index:]
            self._run(name)
        self._engines.close()
        return []

    def _left_s(self) -> float:
        return 60 * float(self._args.minutes) - (time.monotonic() - self._began_s)

    def _expected_s(self, name: str) -> float:
        """Return how long a part should take at most, by rules that no GPU has confirmed."""
        if name in CHECKS:
            return _CHECK_S
        row = ROWS[name]
        if row.engine in self._seen:
            return _ROW_S
        num_bytes = sum(stored_bytes(program_of(row.model), row.fmt).values())
        return _ROW_S + _START_S + num_bytes / _LOADED_BYTES_S

    def _run(self, name: str) -> None:
        result, began_s = self._result, time.monotonic()
        result["running"] = name
        self._write()
        faulthandler.dump_traceback_later(_LONGEST_S, exit=True, file=2)
        try:
            outcome = self._row_result(name)
        except DeviceLostError as error:
            outcome = {"failed": str(error)}
        except Exception as error:  # noqa: BLE001 - the next row may be better
            outcome = {"failed": f"{type(error).__name__}: {error}"}
            traceback.print_exc()
        faulthandler.cancel_dump_traceback_later()
        outcome["took_s"] = round(time.monotonic() - began_s, 1)
        result["rows"][name] = outcome
        del result["running"]
        self._write()
        note(f"{name}: { {key: value for key, value in outcome.items() if key != 'kernels'} }")
        if "failed" in outcome:
            if not _is_alive():
                self._start_again()
            self._engines.close()  # which may have steps in flight
            self._seen.clear()

    def _row_result(self, name: str) -> dict[str, Any]:
        if name in CHECKS:
            self._engines.close()  # so that there is memory
            return CHECKS[name]()
        row, rows = ROWS[name], self._result["rows"]
        self._seen.add(row.engine)
        result = predict(row, *self._result["limits"])
        if not row.less:
            return result | self._engines.measured(row)
        other = rows.get(row.less) or self._engines.measured(ROWS[row.less])
        own_result = self._engines.measured(row)
        for engine_result in (own_result, other):
            if "ms" not in engine_result:
                return result | engine_result
        ms = round(own_result["gpu_ms"] - row.times * other["gpu_ms"], 4)
        return result | {"ms": ms, "detail": own_result["detail"]}

    def _write(self) -> None:
        write(self._args.out, json.dumps(self._result, indent=1) + "\n")

    def _start_again(self) -> None:
        words = [word for word in sys.argv if word != "--continue"]
        if self._args.minutes is not None:  # the last one counts
            words += ["--minutes", f"{max(0.0, self._left_s()) / 60:.2f}"]
        note("CUDA has ended in this process: going on in a new one.")
        os.execv(sys.executable, [sys.executable, *words, "--continue"])


def _is_alive() -> bool:
    import torch

    try:
        if torch.cuda.is_available():
            torch.cuda.synchronize()
    except RuntimeError:
        return False
    return True


def measure_device() -> tuple[dict[str, Any], tuple[float, float]]:
    """Return facts about the GPU, its copy bandwidth (read and write) and BF16 matrix rate."""
    from twostroke.backends.gpu import launch_times
    from twostroke.backends.gpu.device import find_device
    from twostroke.backends.gpu.limits import measure

    device = find_device()
    if device.is_interpreted:
        return {"name": device.name}, (_BANDWIDTH, _PEAK)
    limits, times = measure(device), launch_times.measure(device)
    facts = {"name": device.name, "sm": device.architecture}
    facts |= {"copy_bytes_s": limits.bandwidth, "flops": limits.peak}
    if times is not None:
        facts["launch_us"] = round(1e6 * times.apart_s, 2)
        facts["overlapping_launch_us"] = times.overlapping_s and round(1e6 * times.overlapping_s, 2)
    return facts, (limits.bandwidth, limits.peak)


def report(result: dict[str, Any], limits: tuple[float, float]) -> str:
    """Return the rows as a table, and how far predictions are from what was measured."""
    lines, checks, errors = [], [], []
    for name, row in result["rows"].items():
        if name in CHECKS:
            checks.append([name, json.dumps(row)])
            continue
        ms, floor_ms = row.get("ms"), row.get("floor_ms", "")
        share = "" if not ms else f"{floor_ms / ms:.0%}"
        if ms:
            errors.append(abs(row["predicted_ms"] / ms - 1))
        cells = [f"{row.get(key, '')}" for key in ("launches", "floor_ms", "predicted_ms")]
        cells.append(row.get("refused") or row.get("failed") or ms or "not measured")
        speed = row.get("tokens_s", row.get("predicted_tokens_s", ""))
        times_ms = [row.get(key, "") for key in ("gpu_ms", "host_ms")]
        lines.append([name, row.get("step", ""), *cells, share, *times_ms, speed])
    header = [
        *("row", "step", "launches", "floor, ms", "predicted, ms", "measured, ms", "of floor"),
        *("kernels, ms", "host, ms", "tokens/s"),
    ]
    kind = "assumed" if result["predicted_only"] else "measured"
    text = table(header, [[str(cell) for cell in line] for line in lines])
    bandwidth, peak = limits
    text = f"{text}\n\n{bandwidth / 1e12:.2f} TB/s and {peak / 1e12:.0f} TFLOPS {kind}."
    if checks:
        text = f"{table(('check', 'found'), checks)}\n\n{text}"
    if errors:
        text += f" Predictions are {statistics.median(errors):.0%} off (median)."
    return text


if __name__ == "__main__":
    main()
