"""Decides which of several models are loaded: a pure function of facts about each model."""

from __future__ import annotations

from enum import Enum
from typing import TYPE_CHECKING, Final

from msgspec.structs import replace

from twostroke.core.frozen import Frozen

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

# Times as multiples of the time that a model takes to load.
# A model that waits takes the memory of another model only after this wait, and only if the other
# has been idle for as long or has been loaded for `MIN_STAY_LOADS`.
MIN_WAIT_LOADS: Final = 1.0
MIN_STAY_LOADS: Final = 4.0  # a model in use stays loaded for this time, although others wait
MAX_IDLE_LOADS: Final = 16.0  # a model that was idle for this time is unloaded at once for another


class ModelResidency(Enum):
    """Whether a model is loaded; it uses memory in all states except `UNLOADED`."""

    UNLOADED = "unloaded"
    LOADING = "loading"
    LOADED = "loaded"
    UNLOADING = "unloading"


class ModelUse(Frozen):
    """The facts about one model by which `decide_residency` chooses; times are in seconds.

    Attributes:
        name: the model's name.
        num_bytes: the memory that the loaded model uses.
        load_s: how long the model takes to load.
        state: whether the model is loaded.
        waiting_since_s: the arrival of the oldest request that waits for the model; None if no
            request waits.
        used_s: when the model last had a request; now if it has one.
        loaded_s: when the model was loaded.
        num_running: the number of the model's requests in the engine.
        keep_s: how long the model stays loaded without a request.
        value: the model's `retention_value` at its last use.
        is_closed: whether the previous decision closed the model.
    """

    name: str
    num_bytes: int
    load_s: float
    state: ModelResidency = ModelResidency.UNLOADED
    waiting_since_s: float | None = None
    used_s: float = 0.0
    loaded_s: float = 0.0
    num_running: int = 0
    keep_s: float = float("inf")
    value: float = 0.0
    is_closed: bool = False


class ResidencyDecision(Frozen):
    """The names of the models to load now, to unload now, and to close.

    A closed model gets no more requests: it is unloaded when its running requests have ended.
    """

    load: tuple[str, ...] = ()
    unload: tuple[str, ...] = ()
    close: tuple[str, ...] = ()


def retention_value(num_bytes: int, load_s: float, highest_unloaded_value: float) -> float:
    """Return the value of keeping a model in memory, computed whenever a request uses the model.

    The model with the lowest value is unloaded first. The value is the loading time per byte of
    memory, plus `highest_unloaded_value`, the highest value of the models unloaded so far (the
    GreedyDual-Size algorithm of web caches). This sum grows over time, so a model that has not been
    used for long has a low value.
    """
    return highest_unloaded_value + load_s / max(1, num_bytes)


def decide_residency(
    now_s: float, budget_bytes: int, model_uses: Sequence[ModelUse]
) -> ResidencyDecision:
    """Decide which models to load, to unload and to close now; all share `budget_bytes`.

    Models load in the order of their oldest waiting requests; a later model never takes memory for
    which an earlier model waits. A model with requests is closed first, and unloaded when they have
    ended. A model larger than the budget uses all of it.
    """
    model_uses = [
        replace(model_use, num_bytes=min(model_use.num_bytes, budget_bytes))
        for model_use in model_uses
    ]
    free_bytes = budget_bytes - sum(
        model_use.num_bytes
        for model_use in model_uses
        if model_use.state is not ModelResidency.UNLOADED
    )
    promised_bytes = 0  # free once the closed models are unloaded
    load: list[str] = []
    closed_models: list[ModelUse] = []
    for waiting_since_s, model in _waiting(model_uses):
        if model.num_bytes <= free_bytes:
            load.append(model.name)
            free_bytes -= model.num_bytes
            continue
        missing_bytes = model.num_bytes - free_bytes - promised_bytes
        victims: list[ModelUse] = []
        for victim in _eviction_order(model_uses, closed_models):
            if missing_bytes > 0 and _may_unload(victim, model, waiting_since_s, now_s):
                victims.append(victim)
                missing_bytes -= victim.num_bytes
        if missing_bytes <= 0:
            closed_models += victims
            promised_bytes += sum(victim.num_bytes for victim in victims)
        promised_bytes -= model.num_bytes - free_bytes
        free_bytes = 0
    leaving = [model.name for model in closed_models if not model.num_running]
    idle = [
        model.name for model in model_uses if model not in closed_models and _is_idle(model, now_s)
    ]
    return ResidencyDecision(
        load=tuple(load),
        unload=(*leaving, *idle),
        close=tuple(model.name for model in closed_models),
    )


def _waiting(model_uses: Iterable[ModelUse]) -> list[tuple[float, ModelUse]]:
    """Return the unloaded models for which requests wait, in the order in which to load them.

    Each pair has the arrival time of the model's oldest request, which gives the order, and the
    model.
    """
    candidates = [
        (model_use.waiting_since_s, model_use)
        for model_use in model_uses
        if model_use.state is ModelResidency.UNLOADED and model_use.waiting_since_s is not None
    ]
    return sorted(candidates, key=lambda pair: (pair[0], pair[1].name))


def _eviction_order(
    model_uses: Iterable[ModelUse], closed_models: Sequence[ModelUse]
) -> list[ModelUse]:
    """Return the loaded models in the order in which to unload them for another model.

    Models in `closed_models` are left out. Models that the previous decision closed come first,
    then models without running requests, then models with a low `retention_value`.
    """
    candidates = [
        model_use
        for model_use in model_uses
        if model_use.state is ModelResidency.LOADED and model_use not in closed_models
    ]
    return sorted(
        candidates,
        key=lambda model_use: (
            not model_use.is_closed,
            model_use.num_running > 0,
            model_use.value,
            model_use.used_s,
        ),
    )


def _may_unload(victim: ModelUse, model: ModelUse, waiting_since_s: float, now_s: float) -> bool:
    """Return whether the loaded model `victim` may be unloaded now to make room for `model`.

    `waiting_since_s` is the arrival of the oldest request that waits for `model`. So that models do
    not alternate, this request must have waited, and the victim must have been loaded or unused,
    for some multiple of the models' loading times, unless the victim is closed already or was idle
    for long.
    """
    loaded_for_s = now_s - victim.loaded_s
    unused_s = now_s - victim.used_s
    if victim.is_closed or unused_s >= MAX_IDLE_LOADS * victim.load_s:
        return True
    is_free = (
        loaded_for_s >= MIN_STAY_LOADS * victim.load_s or unused_s >= MIN_WAIT_LOADS * victim.load_s
    )
    return is_free and now_s - waiting_since_s >= MIN_WAIT_LOADS * model.load_s


def _is_idle(model_use: ModelUse, now_s: float) -> bool:
    has_no_requests = model_use.waiting_since_s is None and not model_use.num_running
    return (
        model_use.state is ModelResidency.LOADED
        and has_no_requests
        and now_s - model_use.used_s >= model_use.keep_s
    )
