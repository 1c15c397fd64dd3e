"""`twostroke serve`: an OpenAI-compatible API for one model."""

from __future__ import annotations

import sys
from typing import Any

import click

from twostroke.cli.fetch import fetch
from twostroke.cli.options import batch_options, compute_options, engine_options
from twostroke.cli.terminal import loading_bar


@click.command("serve")
@click.argument("model")
@click.option("--host", default="127.0.0.1", show_default=True)
@click.option("--port", type=click.IntRange(0, 65535), default=8000, show_default=True)
@click.option("--name", help="The model's name in the API [default: MODEL's own].")
@click.option("--drain", "drain_s", type=float, default=30.0, help="Seconds to finish at the end.")
@compute_options
@batch_options
def command(**given: Any) -> None:
    """Serve MODEL (a path, or a name that `twostroke models` lists) over HTTP."""
    from twostroke.serve.options import ServeOptions
    from twostroke.serve.run import bind, run_server

    host, port, name = given.pop("host"), given.pop("port"), given.pop("name")
    drain_s, model = given.pop("drain_s"), given.pop("model")
    options = engine_options(given)
    listener = bind(host, port)  # before the weights are loaded: a port in use is known at once
    try:
        fetch(model)
        from twostroke.engine.build import build, limits

        with loading_bar(f"Loading {model}") as progress:
            engine = build(model, options, progress)
    except BaseException:
        listener.close()
        raise
    names = (name,) if name else (engine.card.name,)
    with engine:
        code = run_server(
            engine.client,
            ServeOptions(host=host, port=port, model_names=names, drain_s=drain_s),
            listener=listener,
            hardware=limits(engine),
            on_ready=lambda url: _announce(url, names[0]),
            on_stop=_say_goodbye,
        )
    sys.exit(code)


def _say_goodbye(num_running: int) -> None:
    if num_running:
        click.echo(f"Finishing {num_running} running requests; again to cut them off.", err=True)


def _announce(url: str, name: str) -> None:
    click.echo(f"Twostroke serves {name} at {url} (Ctrl-C stops it).", err=True)
    body = f'{{"model": "{name}", "messages": [{{"role": "user", "content": "Hello"}}]}}'
    click.echo("Try it:", err=True)
    click.echo(f"  curl {url}/v1/chat/completions -H 'Content-Type: application/json' \\", err=True)
    click.echo(f"    -d '{body}'", err=True)
