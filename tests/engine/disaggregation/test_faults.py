"""Lost messages and dead engines in disaggregation cost time, but no request."""

from __future__ import annotations

import os
from collections import Counter
from typing import TYPE_CHECKING, Any

import pytest

from support import fake_nixl
from support.cached_pages import keys_of, young_to_old
from support.disaggregation import (
    NIXL_LINKS,
    SAMPLED,
    STATE_KINDS,
    Network,
    answers,
    check_clean,
    decode,
    options,
    pair,
    prefill,
    scripted_prefill,
    view,
)
from support.disaggregation_faults import FAULTS, run_each_fault, run_round
from support.tiny import tiny_of, write_tiny_gguf
from support.waiting import wait_for
from twostroke import LLM
from twostroke.engine.disaggregation import messages
from twostroke.engine.disaggregation import prefill_connection as peer
from twostroke.engine.disaggregation import prefill_side as prefill_side_module
from twostroke.engine.disaggregation.connection import check_spec, connect_to_prefill_engine

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from twostroke.core.transport.connection import Connection

PROMPT = [3 + n % 200 for n in range(100)]  # six full pages, and a part of one


@pytest.mark.seeds(6)
def test_faults_cost_time_and_no_request(seed: int, tmp_path: Path) -> None:
    run_round(seed, tmp_path, Counter())


def test_each_fault_of_a_message_about_states_costs_no_request(tmp_path: Path) -> None:
    counts: Counter[str] = Counter()
    run_each_fault(tmp_path, "shared", counts, "qwen3.5", STATE_KINDS)
    for kind in STATE_KINDS:
        assert all(counts[f"{kind} {fault}"] for fault in FAULTS)
    assert counts["transfers done"] > 0


@pytest.mark.seeds(6)
def test_moves_that_fail_and_write_on_cost_time_and_no_request(seed: int, tmp_path: Path) -> None:
    run_round(seed, tmp_path, Counter(), NIXL_LINKS, fake_nixl.use_fake_nixl)


def _outcomes(folder: Path, answer: Callable[[Connection[Any], Any], None], within_s: float) -> Any:
    """Prefill a prompt with a scripted prefill engine; return how the KV transfers ended.

    The tokens must be those of one engine, and no page may stay held.
    """
    path = write_tiny_gguf(folder / "m.gguf", tiny_of("llama"))
    with LLM(path, options()) as alone:
        expected = answers(alone, [PROMPT], SAMPLED)
    with scripted_prefill(answer) as address, decode(path, address) as llm:
        generation = llm.engine.client.generate(PROMPT, SAMPLED)
        wait_for(lambda: view(llm).decode_side.transfers, within_s)
        assert [[choice.token_ids for choice in generation.wait()]] == expected
        check_clean(llm)
        return view(llm).decode_side.transfers


def test_pages_whose_lease_has_ended_are_not_used(tmp_path: Path) -> None:
    def answer(connection: Connection[Any], question: Any) -> None:
        if isinstance(question, messages.PrefillPrompt):
            connection.send(messages.Offer(question.id, 1, [(0, n, n) for n in range(6)]))
        elif isinstance(question, messages.FetchPages):
            connection.send(messages.Content(question.number, is_valid=False))
            connection.send(messages.PrefillFinished(question.id))

    assert _outcomes(tmp_path, answer, 10.0) == {"late": 1}


def test_a_page_that_an_offer_names_twice_is_fetched_once(tmp_path: Path) -> None:
    def answer(connection: Connection[Any], question: Any) -> None:
        if isinstance(question, messages.PrefillPrompt):
            connection.send(messages.Offer(question.id, 1, [(0, 0, 0), (0, 0, 1), (0, 0, 0)]))
        elif isinstance(question, messages.FetchPages):
            assert len(question.indices) == 1
            connection.send(messages.Content(question.number, is_valid=False))

    assert _outcomes(tmp_path, answer, 10.0) == {"late": 1}


def test_a_transfer_without_progress_is_given_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(peer, "STALL_TIMEOUT_S", 0.3)
    assert _outcomes(tmp_path, lambda *_: None, 10.0) == {"late": 1}


def test_a_lost_connection_ends_its_transfers_at_once(tmp_path: Path) -> None:
    assert _outcomes(tmp_path, lambda connection, _: connection.cut(), 10.0) == {"lost": 1}


def test_a_lease_ends_though_nothing_more_is_heard(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(prefill_side_module, "LEASE_S", 0.3)
    monkeypatch.setattr(peer, "STALL_TIMEOUT_S", 0.1)
    path = write_tiny_gguf(tmp_path / "m.gguf", tiny_of("llama"))
    Network(monkeypatch, lambda kind: "lost" if kind in {"FetchPages", "Abort"} else "", Counter())
    with pair(path, "shared") as (first, second):
        assert answers(second, [PROMPT], SAMPLED)
        check_clean(first)
        assert view(first).prefill_side.num_expired_leases


@pytest.mark.parametrize("order", ["forward", "backward", "at once"])
def test_leases_end_in_any_order_and_leave_the_first_pages_longest(
    tmp_path: Path, order: str
) -> None:
    path = write_tiny_gguf(tmp_path / "m.gguf", tiny_of("llama"))
    with prefill(path) as (llm, address):
        client, prompt = llm.engine.client, [*PROMPT, *PROMPT[:60]]  # ten full pages
        pages, prefill_side = client.loop.pages, client.loop.pages.on_close[-1].__self__  # type: ignore[attr-defined]
        connection, memory = connect_to_prefill_engine(
            ("127.0.0.1", int(address.rpartition(":")[2])), b""
        )
        assert memory is not None
        os.close(memory)
        check_spec(connection, prefill_side.spec)
        connection.send(messages.PrefillPrompt(1, prompt, b"", (0,)))
        offers: list[messages.Offer] = []
        while sum(len(offer.pages) for offer in offers) < 10:
            output = connection.receive()
            offers += [output] if isinstance(output, messages.Offer) else []
        assert len(offers) > 2
        if order == "backward":
            offers.reverse()
        for number, offered in enumerate([] if order == "at once" else offers, start=1):
            leased_pages = [page for offer in offers[number - 1 :] for _, _, page in offer.pages]
            with pages.lock:
                assert all(pages.scheduler._pool.num_references(page) for page in leased_pages)
            connection.send(messages.FetchPages(number, 1, offered.number, [], is_last=True))
            while not isinstance(connection.receive(), messages.Content):
                pass
        connection.close()
        check_clean(llm)
        assert young_to_old(client, keys_of(client, prompt)) == list(range(10))
