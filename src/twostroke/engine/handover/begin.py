"""Begins a hand-over as an engine's options say, and describes it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from twostroke.core import env
from twostroke.core.handover_options import parse_address
from twostroke.engine.handover.borrowing import Borrower
from twostroke.engine.handover.lending import Lender
from twostroke.engine.handover.messages import Kind
from twostroke.engine.handover.shared import share
from twostroke.engine.handover_view import HandoverView

if TYPE_CHECKING:
    from twostroke.backends import Backend
    from twostroke.cache.tiers import PageKind
    from twostroke.core.handover_options import HandoverOptions
    from twostroke.engine.client import Client


def begin(options: HandoverOptions, client: Client, backend: Backend, kind: PageKind) -> None:
    """Begin, before the first request: listen as a prefill engine, or connect as a decode engine.

    Raises:
        UsageError: the secret is empty.
        PortInUseError: the engine cannot listen at its address.
    """
    secret, form = env.peer_secret(), Kind.of(kind)
    assert backend.pages is not None
    if options.role == "prefill":
        address = parse_address(options.own_address, "peer_address")
        lender = Lender(client, form, address, secret, share(backend.pages))
        client.view_handover = lambda: HandoverView(options.role, lender=lender.view())
    else:
        borrower = Borrower(client, form, options, secret)
        client.view_handover = lambda: HandoverView(options.role, borrower=borrower.view())
