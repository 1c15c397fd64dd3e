"""`twostroke train-heads`: trains small layers that guess a model's next tokens."""

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
@click.option(
    "--kind", type=OneOf(KINDS), default="eagle", show_default=True, help="The kind of heads."
)
@click.option(
    "--data",
    default="self",
    show_default=True,
    help='A file of prompts, one a line, or "self" for built-in prompts.',
)
@click.option(
    "--tokens", default=250_000, show_default=True, help="Tokens of answers to learn from."
)
@click.option(
    "--minutes", default=30.0, show_default=True, help="Training time of all runs together."
)
@click.option("--vocabulary", default=4096, show_default=True, help="Tokens that heads can guess.")
@click.option("--depth", default=4, show_default=True, help="Guesses in a row.")
@click.option("--ffn", type=int, help="Width of the feed-forward [default: 2/3 of the model's].")
@click.option("--window", default=256, show_default=True, help="Tokens that a head attends to.")
@click.option("--learning-rate", default=1e-3, show_default=True, help="After the warm-up.")
@click.option("--seed", default=0, show_default=True, help="For prompts, weights and order.")
def command(model: str, output: Path, **given: Any) -> None:
    """Train heads for MODEL from its own answers, for --speculate eagle or medusa.

    Ctrl-C leaves usable heads, and the same command continues.
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
