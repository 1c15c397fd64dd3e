"""The torch backend: runs the engine's steps, one operation after another, plainly."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

import torch

from twostroke.backends import BackendFacts
from twostroke.backends.spans import flatten, pooled_rows
from twostroke.backends.torch.model import TorchModel
from twostroke.backends.torch.operations import StepState
from twostroke.backends.torch.pages import PagedStep, Pages
from twostroke.core.step import StepResult
from twostroke.sample.reference import draw_all

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    import numpy as np
    from numpy.typing import NDArray

    from twostroke.core.request import Request
    from twostroke.core.step import StepPlan
    from twostroke.program import Program
    from twostroke.quant import QuantTensor

    Array = NDArray[np.float32]


class TorchBackend:
    """Runs a Program in float32 with PyTorch."""

    def __init__(
        self,
        program: Program,
        tensors: Mapping[str, QuantTensor],
        num_pages: int,
        page_size: int,
        device: str = "cpu",
        *,
        tapped_value: str | None = None,
    ) -> None:
        """Dequantize the Program's weights onto `device` and reserve its pages there.

        Steps return `tapped_value` for the rows in which they draw.
        """
        self._program, self._tapped_value = program, tapped_value
        self._model = TorchModel(program, tensors, device)
        self._pages = Pages(program, num_pages, page_size, self._model.device)
        self.facts = BackendFacts(
            name="torch",
            detail=f"PyTorch {torch.__version__} on {device}, float32",
            num_threads=torch.get_num_threads(),
            num_pages=num_pages,
            page_size=page_size,
            windows=tuple(group.window for group in program.cache_groups),
            weight_bytes=sum(weight.nbytes for weight in self._model.weights.values()),
            cache_bytes=self._pages.memory.nbytes,
        )

    def run(self, plan: StepPlan) -> StepResult:
        """Compute the plan's rows and draw one token for each slice that samples."""
        started = time.perf_counter()
        tokens, positions, spans, sampled = flatten(plan.slices)
        device = self._model.device
        state = StepState(
            torch.from_numpy(tokens).to(device),
            torch.from_numpy(positions).to(device),
            torch.from_numpy(sampled).to(device),
            self._model.weights,
            PagedStep(self._pages, spans),
            None if plan.external is None else torch.from_numpy(plan.external).to(device),
        )
        tapped, last = self._tapped_value, self._program.last_states
        with torch.inference_mode():
            values = self._model.run(state, (last,) if tapped is None else (last, tapped))
            logits = values[self._program.ops[-1].output].cpu().numpy()
            hidden = None
            if tapped is not None:
                hidden = values[tapped][state.sampled[plan.draws]].cpu().numpy()
            states = [values[last][part].cpu().numpy() for part in pooled_rows(plan.slices)]
        kernel_s = time.perf_counter() - started
        drawn, scores = draw_all(plan, logits)
        elapsed_s = time.perf_counter() - started
        tokens_drawn, logprobs = [t for t, _ in drawn], [p for _, p in drawn]
        return StepResult(tokens_drawn, logprobs, elapsed_s, kernel_s, hidden, scores, states)

    def score(self, tokens: Sequence[int], *, generated: bool = False) -> Array:
        """Return the logits of a sequence; see `Backend.score`."""
        logits = self._program.ops[-1].output
        return self.trace(tokens, [logits], generated=generated)[logits]

    def trace(
        self, tokens: Sequence[int], values: Sequence[str], *, generated: bool = False
    ) -> dict[str, Array]:
        """Return values of the Program for a sequence; see `Backend.trace`."""
        del generated  # one arithmetic for all rows
        with torch.inference_mode():
            traced = self._model.values(torch.tensor(tokens), values)
            return {name: traced[name].cpu().numpy() for name in values}

    def forget(self, request: Request) -> None:
        """Keep nothing of a request."""

    def close(self) -> None:
        """Drop weights and pages."""
        self._model.weights = {}
        self._pages.memory = torch.empty(0)
