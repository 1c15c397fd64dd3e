"""A reference backend whose results do not depend on how a step is divided into rows."""

from __future__ import annotations

from typing import TYPE_CHECKING

from twostroke.backends.reference import ReferenceBackend
from twostroke.core.step import Slice, StepPlan, StepResult

if TYPE_CHECKING:
    from twostroke.core.step import TokenLogprobs


class RowByRow(ReferenceBackend):
    """Computes one row at a time, so that the order of additions does not depend on chunks.

    Drafts must be a chain, and the model must have recurrent layers.
    """

    def run(self, plan: StepPlan) -> StepResult:
        tokens: list[int] = []
        logprobs: list[TokenLogprobs | None] = []
        scores: list[TokenLogprobs | None] = []
        for part in plan.slices:
            end = part.start + part.count
            for at in range(part.start, end):
                samples = part.samples and at + 1 == end
                is_scored = not samples and at >= end - part.num_scored - part.samples
                row = Slice(
                    part.request,
                    at,
                    1,
                    samples,
                    num_scored=int(is_scored),
                    read_state=part.read_state if at == part.start else part.write_state,
                    write_state=part.write_state,
                )
                result = super().run(StepPlan((row,)))
                tokens += result.tokens
                logprobs += result.logprobs
                scores += result.scores
            num_tokens = len(part.request.tokens)
            states = (part.write_state, *part.draft_states)
            for index, draft in enumerate(part.drafts):
                part.request.tokens.append(draft)
                before, after = states[index : index + 2]
                row = Slice(
                    part.request, end + index, 1, True, read_state=before, write_state=after
                )
                result = super().run(StepPlan((row,)))
                tokens += result.tokens
                logprobs += result.logprobs
            del part.request.tokens[num_tokens:]
        return StepResult(tokens, logprobs, scores=scores)
