"""A server and an engine process that dies at any moment, with a model that costs nothing."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING
from unittest.mock import patch

from support.dying_engine import CONTEXT, KILLER, POISON, Process
from support.engines import tiny_card
from support.fake_model import END, VOCAB_SIZE, expected_output
from support.invariants import check_index, check_scheduler
from support.requests import make_request
from support.tiny import write_tiny_gguf
from twostroke.core.errors import (
    EngineDiedError,
    EngineKillerError,
    OverloadedError,
    TwostrokeError,
)
from twostroke.core.options import EngineOptions
from twostroke.core.request import FinishReason, Hints
from twostroke.core.sampling import SamplingParams
from twostroke.engine.client import Caller
from twostroke.engine.process import messages as wire
from twostroke.engine.process import supervisor
from twostroke.engine.process.remote import RemoteEngine
from twostroke.model.families import build_program
from twostroke.model.loader import load

if TYPE_CHECKING:
    import random
    from collections import Counter
    from pathlib import Path

    from twostroke.engine.process.pending import RemoteOutputs

_LOAD = wire.LoadModel(wire.VERSION, "tiny", EngineOptions(), "warning")
_HINTS = (Hints(), Hints(speculate="off"), Hints(shows_progress=True))


class ServiceMachine:
    """Submits, cancels, computes and kills in any order, with checks after each operation.

    `counts` counts the operations of all runs.
    """

    def __init__(self, rng: random.Random, folder: Path, counts: Counter[str]) -> None:
        self.rng, self.counts = rng, counts
        loaded = load(str(write_tiny_gguf(folder / "tiny.gguf")))
        self.card = tiny_card(loaded, build_program(loaded.spec))
        self.open: dict[asyncio.Task[None], RemoteOutputs | None] = {}
        # By request: the deaths before it was submitted first, since its content was answered.
        self.deaths_before: dict[str, int] = {}
        self.wrong: list[BaseException] = []
        self.cancelled: set[asyncio.Task[None]] = set()
        self.process = Process(rng, self.card)

    def _make(self, _load: wire.LoadModel) -> Process:
        self.count_pages()
        self.process = Process(self.rng, self.card)
        return self.process

    async def run(self, num_operations: int) -> None:
        """Perform a number of operations, then check that everything ends."""
        ready = self.process.load()
        with (
            patch.object(supervisor, "EngineProcess", self._make),
            patch.object(supervisor, "BACK_OFF_S", (0.0,) * 1000),
            patch.object(supervisor, "_MAX_DEATHS", 1 << 60),
        ):
            self.engine = RemoteEngine(_LOAD, self.card, self.process, ready)
            self.engine.attach(lambda: None)
            operations = [self.add_call] * 6 + [self.cancel, self.die, self.look, self.flush]
            for _ in range(num_operations):
                if self.rng.random() < 0.7:
                    await self.work()
                else:
                    await self.rng.choice(operations)()
                await self.settle()
                self.counts["operations"] += 1
                self.check()
            await self.end()
            self.engine.close()

    async def add_call(self) -> None:
        task = asyncio.ensure_future(self.client())
        task.add_done_callback(self.on_task_end)
        self.open[task] = None
        self.counts["ask"] += 1

    def on_task_end(self, task: asyncio.Task[None]) -> None:
        del self.open[task]
        if not task.cancelled() and (error := task.exception()) is not None:
            self.wrong.append(error)

    async def client(self) -> None:
        """Submit a call, and check all its outputs."""
        rng, me = self.rng, asyncio.current_task()
        assert me is not None
        harm = rng.choice((*(None,) * 30, POISON, KILLER))
        prompts, params, caller = self.question(harm)
        key = str((prompts, params))
        num_deaths = self.engine.num_deaths
        self.deaths_before.setdefault(key, num_deaths)
        try:
            outputs = await self.engine.generate(prompts, params, caller, rng.choice(_HINTS))
            self.open[me] = outputs
            results: dict[int, list[int]] = {}
            async for output in outputs:
                results.setdefault(output.index, []).extend(output.token_ids)
                if output.finish_reason is FinishReason.CANCEL:
                    assert me in self.cancelled, "nobody cancelled it"
                elif output.finish_reason is not None:
                    self.check_answer(prompts, params, caller, output.index, results)
            self.counts["cancelled" if me in self.cancelled else "answered"] += 1
            self.counts["resumed"] += outputs.num_deaths
            if me not in self.cancelled:
                self.deaths_before.pop(key, None)
                assert harm is None, "harm was not done"
        except asyncio.CancelledError:
            self.counts["left"] += 1
        except OverloadedError:
            self.counts["refused"] += 1
        except EngineKillerError:
            num_deaths = self.engine.num_deaths - self.deaths_before.get(key, 0)
            assert num_deaths > 2, "refused without its fault"
            self.counts["killers refused"] += 1
        except EngineDiedError:
            num_deaths = self.engine.num_deaths - num_deaths
            assert num_deaths > self.engine.pending.limits.max_attempts, "it would have gone on"
            self.counts["told"] += 1
        except TwostrokeError as error:
            if harm != POISON:
                raise AssertionError("it failed without a reason") from error
            self.counts["failed alone"] += 1

    def question(self, harm: int | None) -> tuple[list[list[int]], SamplingParams, Caller]:
        """Return prompts, many of which begin alike; prompts that kill engines stay the same."""
        rng = self.rng
        if harm is not None:
            params = SamplingParams(max_tokens=4, seed=0, ignore_eos=True)
            return [[3, harm]], params, Caller()
        stem = [(7 * rng.randrange(3) + 3 * i) % VOCAB_SIZE for i in range(rng.randint(1, 20))]
        prompts = [[*stem, i] for i in range(rng.choice((1, 1, 3)))]
        params = SamplingParams(
            max_tokens=rng.choice((1, 4, 12, 24)),
            temperature=0,
            seed=rng.randrange(3),
            n=rng.choice((1, 1, 2)),
            ignore_eos=True,
            stop_token_ids=(END,),
        )
        return prompts, params, Caller(rng.choice((-1, 0, 0, 1)), rng.choice(("", "a")))

    def check_answer(
        self,
        prompts: list[list[int]],
        params: SamplingParams,
        caller: Caller,
        index: int,
        tokens_by_index: dict[int, list[int]],
    ) -> None:
        assert params.seed is not None
        request = make_request(
            prompt=list(prompts[index // params.n]),
            salt=caller.tenant.encode(),
            end_ids=frozenset({END}),
            seed=params.seed + index % params.n,
            max_tokens=params.max_tokens,
        )
        right, reason = expected_output(request, CONTEXT)
        if reason is FinishReason.STOP:
            right = right[: len(tokens_by_index[index])]
        assert tokens_by_index[index] == right, "other tokens than always"

    async def cancel(self) -> None:
        """Cancel a call, or disconnect before it was accepted."""
        if not self.open:
            return
        task = self.rng.choice(list(self.open))
        outputs = self.open[task]
        if outputs is None:
            task.cancel()
        else:
            self.cancelled.add(task)
            outputs.cancel()
        self.counts["cancel"] += 1

    async def work(self) -> None:
        """Let the engine do something."""
        process = self.process
        if process.is_dead:
            return
        if process.handler is None:
            if self.rng.random() < 0.3:
                process.send(process.load())
                self.counts["load"] += 1
            return
        if self.rng.random() < 0.6:
            process.read()
        for _ in range(self.rng.choice((0, 1, 1, 4))):
            if not process.is_dead:
                process.step()
                self.counts["step"] += 1

    async def die(self) -> None:
        """Kill the engine process now and then, or let its loop fail."""
        chance = self.rng.random()
        if chance < 0.3 or self.process.is_dead:
            return
        if chance < 0.5 and self.process.handler is not None:
            self.process.backend.is_broken = True
        else:
            self.process.kill()
        self.counts["die"] += 1

    async def look(self) -> None:
        """Request the engine's status, which comes some time later."""
        reading = asyncio.ensure_future(self.engine.read([(1, 0)]))
        reading.add_done_callback(lambda done: done.exception())
        self.counts["look"] += 1

    async def flush(self) -> None:
        self.engine.flush()

    async def settle(self) -> None:
        """Let the server read messages, inform callers, and start another process."""
        for _ in range(3):
            await asyncio.sleep(0)
        for _ in range(1_000_000):
            if not self.process.is_dead:
                return
            await asyncio.sleep(0)
        raise AssertionError("no other process starts")

    async def end(self) -> None:
        """Check that each call ends in a bounded number of steps, and that nothing is left."""
        for _ in range(100_000):
            if not self.open:
                break
            await self.work()
            await self.settle()
        self.check()
        assert not self.open, "somebody got no end"
        for _ in range(1000):
            await self.work()
            await self.settle()
            if self.process.handler is not None and not self.process.scheduler.has_work:
                break
        self.process.read()
        process, pending = self.process, self.engine._pending
        assert process.handler is not None
        assert not pending.open
        assert not pending.unsent
        assert not process.handler._open
        assert not process.handler.call_by_request
        stats = process.scheduler.stats()
        assert stats.num_referenced_pages == stats.num_waiting == stats.num_running == 0
        self.count_pages()

    def count_pages(self) -> None:
        """Add up the counts of the process's scheduler."""
        if self.process.handler is not None:
            stats = self.process.scheduler.stats()
            self.counts["preemptions"] += stats.num_preemptions
            self.counts["hit tokens"] += stats.num_hit_tokens

    def check(self) -> None:
        for error in self.wrong:
            raise error
        pending = self.engine._pending
        assert pending.unsent.keys() <= pending.open.keys()
        if pending.unsent and pending.is_up and pending._running_alone is None:
            first = next(iter(pending._suspected.values()))
            assert pending.crash_history.must_run_alone_to_its_end(first.message), (
                "it waits for nothing"
            )
            assert len(pending.open) > len(pending.unsent), "it waits for nobody"
        process = self.process
        if process.handler is not None:
            check_scheduler(process.scheduler)
            check_index(process.index)
            ids = {request.id for request in process.scheduler.view().running}
            assert not ids & process.handler.call_by_request.keys(), (
                "it holds pages, and nobody was told"
            )
