"""Fuzz the readers of model files with Atheris (libFuzzer).

Run it with `make long SUITE=fuzz`.

Each target runs in a process of its own, limited in address space, that ends at the first broken
promise and leaves the input under build/fuzz. What the engine finds interesting it keeps there too,
for the next run; tests/fuzz/corpus has the few inputs that are worth keeping for good.
"""

from __future__ import annotations

import argparse
import random
import re
import resource
import struct
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent.parent
WORK = ROOT / "build" / "fuzz"
sys.path[:0] = [str(ROOT / "src"), str(ROOT / "tests")]

SHARES = {
    "gguf": 0.25,
    "gguf_model": 0.2,
    "split": 0.1,
    "safetensors": 0.2,
    "hf_folder": 0.2,
    "tokenizer_json": 0.05,
}
MEMORY_BYTES = 256 << 20  # of address space, above what the process has when it starts
INSTRUMENTED = ["twostroke.model.weights", "twostroke.model.families", "twostroke.model.tokenizer"]
MEASURE_EVERY = 16  # inputs whose memory is traced, which is slow


def main() -> int:
    """Fuzz all targets, or the one named, and print what was done; 1 if a promise was broken."""
    parser = argparse.ArgumentParser(description="Fuzz the readers of model files.")
    parser.add_argument("--cases", type=int, default=1_000_000, help="inputs, over all targets")
    parser.add_argument("--seed", type=int, default=1, help="of the engine; 0 takes a new one")
    parser.add_argument("--target", choices=SHARES, help="only this one")
    parser.add_argument("--scratch", type=Path, help=argparse.SUPPRESS)  # for the processes within
    options = parser.parse_args()
    if options.scratch:
        fuzz(options.target, options.cases, options.seed, options.scratch)
    shares = {options.target: 1.0} if options.target else SHARES
    done, broken = 0, []
    start = time.monotonic()
    for target, share in shares.items():
        cases, seconds, code = run_child(target, round(options.cases * share), options.seed)
        done += cases
        print(f"{target}: {cases} cases in {seconds:.0f} s, {'broken' if code else 'kept'}")
        if code:
            broken.append(target)
    minutes = (time.monotonic() - start) / 60
    print(f"{done} cases in {minutes:.1f} min; broken promises: {', '.join(broken) or 'none'}.")
    return 1 if broken else 0


def run_child(target: str, cases: int, seed: int) -> tuple[int, float, int]:
    """Fuzz one target in a new process; return the cases run, the seconds, and its exit code."""
    start, executed = time.monotonic(), 0
    shared = Path("/dev/shm")  # files that never meet a disk
    with tempfile.TemporaryDirectory(dir=shared if shared.is_dir() else None) as scratch:
        command = [sys.executable, __file__, "--scratch", scratch, "--target", target]
        command += ["--cases", str(cases), "--seed", str(seed)]
        process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, errors="replace")
        assert process.stderr is not None
        for line in process.stderr:
            if match := re.search(r"number_of_executed_units: *(\d+)", line):
                executed = int(match[1])
            if not re.match(r"#\d+\s+(NEW|REDUCE)|INFO: |stat::|WARNING: Failed to find", line):
                print(f"  {line.rstrip()}", flush=True)
        code = process.wait()
    return executed, time.monotonic() - start, code


def fuzz(target: str, cases: int, seed: int, scratch: Path) -> None:
    """Fuzz one target with files in `scratch`; never returns."""
    import atheris

    with atheris.instrument_imports(include=INSTRUMENTED):
        from fuzz import mutate, seeds, targets

    found_folder, start, files = WORK / target, scratch / "start", scratch / "files"
    for folder in (found_folder, start, files):
        folder.mkdir(parents=True, exist_ok=True)
    for name, data in seeds.seeds(target).items():
        (start / name).write_bytes(data)
    words = seeds.words()
    count = 0

    def one_input(data: bytes) -> None:
        nonlocal count
        count += 1
        measured = count % MEASURE_EVERY == 0
        try:
            targets.keep_promise(target, data, files, measure_memory=measured)
        except BaseException:
            # The engine would do so too, were it sure to get there.
            (WORK / f"{target}-broken").write_bytes(data)
            raise

    def mutator(data: bytes, max_size: int, number: int) -> bytes:
        rng = random.Random(number)
        if rng.random() < 0.7:
            try:
                return mutate.mutated(data, rng, words)[:max_size]
            except (ValueError, struct.error, RecursionError):
                pass
        return atheris.Mutate(data, max_size)

    arguments = [f"-runs={cases}", f"-seed={seed}", f"-max_len={targets.MAX_LENGTH}", "-timeout=20"]
    arguments += [
        f"-artifact_prefix={WORK}/{target}-",
        "-print_final_stats=1",
        "-rss_limit_mb=1024",
    ]
    arguments += [str(found_folder), str(start)]
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + MEMORY_BYTES, used + MEMORY_BYTES))
    atheris.Setup([sys.argv[0], *arguments], one_input, custom_mutator=mutator)
    atheris.Fuzz()


if __name__ == "__main__":
    sys.exit(main())
