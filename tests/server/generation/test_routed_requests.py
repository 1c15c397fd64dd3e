"""A request that a router can send to another server fails at once if its engine dies."""

from __future__ import annotations

from contextlib import closing
from typing import TYPE_CHECKING, Any

import httpx
import pytest

from exact.engine_killers import ANSWERS, EMBEDDINGS
from support.remote import options
from support.server_thread import ServerThread
from support.tiny import infill_metadata, write_tiny_gguf
from twostroke.engine.engine import build
from twostroke.engine.process.served import LocalEngine
from twostroke.server.app import Api
from twostroke.server.middleware import build_app
from twostroke.server.options import ServeOptions

if TYPE_CHECKING:
    from collections.abc import Iterator

PATHS = ANSWERS | EMBEDDINGS


class RecordingEngine(LocalEngine):
    """An engine that records whether a router can send its calls elsewhere."""

    continues_elsewhere: bool | None = None

    async def generate(self, prompts: Any, params: Any, caller: Any, *rest: Any) -> Any:
        self.continues_elsewhere = caller.continues_elsewhere
        return await super().generate(prompts, params, caller, *rest)

    async def embed(self, texts: Any, params: Any, caller: Any) -> Any:
        self.continues_elsewhere = caller.continues_elsewhere
        return await super().embed(texts, params, caller)


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, RecordingEngine]]:
    folder = tmp_path_factory.mktemp("routed")
    model = write_tiny_gguf(folder / "tiny.gguf", metadata=infill_metadata())
    with (
        build(str(model), options()) as engine,
        closing(RecordingEngine(engine.client)) as recording_engine,
        closing(Api(recording_engine, ServeOptions(drain_s=1), None, None)) as api,
        closing(ServerThread(build_app(api), api)) as thread,
    ):
        yield f"http://127.0.0.1:{thread.port}", recording_engine


@pytest.mark.parametrize("is_routed", [False, True])
@pytest.mark.parametrize("path", PATHS)
def test_the_engine_knows_that_a_router_can_send_a_request_elsewhere(
    served: tuple[str, RecordingEngine], path: str, is_routed: bool
) -> None:
    url, engine = served
    engine.continues_elsewhere = None
    headers = {"x-twostroke-resume": "none"} if is_routed else {}
    body = {"model": "tiny", "stream": False} | PATHS[path]("hello")
    answer = httpx.post(url + path, json=body, headers=headers, timeout=60, trust_env=False)
    assert answer.status_code == 200, answer.text
    assert engine.continues_elsewhere is is_routed
