"""The messages between a decode engine and a prefill engine.

They are sent by a `Connection` (`core/transport/connection.py`). Names of classes and fields are
not sent, only the tags and the order of the fields. No message holds a path or a file descriptor.
Only `NixlJoin` and `NixlJoined` hold memory addresses: engines that move pages by NIXL have proved
the secret before. With the mode `SENT` the bytes of the pages follow the frame of their `Content`.

Models with recurrent layers also have `OfferState` and `FetchState`. The bytes of a snapshot always
follow its `Content`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import msgspec

from twostroke.core.frozen import Frozen
from twostroke.core.transport.frames import MessageFormat

if TYPE_CHECKING:
    from twostroke.engine.kv_offload.tier import KvCacheSpec

VERSION: Final = 2  # of the protocol: raise it when a message changes

# The mode of a fetch: how the bytes of pages get to the decode engine.
COPIED: Final = "copied"  # the decode engine reads them from shared memory or by NIXL
SENT: Final = "sent"  # the prefill engine sends them after a `Content`
WRITTEN: Final = "written"  # the prefill engine writes them by NIXL, before the `Content`

# How two engines differ, for each field of `KvCacheSpecMessage`.
_DIFFERENCES: Final = {
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
    """The `KvCacheSpec` as a message: engines exchange KV pages only if all fields are equal."""

    model: str
    kv_format: str
    page_size: int
    windows: tuple[int | None, ...]
    page_bytes: int
    arithmetic: str
    only_prompts: bool
    version: int

    @classmethod
    def of(cls, spec: KvCacheSpec) -> KvCacheSpecMessage:
        """Return the message for a spec of KV pages."""
        return cls(
            model=spec.model,
            kv_format=spec.kv_format,
            page_size=spec.groups.page_size,
            windows=spec.groups.windows,
            page_bytes=spec.page_bytes,
            arithmetic=spec.arithmetic,
            only_prompts=spec.only_prompts,
            version=spec.version,
        )

    def difference(self, other: KvCacheSpecMessage) -> str | None:
        """Return a phrase for the first field in which the spec `other` differs; None if equal."""
        for name, phrase in _DIFFERENCES.items():
            if getattr(self, name) != getattr(other, name):
                return phrase
        return None


class NixlAddress(Frozen, array_like=True):
    """How another engine reaches an engine's KV pages by NIXL.

    Attributes:
        metadata: NIXL's description of the agent.
        pages: address of the engine's first page, in its NIXL process.
        probe: address of unused memory, for measuring the link.
    """

    metadata: bytes
    pages: int
    probe: int


# Messages from the decode engine. `id` numbers the prompts of a connection, in ascending order.


class DecodeHello(Frozen, array_like=True, tag=1):
    """The first message of a connection, from the decode engine to the prefill engine."""

    version: int
    spec: KvCacheSpecMessage


class PrefillPrompt(Frozen, array_like=True, tag=2):
    """A decode engine's message: prefill a prompt, and offer its full pages when computed.

    Attributes:
        id: the number of the prompt.
        tokens: the prompt, up to the end of its last full page.
        salt: the salt of its page keys.
        first_pages: index of the first page to offer, for each cache group.
        priority: priority of the request.
    """

    id: int
    tokens: list[int]
    salt: bytes
    first_pages: tuple[int, ...]
    priority: int = 0


class FetchPages(Frozen, array_like=True, tag=3):
    """A decode engine's message: fetch some of the KV pages that an `Offer` has leased.

    Attributes:
        number: the number of this fetch, in ascending order.
        id: the number of the prompt.
        offer: the number of the offer.
        indices: which pages of the offer to fetch. With the mode `COPIED` the decode engine has
            copied the pages already, and the answer, `Content`, says whether the copies may be
            used.
        is_last: whether no other page of the offer will be fetched, so that the lease ends.
        mode: how the pages get to the decode engine: `COPIED`, `SENT` or `WRITTEN`.
        targets: with `WRITTEN`, the pages of the decode engine to write to.
    """

    number: int
    id: int
    offer: int
    indices: list[int]
    is_last: bool
    mode: str = COPIED
    targets: list[int] = msgspec.field(default_factory=list)


class Abort(Frozen, array_like=True, tag=4):
    """A decode engine's message: stop prefilling a prompt, whose pages are not needed any more."""

    id: int


class NixlJoin(Frozen, array_like=True, tag=5):
    """A decode engine's message: set up NIXL if both engines can use it.

    It has the NIXL address of the decode engine.
    """

    address: NixlAddress


class NixlProbe(Frozen, array_like=True, tag=6):
    """A decode engine's message: transfer unused memory by NIXL, to measure the link.

    The memory has `nixl.PROBE_BYTES` bytes. `Content` is the answer.
    """

    number: int
    mode: str


class FetchState(Frozen, array_like=True, tag=7):
    """A decode engine's message: send the snapshot that an `OfferState` has leased.

    Attributes:
        number: the number of this fetch, as in `FetchPages`.
        id: the number of the prompt.
        offer: the number of the offer.
    """

    number: int
    id: int
    offer: int


DecodeMessage = DecodeHello | PrefillPrompt | FetchPages | Abort | NixlJoin | NixlProbe | FetchState

# Messages from the prefill engine.


class Welcome(Frozen, array_like=True, tag=1):
    """The prefill engine's answer to `DecodeHello`, with the number of its KV pages."""

    version: int
    spec: KvCacheSpecMessage
    num_pages: int


class Refused(Frozen, array_like=True, tag=2):
    """The prefill engine's answer to the `DecodeHello` of an engine that cannot use its pages."""

    reason: str


class Offer(Frozen, array_like=True, tag=3):
    """A prefill engine's message: computed KV pages, leased to the decode engine.

    Attributes:
        id: the number of the prompt.
        number: the number of the offer.
        pages: for each page its cache group, its index in the prompt, and its number in the pool.
    """

    id: int
    number: int
    pages: list[tuple[int, int, int]]


class Content(Frozen, array_like=True, tag=4):
    """The prefill engine's answer to a fetch or a `NixlProbe`; the bytes of KV pages follow it.

    There are `num_bytes` bytes, 0 if the pages are not sent by the socket. The pages must not be
    used if `is_valid` is false: the lease has ended or NIXL has failed.
    """

    number: int
    is_valid: bool
    num_bytes: int = 0


class PrefillFinished(Frozen, array_like=True, tag=5):
    """A prefill engine's message: no more pages of a prompt will be offered.

    `fault` says why the prefill failed, if it did.
    """

    id: int
    fault: str | None = None


class PrefillLoad(Frozen, array_like=True, tag=6):
    """The load of the prefill engine, sent to decode engines twice a second.

    Attributes:
        queue_flops: work of all prompts that wait or are prefilled, in FLOPs.
        flops_per_s: speed of prefill; 0 until it has been measured.
        last_id: number of the newest prompt from this decode engine that `queue_flops` includes.
    """

    queue_flops: float
    flops_per_s: float
    last_id: int = 0


class NixlJoined(Frozen, array_like=True, tag=7):
    """The answer to `NixlJoin`: the prefill engine's NIXL address, or why it has none."""

    address: NixlAddress | None
    reason: str = ""


class OfferState(Frozen, array_like=True, tag=8):
    """A prefill engine's message: a snapshot of the recurrent states, leased to the decode engine.

    Attributes:
        id: the number of the prompt.
        number: the number of the offer.
        num_pages: the number of the prompt's pages that the snapshot follows.
    """

    id: int
    number: int
    num_pages: int


PrefillMessage = (
    Welcome | Refused | Offer | Content | PrefillFinished | PrefillLoad | NixlJoined | OfferState
)

RECEIVED_BY_PREFILL: Final[MessageFormat[DecodeMessage]] = MessageFormat(DecodeMessage)
RECEIVED_BY_DECODE: Final[MessageFormat[PrefillMessage]] = MessageFormat(PrefillMessage)
