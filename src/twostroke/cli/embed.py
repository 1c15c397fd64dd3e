"""`twostroke embed`: turns texts into vectors, and prints each as a line of JSON."""

from __future__ import annotations

import json
import sys
from typing import TYPE_CHECKING, Any

import click
from msgspec.structs import replace

from twostroke.cli.help import Command, TextFileParam, WordParam, option, read_text
from twostroke.cli.options import MACHINE_PARAMS, PARALLEL_PARAMS, engine_options
from twostroke.cli.pull import open_engine
from twostroke.core.errors import ContextLengthError, UsageError
from twostroke.core.message_text import counted_noun
from twostroke.core.options import SpeculationOptions
from twostroke.core.request import AUTO_POOLING, POOLINGS, EmbeddingParams

if TYPE_CHECKING:
    from collections.abc import Sequence

    from twostroke.engine.engine import Engine


@click.command("embed", cls=Command, params=[*MACHINE_PARAMS, *PARALLEL_PARAMS])
@click.argument("model")
@click.argument("texts", nargs=-1, metavar="[TEXT]...")
@option(
    "-f",
    "--file",
    type=TextFileParam(),
    help="File with one text on each line; - is standard input, which is also the default.",
)
@option(
    "--pooling",
    type=WordParam(POOLINGS),
    default=AUTO_POOLING,
    help="How the tokens of a text become one vector: their mean, or the last token; auto: as "
    "the model's files say, else the mean; none: a vector for each token.",
)
@option(
    "--parse-special/--no-parse-special",
    default=True,
    help="Turn the texts of special tokens, such as <|im_start|>, into these tokens.",
)
@option(
    "--dimensions",
    type=int,
    help="Keep only the first values of each vector, this many [default: all].",
)
@option("-q", "--quiet", is_flag=True, help="Show no progress bar.")
def command(**values: Any) -> None:
    """Turn each TEXT into a vector of length 1 with MODEL, and print it as a line of JSON.

    Texts of similar meaning get vectors of similar direction; models that were trained for
    embeddings do this best. A line has `index`, `prompt_tokens` and `embedding`, in the order of
    the texts.
    """
    texts, position_format = _texts_to_embed(values.pop("texts"), values.pop("file"))
    params = EmbeddingParams(values.pop("pooling"), values.pop("dimensions"))
    model = values.pop("model")
    quiet = values.pop("quiet")
    parse_special = values.pop("parse_special")
    options = replace(engine_options(values, model), speculation=SpeculationOptions("off"))
    from twostroke.engine.client import Caller
    from twostroke.engine.prompts import encode_text

    with open_engine(model, options, quiet=quiet) as engine:
        tokens = [
            encode_text(engine.card, text, field="input", parse_special=parse_special)
            for text in texts
        ]
        _check_lengths(engine, [len(text_tokens) for text_tokens in tokens], position_format)
        for embedding in engine.client.embed(tokens, params, Caller(prompt_field="input")):
            line = {
                "index": embedding.index,
                "prompt_tokens": embedding.usage.prompt_tokens,
                "embedding": embedding.vector.tolist(),
            }
            click.echo(json.dumps(line))


def _texts_to_embed(values: Sequence[str], file: str | None) -> tuple[list[str], str]:
    """Return the texts to embed, from the arguments, a file or standard input.

    Returns (texts, format of a text's position in error messages, such as "Line {} of -f FILE").
    """
    position_format = "Text {}" if file is None else "Line {} of -f FILE"
    if values and file is not None:
        raise UsageError("Give texts in quotes or with -f FILE, not both.")
    if not values and file is None and sys.stdin is not None and not sys.stdin.isatty():
        file, position_format = read_text("-"), "Line {} of standard input"
    texts = list(values) if file is None else _split_lines(file)
    if not texts:
        raise UsageError("There is no text: give it in quotes, with -f FILE, or on standard input.")
    for number, text in enumerate(texts, 1):
        if not text.strip():
            position = position_format.format(number)
            raise UsageError(f"{position} is empty: each text must have at least one word.")
    return texts, position_format


def _split_lines(text: str) -> list[str]:
    """Return the lines of a text, split only at line feeds.

    `str.splitlines` would also split at U+2028 and other characters.
    """
    return text.replace("\r\n", "\n").removesuffix("\n").split("\n") if text else []


def _check_lengths(engine: Engine, lengths: list[int], position_format: str) -> None:
    limit = engine.context_length
    model_limit = engine.card.cost.program.context_length
    for number, count in enumerate(lengths, 1):
        if count > limit:
            remedy = (
                f", or raise --context-length (up to {model_limit})" if limit < model_limit else ""
            )
            raise ContextLengthError(
                f"{position_format.format(number)} has {counted_noun(count, 'token')}, but there "
                f"may be {limit}: shorten it{remedy}."
            )
