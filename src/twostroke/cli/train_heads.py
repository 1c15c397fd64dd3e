"""`twostroke train-heads`: trains small layers that guess a model's next tokens."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from twostroke.cli.extras import needing_torch
from twostroke.cli.help import Command, OneOf, option
from twostroke.cli.pull import fetch
from twostroke.model.families.heads import KINDS


@click.command("train-heads", cls=Command)
@click.argument("model")
@option(
    "-o",
    "--output",
    required=True,
    type=click.Path(path_type=Path),
    help="Folder for the heads and for what is needed to continue.",
)
@option("--kind", type=OneOf(KINDS), default="eagle", help="Kind of heads.")
@option("--data", default="self", help='File of prompts, one a line; "self": built-in prompts.')
@option("--tokens", "num_tokens", default=250_000, help="Tokens of answers to learn from.")
@option("--minutes", default=30.0, help="Training time of all runs together.")
@option("--vocabulary", "vocab_size", default=4096, help="Tokens that the heads can guess.")
@option("--depth", default=4, help="Guesses in a row.")
@option("--ffn", "ffn_size", type=int, help="Feed-forward width [default: 2/3 of the model's].")
@option("--window", default=256, help="Tokens that a head attends to.")
@option("--learning-rate", default=1e-3, help="Learning rate after the warm-up.")
@option("--seed", default=0, help="Seed of the prompts, the first weights and the batches.")
def command(model: str, output: Path, **given: Any) -> None:
    """Train heads for MODEL on its own answers, for --speculate eagle or medusa.

    Ctrl-C stops the training and saves usable heads; the same command continues it.
    """
    from twostroke.lab.train.options import TrainOptions

    options = TrainOptions(**given)
    with needing_torch("train-heads"):
        from twostroke.lab.train.run import train_heads
    fetch(model)
    train_heads(model, output, options, lambda line: click.echo(line, err=True))
    click.echo(f"The heads are in {output}: use them with --heads {output}.")
