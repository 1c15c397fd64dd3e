"""Gradient descent within a time limit, for training; its state can be saved and restored."""

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

_SAVE_INTERVAL_S = 120.0
_REPORT_INTERVAL_S = 10.0
_MIN_INTERVAL_RATIO = 20  # of the time between checkpoints to the time of saving one
_WARM_UP_STEPS = 50
_WARM_UP_SHARE = 0.1  # of the time; warm-up ends at the earlier of both
_MIN_RATE_SHARE = 0.02  # of the learning rate, at the end


@dataclass(slots=True)
class Descent:
    """The AdamW optimizer of a training, with its time limit.

    It changes the `weights` that require gradients. Its state can be saved and restored.

    Attributes:
        weights: all weights of the model.
        rate: highest learning rate.
        budget_s: time limit of all runs together.
        rate_factors: by weight, a factor of the learning rate; for weights that begin with good
            values.
        seconds, num_steps: time and steps of all runs so far.
        loss: loss of the last step.
    """

    weights: Mapping[str, Tensor]
    rate: float
    budget_s: float
    rate_factors: Mapping[str, float] = field(default_factory=dict)
    seconds: float = 0.0
    num_steps: int = 0
    loss: float = math.nan
    _optimizer: torch.optim.Optimizer = field(init=False, repr=False)

    def __post_init__(self) -> None:
        """Create the optimizer; weights with the same learning rate are one parameter group."""
        groups: dict[float, list[Tensor]] = {}
        for name, weight in self.trained.items():
            groups.setdefault(self.rate_factors.get(name, 1.0), []).append(weight)
        self._optimizer = torch.optim.AdamW(
            [{"params": group, "share": share} for share, group in groups.items()],
            betas=(0.9, 0.95),
            weight_decay=0.01,
            fused=True,  # an eighth of the time of separate operations
        )

    @property
    def trained(self) -> dict[str, Tensor]:
        """The weights that the training changes, by name."""
        return {name: weight for name, weight in self.weights.items() if weight.requires_grad}

    @property
    def progress(self) -> float:
        """The share of the training time that has passed, from 0 to 1."""
        return self.seconds / self.budget_s

    def descend(self, loss: Tensor) -> None:
        """Take one training step against the gradient of the loss."""
        # Warm up, then follow half a cosine down to `_MIN_RATE_SHARE`.
        cosine = 0.5 * (1 + math.cos(math.pi * min(1.0, self.progress)))
        warm_up = max((self.num_steps + 1) / _WARM_UP_STEPS, self.progress / _WARM_UP_SHARE)
        rate = self.rate * min(1.0, warm_up)
        rate *= _MIN_RATE_SHARE + (1 - _MIN_RATE_SHARE) * cosine
        for group in self._optimizer.param_groups:
            group["lr"] = rate * group["share"]
        self._optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.trained.values(), 1.0)
        self._optimizer.step()
        self.num_steps += 1

    def arrays(self) -> Arrays:
        """Return the trained weights and the optimizer's state of each weight, to be saved."""
        arrays: dict[str, NDArray[np.float32]] = {}
        for name, weight in self.trained.items():
            arrays[name] = weight.detach().numpy()
            for state_name, value in self._optimizer.state[weight].items():
                flat = value.float().reshape(value.shape or (1,))
                arrays[f"{name}:{state_name}"] = flat.numpy()
        return arrays

    def restore(self, arrays: Arrays, seconds: float, num_steps: int) -> None:
        """Continue a training from the saved `arrays` of an earlier run, its time and its steps."""
        self.seconds, self.num_steps = seconds, num_steps
        for name, weight in self.trained.items():
            with torch.no_grad():
                weight.copy_(torch.from_numpy(arrays[name]))
            state = self._optimizer.state[weight]
            for part in ("exp_avg", "exp_avg_sq"):
                state[part] = torch.from_numpy(arrays[f"{name}:{part}"].copy())
            state["step"] = torch.tensor(float(arrays[f"{name}:step"][0]))


def train(
    descent: Descent,
    step: Callable[[], None],
    save: Callable[[], str],
    interruption_note: str,
    report: Report,
) -> None:
    """Take training steps until the time is over; save regularly, at the end, and after Ctrl-C.

    `step` takes one training step. `save` writes a checkpoint, and returns a line about the quality
    of the result. `report` gets lines of progress.

    Raises:
        KeyboardInterrupt: after saving; the message contains `interruption_note`.
    """
    saved_s = reported_s = time.monotonic()
    save_s = 0.0
    try:
        while descent.seconds < descent.budget_s:
            start_s = time.monotonic()
            step()
            now_s = time.monotonic()
            descent.seconds += now_s - start_s
            if now_s - reported_s >= _REPORT_INTERVAL_S:
                reported_s = now_s
                report(
                    f"training: {descent.seconds / 60:.1f} of {descent.budget_s / 60:g} minutes, "
                    f"loss {descent.loss:.3f}"
                )
            if now_s - saved_s >= max(_SAVE_INTERVAL_S, _MIN_INTERVAL_RATIO * save_s):
                start_s = time.monotonic()
                report(save())
                saved_s = time.monotonic()
                save_s = saved_s - start_s
    except KeyboardInterrupt:
        if not descent.num_steps:
            raise KeyboardInterrupt("Stopped before the first step.") from None
        raise KeyboardInterrupt(
            f"Stopped; the {interruption_note} ({save()}). Run the same command to continue."
        ) from None
    report(save())
