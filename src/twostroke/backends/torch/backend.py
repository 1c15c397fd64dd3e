"""The torch backend: runs the engine's steps in PyTorch, one operation after another."""

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
from twostroke.backends.torch.recurrent import RecurrentStep, TorchStateSlots, new_sequence
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
    from twostroke.backends.torch.pages import KvKeeper
    from twostroke.core.request import Request
    from twostroke.core.step import StepPlan
    from twostroke.model.program import Program
    from twostroke.model.program.shard import RankProgram
    from twostroke.model.quant import QuantTensor

    Array = NDArray[np.float32]


class TorchBackend:
    """Runs a Program in float32 with PyTorch, one operation after another."""

    def __init__(  # noqa: PLR0913 - each is a fact that only the caller knows
        self,
        program: Program,
        tensors: Mapping[str, QuantTensor],
        num_pages: int,
        page_size: int,
        device: str = "cpu",
        *,
        num_threads: int | None = None,
        num_states: int = 0,
        tapped_value: str | None = None,
        weight_shard: WeightShard | None = None,
    ) -> None:
        """Dequantize the Program's weights onto `device`, and reserve KV pages there.

        `num_states`: slots for recurrent states. `num_threads`: None leaves the choice to PyTorch.
        `tapped_value`: the name of an intermediate value that steps also return, for the rows from
        which tokens are drawn. `weight_shard`: this backend is one rank of several, which holds and
        computes its part of the model. On ranks other than 0, steps run only by `follow`, and
        `tapped_value` can only be the last hidden state.
        """
        if num_threads is not None:
            torch.set_num_threads(num_threads)
        self._program, self._weight_shard = program, weight_shard
        self.logits, self._tapped_value = program.ops[-1].output, tapped_value
        # The same on all ranks.
        tapped = tapped_value if weight_shard is None else last_hidden(program)
        returned = [self.logits, program.last_states, *([] if tapped is None else [tapped])]
        self._part = self._rank_program(returned)
        self._returned = self._names_here(returned)
        rank_tensors = (
            tensors if weight_shard is None else weight_shard.tensors(self._part, tensors)
        )
        self._model = TorchModel(self._part.program, rank_tensors, device)
        self._pages = TorchKvPages(self._part.program, num_pages, page_size, self._model.device)
        self._states = TorchStateSlots(self._part.program, num_states, self._model.device)
        self.facts = BackendFacts(
            name="torch",
            detail=f"PyTorch {torch.__version__} on {device}, float32",
            num_threads=torch.get_num_threads(),
            num_pages=num_pages,
            page_size=page_size,
            windows=tuple(group.window for group in program.cache_groups),
            weight_bytes=sum(weight.nbytes for weight in self._model.weights.values()),
            cache_bytes=self._pages.memory.nbytes + self._states.num_bytes,
            num_states=num_states if program.state_layers else 0,
        )
        self._steps: StepArrays | None = None  # encodes steps for the other ranks
        if weight_shard is not None and weight_shard.rank == 0:
            groups = PageGroups(page_size, self.facts.windows)
            longest = groups.max_tokens(num_pages, program.context_length)
            max_pages = -(-longest // page_size)
            self._steps = StepArrays(
                len(groups.windows),
                page_size,
                max_pages,
                one_arithmetic=True,
                has_states=bool(program.state_layers),
            )
            self._steps.tables.note_changes()

    def run(self, plan: StepPlan) -> StepResult:
        """Compute one step, and draw a token for each slice that samples."""
        return self.compute(plan)

    def fill(self, plan: StepPlan) -> None:
        """Write a step's arrays to send to the other ranks; see `RankBackend`."""
        assert self._steps is not None
        self._steps.fill(plan)

    def encode_step(self) -> bytes:
        """Return the step that `fill` wrote, as a message to the other ranks."""
        assert self._steps is not None
        return self._steps.encode_step()

    def compute(self, plan: StepPlan) -> StepResult:
        """Compute this rank's part of a step, and draw the step's tokens."""
        start_s = time.perf_counter()
        rows = flatten(plan.slices)
        values = self._compute(rows, plan.external)
        hidden = row_states = None
        if self._tapped_value is not None:
            row_states = values[self._tapped_value].cpu().numpy()
            hidden = row_states[rows[-1][plan.draws]]
        last = values[self._program.last_states]
        states = [last[part].cpu().numpy() for part in pooled_rows(plan.slices)]
        logits = values[self.logits].cpu().numpy()
        kernel_s = time.perf_counter() - start_s
        draws, scores = draw_all(plan, logits)
        elapsed_s = time.perf_counter() - start_s
        tokens_drawn, logprobs = [t for t, _ in draws], [p for _, p in draws]
        return StepResult(
            tokens_drawn,
            logprobs,
            elapsed_s=elapsed_s,
            kernel_s=kernel_s,
            hidden=hidden,
            scores=scores,
            states=states,
            row_states=row_states,
        )

    def follow(self, frame: StepFrame) -> float:
        """Compute this rank's part of a step that rank 0 sent.

        Returns 0.0, because the seconds in collectives are not measured.
        """
        self._compute(unpack(frame), frame.external)
        return 0.0

    def score(self, tokens: Sequence[int], *, generated: bool = False) -> Array:
        """Return the logits (len(tokens), vocab_size) of a token sequence; see `Backend.score`.

        Empty on ranks other than 0. `generated` is ignored, because this backend computes all rows
        in the same way.
        """
        values = self.trace(tokens, [self.logits], generated=generated)
        return values.get(self.logits, np.empty((0, 0), np.float32))

    def trace(
        self, tokens: Sequence[int], values: Sequence[str], *, generated: bool = False
    ) -> dict[str, Array]:
        """Return the intermediate values named `values`, each (len(tokens), width), by name.

        The token sequence is computed as by `score`; see `Backend.trace`.
        """
        del generated  # all rows are computed in the same way
        all_rows = torch.arange(len(tokens))
        with torch.inference_mode():
            program = self._rank_program(values).program
            state = self._state(
                torch.tensor(tokens),
                all_rows,
                all_rows,
                keeper=WholeSequences([len(tokens)], program.ops),
                recurrent=new_sequence(program, len(tokens), self._model.device),
            )
            traced = self._model.run(state, self._names_here(values), program)
            return {name: value.cpu().numpy() for name, value in traced.items()}

    @property
    def state_memory(self) -> None:
        """Return None: slots for recurrent states are not read or written from outside."""

    @property
    def pages(self) -> None:
        """Return None: the bytes of KV pages are not accessible, because a GPU may hold them."""

    def forget(self, request: Request) -> None:
        """Drop this backend's state of a finished request.

        There is only such state if steps are sent to other ranks.
        """
        if self._steps is not None:
            self._steps.forget(request)

    def close(self) -> None:
        """Free the backend's weights, KV pages and recurrent states."""
        self._model.weights = {}
        self._pages.memory = torch.empty(0)
        self._states.memory = {}

    def _compute(self, rows: Rows, external: Array | None) -> dict[str, Tensor]:
        """Compute this rank's part of a step; return the values that the step needs, by name."""
        tokens, positions, spans, sampled = rows
        with torch.inference_mode():
            state = self._state(
                torch.from_numpy(tokens),
                torch.from_numpy(positions),
                torch.from_numpy(sampled),
                keeper=PagedStep(self._pages, spans),
                recurrent=RecurrentStep(self._states, spans),
                external=None if external is None else torch.from_numpy(external),
            )
            return self._model.run(state, self._returned)

    def _state(
        self,
        tokens: Tensor,
        positions: Tensor,
        sampled: Tensor,
        *,
        keeper: KvKeeper,
        recurrent: RecurrentStep,
        external: Tensor | None = None,
    ) -> TorchStepState:
        device, part = self._model.device, self._part
        return TorchStepState(
            tokens=tokens.to(device),
            positions=positions.to(device),
            sampled=sampled.to(device),
            weights=self._model.weights,
            keeper=keeper,
            recurrent=recurrent,
            external=None if external is None else external.to(device),
            link=None if self._weight_shard is None else self._weight_shard.link,
            row_part=part.row_part,
            num_row_parts=part.num_row_parts,
        )

    def _rank_program(self, kept_values: Collection[str]) -> RankProgram:
        """Return this rank's part of the Program; rank 0 has the values `kept_values` in full."""
        if self._weight_shard is None:
            return shard(self._program, ONE_RANK)[0]
        return self._weight_shard.parts(self._program, kept_values)[self._weight_shard.rank]

    def _names_here(self, values: Collection[str]) -> Collection[str]:
        """Return the names of the values that this rank returns: all on rank 0, none elsewhere."""
        return values if self._weight_shard is None or self._weight_shard.rank == 0 else ()
