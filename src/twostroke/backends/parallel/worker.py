"""The process of a rank other than 0: loads its part of a model, and follows rank 0's steps."""

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
from twostroke.backends.interface import CollectiveTest, WeightShard, block_sizes
from twostroke.backends.kv_size import CacheSize
from twostroke.backends.parallel.backend import DecodeClock
from twostroke.backends.parallel.connection import open_connection
from twostroke.backends.parallel.link import LINKS
from twostroke.backends.parallel.rank_group import on_cores, options_for_rank
from twostroke.backends.parallel.rank_messages import (
    CopyPage,
    EndRank,
    Evaluate,
    GetTimes,
    MeasureCollectives,
    Rank0Heartbeat,
    RankFailed,
    RankHeartbeat,
    RankHello,
    RankJob,
    RankReady,
    RankTimes,
    Reset,
    version,
)
from twostroke.backends.parallel.ranks import HEARTBEAT_INTERVAL_S
from twostroke.backends.step_frame import FrameLimits, FrameLostError, FrameReader
from twostroke.core.errors import BackendError, MemoryLimitError, RanksLostError, TwostrokeError
from twostroke.core.hardware import memory_available, num_cores
from twostroke.core.process_tuning import return_freed_memory
from twostroke.core.transport.frames import ConnectionLostError
from twostroke.model.families import build_program
from twostroke.model.loader import load
from twostroke.model.program.kv_layout import PageGroups
from twostroke.model.weights import weights_identity

if TYPE_CHECKING:
    from collections.abc import Iterator

    from twostroke.backends.cpu import CpuBackend
    from twostroke.backends.parallel.backend import RankBackend
    from twostroke.backends.parallel.connection import RankConnection
    from twostroke.backends.parallel.link import Link
    from twostroke.backends.parallel.rank_messages import RankMessage
    from twostroke.core.options import ComputeOptions


def main() -> int:
    """Run a rank whose connection to rank 0 is an inherited open file; return the exit code.

    Exit code 0: rank 0 has ended the rank. Another code: rank 0 may restart the rank.
    """
    parser = argparse.ArgumentParser(prog="twostroke.backends.parallel.worker")
    parser.add_argument("--rank", type=int, required=True)
    parser.add_argument("--connection", type=int, required=True)
    arguments = parser.parse_args()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # after Ctrl-C, rank 0 ends the other ranks
    logging.getLogger("twostroke.weights").setLevel(
        logging.ERROR
    )  # rank 0 warns about the same files
    connection = open_connection(socket.socket(fileno=arguments.connection))
    return 0 if run_rank(connection, arguments.rank) else 1


def run_rank(connection: RankConnection, rank: int) -> bool:
    """Load a part of the model as rank 0 says, and follow its steps until rank 0 ends.

    Returns whether rank 0 has ended this rank; False if the connection was lost.
    """
    try:
        hello = RankHello(
            rank=rank,
            version=version(),
            host=socket.gethostname(),
            pid=os.getpid(),
            memory_bytes=memory_available(),
            num_cores=num_cores(),
        )
        connection.send(hello)
        heartbeat_state = _HeartbeatState()
        with _sending_heartbeats(connection, heartbeat_state):
            return _serve_rank(connection, heartbeat_state)
    except ConnectionLostError:
        return False
    finally:
        connection.close()


class _HeartbeatState:
    """The facts that this rank's heartbeats report to rank 0."""

    def __init__(self) -> None:
        self.link: Link | None = None  # until the rank has loaded
        self.waits_for_step = False
        self.collective_s = 0.0

    def beat(self) -> RankHeartbeat:
        progress = self.link.progress() if self.link is not None else 0
        waits = self.waits_for_step or progress % 2 == 1
        return RankHeartbeat(waits, progress, self.collective_s)


@contextmanager
def _sending_heartbeats(
    connection: RankConnection, heartbeat_state: _HeartbeatState
) -> Iterator[None]:
    """Send heartbeats to rank 0 within the block; exit this process at once if rank 0 is lost."""
    is_over = threading.Event()
    parent = os.getppid()

    def beat() -> None:
        while not is_over.wait(HEARTBEAT_INTERVAL_S):
            try:
                connection.try_send(heartbeat_state.beat())
            except ConnectionLostError:
                break
            # A process that rank 0 has forked may keep rank 0's end of the connection open.
            if connection.is_cut() or os.getppid() != parent:
                break
        if not is_over.is_set():  # the main thread may be waiting for rank 0 in a step
            os._exit(1)

    thread = threading.Thread(target=beat, name="twostroke-beat", daemon=True)
    thread.start()
    try:
        yield
    finally:
        is_over.set()
        thread.join()


def _serve_rank(connection: RankConnection, heartbeat_state: _HeartbeatState) -> bool:
    message = connection.receive()
    while isinstance(message, Rank0Heartbeat):
        message = connection.receive()
    if not isinstance(message, RankJob):
        return True
    try:
        compute = options_for_rank(message.compute, *message.host_slot)
        with on_cores(*message.host_slot), closing(RankWorker(message, compute)) as worker:
            heartbeat_state.link = worker.link
            _follow_steps(
                connection, worker, heartbeat_state
            )  # this thread computes, too, on these cores
    except ConnectionLostError:
        raise
    except Exception as error:  # noqa: BLE001 rank 0 must learn of any error
        failed = _failure_of(error)
        connection.send(failed)
        return not failed.lost
    return True


def _follow_steps(
    connection: RankConnection, worker: RankWorker, heartbeat_state: _HeartbeatState
) -> None:
    connection.send(worker.sizes)
    while True:
        heartbeat_state.waits_for_step = True
        message = connection.receive()
        if isinstance(message, EndRank):
            return
        heartbeat_state.waits_for_step = isinstance(message, Rank0Heartbeat)
        answer = _handle_message(worker, message)
        heartbeat_state.collective_s = worker.collective_s
        if answer is not None:
            connection.send(answer)


def _handle_message(
    worker: RankWorker, message: RankMessage | bytes
) -> RankReady | RankFailed | RankTimes | None:
    """Carry out a message of rank 0, and return the answer to rank 0, or None."""
    if isinstance(message, Reset):
        worker.reset(message)
        return worker.sizes
    try:
        match message:
            case bytes():
                worker.step(message)
            case Evaluate():
                worker.evaluate(message)
            case CopyPage():
                worker.copy_page(message)
            case MeasureCollectives():
                worker.measure_collectives(message.test)
            case GetTimes():
                return worker.times()
    except Exception as error:  # noqa: BLE001 only the step has failed, not the rank
        worker.abort()
        return _failure_of(error)
    return None


def _failure_of(error: Exception) -> RankFailed:
    if isinstance(error, MemoryError) or getattr(error, "errno", None) == errno.ENOMEM:
        host = socket.gethostname()
        error = MemoryLimitError(f"There is too little memory for its part of the model on {host}.")
    if isinstance(error, FrameLostError):  # page tables are wrong: requests must be computed again
        return RankFailed(str(error), RanksLostError.__name__)
    name = type(error).__name__
    reason = str(error) if isinstance(error, TwostrokeError) else f"{name}: {error}"
    return RankFailed(reason, name, lost=isinstance(error, RanksLostError))


class RankWorker:
    """A rank's part of a model, and the rank's end of the link to other ranks."""

    def __init__(self, job: RankJob, compute: ComputeOptions) -> None:
        """Load this rank's part of the model and join the link, with the rank's own threads.

        Raises:
            TwostrokeError: the model is missing, differs from rank 0's, or does not fit.
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
            CacheSize(
                program.context_length,
                job.num_pages,
                job.page_size,
                cache_bytes=0,
                kv_format=job.kv_format,
                num_states=job.num_states,
            ),
            release=loaded.release,
            tapped_value=job.tapped_value,
            weight_shard=WeightShard(job.rank, job.mesh, job.max_rows, self.link.record, sizes),
            packed_source=loaded.file_stamp,
        )
        self._backend = cast("RankBackend", backend)  # true for a backend with a share
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
                num_states=job.num_states,
            )
        )
        self.collective_s = 0.0
        return_freed_memory()

    def step(self, body: bytes) -> None:
        """Compute this rank's part of a step; `body`: the step message from rank 0."""
        waiting_s = time.perf_counter() - self._clock.ended_s
        frame = self._frames.read(body)
        collective_s = self._backend.follow(frame)
        self.collective_s += collective_s
        is_decode = len(frame.slices) == len(frame.tokens)
        self._clock.end(waiting_s + collective_s, is_decode=is_decode)

    def evaluate(self, evaluation: Evaluate) -> None:
        """Compute this rank's part of a token sequence on separate pages, to evaluate the model."""
        if evaluation.taps:
            self._backend.trace(evaluation.tokens, evaluation.taps, generated=evaluation.generated)
        else:
            self._backend.score(evaluation.tokens, generated=evaluation.generated)

    def copy_page(self, copy: CopyPage) -> None:
        """Copy a KV page to another one, as rank 0 says; only for the cpu backend."""
        cast("CpuBackend", self._backend).copy_page(copy.source, copy.target)

    def measure_collectives(self, test: CollectiveTest) -> None:
        """Take part in rank 0's speed test of collectives; only for the cpu backend."""
        cast("CpuBackend", self._backend).measure_collectives(test)

    def times(self) -> RankTimes:
        """Return the times of this rank's steps since the last call; only for the cpu backend."""
        operations = [astuple(time_) for time_ in cast("CpuBackend", self._backend).times()]
        return RankTimes(operations, *self._clock.take())

    def reset(self, request: Reset) -> None:
        """Join the link again after a failed step; `request` has the text of rank 0's new link."""
        self.link.join(request.link)

    def abort(self) -> None:
        """Abort the link after a failure of this rank, so that other ranks stop waiting."""
        self.link.abort()

    def close(self) -> None:
        """Free this rank's part of the model, and close its end of the link."""
        self._backend.close()
        self.link.close()


if __name__ == "__main__":
    sys.exit(main())
