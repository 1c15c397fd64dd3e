"""`twostroke serve --models`: several models whose engines share memory."""

from __future__ import annotations

import math
from contextlib import contextmanager
from typing import TYPE_CHECKING, Annotated, Any, Final, NamedTuple

from twostroke.cli.pull import fetch
from twostroke.core.errors import UsageError
from twostroke.core.hardware import memory_available
from twostroke.core.option_schema import Option, OptionStruct, check

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from twostroke.core.options import EngineOptions
    from twostroke.server.models.model_pool import ModelPool
    from twostroke.server.models.on_demand import OnDemandEngine


class ModelPoolOptions(OptionStruct):
    """The options of a server of several models: the models, and the memory that they share."""

    models: Annotated[
        tuple[str, ...],
        Option(
            "--models",
            metavar="LIST",
            help="Serve several models, such as smollm2,NAME=./model.gguf; each is loaded when it "
            "is requested. All have the same options.",
        ),
    ] = ()
    budget_bytes: Annotated[
        int | None,
        Option(
            "--memory",
            form="size",
            low=1,
            default="nine tenths of the free memory",
            help="Memory for all of --models together, such as 12GB.",
        ),
    ] = None
    idle_timeout_s: Annotated[
        float,
        Option(
            "--idle-timeout",
            low=0,
            high=1e9,
            metavar="SECONDS",
            help="Unload one of --models after so many seconds without a request; 0 never unloads.",
        ),
    ] = 300.0

    def __post_init__(self) -> None:
        """Raise UsageError if the options are not valid together."""
        check(self)


_FREE_MEMORY_SHARE: Final = 0.9  # of the memory that is free when the server starts


class RequestedModel(NamedTuple):
    """A model that the command line asks the server to serve.

    Attributes:
        name: the name for clients; None for the model's own name.
        model: the path, short name or hf:owner/repo.
    """

    name: str | None
    model: str


def requested_models(model: str | None, lists: Sequence[str]) -> list[RequestedModel]:
    """Return the models that `twostroke serve` is asked to serve.

    The argument MODEL names one model; each value of `--models`, such as `NAME=MODEL,MODEL`, may
    name several.

    Raises:
        UsageError: no model is named, or one of the names is empty.
    """
    models = [] if model is None else [RequestedModel(None, model)]
    words = [word.strip() for list_ in lists for word in list_.split(",")]
    for word in words:
        name, equals, rest = word.partition("=")
        has_name = bool(equals) and "/" not in name
        if has_name:
            models.append(RequestedModel(name.strip(), rest.strip()))
        else:
            models.append(RequestedModel(None, word))
    if not models:
        raise UsageError("Name a MODEL to serve, or several with --models A,B.")
    for requested in models:
        if not requested.model or requested.name == "":
            reason = "needs models with commas between them, each MODEL or NAME=MODEL."
            raise UsageError(reason, field="models")
    return models


def check_several(values: dict[str, Any], options: EngineOptions) -> None:
    """Raise UsageError for options of `serve` that a server of several models cannot have."""
    reasons = {
        "model_names": "is for one model: write --models NAME=MODEL.",
        "in_process": "runs one model: leave it out, or leave out --models.",
    }
    for field, reason in reasons.items():
        if values[field]:
            raise UsageError(reason, field=field)
    if options.parallel.num_ranks > 1:
        raise UsageError("Several models cannot be divided among ranks: serve one.")
    if options.disaggregation.role != "mixed":
        raise UsageError("is for one model: leave it out, or leave out --models.", field="role")


def _memory(options: EngineOptions) -> int:
    """Return the bytes of memory that the engines of several models may share.

    For the cpu backend, this is the free memory. For a GPU, it is the whole memory, since asking a
    GPU for its free memory takes some memory.
    """
    from twostroke.backends.create import gpu_device

    is_on_gpu = options.compute.backend == "gpu"
    return gpu_device(options.compute).memory_total if is_on_gpu else memory_available()


@contextmanager
def open_model_pool(
    models: Sequence[RequestedModel],
    pool_options: ModelPoolOptions,
    options: EngineOptions,
    log_level: str,
) -> Iterator[ModelPool]:
    """Yield a pool of engines, one for each model, that start when requests come.

    Missing models are fetched, and the headers of all are read. `options` and `log_level` are for
    each engine.

    Raises:
        UsageError: two models have the same name.
        MemoryLimitError: a model does not fit into the memory of all.
        TwostrokeError: a model does not exist or is damaged, as for `build`.
    """
    from twostroke.server.http.model_names import ModelNames
    from twostroke.server.models.model_pool import ModelPool
    from twostroke.server.models.on_demand import OnDemandEngine

    keep_s = pool_options.idle_timeout_s or math.inf
    budget_bytes = pool_options.budget_bytes or int(_FREE_MEMORY_SHARE * _memory(options))
    engines: dict[str, OnDemandEngine] = {}
    for name, model in models:
        fetch(model)
        engine = OnDemandEngine.for_model(
            name,
            model,
            options=options,
            log_level=log_level,
            budget_bytes=budget_bytes,
            keep_s=keep_s,
        )
        if engines and ModelNames(tuple(engines)).is_known(engine.card.name):
            reason = f"has two models called {engine.card.name!r}: write NAME=MODEL for one."
            raise UsageError(reason, field="models")
        engines[engine.card.name] = engine
    pool = ModelPool(engines, budget_bytes)
    try:
        yield pool
    finally:
        pool.close()
