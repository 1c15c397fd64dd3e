"""Records what a running engine draws, with the hidden states that it draws from."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from twostroke.spec.drawn import drawn_rows

if TYPE_CHECKING:
    from collections.abc import Callable

    from numpy.typing import NDArray

    from twostroke.core.request import Request
    from twostroke.core.step import StepPlan, StepResult

_TINY = np.float32(1e-30)


@dataclass(frozen=True, slots=True)
class Answer:
    """An answer's tokens behind the last one of its prompt, and what each was drawn from.

    `hidden[i]`, float16 (width), is the state at `tokens[i]`, from which `tokens[i + 1]` was drawn,
    scaled to a mean square of 1: whoever reads states norms them first. There is one token more
    than there are states, which are what its length counts.
    """

    tokens: NDArray[np.int32]
    hidden: NDArray[np.float16]

    def __len__(self) -> int:
        """How many states there are."""
        return len(self.hidden)


@dataclass(slots=True, eq=False)
class Recorder:
    """A watcher that hands each answer to `keep` once its request has ended."""

    keep: Callable[[Answer], None]
    _rows: dict[Request, list[NDArray[np.float16]]] = field(default_factory=dict)

    def see(self, plan: StepPlan, result: StepResult) -> None:
        """Keep the rows from which each request's new tokens were drawn."""
        for part, rows in drawn_rows(plan, result):
            if result.hidden is not None:
                kept = result.hidden[rows]
                kept = kept / np.sqrt(np.mean(kept * kept, axis=1, keepdims=True) + _TINY)
                self._rows.setdefault(part.request, []).append(kept.astype(np.float16))

    def finish(self, request: Request) -> None:
        """Hand on an answer, unless it is too short to learn from."""
        rows = self._rows.pop(request, None)
        if rows is None:
            return
        tokens = np.array(request.tokens[request.num_prompt - 1 :], np.int32)
        hidden = np.concatenate(rows)[: len(tokens) - 1]
        if 2 <= len(hidden) == len(tokens) - 1:
            self.keep(Answer(tokens, hidden))
