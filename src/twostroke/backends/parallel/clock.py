"""How much of its time a rank waits."""

from __future__ import annotations

import time


class DecodeClock:
    """Sums up the time of a rank's decode steps, from the end of one step to that of the next."""

    def __init__(self) -> None:
        """No step has run."""
        self.ended_s = time.perf_counter()  # the last step of any kind
        self._whole_s = self._waiting_s = 0.0

    def end(self, waiting_s: float, *, is_decode: bool) -> None:
        """Note the end of a step, of which the rank has waited for `waiting_s`."""
        now_s = time.perf_counter()
        if is_decode:
            self._whole_s += now_s - self.ended_s
            self._waiting_s += waiting_s
        self.ended_s = now_s

    def take(self) -> tuple[float, float]:
        """Return the seconds of all decode steps since the last call, and those of waiting."""
        taken = self._whole_s, self._waiting_s
        self._whole_s = self._waiting_s = 0.0
        return taken
