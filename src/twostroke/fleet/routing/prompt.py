"""Reads the facts for routing from a request's body: the prompt's blocks, the model, the limits."""

from __future__ import annotations

from hashlib import blake2b
from typing import TYPE_CHECKING, Final

import msgspec
from msgspec import Raw

from twostroke.core.changing_lines import without_changing_json_lines
from twostroke.core.frozen import Frozen
from twostroke.fleet.routing.dispatch import RoutingKey
from twostroke.server.http.answer_limits import ANSWER_FIELDS, AnswerFields
from twostroke.server.http.body_limits import nesting_of

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from twostroke.core.prompt_partings import Parting

_SHORT_BLOCK_BYTES: Final = 512
_LONG_BLOCK_BYTES: Final = 2048  # after the first short blocks, for fewer keys
_NUM_SHORT_BLOCKS: Final = 4
# The fields that make up the prompt, in the order in which templates write them.
_PROMPT_FIELDS: Final = (
    *("tools", "system", "instructions", "messages", "input_extra", "input_prefix", "prompt"),
    "input",
)
_TOKEN_BYTES: Final = 4  # the average of English text
_LIMIT_FIELDS: Final = ("max_tokens", "max_completion_tokens", "max_output_tokens", "n_predict")
_COUNT_FIELDS: Final = ("n", "n_cmpl", "best_of")
_UNKNOWN_PATH_FIELDS: Final = AnswerFields(
    counts=_COUNT_FIELDS, has_best_of=True
)  # a path that only servers of others have
_MAX_NAME_BYTES: Final = 1024  # of a model's name, since the router remembers names
_MAX_PROMPTS: Final = 10_000  # lists of tokens that are decoded; servers accept fewer
_MAX_TOKENS: Final = 1 << 40  # of one request, the limit of a token bucket's arithmetic
_STABLE_BYTES: Final = 64 * 1024  # of a prompt in which lines that change are looked for
_NONE: Final = Raw()
JSON_ERRORS: Final = (msgspec.MsgspecError, RecursionError, UnicodeDecodeError)
FALSE_VALUES: Final = frozenset(
    (b"", b"false", b"null", b"0")
)  # some servers accept 1 and "true" as true


class _PromptBody(msgspec.Struct):
    """The fields of a request's JSON body that the router reads, for all protocols.

    Their values stay undecoded, so that a wrong value is no error here: the replica reports it.
    """

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


class TracedPrompt(Frozen):
    """Facts about a prompt's text from which `--record-trace` finds shared prefixes.

    Attributes:
        hashes: a hash for each block of the prompt, which covers all earlier blocks, too.
        parting: the point, in bytes, at which the prompt begins to differ from the most similar
            earlier prompt of its tenant; None if no earlier prompt begins like it.
    """

    hashes: Sequence[int]
    parting: Parting | None


class RoutedPrompt(Frozen):
    """The facts that the router reads from a request's body; empty strings for missing fields.

    Attributes:
        key: the routing key.
        num_tokens: estimated number of prompt tokens, from the size of the body.
        model: the model's name.
        previous: id of the stored answer or conversation that the request continues.
        service_tier: the service tier.
        priority: the priority, if the request has one.
        num_prompts: number of prompts in the body.
        limits: whole numbers in fields about the length or the number of answers, by field.
        in_background: whether the response is sent before the answer is complete.
        traced: facts about the prompt for a recorded trace; None without a trace.
    """

    key: RoutingKey
    num_tokens: int
    model: str = ""
    previous: str = ""
    service_tier: str = ""
    priority: int | None = None
    num_prompts: int = 1
    limits: Mapping[str, int] = {}
    in_background: bool = False
    traced: TracedPrompt | None = None

    def max_answer_tokens(self, path: str, context_length: int, *, is_foreign: bool = False) -> int:
        """Return the maximum number of tokens of all answers to the request on a path.

        With `is_foreign`, a server other than Twostroke may answer. If the request has several
        limit fields, it is unknown which field that server obeys, so the largest counts. On
        OpenAI's paths, fields that only llama-server has do not count as limits then.
        """
        fields = ANSWER_FIELDS.get(path, _UNKNOWN_PATH_FIELDS)
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
    """The options in Ollama's requests that limit the answer."""

    num_predict: Raw = _NONE


class _Reference(msgspec.Struct):
    """A request's reference to a stored conversation."""

    id: Raw = _NONE


_reference_decoder: Final = msgspec.json.Decoder(_Reference)
_body_decoder: Final = msgspec.json.Decoder(_PromptBody)
_options_decoder: Final = msgspec.json.Decoder(_Options)


def read_prompt(
    body: bytes,
    salt: bytes,
    *,
    stable_prefix: bool = False,
    trace: Callable[[bytes], TracedPrompt | None] = lambda _text: None,
) -> RoutedPrompt:
    """Return the fields of a request body that routing uses.

    If the body is not a JSON object, only its size is used. Tenants do not share KV pages, so each
    tenant has its own `salt`, which becomes part of the hashes. With `stable_prefix`, lines that
    change with each request are left out of the routing key, since the replicas remove them.
    `trace` returns the facts for a recorded trace, from the prompt's text.
    """
    num_tokens = len(body) // _TOKEN_BYTES
    try:
        fields = _body_decoder.decode(body)
    except JSON_ERRORS:
        return RoutedPrompt(RoutingKey((), len(body), _hash(salt)), num_tokens)
    model = _text(fields.model)[:_MAX_NAME_BYTES]
    salt += model.encode()
    # A conversation grows at the end of a list or a text, so the closing characters are left out.
    text = b"".join([bytes(getattr(fields, name)).rstrip(b']"') for name in _PROMPT_FIELDS])
    if stable_prefix:
        beginning = without_changing_json_lines(text[:_STABLE_BYTES])
        text = beginning + text[_STABLE_BYTES:]
    keys = block_keys(text, salt)
    if conversation := _text(fields.prompt_cache_key):
        affinity = _hash(salt + conversation.encode())
    else:
        affinity = keys[0] if keys else _hash(salt + text)
    return RoutedPrompt(
        key=RoutingKey(keys, len(text), affinity),
        num_tokens=num_tokens,
        model=model,
        previous=_text(fields.previous_response_id) or _conversation_id(fields.conversation),
        service_tier=_text(fields.service_tier),
        priority=_number(fields.priority),
        num_prompts=_num_prompts(fields.prompt),
        limits=_limits_of(fields),
        in_background=bytes(fields.background) not in FALSE_VALUES,
        traced=trace(text),
    )


def key_without_prompt(salt: bytes) -> RoutingKey:
    """Return the routing key of a request without a prompt, such as a request for a stored answer.

    All such requests of a tenant have the same key.
    """
    return RoutingKey(block_keys=(), num_units=0, affinity=_hash(salt))


def _conversation_id(raw: Raw) -> str:
    """Return the id of a stored conversation, which is a string or an object with an `id`."""
    try:
        return _text(raw) or _text(_reference_decoder.decode(raw).id)
    except JSON_ERRORS:
        return ""


def block_keys(text: bytes, salt: bytes) -> tuple[int, ...]:
    """Return a 64-bit key for each full block of a prompt's text, for the prefix tree.

    A key is a hash of the text from its beginning to the end of the block, and of the tenant's
    `salt`. A rest that fills no block (512 bytes, later 2048) has no key.
    """
    digest = blake2b(salt, digest_size=8).digest()
    keys: list[int] = []
    start, end = 0, bytes_of_blocks(1)
    while end <= len(text):
        digest = blake2b(digest + text[start:end], digest_size=8).digest()
        keys.append(int.from_bytes(digest))
        start, end = end, bytes_of_blocks(len(keys) + 1)
    return tuple(keys)


def bytes_of_blocks(num_blocks: int) -> int:
    """Return the total size of a prompt's first blocks, in bytes."""
    num_short = min(num_blocks, _NUM_SHORT_BLOCKS)
    return _SHORT_BLOCK_BYTES * num_short + _LONG_BLOCK_BYTES * (num_blocks - num_short)


def _hash(text: bytes) -> int:
    return int.from_bytes(blake2b(text, digest_size=8).digest())


def _text(raw: Raw) -> str:
    """Decode a JSON value that is a string; return an empty string for any other value."""
    try:
        return msgspec.json.decode(raw, type=str) if bytes(raw)[:1] == b'"' else ""
    except JSON_ERRORS:
        return ""


def _number(raw: Raw) -> int | None:
    """Decode a JSON value that is a number, and return it as an integer; None for other values.

    Numbers in strings are read, too, since some servers accept them.
    """
    try:
        return int(float(_text(raw) or bytes(raw))) if raw else None
    except (ValueError, OverflowError):
        return None


def _limits_of(body: _PromptBody) -> dict[str, int]:
    """Return the fields of a body that limit the length or number of answers, by name.

    Only whole numbers count, since servers refuse other values. Numbers of answers may also be
    strings, since some servers accept these.
    """
    limits = {name: _whole_number(getattr(body, name)) for name in _LIMIT_FIELDS}
    if bytes(body.options)[:1] == b"{":
        limits["num_predict"] = _whole_number(_options_decoder.decode(body.options).num_predict)
    limits |= {name: _number(getattr(body, name)) for name in _COUNT_FIELDS}
    return {name: limit for name, limit in limits.items() if limit is not None}


def _whole_number(raw: Raw) -> int | None:
    """Decode a JSON value that is a whole number, such as 5, 5.0 or 5e0; None for other values."""
    try:
        number = msgspec.json.decode(raw, type=int | float) if raw else None
    except JSON_ERRORS:
        return None
    is_whole = isinstance(number, int) or (number is not None and number.is_integer())
    return int(number) if number is not None and is_whole else None


def _num_prompts(raw: Raw) -> int:
    """Return the number of prompts in a request's field `prompt`.

    A list of strings or of token lists has several prompts. A list of tokens is one prompt, also if
    it is mixed with strings.
    """
    text = bytes(raw)
    if text[:1] != b"[" or (b'"' not in text and text.count(b"[") == 1):
        return 1
    if nesting_of(text, _MAX_PROMPTS).num_containers > _MAX_PROMPTS:
        return text.count(b",") + 1
    try:
        prompts = msgspec.json.decode(raw)
    except JSON_ERRORS:
        return text.count(b",") + 1
    is_several = any(isinstance(prompt, (list, dict)) for prompt in prompts) or all(
        isinstance(prompt, str) for prompt in prompts
    )
    return max(1, len(prompts)) if is_several else 1
