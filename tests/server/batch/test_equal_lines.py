"""Equal lines of batches are computed once, and each line gets its answer."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from server.batch.test_openai import begin, content, finished_batch, line
from support.servers import LiveServer, live_server

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from twostroke.server.storage import Records


@pytest.fixture
def server(tmp_path: Path, records: Records) -> Iterator[LiveServer]:
    """Start a server that computes equal requests once."""
    with live_server(tmp_path, records=records, coalesces=True) as live:
        yield live


def test_equal_lines_are_computed_once(server: LiveServer) -> None:
    lines = [line(f"n{i}", temperature=0, seed=i % 2) for i in range(50)]
    scheduler = server.client.loop.snapshot().scheduler
    assert scheduler.num_prompt_tokens == 0
    batch = finished_batch(server, begin(server, *lines))
    assert batch["request_counts"] == {"total": 50, "completed": 50, "failed": 0}
    results = content(server, batch["output_file_id"])
    assert [result["custom_id"] for result in results] == [f"n{i}" for i in range(50)]
    bodies = [result["response"]["body"] for result in results]
    assert all(body["choices"] == bodies[i % 2]["choices"] for i, body in enumerate(bodies))
    num_prompt = bodies[0]["usage"]["prompt_tokens"]
    assert server.client.loop.snapshot().scheduler.num_prompt_tokens == 2 * num_prompt


def test_random_lines_are_computed_each(server: LiveServer) -> None:
    batch = finished_batch(server, begin(server, *(line(f"n{i}") for i in range(8))))
    [body, *_] = [row["response"]["body"] for row in content(server, batch["output_file_id"])]
    num_prompt = body["usage"]["prompt_tokens"]
    assert server.client.loop.snapshot().scheduler.num_prompt_tokens == 8 * num_prompt
