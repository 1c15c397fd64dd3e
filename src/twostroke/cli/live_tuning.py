"""`serve --autotune` while the server runs: advice from its own trace, applied between steps."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
import threading
import time
from typing import TYPE_CHECKING, Any, Final, Protocol

import msgspec
from msgspec.structs import replace

from twostroke.cli.tuning_search import MIN_MEASURED, TuningAnswer, TuningQuestion
from twostroke.core import env
from twostroke.core.message_text import counted_noun

if TYPE_CHECKING:
    import asyncio

    from twostroke.core.recorded_trace import ServerSettings
    from twostroke.engine.process.served import EngineFacts
    from twostroke.lab.simulator.advice import Estimate
    from twostroke.lab.simulator.gain import Interval

TUNED_FLAGS: Final = {"token_budget": "--token-budget", "max_running": "--max-running"}
# Under an overload, a few more good requests would cost all others much longer times.
MIN_GOOD_SHARE: Final = 0.5
INTERVAL_S: Final = 600.0
_MIN_REST_RATIO: Final = 50.0  # the time between two searches over the time of a search
_MAX_SEARCH_S: Final = 300.0
_SEARCH_SHARE: Final = 0.6  # of this time, after which only the best setting so far is checked
_NICENESS: Final = 19
_logger = logging.getLogger("twostroke.serve")


class TunableEngine(Protocol):
    """An engine whose token budget and number of running requests can be changed while it runs."""

    @property
    def facts(self) -> EngineFacts:
        """Facts about the engine, with its present limits."""

    def change_limits(self, token_budget: int, max_running: int) -> None:
        """Change the limits of later steps: their tokens, and the requests that run at once."""


class LiveTuner:
    """Looks for better limits of a running engine every ten minutes, and applies them.

    The limits are the token budget of a step and the maximum number of running requests. The usual
    limits are the limits that the server would have without tuning.

    A search runs in a process of the lowest priority. The pause after a search is at least 50 times
    as long as the search, unless the user has set the interval. After a change, the share of
    requests that meet the objectives is compared with an estimate for the usual limits. If it is
    lower by more than chance, the usual limits return, and the changed limits are not tried again.
    """

    def __init__(
        self,
        engine: TunableEngine,
        question: TuningQuestion,
        interval_s: float | None = None,
    ) -> None:
        """Prepare to tune `engine`.

        `question` describes the server and its trace; `interval_s` is the interval of searches that
        the user has set, or None.
        """
        self._engine = engine
        self._question = replace(question, search_s=_SEARCH_SHARE * _MAX_SEARCH_S)
        self._interval_s = INTERVAL_S if interval_s is None else interval_s
        self._rest_ratio = _MIN_REST_RATIO if interval_s is None else 0.0
        self._logged_notes: set[str] = set()
        self._rejected: set[ServerSettings] = set()
        self._stopped = threading.Event()
        self._process: subprocess.Popen[bytes] | None = None
        self._thread: threading.Thread | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._last_error = ""

    def start(self, loop: asyncio.AbstractEventLoop) -> None:
        """Apply the first limits, and start to search; `loop` is the engine's event loop."""
        self._loop = loop
        if self._question.present != self._question.limits:
            self._apply(self._question.present)
        text = "Autotune: looking for better options every %.0f s, from the requests in %s."
        _logger.info(text, self._interval_s, self._question.trace)
        size = _size(self._question.trace)
        self._thread = threading.Thread(
            target=self._run, args=(size,), name="twostroke-autotune", daemon=True
        )
        self._thread.start()

    def close(self) -> None:
        """End a running search, and stop tuning."""
        self._stopped.set()
        process = self._process
        if process is not None:
            process.kill()
        if self._thread is not None:
            self._thread.join()

    def _run(self, size: int) -> None:
        pause_s = self._interval_s
        while not self._stopped.wait(pause_s):
            new_size = _size(self._question.trace)
            if new_size == size:
                continue  # no requests
            size = new_size
            began_s = time.monotonic()
            answer = self._search()
            if answer is not None:
                self.take(answer)
            search_s = time.monotonic() - began_s
            pause_s = max(self._interval_s, self._rest_ratio * search_s)

    def _search(self) -> TuningAnswer | None:
        """Run a search in another process; return None if the search fails or is stopped."""
        command = [sys.executable, "-P", "-m", "twostroke.cli.tuning_search"]
        text = msgspec.json.encode(self._question)
        try:
            self._process = subprocess.Popen(  # noqa: S603 - this package's own program
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                env=env.engine_environment(),
                start_new_session=True,
            )
            if self._stopped.is_set():  # `close` may have killed the search before
                self._process.kill()
            os.setpriority(os.PRIO_PROCESS, self._process.pid, _NICENESS)
            try:
                output, errors = self._process.communicate(text, timeout=_MAX_SEARCH_S)
            except subprocess.TimeoutExpired:
                self._process.kill()
                output, errors = self._process.communicate()
                _logger.info("Autotune: the search was ended after %.0f s.", _MAX_SEARCH_S)
        except OSError as error:
            _logger.warning("Autotune: no process for the search: %s.", error.strerror)
            return None
        answer = _last_answer(output)
        if answer is None and self._process.returncode >= 0 and not self._stopped.is_set():
            lines = errors.decode(errors="replace").strip().splitlines() or ["no reason"]
            _logger.warning("Autotune: the search failed: %s", lines[-1])
        return answer

    def take(self, answer: TuningAnswer) -> None:
        """Apply the result of a search.

        If the current limits turn out worse than the usual limits, beyond chance, the usual limits
        are applied. Otherwise the advised limits are applied if they are better, unless they were
        rejected before, or too few requests would meet the objectives with them, too.
        """
        if answer.error and answer.error != self._last_error:
            _logger.info("Autotune: %s", answer.error)
        self._last_error = answer.error
        for note in answer.notes:
            if note not in self._logged_notes:
                self._logged_notes.add(note)
                _logger.info("Autotune: %s", note)
        if answer.measured_gain is not None and answer.num_measured >= MIN_MEASURED:
            is_worse = answer.measured_gain.high < 0
            self._log_judgement(answer, answer.measured_gain, is_worse=is_worse)
            if is_worse:
                self._rejected.add(self._question.present)
                self._apply(self._question.usual)
                return
        if answer.error:
            return
        advised, default = answer.advised, answer.default
        if default is None or advised is None:
            return  # the search was ended before it had simulated anything
        requests = counted_noun(answer.num_requests, "request", form=",")
        settings = replace(self._question.present, **answer.changes)
        if (
            not answer.changes
            or answer.gain is None
            or settings in {*self._rejected, self._question.present}
            or advised.good_share < MIN_GOOD_SHARE
        ):
            text = "Autotune: the limits stay, by the newest %s%s: %s are estimated."
            _logger.info(text, requests, _part_text(answer), estimate_text(default))
            return
        text = (
            f"{_flags(settings)} from now on, from the newest {requests}{_part_text(answer)}. "
            f"Expected: {estimate_text(advised)}. Without: {estimate_text(default)}. Gain in the "
            f"share of requests that meet the objectives: {_points(answer.gain.share)}."
        )
        _logger.info("Autotune: %s", text)
        self._apply(settings)

    def _log_judgement(self, answer: TuningAnswer, gain: Interval, *, is_worse: bool) -> None:
        requests = counted_noun(answer.num_measured, "completed request", form=",")
        text = (
            f"with {_flags(self._question.present)}, {answer.measured_share:.1%} of {requests} "
            f"met the objectives; without, {answer.measured_share - gain.expected:.1%} are "
            f"estimated: {_points(gain)}."
        )
        if is_worse:
            text += f" Back to {_flags(self._question.usual)}."
        _logger.info("Autotune: %s", text)

    def _apply(self, settings: ServerSettings) -> None:
        assert self._loop is not None, "the tuner was started"
        change = self._engine.change_limits
        self._loop.call_soon_threadsafe(change, settings.token_budget, settings.max_running)
        self._question = replace(self._question, present=settings, changed_s=time.time())


def estimate_text(estimate: Estimate) -> str:
    """Return the figures of an estimate as text."""
    times = [
        f"{name} p99 {time_s * 1e3:,.0f} ms"
        for name, time_s in (("TTFT", estimate.ttft_p99_s), ("TPOT", estimate.tpot_p99_s))
        if time_s is not None
    ]
    return ", ".join([f"{estimate.good_share:.1%} meet the objectives", *times])


def _last_answer(output: bytes) -> TuningAnswer | None:
    """Return the last complete answer in the output of a search, which may have been killed."""
    for line in reversed(output.splitlines()):
        try:
            return msgspec.json.decode(line, type=TuningAnswer)
        except msgspec.DecodeError:
            continue
    return None


def _part_text(answer: TuningAnswer) -> str:
    if not answer.is_partial:
        return ""
    return f" (in part: the search ended after {counted_noun(answer.num_tried, 'setting')})"


def _points(share: Interval) -> str:
    expected, low, high = (100 * value for value in msgspec.structs.astuple(share))
    return f"{expected:+.1f} points ({low:+.1f} to {high:+.1f})"


def _flags(settings: ServerSettings) -> str:
    values: dict[str, Any] = msgspec.structs.asdict(settings)
    return ", ".join(f"{flag} {values[name]}" for name, flag in TUNED_FLAGS.items())


def _size(path: str) -> int:
    try:
        return os.stat(path).st_size  # noqa: PTH116 - a plain path
    except OSError:
        return 0
