"""Keeps an engine's process alive: watches that its steps finish, and starts it again."""

from __future__ import annotations

import asyncio
import logging
import time
from typing import TYPE_CHECKING, Any, Final, Protocol

from msgspec.structs import replace

from twostroke.core.errors import EngineStoppedError, TwostrokeError
from twostroke.core.transport.frames import WireError
from twostroke.engine.process import messages as wire
from twostroke.engine.process.child import EngineProcess, log
from twostroke.engine.status import StepProgress

if TYPE_CHECKING:
    from collections.abc import Coroutine


BACK_OFF_S: Final = (0.0, 0.5, 1.0, 2.0, 4.0)  # before each start, after deaths in a row
_MOST_DEATHS: Final = 20  # in a row, though requests may be to blame for them
_LOOK_S: Final = 0.25
_LOADING_S: Final = 300.0  # of silence that a process may take to load
_SETTLED_S: Final = 60.0  # after which a process was no failed start, though nobody asked it

_logger = logging.getLogger("twostroke.serve")


class ProcessObserver(Protocol):
    """Who speaks with the process; all is called in the event loop."""

    def take(self, message: wire.Answer) -> None:
        """Take what the process has sent."""

    def died(self) -> bool:
        """The process has died; return whether what it was asked for may be to blame."""

    def look(self) -> None:
        """Some time has passed."""

    def runs_again(self, ready: wire.EngineReady) -> None:
        """Another process takes requests."""

    def failed_to_load(self, error: TwostrokeError) -> bool:
        """The process could not load; return whether that is all, until somebody wakes another."""

    def gave_up(self, reason: str) -> None:
        """No other process will start."""


class Supervisor:
    """Runs one process after another.

    Attributes:
        is_up: one takes requests.
        rests: there is none, until `wake`.
        load_s: how long the last one took to load.
    """

    def __init__(
        self,
        load: wire.LoadModel,
        process: EngineProcess | None,
        ready: wire.EngineReady,
        guest: ProcessObserver,
    ) -> None:
        """Take over a process that has loaded `load`, or rest if there is none; `attach` begins."""
        self.rests = process is None
        self.num_deaths = 0
        self.load_s = 0.0
        self._process: EngineProcess
        self._load, self._guest = load, guest
        self._unsent = bytearray()
        self._num_failures = 0  # deaths in a row, each before an output or a page that was lent
        self._num_blameless = 0  # of them since a request was last to blame
        self._num_lent = 0  # pages, by this process
        self._why = ""  # the process ended, if it or the watch has said so
        self._failure: TwostrokeError | None = None  # that the process has reported
        self._has_ended = False
        self._tasks: set[asyncio.Task[None]] = set()
        if process is not None:
            self._process = process
            self._begin(ready)
        else:
            self.is_up = False
            self._expect_load()

    @property
    def pid(self) -> int:
        """The number of the process."""
        return self._process.pid

    @property
    def progress(self) -> StepProgress:
        """What the process has computed, as it said last; a step grows older while it is silent."""
        return self._watch.progress_at(time.monotonic()) if self.is_up else self._watch.progress

    @property
    def back_s(self) -> float:
        """Seconds until a process takes requests: the pause, and what loading took last time."""
        if self.is_up:
            return 0.0
        passed_s = time.monotonic() - self._changed_s
        return max(0.0, self._pause_s + self.load_s - passed_s)

    @property
    def _pause_s(self) -> float:
        return BACK_OFF_S[min(max(self._num_failures, 1), len(BACK_OFF_S)) - 1]

    def attach(self) -> None:
        """Begin in the running event loop."""
        if not self.rests:
            self._listen()
        self._spawn(self._look())

    def wake(self) -> None:
        """Start a process, which takes requests once it has loaded.

        Raises:
            BackendError: the operating system refuses a process.
        """
        self._process = EngineProcess(self._load)
        self.rests, self._failure, self._why = False, None, ""
        self._num_failures = self._num_blameless = 0
        self._expect_load()
        self._listen()

    def retire(self) -> None:
        """Hear no more of the process, which has nothing to do; `rest` follows."""
        self._stop_listening()
        self.is_up = False

    async def rest(self) -> None:
        """End the process that was retired; return once its memory is free."""
        self.rests = True
        await asyncio.to_thread(self._process.close)

    def refuse(self, error: TwostrokeError) -> None:
        """End the process, which has loaded something else than it should."""
        self.is_up, self._failure = False, error
        self._process.kill()

    def close(self) -> None:
        """End the process, after the event loop."""
        self._has_ended = True
        if self.rests:
            return
        if not self.is_up:
            self._process.kill()  # it does not listen while it loads
        self._process.close()

    def send(self, message: wire.Request) -> None:
        """Send a message, what the socket does not take now as soon as it does."""
        frame = wire.pack(message)
        if not self._unsent:
            try:
                frame = frame[self._process.socket.send(frame) :]
            except BlockingIOError:
                pass
            except OSError:
                return  # it has died: what is open is dealt with then
        if frame:
            if not self._unsent:
                asyncio.get_running_loop().add_writer(self._process.socket, self._send_rest)
            self._unsent += frame

    def _send_rest(self) -> None:
        try:
            del self._unsent[: self._process.socket.send(self._unsent)]
        except BlockingIOError:
            return
        except OSError:
            self._unsent.clear()
        if not self._unsent:
            asyncio.get_running_loop().remove_writer(self._process.socket)

    def _begin(self, ready: wire.EngineReady) -> None:
        self.is_up, self._num_lent = True, 0
        self._began_s = self._changed_s = time.monotonic()
        self.load_s = self._began_s - self._process.began_s
        self._watch = ProgressWatchdog(ready.card.longest_step_s, self._began_s)

    def _expect_load(self) -> None:
        self._changed_s = time.monotonic()
        self._watch = ProgressWatchdog(0.0, self._changed_s, _LOADING_S)

    def _listen(self) -> None:
        self._process.socket.settimeout(0)
        asyncio.get_running_loop().add_reader(self._process.socket, self._receive)

    def _receive(self) -> None:
        try:
            messages = self._process.receive()
            if messages is None:
                self._died()
                return
            for message in messages:
                self._take(message)
        except WireError as error:
            self._why = str(error)
            self._process.kill()
            self._died()

    def _take(self, message: wire.Answer) -> None:
        progress = message.progress if isinstance(message, wire.Heartbeat) else None
        self._watch.hear(time.monotonic(), progress)
        match message:
            case wire.OutputBatch():
                self._num_failures = self._num_blameless = 0
                self._guest.take(message)
            case wire.Heartbeat() if message.num_lent > self._num_lent:
                self._num_failures = self._num_blameless = 0
                self._num_lent = message.num_lent
            case wire.Log():
                log(message)
            case wire.EngineFailed():
                self._why, self._failure = str(message.error), message.error
            case wire.EngineReady() if not self.is_up:
                self._begin(message)
                self._guest.runs_again(message)
            case _:
                self._guest.take(message)

    async def _look(self) -> None:
        """End a process that makes no progress, whatever fails while that is looked at."""
        said = ""
        while not self._has_ended:
            await asyncio.sleep(_LOOK_S)
            try:
                self._guest.look()
                fault = None if self.rests else self._watch.fault(time.monotonic())
                if fault is not None:
                    self._why = f"It was killed, since {fault}."
                    self._process.kill()
            except Exception as error:
                if repr(error) != said:
                    _logger.exception("The engine could not be looked after; it is tried again.")
                said = repr(error)

    def _died(self) -> None:
        if self._has_ended:
            return
        self._stop_listening()
        self._process.socket.close()
        self.num_deaths += 1
        has_run, self.is_up = self.is_up, False
        self._expect_load()
        if has_run and self._changed_s - self._began_s > _SETTLED_S:
            self._num_failures = self._num_blameless = 0
        self._num_failures += 1
        self._num_blameless = 0 if self._guest.died() else self._num_blameless + 1
        self._spawn(self._revive(has_run=has_run))

    def _stop_listening(self) -> None:
        loop = asyncio.get_running_loop()
        loop.remove_reader(self._process.socket)
        loop.remove_writer(self._process.socket)
        self._unsent.clear()

    async def _revive(self, *, has_run: bool) -> None:
        """Start the next process, unless too many have died one after another."""
        how = await asyncio.to_thread(self._process.describe_end)
        if self._has_ended:
            return
        why, self._why = f"{how}. {self._why}".strip(), ""
        failure, self._failure = self._failure, None
        if not has_run and failure is not None and self._guest.failed_to_load(failure):
            self.rests = True
            return
        what = "died" if has_run else "did not start"
        while self._num_blameless <= len(BACK_OFF_S) and self._num_failures < _MOST_DEATHS:
            pause_s = self._pause_s
            _logger.warning("The engine %s: %s It starts again in %g s.", what, why, pause_s)
            await asyncio.sleep(pause_s)
            if self._has_ended:
                return  # nobody would end another
            try:
                self._process = EngineProcess(self._load)
            except TwostrokeError as error:  # the system lacks something, perhaps for a moment
                self._num_failures += 1
                self._num_blameless += 1
                what, why = "did not start", str(error)
                continue
            self._listen()
            return
        count = self._num_failures
        self._give_up(f"The engine died {count} times in a row; the last time {why}")

    def _give_up(self, reason: str) -> None:
        if self._guest.failed_to_load(EngineStoppedError(reason)):
            self.rests = True
            return
        _logger.error("%s The server stops.", reason)
        self._has_ended = True
        self._guest.gave_up(reason)

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)


_LATE_S: Final = 1.5  # of silence: some pulses are missing
_LEAST_LIMIT_S: Final = 5.0
_TIMES_LONGEST: Final = 2.0  # the longest step so far
_TIMES_PREDICTED: Final = 10.0  # the longest step at the machine's limits


class ProgressWatchdog:
    """Judges from pulses whether an engine still makes progress. Times are on a monotonic clock."""

    def __init__(self, longest_s: float, now_s: float, least_s: float = 0.0) -> None:
        """Expect no step over `longest_s` at the machine's limits; allow at least `least_s`."""
        self.progress = StepProgress(0, 0.0)
        self._predicted_s, self._least_s = longest_s, least_s
        self._longest_s = 0.0
        self._heard_s = self._looked_s = self._resumed_s = now_s

    @property
    def limit_s(self) -> float:
        """How long a step, or silence, may take."""
        known_s = _TIMES_LONGEST * self._longest_s
        return max(_LEAST_LIMIT_S, self._least_s, known_s, _TIMES_PREDICTED * self._predicted_s)

    def hear(self, now_s: float, progress: StepProgress | None = None) -> None:
        """Note that a message has come, a pulse with the engine's progress."""
        self._heard_s = now_s
        if progress is None:
            return
        before, self.progress = self.progress, progress
        if progress.num_steps > before.num_steps:
            self._longest_s = max(self._longest_s, before.step_s)

    def progress_at(self, now_s: float) -> StepProgress:
        """Return the progress; while pulses are missing, the step is older than the last one said.

        Without a step, the silence itself counts as one, as a process that is stopped has none.
        """
        known, silent_s = self.progress, self._silent_s(now_s)
        return replace(known, step_s=known.step_s + silent_s) if silent_s > _LATE_S else known

    def fault(self, now_s: float) -> str | None:
        """Return why the process is to be ended, if it is; ask this several times a second."""
        paused_s, self._looked_s = now_s - self._looked_s, now_s
        if paused_s > 1.0:  # this process itself did not run, and perhaps none did
            self._resumed_s = now_s - 1.0
        silent_s = self._silent_s(now_s)
        step_s = min(self.progress.step_s, now_s - self._resumed_s)
        if silent_s > self.limit_s:
            return f"it has said nothing for {silent_s:.1f} s"
        if step_s > self.limit_s and not self.progress.is_recovering:
            return f"one of its steps has run for {step_s:.1f} s"
        return None

    def _silent_s(self, now_s: float) -> float:
        return now_s - max(self._heard_s, self._resumed_s)
