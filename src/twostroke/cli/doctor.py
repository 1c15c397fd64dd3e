"""`twostroke doctor`: what this machine can do, and what "auto" means here and why."""

from __future__ import annotations

import json
import platform
import sys
from typing import Any

import click


@click.command("doctor")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
@click.option("--threads", type=int, help="Measure with this many threads [default: all cores].")
def command(as_json: bool, threads: int | None) -> None:
    """Measure this machine and show what Twostroke would choose on it."""
    facts = examine(threads)
    if as_json:
        click.echo(json.dumps(facts, ensure_ascii=False))
        return
    from rich.console import Console
    from rich.table import Table

    console = Console()
    for heading, rows in facts.items():
        table = Table(
            title=heading, title_justify="left", box=None, show_header=False, pad_edge=False
        )
        table.add_column(min_width=26)
        table.add_column()
        for name, value in rows.items():
            table.add_row(f"  {name}", _shown(value))
        console.print(table)


def examine(num_threads: int | None) -> dict[str, dict[str, Any]]:
    """Return the machine's facts by heading; measures bandwidth and peak anew."""
    from twostroke.backends.cpu.library import choose_level, level_reports
    from twostroke.core import env
    from twostroke.core.machine import (
        memory_available,
        memory_total,
        num_cores,
        processor_name,
        resolve_num_threads,
    )
    from twostroke.engine.hardware import machine

    threads = resolve_num_threads(num_threads)
    choice = choose_level(None)
    cached = machine(choice.level, threads, 96 * 2**20, again=True)
    large = machine(choice.level, threads, 1024 * 2**20, again=True)
    return {
        "Machine": {
            "processor": processor_name(),
            "cores": num_cores(),
            "memory": f"{memory_total() / 1e9:.1f} GB, {memory_available() / 1e9:.1f} GB free",
            "system": f"{platform.system()} {platform.release()} {platform.machine()}",
            "python": sys.version.split()[0],
        },
        "Instruction-set levels": level_reports(),
        "Measured": {
            "threads": threads,
            "bandwidth, 100 MB stream": f"{cached.bandwidth / 1e9:.1f} GB/s",
            "bandwidth, 1 GB stream": f"{large.bandwidth / 1e9:.1f} GB/s",
            f"peak, {large.peak_kind}": f"{large.peak / 1e12:.2f} T operations/s",
        },
        "What auto resolves to": {
            "backend": "cpu",
            "level": f"{choice.level} ({choice.reason})",
            "threads": f"{threads} (TWOSTROKE_NUM_THREADS or --threads changes it)",
            "cache folder": str(env.cache_dir()),
        },
    }


def _shown(value: object) -> str:
    return str(value)
