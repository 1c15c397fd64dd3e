"""Real engines on a tiny random model, built so that a test can reach every part."""

from __future__ import annotations

import threading
import time
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import numpy as np

from support.tiny import Tiny, write_tiny_gguf
from twostroke.backends.reference import ReferenceBackend
from twostroke.backends.sampling.reference import draw
from twostroke.core.options import BatchOptions, SpeculationOptions
from twostroke.core.sampling import SamplingDefaults
from twostroke.core.step import StepResult, TokenLogprobs
from twostroke.engine.chat.conversation import Chat
from twostroke.engine.client import Client
from twostroke.engine.engine import build_speculator
from twostroke.engine.kv_cache import PagePool, PrefixIndex, StatePool
from twostroke.engine.loop import EngineLoop
from twostroke.engine.model_card import ModelCard
from twostroke.engine.scheduler import Scheduler, SchedulerConfig, make_policy
from twostroke.model.families import build_program
from twostroke.model.loader import load
from twostroke.model.program.cost import CostModel
from twostroke.model.tokenizer import from_gguf
from twostroke.model.weights import GgufTokenizer, weights_identity

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping
    from pathlib import Path

    from twostroke.core.request import Request
    from twostroke.core.step import StepPlan
    from twostroke.model.program import Program
    from twostroke.model.tokenizer import Tokenizer
    from twostroke.model.weights import LoadedModel

PAGE_SIZE = 16


_CERTAIN = TokenLogprobs(0.0, (), ())
# So far apart that neither a temperature nor a penalty changes which token is drawn.
_LIKELY = 1e30
_LESS_LIKELY = 1e3


class Backend(ReferenceBackend):
    """The reference backend with faults, and with a gate before each step that a test may close.

    A step in which any request has the token `poison` fails; `is_broken` breaks the loop itself.
    """

    gate: threading.Event
    vocab_size: int
    poison: int | None = None
    is_broken = False
    pause_s = 0.0
    num_steps = 0
    script: tuple[int, ...] = ()  # what every answer is, if anything
    other_scripts: tuple[tuple[int, ...], ...] = ()  # for answers whose form forbids the first

    def run(self, plan: StepPlan) -> StepResult:
        self.num_steps += 1
        self.gate.wait(timeout=30)
        time.sleep(self.pause_s)
        if any(self.poison in part.request.tokens for part in plan.slices):
            raise ValueError("bad kernel at 0x7f00 in /secret/path.py")
        if self.is_broken:
            return StepResult([], [None])
        if not self.script:
            return super().run(plan)
        drawing = [part.request for part in plan.slices if part.samples]
        tokens = [self._scripted(request) for request in drawing]
        wants_logprobs = [request.params.logprobs is not None for request in drawing]
        return StepResult(tokens, [_CERTAIN if want else None for want in wants_logprobs])

    def _scripted(self, request: Request) -> int:
        """Sample from logits that prefer the first script that continues the output.

        After the end of all scripts an answer ends as soon as its constraint allows an end.
        """
        logits = -_LESS_LIKELY * np.arange(1, self.vocab_size + 1, dtype=np.float32)
        logits[list(request.end_ids)] = 0.0
        num_output = request.num_output
        scripts = (self.script, *self.other_scripts)
        for rank, script in reversed(list(enumerate(scripts))):
            if num_output < len(script) and list(script[:num_output]) == request.output:
                logits[script[num_output]] = _LIKELY * _LESS_LIKELY**-rank
        mask = None
        if request.matcher:
            masks = np.zeros((1, request.matcher.num_words), np.uint32)
            request.matcher.masks(request.output, (), (), masks)
            mask = masks[0]
        return draw(request, logits, mask=mask)[0]


def tiny_card(
    loaded: LoadedModel,
    program: Program,
    tokenizer: Tokenizer | None = None,
    *,
    stable_prefix: bool = False,
) -> ModelCard:
    assert isinstance(loaded.tokenizer_source, GgufTokenizer)
    tokenizer = tokenizer or from_gguf(loaded.tokenizer_source.metadata)
    sizes = {name: loaded.tensors[name].num_bytes for name in program.weight_shapes}
    return ModelCard(
        name="tiny",
        architecture="llama",
        format="F32",
        context_length=loaded.spec.context_length,
        file_bytes=loaded.file_bytes,
        created_s=1_700_000_000,
        licence=loaded.licence,
        tokenizer=tokenizer,
        chat_template=Chat(tokenizer, stable_prefix=stable_prefix),
        cost=CostModel(program, sizes),
        identity=weights_identity(loaded.tensors),
        sampling=SamplingDefaults(loaded.sampling),
    )


@contextmanager
def tiny_client(
    folder: Path,
    tiny: Tiny | None = None,
    num_pages: int = 256,
    batch: BatchOptions | None = None,
    speculation: SpeculationOptions | None = None,
    metadata: Mapping[str, Any] | None = None,
    prepare: Callable[[Backend], None] | None = None,
    tokenizer: Tokenizer | None = None,
    num_states: int = 0,
    stable_prefix: bool = False,
    **limits: Any,
) -> Iterator[tuple[Client, Backend]]:
    """Yield a client of a running engine, and its backend.

    `metadata` are added to the metadata of the model's file, `limits` are fields of
    `SchedulerConfig`. `prepare` is called with the backend before the engine starts. A `tokenizer`
    replaces the file's tokenizer. `num_states` are the slots of a model with recurrent layers.
    """
    loaded = load(str(write_tiny_gguf(folder / "tiny.gguf", tiny, metadata)))
    program = build_program(loaded.spec)
    backend = Backend(program, loaded.tensors, num_pages, PAGE_SIZE, num_states=num_states)
    backend.gate = threading.Event()
    backend.vocab_size = program.vocab_size
    backend.gate.set()
    if prepare is not None:
        prepare(backend)
    card = tiny_card(loaded, program, tokenizer, stable_prefix=stable_prefix)
    pool = PagePool(num_pages, PAGE_SIZE, backend.facts.windows)
    config = SchedulerConfig(context_length=card.context_length, **limits)
    policy = make_policy(batch or BatchOptions())
    states = StatePool(num_states) if num_states else None
    scheduler = Scheduler(config, pool, PrefixIndex(pool), policy, states=states)
    speculation = speculation or SpeculationOptions("off")
    speculator = build_speculator(speculation, card.cost.per_step(), limits=None, rows_together=1)
    loop = EngineLoop(backend, scheduler, speculator, card.cost.per_step())
    try:
        yield Client(card, loop), backend
    finally:
        backend.gate.set()
        loop.close()
