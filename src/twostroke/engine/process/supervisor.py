"""Keeps an engine process running: kills it if it makes no progress, and starts it again.

`Supervisor` owns the process, and `ProgressWatchdog` judges from its heartbeats whether it hangs.
"""

from __future__ import annotations

import asyncio
import logging
import time
from typing import TYPE_CHECKING, Any, Final, Protocol

from msgspec.structs import replace

from twostroke.core.errors import EngineStoppedError, TwostrokeError
from twostroke.core.starvation import StarvationMonitor
from twostroke.core.transport.frames import ConnectionLostError, InvalidMessageError
from twostroke.engine.process import messages as wire
from twostroke.engine.process.child import EngineProcess, log
from twostroke.engine.status import StepProgress

if TYPE_CHECKING:
    from collections.abc import Coroutine


BACK_OFF_S: Final = (0.0, 0.5, 1.0, 2.0, 4.0)  # before a start, by the number of deaths in a row
_MAX_DEATHS: Final = 20  # in a row, even if requests may have caused them
_CHECK_INTERVAL_S: Final = 0.25
_MIN_CHECK_INTERVAL_S: Final = 0.01
_MAX_LOAD_SILENCE_S: Final = 300.0  # without a message while the process loads
_STABLE_AFTER_S: Final = 60.0  # a process that ran this long has started well, even if idle

_SILENT_AFTER_S: Final = 1.5  # without a message: some heartbeats are missing
_MIN_STEP_LIMIT_S: Final = 5.0
_STARVED_LIMIT_RATIO: Final = 6.0  # of the limits while the process waits for a processor
_LONGEST_STEP_RATIO: Final = 2.0  # limit of a step, over the longest step so far
_PREDICTED_STEP_RATIO: Final = 10.0  # limit of a step, over the largest step's predicted time

# The estimated load time before the first load is a constant and a time for each byte.
_BASE_LOAD_S: Final = 0.5
_LOADED_BYTES_PER_S: Final = 1e9

_logger = logging.getLogger("twostroke.serve")


def expected_load_s(num_bytes: int) -> float:
    """Return the seconds that an engine process should take to load a model of this size."""
    return _BASE_LOAD_S + num_bytes / _LOADED_BYTES_PER_S


class ProcessObserver(Protocol):
    """The interface by which a supervisor reports messages, death and restart of its process.

    `RemoteEngine` implements it. All methods are called in the event loop.
    """

    def on_message(self, message: wire.EngineMessage) -> None:
        """Handle a message of the engine process."""

    def on_death(self) -> bool:
        """Handle the death of the engine process; return whether a request may have killed it."""

    def on_tick(self) -> None:
        """Do work that is due several times a second, such as ending calls after their timeout."""

    def on_restart(self, ready: wire.EngineReady) -> None:
        """Use the new engine process, which takes requests now."""

    def on_load_failure(self, error: TwostrokeError) -> bool:
        """Handle that the engine process could not load its model.

        Returns True if no other process should be started until `Supervisor.wake` is called.
        """

    def on_give_up(self, reason: str) -> None:
        """Handle that no other engine process will be started."""


class Supervisor:
    """Runs an engine process, kills it if it makes no progress, and restarts it when it dies.

    Attributes:
        is_up: whether a process takes requests.
        is_resting: whether there is deliberately no process, until `wake` is called.
        num_deaths: deaths of processes so far.
        load_s: seconds that the last process took to load.
    """

    def __init__(
        self,
        load: wire.LoadModel,
        process: EngineProcess | None,
        ready: wire.EngineReady,
        observer: ProcessObserver,
    ) -> None:
        """Own an engine process that has loaded `load`, or wait without a process for `wake`.

        `ready` is the last message of the process about its facts. Events are reported to
        `observer`. Call `attach` next.
        """
        self.is_resting = process is None
        self.num_deaths = 0
        self.load_s = 0.0
        self._process: EngineProcess
        self._load = load
        self._observer = observer
        # Deaths in a row of processes that gave no output and leased no page.
        self._num_failures = 0
        self._num_unexplained = 0  # the last of them, at which no request was running
        self._num_pages_leased = 0  # by this process
        self._end_cause = ""  # why the process ended, if the process or the watchdog has told
        self._failure: TwostrokeError | None = None  # the last error that the process has sent
        self._starvation: StarvationMonitor | None = None  # of a process that is late
        self._has_ended = False
        self._tasks: set[asyncio.Task[None]] = set()
        if process is not None:
            self._process = process
            self._on_ready(ready)
        else:
            self.is_up = False
            self._expect_load()

    @property
    def pid(self) -> int:
        """The process id of the engine process."""
        return self._process.pid

    @property
    def progress(self) -> StepProgress:
        """The engine's progress at its last heartbeat.

        The current step's time includes the silence since then.
        """
        return (
            self._watchdog.progress_at(time.monotonic()) if self.is_up else self._watchdog.progress
        )

    @property
    def restart_in_s(self) -> float:
        """Expected seconds until an engine process takes requests.

        This is the rest of the pause before the restart, plus the expected time of loading the
        model.
        """
        if self.is_up:
            return 0.0
        passed_s = time.monotonic() - self._changed_s
        return max(0.0, self._pause_s + self.load_s - passed_s)

    @property
    def _pause_s(self) -> float:
        return BACK_OFF_S[min(max(self._num_failures, 1), len(BACK_OFF_S)) - 1]

    def attach(self) -> None:
        """Start to watch the engine process and receive its messages in the running event loop."""
        if not self.is_resting:
            self._listen()
        self._spawn(self._watch_process())

    def wake(self) -> None:
        """Start an engine process; it takes requests once it has loaded.

        Raises:
            BackendError: the operating system refuses a process.
        """
        self._process = EngineProcess(self._load)
        self.is_resting = False
        self._failure = None
        self._end_cause = ""
        self._num_failures = self._num_unexplained = 0
        self._expect_load()
        self._listen()

    def retire(self) -> None:
        """Stop receiving messages of the idle engine process, to end it; call `rest` next."""
        self._process.connection.detach()
        self.is_up = False

    async def rest(self) -> None:
        """End the retired engine process; return once its memory is free.

        `wake` starts another process when a request comes.
        """
        self.is_resting = True
        await asyncio.to_thread(self._process.close)

    def refuse(self, error: TwostrokeError) -> None:
        """Kill the engine process, because it has loaded the wrong model."""
        self.is_up = False
        self._failure = error
        self._process.kill()

    def close(self) -> None:
        """End the engine process; call this after the event loop has ended."""
        self._has_ended = True
        if self.is_resting:
            return
        if not self.is_up:
            self._process.kill()  # it reads no message while it loads
        self._process.close()

    def send(self, message: wire.ServerMessage) -> None:
        """Send a message to the engine process, without waiting for room in the socket."""
        self._process.connection.post(message)

    def _on_ready(self, ready: wire.EngineReady) -> None:
        """Note that the engine process takes requests."""
        self.is_up = True
        self._num_pages_leased = 0
        self._ready_s = self._changed_s = time.monotonic()
        self.load_s = self._ready_s - self._process.start_s
        self._watchdog = ProgressWatchdog(ready.card.longest_step_s, self._ready_s)

    def _expect_load(self) -> None:
        self._changed_s = time.monotonic()
        self._watchdog = ProgressWatchdog(0.0, self._changed_s, _MAX_LOAD_SILENCE_S)

    def _listen(self) -> None:
        self._process.connection.attach(self._receive)

    def _receive(self) -> None:
        try:
            for message in self._process.connection.receive_arrived():
                self._on_message(message)
        except InvalidMessageError as error:
            self._end_cause = str(error)
            self._process.kill()
            self._on_death()
        except ConnectionLostError:
            self._on_death()

    def _on_message(self, message: wire.EngineMessage) -> None:
        progress = message.progress if isinstance(message, wire.Heartbeat) else None
        self._watchdog.on_message(time.monotonic(), progress)
        match message:
            case wire.OutputBatch():
                self._num_failures = self._num_unexplained = 0
                self._observer.on_message(message)
            case wire.Heartbeat() if message.num_pages_leased > self._num_pages_leased:
                self._num_failures = self._num_unexplained = 0
                self._num_pages_leased = message.num_pages_leased
            case wire.Log():
                log(message)
            case wire.EngineFailed():
                self._end_cause = str(message.error)
                self._failure = message.error
            case wire.EngineReady() if not self.is_up:
                self._on_ready(message)
                self._observer.on_restart(message)
            case _:
                self._observer.on_message(message)

    async def _watch_process(self) -> None:
        """Check the engine process regularly, and kill it if it makes no progress.

        An error in a check does not end the watch.
        """
        last_error = ""
        while not self._has_ended:
            is_resting, now_s = self.is_resting, time.monotonic()
            pause_s = _CHECK_INTERVAL_S if is_resting else self._watchdog.next_check_s(now_s)
            await asyncio.sleep(pause_s)
            try:
                self._observer.on_tick()
                if not self.is_resting:
                    self._check_progress(time.monotonic())
            except Exception as error:
                if repr(error) != last_error:
                    _logger.exception("The engine's progress could not be checked; trying again.")
                last_error = repr(error)

    def _check_progress(self, now_s: float) -> None:
        """Kill the engine process if it makes no progress, unless it waits for a processor."""
        if not self._watchdog.is_late(now_s):
            self._starvation = None
        elif self._starvation is None:
            self._starvation = StarvationMonitor(self.pid)
            self._starvation.start()
        is_starved = self._starvation is not None and self._starvation.is_starved
        fault = self._watchdog.fault(now_s, is_starved=is_starved)
        if fault is not None:
            self._end_cause = f"It was killed, since {fault}."
            self._process.kill()

    def _on_death(self) -> None:
        """Tell the observer that the engine process has died, and start the next one."""
        if self._has_ended:
            return
        self._process.connection.detach()
        self._process.connection.close()
        self.num_deaths += 1
        had_loaded = self.is_up
        self.is_up = False
        self._expect_load()
        if had_loaded and self._changed_s - self._ready_s > _STABLE_AFTER_S:
            self._num_failures = self._num_unexplained = 0
        self._num_failures += 1
        self._num_unexplained = 0 if self._observer.on_death() else self._num_unexplained + 1
        self._spawn(self._restart(had_loaded=had_loaded))

    async def _restart(self, *, had_loaded: bool) -> None:
        """Start the next engine process, unless too many have died in a row.

        `had_loaded` says whether the dead process had loaded its model.
        """
        end = await asyncio.to_thread(self._process.describe_end)
        if self._has_ended:
            return
        cause = f"{end}. {self._end_cause}".strip()
        self._end_cause = ""
        failure, self._failure = self._failure, None
        if not had_loaded and failure is not None and self._observer.on_load_failure(failure):
            self.is_resting = True
            return
        event = "died" if had_loaded else "did not start"
        while self._num_unexplained <= len(BACK_OFF_S) and self._num_failures < _MAX_DEATHS:
            pause_s = self._pause_s
            _logger.warning("The engine %s: %s It starts again in %g s.", event, cause, pause_s)
            await asyncio.sleep(pause_s)
            if self._has_ended:
                return  # `close` was called: a new process would not be ended
            try:
                self._process = EngineProcess(self._load)
            except (
                TwostrokeError
            ) as error:  # the system has no process or memory, perhaps for a moment
                self._num_failures += 1
                self._num_unexplained += 1
                event = "did not start"
                cause = str(error)
                continue
            self._listen()
            return
        count = self._num_failures
        self._give_up(f"The engine died {count} times in a row; the last time {cause}")

    def _give_up(self, reason: str) -> None:
        if self._observer.on_load_failure(EngineStoppedError(reason)):
            self.is_resting = True
            return
        _logger.error("%s The server stops.", reason)
        self._has_ended = True
        self._observer.on_give_up(reason)

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)


class ProgressWatchdog:
    """Judges whether an engine process makes progress, from its messages and heartbeats.

    Times are on a monotonic clock.
    """

    def __init__(self, predicted_s: float, now_s: float, min_limit_s: float = 0.0) -> None:
        """Limit the time of steps to some multiple of `predicted_s`, but never below `min_limit_s`.

        `predicted_s` is the predicted time of the largest step. The same limit applies to the time
        without messages from the process.
        """
        self.progress = StepProgress(0, 0.0)
        self._predicted_s = predicted_s
        self._min_limit_s = min_limit_s
        self._longest_s = 0.0
        self._last_message_s = now_s
        self._last_check_s = now_s
        self._resumed_s = now_s  # since when this process runs without a pause

    @property
    def limit_s(self) -> float:
        """The maximum number of seconds that an engine's step, or its silence, may last."""
        return max(
            _MIN_STEP_LIMIT_S,
            self._min_limit_s,
            _LONGEST_STEP_RATIO * self._longest_s,
            _PREDICTED_STEP_RATIO * self._predicted_s,
        )

    def on_message(self, now_s: float, progress: StepProgress | None = None) -> None:
        """Record that the engine process sent a message, with `progress` if it was a heartbeat."""
        self._last_message_s = now_s
        if progress is None:
            return
        before, self.progress = self.progress, progress
        if progress.num_steps > before.num_steps:
            self._longest_s = max(self._longest_s, before.step_s)

    def progress_at(self, now_s: float) -> StepProgress:
        """Return the engine's last reported progress.

        If heartbeats are missing, the silence is added to the current step's time. Silence counts
        as a step, too: a stopped process may have no step and sends no heartbeat.
        """
        progress = self.progress
        silent_s = self._silent_s(now_s)
        if silent_s <= _SILENT_AFTER_S:
            return progress
        return replace(progress, step_s=progress.step_s + silent_s)

    def is_late(self, now_s: float) -> bool:
        """Whether the current step, or the time without messages, has passed half of the limit."""
        return max(self._silent_s(now_s), self._step_s(now_s)) > self.limit_s / 2

    def fault(self, now_s: float, *, is_starved: bool = False) -> str | None:
        """Return why the engine process must be killed; None if it need not be killed.

        Call this several times a second. `is_starved` says that the process waits for a processor,
        because the machine is busy: then the limit is several times as high.
        """
        paused_s = now_s - self._last_check_s
        self._last_check_s = now_s
        if paused_s > 1.0:  # this process was paused, and perhaps the whole machine
            self._resumed_s = now_s - 1.0
        silent_s, step_s = self._silent_s(now_s), self._step_s(now_s)
        limit_s = self.limit_s * (_STARVED_LIMIT_RATIO if is_starved else 1)
        if silent_s > limit_s:
            return f"it has said nothing for {silent_s:.1f} s"
        if step_s > limit_s and not self.progress.is_recovering:
            return f"one of its steps has run for {step_s:.1f} s"
        return None

    def next_check_s(self, now_s: float) -> float:
        """Return the seconds until `fault` must be called again.

        A check is due as soon as the limit is reached, so that the interval between two checks is
        not added to the limit.
        """
        left_s = self.limit_s - self._silent_s(now_s)
        if left_s < 0:  # it waits for a processor
            return _CHECK_INTERVAL_S
        return min(_CHECK_INTERVAL_S, left_s + _MIN_CHECK_INTERVAL_S)

    def _step_s(self, now_s: float) -> float:
        return min(self.progress.step_s, now_s - self._resumed_s)

    def _silent_s(self, now_s: float) -> float:
        return now_s - max(self._last_message_s, self._resumed_s)
