"""Whether an engine in another process still makes progress."""

from __future__ import annotations

from typing import Final

from msgspec.structs import replace

from twostroke.engine.health import StepProgress

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
