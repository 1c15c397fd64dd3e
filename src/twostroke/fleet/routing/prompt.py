"""Reads of a request what routing needs: its prompt's blocks, its model, its conversation."""

from __future__ import annotations

from hashlib import blake2b
from typing import TYPE_CHECKING, Final

import msgspec
from msgspec import Raw

from twostroke.core.frozen import Frozen
from twostroke.fleet.routing.dispatch import RoutingKey
from twostroke.server.http.answer_limits import ANSWER_FIELDS, AnswerFields
from twostroke.server.http.body_limits import nesting_of

if TYPE_CHECKING:
    from collections.abc import Mapping

_SHORT: Final = 512
_LONG: Final = 2048  # after the first short ones: fewer keys for the same text
_NUM_SHORT: Final = 4
_PARTS: Final = (
    *("tools", "system", "instructions", "messages", "input_extra", "input_prefix", "prompt"),
    "input",
)
_TOKEN_BYTES: Final = 4  # about as many as a token of English has
_LIMITS: Final = ("max_tokens", "max_completion_tokens", "max_output_tokens", "n_predict")
_COUNTS: Final = ("n", "n_cmpl", "best_of")
_UNKNOWN: Final = AnswerFields(
    counts=_COUNTS, has_best_of=True
)  # a path that only servers of others have
_MOST_NAME: Final = 1024  # of a model's name, which the fleet remembers: longer ones are of none
_MOST_PROMPTS: Final = 10_000  # lists of tokens: more than servers take are not decoded here
_MAX_TOKENS: Final = 1 << 40  # of one request: more would not fit a bucket's arithmetic
_NONE: Final = Raw()
UNREADABLE: Final = (msgspec.MsgspecError, RecursionError, UnicodeDecodeError)  # JSON of others
FALSE: Final = frozenset((b"", b"false", b"null", b"0"))  # some servers take 1 and "true"


class _PromptBody(msgspec.Struct):
    """The fields that count, as they were sent; no value of them is wrong here."""

    model: Raw = _NONE
    tools: Raw = _NONE
    system: Raw = _NONE
    instructions: Raw = _NONE
    messages: Raw = _NONE
    input_extra: Raw = _NONE
    input_prefix: Raw = _NONE
    prompt: Raw = _NONE
    input: Raw = _NONE
    prompt_cache_key: Raw = _NONE
    previous_response_id: Raw = _NONE
    conversation: Raw = _NONE
    service_tier: Raw = _NONE
    priority: Raw = _NONE
    n: Raw = _NONE
    n_cmpl: Raw = _NONE
    best_of: Raw = _NONE
    max_tokens: Raw = _NONE
    max_completion_tokens: Raw = _NONE
    max_output_tokens: Raw = _NONE
    n_predict: Raw = _NONE
    options: Raw = _NONE
    background: Raw = _NONE


class RoutedPrompt(Frozen):
    """What a body says; empty strings where it says nothing.

    `previous` is the id of the stored answer or conversation that it continues.

    `num_tokens` is estimated from the size of the body. `limits` are the whole numbers in fields
    about the length or the number of answers, by the field's name. With `in_background` the
    response is sent before the answer is complete.
    """

    asked: RoutingKey
    num_tokens: int
    model: str = ""
    previous: str = ""
    service: str = ""
    priority: int | None = None
    num_prompts: int = 1
    limits: Mapping[str, int] = {}
    in_background: bool = False

    def max_answer_tokens(self, path: str, context_length: int, *, is_foreign: bool = False) -> int:
        """Return how many tokens all answers on a path may have.

        With `is_foreign`, a server other than Twostroke may answer. It is not known which of
        several fields that server follows, so the largest counts. Fields that only llama-server
        has count as no limit.
        """
        fields = ANSWER_FIELDS.get(path, _UNKNOWN)
        limits = dict(self.limits)
        if is_foreign and fields.limits:
            if path.startswith("/v1/"):
                limits.pop("n_predict", None)
            own_limits = [limits[name] for name in fields.limits if name in limits]
            is_unlimited = not own_limits or min(own_limits) <= 0
            limits[fields.limits[0]] = -1 if is_unlimited else max(own_limits)
        num_tokens = fields.num_tokens(limits, context_length)
        num_prompts = self.num_prompts if fields.has_several_prompts or is_foreign else 1
        return min(num_prompts * fields.num_answers(limits) * num_tokens, _MAX_TOKENS)


class _Options(msgspec.Struct):
    """Ollama's options that count."""

    num_predict: Raw = _NONE


class _Reference(msgspec.Struct):
    """A stored conversation."""

    id: Raw = _NONE


_references: Final = msgspec.json.Decoder(_Reference)
_decoder: Final = msgspec.json.Decoder(_PromptBody)
_options: Final = msgspec.json.Decoder(_Options)


def read_prompt(body: bytes, salt: bytes) -> RoutedPrompt:
    """Return what a body says; of one that is not a JSON object, only its size.

    The salt tells tenants apart, whose pages are not shared.
    """
    num_tokens = len(body) // _TOKEN_BYTES
    try:
        found = _decoder.decode(body)
    except UNREADABLE:
        return RoutedPrompt(RoutingKey((), len(body), _hash(salt)), num_tokens)
    model = _text(found.model)[:_MOST_NAME]
    salt += model.encode()
    # A conversation grows at the end of a list or a text: what closes these does not count.
    text = b"".join([bytes(getattr(found, name)).rstrip(b']"') for name in _PARTS])
    keys = block_keys(text, salt)
    if conversation := _text(found.prompt_cache_key):
        affinity = _hash(salt + conversation.encode())
    else:
        affinity = keys[0] if keys else _hash(salt + text)
    return RoutedPrompt(
        RoutingKey(keys, len(text), affinity),
        num_tokens,
        model,
        _text(found.previous_response_id) or _conversation_id(found.conversation),
        _text(found.service_tier),
        _number(found.priority),
        _num_prompts(found.prompt),
        _limits_of(found),
        bytes(found.background) not in FALSE,
    )


def _conversation_id(raw: Raw) -> str:
    """Return the id of a stored conversation, which is a text or an object with one."""
    try:
        return _text(raw) or _text(_references.decode(raw).id)
    except UNREADABLE:
        return ""


def block_keys(text: bytes, salt: bytes) -> tuple[int, ...]:
    """Return a 64-bit key for each full block of a text, each a hash of all up to its end."""
    digest = blake2b(salt, digest_size=8).digest()
    keys, at, end = [], 0, extent(1)
    while end <= len(text):
        digest = blake2b(digest + text[at:end], digest_size=8).digest()
        keys.append(int.from_bytes(digest))
        at, end = end, extent(len(keys) + 1)
    return tuple(keys)


def extent(num_blocks: int) -> int:
    """Return how many bytes the first blocks have."""
    if num_blocks <= _NUM_SHORT:
        return _SHORT * num_blocks
    return _SHORT * _NUM_SHORT + _LONG * (num_blocks - _NUM_SHORT)


def _hash(text: bytes) -> int:
    return int.from_bytes(blake2b(text, digest_size=8).digest())


def _text(raw: Raw) -> str:
    """Return a value that is a string; of any other, an empty one."""
    try:
        return msgspec.json.decode(raw, type=str) if bytes(raw)[:1] == b'"' else ""
    except UNREADABLE:
        return ""


def _number(raw: Raw) -> int | None:
    """Return a value that is a number, also in quotes, as some servers read it; else None."""
    try:
        return int(float(_text(raw) or bytes(raw))) if raw else None
    except (ValueError, OverflowError):
        return None


def _limits_of(body: _PromptBody) -> dict[str, int]:
    """Return the fields that limit answers and have whole numbers; servers refuse other values.

    Numbers of answers in quotes count, too, since some servers read them.
    """
    limits = {name: _whole_number(getattr(body, name)) for name in _LIMITS}
    if bytes(body.options)[:1] == b"{":
        limits["num_predict"] = _whole_number(_options.decode(body.options).num_predict)
    limits |= {name: _number(getattr(body, name)) for name in _COUNTS}
    return {name: limit for name, limit in limits.items() if limit is not None}


def _whole_number(raw: Raw) -> int | None:
    """Return a whole number, which may be written as 5.0 or 5e0; None for anything else."""
    try:
        number = msgspec.json.decode(raw, type=int | float) if raw else None
    except UNREADABLE:
        return None
    is_whole = isinstance(number, int) or (number is not None and number.is_integer())
    return int(number) if number is not None and is_whole else None


def _num_prompts(raw: Raw) -> int:
    """Return how many prompts there are: in a list of texts, or with lists of tokens.

    A list of tokens and texts without lists inside is one prompt.
    """
    text = bytes(raw)
    if text[:1] != b"[" or (b'"' not in text and text.count(b"[") == 1):
        return 1
    if nesting_of(text, _MOST_PROMPTS).num_containers > _MOST_PROMPTS:
        return text.count(b",") + 1
    try:
        prompts = msgspec.json.decode(raw)
    except UNREADABLE:
        return text.count(b",") + 1
    is_several = any(isinstance(prompt, (list, dict)) for prompt in prompts) or all(
        isinstance(prompt, str) for prompt in prompts
    )
    return max(1, len(prompts)) if is_several else 1
