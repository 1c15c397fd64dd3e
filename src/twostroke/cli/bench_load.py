"""The loads that the options of `twostroke bench` describe."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, Final

import click
import msgspec

from twostroke.cli.options import check_effect, is_given_by_user
from twostroke.cli.terminal import printable
from twostroke.core.errors import Field, UsageError
from twostroke.core.load_options import ConversationOptions, LoadOptions
from twostroke.core.message_text import counted_noun

if TYPE_CHECKING:
    from twostroke.lab.bench.benchmark import BenchLoad
    from twostroke.lab.bench.conversations import ConversationShape
    from twostroke.lab.simulator.load import Workload

_LENGTHS: Final = ("prompt", "output", "spread", "shared")
_ARRIVALS: Final = ("arrivals", "burstiness")
LOAD_NAMES: Final = (
    *LoadOptions.__struct_fields__,
    *ConversationOptions.__struct_fields__,
    "clients",
    "rate",
    "trace",
    "dataset",
    "num_requests",
    "duration_s",
    "seed",
    "is_search",
)
_NUM_ALONE: Final = 50  # requests that a search sends one at a time
_DEFAULT_COUNT: Final = 1000
_COMBINED: Final = "cannot be combined with {other}: leave one of them out."


class LoadBuilder:
    """Builds the loads that the user's options describe; a trace or a dataset is read once."""

    def __init__(self, values: dict[str, Any]) -> None:
        """Check a command's `values`, and remove its options of loads (`LOAD_NAMES`).

        Raises:
            UsageError: options contradict each other, have no effect or are out of range; or a
                file cannot be read.
        """
        from twostroke.lab.bench.requests_to_send import read_dataset
        from twostroke.lab.simulator.traces import read_trace

        self._values = {name: values.pop(name) for name in LOAD_NAMES}
        self._check_load()
        self._check_effects()
        self._conversation = self._conversation_shape()
        trace, path, count = (self._values[n] for n in ("trace", "dataset", "num_requests"))
        self._prompts = read_dataset(path, count) if path is not None else ()
        self._trace = None if trace is None else read_trace(trace).first(count)
        arrivals = self._prompts if self._trace is None else self._trace.arrivals
        has_rate = count != 1 and (self._trace is None or self._trace.rate > 0)
        if self._values["is_search"] and (not has_rate or len(arrivals) == 1):
            reason = "needs at least 2 requests, which do not arrive at the same time."
            raise UsageError(reason, field="is_search")
        for note in self._trace.notes if self._trace is not None else ():
            click.echo(printable(note), err=True)

    @property
    def start_rate(self) -> float | None:
        """The rate with which a search begins; None if the user gave none."""
        rates = self._values["rate"]
        return float(rates[0]) if rates else None

    def loads(self) -> list[BenchLoad]:
        """Return the loads in the order in which the user gave them."""
        clients, rates = self._values["clients"], self._values["rate"]
        if rates is not None:
            return [self._load(rate=rate) for rate in rates]
        return [self._load(clients=count) for count in clients or (None,)]

    def load_at(self, rate: float | None) -> BenchLoad:
        """Return the load with this request rate; for None, a few requests of one client."""
        if rate is not None:
            load = self._load(rate=rate)
            # Random arrivals are made to have exactly the rate, so that rates can be compared.
            workload = load.workload.changed(speed=rate / load.workload.rate)
            return msgspec.structs.replace(load, workload=workload)
        count = self._values["num_requests"]
        return self._load(clients=1, count=min(count or _NUM_ALONE, _NUM_ALONE))

    def _load(
        self, *, rate: float | None = None, clients: int | None = None, count: int | None = None
    ) -> BenchLoad:
        from twostroke.lab.bench.benchmark import BenchLoad
        from twostroke.lab.bench.runner import RunLimits

        values, prompts = self._values, self._prompts[:count]
        count = len(prompts) or count or values["num_requests"]
        if self._conversation is not None:
            num_conversations = (count or _DEFAULT_COUNT) // self._conversation.num_requests
            count = max(1, num_conversations) * self._conversation.num_requests
        workload = self._workload(rate, clients, count)
        if prompts:
            workload = workload.named(f"{values['dataset'].name}, {workload.name}")
        return BenchLoad(
            workload=workload,
            limits=RunLimits(num_clients=clients, duration_s=values["duration_s"]),
            changes=(self._trace is not None and clients is None) or self._conversation is not None,
            conversation=self._conversation,
            prompts=prompts,
            max_output=(values["output"] or 0) if prompts else 0,
        )

    def _workload(self, rate: float | None, clients: int | None, count: int | None) -> Workload:
        """Return a workload: when its `count` requests arrive, and how long they are.

        `rate` and `clients` set the arrivals. Each argument may be None, for its default.
        """
        from twostroke.lab.simulator.load import MAX_REQUESTS, SyntheticWorkload

        values = self._values
        speed, scale, duration_s = values["speed"], values["scale"], values["duration_s"]
        if self._trace is not None:
            workload = self._trace.first(count).changed(scale=scale)
            if clients is not None:
                return workload.named(f"lengths of {workload.name}, {_clients(clients)}")
            return workload.changed(speed=speed if rate is None else rate / workload.rate)
        if count is None and duration_s is not None:
            # More requests than a random schedule has in this time; a client may need more.
            per_s = 1000.0 if rate is None else 1.5 * rate * speed
            count = min(MAX_REQUESTS, 100 + math.ceil(per_s * duration_s))
        names = (*_ARRIVALS, *_LENGTHS)
        shape = {name: values[name] for name in names if values[name] is not None}
        if values["dataset"] is not None:
            shape.pop("output", None)
        shape |= {} if count is None else {"count": count}
        if rate is not None:
            synthetic = SyntheticWorkload(rate, **shape)
            return synthetic.load(values["seed"]).changed(speed=speed, scale=scale)
        shape = {name: value for name, value in shape.items() if name not in _ARRIVALS}
        workload = SyntheticWorkload(1.0, "constant", **shape).load(values["seed"])
        return workload.changed(scale=scale).named(_clients(clients or 1))

    def _conversation_shape(self) -> ConversationShape | None:
        """Return the shape of the conversations that the user describes; None without any."""
        from twostroke.lab.bench.conversations import ConversationShape

        values = self._values
        shape = ConversationShape(
            **{name: values[name] for name in ConversationOptions.__struct_fields__}
        )
        check_effect("think_s", "num_turns", has_effect=shape.num_turns > 1)
        for name in ("tool_result", "tool_s"):
            check_effect(name, "num_calls", has_effect=shape.num_calls > 0)
        if shape.num_requests == 1:
            return None
        field = "num_turns" if shape.num_turns > 1 else "num_calls"
        for other in ("trace", "dataset", "shared"):
            if values[other] is not None:
                raise UsageError(_COMBINED, field=field, other=Field(other))
        return shape

    def _check_load(self) -> None:
        """Raise UsageError unless the options describe one load or one sweep."""
        values = self._values
        clients, rate, is_search = values["clients"], values["rate"], values["is_search"]
        if not is_search and clients is None and rate is None and values["trace"] is None:
            raise UsageError("Which load? Give --clients, --rate, --trace or --sweep.")
        pairs = [("clients", "rate"), ("rate", "trace"), ("dataset", "trace")]
        pairs += [("clients", "is_search")] if is_search else []
        for first, second in pairs:
            if values[first] is not None and values[second] is not None:
                if (first, second) == ("rate", "trace") and is_search:
                    continue
                raise UsageError(_COMBINED, field=first, other=Field(second))
        if is_search and rate is not None and len(rate) > 1:
            raise UsageError(
                "must be one number with --sweep, where the search begins.", field="rate"
            )

    def _check_effects(self) -> None:
        """Raise UsageError for options that have no effect on the load."""
        values = self._values
        clients, is_search = values["clients"], values["is_search"]
        has_rate = values["rate"] is not None or is_search
        for name in _ARRIVALS:
            check_effect(name, "rate", has_effect=has_rate and values["trace"] is None)
        is_gamma = values["arrivals"] == "gamma"
        check_effect("burstiness", "arrivals", has_effect=is_gamma, value="gamma")
        source = "trace" if values["trace"] is not None else "dataset"
        for name in _LENGTHS:
            is_limit = name == "output" and values["trace"] is None
            if values[source] is not None and values[name] is not None and not is_limit:
                raise UsageError(f"has no effect with --{source}, which has its own.", field=name)
        if values["dataset"] is not None and is_given_by_user("scale"):
            reason = "has no effect with --dataset, whose prompts are sent as they are."
            raise UsageError(reason, field="scale")
        if not is_given_by_user("speed"):
            return
        if is_search:
            raise UsageError("has no effect with --sweep, which chooses the rates.", field="speed")
        if values["trace"] is not None and clients is not None:
            reason = "has no effect with --clients: a closed loop has no arrival times."
            raise UsageError(reason, field="speed")
        check_effect("speed", "rate", has_effect=has_rate or values["trace"] is not None)


def _clients(count: int) -> str:
    return counted_noun(count, "client")
