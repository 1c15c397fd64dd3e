"""Conversations of several turns, and agents that call tools: requests contain the real history."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import numpy as np
from msgspec.structs import replace

from twostroke.core.errors import UsageError
from twostroke.core.frozen import Frozen, check_range
from twostroke.lab.bench.request_form import PlannedRequest

if TYPE_CHECKING:
    from collections.abc import Sequence

    from twostroke.lab.bench.answers import MeasuredAnswer
    from twostroke.lab.bench.prompts import PromptWriter
    from twostroke.lab.bench.request_form import RequestForm
    from twostroke.lab.simulator.load import Workload

DEFAULT_TOOL_RESULT: Final = 256
_MAX_TURNS: Final = 1000
_MAX_CALL_TOKENS: Final = 128  # the call below has about 20
_TOOL_NAME: Final = "look_up"
_TOPICS: Final = ("weather", "news", "stocks", "sports", "travel", "music", "books", "food")
# Few values, so that the call of any model is short and complete.
TOOLS: Final = [
    {
        "type": "function",
        "function": {
            "name": _TOOL_NAME,
            "description": "Look up facts about a topic.",
            "parameters": {
                "type": "object",
                "properties": {"topic": {"type": "string", "enum": list(_TOPICS)}},
                "required": ["topic"],
                "additionalProperties": False,
            },
        },
    }
]


class ConversationShape(Frozen):
    """How the requests of a conversation follow each other.

    A turn is a message of the user, then `num_calls` tool calls with their results, then the
    answer. Each tool call, and the answer, is the result of one request.

    Attributes:
        num_turns: turns of a conversation.
        think_s: seconds from an answer to the user's next message.
        num_calls: tool calls before the answer of each turn.
        tool_result: tokens of the result of a tool.
        tool_s: seconds that a tool takes.
    """

    num_turns: int = 1
    think_s: float = 0.0
    num_calls: int = 0
    tool_result: int = DEFAULT_TOOL_RESULT
    tool_s: float = 0.0

    def __post_init__(self) -> None:
        """Raise UsageError, with the field, if a number is out of range."""
        check_range(self, "num_turns", low=1, high=_MAX_TURNS)
        check_range(self, "num_calls", low=0, high=_MAX_TURNS)
        check_range(self, "tool_result", low=1, high=1 << 20)
        check_range(self, "think_s", "tool_s", low=0, high=1e6)

    @property
    def num_requests(self) -> int:
        """The number of requests of a conversation."""
        return self.num_turns * (self.num_calls + 1)


class ConversationSource:
    """Requests of conversations; each further request needs the answer to the previous one."""

    def __init__(
        self,
        workload: Workload,
        shape: ConversationShape,
        writer: PromptWriter,
        form: RequestForm,
        *,
        has_tools: bool,
    ) -> None:
        """Make conversations from a workload that has an arrival for each request.

        The arrivals have the lengths of messages and answers. A conversation starts at the time of
        its first arrival. Without `has_tools`, calls and results are sent as plain messages.

        Raises:
            UsageError: the API is not chat.
        """
        if form.api != "chat":
            raise UsageError("has no conversations: use chat.", field="api")
        self._workload = workload
        self._shape = shape
        self._writer = writer
        self._form = form
        self._call_form = form
        if has_tools and shape.num_calls:
            # A call ends by itself, and an answer may become one, so no end is ignored.
            fields = {**form.extra_fields, "tools": TOOLS, "parallel_tool_calls": False}
            form = replace(form, ignores_end=False)
            self._form = replace(form, extra_fields={**fields, "tool_choice": "auto"})
            call_fields = {**fields, "tool_choice": "required"}
            self._call_form = replace(form, extra_fields=call_fields)
        self._has_tools = has_tools
        self._histories: dict[int, list[dict[str, Any]]] = {}  # by conversation

    @property
    def count(self) -> int:
        """The number of conversations."""
        return len(self._workload.arrivals) // self._shape.num_requests

    def at_s(self, number: int) -> float:
        """Return when a conversation starts, in seconds after the start of the run."""
        return self._workload.arrivals[number * self._shape.num_requests].at_s

    def request(self, number: int) -> PlannedRequest:
        """Return the first request of a conversation."""
        self._histories[number] = []
        return self._planned(number, 0, None)

    def following(self, planned: PlannedRequest, answer: MeasuredAnswer) -> PlannedRequest | None:
        """Return the request after an answer; None at the end of the conversation.

        `planned` is the request that was answered. A conversation ends with a request that fails.
        """
        conversation = planned.number // self._shape.num_requests
        index = planned.number % self._shape.num_requests + 1
        if index == self._shape.num_requests or not answer.is_completed or answer.reply is None:
            del self._histories[conversation]
            return None
        self._histories[conversation].append(answer.reply.message())
        return self._planned(conversation, index, answer)

    def _planned(
        self, conversation: int, index: int, last_answer: MeasuredAnswer | None
    ) -> PlannedRequest:
        shape = self._shape
        number = conversation * shape.num_requests + index
        arrival = self._workload.arrivals[number]
        turn, step = divmod(index, shape.num_calls + 1)
        is_result, is_call = step > 0, step < shape.num_calls
        num_new = shape.tool_result if is_result else arrival.num_prompt
        text = self._writer.write(replace(arrival, num_prompt=num_new), number)
        history = self._histories[conversation]
        calls = last_answer.reply.calls if is_result and last_answer and last_answer.reply else ()
        if calls:
            history += [
                {"role": "tool", "tool_call_id": call["id"], "content": text} for call in calls
            ]
        else:
            history.append({"role": "user", "content": text})
        num_known = 0
        if last_answer is not None:
            num_known = last_answer.log.num_prompt + last_answer.log.num_output
        max_output = arrival.num_output
        if is_call and self._has_tools:
            max_output = _MAX_CALL_TOKENS
        form = self._call_form if is_call else self._form
        return PlannedRequest(
            number,
            form.body(history, max_output),
            # The tokens of the tools are not known before the first answer.
            num_prompt=num_known + num_new if num_known or not self._has_tools else 0,
            num_output=max_output,
            turn=turn + 1,
            wants_call=is_call and self._has_tools,
            num_reusable=num_known,
            pause_s=0.0 if index == 0 else shape.tool_s if is_result else shape.think_s,
        )


class TurnFigures(Frozen):
    """The figures of one turn over all conversations.

    Attributes:
        turn: from 1 on.
        num_requests: completed requests.
        mean_prompt: mean tokens of a prompt.
        cached_share: share of the prompt tokens that came from the prefix cache, as the server
            reports.
        reusable_share: share of the prompt tokens that the previous request had computed.
        ttft_p50_s, ttft_p90_s: TTFT.
        tpot_p50_s: TPOT; None if all answers have one token.
    """

    turn: int
    num_requests: int
    mean_prompt: float
    cached_share: float
    reusable_share: float
    ttft_p50_s: float
    ttft_p90_s: float
    tpot_p50_s: float | None


def turn_figures(answers: Sequence[MeasuredAnswer]) -> list[TurnFigures]:
    """Return the figures of each turn; empty for a load without conversations."""
    figures = []
    for turn in sorted({answer.turn for answer in answers if answer.turn}):
        completed = [answer for answer in answers if answer.turn == turn and answer.is_completed]
        if not completed:
            continue
        num_prompt = sum(answer.log.num_prompt for answer in completed)
        ttft = np.quantile([answer.log.timings.ttft_s for answer in completed], (0.5, 0.9))
        tpot = [answer.log.timings.tpot_s(answer.log.num_output) for answer in completed]
        further = [value for value in tpot if value is not None]
        figures.append(
            TurnFigures(
                turn=turn,
                num_requests=len(completed),
                mean_prompt=num_prompt / len(completed),
                cached_share=sum(answer.log.num_cached for answer in completed) / num_prompt,
                reusable_share=sum(answer.num_reusable for answer in completed) / num_prompt,
                ttft_p50_s=float(ttft[0]),
                ttft_p90_s=float(ttft[1]),
                tpot_p50_s=float(np.median(further)) if further else None,
            )
        )
    return figures
