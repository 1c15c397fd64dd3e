"""`twostroke doctor`: shows the limits of this machine, and the automatic choices on it."""

from __future__ import annotations

import platform
import shutil
import sys
import textwrap
from typing import TYPE_CHECKING, Any, Final

import click
import msgspec

from twostroke.cli.help import Command, option
from twostroke.core.errors import BackendError, MemoryLimitError, UsageError
from twostroke.core.hardware import (
    core_limit,
    memory_available,
    memory_limit,
    memory_nodes,
    memory_total,
    num_cores,
    processor_name,
    resolve_num_threads,
    threads_by_node,
)
from twostroke.core.json_io import encode_json
from twostroke.core.message_text import counted_noun

if TYPE_CHECKING:
    from collections.abc import Mapping

_SMALL_STREAM_BYTES: Final = 100 * 10**6  # a small model's weights, which large caches can hold
_LARGE_STREAM_BYTES: Final = 10**9  # more than any cache holds
_LABEL_WIDTH: Final = 12


@click.command("doctor", cls=Command)
@option("--json", "as_json", is_flag=True, help="Print one JSON object.")
@option(
    "--threads",
    type=click.IntRange(1, 1024),
    help="Threads for the measurement [default: one for each core].",
)
@option(
    "--ranks",
    is_flag=True,
    help="Compare the ranks that torchrun or another launcher has started, and measure the link "
    "between them; the exit code is 1 if they do not match.",
)
@click.argument("model", required=False)
def command(as_json: bool, threads: int | None, ranks: bool, model: str | None) -> None:
    """Measure this machine, and show the automatic choices of Twostroke on it.

    With --ranks, MODEL is opened on every machine and compared, without reading its weights.
    """
    if ranks:
        _compare_ranks(model, as_json=as_json)
        return
    if model is not None:
        raise UsageError("MODEL needs --ranks: only ranks are compared by a model.")
    from twostroke.backends.cpu.library import level_reports

    machine = _machine()
    auto = _automatic_choices(threads)
    levels = level_reports()
    level = auto["level"]
    num_threads = auto["num_threads"]
    if as_json:
        reports = {
            name: {"runs": _runs(report), "report": report} for name, report in levels.items()
        }
        measured = measure(level, num_threads)
        parts = {"machine": machine, "levels": reports, "measured": measured, "auto": auto}
        result: dict[str, Any] = {**parts, "gpu": measure_gpu()}
        click.echo(encode_json(result).decode())
        return
    _print_section("Machine", _machine_lines(machine))
    _print_section("Instruction-set levels", _level_lines(levels, level))
    _print_section(
        "What auto means here", _automatic_choice_lines(auto, has_threads=threads is not None)
    )
    if sys.stderr.isatty():
        click.echo("Measuring…\r", nl=False, err=True)
    measured = measure(level, num_threads)
    threads_text = counted_noun(measured["num_threads"], "thread")
    _print_section(f"Limits of {level} with {threads_text}", limit_lines(measured))
    if gpu := measure_gpu():
        _print_section("GPU (--backend gpu)", gpu_lines(gpu))


def _compare_ranks(model: str | None, *, as_json: bool) -> None:
    """Show whether the ranks can work together: their machines, versions, models and links.

    Only rank 0 prints. Exits with code 1 if the ranks do not match. `model` is opened on each rank
    to compare its files.
    """
    from twostroke.backends.parallel.check import check_ranks

    check = check_ranks(model)
    if check is None:
        return
    if as_json:
        click.echo(encode_json(check).decode())
    else:
        for rank in check.ranks:
            digest = f", model {rank.model_id[:12]}" if rank.model_id else ""
            _print_section(
                f"Rank {rank.rank} on {rank.host}",
                {
                    "network": f"{rank.address} ({rank.interface})",
                    "version": f"{rank.version}{digest}",
                    "processor": f"{counted_noun(rank.num_cores, 'core')}, level {rank.level}",
                    "memory": f"{rank.memory_bytes / 1e9:.1f} GB free",
                },
            )
        lines = {
            f"with rank {times.rank}": f"16 KB in {times.latency_s * 1e6:.0f} µs, "
            f"1 MB at {times.bytes_per_s / 1e9:.2f} GB/s"
            for times in check.times
        }
        _print_section(f"Link of rank 0: {check.link or 'none'}", lines)
        for sentence in check.mismatches:
            click.secho(sentence, fg="red")
    if check.mismatches:
        raise SystemExit(1)


def _machine() -> dict[str, Any]:
    """Return facts about the machine and its system, as --json prints them.

    `memory_nodes` are the NUMA nodes whose cores this process may use. The two limits are set by
    control groups (cgroups); None if the machine itself has less.
    """
    return {
        "processor": processor_name(),
        "num_cores": num_cores(),
        "core_limit": msgspec.to_builtins(core_limit()),
        "memory_nodes": [msgspec.to_builtins(node) for node in memory_nodes()],
        "memory_bytes": memory_total(),
        "memory_free_bytes": memory_available(),
        "memory_limit": msgspec.to_builtins(memory_limit()),
        "system": f"{platform.system()} {platform.release()} {platform.machine()}",
        "python": platform.python_version(),
    }


def _machine_lines(machine: Mapping[str, Any]) -> dict[str, str]:
    total, free = (
        _format_bytes(machine["memory_bytes"]),
        _format_bytes(machine["memory_free_bytes"]),
    )
    memory, nodes = f"{total}, {free} of it free", machine["memory_nodes"]
    if len(nodes) > 1:
        node_texts = (
            f"{counted_noun(len(node['cores']), 'core')} near node {node['number']}"
            for node in nodes
        )
        memory += f"; on {counted_noun(len(nodes), 'node')}: {', '.join(node_texts)}"
    if limit := machine["memory_limit"]:
        memory += f"; limited by {limit['source']}"
    cores = counted_noun(machine["num_cores"], "core")
    if limit := machine["core_limit"]:
        cores += f"; {limit['source']} allows {limit['num_cores']:.4g}"
    return {
        "processor": f"{machine['processor']}, {cores}",
        "memory": memory,
        "system": f"{machine['system']}, Python {machine['python']}",
    }


def _format_bytes(num_bytes: int) -> str:
    """Return a number of bytes as text in gigabytes, or in megabytes below 1 GB."""
    return f"{num_bytes / 1e9:.1f} GB" if num_bytes >= 10**9 else f"{num_bytes / 1e6:.0f} MB"


def _level_lines(reports: Mapping[str, str], chosen_level: str) -> dict[str, str]:
    lines = {}
    for name, report in reports.items():
        runs = f"yes {report.removeprefix('runs ')}" if _runs(report) else f"no: {report}"
        lines[name] = f"{runs}: auto takes it" if name == chosen_level else runs
    return lines


def _runs(report: str) -> bool:
    return report.startswith("runs")


def _automatic_choices(threads: int | None) -> dict[str, Any]:
    """Return the options that Twostroke chooses automatically on this machine.

    The keys are the names that --json prints. `places` has the number of threads for each NUMA
    node; empty if the operating system places the threads.
    """
    from twostroke.backends.cpu.library import choose_level, usual_kv_format
    from twostroke.core import env

    choice, num_threads = choose_level(None), resolve_num_threads(threads)
    threads_of_node = threads_by_node(memory_nodes(), num_threads)
    return {
        "backend": "cpu",
        "level": choice.level,
        "level_reason": choice.reason,
        "num_threads": num_threads,
        "kv_format": usual_kv_format(choice.level),
        "places": [{"node": node.number, "num_threads": n} for node, n in threads_of_node.items()],
        "cache_dir": str(env.cache_dir()),
    }


def _automatic_choice_lines(auto: Mapping[str, Any], *, has_threads: bool) -> dict[str, str]:
    """Return the automatic choices as labelled lines, each with its reason and its option.

    `has_threads` says whether --threads was given.
    """
    reason = auto["level_reason"].partition(";")[0]  # the lines of levels have the rest
    threads = "as --threads says" if has_threads else "one for each core, or TWOSTROKE_NUM_THREADS"
    thread_texts = [
        f"{node_threads['num_threads']} on node {node_threads['node']}"
        for node_threads in auto["places"]
    ]
    placement = f"; {', '.join(thread_texts)}, their weights near them" if thread_texts else ""
    return {
        "backend": f"{auto['backend']}: our own kernels (--backend)",
        "level": f"{auto['level']}: {reason} (--level, TWOSTROKE_CPU_LEVEL)",
        "threads": f"{auto['num_threads']}: {threads} (--threads){placement}",
        "context": "the model's own (--context-length)",
        "KV memory": "as weights and one context, within half of the free memory (--kv-memory)",
        "KV format": f"{auto['kv_format']}: keys and values in two bytes each (--kv-format)",
        "cache": f"{auto['cache_dir']} (TWOSTROKE_CACHE)",
    }


def measure(level: str, num_threads: int) -> dict[str, Any]:
    """Measure this machine's memory bandwidth and arithmetic peak, which takes some seconds.

    `small_bytes_per_s` is the bandwidth of a small stream, `large_bytes_per_s` of a stream that no
    cache holds, or None if there is too little memory for it.
    """
    from twostroke.backends.machine_limits import machine

    small = machine(level, num_threads, _SMALL_STREAM_BYTES, remeasure=True)
    is_short = memory_available() < 2 * _LARGE_STREAM_BYTES
    large = None if is_short else machine(level, num_threads, _LARGE_STREAM_BYTES, remeasure=True)
    return {
        "small_bytes_per_s": small.bandwidth,
        "large_bytes_per_s": large and large.bandwidth,
        "peak_ops_per_s": max(small.peak, large.peak if large else 0),
        "peak_kind": small.peak_kind,
        "num_threads": small.num_threads,
    }


def measure_gpu() -> dict[str, Any] | None:
    """Return facts and measured limits of the GPU; None if there is no GPU driver.

    If the GPU cannot be used, "refused" has the reason. If the GPU has too little free memory for
    the measurement, the limits are None, and "not_measured" has the reason.
    """
    from twostroke.backends.gpu import device

    if not device.has_driver():
        return None
    try:
        gpu = device.find_device()
        from twostroke.backends.gpu.limits import measure

    except BackendError as error:
        return {"refused": str(error)}
    facts: dict[str, Any] = {
        "name": gpu.name,
        "architecture": f"sm_{gpu.architecture}",
        "num_units": gpu.num_units,
        "memory_bytes": gpu.memory_total,
        "memory_free_bytes": gpu.memory_available,
        **dict.fromkeys(("copy_bytes_per_s", "peak_ops_per_s", "peak_kind")),
    }
    try:
        limits = measure(gpu)
    except MemoryLimitError as error:
        return facts | {"not_measured": str(error)}
    return facts | {
        "copy_bytes_per_s": limits.bandwidth,
        "peak_ops_per_s": limits.peak,
        "peak_kind": limits.peak_kind,
    }


def gpu_lines(gpu: Mapping[str, Any]) -> dict[str, str]:
    """Return facts about the GPU (the result of `measure_gpu`) as labelled lines."""
    if "refused" in gpu:
        return {"not used": gpu["refused"]}
    total, free = gpu["memory_bytes"] / 1e9, gpu["memory_free_bytes"] / 1e9
    units = counted_noun(gpu["num_units"], "multiprocessor")
    lines = {
        "device": f"{gpu['name']}, {gpu['architecture']}, {units}",
        "memory": f"{total:.1f} GB, {free:.1f} GB of it free",
    }
    if "not_measured" in gpu:
        return lines | {"limits": f"not measured: {gpu['not_measured']}"}
    return lines | {
        "bandwidth": f"{gpu['copy_bytes_per_s'] / 1e9:.1f} GB/s, copying",
        "peak": f"{gpu['peak_ops_per_s'] / 1e12:.2f} T operations/s, {gpu['peak_kind']}",
    }


def limit_lines(measured: Mapping[str, Any]) -> dict[str, str]:
    """Return the measured limits of the machine (the result of `measure`) as labelled lines."""
    bandwidth = f"{measured['small_bytes_per_s'] / 1e9:.1f} GB/s over 100 MB"
    if measured["large_bytes_per_s"] is not None:
        bandwidth += f", {measured['large_bytes_per_s'] / 1e9:.1f} GB/s over 1 GB"
    peak = f"{measured['peak_ops_per_s'] / 1e12:.2f} T operations/s, {measured['peak_kind']}"
    return {"bandwidth": bandwidth, "peak": peak}


def _print_section(heading: str, lines: Mapping[str, str]) -> None:
    """Print a heading and labelled lines, folded to the terminal's width."""
    width = min(shutil.get_terminal_size().columns, 100)
    click.secho(heading, bold=True)
    for name, text in lines.items():
        first, later = f"  {name:{_LABEL_WIDTH}}", " " * (_LABEL_WIDTH + 2)
        click.echo(
            textwrap.fill(
                text, width, initial_indent=first, subsequent_indent=later, break_on_hyphens=False
            )
        )
