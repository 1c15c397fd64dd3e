"""`twostroke serve`: an OpenAI-compatible API for one model, or several."""

from __future__ import annotations

import json
import logging
import sys
from contextlib import ExitStack, closing, contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any, Final

import click
from msgspec.structs import replace

from twostroke.cli.help import ByteSize, Command, NumberParam, OneOf, option, verbose
from twostroke.cli.listening import listening, open_records, say_stop, tell
from twostroke.cli.options import (
    BATCHING,
    DEFAULT_SAMPLING,
    HANDOVER,
    MACHINE,
    OBSERVING,
    PARALLEL,
    TEMPLATE,
    TIERS,
    check_batching,
    engine_options,
    is_given,
    speculation,
)
from twostroke.cli.pull import open_engine, open_remote
from twostroke.cli.several import asked_models, check_alone, open_roster
from twostroke.core import env
from twostroke.core.files import megabytes

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from twostroke.backends.machine_limits import MachineLimits
    from twostroke.core.options import BatchOptions, EngineOptions
    from twostroke.engine.model_card import ModelCard
    from twostroke.engine.process.launch import LaunchedProcess
    from twostroke.engine.process.served import ServedEngine
    from twostroke.server.models.model_pool import ModelPool
    from twostroke.server.options import Objective, ServeOptions

    Opened = tuple[ServedEngine, MachineLimits | None, str | None]  # the last is the draft's name

FILL_TIMEOUT_S: Final = 10.0  # after which a static batch starts with fewer requests
_logger = logging.getLogger("twostroke.serve")


@click.command(
    "serve",
    cls=Command,
    params=[
        *(*TEMPLATE, *MACHINE.values(), *PARALLEL, *speculation(draft="auto")),
        *(*DEFAULT_SAMPLING, *BATCHING, *TIERS, *HANDOVER, *OBSERVING),
    ],
)
@click.argument("model", required=False)
@option(
    "--models",
    multiple=True,
    metavar="LIST",
    help="Serve several models, such as smollm2,NAME=./model.gguf; each is loaded when it is asked "
    "for. All have the same options.",
)
@option(
    "--memory",
    "budget_bytes",
    type=ByteSize(),
    help="Memory for all of --models, such as 12GB [default: nine tenths of what is free].",
)
@option(
    "--idle-timeout",
    "idle_timeout_s",
    type=NumberParam(0, 1e9),
    default=300.0,
    metavar="SECONDS",
    help="Unload one of --models that was not asked for so long; 0 never does.",
)
@listening(
    port=8000,
    records="Keep files, batches, API keys and usage in this folder, across restarts "
    "[default: none are kept].",
)
@option(
    "--name",
    "model_names",
    multiple=True,
    help="Name of the model for clients; repeatable [default: its own name].",
)
@option(
    "--keep-responses",
    "max_stored",
    type=click.IntRange(0, 1_000_000),
    default=10_000,
    help="How many answers of /v1/responses to keep for later requests.",
)
@option(
    "--reasoning",
    type=OneOf(("apart", "inline")),
    default="apart",
    help="Send a model's reasoning in a field apart, or leave it in the answer's text.",
)
@option(
    "--parse-special/--no-parse-special",
    default=True,
    help="Make special tokens of their texts, such as <|im_start|>, in prompts without a chat "
    "template. Messages of chats are never read so.",
)
@option(
    "--any-model",
    is_flag=True,
    help="Answer requests for every model, whatever name they have, with MODEL.",
)
@option(
    "--strict",
    "is_strict",
    is_flag=True,
    help="Refuse fields that are not known or have no effect, instead of ignoring them.",
)
@option(
    "--strict-limits",
    is_flag=True,
    help="Refuse a limit of tokens above what the context holds, instead of cutting it.",
)
@option(
    "--llama-metrics",
    is_flag=True,
    help="Add llama-server's metrics (llamacpp:...) to /metrics, for its dashboards.",
)
@option(
    "--in-process",
    is_flag=True,
    help="Run the engine in the server's own process: less memory, but a crash ends the server.",
)
@verbose
def command(**given: Any) -> int:
    """Serve MODEL (a path, hf:owner/repo, or a name from `twostroke models`) over HTTP.

    With --models several share memory: see docs/operations/models-on-demand.md.

    GET /openapi.json describes the API.

    Ctrl-C or SIGTERM stops the server after the running answers; a second one cuts them off.
    """
    from twostroke.core.process_tuning import allow_files
    from twostroke.engine.process.launch import LaunchedProcess

    asked = asked_models(given["model"], given["models"])
    check_batching(given["policy"], is_server=True)
    options = _with_fill_timeout(engine_options(given, asked[0][1]))
    is_alone = not given["models"]
    if not is_alone:
        check_alone(given, options)
    allow_files()  # inherited by the engine
    with ExitStack() as stack:
        launched = None
        if is_alone and not given["in_process"]:
            launched = stack.enter_context(closing(LaunchedProcess()))  # before slow imports
        run = _prepare(given, stack)
        if not is_alone:
            roster = stack.enter_context(open_roster(asked, given, options))
            announce = partial(_announce_several, models=roster, batch=options.batch)
            return run(roster, None, announce)
        engine, limits, draft = stack.enter_context(_open(given, options, launched))
        if engine.card.chat_template is not None:
            engine.card.chat_template.prepare()  # now, before a request would have to wait for it
        return run(
            engine,
            limits,
            partial(
                _announce,
                engine=engine,
                draft=draft,
                is_verbose=given["is_verbose"],
                batch=options.batch,
            ),
        )


def _with_fill_timeout(options: EngineOptions) -> EngineOptions:
    """Let static batches that do not fill start: the clients of a server may be fewer."""
    batch = options.batch
    if batch.policy != "static":
        return options
    timeout_s = batch.max_wait_s if is_given("max_wait_s") else FILL_TIMEOUT_S
    return replace(options, batch=replace(batch, fill_timeout_s=timeout_s))


def _prepare(given: dict[str, Any], stack: ExitStack) -> Callable[..., int]:
    """Check options, open records, bind and log; return what serves an engine.

    It is called with the engine, its machine's limits and what announces it.
    """
    from twostroke.server.http.logs import logging_to
    from twostroke.server.http.server import bind
    from twostroke.server.observability.objectives import limits_of, parse_objective
    from twostroke.server.observability.traces import check_endpoint

    objectives, form = tuple(map(parse_objective, given["objectives"])), given["log_format"]
    limits_of(objectives)  # wrong ones are refused here, before the weights are loaded
    if given["otlp_endpoint"] is not None:
        check_endpoint(given["otlp_endpoint"])
    records = stack.enter_context(open_records(given["records"]))
    serving = _serving(given, objectives)
    # Bound before the weights are loaded, so that a port in use is reported at once.
    listener = stack.enter_context(bind(serving.host, serving.port))
    stack.enter_context(logging_to(sys.stderr, form, given["log_level"]))

    def run(
        engine: ServedEngine, limits: MachineLimits | None, announce: Callable[..., None]
    ) -> int:
        from twostroke.core.process_tuning import ease_collector
        from twostroke.lab.planner.endpoint import Plans
        from twostroke.server.run import run_server

        def on_ready(url: str) -> None:
            ease_collector()
            announce(url, serving=serving, form=form)

        on_stop = partial(say_stop, form=form)
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


def _serving(given: dict[str, Any], objectives: tuple[Objective, ...]) -> ServeOptions:
    """Return the server's options; its records are open."""
    from twostroke.server.auth.keys import ApiKeys
    from twostroke.server.options import ServeOptions

    return ServeOptions(
        host=given["host"],
        port=given["port"],
        api_keys=ApiKeys.read(
            given["api_keys"],
            env.api_key(),
            given["records"],
            env.replica_key(),
            asks=given["require_keys"],
        ),
        model_names=given["model_names"],
        cors_origins=given["cors_origins"],
        allowed_hosts=given["allowed_hosts"],
        drain_s=given["drain_s"],
        max_stored=given["max_stored"],
        dashboard=given["dashboard"],
        objectives=objectives,
        access_log=given["access_log"],
        otlp_endpoint=given["otlp_endpoint"],
        any_model=given["any_model"],
        is_strict=given["is_strict"],
        strict_limits=given["strict_limits"],
        llama_metrics=given["llama_metrics"],
        splits_reasoning=given["reasoning"] == "apart",
        parses_special=given["parse_special"],
    )


@contextmanager
def _open(
    given: dict[str, Any], options: EngineOptions, launched: LaunchedProcess | None
) -> Iterator[Opened]:
    """Yield an engine in the launched process, or in this one."""
    if launched is not None:
        with open_remote(
            given["model"], options, given["log_level"], launched, _import_server
        ) as remote:
            yield remote, remote.limits, remote.draft
        return
    from twostroke.engine.process.served import LocalEngine

    with open_engine(given["model"], options, say=_logger.info) as engine:
        engine.client.grammars.prepare()  # now, before a stream would have to wait for it
        with closing(LocalEngine(engine.client)) as served:
            yield served, engine.limits, engine.draft


def _import_server() -> None:
    import twostroke.server.run  # noqa: F401 - it takes a while


def _announce(
    url: str,
    *,
    engine: ServedEngine,
    draft: str | None,
    is_verbose: bool,
    batch: BatchOptions,
    serving: ServeOptions,
    form: str,
) -> None:
    """Report where the server is; a log in text also shows a request to try."""
    name = serving.model_names[0] if serving.model_names else engine.card.name
    _warn_of_all(url, serving)
    backend = engine.facts.backend
    used, reserved = megabytes(engine.memory_bytes), megabytes(backend.cache_bytes)
    memory = f"It uses {used} of memory; conversations may take up to {reserved} (--kv-memory)."
    memory += _about_chat({name: engine.card}) + _about_batching(batch)
    detail = backend.full_detail if is_verbose else backend.detail
    if form == "json":
        _logger.info("Serving %s at %s (%s). %s", name, url, detail, memory)
        return
    guesses = f", {draft} guesses ahead" if draft else ""
    tell(
        f"Twostroke serves {name} at {url} ({detail}{guesses}; Ctrl-C stops it). {memory}\n"
        f"{_request_to_try(url, name, engine, serving)}"
    )


def _announce_several(
    url: str, *, models: ModelPool, batch: BatchOptions, serving: ServeOptions, form: str
) -> None:
    """Report where a server of several models is, as `_announce` does."""
    _warn_of_all(url, serving)
    names, budget = ", ".join(models.engines), megabytes(models.budget_bytes)
    chat = _about_chat({name: engine.card for name, engine in models.engines.items()})
    chat += _about_batching(batch)
    if form == "json":
        _logger.info("Serving %s at %s on demand; %s for all.%s", names, url, budget, chat)
        return
    sizes = ", ".join(
        f"{name} ({megabytes(engine.num_bytes)})" for name, engine in models.engines.items()
    )
    tell(
        f"Twostroke serves {sizes} at {url}, each when it is asked for, within {budget} of memory "
        f"(--memory). Ctrl-C stops it.{chat}\n"
        f"{_request_to_try(url, models.card.name, models, serving)}"
    )


def _about_batching(batch: BatchOptions) -> str:
    """Return a sentence about requests that wait for a static batch; empty for other policies."""
    if batch.policy != "static":
        return ""
    return (
        f" Requests wait until {batch.batch_size} of them make a batch (--batch-size), or until "
        f"the first has waited {batch.fill_timeout_s:g} s (--max-wait)."
    )


def _about_chat(cards: Mapping[str, ModelCard]) -> str:
    """Return sentences about chat templates that cannot be used; empty if all can."""
    sentences = []
    for name, card in cards.items():
        chat = card.chat_template
        if chat is not None and chat.refusal is not None:
            sentences.append(f" {name} cannot chat, only continue texts: {chat.refusal}")
        elif chat is not None and chat.tool_refusal is not None:
            sentences.append(f" {name} has no use of its template for tools: {chat.tool_refusal}")
    return "".join(sentences)


def _warn_of_all(url: str, serving: ServeOptions) -> None:
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
    what: dict[str, Any] = {"prompt": "The sky is blue because"}
    route = "completions"
    if engine.card.can_chat:
        what = {"messages": [{"role": "user", "content": "Why is the sky blue?"}]}
        route = "chat/completions"
    body = {"model": name, **what, "max_tokens": 128, "temperature": 0}
    quoted = json.dumps(body, ensure_ascii=False).replace("'", "'\\''")
    key = "" if not serving.has_keys else " -H 'Authorization: Bearer KEY'"
    return (
        f"Open {url} in a browser to try it, let programs use {url}/v1, or ask by hand:\n"
        f"  curl {url}/v1/{route} -H 'Content-Type: application/json'{key} \\\n"
        f"    -d '{quoted}'"
    )
