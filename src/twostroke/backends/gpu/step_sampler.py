"""`StepSampler`: draws the tokens of a step on the device, and copies only results to the host."""

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
    DrawnTokens = tuple[list[int], Reports, Reports]


class StepSampler:
    """Draws the tokens of a step on the GPU; only drawn tokens are copied to the host.

    For each step: `begin`, then `draw` for each chunk of rows with logits, then `finish`, whose
    result is a function that reads the tokens once the device has computed them. Results are int32
    (rows, RESULT_INTS), in the order of the plan's rows with logits.
    """

    def __init__(self, gpu: Gpu, vocab_size: int, *, on_host: bool) -> None:
        self._gpu, self._mask_words, self._on_host = gpu, -(-vocab_size // 32), on_host
        shape = (0 if on_host else LOGIT_ROWS), vocab_size
        self._work = torch.zeros(shape, dtype=torch.float32, device=gpu.device)

    def prepare(self, logits: Tensor, results: Tensor) -> None:
        """Compile the sampling kernels, by drawing one greedy token."""
        if self._on_host:
            return
        row = np.zeros((1, sampling.ROW_INTS), np.int32)
        row[:, sampling.NUM_TOP] = NO_TOKEN
        rows, lists = (to_device(self._gpu, array) for array in (row, row[0, :1]))
        sampler.launch(
            self._gpu,
            logits[:1],
            rows=rows,
            lists=lists,
            results=results[:1],
            work=self._work[:1],
        )
        sampler.report(self._gpu, logits[:1], rows, results[:1])

    def begin(self, rows: Rows) -> None:
        """Send the sampling parameters of a step's rows to the GPU."""
        self._num_logprobs = rows["num_logprobs"].tolist()
        self._logits: list[Tensor] = []
        if not self._on_host:
            sample_rows = sampling.sample_rows(rows, self._mask_words)
            self._reports = sample_rows.reports
            self._rows = to_device(self._gpu, sample_rows.rows)
            self._lists = to_device(self._gpu, sample_rows.lists)

    def draw(self, logits: Tensor, first: int, results: Tensor) -> None:
        """Launch the drawing of tokens from a chunk of logits; `first`: the chunk's first row."""
        if self._on_host:
            self._logits.append(logits.clone())
            return
        chunk = slice(first, first + len(logits))
        rows, chunk_results = self._rows[chunk], results[chunk]
        sampler.launch(
            self._gpu,
            logits,
            rows=rows,
            lists=self._lists,
            results=chunk_results,
            work=self._work[: len(logits)],
        )
        if self._reports:
            sampler.report(self._gpu, logits, rows, chunk_results)

    def finish(self, plan: StepPlan, results: Tensor) -> Callable[[], DrawnTokens]:
        """Return a function that reads the step's drawn tokens, once the GPU has computed them.

        The function returns (tokens, log-probabilities, scores of prompt tokens).
        """
        num_logprobs, draws = self._num_logprobs, np.array(plan.draws, bool)
        if self._on_host:
            drawn_tokens = self._draw_on_host(plan)
            tokens = torch.tensor(drawn_tokens[0], dtype=torch.int32)
            results[: len(num_logprobs), sampling.TOKEN][torch.from_numpy(draws)] = tokens
            return lambda: drawn_tokens
        results_on_host = to_host(results[: len(num_logprobs)])
        return lambda: _in_order(
            *sampling.read_results(results_on_host.numpy(), num_logprobs), draws
        )

    def _draw_on_host(self, plan: StepPlan) -> DrawnTokens:
        slices = tuple(
            [_with_future_tokens(slice_) if slice_.is_blind else slice_ for slice_ in plan.slices]
        )
        logits = torch.cat(self._logits).numpy() if self._logits else np.zeros((0, 0), np.float32)
        token_reports, scores = draw_all(StepPlan(slices), logits)
        tokens = [token for token, _ in token_reports]
        return tokens, [report for _, report in token_reports], scores


def _with_future_tokens(slice_: Slice) -> Slice:
    """Return a slice whose request has placeholders for tokens that are not drawn yet.

    The slice is blind: a step that is still in flight draws its input token.
    """
    request = slice_.request
    missing = slice_.start + slice_.count - len(request.tokens)
    return replace(slice_, request=copy_of(request, tokens=[*request.tokens, *[0] * missing]))


def _in_order(tokens: list[int], reports: Reports, draws: NDArray[np.bool_]) -> DrawnTokens:
    if draws.all():
        return tokens, reports, []
    drawn_rows, scored_rows = np.flatnonzero(draws).tolist(), np.flatnonzero(~draws).tolist()
    return (
        [tokens[i] for i in drawn_rows],
        [reports[i] for i in drawn_rows],
        [reports[i] for i in scored_rows],
    )
