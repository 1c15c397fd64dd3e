"""A decode engine follows the file of its prefill engines, which may be empty."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING

import pytest

from support.disaggregation import (
    SAMPLED,
    SECRET,
    answers,
    check_clean,
    options,
    prefill,
    random_prompts,
    view,
)
from support.tiny import write_tiny_gguf
from support.waiting import wait_for
from twostroke import LLM
from twostroke.core.distributed_options import DisaggregationOptions
from twostroke.core.errors import UsageError
from twostroke.core.files import write_text
from twostroke.engine.disaggregation.decode_side import read_peers

if TYPE_CHECKING:
    from pathlib import Path


@pytest.fixture(autouse=True)
def _secret(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TWOSTROKE_PEER_SECRET", SECRET)


def test_prefill_engines_come_and_go_and_the_tokens_stay(tmp_path: Path) -> None:
    path, listing = write_tiny_gguf(tmp_path / "m.gguf"), tmp_path / "peers"
    write_text(listing, "")
    rounds = [random_prompts(random.Random(seed), 6) for seed in range(4)]
    with LLM(path, options()) as alone:
        expected = [answers(alone, prompts, SAMPLED) for prompts in rounds]
    disaggregation = DisaggregationOptions(
        "decode", disaggregate="always", peer_link="socket", peer_listing=str(listing)
    )

    def state() -> str:
        peers = view(decode).decode_side.peers
        return peers[0].state if peers else ""

    with LLM(path, options(disaggregation)) as decode:
        assert answers(decode, rounds[0], SAMPLED) == expected[0]
        assert view(decode).decode_side.decisions == {"gone": 6}
        for number in (1, 2):
            with prefill(path) as (_, address):
                write_text(listing, f"# present\n{address}\n\n")
                wait_for(lambda: state() == "up")
                assert answers(decode, rounds[number], SAMPLED) == expected[number]
                num_done = view(decode).decode_side.transfers["done"]
                assert num_done > 0
                write_text(listing, "")
                wait_for(lambda: state() == "")
        assert answers(decode, rounds[3], SAMPLED) == expected[3]
        decode_side = view(decode).decode_side
        assert decode_side.transfers == {"done": num_done}, "past transfers are counted"
        assert decode_side.num_bytes > 0
        check_clean(decode)


@pytest.mark.parametrize("text", ["nowhere", "a:b", ":1"])
def test_a_wrong_list_is_refused(tmp_path: Path, text: str) -> None:
    path = tmp_path / "peers"
    with pytest.raises(UsageError, match="cannot be read"):
        read_peers(path)
    path.write_text(f"a:1\n{text}\n")
    with pytest.raises(UsageError, match="must be HOST:PORT"):
        read_peers(path)
