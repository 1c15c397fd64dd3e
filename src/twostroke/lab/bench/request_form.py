"""How requests to an endpoint are written, and requests that are ready to be sent."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import msgspec

from twostroke.core.errors import UsageError
from twostroke.core.frozen import Frozen

if TYPE_CHECKING:
    from collections.abc import Sequence

    PromptContent = str | Sequence[dict[str, Any]]  # a text, or messages

APIS: Final = ("chat", "completions")
_PATHS: Final = {"chat": "/v1/chat/completions", "completions": "/v1/completions"}
_encode = msgspec.json.Encoder().encode


class RequestForm(Frozen):
    """How requests to an endpoint are written.

    Attributes:
        api: "chat" or "completions".
        model: the model's name; empty if the endpoint needs none.
        limit_field: the name of the field that limits the tokens of an answer.
        counts_chunks: ask for the number of tokens so far in each chunk.
        ignores_end: ask for answers that end only at their limit of tokens.
        is_greedy: ask for temperature 0.
        extra_fields: further fields of each request.
    """

    api: str = "chat"
    model: str = ""
    limit_field: str = "max_tokens"
    counts_chunks: bool = True
    ignores_end: bool = True
    is_greedy: bool = True
    extra_fields: dict[str, Any] = {}  # noqa: RUF012 - msgspec copies it

    @property
    def path(self) -> str:
        """The path of the API."""
        return _PATHS[self.api]

    def body(self, content: PromptContent, max_output: int) -> bytes:
        """Return the body of a request.

        `max_output` is the most tokens of the answer; 0 for no limit.

        Raises:
            UsageError: the content has messages, and the API takes a text.
        """
        fields: dict[str, Any] = {"model": self.model} if self.model else {}
        if self.api == "completions":
            if not isinstance(content, str):
                raise UsageError("has messages, which need --api chat.", field="dataset")
            fields["prompt"] = content
        elif isinstance(content, str):
            fields["messages"] = [{"role": "user", "content": content}]
        else:
            fields["messages"] = content
        if max_output:
            fields[self.limit_field] = max_output
        fields["stream"] = True
        fields["stream_options"] = {"include_usage": True}
        if self.counts_chunks:
            fields["stream_options"]["continuous_usage_stats"] = True
        if self.ignores_end:
            fields["ignore_eos"] = True
        if self.is_greedy:
            fields["temperature"] = 0
        return _encode(fields | self.extra_fields)


class PlannedRequest(Frozen):
    """A request that is ready to be sent.

    Attributes:
        number: its number in the load, from 0 on.
        body: its JSON.
        num_prompt: tokens that its prompt should have; 0 if unknown.
        num_output: the limit of the answer's tokens; 0 for none.
        turn: the turn of a conversation, from 1 on; 0 outside conversations.
        wants_call: whether the answer must be a tool call.
        num_reusable: tokens of the prompt that the conversation's last request computed.
        pause_s: time from the end of the previous answer to this request.
    """

    number: int
    body: bytes
    num_prompt: int = 0
    num_output: int = 0
    turn: int = 0
    wants_call: bool = False
    num_reusable: int = 0
    pause_s: float = 0.0


# Forms to try, from the most to the least that a measurement wants; vendors refuse unknown fields.
FORMS: Final = (
    RequestForm(),
    RequestForm(counts_chunks=False),
    RequestForm(counts_chunks=False, ignores_end=False),
    RequestForm(
        counts_chunks=False,
        ignores_end=False,
        is_greedy=False,
        limit_field="max_completion_tokens",
    ),
)
