"""A prefill engine and a decode engine in one process, with a network that fails."""

from __future__ import annotations

import threading
import time
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any

from support.waiting import wait_for
from twostroke import LLM, SamplingParams
from twostroke.core.distributed_options import DisaggregationOptions, OffloadOptions
from twostroke.core.options import (
    BatchOptions,
    CacheOptions,
    ComputeOptions,
    EngineOptions,
    SpeculationOptions,
)
from twostroke.core.transport.connection import Connection
from twostroke.core.transport.frames import ConnectionLostError
from twostroke.engine.disaggregation import messages
from twostroke.engine.disaggregation.connection import listen_for_decode_engines

if TYPE_CHECKING:
    import random
    from collections import Counter
    from collections.abc import Callable, Iterator, Sequence
    from pathlib import Path

    import pytest

SECRET = "a secret of the tests"
# Messages of a hand-over, which must all be able to get lost.
KINDS = tuple(
    message_type.__name__
    for message_type in (
        messages.PrefillPrompt,
        messages.Offer,
        messages.FetchPages,
        messages.Content,
        messages.PrefillFinished,
        messages.Abort,
        messages.PrefillLoad,
    )
)
STATE_KINDS = (messages.OfferState.__name__, messages.FetchState.__name__)  # of some models
LINKS = ("shared", "sockets", "tcp")
NIXL_LINKS = ("nixl-read", "nixl-write")
_MEMORY = 4_000_000
_LATE_S = 0.15


def options(
    disaggregation: DisaggregationOptions | None = None,
    *,
    kv_format: str = "auto",
    memory: int = _MEMORY,
    budget: int = 48,
    speculate: str = "off",
    tiers: OffloadOptions | None = None,
    **compute: Any,
) -> EngineOptions:
    """Return options of a small engine on one thread."""
    return EngineOptions(
        ComputeOptions(num_threads=1, **compute),
        CacheOptions(context_length=512, memory_bytes=memory, kv_format=kv_format),
        BatchOptions(token_budget=budget),
        SpeculationOptions(speculate),
        accept_quality=True,
        disaggregation=disaggregation or DisaggregationOptions(),
        offload=tiers or OffloadOptions(),
    )


@contextmanager
def prefill(path: Path, link: str = "shared", **kwargs: Any) -> Iterator[tuple[LLM, str]]:
    """Yield a prefill engine, and its address."""
    # The former is not known as this machine.
    host = "127.0.0.2" if link in {"tcp", *NIXL_LINKS} else "127.0.0.1"
    disaggregation = DisaggregationOptions("prefill", f"{host}:0")
    if link == "sockets":
        kwargs["backend"] = "reference"  # its memory cannot be shared
    with LLM(path, options(disaggregation, **kwargs)) as llm:
        yield llm, f"{host}:{view(llm).prefill_side.port}"


@contextmanager
def decode(
    path: Path, address: str, rule: str = "always", peer_link: str = "socket", **kwargs: Any
) -> Iterator[LLM]:
    """Yield a decode engine that is connected to the prefill engine at `address`."""
    disaggregation = DisaggregationOptions("decode", None, (address,), rule, peer_link)
    with LLM(path, options(disaggregation, **kwargs)) as llm:
        wait_for(lambda: view(llm).decode_side.peers[0].state == "up")
        yield llm


@contextmanager
def pair(path: Path, link: str, **options: Any) -> Iterator[tuple[LLM, LLM]]:
    """Yield a prefill engine, and a decode engine that is connected to it."""
    if link == "sockets":
        options["backend"] = "reference"
    peer_link = link if link in NIXL_LINKS else "socket"
    with (
        prefill(path, link, **options) as (first, address),
        decode(path, address, peer_link=peer_link, **options) as second,
    ):
        yield first, second


def view(llm: LLM) -> Any:
    """Return an engine's statistics of disaggregation."""
    look = llm.engine.client.disaggregation_stats
    assert look is not None
    return look()


def answers(llm: LLM, prompts: Sequence[Sequence[int]], params: Any) -> list[list[Any]]:
    """Return the tokens of all answers."""
    result = llm.generate(prompts, params)
    return [[choice.token_ids for choice in choices] for choices in result]


def random_prompts(rng: random.Random, count: int, max_tokens: int = 300) -> list[list[int]]:
    """Return prompts, some of which begin alike."""
    prompts: list[list[int]] = []
    for _ in range(count):
        begin = rng.choice(prompts)[: rng.randrange(200)] if prompts and rng.random() < 0.3 else []
        prompts.append(
            [*begin, *(rng.randrange(3, 250) for _ in range(rng.randint(1, max_tokens)))]
        )
    return [prompt[:400] for prompt in prompts]


def check_clean(llm: LLM) -> None:
    """Check that no page is held or claimed, once leases have ended."""
    loop = llm.engine.client.loop
    scheduler = loop.pages.scheduler
    transfers = scheduler.prefix_cache.transfers

    def is_clean() -> bool:
        with loop.pages.lock:
            is_idle = (
                not transfers.num_held_pages and not transfers._claiming and not transfers._claims
            )
            is_idle = is_idle and not transfers.num_held_states
            return is_idle and not scheduler.stats().num_referenced_pages

    wait_for(is_clean)


class Network:
    """Loses, delays and duplicates messages by `choose`, which gets a message's name."""

    def __init__(
        self, monkeypatch: pytest.MonkeyPatch, choose: Callable[[str], str], counts: Counter[str]
    ) -> None:
        self._choose, self._counts = choose, counts
        self._send = Connection.send
        monkeypatch.setattr(Connection, "send", lambda *arguments: self._pass(*arguments))  # noqa: PLW0108 - it is bound

    def _pass(self, connection: Connection[Any], message: Any, pages: Any = None) -> None:
        name = type(message).__name__
        fault = self._choose(name) if name in (*KINDS, *STATE_KINDS) else ""
        if fault:
            self._counts[f"{name} {fault}"] += 1
        match fault:
            case "lost":
                return
            case "late" if pages is not None:  # which would be overwritten
                time.sleep(_LATE_S)
            case "late":
                threading.Timer(_LATE_S, self._send_late, (connection, message)).start()
                return
            case "doubled" if isinstance(message, messages.Content):
                self._send(connection, message, pages)
            case "doubled":
                self._send(connection, message)
            case "cut":
                connection.cut()
        self._send(connection, message, pages)

    def _send_late(self, connection: Connection[Any], message: Any) -> None:
        with suppress(ConnectionLostError):
            self._send(connection, message)


SAMPLED = SamplingParams(max_tokens=6, temperature=0.9, seed=5, ignore_eos=True)


@contextmanager
def scripted_prefill(
    answer: Callable[[Connection[Any], Any], None], host: str = "127.0.0.1"
) -> Iterator[str]:
    """Yield the address of a prefill engine that accepts all, and answers messages by `answer`.

    It reports its load, as a real prefill engine does.
    """

    def serve(connection: Connection[Any]) -> None:
        with suppress(ConnectionLostError):
            hello = connection.receive()
            connection.send(messages.Welcome(messages.VERSION, hello.spec, 1000))
            threading.Thread(target=report, args=(connection,), daemon=True).start()
            while True:
                answer(connection, connection.receive())
        connection.close()

    def report(connection: Connection[Any]) -> None:
        with suppress(ConnectionLostError):
            while True:
                connection.send(messages.PrefillLoad(0.0, 0.0))
                time.sleep(0.2)

    listener = listen_for_decode_engines((host, 0), SECRET.encode(), page_file=None, serve=serve)
    try:
        yield f"{host}:{listener.port}"
    finally:
        listener.close()
