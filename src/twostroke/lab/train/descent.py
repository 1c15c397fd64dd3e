"""Gradient descent within a limit of time, whose state can be saved."""

from __future__ import annotations

import math
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    import numpy as np
    from numpy.typing import NDArray
    from torch import Tensor

    Arrays = Mapping[str, NDArray[np.float32]]
    Report = Callable[[str], None]

_SAVE_EVERY_S = 120.0
_REPORT_EVERY_S = 10.0
_SAVING_SHARE = 20  # times longer than saving takes
_WARM_STEPS = 50
_WARM_SHARE = 0.1  # of the time, if that comes first
_LEAST_RATE = 0.02  # of the learning rate, at the end


@dataclass(slots=True)
class Descent:
    """AdamW for those of `weights` that require gradients.

    It has taken `seconds` of the `budget_s` that it may take. `slower` is the share of the rate
    `rate` for weights that begin as a good model's.
    """

    weights: Mapping[str, Tensor]
    rate: float
    budget_s: float
    slower: Mapping[str, float] = field(default_factory=dict)
    seconds: float = 0.0
    num_steps: int = 0
    loss: float = math.nan
    _optimizer: torch.optim.Optimizer = field(init=False, repr=False)

    def __post_init__(self) -> None:
        """Make the optimizer; weights of the same rate are one group."""
        groups: dict[float, list[Tensor]] = {}
        for name, weight in self.own.items():
            groups.setdefault(self.slower.get(name, 1.0), []).append(weight)
        self._optimizer = torch.optim.AdamW(
            [{"params": group, "share": share} for share, group in groups.items()],
            betas=(0.9, 0.95),
            weight_decay=0.01,
            fused=True,  # an eighth of the time of separate operations
        )

    @property
    def own(self) -> dict[str, Tensor]:
        """The weights that are trained."""
        return {name: weight for name, weight in self.weights.items() if weight.requires_grad}

    @property
    def done(self) -> float:
        """The share of the time that is over."""
        return self.seconds / self.budget_s

    def descend(self, loss: Tensor) -> None:
        """Change the weights so that the loss gets smaller."""
        # Warm up, then follow half a cosine down to `_LEAST_RATE`.
        wave = 0.5 * (1 + math.cos(math.pi * min(1.0, self.done)))
        warmth = max((self.num_steps + 1) / _WARM_STEPS, self.done / _WARM_SHARE)
        rate = self.rate * min(1.0, warmth)
        rate *= _LEAST_RATE + (1 - _LEAST_RATE) * wave
        for group in self._optimizer.param_groups:
            group["lr"] = rate * group["share"]
        self._optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.own.values(), 1.0)
        self._optimizer.step()
        self.num_steps += 1

    def arrays(self) -> Arrays:
        """Return the trained weights, and the optimizer's state of each."""
        found: dict[str, NDArray[np.float32]] = {}
        for name, weight in self.own.items():
            found[name] = weight.detach().numpy()
            for part, value in self._optimizer.state[weight].items():
                found[f"{name}:{part}"] = value.float().reshape(value.shape or (1,)).numpy()
        return found

    def restore(self, arrays: Arrays, seconds: float, num_steps: int) -> None:
        """Go on from what `arrays` returned in an earlier run, after so much time and work."""
        self.seconds, self.num_steps = seconds, num_steps
        for name, weight in self.own.items():
            with torch.no_grad():
                weight.copy_(torch.from_numpy(arrays[name]))
            state = self._optimizer.state[weight]
            for part in ("exp_avg", "exp_avg_sq"):
                state[part] = torch.from_numpy(arrays[f"{name}:{part}"].copy())
            state["step"] = torch.tensor(float(arrays[f"{name}:step"][0]))


def train(
    descent: Descent, step: Callable[[], None], save: Callable[[], str], what: str, report: Report
) -> None:
    """Take steps until the time is over; save now and then, at the end, and after Ctrl-C.

    `save` returns how good the result is. `report` gets lines about the progress.

    Raises:
        KeyboardInterrupt: with a sentence that names `what` was saved.
    """
    saved_s = shown_s = time.monotonic()
    save_s = 0.0
    try:
        while descent.seconds < descent.budget_s:
            began_s = time.monotonic()
            step()
            now_s = time.monotonic()
            descent.seconds += now_s - began_s
            if now_s - shown_s >= _REPORT_EVERY_S:
                shown_s = now_s
                report(
                    f"training: {descent.seconds / 60:.1f} of {descent.budget_s / 60:g} minutes, "
                    f"loss {descent.loss:.3f}"
                )
            if now_s - saved_s >= max(_SAVE_EVERY_S, _SAVING_SHARE * save_s):
                began_s = time.monotonic()
                report(save())
                saved_s = time.monotonic()
                save_s = saved_s - began_s
    except KeyboardInterrupt:
        if not descent.num_steps:
            raise KeyboardInterrupt("Stopped before the first step.") from None
        raise KeyboardInterrupt(
            f"Stopped; the {what} ({save()}). Run the same command to continue."
        ) from None
    report(save())
