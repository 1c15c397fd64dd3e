"""Engines that do not fit, or do not know the secret, are refused with a sentence."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

import pytest
from msgspec.structs import replace

from support.handover import options, prefill, view, wait_until
from support.tiny import tiny_of, write_tiny_gguf
from twostroke import LLM
from twostroke.core.errors import PortInUseError, UsageError
from twostroke.core.handover_options import HandoverOptions
from twostroke.engine.handover.connection import PeerLostError, connect
from twostroke.engine.handover.messages import Kind

KIND = Kind("m", "f16", 16, (None,), 100, "cpu", False, 1)


def test_each_fact_of_a_kind_is_compared() -> None:
    assert KIND.difference(KIND) is None
    for name in Kind.__struct_fields__:
        other = replace(KIND, **{name: "other"})
        assert KIND.difference(other), name


def test_another_format_is_refused_and_prompts_are_read_here(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = write_tiny_gguf(tmp_path / "m.gguf", tiny_of("llama"))
    with prefill(path, kv_format="int8") as (_, address):
        handover = HandoverOptions("decode", None, (address,), "always")
        with LLM(path, options(handover, kv_format="f16")) as llm:
            wait_until(lambda: view(llm).borrower.peers[0].state == "refused")
            assert llm.generate(["hello"])
            assert view(llm).borrower.decisions["gone"] == 1
    assert "has another format of keys and values (--kv-format)" in caplog.text


def test_a_refusal_leaves_no_open_file(tmp_path: Path) -> None:
    path = write_tiny_gguf(tmp_path / "m.gguf", tiny_of("llama"))
    with prefill(path, kv_format="int8") as (_, address):
        count = _num_shared()
        assert count, "nothing is shared"
        handover = HandoverOptions("decode", None, (address,), "always")
        with LLM(path, options(handover, kv_format="f16")) as llm:
            wait_until(lambda: view(llm).borrower.peers[0].state == "refused")
            wait_until(lambda: _num_shared() == count)


def _num_shared() -> int:
    """Return how many open files of this process are page memory."""
    count = 0
    for link in Path("/proc/self/fd").iterdir():
        with suppress(OSError):
            count += "memfd:twostroke" in str(link.readlink())
    return count


@pytest.mark.parametrize(("theirs", "word"), [("", "TWOSTROKE_PEER_SECRET"), ("b", "same secret")])
def test_a_stranger_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, theirs: str, word: str
) -> None:
    monkeypatch.setenv("TWOSTROKE_PEER_SECRET", "a")
    path = write_tiny_gguf(tmp_path / "m.gguf", tiny_of("llama"))
    with prefill(path, "tcp") as (_, address):
        host, port = address.split(":")
        with pytest.raises(PeerLostError, match=word):
            connect((host, int(port)), theirs.encode())


def test_an_address_in_use_ends_the_start(tmp_path: Path) -> None:
    path = write_tiny_gguf(tmp_path / "m.gguf", tiny_of("llama"))
    with prefill(path) as (_, address), pytest.raises(PortInUseError, match="cannot connect to"):
        LLM(path, options(HandoverOptions("prefill", address)))


@pytest.mark.parametrize(
    "given",
    [
        {"role": "decode"},
        {"prefill_peers": ("a:1",)},
        {"peer_address": "a:1"},
        {"disaggregate": "always"},
        {"role": "prefill", "peer_address": "nowhere"},
        {"role": "prefil"},
    ],
)
def test_options_that_do_not_fit_together_are_refused(given: dict[str, object]) -> None:
    with pytest.raises(UsageError):
        HandoverOptions(**given)  # type: ignore[arg-type]
