"""Checks that the ranks of a launcher fit together: `twostroke doctor --ranks`."""

from __future__ import annotations

import ctypes
import socket
import time
from statistics import median
from typing import TYPE_CHECKING, Final, TypeVar

from twostroke.backends.cpu.library import choose_level, load_library
from twostroke.backends.division import read_launcher_env
from twostroke.backends.parallel.connection import connect_to_rank0
from twostroke.backends.parallel.launcher import (
    ARRIVAL_TIMEOUT_S,
    assigned_rank,
    wait_for_ranks,
)
from twostroke.backends.parallel.links.link_type import LINK_TYPES, open_link
from twostroke.backends.parallel.rank_messages import (
    RECEIVED_BY_RANKS,
    EndRank,
    LinkTested,
    LinkTrial,
    RankArrival,
    RankReport,
    RankReported,
    version,
)
from twostroke.core import env
from twostroke.core.errors import BackendError, TwostrokeError, UsageError
from twostroke.core.frozen import Frozen
from twostroke.core.hardware import memory_available, num_cores
from twostroke.core.message_text import counted_noun
from twostroke.core.transport.frames import ConnectionLostError
from twostroke.model.loader import load
from twostroke.model.weights import weights_identity

if TYPE_CHECKING:
    from twostroke.backends.division import LauncherEnv
    from twostroke.backends.parallel.connection import RankConnection
    from twostroke.backends.parallel.links.host_link import HostLink

T = TypeVar("T")

_MESSAGE_TIMEOUT_S: Final = 60.0
_SMALL_BYTES: Final = 16384  # gathered by two ranks, to measure latency
_LARGE_BYTES: Final = 1 << 20  # to measure bandwidth
_REPEATS: Final = 60


class LinkTimes(Frozen):
    """The latency and bandwidth of gathers between rank 0 and another rank over the link."""

    rank: int
    latency_s: float
    bytes_per_s: float


class RankCheck(Frozen):
    """The result of `twostroke doctor --ranks`: reports, mismatches, and link speeds."""

    ranks: list[RankReport]
    mismatches: list[str]
    link: str | None
    times: list[LinkTimes]


def check_ranks(model: str | None) -> RankCheck | None:
    """Compare all ranks that a launcher such as torchrun has started.

    Returns the result on rank 0, and None on the other ranks.

    Raises:
        UsageError: no launcher has started this process.
        PortInUseError, RanksLostError, ConnectionLostError: the ranks do not find each other.
    """
    launcher_env = read_launcher_env()
    own_rank = assigned_rank(launcher_env.num_ranks) if launcher_env else None
    if own_rank is None:
        reason = "WORLD_SIZE is 1" if launcher_env else "RANK and WORLD_SIZE are not set"
        raise UsageError(
            f"--ranks compares the processes of a launcher, but {reason}: run this command by "
            "torchrun, mpirun or srun on all machines, or set RANK, WORLD_SIZE, MASTER_ADDR and "
            "MASTER_PORT yourself."
        )
    if own_rank.rank != 0:
        _report_to_rank0(own_rank, model)
        return None
    return _collect_reports(own_rank, model)


def _collect_reports(own_rank: LauncherEnv, model: str | None) -> RankCheck:
    remote = wait_for_ranks(own_rank)
    try:
        connections = [remote(rank).connection for rank in range(1, own_rank.num_ranks)]
        reports = [_report(0, remote.host, model)]
        reports += [_receive(connection, RankReported).report for connection in connections]
        problems = mismatches(reports)
        usable = [k for k in LINK_TYPES if not any(report.obstacles[k] for report in reports)]
        requested_kind = env.forced_link()
        kind = next((k for k in usable if requested_kind in {None, k}), None)
        if kind is None:
            problems += [f"No link: {why}" for why in _no_link(reports, requested_kind)]
            for connection in connections:
                connection.send(LinkTrial(None))
            return RankCheck(reports, problems, None, [])
        link = open_link(kind, 0, own_rank.num_ranks, reports[0].level, remote.host)
        try:
            text = link.renew()
            for connection in connections:
                connection.send(LinkTrial(kind, text))
            link.join(text)
            times = [_measure(link, rank, rank) for rank in range(1, own_rank.num_ranks)]
            for connection in connections:  # a rank that leaves early would end the link for all
                _receive(connection, LinkTested)
            for connection in connections:
                connection.send(EndRank())
        except TwostrokeError as error:
            return RankCheck(
                reports, [*problems, f"The link {kind} does not work. {error}"], kind, []
            )
        finally:
            link.close()
        return RankCheck(reports, problems, LINK_TYPES[kind].version(), times)
    finally:
        remote.close()


def _report_to_rank0(own_rank: LauncherEnv, model: str | None) -> None:
    assert own_rank.host is not None
    address = own_rank.host, own_rank.port
    connection = connect_to_rank0(address, env.rank_secret(), RECEIVED_BY_RANKS, ARRIVAL_TIMEOUT_S)
    try:
        connection.send(RankArrival(own_rank.rank, own_rank.num_ranks))
        report = _report(own_rank.rank, connection.own_address(), model)
        connection.send(RankReported(report))
        trial = _receive(connection, LinkTrial)
        if trial.kind is None:
            return
        link = open_link(trial.kind, own_rank.rank, own_rank.num_ranks, report.level)
        try:
            link.join(trial.link)
            _measure(link, 0, own_rank.rank)
            connection.send(LinkTested())
            connection.receive(_MESSAGE_TIMEOUT_S)
        finally:
            link.close()
    finally:
        connection.close()


def mismatches(reports: list[RankReport]) -> list[str]:
    """Return an error message for each rank whose model, version or kernels do not fit rank 0's."""
    rank0, problems = reports[0], []
    for report in reports:
        rank_name = f"Rank {report.rank} on {report.host}"
        if report.model_error is not None:
            problems.append(f"{rank_name} cannot open the model: {report.model_error}")
        elif report.model_id != rank0.model_id and rank0.model_id is not None:
            problems.append(
                f"{rank_name} has another file of the model than rank 0 on {rank0.host}."
            )
        if report.version != rank0.version:
            problems.append(
                f"{rank_name} has twostroke {report.version}, rank 0 has {rank0.version}."
            )
        if report.one_arithmetic != rank0.one_arithmetic:
            problems.append(
                f"{rank_name} computes prompts otherwise (level {report.level}) than rank 0 (level "
                f"{rank0.level}): set --level to one that both have."
            )
    return problems


def _no_link(reports: list[RankReport], requested_kind: str | None) -> list[str]:
    return [
        f"rank {report.rank} on {report.host}, {kind}: {why.rstrip('.')}."
        for report in reports
        for kind, why in report.obstacles.items()
        if why is not None and requested_kind in {None, kind}
    ]


def _report(rank: int, address: str, model: str | None) -> RankReport:
    model_id = model_error = None
    if model is not None:
        try:
            model_id = weights_identity(load(model).tensors)
        except TwostrokeError as error:
            model_error = str(error)
    level = choose_level(None).level
    return RankReport(
        rank=rank,
        host=socket.gethostname(),
        address=address,
        interface=interface_of(address),
        version=version(),
        level=level,
        one_arithmetic=bool(load_library(level).ts_one_arithmetic()),
        num_cores=num_cores(),
        memory_bytes=memory_available(),
        model_id=model_id,
        model_error=model_error,
        obstacles={name: kind.obstacle() for name, kind in LINK_TYPES.items()},
    )


def interface_of(address: str) -> str:
    """Return the name of the network interface that has an IPv4 address; "?" if unknown."""
    import fcntl

    try:
        address_bytes = socket.inet_aton(socket.gethostbyname(address))
    except OSError:  # an IPv6 address
        return "?"
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
        for _, name in socket.if_nameindex():
            request = name.encode().ljust(256, b"\0")
            try:
                answer = fcntl.ioctl(sock.fileno(), 0x8915, request)  # SIOCGIFADDR
            except OSError:
                continue  # this interface has no address
            if answer[20:24] == address_bytes:
                return name
    return "?"


def _measure(link: HostLink, other: int, number: int) -> LinkTimes:
    """Measure the latency and bandwidth of the link between rank 0 and rank `number`.

    Both ranks call this at the same time. `other` is the number of the rank at the other end.
    """
    small = _gather_s(link, (0, number), _SMALL_BYTES)
    large = _gather_s(link, (0, number), _LARGE_BYTES)
    return LinkTimes(other, small, _LARGE_BYTES / large)


def _gather_s(link: HostLink, pair: tuple[int, int], size: int) -> float:
    """Return the median seconds of an all-gather of `size` bytes by a pair of ranks."""
    half, record = size // 2, link.record
    team, sizes = (ctypes.c_int32 * 2)(*pair), (ctypes.c_int64 * 2)(half, half)
    contribution, gathered = (ctypes.c_uint8 * half)(), (ctypes.c_uint8 * size)()
    times = []
    for _ in range(_REPEATS):
        start = time.perf_counter()
        if record.all_gather(record.context, team, 2, contribution, gathered, sizes):
            raise BackendError(
                f"Ranks {pair[0]} and {pair[1]} cannot exchange {counted_noun(size, 'byte')}."
            )
        times.append(time.perf_counter() - start)
    return median(times)


def _receive(connection: RankConnection, message_type: type[T]) -> T:
    """Return the next message of another rank, which must have this type."""
    try:
        message = connection.receive(_MESSAGE_TIMEOUT_S)
    except ConnectionLostError:
        message = None
    if not isinstance(message, message_type):
        raise BackendError("A rank ended, or sent no report, before the ranks were compared.")
    return message
