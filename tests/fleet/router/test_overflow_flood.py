"""A flood before a server of ours: requests leave exactly where the rule says so."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

import httpx
import pytest

from support.accounts import SECRET, accounting, used
from support.keys import add
from support.servers import live_server
from support.vendors import CHAT, overflow_file, start_vendor
from support.waiting import wait_for
from twostroke.core.errors import OverloadedError
from twostroke.server.auth.keys import ApiKeys
from twostroke.server.options import ServeOptions

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from support.replicas import Loop
    from support.servers import LiveServer

NUM_REQUESTS = 40
OBJECTIVE_S = 0.3


def flood(url: str, keys: list[str]) -> list[httpx.Response]:
    """Send requests of all keys at once, streamed and whole; each prompt names its key."""

    def post(number: int) -> httpx.Response:
        which = number % len(keys)
        prompt = f"key{which} number{number} " + "hello " * 20
        body = {
            "model": "tiny",
            "messages": [{"role": "user", "content": prompt}],
            "max_tokens": 4,
            "stream": number % 3 == 0,
        }
        headers = {"x-api-key": keys[which]}
        return httpx.post(url + CHAT, json=body, headers=headers, timeout=120, trust_env=False)

    with ThreadPoolExecutor(NUM_REQUESTS) as pool:
        return list(pool.map(post, range(NUM_REQUESTS)))


class Estimates:
    """Records the times to the first token that a router expects."""

    def __init__(self, estimate: Callable[..., float]) -> None:
        """Record the results of `estimate`."""
        self._estimate = estimate
        self.expected_s: list[float] = []

    def __call__(self, *args: Any) -> float:
        """Return the next result."""
        expected_s = self._estimate(*args)
        self.expected_s.append(expected_s)
        return expected_s


@pytest.mark.parametrize("rule", ["objective", "no_replica"])
def test_a_flood_overflows_where_the_rule_applies_and_never_for_a_key_that_forbids_it(
    rule: str, fakes: Loop, tmp_path: Path
) -> None:
    keys = [add(tmp_path, "open", "anna")[1], add(tmp_path, "closed", "ben", overflow=False)[1]]
    vendor = start_vendor(fakes)
    path = overflow_file(tmp_path, vendor, when=(rule,), objective=OBJECTIVE_S)
    options = ServeOptions(drain_s=1, api_keys=ApiKeys.read(None, None, router=SECRET))
    limits: dict[str, Any] = {} if rule == "objective" else {"max_waiting_requests": 4}
    with ExitStack() as stack:
        server: LiveServer = stack.enter_context(
            live_server(tmp_path, options, max_running=2, **limits)
        )
        router = stack.enter_context(accounting(tmp_path, server.url, overflow=path))
        wait_for(lambda: bool(router.router.fleet.ready))
        server.backend.pause_s = 0.02
        estimates = Estimates(router.router.fleet.dispatcher.expected_first_token_s)
        router.router.fleet.dispatcher.expected_first_token_s = estimates  # type: ignore[method-assign]
        flood(router.url, keys[1:])  # the router learns the pace
        assert vendor.seen == []
        assert estimates.expected_s == []  # a key that forbids it is not even considered
        answers = flood(router.url, keys)
    bought = [answer for answer in answers if "x-twostroke-upstream" in answer.headers]
    here = [answer for answer in answers if answer not in bought]
    assert len(vendor.seen) == len(bought) > 0
    assert not any(b"key1" in exchange.body for exchange in vendor.seen)
    if rule == "objective":
        assert [answer.status_code for answer in answers] == [200] * NUM_REQUESTS
        too_late = [expected_s for expected_s in estimates.expected_s if expected_s > OBJECTIVE_S]
        assert len(bought) == len(too_late)
        assert len(estimates.expected_s) == NUM_REQUESTS // 2
    else:
        # The server refuses what does not fit into its queue: the open key then buys the answer.
        assert {answer.status_code for answer in answers[::2]} == {200}
        assert {answer.status_code for answer in answers[1::2]} == {
            200,
            OverloadedError.http_status,
        }
    assert here
    rows = {row[2]: row[3] for row in used(tmp_path)}
    assert rows["vendor1/big-1"] == len(bought)
