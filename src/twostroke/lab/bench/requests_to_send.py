"""The requests that a run sends: from a synthetic load, a trace, or a file of prompts."""

from __future__ import annotations

import json
from io import TextIOWrapper
from typing import TYPE_CHECKING, Any, Final, Protocol

from twostroke.core.errors import UsageError
from twostroke.core.files import open_regular_file
from twostroke.core.frozen import Frozen
from twostroke.lab.bench.request_form import PlannedRequest

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from twostroke.lab.bench.answers import MeasuredAnswer
    from twostroke.lab.bench.prompts import PromptWriter
    from twostroke.lab.bench.request_form import PromptContent, RequestForm
    from twostroke.lab.simulator.load import Workload

_MAX_PROMPTS: Final = 1_000_000
_MAX_ANSWER_TOKENS: Final = 1 << 20


class RequestSource(Protocol):
    """Makes the requests of a run one after another, so that never all are in memory."""

    @property
    def count(self) -> int:
        """The number of requests."""

    def at_s(self, number: int) -> float:
        """When a request of an open loop is due, in seconds after the start."""

    def request(self, number: int) -> PlannedRequest:
        """Return a request that is ready to be sent."""

    def following(self, planned: PlannedRequest, answer: MeasuredAnswer) -> PlannedRequest | None:
        """Return the request that follows an answer in its conversation; None at the end."""


class SingleRequestSource:
    """A source whose requests do not depend on each other's answers."""

    def following(self, planned: PlannedRequest, answer: MeasuredAnswer) -> None:
        """Return None: no request follows another."""
        del planned, answer


class WorkloadSource(SingleRequestSource):
    """Requests of a synthetic load or a trace, with texts of the wanted lengths."""

    def __init__(self, workload: Workload, writer: PromptWriter, form: RequestForm) -> None:
        """Make the requests of a workload in the form that the endpoint takes."""
        self._workload = workload
        self._writer = writer
        self._form = form

    @property
    def count(self) -> int:
        """The number of requests."""
        return len(self._workload.arrivals)

    def at_s(self, number: int) -> float:
        """When a request is due, in seconds after the start."""
        return self._workload.arrivals[number].at_s

    def request(self, number: int) -> PlannedRequest:
        """Return a request with its text."""
        arrival = self._workload.arrivals[number]
        text = self._writer.write(arrival, number)
        body = self._form.body(text, arrival.num_output)
        return PlannedRequest(number, body, arrival.num_prompt, arrival.num_output)


class DatasetPrompt(Frozen):
    """A line of a file of prompts; `max_output` limits the answer's tokens, 0 for the default."""

    content: PromptContent
    max_output: int = 0


class DatasetSource(SingleRequestSource):
    """Requests with the prompts of a file."""

    def __init__(
        self,
        prompts: tuple[DatasetPrompt, ...],
        form: RequestForm,
        *,
        default_max_output: int,
        times_s: tuple[float, ...] = (),
    ) -> None:
        """Make a request of each prompt; `times_s` is when each is due in an open loop."""
        self._prompts = prompts
        self._form = form
        self._default_max_output = default_max_output
        self._times_s = times_s

    @property
    def count(self) -> int:
        """The number of requests."""
        return len(self._prompts)

    def at_s(self, number: int) -> float:
        """When a request is due, in seconds after the start."""
        return self._times_s[number]

    def request(self, number: int) -> PlannedRequest:
        """Return a request with a prompt of the file."""
        prompt = self._prompts[number]
        max_output = prompt.max_output or self._default_max_output
        body = self._form.body(prompt.content, max_output)
        return PlannedRequest(number, body, num_output=max_output)


def read_dataset(path: Path, count: int | None) -> tuple[DatasetPrompt, ...]:
    """Return the first `count` prompts of a file of JSON Lines; all for None.

    Each line has a `prompt` or `messages`, and may have `max_tokens`; other fields are ignored.

    Raises:
        UsageError: the file cannot be read, has too few prompts, or a line is not a prompt; the
            message has the line's number.
    """
    prompts: list[DatasetPrompt] = []
    try:
        for number, line in _numbered_lines(path):
            if len(prompts) == (_MAX_PROMPTS if count is None else count):
                break
            try:
                prompts.append(_dataset_prompt(line))
            except ValueError as error:
                raise UsageError(f"{path.name}, line {number}: {error}.") from None
    except OSError as error:
        raise UsageError(f"{path.name} cannot be read: {error.strerror}.") from None
    except UnicodeDecodeError:
        raise UsageError(f"{path.name} is not UTF-8 text.") from None
    if not prompts:
        raise UsageError(f"{path.name} has no prompts.")
    if count is not None and len(prompts) < count:
        reason = "must be at most {limit}, the number of prompts in {path}, got {value}."
        facts = {"limit": len(prompts), "path": path.name, "value": count}
        raise UsageError(reason, field="num_requests", **facts)
    return tuple(prompts)


def _numbered_lines(path: Path) -> Iterator[tuple[int, str]]:
    with TextIOWrapper(open_regular_file(path), "utf-8") as file:
        for number, line in enumerate(file, 1):
            if line.strip():
                yield number, line


def _dataset_prompt(line: str) -> DatasetPrompt:
    """Return the prompt of a line; raise ValueError with the reason if it is not valid."""
    try:
        row = json.loads(line)
    except (ValueError, RecursionError):
        row = None
    if not isinstance(row, dict):
        raise ValueError("it is not a JSON object")  # noqa: TRY004 - the caller adds the line
    if ("prompt" in row) == ("messages" in row):
        raise ValueError("it must have either prompt or messages")
    max_output = row.get("max_tokens")
    is_count = isinstance(max_output, int) and not isinstance(max_output, bool)
    if max_output is not None and not (is_count and 1 <= max_output <= _MAX_ANSWER_TOKENS):
        raise ValueError(
            f"max_tokens must be a whole number from 1 to {_MAX_ANSWER_TOKENS}, got {max_output!r}"
        )
    content: Any = row.get("prompt", row.get("messages"))
    if "prompt" in row and not (isinstance(content, str) and content):
        raise ValueError("prompt must be a text")
    if "messages" in row and not _are_messages(content):
        raise ValueError("messages must be a list of objects with a role")
    return DatasetPrompt(content, max_output or 0)


def _are_messages(content: object) -> bool:
    return (
        isinstance(content, list)
        and bool(content)
        and all(isinstance(message, dict) and "role" in message for message in content)
    )
