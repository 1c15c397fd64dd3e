"""A plugin of pytest that runs an SDK's own tests of its resources against our server.

The tests are written for a mock: they name objects that nobody stored, and fill each optional field
with a sample. So an object is stored first, and its id replaces the name (`sdk_objects.py`). Values
that no server can answer, or that this one refuses, are replaced (`REPLACED`), so that the rest of
the test is still made. A test whose values ask for pictures, sound, or tools and services of the
provider counts as refused. The run fails if fewer than 95% of the other tests pass.
"""

from __future__ import annotations

import copy
import os
from collections import Counter, defaultdict
from dataclasses import dataclass
from fnmatch import fnmatchcase
from importlib import import_module
from typing import Any

import pytest
import sdk_objects

SDK = os.environ["SDK"]
MIN_PASSED_SHARE = 0.95

# Tests that send nothing.
NOT_MADE = {"*path_params*": "the SDK itself refuses, and sends nothing"}


@dataclass(frozen=True, eq=False)
class Replaced:
    """A value in requests to a path, its replacement (None: nothing), and why.

    Tests with `unless` in their names send it as it is. With `is_refused` a server of the provider
    answers it, and ours does not.
    """

    path: str
    field: str
    sent: Any  # ANY for any value, None if it lacks
    instead: Any
    reason: str
    is_refused: bool = False
    unless: str | None = None


ANY = object()
_NO_OBJECT = "names an object that does not exist"
_ZERO = "is below the least that there can be"
_PROVIDER = "is a tool or a service of the provider"
_CHAT, _RESPONSES = "/chat/completions", "/responses"
REPLACED = (
    Replaced(_CHAT, "max_tokens", 0, 4, _ZERO),
    Replaced(_CHAT, "max_completion_tokens", 0, 4, _ZERO),
    Replaced(_CHAT, "web_search_options", ANY, None, _PROVIDER, is_refused=True),
    Replaced("*", "limit", 0, 1, _ZERO),
    Replaced("*", "after", "after", None, _NO_OBJECT),
    Replaced("*", "page", "page", None, _NO_OBJECT),
    *(Replaced("*", name, name, None, _NO_OBJECT) for name in ("after_id", "before_id")),
    Replaced(  # by itself the SDK asks for a text that its strict types then refuse
        "/embeddings", "encoding_format", "base64", "float", "is no list", unless="[loose]"
    ),
    Replaced(_RESPONSES, "input", None, "string", "nothing is asked"),
    Replaced(f"{_RESPONSES}/compact", "input", None, "string", "nothing is asked"),
    Replaced(f"{_RESPONSES}*", "conversation", ANY, None, "not with previous_response_id"),
    *(
        Replaced(_RESPONSES, name, ANY, None, _PROVIDER, is_refused=True)
        for name in ("moderation", "prompt")
    ),
    *(
        Replaced("/messages*", name, ANY, None, _PROVIDER, is_refused=True)
        for name in ("container", "mcp_servers", "thread")
    ),
    *(
        Replaced("/messages*", f"tools.0.input_schema.properties.{name}", "bar", {}, "is no schema")
        for name in ("location", "unit")
    ),
)


class Suite:
    """Mends requests, and counts how the tests ended."""

    def __init__(self) -> None:
        self.test, self.is_mocked = "", False
        self.not_made: Counter[str] = Counter()
        self.replaced: defaultdict[str, set[Replaced]] = defaultdict(set)
        self.failed: dict[str, str] = {}
        self.passed_tests: set[str] = set()

    def pytest_collection_modifyitems(
        self, config: pytest.Config, items: list[pytest.Item]
    ) -> None:
        selected_items, left = [], []
        for item in items:
            reason = next(
                (NOT_MADE[pattern] for pattern in NOT_MADE if fnmatchcase(item.nodeid, pattern)),
                None,
            )
            (selected_items if reason is None else left).append(item)
            self.not_made.update([reason] if reason else [])
        items[:] = selected_items
        config.hook.pytest_deselected(items=left)

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_call(self, item: pytest.Item) -> Any:
        self.test = item.nodeid
        self.is_mocked = "respx_mock" in item.fixturenames  # the test itself answers
        return (yield)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed:
            crash = getattr(report.longrepr, "reprcrash", None)
            self.failed[report.nodeid] = (crash.message if crash else str(report.longrepr))[:300]
        elif report.when == "call":
            self.passed_tests.add(report.nodeid)

    def mend(self, options: Any) -> Any:
        """Return what an SDK is about to send, with what cannot be answered replaced."""
        if self.is_mocked:
            return options
        options = options.model_copy()
        options.url = sdk_objects.stored_path(options.url, options.method)
        for attribute in ("json_data", "params"):
            if isinstance(sent := getattr(options, attribute), dict):
                sent = sdk_objects.stored_fields(options.url, copy.deepcopy(sent))
                setattr(options, attribute, sent)
                path, _, _ = options.url.partition("?")
                self._replace(path.removeprefix("/v1"), sent)
        return options

    def _replace(self, path: str, sent: dict[str, Any]) -> None:
        for replacement in REPLACED:
            *above, last = replacement.field.split(".")
            inner: Any = sent
            for name in above:
                inner = inner[int(name)] if isinstance(inner, list) else inner.get(name, {})
            value = inner.get(last)
            is_sent = value is not None if replacement.sent is ANY else value == replacement.sent
            is_left = replacement.unless is not None and replacement.unless in self.test
            if not is_sent or is_left or not fnmatchcase(path, replacement.path):
                continue
            self.replaced[self.test].add(replacement)
            inner[last] = replacement.instead
            if replacement.instead is None:
                del inner[last]

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        say = terminalreporter.write_line
        for test, message in self.failed.items():
            say(f"  FAILED {test}: {message}")
        for is_refused, word in ((True, "refused"), (False, "not allowed by the protocol")):
            tests: Counter[Replaced] = Counter()
            for test in self.passed_tests:
                tests.update(each for each in self.replaced[test] if each.is_refused == is_refused)
            for value, count in sorted(tests.items(), key=lambda entry: entry[0].field):
                say(f"  {word}: {value.field} of {value.path} ({count} tests): {value.reason}")
        for reason, count in self.not_made.items():
            say(f"  not made ({count} tests): {reason}")
        say(f"  {self._summary()}")

    def _summary(self) -> str:
        num_passed, num_refused = self._counts()
        share = num_passed / max(1, num_passed + len(self.failed))
        return (
            f"{num_passed} passed, {len(self.failed)} failed: {share:.1%}; {num_refused} refused "
            "for pictures, sound, and tools or services of the provider"
        )

    def _counts(self) -> tuple[int, int]:
        """Return how many tests passed, and how many passed only without refused values."""
        refused = {
            test for test in self.passed_tests if any(v.is_refused for v in self.replaced[test])
        }
        return len(self.passed_tests) - len(refused), len(refused)

    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        num_passed, _ = self._counts()
        if num_passed < MIN_PASSED_SHARE * (num_passed + len(self.failed)):
            session.exitstatus = pytest.ExitCode.TESTS_FAILED
        else:
            session.exitstatus = pytest.ExitCode.OK


def pytest_configure(config: pytest.Config) -> None:
    """Stand between the SDK's requests and the network."""
    suite = Suite()
    config.pluginmanager.register(suite)
    sdk = import_module(f"{SDK}._base_client").BaseClient
    build = sdk._build_request

    def mended(self: Any, options: Any, **rest: Any) -> Any:
        return build(self, suite.mend(options), **rest)

    sdk._build_request = mended
