"""Starts disaggregation as an engine's options say."""

from __future__ import annotations

from typing import TYPE_CHECKING

from twostroke.core import env
from twostroke.core.distributed_options import parse_address
from twostroke.core.errors import UsageError
from twostroke.core.transport.listener import is_own_address
from twostroke.engine.disaggregation import nixl
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


def start_disaggregation(
    options: DisaggregationOptions, client: Client, backend: Backend, spec: KvCacheSpec
) -> None:
    """Start the prefill or the decode side of an engine, as its options say.

    A prefill engine listens, and a decode engine connects. `spec` describes the KV pages that this
    engine can exchange. Call this before the first request.

    Raises:
        UsageError: the secret is empty, `--peer-link` needs NIXL, which is not installed, or the
            file of prefill engines cannot be read.
        PortInUseError: the engine cannot listen at its address.
    """
    link = options.peer_link
    secret = env.peer_secret()
    spec_message = KvCacheSpecMessage.of(spec)
    if link.startswith("nixl") and (reason := nixl.obstacle()) is not None:
        raise UsageError(f"cannot be {{value}}. {reason}", field="peer_link", value=link)
    assert backend.pages is not None
    if options.role == "prefill":
        prefill_side = PrefillSide(
            client,
            spec_message,
            address=parse_address(options.own_address, "peer_address"),
            secret=secret,
            page_file=share(backend.pages),
            link=link,
        )
        client.disaggregation_stats = lambda: DisaggregationStats(
            options.role, prefill_side=prefill_side.stats()
        )
    else:
        decode_side = DecodeSide(
            client,
            spec_message,
            options=options,
            secret=secret,
            page_file=_page_file(options, backend),
        )
        client.disaggregation_stats = lambda: DisaggregationStats(
            options.role, decode_side=decode_side.stats()
        )


def _page_file(options: DisaggregationOptions, backend: Backend) -> int | None:
    """Return the open file of a decode engine's KV pages, for NIXL; None if NIXL is not used.

    Prefill engines on this machine share their memory, so they need no NIXL.
    """
    assert backend.pages is not None
    hosts = [parse_address(peer, "prefill_peers")[0] for peer in options.prefill_peers]
    are_local = options.peer_listing is None and all(is_own_address(host) for host in hosts)
    may_use_nixl = options.peer_link != "socket" and nixl.obstacle() is None
    if not may_use_nixl or are_local:
        return None
    return share(backend.pages)
