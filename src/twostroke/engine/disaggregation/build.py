"""Begins a hand-over as an engine's options say, and describes it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from twostroke.core import env
from twostroke.core.distributed_options import parse_address
from twostroke.core.errors import UsageError
from twostroke.engine.disaggregation import nixl
from twostroke.engine.disaggregation.connection import is_own
from twostroke.engine.disaggregation.decode_side import DecodeSide
from twostroke.engine.disaggregation.messages import KvCacheSpecMessage
from twostroke.engine.disaggregation.prefill_side import PrefillSide
from twostroke.engine.disaggregation.transfer_methods import share
from twostroke.engine.disaggregation_stats import DisaggregationStats

if TYPE_CHECKING:
    from twostroke.backends.interface import Backend
    from twostroke.core.distributed_options import DisaggregationOptions
    from twostroke.engine.client import Client
    from twostroke.engine.kv_offload.tier import KvCacheSpec


def begin(
    options: DisaggregationOptions, client: Client, backend: Backend, kind: KvCacheSpec
) -> None:
    """Begin, before the first request: listen as a prefill engine, or connect as a decode engine.

    Raises:
        UsageError: the secret is empty, or NIXL is asked for and not installed.
        PortInUseError: the engine cannot listen at its address.
    """
    secret, form = env.peer_secret(), KvCacheSpecMessage.of(kind)
    link, is_wanted = options.peer_link, options.peer_link.startswith("nixl")
    if is_wanted and (reason := nixl.obstacle()) is not None:
        raise UsageError(f"cannot be {{value}}. {reason}", field="peer_link", value=link)
    assert backend.pages is not None
    if options.role == "prefill":
        address = parse_address(options.own_address, "peer_address")
        lender = PrefillSide(client, form, address, secret, share(backend.pages), link)
        client.view_handover = lambda: DisaggregationStats(options.role, lender=lender.view())
    else:
        borrower = DecodeSide(client, form, options, secret, _file(options, backend))
        client.view_handover = lambda: DisaggregationStats(options.role, borrower=borrower.view())


def _file(options: DisaggregationOptions, backend: Backend) -> int | None:
    """Return the open file of a decode engine's pages, if NIXL may move them."""
    assert backend.pages is not None
    hosts = [parse_address(one, "prefill_peers")[0] for one in options.prefill_peers]
    is_of_use = options.peer_link != "socket" and nixl.obstacle() is None
    return share(backend.pages) if is_of_use and not all(map(is_own, hosts)) else None
