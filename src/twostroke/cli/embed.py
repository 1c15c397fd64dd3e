"""`twostroke embed`: texts in, vectors out, a line of JSON each."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from twostroke.cli.fetch import open_engine
from twostroke.cli.files import decoded, read_text
from twostroke.cli.help import OneOf, SectionedCommand
from twostroke.cli.options import compute_options, engine_options
from twostroke.core.config import SpeculationOptions
from twostroke.core.embedding import AUTO, POOLINGS, EmbeddingParams
from twostroke.core.errors import ContextLengthError, UsageError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from twostroke.engine.build import Engine
    from twostroke.engine.embedding import Embedding


@click.command("embed", cls=SectionedCommand)
@click.argument("model")
@click.argument("texts", nargs=-1, metavar="[TEXT]...")
@click.option(
    "-f",
    "--file",
    "path",
    type=click.Path(path_type=Path, allow_dash=True),
    help="Read texts from a file, one a line; -: standard input, as does no text.",
)
@click.option(
    "--pooling",
    type=OneOf(POOLINGS),
    default=AUTO,
    show_default=True,
    help="Of which tokens: the mean, or the last one; auto: what suits the model.",
)
@click.option("--dimensions", type=int, help="Only so many values of each [default: all].")
@click.option("-q", "--quiet", is_flag=True, help="No progress bar.")
@compute_options
def command(**given: Any) -> None:
    """Turn each TEXT into a vector of length 1 with MODEL, and print it as a line of JSON.

    Texts of one meaning point the same way, as far as the model was taught to: best are models
    made for it. A line has `index`, `prompt_tokens` and `embedding`, in the order of the texts.
    """
    texts = _texts(given.pop("texts"), given.pop("path"))
    params = EmbeddingParams(given.pop("pooling"), given.pop("dimensions"))
    model, quiet = given.pop("model"), given.pop("quiet")
    options = replace(engine_options(given), speculation=SpeculationOptions("off"))
    from twostroke.engine.client import Caller
    from twostroke.engine.prompts import encode_text

    with open_engine(model, options, quiet=quiet) as engine:
        tokens = [encode_text(engine.card, text, field="input") for text in texts]
        _check_lengths(engine, [len(one) for one in tokens])
        caller = Caller(prompt_field="input")
        for embedding in engine.client.embed(tokens, params, caller):
            click.echo(_as_json(embedding))


def _texts(given: Sequence[str], path: Path | None) -> list[str]:
    """Return the texts, from wherever they were given."""
    if given and path is not None:
        raise UsageError("Give texts in quotes or with -f FILE, not both.")
    if given:
        found = list(given)
    elif path is not None and str(path) != "-":
        found = read_text(path).splitlines()
    elif path is not None or (sys.stdin is not None and not sys.stdin.isatty()):
        found = decoded(sys.stdin.buffer.read(), "Standard input").splitlines()
    else:
        found = []
    if not found:
        raise UsageError("There is no text: give it in quotes, with -f FILE, or on standard input.")
    empty = next((place for place, text in enumerate(found, 1) if not text.strip()), None)
    if empty:
        raise UsageError(f"Text {empty} is empty: each must have at least one word.")
    return found


def _check_lengths(engine: Engine, lengths: list[int]) -> None:
    limit, most = engine.context_length, engine.card.cost.program.context_length
    for place, count in enumerate(lengths, 1):
        if count > limit:
            knob = f", or raise --context-length (up to {most})" if limit < most else ""
            raise ContextLengthError(
                f"Text {place} has {count} tokens, but there may be {limit}: shorten it{knob}."
            )


def _as_json(embedding: Embedding) -> str:
    return json.dumps(
        {
            "index": embedding.index,
            "prompt_tokens": embedding.usage.prompt_tokens,
            "embedding": embedding.vector.tolist(),
        }
    )
