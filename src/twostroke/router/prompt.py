"""Reads of a request what routing needs: its prompt's blocks, its model, its conversation."""

from __future__ import annotations

from hashlib import blake2b
from typing import Final

import msgspec
from msgspec import Raw

from twostroke.core.frozen import Frozen
from twostroke.router.dispatch import Asked

_SHORT: Final = 512
_LONG: Final = 2048  # after the first short ones: fewer keys for the same text
_NUM_SHORT: Final = 4
_PARTS: Final = ("tools", "system", "instructions", "messages", "prompt", "input")
_NONE: Final = Raw()


class _Body(msgspec.Struct):
    """The fields that count, as they were sent; no value of them is wrong here."""

    model: Raw = _NONE
    tools: Raw = _NONE
    system: Raw = _NONE
    instructions: Raw = _NONE
    messages: Raw = _NONE
    prompt: Raw = _NONE
    input: Raw = _NONE
    prompt_cache_key: Raw = _NONE
    previous_response_id: Raw = _NONE


class Prompt(Frozen):
    """What a body says; empty strings where it says nothing."""

    asked: Asked
    model: str = ""
    previous: str = ""


_decoder: Final = msgspec.json.Decoder(_Body)


def read_prompt(body: bytes, salt: bytes) -> Prompt:
    """Return what a body says; of one that is not a JSON object, only its size.

    The salt tells tenants apart, whose pages are not shared.
    """
    try:
        found = _decoder.decode(body)
    except msgspec.MsgspecError:
        return Prompt(Asked((), len(body), _hash(salt)))
    model = _text(found.model)
    salt += model.encode()
    # A conversation grows at the end of a list or a text: what closes these does not count.
    text = b"".join([bytes(getattr(found, name)).rstrip(b']"') for name in _PARTS])
    keys = block_keys(text, salt)
    if conversation := _text(found.prompt_cache_key):
        affinity = _hash(salt + conversation.encode())
    else:
        affinity = keys[0] if keys else _hash(salt + text)
    return Prompt(Asked(keys, len(text), affinity), model, _text(found.previous_response_id))


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
    except msgspec.MsgspecError:
        return ""
