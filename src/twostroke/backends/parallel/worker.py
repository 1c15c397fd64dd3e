"""What ranks other than 0 do: load their part of a model, and follow the steps of rank 0."""

from __future__ import annotations

import argparse
import errno
import logging
import os
import signal
import socket
import sys
import threading
import time
from contextlib import closing, contextmanager
from typing import TYPE_CHECKING, cast

from msgspec.structs import astuple

from twostroke.backends.create import create_backend
from twostroke.backends.interface import Meetings, WeightShard, block_sizes
from twostroke.backends.kv_size import CacheSize
from twostroke.backends.parallel.backend import DecodeClock
from twostroke.backends.parallel.link import LINKS
from twostroke.backends.parallel.rank_group import on_cores, own_part
from twostroke.backends.parallel.rank_messages import (
    CopyPage,
    Evaluate,
    RankFailed,
    RankHeartbeat,
    RankHello,
    RankJob,
    RankReady,
    RankTimes,
    Reset,
    pack,
    unpack,
    version,
)
from twostroke.backends.parallel.ranks import BEAT_S
from twostroke.backends.step_frame import FrameLimits, FrameLostError, FrameReader
from twostroke.core.errors import BackendError, MemoryLimitError, RanksLostError, TwostrokeError
from twostroke.core.hardware import memory_available, num_cores, return_freed_memory
from twostroke.core.transport.channel import Channel, ChannelClosedError, MessageType
from twostroke.model.families import build_program
from twostroke.model.loader import load
from twostroke.model.program.kv_layout import PageGroups
from twostroke.model.weights import weights_identity

if TYPE_CHECKING:
    from collections.abc import Iterator

    from twostroke.backends.cpu import CpuBackend
    from twostroke.backends.parallel.backend import RankBackend
    from twostroke.backends.parallel.link import Link
    from twostroke.core.options import ComputeOptions
    from twostroke.core.transport.channel import Message


_KINDS = {
    RankReady: MessageType.READY,
    RankFailed: MessageType.FAILED,
    RankTimes: MessageType.TIMES,
}  # of answers


def main() -> int:
    """Run a rank whose channel to rank 0 is an open file that it inherited; return its exit code.

    0 means that it is over, another number that rank 0 may want this rank again.
    """
    parser = argparse.ArgumentParser(prog="twostroke.backends.parallel.worker")
    parser.add_argument("--rank", type=int, required=True)
    parser.add_argument("--channel", type=int, required=True)
    given = parser.parse_args()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # of a terminal: rank 0 ends the others
    logging.getLogger("twostroke.weights").setLevel(logging.ERROR)  # rank 0 reads the same files
    return 0 if follow(Channel(socket.socket(fileno=given.channel)), given.rank) else 1


def follow(channel: Channel, rank: int) -> bool:
    """Do what rank 0 says, until it ends this rank or is gone; return whether it is over."""
    try:
        here = socket.gethostname(), os.getpid(), memory_available(), num_cores()
        hello = RankHello(rank, version(), *here)
        channel.send(MessageType.HELLO, pack(hello))
        pulse = _Pulse()
        with _beating(channel, pulse):
            return _serve(channel, pulse)
    except ChannelClosedError:
        return False
    finally:
        channel.close()


class _Pulse:
    """What this rank's heartbeats say."""

    def __init__(self) -> None:
        self.link: Link | None = None  # once it has joined
        self.waits_for_step = False
        self.collective_s = 0.0

    def beat(self) -> RankHeartbeat:
        progress = self.link.progress() if self.link is not None else 0
        waits = self.waits_for_step or progress % 2 == 1
        return RankHeartbeat(waits, progress, self.collective_s)


@contextmanager
def _beating(channel: Channel, pulse: _Pulse) -> Iterator[None]:
    """Tell rank 0 that this rank lives; end the process at once if rank 0 does not."""
    is_over = threading.Event()
    parent = os.getppid()

    def beat() -> None:
        while not is_over.wait(BEAT_S):
            try:
                channel.beat(pack(pulse.beat()))
            except ChannelClosedError:
                break
            # A process that rank 0 has forked may keep rank 0's end of the channel open.
            if channel.is_cut() or os.getppid() != parent:
                break
        if not is_over.is_set():  # this rank may be waiting for rank 0 in a step
            os._exit(1)

    thread = threading.Thread(target=beat, name="twostroke-beat", daemon=True)
    thread.start()
    try:
        yield
    finally:
        is_over.set()
        thread.join()


def _serve(channel: Channel, pulse: _Pulse) -> bool:
    message = channel.receive()
    while message is not None and message.kind is MessageType.BEAT:
        message = channel.receive()
    if message is None or message.kind is not MessageType.JOB:
        return True
    try:
        job = unpack(message.body, RankJob)
        compute = own_part(job.compute, *job.place)
        with on_cores(*job.place), closing(RankWorker(job, compute)) as follower:
            pulse.link = follower.link
            _follow_steps(channel, follower, pulse)  # on these cores, too, as this thread computes
    except ChannelClosedError:
        raise
    except Exception as error:  # noqa: BLE001 whatever it is, rank 0 must learn of it
        failed = _failed(error)
        channel.send(MessageType.FAILED, pack(failed))
        return not failed.lost
    return True


def _follow_steps(channel: Channel, follower: RankWorker, pulse: _Pulse) -> None:
    channel.send(MessageType.READY, pack(follower.sizes))
    while True:
        pulse.waits_for_step = True
        message = channel.receive()
        if message is None or message.kind is MessageType.END:
            return
        pulse.waits_for_step = message.kind is MessageType.BEAT
        answer = _answer(follower, message)
        pulse.collective_s = follower.collective_s
        if answer is not None:
            channel.send(_KINDS[type(answer)], pack(answer))


def _answer(follower: RankWorker, message: Message) -> RankReady | RankFailed | RankTimes | None:
    """Do what a message says; return what rank 0 must know."""
    if message.kind is MessageType.RESET:
        follower.reset(unpack(message.body, Reset))
        return follower.sizes
    try:
        match message.kind:
            case MessageType.FRAME:
                follower.step(message.body)
            case MessageType.EVALUATE:
                follower.evaluate(unpack(message.body, Evaluate))
            case MessageType.COPY:
                follower.copy_page(unpack(message.body, CopyPage))
            case MessageType.MEASURE:
                follower.meet(unpack(message.body, Meetings))
            case MessageType.TIMES:
                return follower.times()
    except Exception as error:  # noqa: BLE001 the step is over, this rank is not
        follower.abort()
        return _failed(error)
    return None


def _failed(error: Exception) -> RankFailed:
    if isinstance(error, MemoryError) or getattr(error, "errno", None) == errno.ENOMEM:
        host = socket.gethostname()
        error = MemoryLimitError(f"There is too little memory for its part of the model on {host}.")
    if isinstance(error, FrameLostError):  # all requests must be computed again, on new pages
        return RankFailed(str(error), RanksLostError.__name__)
    name = type(error).__name__
    reason = str(error) if isinstance(error, TwostrokeError) else f"{name}: {error}"
    return RankFailed(reason, name, lost=isinstance(error, RanksLostError))


class RankWorker:
    """A rank's part of a model."""

    def __init__(self, job: RankJob, compute: ComputeOptions) -> None:
        """Load it, with this rank's own threads.

        Raises:
            TwostrokeError: there is no such model here, it is another one, or does not fit.
        """
        loaded = load(job.model)
        if weights_identity(loaded.tensors) != job.model_id:
            host = socket.gethostname()
            raise BackendError(f"{loaded.path} on {host} is not the file that rank 0 has.")
        program = build_program(loaded.spec)
        groups = PageGroups(job.page_size, tuple(g.window for g in program.cache_groups))
        longest = groups.max_tokens(job.num_pages, program.context_length)
        self.link = LINKS[job.link_kind](job.rank, job.mesh.num_ranks, job.level, job.link)
        sizes = block_sizes(loaded.tensors) if job.splits_sums else None
        backend = create_backend(
            loaded.tensors,
            program,
            compute,
            CacheSize(program.context_length, job.num_pages, job.page_size, 0, job.kv_format),
            release=loaded.release,
            tapped_value=job.tapped_value,
            share=WeightShard(job.rank, job.mesh, job.max_rows, self.link.record, sizes),
        )
        self._backend = cast("RankBackend", backend)  # it has a share
        self._clock = DecodeClock()
        facts = self._backend.facts
        if facts.one_arithmetic != job.one_arithmetic:
            raise BackendError(
                f"Its level {facts.level} computes prompts otherwise than that of rank 0: set "
                "--level to one that both have."
            )
        self.sizes = RankReady(facts.num_threads, facts.weight_bytes, facts.cache_bytes)
        self._frames = FrameReader(
            FrameLimits(
                vocab_size=program.vocab_size,
                num_pages=job.num_pages,
                page_size=job.page_size,
                max_rows=job.max_rows,
                num_groups=len(program.cache_groups),
                table_stride=-(-longest // job.page_size),
            )
        )
        self.collective_s = 0.0
        return_freed_memory()

    def step(self, body: bytes) -> None:
        """Compute this rank's part of a step."""
        waiting_s = time.perf_counter() - self._clock.ended_s
        frame = self._frames.read(body)
        collective_s = self._backend.follow(frame)
        self.collective_s += collective_s
        is_decode = len(frame.slices) == len(frame.tokens)
        self._clock.end(waiting_s + collective_s, is_decode=is_decode)

    def evaluate(self, what: Evaluate) -> None:
        """Compute this rank's part of a sequence on separate pages."""
        if what.taps:
            self._backend.trace(what.tokens, what.taps, generated=what.generated)
        else:
            self._backend.score(what.tokens, generated=what.generated)

    def copy_page(self, what: CopyPage) -> None:
        """Copy a page; only the cpu backend is asked to."""
        cast("CpuBackend", self._backend).copy_page(what.source, what.target)

    def meet(self, what: Meetings) -> None:
        """Meet the other ranks as rank 0 does, which measures it; only the cpu backend is asked."""
        cast("CpuBackend", self._backend).meet(what)

    def times(self) -> RankTimes:
        """Return what steps took since the last call; only the cpu backend is asked."""
        operations = [astuple(one) for one in cast("CpuBackend", self._backend).times()]
        return RankTimes(operations, *self._clock.take())

    def reset(self, what: Reset) -> None:
        """Join the other ranks again."""
        self.link.join(what.link)

    def abort(self) -> None:
        """Let no other rank wait for this one."""
        self.link.abort()

    def close(self) -> None:
        """Give everything back."""
        self._backend.close()
        self.link.close()


if __name__ == "__main__":
    sys.exit(main())
