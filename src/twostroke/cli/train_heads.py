"""`twostroke train-heads`: teaches small layers to guess what a model will say next."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from twostroke.cli.fetch import fetch
from twostroke.cli.help import OneOf
from twostroke.core.errors import UsageError
from twostroke.models.heads import KINDS


@click.command("train-heads")
@click.argument("model")
@click.option(
    "-o", "--output", required=True, type=click.Path(path_type=Path), help="The folder to fill."
)
@click.option("--kind", type=OneOf(KINDS), default="eagle", show_default=True, help="Of heads.")
@click.option(
    "--data",
    default="self",
    show_default=True,
    help='Prompts that the model answers: a file, a line each, or "self", many of our own.',
)
@click.option(
    "--tokens", default=250_000, show_default=True, help="How long the answers are in all."
)
@click.option("--minutes", default=30.0, show_default=True, help="Of training, over all runs.")
@click.option("--vocabulary", default=4096, show_default=True, help="Tokens that heads can guess.")
@click.option("--depth", default=4, show_default=True, help="Guesses in a row.")
@click.option("--ffn", type=int, help="Width of the feed-forward [default: 2/3 of the model's].")
@click.option("--window", default=256, show_default=True, help="Tokens that a head looks back.")
@click.option("--learning-rate", default=1e-3, show_default=True, help="At its highest.")
@click.option("--seed", default=0, show_default=True, help="Of prompts, weights and order.")
def command(model: str, output: Path, **given: Any) -> None:
    """Train heads for MODEL from its own answers, for --speculate eagle or medusa.

    What was stopped with Ctrl-C leaves usable heads; the same command goes on from there.
    """
    from twostroke.train.options import TrainOptions

    options = TrainOptions(
        kind=given["kind"],
        data=given["data"],
        num_tokens=given["tokens"],
        minutes=given["minutes"],
        vocab_size=given["vocabulary"],
        depth=given["depth"],
        ffn_size=given["ffn"],
        window=given["window"],
        learning_rate=given["learning_rate"],
        seed=given["seed"],
    )
    try:
        from twostroke.train.run import train_heads
    except ModuleNotFoundError as error:
        if error.name != "torch":
            raise
        message = "train-heads needs PyTorch: pip install 'twostroke[train]'."
        raise UsageError(message) from None
    fetch(model)
    train_heads(model, output, options, lambda line: click.echo(line, err=True))
    click.echo(f"The heads are in {output}: use them with --heads {output}.")
