"""Measure latency and bandwidth of an all-gather of two ranks: two namespaces, and loopback.

    python -m benchmarks.engine.links --packages FOLDER... --mpiexec MPIEXEC

Each folder of packages (made by `pip install --target`) may contain libucx, torch or mpi4py; a
row says why a link cannot be measured. MPI is not a link of Twostroke: it is measured by mpi4py,
which may need the library's path in MPI4PY_LIBMPI. Times include some 2 µs to call native code
from Python.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING

from benchmarks.common.namespaces import Hosts, obstacle, two_hosts

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from twostroke.backends.parallel.links.host_link import HostLink

SIZES = (16384, 1 << 20)  # bytes of the gathered value
_SECONDS = 3.0  # for each size
_LOOPBACK = "127.0.0.1"
_TIMEOUT_S = 120


def main() -> None:
    """Measure, or be one of the ranks that are measured."""
    options = _options()
    if options.meet is not None:
        _rank(options)
        return
    why_not = obstacle()
    networks = ["loopback"] if why_not or options.loopback else ["namespaces", "loopback"]
    if why_not:
        print(f"Only loopback: {why_not}.")
    print(
        "| link | network | "
        + " | ".join(f"{size >> 10} KB, µs" for size in SIZES)
        + " | 1 MB, GB/s |"
    )
    print("|---|---|---|---|---|")
    for network in networks:
        for kind in options.kinds:
            with ExitStack() as stack:
                hosts = stack.enter_context(two_hosts()) if network == "namespaces" else None
                print(f"| {kind} | {network} | {_measure(kind, hosts, options)} |", flush=True)


def _measure(kind: str, hosts: Hosts | None, options: argparse.Namespace) -> str:
    """Return a row's cells: of each size the median and the lowest time."""
    with tempfile.TemporaryDirectory() as folder:
        command = [
            sys.executable,
            "-m",
            "benchmarks.engine.links",
            "--kinds",
            kind,
            "--meet",
            f"{folder}/meet",
        ]
        command += ["--host", hosts.addresses[0] if hosts else _LOOPBACK]
        env = dict(os.environ)
        env["PYTHONPATH"] = os.pathsep.join([*options.packages, env.get("PYTHONPATH", "")])
        # As between machines: without memory that processes of one machine share.
        env |= {"UCX_TLS": "tcp,self", "MPIR_CVAR_CH4_NETMOD": "ucx"}
        if kind == "mpi":
            starts = [_mpiexec(command, hosts, options.mpiexec, Path(folder))]
        else:
            starts = [_as_rank(command, rank, hosts) for rank in (0, 1)]
        ranks = [
            subprocess.Popen(
                start, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=env
            )
            for start in starts
        ]
        try:
            outputs = [rank.communicate(timeout=_TIMEOUT_S) for rank in ranks]
        except subprocess.TimeoutExpired:
            return "did not end"
        finally:
            for rank in ranks:
                rank.kill()
    lines = [line for line in outputs[0][0].splitlines() if line.startswith("[")]
    if not lines:
        return (outputs[0][1].strip().splitlines() or ["said nothing"])[-1]
    medians = [statistics.median(times) for times in json.loads(lines[-1])]
    lowest = [min(times) for times in json.loads(lines[-1])]
    cells = [
        f"{m * 1e6:.0f} ({lowest_s * 1e6:.0f})" for m, lowest_s in zip(medians, lowest, strict=True)
    ]
    return " | ".join([*cells, f"{SIZES[-1] / medians[-1] / 1e9:.2f}"])


def _as_rank(command: Sequence[str], rank: int, hosts: Hosts | None) -> list[str]:
    command = ["env", f"RANK={rank}", "WORLD_SIZE=2", *command]
    return hosts.command(rank, command) if hosts else command


def _mpiexec(command: Sequence[str], hosts: Hosts | None, mpiexec: str, folder: Path) -> list[str]:
    """Return how MPICH's mpiexec starts two ranks; for a namespace, by a "remote shell" into it."""
    if hosts is None:
        return [mpiexec, "-n", "2", *command]
    names = " ".join(f"{a}) n={n};;" for a, n in zip(hosts.addresses, hosts.names, strict=True))
    shell = folder / "shell"
    skip = 'while [ "${1#-}" != "$1" ]; do shift; done'
    shell.write_text(f'#!/bin/sh\n{skip}\ncase $1 in {names} esac\nshift\n'
                     'exec ip netns exec $n sh -c "$*"\n')  # fmt: skip
    shell.chmod(0o700)
    where = ["-launcher", "ssh", "-launcher-exec", str(shell), "-hosts", ",".join(hosts.addresses)]
    return hosts.command(0, [mpiexec, *where, "-ppn", "1", "-n", "2", *command])


def _rank(options: argparse.Namespace) -> None:
    """Be a rank: join the other one and gather; rank 0 prints the times of each size."""
    from twostroke.backends.cpu.library import choose_level
    from twostroke.backends.division import read_launcher_env
    from twostroke.backends.parallel.links.link_type import open_link

    if options.kinds == ["mpi"]:
        _mpi_rank()
        return
    launcher_env = read_launcher_env()
    assert launcher_env is not None
    rank = launcher_env.rank
    level = choose_level(None).level
    link = open_link(options.kinds[0], rank, 2, level, options.host)
    if rank == 0:
        text = link.renew()
        options.meet.with_suffix(".new").write_text(text)
        options.meet.with_suffix(".new").rename(options.meet)
    while not options.meet.exists():
        time.sleep(0.01)
    link.join(options.meet.read_text())
    times = [_times(gather_of(link, size)) for size in SIZES]
    if rank == 0:
        print(json.dumps(times), flush=True)
    time.sleep(0.5)
    link.close()


def _mpi_rank() -> None:
    from mpi4py import MPI

    world = MPI.COMM_WORLD

    def gather_of_mpi(size: int) -> Callable[[bool], bool]:
        own_part, everything = bytearray(size // 2), bytearray(size)

        def gather(is_repeated: bool) -> bool:  # noqa: FBT001 - as below
            own_part[0] = is_repeated
            world.Allgather([own_part, MPI.BYTE], [everything, MPI.BYTE])
            return bool(everything[0])

        return gather

    times = [_times(gather_of_mpi(size)) for size in SIZES]
    if world.rank == 0:
        print(json.dumps(times), flush=True)


def gather_of(link: HostLink, size: int) -> Callable[[bool], bool]:
    """Return what gathers `size` bytes of two ranks; True means another time, as rank 0 says."""
    half = size // 2
    team, sizes = (ctypes.c_int32 * 2)(0, 1), (ctypes.c_int64 * 2)(half, half)
    own_part = (ctypes.c_uint8 * half)()
    everything = (ctypes.c_uint8 * size)()
    record = link.record

    def gather(is_repeated: bool) -> bool:  # noqa: FBT001 - rank 0's decision, which all learn
        own_part[0] = is_repeated
        assert record.all_gather(record.context, team, 2, own_part, everything, sizes) == 0
        return bool(everything[0])

    return gather


def _times(gather: Callable[[bool], bool]) -> list[float]:
    """Return the seconds of one gather after another, the first ones left out."""
    times: list[float] = []
    end = time.perf_counter() + _SECONDS
    is_repeated = True
    while is_repeated:
        start = time.perf_counter()
        is_repeated = gather(start < end)
        times.append(time.perf_counter() - start)
    return times[len(times) // 10 :]


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kinds", nargs="+", default=["ucx", "mpi", "gloo"])
    parser.add_argument("--packages", nargs="+", default=[])
    parser.add_argument("--mpiexec", default="mpiexec")
    parser.add_argument("--loopback", action="store_true", help="leave out namespaces")
    parser.add_argument("--meet", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--host", help=argparse.SUPPRESS)
    return parser.parse_args()


if __name__ == "__main__":
    main()
