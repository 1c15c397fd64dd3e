"""Steps that are read from a running server, which correct planned times."""

from __future__ import annotations

import json
import math
import time
from statistics import fmean, median
from typing import TYPE_CHECKING, Any, Final

from msgspec.structs import replace

from twostroke.core.errors import EngineStoppedError, UsageError
from twostroke.core.frozen import Frozen
from twostroke.core.message_text import counted_noun
from twostroke.core.urls import server_url
from twostroke.model.program.batch import BatchShape

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from twostroke.lab.planner.models import PlannedModel

_TIMEOUT_S: Final = 10.0
_MIN_STEPS_PER_SHAPE: Final = 3  # a single step may have been disturbed
_MAX_OVER_MEDIAN: Final = 10  # seconds of a step, over the median of its shape
_CELLS_PER_DOUBLING: Final = 2
_POLL_INTERVAL_S: Final = 1.0
_FIELDS: Final = ("rows", "prompt_rows", "requests", "step_s", "attended", "turn_s")


class ServedStep(Frozen):
    """Mean times of a running server's steps of one shape, which correct plans.

    They include the work of the server's loop between steps.

    Attributes:
        rows: rows of the step.
        prompt_rows: rows that belong to prompts.
        requests: requests of the step.
        attended: number of positions that the rows attend to, summed over the rows.
        seconds: from the end of the previous step to the end of this step.
        between_s: part of `seconds` outside the step itself.
    """

    rows: int
    prompt_rows: int
    requests: int
    attended: int
    seconds: float
    between_s: float = 0.0

    @property
    def batch(self) -> BatchShape:
        """The shape of the step for the cost model.

        All prompts have equal rows and contexts in it.
        """
        num_decoding = self.rows - self.prompt_rows
        num_reading = self.requests - num_decoding
        counts = [1] * num_decoding
        for index in range(num_reading):
            rows_so_far = self.prompt_rows * (index + 1) // num_reading
            counts.append(rows_so_far - self.prompt_rows * index // num_reading)
        inside = sum([count * (count + 1) // 2 for count in counts])
        start = max(0, round((self.attended - inside) / self.rows))
        return BatchShape((start,) * len(counts), tuple(counts), self.requests)

    @property
    def name(self) -> str:
        """A name of the server's step for people."""
        prompt = (
            f", {counted_noun(self.prompt_rows, 'row', form=',')} of prompts"
            if self.prompt_rows
            else ""
        )
        return f"served, {counted_noun(self.requests, 'request')}{prompt}"


def group_steps(steps: Iterable[Sequence[Any]]) -> tuple[ServedStep, ...]:
    """Return the steps that a server reports in `/api/state` by shape, with mean times.

    A server shows each step for a while; a step that was read several times counts once. Steps with
    drafts are left out. Most steps after a pause are prefills, and the time of the loop's work
    before them is unknown. It is assumed to be the median of the other steps.
    """
    distinct_steps = list(dict.fromkeys(map(tuple, steps)))
    known_between_s = [turn_s - step_s for *_, step_s, _, turn_s in distinct_steps if turn_s > 0]
    usual_between_s = max(0.0, median(known_between_s)) if known_between_s else 0.0
    cells: dict[tuple[int, ...], list[ServedStep]] = {}
    for rows, prompt_rows, requests, step_s, attended, turn_s in distinct_steps:
        between_s = max(0.0, turn_s - step_s) if turn_s > 0 else usual_between_s
        step = ServedStep(
            rows=rows,
            prompt_rows=prompt_rows,
            requests=requests,
            attended=attended,
            seconds=max(turn_s, step_s + between_s),
            between_s=between_s,
        )
        if step.seconds > 0 and _has_no_drafts(step):
            cells.setdefault(cell_of(step), []).append(step)
    return tuple(
        _mean_step(similar) for similar in cells.values() if len(similar) >= _MIN_STEPS_PER_SHAPE
    )


def _mean_step(steps: list[ServedStep]) -> ServedStep:
    """Return one step for several steps of the same shape: the median context, and the mean times.

    Means are used because requests wait for the sum of all steps, and some steps take much longer
    than the median: medians would predict too little. Steps that take more than `_MAX_OVER_MEDIAN`
    times the median are disturbances, and are left out.
    """
    middle = sorted(steps, key=lambda step: step.attended)[len(steps) // 2]
    limit_s = _MAX_OVER_MEDIAN * median(step.seconds for step in steps)
    usual_steps = [step for step in steps if step.seconds <= limit_s]
    return replace(
        middle,
        seconds=fmean(step.seconds for step in usual_steps),
        between_s=fmean(step.between_s for step in usual_steps),
    )


def merge_steps(old: Iterable[ServedStep], new: Iterable[ServedStep]) -> tuple[ServedStep, ...]:
    """Return the steps of a server: the new ones, and stored steps of other shapes."""
    by_cell = {cell_of(step): step for step in old}
    by_cell |= {cell_of(step): step for step in new}
    return tuple(by_cell.values())


def cell_of(step: ServedStep) -> tuple[int, ...]:
    """Return a key that server steps of similar shapes share."""
    sizes = step.rows, 1 + step.prompt_rows, step.requests, 64 + step.attended / step.rows
    return tuple([round(_CELLS_PER_DOUBLING * math.log2(size)) for size in sizes])


def watch_server(
    url: str, key: str | None, model: PlannedModel, seconds: float
) -> tuple[ServedStep, ...]:
    """Poll the server of `model` at `url` for some seconds; return its steps in this time.

    Raises:
        UsageError: there is no such server, it serves another model, refuses the key, or was
            not busy.
        EngineStoppedError: the server cannot be reached.
    """
    old_steps = set(map(tuple, read_steps(url, key, model)))
    until_s = time.monotonic() + seconds
    new_steps: list[Sequence[Any]] = []
    while time.monotonic() < until_s:
        time.sleep(_POLL_INTERVAL_S)
        latest = read_steps(url, key, model)
        new_steps += [step for step in latest if tuple(step) not in old_steps]
    if not (grouped := group_steps(new_steps)):
        raise UsageError(
            f"The server at {url} was not busy: it took no {_MIN_STEPS_PER_SHAPE} steps of a "
            "similar shape. Calibrate while it serves its load."
        )
    return grouped


def server_threads(url: str, key: str | None, model: PlannedModel) -> int:
    """Return the number of compute threads of the server at `url`.

    Raises:
        UsageError: there is no such server, it serves another model, or refuses the key.
        EngineStoppedError: the server cannot be reached.
    """
    read_steps(url, key, model)
    state = fetch_json(url, "/api/state", key)
    try:
        return sum(rank["threads"] for rank in state["ranks"]) or int(state["engine"]["threads"])
    except (KeyError, TypeError):
        raise UsageError(
            f"The server at {url} does not say on how many threads it computes: it is an older "
            "version of Twostroke. Start it again with this one."
        ) from None


def thread_count_text(count: int) -> str:
    """Return a number of threads as text: "on 1 thread" or "on 2 threads"."""
    return f"on {counted_noun(count, 'thread')}"


def read_steps(url: str, key: str | None, model: PlannedModel) -> list[Sequence[Any]]:
    """Return the last steps that the server at `url` reports, in the order of `_FIELDS`.

    Raises:
        UsageError: there is no such server, it serves another model, or refuses the key.
        EngineStoppedError: the server cannot be reached.
    """
    state = fetch_json(url, "/api/state", key)
    try:
        served_model = state["model"]
        name, identity = served_model["name"], served_model["identity"]
        steps = list(state["steps"])
        has_turns = all(len(step) == len(_FIELDS) for step in steps)
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


def _has_no_drafts(step: ServedStep) -> bool:
    num_decoding = step.rows - step.prompt_rows
    return 0 <= step.requests - num_decoding <= step.prompt_rows


def fetch_json(url: str, path: str, key: str | None, *, field: str = "server") -> Any:
    """Return the JSON that a server answers to GET `path`; None if the response is not JSON.

    Raises:
        UsageError: `url` is not valid, or the server refuses the key; `field` is the option.
        EngineStoppedError: the server cannot be reached.
    """
    import http.client  # most plans need none of it

    parts = server_url(url, field=field)
    is_secure = parts.scheme == "https"
    connection_type = http.client.HTTPSConnection if is_secure else http.client.HTTPConnection
    connection = connection_type(parts.hostname or "", parts.port, timeout=_TIMEOUT_S)
    headers = {} if key is None else {"authorization": f"Bearer {key}"}
    try:
        base = parts.path.rstrip("/").removesuffix("/v1")
        connection.request("GET", f"{base}{path}", headers=headers)
        answer = connection.getresponse()
        body = answer.read()
    except (OSError, http.client.HTTPException) as error:
        reason = getattr(error, "strerror", None) or error
        raise EngineStoppedError(f"The server at {url} cannot be reached: {reason}.") from None
    finally:
        connection.close()
    if answer.status == http.client.UNAUTHORIZED:
        raise UsageError(f"The server at {url} refuses the key: set TWOSTROKE_API_KEY.")
    try:
        return json.loads(body)
    except ValueError:
        return None
