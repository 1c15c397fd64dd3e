"""`twostroke serve --models`: the engines of several models, which share memory."""

from __future__ import annotations

import math
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Final

from twostroke.cli.pull import fetch
from twostroke.core.errors import UsageError
from twostroke.core.hardware import memory_available

if TYPE_CHECKING:
    from collections.abc import Iterator

    from twostroke.core.options import EngineOptions
    from twostroke.server.models.model_pool import ModelPool
    from twostroke.server.models.on_demand import OnDemandEngine

_SHARE_OF_FREE: Final = 0.9  # of the memory that is free when the server starts


def asked_models(model: str | None, lists: tuple[str, ...]) -> list[tuple[str | None, str]]:
    """Return names and models of MODEL and of `--models NAME=MODEL,MODEL`; None has its own name.

    Raises:
        UsageError: there is none, or one is empty.
    """
    found: list[tuple[str | None, str]] = [] if model is None else [(None, model)]
    words = [word.strip() for list_ in lists for word in list_.split(",")]
    for word in words:
        name, equals, rest = word.partition("=")
        is_named = bool(equals) and "/" not in name
        found.append((name.strip(), rest.strip()) if is_named else (None, word))
    if not found:
        raise UsageError("Name a MODEL to serve, or several with --models A,B.")
    for given_name, one in found:
        if not one or given_name == "":
            reason = "needs models with commas between them, each MODEL or NAME=MODEL."
            raise UsageError(reason, field="models")
    return found


def check_alone(given: dict[str, Any], options: EngineOptions) -> None:
    """Raise UsageError for options that only one model can have."""
    wrong = {
        "model_names": "is for one model: write --models NAME=MODEL.",
        "in_process": "runs one model: leave it out, or leave out --models.",
    }
    for field, reason in wrong.items():
        if given[field]:
            raise UsageError(reason, field=field)
    if options.parallel.num_ranks > 1:
        raise UsageError("Several models cannot be divided among ranks: serve one.")
    if options.handover.role != "mixed":
        raise UsageError("is for one model: leave it out, or leave out --models.", field="role")


def _memory(options: EngineOptions) -> int:
    """Return the bytes that are free; all of a GPU's, as to ask for the free ones takes some."""
    from twostroke.backends.create import gpu_device

    is_on_gpu = options.compute.backend == "gpu"
    return gpu_device(options.compute).memory_total if is_on_gpu else memory_available()


@contextmanager
def open_roster(
    asked: list[tuple[str | None, str]], given: dict[str, Any], options: EngineOptions
) -> Iterator[ModelPool]:
    """Fetch what is not here, read all headers, and yield the engines, none of which runs yet.

    Raises:
        UsageError: two models have the same name.
        MemoryLimitError: a model does not fit into the memory of all.
        TwostrokeError: a model is not there, or damaged, as `build` says.
    """
    from twostroke.server.http.model_names import ModelNames
    from twostroke.server.models.model_pool import ModelPool
    from twostroke.server.models.on_demand import OnDemandEngine

    keep_s = given["idle_timeout_s"] or math.inf
    budget_bytes = given["budget_bytes"] or int(_SHARE_OF_FREE * _memory(options))
    engines: dict[str, OnDemandEngine] = {}
    for name, model in asked:
        fetch(model)
        engine = OnDemandEngine.find(name, model, options, given["log_level"], budget_bytes, keep_s)
        if engines and ModelNames(tuple(engines)).is_known(engine.card.name):
            reason = f"has two models called {engine.card.name!r}: write NAME=MODEL for one."
            raise UsageError(reason, field="models")
        engines[engine.card.name] = engine
    roster = ModelPool(engines, budget_bytes)
    try:
        yield roster
    finally:
        roster.close()
