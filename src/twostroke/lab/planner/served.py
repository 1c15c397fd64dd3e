"""Steps that a running server has taken, by which planned times are corrected."""

from __future__ import annotations

import json
import math
import time
from statistics import median
from typing import TYPE_CHECKING, Any, Final
from urllib.parse import urlsplit

from twostroke.core.errors import EngineStoppedError, UsageError
from twostroke.core.frozen import Frozen
from twostroke.model.program.batch import BatchShape

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from twostroke.lab.planner.models import PlannedModel

_ANSWER_S: Final = 10.0
_FEWEST: Final = 3  # steps of one shape; a lone one may have been disturbed
_CELLS: Final = 2  # for each doubling of a coordinate
_PAUSE_S: Final = 1.0
_FIELDS: Final = ("rows", "prompt_rows", "requests", "step_s", "attended", "turn_s")


class ServedStep(Frozen):
    """What the steps of one shape took in a server's loop, with all that it does between two.

    `attended` counts pairs of a row and a position before it or its own; `seconds` is the median,
    and `between_s` that of what lies outside the step itself: a loop that has paused did it before.
    """

    rows: int
    prompt_rows: int
    requests: int
    attended: int
    seconds: float
    between_s: float = 0.0

    @property
    def batch(self) -> BatchShape:
        """A step of this shape: prompts have equally many rows, and all contexts are equal."""
        num_decoding = self.rows - self.prompt_rows
        num_reading = self.requests - num_decoding
        counts = [1] * num_decoding
        for index in range(num_reading):
            each = self.prompt_rows * (index + 1) // num_reading
            counts.append(each - self.prompt_rows * index // num_reading)
        inside = sum([count * (count + 1) // 2 for count in counts])
        start = max(0, round((self.attended - inside) / self.rows))
        return BatchShape((start,) * len(counts), tuple(counts), self.requests)

    @property
    def name(self) -> str:
        """A readable name."""
        prompt = f", {self.prompt_rows:,} rows of prompts" if self.prompt_rows else ""
        return f"served, {self.requests} requests{prompt}"


def grouped(steps: Iterable[Sequence[Any]]) -> tuple[ServedStep, ...]:
    """Return what steps of like shapes took; `steps` are as `/api/state` shows them.

    A server shows each step for a while: however often it was seen, it counts once. Steps that the
    loop began after a pause are left out, and those with guesses.
    """
    cells: dict[tuple[int, ...], list[ServedStep]] = {}
    for rows, prompt_rows, requests, step_s, attended, turn_s in dict.fromkeys(map(tuple, steps)):
        one = ServedStep(rows, prompt_rows, requests, attended, turn_s, max(0.0, turn_s - step_s))
        if turn_s > 0 and _is_plain(one):
            cells.setdefault(cell_of(one), []).append(one)
    found = []
    for alike in cells.values():
        if len(alike) >= _FEWEST:
            middle = sorted(alike, key=lambda one: one.attended)[len(alike) // 2]
            times = (one.seconds for one in alike), (one.between_s for one in alike)
            found.append(ServedStep(*_counts(middle), *map(median, times)))
    return tuple(found)


def merged(old: Iterable[ServedStep], new: Iterable[ServedStep]) -> tuple[ServedStep, ...]:
    """Return both, of each shape the new one."""
    return tuple(({cell_of(one): one for one in old} | {cell_of(one): one for one in new}).values())


def cell_of(one: ServedStep) -> tuple[int, ...]:
    """Return what steps of like shapes have in common."""
    sizes = one.rows, 1 + one.prompt_rows, one.requests, 64 + one.attended / one.rows
    return tuple([round(_CELLS * math.log2(size)) for size in sizes])


def watch(url: str, key: str | None, model: PlannedModel, seconds: float) -> tuple[ServedStep, ...]:
    """Return what the server at `url`, which serves `model`, takes for steps in these seconds.

    Raises:
        UsageError: there is no such server, it serves another model, refuses the key, or was not
            busy.
        EngineStoppedError: it cannot be reached.
    """
    before, until_s = set(map(tuple, look(url, key, model))), time.monotonic() + seconds
    steps: list[Sequence[Any]] = []
    while time.monotonic() < until_s:
        time.sleep(_PAUSE_S)
        steps += [one for one in look(url, key, model) if tuple(one) not in before]
    if not (found := grouped(steps)):
        raise UsageError(
            f"The server at {url} was not busy: no three steps of like shapes followed others at "
            "once. Ask while it serves its load."
        )
    return found


def threads_of(url: str, key: str | None, model: PlannedModel) -> int:
    """Return on how many threads the server at `url` computes; raises as `watch`."""
    look(url, key, model)
    state = _state(url, key)
    try:
        return sum(rank["threads"] for rank in state["ranks"]) or int(state["engine"]["threads"])
    except (KeyError, TypeError):
        raise UsageError(
            f"The server at {url} does not say on how many threads it computes: it is an older "
            "version of Twostroke. Start it again with this one."
        ) from None


def on_threads(count: int) -> str:
    """Return "on 1 thread" or "on 2 threads"."""
    return f"on {count} {'thread' if count == 1 else 'threads'}"


def look(url: str, key: str | None, model: PlannedModel) -> list[Sequence[Any]]:
    """Return the last steps of the server at `url`, for `grouped`; raises as `watch`."""
    state = _state(url, key)
    try:
        shown = state["model"]
        name, identity, steps = shown["name"], shown["identity"], list(state["steps"])
        has_turns = all(len(one) == len(_FIELDS) for one in steps)
    except (KeyError, TypeError, AttributeError):
        has_turns = False
    if not has_turns:
        raise UsageError(
            f"{url} shows no steps: it is not a server of this version of Twostroke, or its "
            "dashboard is off."
        )
    if identity != model.identity:
        raise UsageError(
            f"The server at {url} serves {name}, whose weights are not those of {model.name}."
        )
    return steps


def _is_plain(one: ServedStep) -> bool:
    num_decoding = one.rows - one.prompt_rows
    return 0 <= one.requests - num_decoding <= one.prompt_rows


def _counts(one: ServedStep) -> tuple[int, int, int, int]:
    return one.rows, one.prompt_rows, one.requests, one.attended


def _state(url: str, key: str | None) -> Any:
    import http.client  # most plans need none of it

    try:
        parts = urlsplit(url)
        host, port = parts.hostname, parts.port
    except ValueError:
        host = None
    if not host or parts.scheme not in {"http", "https"}:
        raise UsageError(f"must be like http://127.0.0.1:8000, got '{url}'.", field="server")
    is_secure = parts.scheme == "https"
    kind = http.client.HTTPSConnection if is_secure else http.client.HTTPConnection
    connection = kind(host, port, timeout=_ANSWER_S)
    headers = {} if key is None else {"authorization": f"Bearer {key}"}
    try:
        path = parts.path.rstrip("/").removesuffix("/v1")
        connection.request("GET", f"{path}/api/state", headers=headers)
        answer = connection.getresponse()
        body = answer.read()
    except (OSError, http.client.HTTPException) as error:
        why = getattr(error, "strerror", None) or error
        raise EngineStoppedError(f"The server at {url} cannot be reached: {why}.") from None
    finally:
        connection.close()
    if answer.status == http.client.UNAUTHORIZED:
        raise UsageError(f"The server at {url} refuses the key: set TWOSTROKE_API_KEY.")
    try:
        return json.loads(body)
    except ValueError:
        return None
