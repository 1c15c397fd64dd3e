"""KV pages of the gpu backend outside the GPU: stored in a folder, and sent to engines."""

from __future__ import annotations

import random
import threading
import weakref
from typing import TYPE_CHECKING, Any

import pytest

torch = pytest.importorskip("torch", reason="needs PyTorch and Triton: make long SUITE=gpu")
pytest.importorskip("triton", reason="needs Triton: make long SUITE=gpu")

from support.disaggregation import SECRET, answers, check_clean, options, pair, view  # noqa: E402
from support.programs import PROGRAMS, random_tensors  # noqa: E402
from support.tiny import tiny_of, write_tiny_gguf  # noqa: E402
from twostroke import LLM, SamplingParams  # noqa: E402
from twostroke.backends.gpu import launch  # noqa: E402
from twostroke.backends.gpu.backend import GpuBackend  # noqa: E402
from twostroke.backends.gpu.device import find_device  # noqa: E402
from twostroke.core.distributed_options import OffloadOptions  # noqa: E402
from twostroke.core.errors import BackendError  # noqa: E402
from twostroke.engine.disaggregation import prefill_connection as peer  # noqa: E402
from twostroke.engine.kv_offload import manager as paging  # noqa: E402

if TYPE_CHECKING:
    from pathlib import Path

GREEDY = SamplingParams(temperature=0, max_tokens=4)
ON_GPU = {"backend": "gpu", "same_tokens": True}


@pytest.mark.parametrize("kv_format", ["f16", "int8"])
def test_a_page_is_what_was_written_to_it(kv_format: str, monkeypatch: pytest.MonkeyPatch) -> None:
    program = PROGRAMS["borrowing"]
    tensors = random_tensors(program)
    backend = GpuBackend(program, tensors, 4, 16, find_device(), kv_format=kv_format, max_rows=16)
    pages = backend.pages
    assert pages.mapped is None
    for page in range(4):
        with pages.filling(page) as view_:
            view_[:] = bytes([page + 1]) * pages.page_bytes
    backend.copy_page(2, 0)
    results = [bytes(pages.read(page)) for page in range(4)]
    assert results == [bytes([value]) * pages.page_bytes for value in (3, 2, 3, 4)]
    content, memory = pages.read(1), weakref.ref(pages.memory)
    with pages.filling(1) as view_:
        view_[:] = bytes(pages.page_bytes)
    assert content[0] == 2, "what was read is a copy"

    def fail(_: int) -> None:
        raise RuntimeError("CUDA error: an illegal memory access was encountered\nand more")

    monkeypatch.setattr(pages, "_bytes", fail)
    with pytest.raises(BackendError, match=r"did not copy a page: CUDA error: .* encountered\.$"):
        pages.read(1)
    backend.close()
    assert memory() is None, "its memory is given back, whoever holds the pages"


@pytest.mark.parametrize("family", ["gemma3", "deepseek-v2"])
def test_an_engine_finds_the_pages_of_one_before_it(
    tmp_path: Path, family: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    start_offload = paging.OffloadManager.__init__

    def start_beside_slow_computing(
        manager: paging.OffloadManager, pages: Any, spec: Any, tiers: Any, **_: Any
    ) -> None:
        """Pretend that computing is slow, so that pages are fetched on a busy machine as well."""
        start_offload(
            manager, pages, spec, tiers, prefill_s=lambda start, end: 1000.0 * (end - start)
        )

    monkeypatch.setattr(paging.OffloadManager, "__init__", start_beside_slow_computing)
    path = write_tiny_gguf(tmp_path / "m.gguf", tiny_of(family))
    prompts = [[random.Random(1).randrange(3, 250) for _ in range(70)]]
    tier_options = options(**ON_GPU, tiers=OffloadOptions(page_cache=str(tmp_path / "pages")))
    with LLM(path, tier_options) as llm:
        expected = answers(llm, prompts, GREEDY)
        assert answers(llm, prompts, GREEDY) == expected  # what is used twice is kept
        assert llm.engine.client.loop.pages.flush(20)
    with LLM(path, tier_options) as llm:
        assert answers(llm, prompts, GREEDY) == expected
        (tier,) = llm.engine.client.loop.pages.totals()
        assert tier.pages_read
    with LLM(path, options(backend="gpu", tiers=tier_options.offload)) as llm:  # of another kind
        answers(llm, prompts, GREEDY)
        (tier,) = llm.engine.client.loop.pages.totals()
        assert not tier.pages_read


def test_a_prompt_that_another_engine_reads_has_the_same_tokens(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TWOSTROKE_PEER_SECRET", SECRET)
    start, lock = launch.start, threading.Lock()

    def start_alone(kernel_launch: launch.Launch) -> object:  # the interpreter is for one thread
        with lock:
            return start(kernel_launch)

    monkeypatch.setattr(launch, "start", start_alone)
    monkeypatch.setattr(peer, "STALL_TIMEOUT_S", 60.0)  # it is slow
    path = write_tiny_gguf(tmp_path / "m.gguf", tiny_of("llama"))
    rng = random.Random(2)
    prompts = [[rng.randrange(3, 250) for _ in range(count)] for count in (40, 90, 7)]
    with LLM(path, options(**ON_GPU)) as alone:
        expected = answers(alone, prompts, GREEDY)
    with pair(path, "tcp", **ON_GPU) as (first, second):
        assert answers(second, prompts, GREEDY) == expected
        decode_side = view(second).decode_side
        assert decode_side.transfers["done"] >= 2
        assert decode_side.peers[0].link == "socket"
        for llm in (first, second):
            check_clean(llm)
