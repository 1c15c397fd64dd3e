"""The cpu backend on tiny random models, run step by step."""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import pytest
from msgspec.structs import replace

from support.native import NEEDS, load_level
from support.tiny import Tiny, tiny_tensors, vocabulary
from twostroke.backends.cpu import CpuBackend
from twostroke.core.request import Request
from twostroke.core.sampling import SamplingParams
from twostroke.core.step import Slice, StepPlan
from twostroke.model.families import ModelSpec, RopeSpec, build_program
from twostroke.model.program.ops import Attention

if TYPE_CHECKING:
    from collections.abc import Iterator

    from twostroke.model.program import Program
    from twostroke.model.quant import QuantTensor

    Model = tuple[Program, dict[str, QuantTensor]]

LEVELS = tuple(NEEDS)
PAGE_SIZE = 16


def tiny_model(
    *, windows: tuple[int | None, ...] = (), soft_cap: float | None = None, **sizes: Any
) -> Model:
    """Return the Program and the tensors of a tiny random Llama.

    `windows` gives each layer's window, `soft_cap` caps the scores of attention.
    """
    tiny = Tiny(**sizes)
    spec = ModelSpec(
        architecture="llama",
        name="tiny",
        num_layers=tiny.num_layers,
        hidden_size=tiny.hidden_size,
        ffn_size=tiny.ffn_size,
        num_heads=tiny.num_heads,
        num_kv_heads=tiny.num_kv_heads,
        head_dim=tiny.head_dim,
        vocab_size=len(vocabulary()[0]),
        context_length=tiny.context_length,
        norm_epsilon=tiny.norm_epsilon,
        rope=RopeSpec(tiny.rope_base, tiny.head_dim, interleaved=True),
        tied_embeddings=tiny.tied,
        attention_soft_cap=soft_cap,
    )
    program = build_program(spec)
    return with_windows(program, windows) if windows else program, tiny_tensors(tiny)


def with_windows(program: Program, windows: tuple[int | None, ...]) -> Program:
    """Return the Program with a window for each layer."""
    ops = tuple(
        replace(op, window=windows[op.layer]) if isinstance(op, Attention) else op
        for op in program.ops
    )
    return replace(program, ops=ops)


@contextmanager
def cpu_backend(
    model: Model,
    level: str,
    num_pages: int,
    threads: int = 2,
    page_size: int = PAGE_SIZE,
    kv_format: str = "f16",
    *,
    embeds: bool = False,
    num_states: int = 0,
) -> Iterator[CpuBackend]:
    """Run a model on one level, with `num_pages` for each cache group.

    Skips the test where the machine cannot.
    """
    load_level(level)
    if level == "amx" and load_level(level).ts_linear_request_tiles() == 0:
        pytest.skip("the operating system refuses tiles")
    num_pages *= len(model[0].cache_groups)
    backend = CpuBackend(
        *model,
        num_pages,
        page_size,
        threads,
        num_states=num_states,
        level=level,
        kv_format=kv_format,
        embeds=embeds,
    )
    try:
        yield backend
    finally:
        backend.close()


def greedy_request(tokens: list[int], **params: Any) -> Request:
    """Return a greedy request that reports log-probabilities."""
    sampling = SamplingParams(**{"temperature": 0.0, "logprobs": 5, **params})
    return Request("r", list(tokens), len(tokens), sampling, seed=1)


def run(backend: CpuBackend, *slices: Slice) -> list[int]:
    """Run one step, and return the sampled tokens."""
    return backend.run(StepPlan(slices)).tokens


def page_lists(backend: CpuBackend, pages: list[int]) -> list[list[int]]:
    """Return a request's pages by cache group; the pages of the groups alternate."""
    num_groups = len(backend.facts.windows)
    return [[num_groups * page + group for page in pages] for group in range(num_groups)]


class Sequence:
    """One greedy request with its own pages; a sampled token is (id, its log-probabilities)."""

    def __init__(self, backend: CpuBackend, prompt: list[int], pages: list[int]) -> None:
        self.backend = backend
        self.request = greedy_request(prompt)
        self.request.pages = page_lists(backend, pages)

    def reset(self) -> None:
        """Forget the answer, as if the request had just arrived."""
        self.backend.forget(self.request)
        del self.request.tokens[self.request.num_prompt :]
        self.request.num_computed = self.request.num_planned = 0

    def slice(self, chunk: int) -> Slice:
        """Return the next slice of at most `chunk` tokens."""
        start, count = self.request.num_computed, min(chunk, self.request.num_pending)
        return Slice(self.request, start, count, start + count == len(self.request.tokens))

    def commit(
        self, part: Slice, drawn_token: tuple[int, object] | None
    ) -> tuple[int, object] | None:
        """Apply the result of a step to the request; return the sampled token, if any."""
        self.request.num_computed += part.count
        self.request.num_planned = self.request.num_computed
        if drawn_token is not None:
            self.request.tokens.append(drawn_token[0])
        return drawn_token

    def step(self, chunk: int) -> tuple[int, object] | None:
        """Compute one slice of at most `chunk` tokens alone; return the sampled token, if any."""
        part = self.slice(chunk)
        result = self.backend.run(StepPlan((part,)))
        drawn_token = (result.tokens[0], result.logprobs[0]) if part.samples else None
        return self.commit(part, drawn_token)

    def prefill(self, chunk: int) -> tuple[int, object]:
        """Compute all tokens in chunks; return the token that the last chunk samples."""
        while (drawn_token := self.step(chunk)) is None:
            pass
        return drawn_token

    def decode(self, count: int) -> list[tuple[int, object]]:
        """Sample `count` more tokens, one in each step."""
        return [drawn_token for _ in range(count) if (drawn_token := self.step(1)) is not None]
