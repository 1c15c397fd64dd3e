"""Constraints are compiled one at a time, tenants take turns, and no other request waits."""

from __future__ import annotations

import asyncio
import math
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

import pytest

from support.byte_tokenizer import byte_tokenizer
from support.servers import chat_body, live_server, post_bytes
from support.waiting import wait_for
from twostroke.core.constraint import Constraint
from twostroke.core.errors import OverloadedError, RequestError
from twostroke.engine.structured_output import grammar
from twostroke.engine.structured_output.grammar import Grammars
from twostroke.server.http.limits import RequestLimits
from twostroke.server.models import grammar_compiler
from twostroke.server.models.grammar_compiler import MAX_WAITING, GrammarCompiler
from twostroke.server.options import ServeOptions

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from twostroke.engine.structured_output.grammar import GrammarMatcher
    from twostroke.engine.structured_output.schema.document import Deadline

SLOW = Constraint("regex", "slow")


class SlowGrammars(Grammars):
    """Grammars of an engine that compile `SLOW` only when the test allows it."""

    def __init__(self) -> None:
        tokenizer = byte_tokenizer()
        super().__init__(tokenizer, tokenizer.vocab_size)
        self.has_begun, self.may_end = threading.Event(), threading.Event()

    def compile(self, constraint: Constraint, limit_s: float = math.inf) -> GrammarMatcher:
        if constraint == SLOW:
            self.has_begun.set()
            assert self.may_end.wait(60)
        return super().compile(constraint, limit_s)


@pytest.fixture
def grammars() -> Iterator[SlowGrammars]:
    result = SlowGrammars()
    result.prepare()
    yield result
    result.may_end.set()


def compiling(
    grammars: SlowGrammars, limit_s: float, is_ready: Callable[[], bool] = lambda: True
) -> GrammarCompiler:
    """Return a compiler with one thread, as an engine has."""
    thread = ThreadPoolExecutor(1)

    async def compile_(constraint: Constraint, limit_s: float) -> tuple[str, ...]:
        loop = asyncio.get_running_loop()
        return (
            await loop.run_in_executor(thread, grammars.compile, constraint, limit_s)
        ).unenforced_keywords

    return GrammarCompiler(compile_, limit_s, is_ready)


def test_time_without_an_engine_does_not_count(grammars: SlowGrammars) -> None:
    async def submit() -> None:
        health = [False]
        slow = asyncio.create_task(compiling(grammars, 0.2, lambda: health[0]).compile(SLOW))
        await asyncio.sleep(0.5)
        assert not slow.done()
        health[0] = True
        with pytest.raises(RequestError, match=r"longer than 0\.2 s"):
            await slow

    asyncio.run(submit())


def test_a_restarted_engine_compiles_again_in_turn() -> None:
    async def submit() -> None:
        constraints, process = list[Constraint](), [object()]

        async def compile_(constraint: Constraint, _: float) -> tuple[str, ...]:
            constraints.append(constraint)
            return ()

        compiler = GrammarCompiler(compile_, 1.0, engine_start_of=lambda: process[0])
        for _ in range(2):
            await compiler.compile(SLOW)
        assert len(constraints) == 1
        process[0] = object()
        await compiler.compile(SLOW)
        assert len(constraints) == 2

    asyncio.run(submit())


def test_engines_keep_more_than_the_server_knows() -> None:
    """A constraint that only the engine has forgotten would be compiled out of turn."""
    assert grammar_compiler._MAX_CACHED_RESULTS < grammar._MAX_CACHED_GRAMMARS


def test_waiting_for_others_does_not_count(grammars: SlowGrammars) -> None:
    async def submit() -> None:
        compiler = compiling(grammars, limit_s=1.0)
        slow = asyncio.create_task(compiler.compile(SLOW))
        await asyncio.to_thread(grammars.has_begun.wait, 20)
        quick = asyncio.create_task(compiler.compile(Constraint("regex", "b")))
        with pytest.raises(RequestError, match="longer than 1 s"):
            await slow
        await asyncio.sleep(0.1)  # longer than the limit since it asked
        assert not quick.done()
        grammars.may_end.set()
        assert await quick == (Constraint("regex", "b"), ())

    asyncio.run(submit())


def test_queue_of_constraints_is_bounded_and_drops_clients_that_left(
    grammars: SlowGrammars,
) -> None:
    async def submit() -> None:
        compiler = compiling(grammars, limit_s=20)
        others = [Constraint("regex", f"x{i}") for i in range(MAX_WAITING)]
        tasks = [
            asyncio.create_task(compiler.compile(constraint, "a")) for constraint in (SLOW, *others)
        ]
        await asyncio.to_thread(grammars.has_begun.wait, 20)
        with pytest.raises(OverloadedError, match="64 requests of this tenant wait"):
            await compiler.compile(Constraint("regex", "c"), "a")
        for task in tasks[2:]:
            task.cancel()
        await asyncio.gather(*tasks[2:], return_exceptions=True)
        grammars.may_end.set()
        assert await tasks[0]
        assert await tasks[1]
        assert await compiler.compile(Constraint("regex", "c"))
        assert grammars.cached(others[0])
        assert not any(map(grammars.cached, others[1:]))

    asyncio.run(submit())


def test_a_tenant_waits_for_one_constraint_of_another_and_not_for_all(
    grammars: SlowGrammars,
) -> None:
    async def submit() -> None:
        compiler, compiled_texts = compiling(grammars, limit_s=20), list[str]()

        async def compile_text(tenant: str, text: str) -> None:
            await compiler.compile(SLOW if text == "slow" else Constraint("regex", text), tenant)
            compiled_texts.append(text)

        flood = [
            asyncio.create_task(compile_text("flood", text)) for text in ("slow", "x1", "x2", "x3")
        ]
        await asyncio.to_thread(grammars.has_begun.wait, 20)
        others = [asyncio.create_task(compile_text("other", text)) for text in ("y1", "y2")]
        await asyncio.sleep(0.1)  # which the flood has used
        grammars.may_end.set()
        await asyncio.gather(*flood, *others)
        assert compiled_texts == ["slow", "y1", "y2", "x1", "x2", "x3"]

    asyncio.run(submit())


def test_turn_of_a_constraint_that_takes_too_long_ends(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each definition needs the one before it, which takes ten seconds to find out.

    The next constraint waits until the turn ends, and the slow compilation is abandoned.
    """
    names = [f"d{i}" for i in range(2000)]
    references = [{"$ref": f"#/$defs/{name}"} for name in names]
    named = [{"type": "array", "minItems": 1, "items": reference} for reference in references]
    schema = {
        "$defs": dict(zip(names, [{"const": 1}, *named], strict=False)),
        "properties": dict(zip(names, references, strict=True)),
        "required": names,
    }
    options = ServeOptions(limits=RequestLimits(compile_timeout_s=0.3))
    with live_server(tmp_path, options=options) as server:
        grammars, events = server.client.grammars, list[str]()
        compile_ = grammars._compile

        def noted(constraint: Constraint, deadline: Deadline) -> GrammarMatcher:
            events.append(f"{constraint.notation} begins")
            try:
                result = compile_(constraint, deadline)
            except TimeoutError:
                events.append(f"{constraint.notation} is given up")
                raise
            events.append(f"{constraint.notation} is done")
            return result

        monkeypatch.setattr(grammars, "_compile", noted)
        response = server.chat(guided_json=schema, max_tokens=5)
        assert response.status_code == 400
        assert "took longer than 0.3 s to compile" in response.json()["error"]["message"]
        assert server.chat(guided_regex="a", max_tokens=5).status_code == 200
        first = ["json_schema begins", "json_schema is given up"]
        assert events == [*first, "regex begins", "regex is done"]


def test_server_never_compiles_on_the_event_loop(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """This also holds for a constraint that others have pushed out of the cache meanwhile."""
    with live_server(tmp_path) as server:
        grammars, threads = server.client.grammars, list[str]()
        compile_ = grammars._compile

        def noted(constraint: Constraint, deadline: Deadline) -> GrammarMatcher:
            threads.append(threading.current_thread().name)
            return compile_(constraint, deadline)

        def compile_and_forget(constraint: Constraint, limit_s: float = 1.0) -> GrammarMatcher:
            result = Grammars.compile(grammars, constraint, limit_s)
            grammars._cache.clear()
            return result

        monkeypatch.setattr(grammars, "_compile", noted)
        monkeypatch.setattr(grammars, "compile", compile_and_forget)
        response = server.chat(guided_choice=["a", "b"], n=3, max_tokens=3)
        assert response.status_code == 200
        assert {c["message"]["content"] for c in response.json()["choices"]} <= {"a", "b"}
        assert threads
        assert all(name.startswith("twostroke-grammar") for name in threads)


def test_client_that_leaves_while_others_are_compiled_is_not_answered(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with live_server(tmp_path) as server:
        grammars, has_begun, may_end = server.client.grammars, threading.Event(), threading.Event()
        compile_ = grammars._compile

        def slow(constraint: Constraint, deadline: Deadline) -> GrammarMatcher:
            has_begun.set()
            assert may_end.wait(60)
            return compile_(constraint, deadline)

        monkeypatch.setattr(grammars, "_compile", slow)
        connection = server.connect()
        connection.sendall(post_bytes("/v1/chat/completions", chat_body(guided_regex="a+")))
        assert has_begun.wait(60)
        connection.close()
        wait_for(lambda: not server.api._open_requests)
        may_end.set()
        server.wait_idle()
        assert server.backend.num_steps == 0


@pytest.mark.parametrize("fails", [False, True])
def test_stream_shows_that_it_is_alive_while_its_constraint_waits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *, fails: bool
) -> None:
    """An example is a model that must be loaded before it can compile."""
    with live_server(tmp_path, ServeOptions(drain_s=1, keep_alive_s=0.1)) as server:
        grammars, may_end = server.client.grammars, threading.Event()
        compile_ = grammars._compile

        def slow(constraint: Constraint, deadline: Deadline) -> GrammarMatcher:
            assert may_end.wait(60)
            if fails:
                raise RequestError("is {why}.", why="too wide")
            return compile_(constraint, deadline)

        monkeypatch.setattr(grammars, "_compile", slow)
        body = chat_body(stream=True, guided_regex="a{3}")
        with server.http.stream("POST", "/v1/chat/completions", json=body) as got:
            lines = got.iter_lines()
            assert [next(lines) for _ in range(4)] == [": keep-alive", ""] * 2
            may_end.set()
            output = "\n".join(line for line in lines if line.startswith("data"))
        assert ("cannot be followed. too wide" in output) == fails
        assert ('"content":"a' in output) != fails
        server.wait_idle()


def test_failing_constraint_is_not_counted_as_an_engine_failure(tmp_path: Path) -> None:
    """The grammar is found to be too wide after its first letter."""
    ways = [f'r{i}: "a" "b" "c{i}"' for i in range(1500)]
    names = " | ".join(f"r{i}" for i in range(1500))
    grammar = "\n".join(['start: "a" x', f"x: {names}", *ways])
    with live_server(tmp_path) as server:
        response = server.chat(guided_grammar=grammar, max_tokens=5)
        assert response.status_code == 400, response.text
        assert response.json()["error"]["param"] == "guided_grammar"
        assert server.backend.num_steps > 0
        assert server.api.metrics.failures._value.get() == 0
