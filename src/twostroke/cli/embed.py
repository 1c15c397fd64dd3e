"""`twostroke embed`: texts in, vectors out, a line of JSON each."""

from __future__ import annotations

import json
import sys
from typing import TYPE_CHECKING, Any

import click
from msgspec.structs import replace

from twostroke.cli.help import Command, OneOf, TextFile, option, read_text
from twostroke.cli.options import MACHINE_PARAMS, PARALLEL_PARAMS, engine_options
from twostroke.cli.pull import open_engine
from twostroke.core.embedding import AUTO, POOLINGS, EmbeddingParams
from twostroke.core.errors import ContextLengthError, UsageError
from twostroke.core.options import SpeculationOptions

if TYPE_CHECKING:
    from collections.abc import Sequence

    from twostroke.engine.engine import Engine


@click.command("embed", cls=Command, params=[*MACHINE_PARAMS, *PARALLEL_PARAMS])
@click.argument("model")
@click.argument("texts", nargs=-1, metavar="[TEXT]...")
@option(
    "-f",
    "--file",
    type=TextFile(),
    help="Read texts from a file, one a line; - is standard input, which is also the default.",
)
@option(
    "--pooling",
    type=OneOf(POOLINGS),
    default=AUTO,
    help="Take the mean of all tokens, or the last token; auto: what suits the model; none: a "
    "vector of each token.",
)
@option(
    "--parse-special/--no-parse-special",
    default=True,
    help="Make special tokens of their texts, such as <|im_start|>.",
)
@option("--dimensions", type=int, help="Keep only this many values of a vector [default: all].")
@option("-q", "--quiet", is_flag=True, help="Show no progress bar.")
def command(**values: Any) -> None:
    """Turn each TEXT into a vector of length 1 with MODEL, and print it as a line of JSON.

    Texts of similar meaning get vectors of similar direction; models that were trained for
    embeddings do this best. A line has `index`, `prompt_tokens` and `embedding`, in the order of
    the texts.
    """
    texts, origins = _texts(values.pop("texts"), values.pop("file"))
    params = EmbeddingParams(values.pop("pooling"), values.pop("dimensions"))
    model, quiet = values.pop("model"), values.pop("quiet")
    parse_special = values.pop("parse_special")
    options = replace(engine_options(values, model), speculation=SpeculationOptions("off"))
    from twostroke.engine.client import Caller
    from twostroke.engine.prompts import encode_text

    with open_engine(model, options, quiet=quiet) as engine:
        tokens = [
            encode_text(engine.card, text, field="input", parse_special=parse_special)
            for text in texts
        ]
        _check_lengths(engine, [len(text_tokens) for text_tokens in tokens], origins)
        for embedding in engine.client.embed(tokens, params, Caller(prompt_field="input")):
            line = {
                "index": embedding.index,
                "prompt_tokens": embedding.usage.prompt_tokens,
                "embedding": embedding.vector.tolist(),
            }
            click.echo(json.dumps(line))


def _texts(values: Sequence[str], file: str | None) -> tuple[list[str], str]:
    """Return the texts, and how errors name the place of one, such as "Line {} of -f FILE"."""
    places = "Text {}" if file is None else "Line {} of -f FILE"
    if values and file is not None:
        raise UsageError("Give texts in quotes or with -f FILE, not both.")
    if not values and file is None and sys.stdin is not None and not sys.stdin.isatty():
        file, places = read_text("-"), "Line {} of standard input"
    texts = list(values) if file is None else _lines(file)
    if not texts:
        raise UsageError("There is no text: give it in quotes, with -f FILE, or on standard input.")
    for number, text in enumerate(texts, 1):
        if not text.strip():
            place = places.format(number)
            raise UsageError(f"{place} is empty: each text must have at least one word.")
    return texts, places


def _lines(text: str) -> list[str]:
    """Return the lines of a file; `splitlines` would also end one at U+2028 and its like."""
    return text.replace("\r\n", "\n").removesuffix("\n").split("\n") if text else []


def _check_lengths(engine: Engine, lengths: list[int], places: str) -> None:
    limit, most = engine.context_length, engine.card.cost.program.context_length
    for number, count in enumerate(lengths, 1):
        if count > limit:
            knob = f", or raise --context-length (up to {most})" if limit < most else ""
            raise ContextLengthError(
                f"{places.format(number)} has {count} tokens, but there may be {limit}: "
                f"shorten it{knob}."
            )
