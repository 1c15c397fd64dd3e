"""Draws a step's tokens where its logits are, and brings only what was drawn to the processor."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch

from twostroke.backends.gpu import sampling
from twostroke.backends.gpu.kernels import sampler
from twostroke.backends.gpu.step_input import LOGIT_ROWS

if TYPE_CHECKING:
    from torch import Tensor

    from twostroke.backends.gpu.launch import Gpu
    from twostroke.core.step import StepPlan, TokenLogprobs
    from twostroke.sample.rows import Rows

    Drawn = tuple[list[int], list[TokenLogprobs | None], list[TokenLogprobs | None]]


class Drawing:
    """The sampler on the device."""

    def __init__(self, gpu: Gpu, vocab_size: int) -> None:
        self._gpu, self._mask_words = gpu, -(-vocab_size // 32)
        shape = LOGIT_ROWS, vocab_size
        self._work = torch.zeros(shape, dtype=torch.float32, device=gpu.device)
        self._results = torch.zeros(0, dtype=torch.int32, device=gpu.device)

    @property
    def num_bytes(self) -> int:
        """Bytes on the device."""
        size: int = self._work.nbytes
        return size

    def begin(self, rows: Rows) -> None:
        """Send what the rows of a step want."""
        given = sampling.sample_rows(rows, self._mask_words)
        self._reports = given.reports
        self._rows, self._lists = (
            torch.from_numpy(array).to(self._gpu.device) for array in (given.rows, given.lists)
        )
        if len(rows) > len(self._results):
            self._results = self._results.new_zeros((2 * len(rows), sampling.RESULT_INTS))

    def draw(self, logits: Tensor, first: int) -> None:
        """Draw for the rows from `first` on, whose logits these are."""
        here = slice(first, first + len(logits))
        rows, results = self._rows[here], self._results[here]
        work = self._work[: len(logits)]
        sampler.launch(self._gpu, logits, rows, self._lists, results, work)
        if self._reports:
            sampler.report(self._gpu, logits, rows, results)

    def finish(self, plan: StepPlan, rows: Rows) -> Drawn:
        """Return tokens, their log-probabilities, and those of scored rows, in the plan's order."""
        results = self._results[: len(rows)].cpu().numpy()
        tokens, logprobs = sampling.read_results(results, rows)
        draws = np.array(plan.draws, bool)
        if draws.all():
            return tokens, logprobs, []
        drawn, scored = np.flatnonzero(draws).tolist(), np.flatnonzero(~draws).tolist()
        return (
            [tokens[i] for i in drawn],
            [logprobs[i] for i in drawn],
            [logprobs[i] for i in scored],
        )
