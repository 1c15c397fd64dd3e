"""Messages between prefill and decode engines of different builds: the bytes stay the same."""

from __future__ import annotations

import hmac
import socket
from threading import Thread

import pytest

from twostroke.core.transport.frames import MessageReader
from twostroke.core.transport.handshake import handshake_as_listener
from twostroke.engine.disaggregation import messages
from twostroke.engine.disaggregation.messages import (
    RECEIVED_BY_DECODE,
    RECEIVED_BY_PREFILL,
    WRITTEN,
)

SPEC = messages.KvCacheSpecMessage("m", "f16", 16, (None, 512), 100, "cpu", False, 1)
ADDRESS = messages.NixlAddress(b"agent", 2**40, 7)
# Raise `messages.VERSION` if one of these has to change.
FROM_DECODE = [
    (messages.DecodeHello(2, SPEC), "1700000093010298a16da36631361092c0cd020064a3637075c201"),
    (
        messages.PrefillPrompt(1, [3, 300, 70000], b"salt", (0, 2), 5),
        "170000009602019303cd012cce00011170c40473616c7492000205",
    ),
    (
        messages.FetchPages(2, 1, 3, [0, 2], is_last=True),
        "110000009803020103920002c3a6636f7069656490",
    ),
    (
        messages.FetchPages(2, 1, 3, [0, 2], is_last=False, mode=WRITTEN, targets=[7, 9]),
        "140000009803020103920002c2a77772697474656e920709",
    ),
    (messages.Abort(1), "03000000920401"),
    (messages.NixlJoin(ADDRESS), "14000000920593c4056167656e74cf000001000000000007"),
    (messages.NixlProbe(4, messages.SENT), "08000000930604a473656e74"),
    (messages.FetchState(5, 1, 4), "050000009407050104"),
]
FROM_PREFILL = [
    (
        messages.Welcome(2, SPEC, 1000),
        "1a00000094010298a16da36631361092c0cd020064a3637075c201cd03e8",
    ),
    (messages.Refused("no"), "050000009202a26e6f"),
    (messages.Offer(1, 3, [(0, 1, 2), (1, 1, 300)]), "0f000000940301039293000102930101cd012c"),
    (messages.Content(2, is_valid=True, num_bytes=1600), "07000000940402c3cd0640"),
    (messages.PrefillFinished(1), "04000000930501c0"),
    (messages.PrefillFinished(1, "full"), "08000000930501a466756c6c"),
    (messages.PrefillLoad(1.5, 2e9, 1), "150000009406cb3ff8000000000000cb41ddcd650000000001"),
    (messages.NixlJoined(ADDRESS), "15000000930793c4056167656e74cf000001000000000007a0"),
    (messages.NixlJoined(None, "no"), "060000009307c0a26e6f"),
    (messages.OfferState(1, 4, 300), "0700000094080104cd012c"),
]


def test_the_version_is_that_of_these_bytes() -> None:
    assert messages.VERSION == 2


@pytest.mark.parametrize(
    ("message_format", "cases"),
    [(RECEIVED_BY_PREFILL, FROM_DECODE), (RECEIVED_BY_DECODE, FROM_PREFILL)],
)
def test_messages_are_sent_and_read_as_these_bytes(message_format, cases) -> None:
    for message, text in cases:
        assert message_format.frame(message).hex() == text
        reader = MessageReader(message_format)
        reader.received += bytes.fromhex(text)
        assert reader.next() == message


def test_every_message_has_its_bytes_here() -> None:
    for union, cases in (
        (messages.DecodeMessage, FROM_DECODE),
        (messages.PrefillMessage, FROM_PREFILL),
    ):
        assert {type(message) for message, _ in cases} == set(union.__args__)


def test_the_handshake_is_two_nonces_and_their_signatures() -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        ours.settimeout(10)
        theirs.settimeout(10)
        thread = Thread(
            target=handshake_as_listener, args=(theirs, b"secret", (b"decode", b"prefill"))
        )
        thread.start()
        nonce, own_nonce = ours.recv(64), bytes(range(32))
        assert len(nonce) == 32
        ours.sendall(own_nonce + hmac.digest(b"secret", b"decode" + nonce + own_nonce, "sha256"))
        assert ours.recv(64) == hmac.digest(b"secret", b"prefill" + own_nonce + nonce, "sha256")
        thread.join()
