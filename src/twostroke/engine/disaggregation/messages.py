"""The messages between a decode engine and a prefill engine.

They travel in frames (`core/transport/frames.py`). No message holds a path or a descriptor, and
none a pointer but `NixlJoin` and `NixlJoined`: engines that move pages by NIXL have proved the
secret before. The pages of a `Content` follow its frame where they travel by the same socket.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import msgspec

from twostroke.core.frozen import Frozen

if TYPE_CHECKING:
    from twostroke.engine.kv_offload.tier import KvCacheSpec

VERSION: Final = 2  # raise it when a message changes

# How pages come to a decode engine.
COPIED: Final = "copied"  # it reads them itself: from shared memory, or by NIXL
SENT: Final = "sent"  # after a `Content`
WRITTEN: Final = "written"  # by NIXL, before the `Content`

# The words for a fact in which two engines differ.
_FACTS: Final = {
    "model": "another model",
    "kv_format": "another format of keys and values (--kv-format)",
    "page_size": "another page size (--page-size)",
    "windows": "other attention windows",
    "arithmetic": "other arithmetic (--backend, --level, --activation-bits)",
    "only_prompts": "another rule for reuse (--strict-prefix)",
    "page_bytes": "pages of another size",
    "version": "another form of pages (its version of Twostroke)",
}


class KvCacheSpecMessage(Frozen, array_like=True):
    """What must be equal for one engine to use the other's pages: the fields of `KvCacheSpec`."""

    model: str
    kv_format: str
    page_size: int
    windows: tuple[int | None, ...]
    page_bytes: int
    arithmetic: str
    only_prompts: bool
    version: int

    @classmethod
    def of(cls, kind: KvCacheSpec) -> KvCacheSpecMessage:
        """Return the form in which a kind travels."""
        return cls(
            kind.model,
            kind.kv_format,
            kind.groups.page_size,
            kind.groups.windows,
            kind.page_bytes,
            kind.arithmetic,
            kind.only_prompts,
            kind.version,
        )

    def difference(self, other: KvCacheSpecMessage) -> str | None:
        """Return words for the first fact in which `other` differs, or None."""
        differ = (name for name in _FACTS if getattr(self, name) != getattr(other, name))
        return next((_FACTS[name] for name in differ), None)


class NixlAddress(Frozen, array_like=True):
    """Where pages can be reached by NIXL: its metadata, and addresses in a carrier's process.

    `pages` is that of the engine's first page, `probe` that of memory of no use.
    """

    metadata: bytes
    pages: int
    probe: int


# To the prefill engine. `id` numbers the prompts of a connection; it only grows.


class PeerHello(Frozen, array_like=True, tag=1):
    """The first message."""

    version: int
    kind: KvCacheSpecMessage


class PrefillPrompt(Frozen, array_like=True, tag=2):
    """Read a prompt, and offer its full pages as they are computed.

    `firsts` are the first places to offer, one for each cache group; the last one is that of the
    last full page of `tokens`. `priority` is the request's.
    """

    id: int
    tokens: list[int]
    salt: bytes
    firsts: tuple[int, ...]
    priority: int = 0


class Fetch(Frozen, array_like=True, tag=3):
    """The answer to an `Offer`: take some of its pages, by their places in it.

    Those that are `COPIED` have been read already; `Content` says whether they may be used.
    `targets` are the pages to which others are to be `WRITTEN`. With `is_last` no other page of the
    offer is wanted. `number` only grows.
    """

    number: int
    id: int
    offer: int
    wanted: list[int]
    is_last: bool
    how: str = COPIED
    targets: list[int] = msgspec.field(default_factory=list)


class Abort(Frozen, array_like=True, tag=4):
    """The pages are not wanted any more."""

    id: int


class NixlJoin(Frozen, array_like=True, tag=5):
    """Move pages by NIXL, if both engines can: the decode engine's place."""

    place: NixlAddress


class NixlProbe(Frozen, array_like=True, tag=6):
    """Move `nixl.PROBE_BYTES` of no use in this way, to measure it, and answer with `Content`."""

    number: int
    how: str


Question = PeerHello | PrefillPrompt | Fetch | Abort | NixlJoin | NixlProbe

# From the prefill engine.


class Welcome(Frozen, array_like=True, tag=1):
    """The answer to `PeerHello`: so many pages there are."""

    version: int
    kind: KvCacheSpecMessage
    num_pages: int


class Refused(Frozen, array_like=True, tag=2):
    """The answer to `PeerHello` of an engine that cannot use the pages."""

    reason: str


class Offer(Frozen, array_like=True, tag=3):
    """Pages that are computed, as (group, place, page). They stay until the lease ends."""

    id: int
    offer: int
    pages: list[tuple[int, int, int]]


class Content(Frozen, array_like=True, tag=4):
    """The answer to `Fetch` or `NixlProbe`. If not `is_valid`, the lease ended or NIXL failed.

    So many bytes of pages follow the frame.
    """

    number: int
    is_valid: bool
    num_bytes: int = 0


class PrefillFinished(Frozen, array_like=True, tag=5):
    """No more is offered of a prompt; `fault` says why it was not read to its end."""

    id: int
    fault: str | None = None


class PrefillLoad(Frozen, array_like=True, tag=6):
    """Sent twice a second: how long the queue is, and the pace of reading prompts.

    `queue_flops` is the work of all prompts that wait or are being read; `flops_per_s` is 0 until
    it was measured. `last_id` is the newest prompt that is counted.
    """

    queue_flops: float
    flops_per_s: float
    last_id: int = 0


class NixlJoined(Frozen, array_like=True, tag=7):
    """The answer to `NixlJoin`: the prefill engine's place, or why it has none."""

    place: NixlAddress | None
    reason: str = ""


Answer = Welcome | Refused | Offer | Content | PrefillFinished | PrefillLoad | NixlJoined

questions: Final[msgspec.msgpack.Decoder[Question]] = msgspec.msgpack.Decoder(Question)
answers: Final[msgspec.msgpack.Decoder[Answer]] = msgspec.msgpack.Decoder(Answer)
encoder: Final = msgspec.msgpack.Encoder()
