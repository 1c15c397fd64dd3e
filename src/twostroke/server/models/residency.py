"""Which of several models are in memory: a pure function of what is known of each.

A model that requests wait for may take the memory of others once it has waited as long as it loads,
from those that were not used for as long, or have had some times as long. So models that are used
spend a bounded share of the time loading, however callers alternate, and no model waits for ever
(ADR 0042). The models that
go first are those that are cheapest to load again for their size and were not asked for longest,
by GreedyDual-Size (Cao and Irani, 1997), an instance of the Landlord algorithm (Young, 1998).
"""

from __future__ import annotations

from enum import Enum
from typing import TYPE_CHECKING, Final

from msgspec.structs import replace

from twostroke.core.frozen import Frozen

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

# In loads: how long a model waits before it takes the memory of others; how long one that is used
# stays, though others wait; and without a request for how long one goes as soon as another waits.
PATIENCE: Final = 1.0
DWELL: Final = 4.0
FORSAKEN: Final = 16.0


class ModelResidency(Enum):
    """Where a model is: memory is taken in all states but the first."""

    OUT = "unloaded"
    LOADING = "loading"
    IN = "loaded"
    LEAVING = "unloading"


class ModelUse(Frozen):
    """What is known of a model; all times are in seconds of one clock.

    Attributes:
        name: tells it apart from others.
        num_bytes: the memory that it takes.
        load_s: how long it loads.
        state: where it is.
        asked_s: when the oldest request came that waits for it; None if none waits.
        used_s: when it last had a request, which is now if it has one.
        loaded_s: when it was loaded.
        num_running: its requests that the engine has.
        keep_s: how long it stays without a request.
        worth: from `worth_of` at its last use.
        is_closed: it was in `close` of the decision before.
    """

    name: str
    num_bytes: int
    load_s: float
    state: ModelResidency = ModelResidency.OUT
    asked_s: float | None = None
    used_s: float = 0.0
    loaded_s: float = 0.0
    num_running: int = 0
    keep_s: float = float("inf")
    worth: float = 0.0
    is_closed: bool = False


class Decision(Frozen):
    """Names of models: to load now, to unload now, and to give no more requests until then."""

    load: tuple[str, ...] = ()
    unload: tuple[str, ...] = ()
    close: tuple[str, ...] = ()


def worth_of(num_bytes: int, load_s: float, worth_of_last_gone: float) -> float:
    """Return what a model that is used now is worth; the least worth goes first.

    `worth_of_last_gone` is the greatest worth of a model that had to go so far.
    """
    return worth_of_last_gone + load_s / max(1, num_bytes)


def decide(now_s: float, budget_bytes: int, views: Sequence[ModelUse]) -> Decision:
    """Return what to do now with models that share `budget_bytes`.

    Models load in the order in which they were asked for; a later one never takes memory that an
    earlier one waits for. A model with requests is closed, and goes once they have ended. One that
    has turned out larger than the budget takes all of it.
    """
    views = [replace(view, num_bytes=min(view.num_bytes, budget_bytes)) for view in views]
    free_bytes = budget_bytes - sum(
        view.num_bytes for view in views if view.state is not ModelResidency.OUT
    )
    coming_bytes = 0  # once closed models have gone
    load: list[str] = []
    closed: list[ModelUse] = []
    for asked_s, model in _waiting(views):
        if model.num_bytes <= free_bytes:
            load.append(model.name)
            free_bytes -= model.num_bytes
            continue
        lacking = model.num_bytes - free_bytes - coming_bytes
        victims: list[ModelUse] = []
        for victim in _in_order(views, closed):
            if lacking > 0 and _may_go(victim, model, asked_s, now_s):
                victims.append(victim)
                lacking -= victim.num_bytes
        if lacking <= 0:
            closed += victims
            coming_bytes += sum(victim.num_bytes for victim in victims)
        coming_bytes -= model.num_bytes - free_bytes
        free_bytes = 0
    leaving = [view.name for view in closed if not view.num_running]
    idle = [view.name for view in views if view not in closed and _is_idle(view, now_s)]
    return Decision(tuple(load), (*leaving, *idle), tuple(view.name for view in closed))


def _waiting(views: Iterable[ModelUse]) -> list[tuple[float, ModelUse]]:
    """Return the models to load with the time of their oldest request, the oldest first."""
    found = [
        (view.asked_s, view)
        for view in views
        if view.state is ModelResidency.OUT and view.asked_s is not None
    ]
    return sorted(found, key=lambda pair: (pair[0], pair[1].name))


def _in_order(views: Iterable[ModelUse], closed: Sequence[ModelUse]) -> list[ModelUse]:
    """Return the loaded models that are not closed yet, those that should go first before others.

    The choice of the decision before is kept.
    """
    found = [view for view in views if view.state is ModelResidency.IN and view not in closed]
    return sorted(
        found, key=lambda view: (not view.is_closed, view.num_running > 0, view.worth, view.used_s)
    )


def _may_go(victim: ModelUse, model: ModelUse, asked_s: float, now_s: float) -> bool:
    """Whether `model`, asked for since `asked_s`, may have the memory of `victim`."""
    stayed_s, unused_s = now_s - victim.loaded_s, now_s - victim.used_s
    if victim.is_closed or unused_s >= FORSAKEN * victim.load_s:
        return True
    is_free = stayed_s >= DWELL * victim.load_s or unused_s >= PATIENCE * victim.load_s
    return is_free and now_s - asked_s >= PATIENCE * model.load_s


def _is_idle(view: ModelUse, now_s: float) -> bool:
    has_none = view.asked_s is None and not view.num_running
    return view.state is ModelResidency.IN and has_none and now_s - view.used_s >= view.keep_s
