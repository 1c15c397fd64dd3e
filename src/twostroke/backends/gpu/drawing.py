"""Draws a step's tokens where its logits are, and brings only what was drawn to the processor."""

from __future__ import annotations

from dataclasses import replace as copy_of
from typing import TYPE_CHECKING

import numpy as np
import torch
from msgspec.structs import replace

from twostroke.backends.gpu import sampling
from twostroke.backends.gpu.kernels import sampler
from twostroke.backends.gpu.step_input import LOGIT_ROWS
from twostroke.backends.gpu.transfers import to_device, to_host
from twostroke.backends.sampling.reference import draw_all
from twostroke.core.step import NO_TOKEN, StepPlan

if TYPE_CHECKING:
    from collections.abc import Callable

    from numpy.typing import NDArray
    from torch import Tensor

    from twostroke.backends.gpu.launch import Gpu
    from twostroke.backends.sampling.rows import Rows
    from twostroke.core.step import Slice, TokenLogprobs

    Reports = list[TokenLogprobs | None]
    Drawn = tuple[list[int], Reports, Reports]


class Drawing:
    """The sampler of one step at a time.

    Its results, int32 (rows, RESULT_INTS), are those of the plan's rows with logits, in order.
    `finish` returns a function to call after the device has done what was launched until then.
    """

    def __init__(self, gpu: Gpu, vocab_size: int, *, on_host: bool) -> None:
        self._gpu, self._mask_words, self._on_host = gpu, -(-vocab_size // 32), on_host
        shape = (0 if on_host else LOGIT_ROWS), vocab_size
        self._work = torch.zeros(shape, dtype=torch.float32, device=gpu.device)

    def prepare(self, logits: Tensor, results: Tensor) -> None:
        """Compile the kernels, with a row that draws and reports nothing."""
        if self._on_host:
            return
        row = np.zeros((1, sampling.ROW_INTS), np.int32)
        row[:, sampling.NUM_TOP] = NO_TOKEN
        rows, lists = (to_device(self._gpu, array) for array in (row, row[0, :1]))
        sampler.launch(self._gpu, logits[:1], rows, lists, results[:1], self._work[:1])
        sampler.report(self._gpu, logits[:1], rows, results[:1])

    def begin(self, rows: Rows) -> None:
        """Send what the rows of a step want."""
        self._asked = rows["num_logprobs"].tolist()
        self._logits: list[Tensor] = []
        if not self._on_host:
            given = sampling.sample_rows(rows, self._mask_words)
            self._reports = given.reports
            self._rows, self._lists = (to_device(self._gpu, a) for a in (given.rows, given.lists))

    def draw(self, logits: Tensor, first: int, results: Tensor) -> None:
        """Draw for the rows from `first` on, whose logits these are."""
        if self._on_host:
            self._logits.append(logits.clone())
            return
        here = slice(first, first + len(logits))
        rows, own = self._rows[here], results[here]
        sampler.launch(self._gpu, logits, rows, self._lists, own, self._work[: len(logits)])
        if self._reports:
            sampler.report(self._gpu, logits, rows, own)

    def finish(self, plan: StepPlan, results: Tensor) -> Callable[[], Drawn]:
        """Return what returns tokens, their log-probabilities, and those of scored rows."""
        asked, draws = self._asked, np.array(plan.draws, bool)
        if self._on_host:
            drawn = self._draw_here(plan)
            tokens = torch.tensor(drawn[0], dtype=torch.int32)
            results[: len(asked), sampling.TOKEN][torch.from_numpy(draws)] = tokens
            return lambda: drawn
        found = to_host(results[: len(asked)])
        return lambda: _in_order(*sampling.read_results(found.numpy(), asked), draws)

    def _draw_here(self, plan: StepPlan) -> Drawn:
        parts = tuple([_grown(part) if part.is_blind else part for part in plan.slices])
        logits = torch.cat(self._logits).numpy() if self._logits else np.zeros((0, 0), np.float32)
        drawn, scores = draw_all(StepPlan(parts), logits)
        return [token for token, _ in drawn], [report for _, report in drawn], scores


def _grown(part: Slice) -> Slice:
    """Return a blind slice of a request with as many tokens as it will have, of any value."""
    request = part.request
    missing = part.start + part.count - len(request.tokens)
    return replace(part, request=copy_of(request, tokens=[*request.tokens, *[0] * missing]))


def _in_order(tokens: list[int], reports: Reports, draws: NDArray[np.bool_]) -> Drawn:
    if draws.all():
        return tokens, reports, []
    drawn, scored = np.flatnonzero(draws).tolist(), np.flatnonzero(~draws).tolist()
    return [tokens[i] for i in drawn], [reports[i] for i in drawn], [reports[i] for i in scored]
