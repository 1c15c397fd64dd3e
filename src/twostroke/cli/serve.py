"""`twostroke serve`: serves one model, or several, over an OpenAI-compatible API."""

from __future__ import annotations

import json
import logging
import sys
from contextlib import ExitStack, closing, contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, cast

import click
from msgspec.structs import replace

from twostroke.cli.help import Command, NumberParam, option, verbose_option
from twostroke.cli.model_pool import (
    ModelPoolOptions,
    check_several,
    open_model_pool,
    requested_models,
)
from twostroke.cli.options import (
    MACHINE_PARAMS,
    PARALLEL_PARAMS,
    TEMPLATE_PARAMS,
    check_batching,
    check_effect,
    click_params,
    engine_options,
    is_given_by_user,
    speculation_params,
    take_struct,
)
from twostroke.cli.process_options import (
    ProcessOptions,
    announce_stop,
    open_records,
    print_to_stderr,
)
from twostroke.cli.pull import open_engine, open_remote
from twostroke.core import env
from twostroke.core.distributed_options import DisaggregationOptions, OffloadOptions
from twostroke.core.message_text import format_bytes
from twostroke.core.options import BatchOptions, EngineOptions, GenerationOptions
from twostroke.server.options import ServeOptions

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from twostroke.backends.machine_limits import MachineLimits
    from twostroke.cli.live_tuning import LiveTuner, TunableEngine
    from twostroke.engine.model_card import ModelCard
    from twostroke.engine.process.launch import LaunchedProcess
    from twostroke.engine.process.served import ServedEngine
    from twostroke.server.auth.keys import ApiKeys
    from twostroke.server.models.model_pool import ModelPool

    OpenedEngine = tuple[ServedEngine, MachineLimits | None, str | None]  # last: the draft's name

FILL_TIMEOUT_S: Final = 10.0  # a static batch then starts though it is not full
_logger = logging.getLogger("twostroke.serve")


@click.command(
    "serve",
    cls=Command,
    params=[
        *click_params(ModelPoolOptions),
        *click_params(ServeOptions, defaults={"access_log": True}),
        *click_params(ProcessOptions),
        *TEMPLATE_PARAMS,
        *click_params(EngineOptions, only=("stable_prefix",)),
        *MACHINE_PARAMS,
        *PARALLEL_PARAMS,
        *speculation_params(draft="auto"),
        *click_params(GenerationOptions),
        *click_params(BatchOptions),
        *click_params(OffloadOptions),
        *click_params(DisaggregationOptions),
    ],
)
@click.argument("model", required=False)
@option(
    "--autotune",
    type=click.Path(path_type=Path, dir_okay=False),
    metavar="FILE",
    help="Before the start, choose the token budget and the number of streams with which most "
    "requests of the recorded trace FILE meet the --objective values; answers stay the same. If "
    "--record-trace records to FILE, go on while serving.",
)
@option(
    "--autotune-interval",
    type=NumberParam(min=1, max=1e6),
    metavar="SECONDS",
    help="Time between two searches while serving [default: 600, and at least 50 times as long as "
    "a search takes].",
)
@option(
    "--in-process",
    is_flag=True,
    help="Run the engine in the server's own process: needs less memory, but a crash of the engine "
    "ends the server.",
)
@verbose_option
def command(**values: Any) -> int:
    """Serve MODEL (a path, hf:owner/repo, or a name from `twostroke models`) over HTTP.

    With --models, several models share memory: see docs/operations/models-on-demand.md.

    GET /openapi.json describes the API.

    Ctrl-C or SIGTERM stops the server after the running answers; a second signal cuts them off.
    """
    from twostroke.core.process_tuning import raise_open_file_limit
    from twostroke.engine.process.launch import LaunchedProcess

    pool_options = take_struct(ModelPoolOptions, values)
    models = requested_models(values["model"], pool_options.models)
    check_batching(values["policy"], is_server=True)
    options = _with_fill_timeout(engine_options(values, models[0].model))
    process = take_struct(ProcessOptions, values)
    is_alone = not pool_options.models
    if not is_alone:
        check_several(values, options)
    autotune = None
    check_effect("autotune_interval", "autotune", has_effect=values["autotune"] is not None)
    if values["autotune"] is not None:
        from twostroke.cli.autotune import autotune_of  # slow, with the simulator

        autotune = autotune_of(values, is_alone=is_alone)
    raise_open_file_limit()  # inherited by the engine
    with ExitStack() as stack:
        launched = None
        if is_alone and not values["in_process"]:
            launched = stack.enter_context(closing(LaunchedProcess()))  # before slow imports
        run = _prepare_server(values, process, stack)
        if not is_alone:
            pool = stack.enter_context(
                open_model_pool(models, pool_options, options, process.log_level)
            )
            return run(pool, None, partial(_announce_several, models=pool, batch=options.batch))
        usual_options = options
        if autotune is not None:
            options, settings = autotune.start_options(options)
        opened = _open_engine(values["model"], options, launched, process.log_level)
        engine, limits, draft = stack.enter_context(opened)
        if engine.card.chat_template is not None:
            engine.card.chat_template.prepare()  # now, before a request would have to wait for it
        announce = partial(
            _announce,
            engine=engine,
            draft=draft,
            is_verbose=values["is_verbose"],
            batch=options.batch,
        )
        if autotune is None or not autotune.is_live:
            return run(engine, limits, announce)
        tuner = autotune.live_tuner(cast("TunableEngine", engine), usual_options, settings)
        stack.enter_context(closing(tuner))
        return run(engine, limits, partial(_announce_and_tune, tuner=tuner, announce=announce))


def _announce_and_tune(
    url: str, tuner: LiveTuner, *, announce: Callable[..., None], **facts: Any
) -> None:
    """Tell the user the server's address, and start `tuner`; called in the server's event loop."""
    import asyncio  # not above: help needs none of it

    announce(url, **facts)
    tuner.start(asyncio.get_running_loop())


def _with_fill_timeout(options: EngineOptions) -> EngineOptions:
    """Return engine options with which a static batch that is not full starts after a timeout.

    Otherwise, a server with few clients would never start a batch.
    """
    batch = options.batch
    if batch.policy != "static":
        return options
    timeout_s = batch.max_wait_s if is_given_by_user("max_wait_s") else FILL_TIMEOUT_S
    return replace(options, batch=replace(batch, fill_timeout_s=timeout_s))


def _prepare_server(
    values: dict[str, Any], process: ProcessOptions, stack: ExitStack
) -> Callable[..., int]:
    """Check the server's options, open its records, bind its address and start logging.

    All this is done before a model is loaded, so that errors come early. Opened resources are
    closed by `stack`. Returns a function that serves an engine, and returns the exit code at its
    end. The function's arguments are the engine, the machine's limits, and a function that
    announces the server.
    """
    from twostroke.server.http.drain_notice import DrainNotice
    from twostroke.server.http.logs import logging_to
    from twostroke.server.http.server import bind
    from twostroke.server.observability.objectives import limits_of, parse_objective
    from twostroke.server.observability.traces import check_endpoint
    from twostroke.server.storage.trace_file import check_trace_file

    objectives = tuple(map(parse_objective, values["objectives"]))
    limits_of(objectives)  # wrong ones are refused here, before the weights are loaded
    if values["otlp_endpoint"] is not None:
        check_endpoint(values["otlp_endpoint"])
    if values["record_trace"] is not None:
        check_trace_file(values["record_trace"])
    if values["drain_notice"] is not None:
        DrainNotice(values["drain_notice"])  # a wrong source is refused before the weights load
    records = stack.enter_context(open_records(process.records))
    keys = _api_keys(values["api_keys"], process)
    serving = take_struct(ServeOptions, values, api_keys=keys, objectives=objectives)
    # Bound before the weights are loaded, so that a port in use is reported at once.
    listener = stack.enter_context(bind(serving.host, serving.port))
    log_format = process.log_format
    stack.enter_context(logging_to(sys.stderr, log_format, process.log_level))

    def run(
        engine: ServedEngine, limits: MachineLimits | None, announce: Callable[..., None]
    ) -> int:
        from twostroke.core.process_tuning import tune_garbage_collector
        from twostroke.lab.planner.endpoint import Plans
        from twostroke.server.run import serve as run_server

        def on_ready(url: str) -> None:
            tune_garbage_collector()
            announce(url, serving=serving, log_format=log_format)

        on_stop = partial(announce_stop, log_format=log_format)
        return run_server(
            engine,
            serving,
            listener=listener,
            limits=limits,
            on_ready=on_ready,
            on_stop=on_stop,
            records=records,
            extensions=(Plans,),
        )

    return run


def _api_keys(path: Path | None, process: ProcessOptions) -> ApiKeys | None:
    """Return the API keys that clients may use, from a file, the environment and the records.

    Returns None if clients need no key.
    """
    from twostroke.server.auth.keys import ApiKeys

    return ApiKeys.read(
        path,
        env.api_key(),
        process.records,
        env.replica_key(),
        asks=process.require_keys,
    )


@contextmanager
def _open_engine(
    model: str, options: EngineOptions, launched: LaunchedProcess | None, log_level: str
) -> Iterator[OpenedEngine]:
    """Start the engine for `serve` in the process `launched`; if it is None, in this process."""
    if launched is not None:
        with open_remote(model, options, log_level, launched, _import_server) as remote:
            yield remote, remote.limits, remote.draft
        return
    from twostroke.engine.process.served import LocalEngine

    with open_engine(model, options, say=_logger.info) as engine:
        engine.client.grammars.prepare()  # now, so that no stream has to wait for it
        with closing(LocalEngine(engine.client)) as local_engine:
            yield local_engine, engine.limits, engine.draft


def _import_server() -> None:
    import twostroke.server.run  # noqa: F401 - slow, so it is done while the engine starts


def _announce(
    url: str,
    *,
    engine: ServedEngine,
    draft: str | None,
    is_verbose: bool,
    batch: BatchOptions,
    serving: ServeOptions,
    log_format: str,
) -> None:
    """Tell the user the server's address and model, with an example request in a text log."""
    name = serving.model_names[0] if serving.model_names else engine.card.name
    _warn_of_open_access(url, serving)
    backend = engine.facts.backend
    used, reserved = format_bytes(engine.memory_bytes), format_bytes(backend.cache_bytes)
    memory = f"It uses {used} of memory; conversations may take up to {reserved} (--kv-memory)."
    memory += _about_chat({name: engine.card}) + _about_batching(batch)
    detail = backend.full_detail if is_verbose else backend.detail
    if log_format == "json":
        _logger.info("Serving %s at %s (%s). %s", name, url, detail, memory)
        return
    draft_note = f", {draft} drafts tokens" if draft else ""
    print_to_stderr(
        f"Twostroke serves {name} at {url} ({detail}{draft_note}; Ctrl-C stops it). {memory}\n"
        f"{_request_to_try(url, name, engine, serving)}"
    )


def _announce_several(
    url: str, *, models: ModelPool, batch: BatchOptions, serving: ServeOptions, log_format: str
) -> None:
    """Tell the user a server's address and the names of its models."""
    _warn_of_open_access(url, serving)
    names, budget = ", ".join(models.engines), format_bytes(models.budget_bytes)
    chat = _about_chat({name: engine.card for name, engine in models.engines.items()})
    chat += _about_batching(batch)
    if log_format == "json":
        _logger.info("Serving %s at %s on demand; %s for all.%s", names, url, budget, chat)
        return
    sizes = ", ".join(
        f"{name} ({format_bytes(engine.num_bytes)})" for name, engine in models.engines.items()
    )
    print_to_stderr(
        f"Twostroke serves {sizes} at {url}, each when it is requested, within {budget} of memory "
        f"(--memory). Ctrl-C stops it.{chat}\n"
        f"{_request_to_try(url, models.card.name, models, serving)}"
    )


def _about_batching(batch: BatchOptions) -> str:
    """Return a sentence that says how long a static batch waits; empty for other policies."""
    if batch.policy != "static":
        return ""
    return (
        f" Requests wait until {batch.batch_size} of them make a batch (--batch-size), or until "
        f"the first has waited {batch.fill_timeout_s:g} s (--max-wait)."
    )


def _about_chat(cards: Mapping[str, ModelCard]) -> str:
    """Return sentences about models whose chat template cannot be used; empty if there are none."""
    sentences = []
    for name, card in cards.items():
        chat = card.chat_template
        if chat is not None and chat.refusal is not None:
            sentences.append(f" {name} cannot chat, only continue texts: {chat.refusal}")
        elif chat is not None and chat.tool_refusal is not None:
            sentences.append(f" {name} has no use of its template for tools: {chat.tool_refusal}")
        elif chat is not None and chat.question_refusal is not None:
            sentences.append(f" {name} cannot chat, only continue texts: {chat.question_refusal}")
    return "".join(sentences)


def _warn_of_open_access(url: str, serving: ServeOptions) -> None:
    if serving.api_keys is not None and serving.api_keys.refuse_everybody:
        _logger.warning(
            "There is no API key, so everybody is refused: make one with `twostroke keys add`."
        )
    if not serving.has_keys and not serving.is_private:
        _logger.warning(
            "Everybody who can reach %s may use this server: demand keys with --api-keys, or make "
            "some with `twostroke keys`.",
            url,
        )


def _request_to_try(url: str, name: str, engine: ServedEngine, serving: ServeOptions) -> str:
    content: dict[str, Any] = {"prompt": "The sky is blue because"}
    route = "completions"
    if engine.card.can_chat:
        content = {"messages": [{"role": "user", "content": "Why is the sky blue?"}]}
        route = "chat/completions"
    body = {"model": name, **content, "max_tokens": 128, "temperature": 0}
    quoted = json.dumps(body, ensure_ascii=False).replace("'", "'\\''")
    key = "" if not serving.has_keys else " -H 'Authorization: Bearer KEY'"
    return (
        f"Open {url} in a browser to try it, let programs use {url}/v1, or ask by hand:\n"
        f"  curl {url}/v1/{route} -H 'Content-Type: application/json'{key} \\\n"
        f"    -d '{quoted}'"
    )
