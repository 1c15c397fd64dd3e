"""`twostroke generate`: answer one prompt, as text or as one JSON object."""

from __future__ import annotations

import json
import os
import sys
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from twostroke.cli.fetch import open_engine
from twostroke.cli.figures import Figures, describe
from twostroke.cli.files import decoded, read_text
from twostroke.cli.form import constraint, form_options
from twostroke.cli.help import SectionedCommand
from twostroke.cli.options import (
    compute_options,
    engine_options,
    sampling_options,
    sampling_params,
    speculation_options,
)
from twostroke.cli.terminal import printable
from twostroke.core.errors import ContextLengthError, UsageError

if TYPE_CHECKING:
    from twostroke.core.request import Hints
    from twostroke.core.sampling import SamplingParams
    from twostroke.engine.build import Engine
    from twostroke.engine.output import Completion


@click.command("generate", cls=SectionedCommand)
@click.argument("model")
@click.argument("text", required=False, metavar="[PROMPT]")
@click.option("-p", "--prompt", help="The prompt; - reads standard input, as does no prompt.")
@click.option(
    "-f", "--file", "path", type=click.Path(path_type=Path), help="Read the prompt from a file."
)
@click.option("--system", help="A system message before the prompt.")
@click.option("--raw", is_flag=True, help="Continue the text as it is, without a chat template.")
@click.option(
    "--suffix",
    metavar="TEXT|@FILE",
    help="Fill in what is missing between prompt and this (code models), without a template.",
)
@click.option(
    "--prediction",
    type=click.Path(path_type=Path),
    help="A file that the answer will be like, such as the code to be edited: it comes faster.",
)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object, for scripts.")
@click.option("-q", "--quiet", is_flag=True, help="Print the answer and nothing else.")
@sampling_options
@form_options
@compute_options
@speculation_options
def command(**given: Any) -> None:
    """Answer one prompt with MODEL (a path, hf:owner/repo, or a name from `twostroke models`).

    A model with a chat template is asked the prompt as a user's message; --raw, and a model
    without one, continue the prompt's text instead. The answer goes to standard output, the line
    of figures under it to standard error.
    """
    text = _prompt(given.pop("text"), given.pop("prompt"), given.pop("path"))
    as_json, quiet = given.pop("as_json"), given.pop("quiet")
    system, raw, model = given.pop("system"), given.pop("raw"), given.pop("model")
    expected, suffix = given.pop("prediction"), _suffix(given.pop("suffix"))
    prediction = "" if expected is None else read_text(expected)
    params, options = sampling_params(given, constraint(given)), engine_options(given)
    from twostroke.engine.prompts import to_hints

    with open_engine(model, options, quiet=quiet or as_json) as engine:
        if suffix:
            tokens, params = _fill(engine, text, suffix, params, system)
        else:
            tokens, params = _encode(engine, text, params, system, raw=raw)
        hints = to_hints(engine.card, "auto", prediction)
        completion = _run(engine, tokens, params, hints, show=not as_json)
        strokes = engine.client.loop.snapshot().strokes
    if quiet and not as_json:
        return
    hardware = engine.limits.above(strokes, may_measure=True)
    figures = Figures.of(completion.usage, completion.timings, strokes, hardware)
    if as_json:
        click.echo(_as_json(completion, figures))
    else:
        click.secho(describe(figures, completion.usage, width=_columns()), dim=True, err=True)


def _prompt(text: str | None, option: str | None, path: Path | None) -> str:
    """Return the prompt, from wherever it was given."""
    if sum(source is not None for source in (text, option, path)) > 1:
        raise UsageError("Give the prompt once: in quotes, with -p TEXT, or with -f FILE.")
    text = option if text is None else text
    if path is not None:
        return read_text(path)
    is_piped = sys.stdin is not None and not sys.stdin.isatty()
    if text == "-" or (text is None and is_piped):
        return decoded(sys.stdin.buffer.read(), "Standard input")
    if text is None:
        raise UsageError(
            "There is no prompt: give one with -p TEXT, -f FILE, or on standard input."
        )
    return text


def _suffix(given: str | None) -> str:
    """Return what is to stand behind the answer; empty for nothing."""
    if given is None or not given.startswith("@"):
        return given or ""
    return read_text(Path(given[1:]))


def _fill(
    engine: Engine, text: str, suffix: str, params: SamplingParams, system: str | None
) -> tuple[list[int], SamplingParams]:
    from twostroke.engine.prompts import encode_gap, ending_gaps

    if system is not None:
        raise UsageError("--system needs a chat template; it cannot go with --suffix.")
    return encode_gap(engine.card, text, suffix), ending_gaps(engine.card, params)


def _encode(
    engine: Engine, text: str, params: SamplingParams, system: str | None, *, raw: bool
) -> tuple[list[int], SamplingParams]:
    from twostroke.engine.prompts import encode_text, encode_turn

    if raw or engine.card.chat_template is None:
        if system is not None:
            why = "and --raw leaves it out" if raw else f"and {engine.card.name} has none"
            raise UsageError(f"--system needs a chat template, {why}.")
        return encode_text(engine.card, text), params
    if not text.strip():
        raise UsageError(
            "The prompt is empty: give one with -p TEXT, -f FILE, or on standard input."
        )
    messages = [{"role": "system", "content": system}] if system is not None else []
    # Files and `echo` end in a newline that nobody means to say.
    message = {"role": "user", "content": text.removesuffix("\n")}
    return encode_turn(engine.card, [*messages, message], params)


def _run(
    engine: Engine, tokens: list[int], params: SamplingParams, hints: Hints, *, show: bool
) -> Completion:
    """Compute the answer; with `show`, print it as it comes."""
    from twostroke.engine.output import join

    safe = printable if sys.stdout.isatty() else str
    outputs = []
    try:
        generation = engine.client.generate(tokens, params, hints=hints)
    except ContextLengthError:
        raise _too_long(engine, len(tokens), params.max_tokens) from None
    try:
        for output in generation:
            outputs.append(output)
            if show:
                sys.stdout.write(safe(output.text))
                sys.stdout.flush()
    finally:
        if show and outputs:  # also behind an answer that was interrupted
            sys.stdout.write("\n")
            sys.stdout.flush()
    return join(outputs)


def _too_long(engine: Engine, num_prompt: int, max_tokens: int | None) -> ContextLengthError:
    """Return the error for what does not fit, in the words of the command line."""
    limit, most = engine.context_length, engine.card.cost.program.context_length
    knob = f", or raise --context-length (up to {most})" if limit < most else ""
    if num_prompt >= limit:
        return ContextLengthError(
            f"The prompt has {num_prompt} tokens, but prompt and answer together may have {limit}: "
            f"shorten it{knob}."
        )
    return ContextLengthError(
        f"The prompt has {num_prompt} tokens and --max-tokens is {max_tokens}, but prompt and "
        f"answer together may have {limit}: lower --max-tokens to {limit - num_prompt}{knob}."
    )


def _as_json(completion: Completion, figures: Figures) -> str:
    result = {
        "text": completion.text,
        "token_ids": list(completion.token_ids),
        "finish_reason": completion.finish_reason.value,
        "usage": asdict(completion.usage),
        "timings": asdict(figures),
    }
    return json.dumps(result, ensure_ascii=False)


def _columns() -> int:
    """Return how wide standard error is; 0 where it is no terminal."""
    try:
        return os.get_terminal_size(sys.stderr.fileno()).columns
    except (OSError, ValueError):
        return 0
