"""`twostroke serve`: an OpenAI-compatible API for one model."""

from __future__ import annotations

import json
import logging
import resource
import sys
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from twostroke.cli.fetch import open_engine
from twostroke.cli.help import SectionedCommand
from twostroke.cli.observe import observe_options, observing
from twostroke.cli.options import (
    batch_options,
    compute_options,
    engine_options,
    lasting_speculation_options,
)
from twostroke.core import env

if TYPE_CHECKING:
    from twostroke.engine.build import Engine
    from twostroke.serve.options import ServeOptions

_logger = logging.getLogger("twostroke.serve")

_MOST_FILES = 65_536  # connections are files; the system may allow far more than are of use


@click.command("serve", cls=SectionedCommand)
@click.argument("model")
@click.option("--host", default="127.0.0.1", show_default=True, help="The address to listen at.")
@click.option(
    "--port", type=int, default=8000, show_default=True, help="The port; 0 takes a free one."
)
@click.option(
    "--api-keys",
    type=click.Path(path_type=Path),
    metavar="FILE",
    help="Ask clients for a key; a line of FILE is KEY or TENANT KEY. TWOSTROKE_API_KEY is one "
    "more [default: nobody is asked].",
)
@click.option(
    "--name",
    "model_names",
    multiple=True,
    help="What clients call the model; repeatable [default: its own name].",
)
@click.option(
    "--drain",
    "drain_s",
    type=float,
    default=30.0,
    show_default=True,
    help="Seconds, up to a day, that running answers get when the server is stopped.",
)
@click.option(
    "--keep-responses",
    "max_stored",
    type=click.IntRange(0, 1_000_000),
    default=10_000,
    show_default=True,
    help="Answers of /v1/responses that are kept for later requests, the newest; 0 keeps none.",
)
@click.option(
    "--reasoning",
    type=click.Choice(["apart", "inline"]),
    default="apart",
    show_default=True,
    help="Where a model's reasoning goes: into a field of its own, or left in the answer's text.",
)
@compute_options
@lasting_speculation_options
@batch_options
@observe_options
def command(**given: Any) -> int:
    """Serve MODEL (a path, hf:owner/repo, or a name from `twostroke models`) over HTTP.

    GET /openapi.json describes all that it answers.

    Ctrl-C, or SIGTERM, lets running answers finish; a second one cuts them off.
    """
    from twostroke.engine.collector import ease_collector
    from twostroke.serve.http.keys import ApiKeys
    from twostroke.serve.observe.logs import logging_to
    from twostroke.serve.options import ServeOptions
    from twostroke.serve.run import bind, run_server

    model = given.pop("model")
    serving = ServeOptions(
        host=given.pop("host"),
        port=given.pop("port"),
        api_keys=ApiKeys.read(given.pop("api_keys"), env.api_key()),
        model_names=given.pop("model_names"),
        drain_s=given.pop("drain_s"),
        max_stored=given.pop("max_stored"),
        **observing(given),
        splits_reasoning=given.pop("reasoning") == "apart",
    )
    log = given.pop("log_format"), given.pop("log_level")
    options = engine_options(given)
    _allow_connections()
    # Before the weights are loaded: a port in use is known at once.
    listener = bind(serving.host, serving.port)
    with listener, logging_to(sys.stderr, *log), open_engine(model, options) as engine:
        name = serving.model_names[0] if serving.model_names else engine.card.name

        def on_ready(url: str) -> None:
            ease_collector()
            _announce(url, name, engine, serving, form=log[0])

        return run_server(
            engine.client,
            serving,
            listener=listener,
            limits=engine.limits,
            on_ready=on_ready,
            on_stop=partial(_say_stop, form=log[0]),
        )


def _allow_connections() -> None:
    """Let this process have the connections that the system allows it, not those of a shell."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = _MOST_FILES if hard == resource.RLIM_INFINITY else min(hard, _MOST_FILES)
    if soft != resource.RLIM_INFINITY and soft < most:
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))


def _announce(url: str, name: str, engine: Engine, serving: ServeOptions, *, form: str) -> None:
    """Say where the server is, and to people a request that this model can answer."""
    if serving.api_keys is None and not serving.is_private:
        _logger.warning(
            "Whoever reaches %s may use this server: --api-keys asks them for keys.", url
        )
    if form == "json":
        _logger.info("Serving %s at %s (%s).", name, url, engine.facts.detail)
        return
    what: dict[str, Any] = {"prompt": "The sky is blue because"}
    route = "completions"
    if engine.card.chat_template is not None:
        what = {"messages": [{"role": "user", "content": "Why is the sky blue?"}]}
        route = "chat/completions"
    body = {"model": name, **what, "max_tokens": 128, "temperature": 0}
    quoted = json.dumps(body, ensure_ascii=False).replace("'", "'\\''")
    key = "" if serving.api_keys is None else " -H 'Authorization: Bearer KEY'"
    draft = f", {engine.draft} guesses ahead" if engine.draft else ""
    _tell(
        f"Twostroke serves {name} at {url} ({engine.facts.detail}{draft}; Ctrl-C stops it). "
        "Try it:\n"
        f"  curl {url}/v1/{route} -H 'Content-Type: application/json'{key} \\\n"
        f"    -d '{quoted}'"
    )


def _say_stop(num_running: int, *, form: str) -> None:
    text = "Stopping."
    if num_running:
        answers = "1 running answer" if num_running == 1 else f"{num_running} running answers"
        text = f"Stopping after {answers}; Ctrl-C again cuts them off."
    if form == "json":
        _logger.info(text)
    else:
        _tell(text)


def _tell(text: str) -> None:
    """Say something to people; a full disk behind the log is no reason not to serve."""
    with suppress(OSError):
        click.echo(text, err=True)
