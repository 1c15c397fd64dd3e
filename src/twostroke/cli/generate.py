"""`twostroke generate`: answer one prompt, as text or as one JSON object."""

from __future__ import annotations

import sys
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from twostroke.cli.fetch import fetch
from twostroke.cli.options import compute_options, engine_options, sampling_options, sampling_params
from twostroke.cli.terminal import Figures, loading_bar
from twostroke.core.errors import UsageError

if TYPE_CHECKING:
    from twostroke.core.sampling import SamplingParams
    from twostroke.engine.build import Engine
    from twostroke.engine.output import Completion


@click.command("generate")
@click.argument("model")
@click.option("-p", "--prompt", help="The prompt; - reads standard input.")
@click.option(
    "-f", "--file", "path", type=click.Path(exists=True, dir_okay=False, path_type=Path),
    help="Read the prompt from a file.",
)  # fmt: skip
@click.option("--system", help="A system message before the prompt.")
@click.option("--raw", is_flag=True, help="Continue the text as it is, without a chat template.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
@click.option("--quiet", is_flag=True, help="Print the answer and nothing else.")
@sampling_options
@compute_options
def command(**given: Any) -> None:
    """Answer one prompt with MODEL (a path, or a name that `twostroke models` lists)."""
    from twostroke.engine.build import build

    text = _prompt(given.pop("prompt"), given.pop("path"))
    as_json, quiet = given.pop("as_json"), given.pop("quiet")
    system, raw, model = given.pop("system"), given.pop("raw"), given.pop("model")
    params, options = sampling_params(given), engine_options(given)
    fetch(model)
    with loading_bar(f"Loading {model}", quiet=quiet or as_json) as progress:
        engine = build(model, options, progress)
    with engine:
        tokens = _encode(engine, text, system, raw=raw)
        completion = _run(engine, tokens, params, show=not as_json)
        if as_json or not quiet:
            _report(engine, completion, as_json=as_json)


def _prompt(text: str | None, path: Path | None) -> str:
    if text is not None and path is not None:
        raise UsageError("Give the prompt with -p or with -f, not both.")
    if path is not None:
        return path.read_text(encoding="utf-8", errors="replace")
    if text == "-" or (text is None and not sys.stdin.isatty()):
        return sys.stdin.read()
    if text is None:
        raise UsageError(
            "There is no prompt: give one with -p TEXT, -f FILE, or on standard input."
        )
    return text


def _encode(engine: Engine, text: str, system: str | None, *, raw: bool) -> list[int]:
    from twostroke.engine.prompts import encode_chat, encode_text

    if raw or engine.card.chat_template is None:
        if system is not None:
            raise UsageError("--system needs a chat template; it cannot go with --raw.")
        return encode_text(engine.card, text)
    messages = [{"role": "system", "content": system}] if system is not None else []
    return encode_chat(engine.card, [*messages, {"role": "user", "content": text}])


def _run(engine: Engine, tokens: list[int], params: SamplingParams, *, show: bool) -> Completion:
    from twostroke.engine.output import join

    outputs = []
    for output in engine.client.generate(tokens, params):
        outputs.append(output)
        if show:
            click.echo(output.text, nl=False)
            sys.stdout.flush()
    if show:
        click.echo()
    return join(outputs)


def _report(engine: Engine, completion: Completion, *, as_json: bool) -> None:
    import json

    from twostroke.engine.build import limits

    usage = completion.usage
    strokes = engine.client.loop.meter.strokes
    figures = Figures.of(usage, completion.timings, strokes, limits(engine))
    if not as_json:
        click.secho(figures.line(usage), dim=True, err=True)
        return
    result = {
        "text": completion.text,
        "token_ids": list(completion.token_ids),
        "finish_reason": completion.finish_reason.value,
        "usage": asdict(usage),
        "timings": asdict(figures),
    }
    click.echo(json.dumps(result, ensure_ascii=False))
