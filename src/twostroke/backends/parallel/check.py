"""Compares the ranks of a launcher before any weight is read: `twostroke doctor --ranks`."""

from __future__ import annotations

import ctypes
import socket
import time
from statistics import median
from typing import TYPE_CHECKING, Final

from twostroke.backends.cpu.library import choose_level, load_library
from twostroke.backends.parallel.division import launched
from twostroke.backends.parallel.launcher import COME_S, RankArrival, place_among, wait_for_ranks
from twostroke.backends.parallel.links.link_type import KINDS, open_link
from twostroke.backends.parallel.rank_messages import pack, unpack, version
from twostroke.core import env
from twostroke.core.errors import BackendError, TwostrokeError, UsageError
from twostroke.core.frozen import Frozen
from twostroke.core.hardware import memory_available, num_cores
from twostroke.core.transport.channel import Channel, ChannelClosedError, MessageType, connect
from twostroke.model.loader import load
from twostroke.model.weights import weights_identity

if TYPE_CHECKING:
    from twostroke.backends.parallel.division import LauncherEnv
    from twostroke.backends.parallel.links.host_link import HostLink

_PATIENCE_S: Final = 60.0
_SMALL: Final = 16384  # bytes that two ranks gather: latency
_LARGE: Final = 1 << 20  # and bandwidth
_REPEATS: Final = 60


class RankReport(Frozen):
    """What a rank says of itself.

    `model_id` is that of the model's weights, `model_error` why they cannot be opened. `obstacles`
    says for each kind of link why it cannot be used, or None.
    """

    rank: int
    host: str
    address: str
    interface: str
    version: str
    level: str
    one_arithmetic: bool
    num_cores: int
    memory_bytes: int
    model_id: str | None
    model_error: str | None
    obstacles: dict[str, str | None]


class LinkTimes(Frozen):
    """How fast rank 0 and another rank gather values over the link."""

    rank: int
    latency_s: float
    bytes_per_s: float


class Check(Frozen):
    """What all ranks say, what does not fit, and how fast the link is."""

    ranks: list[RankReport]
    mismatches: list[str]
    link: str | None
    times: list[LinkTimes]


class _Try(Frozen):
    """From rank 0: how to join the link that is tried; `kind` None: none."""

    kind: str | None
    link: str = ""


def check_ranks(model: str | None) -> Check | None:
    """Return rank 0's view of all ranks that the launcher has started; None on the others.

    Raises:
        UsageError: no launcher has started this process.
        PortInUseError, RanksLostError, ChannelClosedError: the ranks do not find each other.
    """
    told = launched()
    place = place_among(told.num_ranks) if told else None
    if place is None:
        lacks = "WORLD_SIZE is 1" if told else "RANK and WORLD_SIZE are not set"
        raise UsageError(
            f"--ranks compares the processes of a launcher, but {lacks}: run this command by "
            "torchrun, mpirun or srun on all machines, or set RANK, WORLD_SIZE, MASTER_ADDR and "
            "MASTER_PORT yourself."
        )
    if place.rank != 0:
        _answer(place, model)
        return None
    return _ask(place, model)


def _ask(place: LauncherEnv, model: str | None) -> Check:
    remote = wait_for_ranks(place)
    try:
        channels = [remote(rank).channel for rank in range(1, place.num_ranks)]
        reports = [_report(0, remote.host, model)]
        reports += [unpack(_next(channel), RankReport) for channel in channels]
        wrong = mismatches(reports)
        usable = [k for k in KINDS if not any(report.obstacles[k] for report in reports)]
        wanted = env.link()
        kind = next((k for k in usable if wanted in {None, k}), None)
        if kind is None:
            wrong += [f"No link: {why}" for why in _no_link(reports, wanted)]
            for channel in channels:
                channel.send(MessageType.JOB, pack(_Try(None)))
            return Check(reports, wrong, None, [])
        link = open_link(kind, 0, place.num_ranks, reports[0].level, remote.host)
        try:
            text = link.renew()
            for channel in channels:
                channel.send(MessageType.JOB, pack(_Try(kind, text)))
            link.join(text)
            times = [_measure(link, rank, rank) for rank in range(1, place.num_ranks)]
            for channel in channels:  # whoever leaves ends the link of all
                _next(channel)
            for channel in channels:
                channel.send(MessageType.END)
        except TwostrokeError as error:
            return Check(reports, [*wrong, f"The link {kind} does not work. {error}"], kind, [])
        finally:
            link.close()
        return Check(reports, wrong, KINDS[kind].version(), times)
    finally:
        remote.close()


def _answer(place: LauncherEnv, model: str | None) -> None:
    assert place.host is not None
    channel = connect(place.host, place.port, env.rank_secret(), COME_S)
    try:
        channel.send(MessageType.HELLO, pack(RankArrival(place.rank, place.num_ranks)))
        report = _report(place.rank, channel.own_address(), model)
        channel.send(MessageType.HELLO, pack(report))
        trial = unpack(_next(channel), _Try)
        if trial.kind is None:
            return
        link = open_link(trial.kind, place.rank, place.num_ranks, report.level)
        try:
            link.join(trial.link)
            _measure(link, 0, place.rank)
            channel.send(MessageType.READY)
            channel.receive(_PATIENCE_S)
        finally:
            link.close()
    finally:
        channel.close()


def mismatches(reports: list[RankReport]) -> list[str]:
    """Return a sentence for each fact in which a rank differs from rank 0."""
    first, wrong = reports[0], []
    for report in reports:
        who = f"Rank {report.rank} on {report.host}"
        if report.model_error is not None:
            wrong.append(f"{who} cannot open the model: {report.model_error}")
        elif report.model_id != first.model_id and first.model_id is not None:
            wrong.append(f"{who} has another file of the model than rank 0 on {first.host}.")
        if report.version != first.version:
            wrong.append(f"{who} has twostroke {report.version}, rank 0 has {first.version}.")
        if report.one_arithmetic != first.one_arithmetic:
            wrong.append(
                f"{who} computes prompts otherwise (level {report.level}) than rank 0 (level "
                f"{first.level}): set --level to one that both have."
            )
    return wrong


def _no_link(reports: list[RankReport], wanted: str | None) -> list[str]:
    return [
        f"rank {report.rank} on {report.host}, {kind}: {why.rstrip('.')}."
        for report in reports
        for kind, why in report.obstacles.items()
        if why is not None and wanted in {None, kind}
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
        obstacles={name: kind.obstacle() for name, kind in KINDS.items()},
    )


def interface_of(address: str) -> str:
    """Return the name of the network interface with an IPv4 address; "?" if that is not known."""
    import fcntl

    try:
        wanted = socket.inet_aton(socket.gethostbyname(address))
    except OSError:  # it is one of IPv6
        return "?"
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
        for _, name in socket.if_nameindex():
            request = name.encode().ljust(256, b"\0")
            try:
                answer = fcntl.ioctl(sock.fileno(), 0x8915, request)  # SIOCGIFADDR
            except OSError:
                continue  # has no address
            if answer[20:24] == wanted:
                return name
    return "?"


def _measure(link: HostLink, other: int, number: int) -> LinkTimes:
    """Gather with another rank; `number` is that of the one which is not 0."""
    small = _gather_s(link, (0, number), _SMALL)
    large = _gather_s(link, (0, number), _LARGE)
    return LinkTimes(other, small, _LARGE / large)


def _gather_s(link: HostLink, pair: tuple[int, int], size: int) -> float:
    """Return how long a gather of `size` bytes of two ranks takes."""
    half, record = size // 2, link.record
    team, sizes = (ctypes.c_int32 * 2)(*pair), (ctypes.c_int64 * 2)(half, half)
    own, everything = (ctypes.c_uint8 * half)(), (ctypes.c_uint8 * size)()
    times = []
    for _ in range(_REPEATS):
        start = time.perf_counter()
        if record.all_gather(record.context, team, 2, own, everything, sizes):
            raise BackendError(f"Ranks {pair[0]} and {pair[1]} cannot exchange {size} bytes.")
        times.append(time.perf_counter() - start)
    return median(times)


def _next(channel: Channel) -> bytes:
    try:
        message = channel.receive(_PATIENCE_S)
    except ChannelClosedError:
        message = None
    if message is None:
        raise BackendError("A rank ended, or said nothing, before the ranks were compared.")
    return message.body
