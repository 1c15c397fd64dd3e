"""Stored KV pages, and everything that can damage them."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING

from twostroke.engine.kv_offload.tier import KvCacheSpec, PageValue
from twostroke.model.program.kv_layout import PageGroups

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from typing import Any

PAGE_BYTES = 3000
PAGE_VALUE = PageValue(0.01, 0, 1e9)


def kind(**changes: Any) -> KvCacheSpec:
    """Return a `KvCacheSpec` that differs from the usual one in `changes`."""
    usual = {
        "model": "m",
        "kv_format": "f16",
        "page_bytes": PAGE_BYTES,
        "groups": PageGroups(16),
        "arithmetic": "cpu vector 15",
        "only_prompts": False,
    }
    return KvCacheSpec(**{**usual, **changes})


OTHER_KINDS = (
    kind(model="other"),
    kind(kv_format="bf16"),
    kind(groups=PageGroups(32)),
    kind(groups=PageGroups(16, (None, 64))),
    kind(arithmetic="cpu amx 15"),
    kind(arithmetic="cpu vector 8"),
    kind(only_prompts=True),
    kind(version=kind().version + 1),
)


def content_of(number: int) -> bytes:
    """Return the bytes of a page, different for each number."""
    return random.Random(number).randbytes(PAGE_BYTES)


# Each changes what is stored under one name, given its bytes and those of others.


def _flip(rng: random.Random, data: bytes, others: Sequence[bytes]) -> bytes:
    at = rng.randrange(len(data))
    return data[:at] + bytes([data[at] ^ 1 << rng.randrange(8)]) + data[at + 1 :]


def _cut(rng: random.Random, data: bytes, others: Sequence[bytes]) -> bytes:
    return data[: rng.randrange(len(data))]


def _grow(rng: random.Random, data: bytes, others: Sequence[bytes]) -> bytes:
    return data + rng.randbytes(rng.randint(1, 100))


def _swap(rng: random.Random, data: bytes, others: Sequence[bytes]) -> bytes:
    return rng.choice(others)


def _zero(rng: random.Random, data: bytes, others: Sequence[bytes]) -> bytes:
    start = rng.randrange(len(data) - 64)
    return data[:start] + bytes(len(data) - start)


def _splice(rng: random.Random, data: bytes, others: Sequence[bytes]) -> bytes:
    at = rng.randrange(1, len(data) - 1)
    return data[:at] + rng.choice(others)[at:]


def _noise(rng: random.Random, data: bytes, others: Sequence[bytes]) -> bytes:
    return rng.randbytes(len(data))


DAMAGES: dict[str, Callable[[random.Random, bytes, Sequence[bytes]], bytes]] = {
    "a bit flipped": _flip,
    "cut": _cut,
    "longer": _grow,
    "another page": _swap,
    "zeros": _zero,
    "two halves": _splice,
    "noise": _noise,
}
