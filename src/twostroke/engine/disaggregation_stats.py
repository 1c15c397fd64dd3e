"""Statistics of disaggregation: of the prefill side, and of the decode side.

A server's state report contains these structs as JSON. A field whose name differs in JSON declares
that name.
"""

from __future__ import annotations

import msgspec

from twostroke.core.frozen import Frozen


class PrefillSideStats(Frozen):
    """Statistics of an engine that prefills prompts for other engines, which decode them.

    Attributes:
        port: the port on which decode engines connect.
        num_peers: connected decode engines.
        num_prefilling: prompts that are being prefilled for decode engines now.
        num_prompts: prompts prefilled for decode engines since the start.
        num_leased_pages: KV pages offered to decode engines since the start.
        num_expired_leases: offers whose pages were not fetched in time.
    """

    port: int
    num_peers: int
    num_prefilling: int = msgspec.field(name="num_reading")
    num_prompts: int
    num_leased_pages: int = msgspec.field(name="num_pages_lent")
    num_expired_leases: int = msgspec.field(name="num_leases_late")


class PrefillEngineStats(Frozen):
    """Statistics that a decode engine has about one of its prefill engines.

    Rates are 0.0 until they are measured.

    Attributes:
        state: "up", "down" or "refused".
        link: the `title` of the connection's transfer method; "" without a connection.
        num_open: KV transfers from the prefill engine that have not ended.
        queue_flops: the work in the prefill engine's queue, in FLOPs.
        overhead_s: the part of a transfer's mean time that is not queueing, computing or copying.
    """

    address: str
    state: str
    link: str
    num_open: int
    queue_flops: float
    flops_per_s: float
    bytes_per_s: float
    overhead_s: float


class DecodeSideStats(Frozen):
    """Statistics of an engine that decodes prompts which other engines prefill.

    Attributes:
        rule: the rule that decides where a prompt is prefilled, as the option names it.
        decisions: how many prompts were prefilled here or elsewhere, by reason.
        transfers: ended KV transfers, by outcome.
        num_bytes: bytes fetched.
        seconds: time of all transfers, from the request to the prefill engine to the end.
        expected_s: the time that the placement rule predicted for these transfers.
        fetch_s: the part of `seconds` between the offers of pages and the arrival of the pages.
    """

    rule: str
    peers: tuple[PrefillEngineStats, ...]
    decisions: dict[str, int]
    transfers: dict[str, int]
    num_bytes: int
    seconds: float
    expected_s: float
    fetch_s: float


class DisaggregationStats(Frozen):
    """An engine's role in disaggregated prefill and decode, with the statistics of its sides."""

    role: str
    prefill_side: PrefillSideStats | None = msgspec.field(name="lender", default=None)
    decode_side: DecodeSideStats | None = msgspec.field(name="borrower", default=None)
