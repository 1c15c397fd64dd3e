"""The torch backend: runs the engine's steps, one operation after another, plainly."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

import numpy as np
import torch

from twostroke.backends.cpu.steps import StepArrays
from twostroke.backends.interface import BackendFacts
from twostroke.backends.sampling.reference import draw_all
from twostroke.backends.spans import flatten, pooled_rows, unpack
from twostroke.backends.torch.model import TorchModel
from twostroke.backends.torch.operations import TorchStepState
from twostroke.backends.torch.pages import PagedStep, TorchKvPages, WholeSequences
from twostroke.core.step import StepResult
from twostroke.model.families.heads import last_hidden
from twostroke.model.program.kv_layout import PageGroups
from twostroke.model.program.mesh import ONE_RANK
from twostroke.model.program.shard import shard

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping, Sequence

    from numpy.typing import NDArray
    from torch import Tensor

    from twostroke.backends.interface import WeightShard
    from twostroke.backends.spans import Rows
    from twostroke.backends.step_frame import StepFrame
    from twostroke.backends.torch.pages import Keeper
    from twostroke.core.request import Request
    from twostroke.core.step import StepPlan
    from twostroke.model.program import Program
    from twostroke.model.program.shard import RankProgram
    from twostroke.model.quant import QuantTensor

    Array = NDArray[np.float32]


class TorchBackend:
    """Runs a Program in float32 with PyTorch."""

    def __init__(  # noqa: PLR0913 - facts that only the builder knows
        self,
        program: Program,
        tensors: Mapping[str, QuantTensor],
        num_pages: int,
        page_size: int,
        device: str = "cpu",
        *,
        num_threads: int | None = None,
        tapped_value: str | None = None,
        share: WeightShard | None = None,
    ) -> None:
        """Dequantize the Program's weights onto `device` and reserve its pages there.

        `num_threads` None leaves the choice to PyTorch. Steps return `tapped_value` for the rows in
        which they draw. With a `share` this is one rank of several, which computes and holds its
        part of the whole `program` and `tensors`; ranks other than 0 only `follow`, and
        `tapped_value` can only be the last hidden state.
        """
        if num_threads is not None:
            torch.set_num_threads(num_threads)
        self._program, self._share = program, share
        self.logits, self._tapped_value = program.ops[-1].output, tapped_value
        tapped = tapped_value if share is None else last_hidden(program)  # the same on all ranks
        returned = [self.logits, program.last_states, *([] if tapped is None else [tapped])]
        self._part = self._divided(returned)
        self._returned = self._here(returned)
        held = tensors if share is None else share.tensors(self._part, tensors)
        self._model = TorchModel(self._part.program, held, device)
        self._pages = TorchKvPages(self._part.program, num_pages, page_size, self._model.device)
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
        self._steps: StepArrays | None = None  # the form in which other ranks get steps
        if share is not None and share.rank == 0:
            groups = PageGroups(page_size, self.facts.windows)
            longest = groups.max_tokens(num_pages, program.context_length)
            max_pages = -(-longest // page_size)
            self._steps = StepArrays(len(groups.windows), page_size, max_pages, one_arithmetic=True)
            self._steps.tables.note_changes()

    def run(self, plan: StepPlan) -> StepResult:
        """Compute the plan's rows and draw one token for each slice that samples."""
        return self.compute(plan)

    def fill(self, plan: StepPlan) -> None:
        """Lay out a step for the other ranks; see `RankBackend`."""
        assert self._steps is not None
        self._steps.fill(plan)

    def encoded(self) -> bytes:
        """Return the step that was laid out, as a frame."""
        assert self._steps is not None
        return self._steps.encoded()

    def compute(self, plan: StepPlan) -> StepResult:
        """Compute this rank's part of a step of this plan, and draw."""
        started = time.perf_counter()
        rows = flatten(plan.slices)
        values = self._compute(rows, plan.external)
        hidden = None
        if self._tapped_value is not None:
            drawn_rows = torch.from_numpy(rows[-1][plan.draws])
            hidden = values[self._tapped_value].cpu()[drawn_rows].numpy()
        last = values[self._program.last_states]
        states = [last[part].cpu().numpy() for part in pooled_rows(plan.slices)]
        logits = values[self.logits].cpu().numpy()
        kernel_s = time.perf_counter() - started
        drawn, scores = draw_all(plan, logits)
        elapsed_s = time.perf_counter() - started
        tokens_drawn, logprobs = [t for t, _ in drawn], [p for _, p in drawn]
        return StepResult(tokens_drawn, logprobs, elapsed_s, kernel_s, hidden, scores, states)

    def follow(self, frame: StepFrame) -> float:
        """Compute this rank's part of a step of rank 0; return 0.0, since nothing is measured."""
        self._compute(unpack(frame), frame.external)
        return 0.0

    def score(self, tokens: Sequence[int], *, generated: bool = False) -> Array:
        """Return the logits of a sequence, which rank 0 alone has; see `Backend.score`."""
        found = self.trace(tokens, [self.logits], generated=generated)
        return found.get(self.logits, np.empty((0, 0), np.float32))

    def trace(
        self, tokens: Sequence[int], values: Sequence[str], *, generated: bool = False
    ) -> dict[str, Array]:
        """Return values of the Program for a sequence; see `Backend.trace`."""
        del generated  # one arithmetic for all rows
        every = torch.arange(len(tokens))
        with torch.inference_mode():
            program = self._divided(values).program
            keeper = WholeSequences([len(tokens)], program.ops)
            state = self._state(torch.tensor(tokens), every, every, keeper)
            traced = self._model.run(state, self._here(values), program)
            return {name: value.cpu().numpy() for name, value in traced.items()}

    @property
    def pages(self) -> None:
        """None: its pages may lie in a GPU's memory."""

    def forget(self, request: Request) -> None:
        """Drop what other ranks need to know of a finished request."""
        if self._steps is not None:
            self._steps.forget(request)

    def close(self) -> None:
        """Drop weights and pages."""
        self._model.weights = {}
        self._pages.memory = torch.empty(0)

    def _compute(self, rows: Rows, external: Array | None) -> dict[str, Tensor]:
        """Run a step; return its values by name."""
        tokens, positions, spans, sampled = rows
        with torch.inference_mode():
            state = self._state(
                torch.from_numpy(tokens),
                torch.from_numpy(positions),
                torch.from_numpy(sampled),
                PagedStep(self._pages, spans),
                None if external is None else torch.from_numpy(external),
            )
            return self._model.run(state, self._returned)

    def _state(
        self,
        tokens: Tensor,
        positions: Tensor,
        sampled: Tensor,
        keeper: Keeper,
        external: Tensor | None = None,
    ) -> TorchStepState:
        device, part = self._model.device, self._part
        return TorchStepState(
            tokens.to(device),
            positions.to(device),
            sampled.to(device),
            self._model.weights,
            keeper,
            None if external is None else external.to(device),
            None if self._share is None else self._share.link,
            part.row_part,
            part.num_row_parts,
        )

    def _divided(self, kept: Collection[str]) -> RankProgram:
        """Return this rank's part of the Program; values that are `kept` are whole on rank 0."""
        if self._share is None:
            return shard(self._program, ONE_RANK)[0]
        return self._share.parts(self._program, kept)[self._share.rank]

    def _here(self, values: Collection[str]) -> Collection[str]:
        """Return those of a step's values that this rank returns."""
        return values if self._share is None or self._share.rank == 0 else ()
