"""What a hand-over's two sides tell about themselves."""

from __future__ import annotations

from twostroke.core.frozen import Frozen


class PrefillSideStats(Frozen):
    """A prefill engine's connections, the prompts that it reads for them, and sums."""

    port: int
    num_peers: int
    num_reading: int
    num_prompts: int
    num_pages_lent: int
    num_leases_late: int


class PrefillPeerStats(Frozen):
    """A prefill engine as a decode engine sees it; rates are 0.0 until they were measured.

    `overhead_s` is what transfers took beyond the queue there, computing, and moving.
    `state` is "up", "down" or "refused"; `link` is "" without a connection, else the `title` of
    its `Way`.
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
    """A decode engine's prefill engines, and sums since its start.

    `decisions` are by the words of `choice.REASONS`, `transfers` by those of `ongoing.OUTCOMES`.
    Transfers took `seconds` from the question to their end, where the rule had counted on
    `expected_s`, and `fetch_s` of these from offers of pages until these could be used.
    """

    rule: str
    peers: tuple[PrefillPeerStats, ...]
    decisions: dict[str, int]
    transfers: dict[str, int]
    num_bytes: int
    seconds: float
    expected_s: float
    fetch_s: float


class DisaggregationStats(Frozen):
    """An engine's role, and what it lent or borrowed."""

    role: str
    lender: PrefillSideStats | None = None
    borrower: DecodeSideStats | None = None
