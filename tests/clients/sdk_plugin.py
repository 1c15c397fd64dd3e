"""A plugin of pytest that runs an SDK's own tests of its resources against our server.

The tests are written for a mock: they name objects that nobody stored, and fill each optional field
with a sample. So an object is stored first, and its id replaces the name (`STORED`). Values that
cannot be answered are replaced (`REPLACED`), so that the rest of the test is still made. The run
fails if a test fails, or if of those whose values the protocol allows fewer than 95% pass with all
that they send.
"""

from __future__ import annotations

import copy
import json
import os
import urllib.request
from collections import Counter, defaultdict
from dataclasses import dataclass
from fnmatch import fnmatchcase
from importlib import import_module
from typing import Any

import pytest

URL, MODEL, SDK = os.environ["BASE_URL"], os.environ["MODEL"], os.environ["SDK"]
ASKED = 0.95

# What the tests call a stored object, and the path that stores one.
STORED = {
    "completion_id": "chat/completions",
    "resp_677efb5139a88190b512bc3fef8e535d": "responses",
    "resp_123": "responses",
    "response_id": "responses",
    "previous_response_id": "responses",
}

# Tests that are not made, and why.
NOT_MADE = {
    "*path_params*": "the SDK itself refuses, and sends nothing",
    "*test_models*delete*": "a model is not deleted over HTTP",
    "*test_responses*cancel*": "no answer runs in the background, so none can be cancelled",
    "*test_responses*compact*": "conversations are not compacted",
    "*test_responses*retrieve*overload_2*": "only an answer in the background is streamed later",
}


@dataclass(frozen=True, eq=False)
class Replaced:
    """A value in requests to a path, what replaces it (None: nothing), and why.

    Tests with `unless` in their names send it as it is.
    """

    path: str
    field: str
    sent: Any  # ANY for whatever it is, None if it lacks
    instead: Any
    reason: str
    is_allowed: bool = False  # by the protocol, so that we refuse what others answer
    unless: str | None = None


ANY = object()
_NO_OBJECT = "names an object that does not exist"
_ZERO = "is below the least that there can be"
_BEYOND = "asks the service for more than an answer of its model"
_CHAT, _RESPONSES = "/chat/completions", "/responses"
REPLACED = (
    Replaced(_CHAT, "max_tokens", 0, 4, _ZERO),
    Replaced(_CHAT, "max_completion_tokens", 0, 4, _ZERO),
    Replaced(_CHAT, "web_search_options", ANY, None, _BEYOND, is_allowed=True),
    Replaced(f"{_CHAT}*", "limit", 0, 1, _ZERO),
    Replaced(f"{_CHAT}*", "after", "after", None, _NO_OBJECT),
    Replaced(  # by itself the SDK asks for what its strict types then refuse
        "/embeddings", "encoding_format", "base64", "float", "is no list", unless="[loose]"
    ),
    Replaced("/completions", "echo", True, None, "not with suffix and logprobs", is_allowed=True),
    Replaced(_RESPONSES, "input", None, "string", "nothing is asked"),
    Replaced(f"{_RESPONSES}*", "conversation", ANY, None, "not with previous_response_id"),
    *(
        Replaced(_RESPONSES, field, ANY, None, _BEYOND, is_allowed=True)
        for field in ("background", "background_options", "moderation", "prompt")
    ),
    Replaced(f"{_RESPONSES}/resp_*", "starting_after", 0, None, "belongs to a stream"),
    Replaced(f"{_RESPONSES}/*", "limit", 0, 1, _ZERO),
    Replaced(f"{_RESPONSES}/*", "after", "after", None, _NO_OBJECT),
    *(Replaced("/models", name, name, None, _NO_OBJECT) for name in ("after_id", "before_id")),
    Replaced("/messages", "container", ANY, None, _BEYOND, is_allowed=True),
    *(
        Replaced("/messages*", f"tools.0.input_schema.properties.{name}", "bar", {}, "is no schema")
        for name in ("location", "unit")
    ),
)


class Suite:
    """Mends requests, and counts how the tests ended."""

    def __init__(self) -> None:
        self.test = ""
        self.not_made: Counter[str] = Counter()
        self.replaced: defaultdict[str, set[Replaced]] = defaultdict(set)
        self.failed: dict[str, str] = {}
        self.passed: set[str] = set()

    def pytest_collection_modifyitems(
        self, config: pytest.Config, items: list[pytest.Item]
    ) -> None:
        kept, left = [], []
        for item in items:
            reason = next(
                (NOT_MADE[one] for one in NOT_MADE if fnmatchcase(item.nodeid, one)), None
            )
            (kept if reason is None else left).append(item)
            self.not_made.update([reason] if reason else [])
        items[:] = kept
        config.hook.pytest_deselected(items=left)

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_call(self, item: pytest.Item) -> Any:
        self.test = item.nodeid
        return (yield)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed:
            crash = getattr(report.longrepr, "reprcrash", None)
            self.failed[report.nodeid] = (crash.message if crash else str(report.longrepr))[:300]
        elif report.when == "call":
            self.passed.add(report.nodeid)

    def mend(self, options: Any) -> Any:
        """Return what an SDK is about to send, with what cannot be answered replaced."""
        options = options.model_copy()
        options.url = "/".join(_stored(part) for part in options.url.split("/"))
        for place in ("json_data", "params"):
            if isinstance(sent := getattr(options, place), dict):
                setattr(options, place, sent := copy.deepcopy(sent))
                self._replace(options.url.removeprefix("/v1"), sent)
        return options

    def _replace(self, path: str, sent: dict[str, Any]) -> None:
        for one in REPLACED:
            *above, last = one.field.split(".")
            inner: Any = sent
            for name in above:
                inner = inner[int(name)] if isinstance(inner, list) else inner.get(name, {})
            value = inner.get(last)
            is_sent = value is not None if one.sent is ANY else value == one.sent
            is_left = one.unless is not None and one.unless in self.test
            if not is_sent or is_left or not fnmatchcase(path, one.path):
                continue
            self.replaced[self.test].add(one)
            inner[last] = one.instead
            if one.instead is None:
                del inner[last]
        if "previous_response_id" in sent:
            sent["previous_response_id"] = _stored(sent["previous_response_id"])

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        say = terminalreporter.write_line
        for test, message in self.failed.items():
            say(f"  FAILED {test}: {message}")
        for is_allowed, why in ((True, "refused"), (False, "not allowed by the protocol")):
            tests: Counter[Replaced] = Counter()
            for test in self.passed:
                tests.update(one for one in self.replaced[test] if one.is_allowed == is_allowed)
            for one, count in sorted(tests.items(), key=lambda entry: entry[0].field):
                say(f"  {why}: {one.field} of {one.path} ({count} tests): {one.reason}")
        for reason, count in self.not_made.items():
            say(f"  not made ({count} tests): {reason}")
        say(f"  {self._summary()}")

    def _summary(self) -> str:
        whole, partly, wrong = self._counts()
        return (
            f"{whole} of {whole + partly + len(self.failed)} tests that send what the protocol "
            f"allows pass; {partly} more pass without what we refuse; {wrong} pass without what "
            f"the protocol does not allow; {len(self.failed)} fail"
        )

    def _counts(self) -> tuple[int, int, int]:
        """Return how many passed with all they send, without what we refuse, and mended."""
        kinds: Counter[str] = Counter()
        for test in self.passed:
            replaced = self.replaced[test]
            if not replaced:
                kinds["whole"] += 1
            else:
                kinds["refused" if all(one.is_allowed for one in replaced) else "wrong"] += 1
        return kinds["whole"], kinds["refused"], kinds["wrong"]

    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        whole, partly, _ = self._counts()
        if whole < ASKED * (whole + partly + len(self.failed)):
            session.exitstatus = pytest.ExitCode.TESTS_FAILED


def pytest_configure(config: pytest.Config) -> None:
    """Stand between the SDK's requests and the network."""
    suite = Suite()
    config.pluginmanager.register(suite)
    sdk = import_module(f"{SDK}._base_client").BaseClient
    build = sdk._build_request

    def mended(self: Any, options: Any, **rest: Any) -> Any:
        return build(self, suite.mend(options), **rest)

    sdk._build_request = mended


def _stored(name: str) -> str:
    """Return the id of an object that was just stored, if `name` stands for one."""
    if name not in STORED:
        return name
    # The SDK's type of a stored message knows no other role.
    said = {"messages": [{"role": "assistant", "content": "Hi"}]} if "chat" in STORED[name] else {}
    body = {"model": MODEL, "store": True, **(said or {"input": "Hi"})}
    body |= {"max_tokens": 2} if said else {"max_output_tokens": 2}
    headers = {"content-type": "application/json"}
    request = urllib.request.Request(f"{URL}/{STORED[name]}", json.dumps(body).encode(), headers)
    with urllib.request.urlopen(request) as answer:
        return str(json.load(answer)["id"])
