"""The worker for ik_llama.cpp: the command that it starts, and the table that it reads."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.common.workload import WORKS
from benchmarks.peers.worker_ik_llama import batched_bench_command, read_timing

TABLE = """\
|    PP |     TG |    B |   N_KV |   T_PP s | S_PP t/s |   T_TG s | S_TG t/s |      T s |    S t/s |
|-------|--------|------|--------|----------|----------|----------|----------|----------|----------|
|   512 |    127 |    4 |   2556 |    2.500 |   819.20 |    5.080 |   100.00 |    7.580 |   337.20 |
"""


def test_the_rates_of_the_table_are_read() -> None:
    timing = read_timing("some line of the log\n" + TABLE + "\nanother line")
    assert timing.prompt_tokens == 4 * 512
    assert timing.tokens_per_s(WORKS["prefill-512"]) == pytest.approx(819.2)
    assert timing.tokens_per_s(WORKS["decode-4"]) == pytest.approx(100)


def test_output_without_a_row_is_an_error() -> None:
    with pytest.raises(ValueError, match="no row"):
        read_timing(TABLE.splitlines()[0])


def test_the_context_holds_all_streams() -> None:
    command = batched_bench_command(
        program=Path("llama-batched-bench"),
        model="model.gguf",
        num_threads=2,
        num_streams=8,
        prompt_length=32,
        num_tokens=64,
        run_time_repack=True,
    )
    options = dict(zip(command[1:-1:2], command[2:-1:2], strict=True))
    assert int(options["--ctx-size"]) >= 8 * (32 + 64)
    assert options["-ntg"] == "63"
    assert command[-1] == "--run-time-repack"
