"""`Ranks`: starts and watches the other ranks, on rank 0: which are ready, failed or lost."""

from __future__ import annotations

import select
import threading
import time
from collections import Counter
from contextlib import suppress
from typing import TYPE_CHECKING, Final

from msgspec.structs import replace

from twostroke.backends.interface import RankState
from twostroke.backends.parallel.rank_messages import (
    EndRank,
    GetTimes,
    Rank0Heartbeat,
    RankFailed,
    RankHeartbeat,
    RankHello,
    RankLeaves,
    RankReady,
    RankTimes,
    version,
)
from twostroke.core import errors
from twostroke.core.errors import BackendError, RanksLostError, TwostrokeError
from twostroke.core.starvation import StarvationMonitor
from twostroke.core.transport.frames import ConnectionLostError

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Mapping, Sequence

    from twostroke.backends.interface import RankFacts
    from twostroke.backends.parallel.launcher import Launcher, RankProcess
    from twostroke.backends.parallel.link import Link
    from twostroke.backends.parallel.rank_messages import RankJob, RankMessage, Reset

HEARTBEAT_INTERVAL_S: Final = 0.2
_POLL_S: Final = 0.1
_HEARTBEAT_TIMEOUT_S: Final = 2.0  # a rank without heartbeats for this time is lost
_STARVED_TIMEOUT_RATIO: Final = 6.0  # of the timeout of a rank that waits for a processor
_STALL_TIMEOUT_S: Final = 2.2  # of the link; longer, so that a frozen rank is noticed first
_LOADING_HEARTBEAT_TIMEOUT_S: Final = 30.0  # loading from a slow disk can block heartbeats
_END_TIMEOUT_S: Final = 5.0  # until all ranks have freed their memory
_START_TIMEOUT_S: Final = 60.0  # until the first message of a process that runs


class Ranks:
    """Starts the other ranks, sends messages to them, and notices dead or frozen ranks.

    A thread reads all messages of ranks. If a rank is lost or fails, or if nothing arrives over the
    link although all ranks wait, the thread aborts the link, which ends all waits.
    """

    def __init__(self, num_ranks: int, launch: Launcher, link: Link) -> None:
        """Start the processes of ranks 1 to `num_ranks` - 1, and the thread that watches them."""
        self._launch, self._link = launch, link
        self._changed = threading.Condition()
        self._processes: dict[int, RankProcess] = {}
        self._silent_s: dict[int, float] = {}
        self._starvation: dict[int, StarvationMonitor] = {}  # of ranks that have become silent
        self._closing = self._is_given_up = False
        self.hellos: dict[int, RankHello] = {}
        self.ready: dict[int, RankReady] = {}
        self.failed: dict[int, RankFailed] = {}
        self._times: dict[int, RankTimes] = {}
        self.lost: dict[int, str] = {}
        self._beats: dict[int, RankHeartbeat] = {}
        self._stall = Stall()
        self._resetting: set[int] = set()  # until they are ready, their failures are outdated
        self._left: set[int] = set()  # ended by Ctrl-C, so they are not started again
        self._num_starts: Counter[int] = Counter()
        try:
            for rank in range(1, num_ranks):
                self._start(rank)
        except BaseException:  # also after Ctrl-C: the started processes must not stay
            self._kill_all()
            raise
        self._monitor = threading.Thread(target=self._watch, name="twostroke-ranks", daemon=True)
        self._monitor.start()

    def wait_for_hellos(self) -> dict[int, RankHello]:
        """Wait for the first message of each rank, and return the messages by rank.

        Raises:
            RanksLostError: a rank ended before its first message, or takes too long.
            BackendError: a rank has another version.
        """
        self._wait_for(self.hellos, _START_TIMEOUT_S)
        for rank, hello in self.hellos.items():
            if hello.version != version():
                raise BackendError(
                    f"Rank {rank} on {hello.host} has twostroke {hello.version}, rank 0 has "
                    f"{version()}: install the same version on all machines."
                )
        return self.hellos

    def send(self, message: RankMessage | bytes, to: Iterable[int] | None = None) -> None:
        """Send a message or a step to all other ranks, or only to the ranks in `to`.

        Raises:
            RanksLostError: one of these ranks is lost.
        """
        for rank in list(self._processes) if to is None else to:
            process = self._processes[rank]
            try:
                if isinstance(message, bytes):
                    process.connection.send_bytes(message)
                else:
                    process.connection.send(message)
            except ConnectionLostError as error:
                self._mark_lost(rank, process, process.exit_reason() or _disconnect_reason(error))
                raise self._lost_error() from None

    def assign(self, jobs: Mapping[int, RankJob]) -> None:
        """Send jobs to ranks, which then load their parts of the model."""
        for rank, job in jobs.items():
            self.send(job, [rank])

    def wait_until_ready(self, timeout_s: float | None = None) -> None:
        """Wait until all ranks have loaded their parts of the model and joined the link.

        Raises:
            RanksLostError: a rank is lost, or not ready within the timeout.
            BackendError: a rank has failed; the message names it.
        """
        self._wait_for(self.ready, timeout_s)

    def times(self) -> dict[int, RankTimes]:
        """Return the times of each other rank's steps since the last call.

        Raises:
            RanksLostError: a rank is lost.
            BackendError: a rank cannot measure them.
        """
        with self._changed:
            self._times.clear()
        self.send(GetTimes())
        self._wait_for(self._times, None)
        return dict(self._times)

    def check(self) -> None:
        """Raise an error if another rank was lost while the link was being restarted.

        The link is then aborted again: restarting it has undone the abort by which other ranks
        learn of the loss.

        Raises:
            RanksLostError: a rank is lost.
        """
        with self._changed:
            if self.lost:
                self._link.abort()
                raise self._lost_error()

    def reset(self, request: Reset, new: Collection[int]) -> None:
        """Make ranks join the restarted link after a failed step.

        The ranks in `new` are left out: their processes are new, and join when they load the model.
        """
        with self._changed:
            old = [rank for rank in self._processes if rank not in new]
            self.failed.clear()
            self._stall = Stall()
            self._resetting = set(old)
            for rank in old:
                self.ready.pop(rank, None)
        self.send(request, old)

    def restart(self) -> list[int]:
        """Restart the lost ranks, wait for their first messages, and return the restarted ranks.

        Ranks that have not loaded their parts yet are restarted, too.

        Raises:
            RanksLostError: a rank ended before its first message.
            BackendError: a rank cannot be started, does not connect, or was ended by Ctrl-C.
        """
        with self._changed:
            if self._left:
                raise BackendError(f"{self._lost_error()} It is not started again.")
            self.failed.clear()
            loaded = self._resetting.union(self.ready)
            lost = [r for r in sorted(self._processes) if r in self.lost or r not in loaded]
            for rank in lost:
                self._processes.pop(rank).kill()
                self._resetting.discard(rank)
                for states in (self.hellos, self.ready, self.lost, self._beats):
                    states.pop(rank, None)
        for rank in lost:
            if self._is_given_up:
                break
            try:
                self._start(rank)
            except RanksLostError as error:  # it does not connect; another attempt would not help
                raise BackendError(str(error)) from None
        self.wait_for_hellos()
        return lost

    def cause(self, timeout_s: float) -> TwostrokeError:
        """Return the error that made a step fail: of a lost rank, a failed rank, or the link.

        Waits up to `timeout_s` for the report of a rank.
        """
        with self._changed:
            self._changed.wait_for(
                lambda: self.lost or self._real_failures() or self._stall.is_found, timeout_s
            )
            for rank, failed in self._real_failures().items():
                if self.lost.keys() <= {rank}:  # a rank that cannot load reports why, and ends
                    return _error_of(rank, failed)
            if self.lost:
                return self._lost_error()
        if self._stall.is_found:
            return RanksLostError("Nothing arrives over the link, though all ranks wait for it.")
        return RanksLostError("The connection between the ranks broke.")

    def states(self, ranks: Iterable[RankFacts]) -> list[RankState]:
        """Return the current state of each of these ranks, such as "ready" or "lost"."""
        with self._changed:
            return [self._state_of(facts) for facts in ranks]

    def give_up(self) -> None:
        """Make all waits for ranks fail, now and later, for shutdown; any thread may call this."""
        with self._changed:
            self._is_given_up = True
            self._changed.notify_all()
        self._launch.close()

    def close(self) -> None:
        """End the processes of all ranks; may be called twice."""
        self._closing = True
        self._monitor.join()
        for process in self._processes.values():
            with suppress(ConnectionLostError):
                process.connection.send(EndRank())
        deadline = time.monotonic() + _END_TIMEOUT_S
        for process in self._processes.values():
            process.wait(max(0.0, deadline - time.monotonic()))
        self._processes.clear()
        self._launch.close()

    def _state_of(self, facts: RankFacts) -> RankState:
        rank, hello = facts.rank, self.hellos.get(facts.rank)
        state = "starting"
        if rank in self.lost:
            state = "lost"
        elif rank in self.hellos:
            state = "ready" if rank in self.ready else "loading"
        collective_s = self._beats[rank].collective_s if rank in self._beats else 0.0
        facts = replace(facts, host=hello.host) if hello else facts  # may change with a restart
        return RankState(facts, state, collective_s, max(0, self._num_starts[rank] - 1))

    def _start(self, rank: int) -> None:
        process = self._launch(rank)
        with self._changed:
            self._num_starts[rank] += 1
            self._silent_s[rank] = 0.0
            self._starvation.pop(rank, None)
            self._processes[rank] = process

    def _kill_all(self) -> None:
        for process in self._processes.values():
            process.kill()

    def _wait_for(
        self,
        answers: dict[int, RankHello] | dict[int, RankReady] | dict[int, RankTimes],
        timeout_s: float | None,
    ) -> None:
        def is_over() -> bool:
            has_failed = self._is_given_up or self.lost or self._real_failures()
            return bool(has_failed or len(answers) == len(self._processes))

        with self._changed:
            in_time = self._changed.wait_for(is_over, timeout_s)
            if self._is_given_up:
                raise BackendError("The engine closes: its ranks are not started again.")
            if not in_time:
                for rank in sorted(set(self._processes) - set(answers)):
                    why = f"did not answer within {timeout_s:.0f} s"
                    self._mark_lost(rank, self._processes[rank], why)
            # A rank that cannot load reports why, and ends.
            for rank, failed in self._real_failures().items():
                raise _error_of(rank, failed)
            if self.lost:
                raise self._lost_error()

    def _real_failures(self) -> dict[int, RankFailed]:
        return {rank: failed for rank, failed in self.failed.items() if not failed.lost}

    def _lost_error(self) -> RanksLostError:
        facts = [f"rank {rank} {why}" for rank, why in sorted(self.lost.items())]
        text = "; ".join(facts)
        return RanksLostError(f"{text[0].upper()}{text[1:]}.")

    def _watch(self) -> None:
        """Read the messages of all ranks in a loop, and notice ranks that send nothing."""
        before = beaten = time.monotonic()
        while not self._closing:
            poll = select.poll()
            with self._changed:
                alive = {r: p for r, p in self._processes.items() if r not in self.lost}
                for process in alive.values():  # under the lock, before a lost rank's is closed
                    poll.register(process.connection, select.POLLIN)
            poll.poll(_POLL_S * 1000)
            now = time.monotonic()
            # If this thread itself was not scheduled, the ranks are not to blame.
            passed_s, before = min(now - before, 2 * _POLL_S), now
            for rank, process in alive.items():
                self._read_messages(rank, process, passed_s)
            self._check_stall(passed_s)
            if now - beaten >= HEARTBEAT_INTERVAL_S:
                beaten = now
                for process in alive.values():
                    with suppress(ConnectionLostError):
                        process.connection.try_send(Rank0Heartbeat())

    def _read_messages(self, rank: int, process: RankProcess, passed_s: float) -> None:
        """Read the waiting messages of a rank, and mark the rank as lost if its heartbeats stopped.

        `passed_s`: seconds since the last call.
        """
        try:
            while (message := process.connection.receive(0)) is not None:
                self._silent_s[rank] = -passed_s
                self._take(rank, process, message)
        except BackendError as error:
            self._mark_lost(rank, process, process.exit_reason() or _disconnect_reason(error))
            return
        self._silent_s[rank] += passed_s
        is_loaded = rank in self.ready or rank in self._resetting
        timeout_s = _HEARTBEAT_TIMEOUT_S if is_loaded else _LOADING_HEARTBEAT_TIMEOUT_S
        silent_s = self._silent_s[rank]
        if rank not in self.hellos or silent_s < timeout_s / 2:
            self._starvation.pop(rank, None)
            return
        monitor = None
        if (pid := process.local_pid) is not None:
            monitor = self._starvation.setdefault(rank, StarvationMonitor(pid))
            monitor.start()
        if silent_s > timeout_s:
            is_starved = monitor is not None and monitor.is_starved
            if not is_starved or silent_s > _STARVED_TIMEOUT_RATIO * timeout_s:
                self._mark_lost(rank, process, f"has not responded for {silent_s:.1f} s")

    def _check_stall(self, passed_s: float) -> None:
        """Abort the link if it moves no bytes although all ranks wait in a collective."""
        with self._changed:
            beats = [self._beats[rank] for rank in self.ready if rank in self._beats]
            if self.lost or self._stall.is_found or len(beats) < len(self._processes):
                return
            self._stall.update(self._link.progress(), beats, passed_s)
            if self._stall.is_found:
                self._link.abort()
                self._changed.notify_all()

    def _take(self, rank: int, process: RankProcess, message: RankMessage | bytes) -> None:
        with self._changed:
            if self._processes.get(rank) is not process:  # it was replaced meanwhile
                return
            match message:
                case RankHello():
                    self.hellos[rank] = message
                case RankReady():
                    self.ready[rank] = message
                    self._resetting.discard(rank)
                case RankTimes():
                    self._times[rank] = message
                case RankFailed() if rank not in self._resetting:
                    self.failed[rank] = message
                    self._link.abort()
                case RankLeaves():
                    self._left.add(rank)
                    self._mark_lost(rank, process, "was ended by Ctrl-C")
                case RankHeartbeat():
                    self._beats[rank] = message
                    return
                case _:
                    return
            self._changed.notify_all()

    def _mark_lost(self, rank: int, process: RankProcess, reason: str) -> None:
        """Mark a rank as lost, abort the link, and kill the rank's process."""
        with self._changed:
            if self._processes.get(rank) is not process:  # it was replaced meanwhile
                return
            self.lost.setdefault(rank, reason)
            self._link.abort()
            process.kill()
            self._changed.notify_all()


class Stall:
    """Watches the link's progress, to find out that it moves no bytes although all ranks wait."""

    def __init__(self) -> None:
        """Start without any progress seen."""
        self._progress: list[int] = []
        self._lasts_s = 0.0

    @property
    def is_found(self) -> bool:
        """Return whether the link has moved no bytes for longer than the timeout."""
        return self._lasts_s > _STALL_TIMEOUT_S

    def update(self, rank0_progress: int, beats: Sequence[RankHeartbeat], passed_s: float) -> None:
        """Compare the link's progress on all ranks with the progress at the last call.

        `passed_s`: seconds since the last call.
        """
        progress = [rank0_progress, *(beat.progress for beat in beats)]
        waits = rank0_progress % 2 == 1 and all(beat.waits for beat in beats)
        is_still = waits and progress == self._progress
        self._lasts_s = self._lasts_s + passed_s if is_still else 0.0
        self._progress = progress


def _disconnect_reason(error: Exception) -> str:
    return f"is gone ({str(error).rstrip('.')})"


def _error_of(rank: int, failed: RankFailed) -> TwostrokeError:
    kind = getattr(errors, failed.kind, BackendError)
    return kind(f"Rank {rank}: {failed.reason}")
