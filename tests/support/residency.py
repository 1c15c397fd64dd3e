"""Models that share memory under virtual time, and the lowest possible number of loads."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from twostroke.server.models.residency import (
    ModelResidency,
    ModelUse,
    decide_residency,
    retention_value,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    Arrival = tuple[float, str]  # when a request comes, and its model
    Adversary = Callable[["Stage"], Sequence[str]]  # the models to ask for now


@dataclass
class _Model:
    num_bytes: int
    load_s: float
    state: ModelResidency = ModelResidency.UNLOADED
    waiting: list[float] = field(default_factory=list)
    running: list[float] = field(default_factory=list)  # when they end
    used_s: float = 0.0
    loaded_s: float = 0.0
    value: float = 0.0
    is_closed: bool = False


class Stage:
    """Simulates models that share memory: runs `decide` in steps of `tick_s`.

    Each answer takes `answer_s` once its model is loaded.
    """

    def __init__(
        self,
        models: Mapping[str, tuple[int, float]],
        budget: int,
        answer_s: float = 0.0,
        tick_s: float = 0.05,
    ) -> None:
        """Share `budget` bytes between models of (bytes, seconds of a load)."""
        self.models = {name: _Model(*sizes) for name, sizes in models.items()}
        self.budget, self.answer_s, self.tick_s = budget, answer_s, tick_s
        self.now_s = 0.0
        self.num_loads = 0
        self.waits: list[tuple[str, float]] = []
        self.arrivals: list[Arrival] = []
        self.loading_s = 0.0
        self._highest_unloaded_value = 0.0

    def add_request(self, name: str) -> None:
        self.arrivals.append((self.now_s, name))
        self.models[name].waiting.append(self.now_s)

    @property
    def num_unanswered(self) -> int:
        return sum(len(model.waiting) + len(model.running) for model in self.models.values())

    @property
    def absent(self) -> list[str]:
        return [
            name for name, model in self.models.items() if model.state is ModelResidency.UNLOADED
        ]

    def step(self) -> None:
        """Let `tick_s` pass."""
        self.now_s = round(self.now_s + self.tick_s, 9)
        for model in self.models.values():
            model.running = [end_s for end_s in model.running if end_s > self.now_s]
            if model.state is ModelResidency.LOADING:
                self.loading_s += self.tick_s
                if model.loaded_s <= self.now_s:
                    model.state = ModelResidency.LOADED
        self.serve()
        self._apply()
        self.serve()

    def serve(self) -> None:
        """Answer the waiting requests whose models are loaded."""
        for name, model in self.models.items():
            if model.state is ModelResidency.LOADED and not model.is_closed and model.waiting:
                self.waits += [(name, self.now_s - asked_s) for asked_s in model.waiting]
                model.running += [self.now_s + self.answer_s] * len(model.waiting)
                model.waiting.clear()
                self._use(model)
            elif model.running:
                self._use(model)

    def views(self) -> list[ModelUse]:
        return [
            ModelUse(
                name,
                model.num_bytes,
                model.load_s,
                model.state,
                min(model.waiting, default=None),
                model.used_s,
                model.loaded_s,
                len([end_s for end_s in model.running if end_s > self.now_s]),
                value=model.value,
                is_closed=model.is_closed,
            )
            for name, model in self.models.items()
        ]

    def _use(self, model: _Model) -> None:
        model.used_s = self.now_s
        model.value = retention_value(model.num_bytes, model.load_s, self._highest_unloaded_value)

    def _apply(self) -> None:
        decision = decide_residency(self.now_s, self.budget, self.views())
        for name, model in self.models.items():
            model.is_closed = name in decision.close
        for name in decision.unload:
            model = self.models[name]
            model.state, model.is_closed = ModelResidency.UNLOADED, False
            self._highest_unloaded_value = max(self._highest_unloaded_value, model.value)
        if decision.unload:
            self._apply()
        for name in decision.load:
            model = self.models[name]
            model.state, model.loaded_s = ModelResidency.LOADING, self.now_s + model.load_s
            self._use(model)
            self.num_loads += 1
        used_bytes = [
            model.num_bytes
            for model in self.models.values()
            if model.state is not ModelResidency.UNLOADED
        ]
        assert sum(used_bytes) <= self.budget


def play(stage: Stage, adversary: Adversary, count: int, timeout_s: float = 1e5) -> None:
    """Let an adversary send `count` requests, and wait until all are answered."""
    while len(stage.arrivals) < count:
        for name in adversary(stage)[: count - len(stage.arrivals)]:
            stage.add_request(name)
        stage.step()
    until_s = stage.now_s + timeout_s
    while stage.num_unanswered:
        assert stage.now_s < until_s, "a request is never answered"
        stage.step()


def fewest_loads(
    arrivals: Sequence[Arrival], sizes: Mapping[str, int], budget: int, window_s: float
) -> int:
    """Return the fewest loads with which each request has its model within `window_s` of arrival.

    All requests are known from the beginning, loads and answers take no time, and requests may be
    answered in any order. The result is exact: a model is loaded only at the latest possible time,
    since a later load answers no fewer requests, and then each set of models that may stay loaded
    is tried.
    """
    sets = [
        frozenset(some)
        for count in range(len(sizes) + 1)
        for some in itertools.combinations(sorted(sizes), count)
        if sum(sizes[name] for name in some) <= budget
    ]
    # By models in memory, and when others were first asked for in vain: the fewest loads so far.
    states: dict[tuple[frozenset[str], tuple[Arrival, ...]], int] = {(frozenset(), ()): 0}
    for when_s, model_name in [*arrivals, (float("inf"), "")]:
        results: dict[tuple[frozenset[str], tuple[Arrival, ...]], int] = {}
        open_ = list(states.items())
        while open_:
            (inside, pending), loads = open_.pop()
            if pending and pending[0][0] + window_s < when_s:
                late_name = pending[0][1]
                open_ += [
                    ((after, pending[1:]), loads + 1)
                    for after in sets
                    if late_name in after and after - {late_name} <= inside
                ]
                continue
            if (
                model_name
                and model_name not in inside
                and model_name not in (name for _, name in pending)
            ):
                pending = (*pending, (when_s, model_name))
            key = inside, pending
            results[key] = min(loads, results.get(key, loads))
        states = results
    return min(states.values())
