"""`twostroke distill` trains a smaller model; `twostroke train-heads` trains draft heads."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from twostroke.cli.help import Command, WordParam, option
from twostroke.cli.options import requires_torch
from twostroke.cli.pull import fetch
from twostroke.core.errors import UsageError
from twostroke.model.families.heads import KINDS


@click.command("distill", cls=Command)
@click.argument("teacher")
@option(
    "--student",
    help="Smaller model to train, or a .yaml file with the sizes of a model to cut from TEACHER.",
)
@option("--layers", type=int, help="Instead of --student: train this many of TEACHER's layers.")
@option(
    "-o",
    "--output",
    required=True,
    type=click.Path(path_type=Path),
    help="Folder for the student and the state of the training.",
)
@option("--data", default="self", help='File of prompts, one a line; "self": built-in prompts.')
@option("--tokens", "num_tokens", default=250_000, help="Tokens of answers to learn from.")
@option("--minutes", default=30.0, help="Training time of all runs together.")
@option("--length", default=512, help="Most tokens of a prompt with its answer.")
@option("--learning-rate", default=1e-4, help="Learning rate after the warm-up.")
@option("--seed", default=0, help="Seed of the prompts and the batches.")
def distill(
    teacher: str, student: str | None, layers: int | None, output: Path, **values: Any
) -> None:
    """Train a smaller model on TEACHER's answers, such as a draft model for speculation.

    The student learns TEACHER's next-token probabilities, or with another vocabulary its texts.
    Ctrl-C stops the training and saves it; the same command continues it.
    """
    from twostroke.lab.train.options import DistillOptions, StudentShape

    options = DistillOptions(**values)
    if (student is None) == (layers is None):
        raise UsageError("Give either --student MODEL or --layers N.")
    student_source: str | StudentShape = StudentShape(layers) if student is None else student
    if student is not None and student.endswith((".yaml", ".yml")):
        student_source = StudentShape.read(Path(student))
    with requires_torch("distill"):
        from twostroke.lab.compress import distill as training
    fetch(teacher)
    if isinstance(student_source, str):
        fetch(student_source)
    path = training.distill(teacher, student_source, output, options, _report)
    click.echo(f"The student is {path}: run it, quantize it, or draft with it (--draft {path}).")


@click.command("train-heads", cls=Command)
@click.argument("model")
@option(
    "-o",
    "--output",
    required=True,
    type=click.Path(path_type=Path),
    help="Folder for the heads and the state of the training.",
)
@option("--kind", type=WordParam(KINDS), default="eagle", help="Kind of draft heads.")
@option("--data", default="self", help='File of prompts, one a line; "self": built-in prompts.')
@option("--tokens", "num_tokens", default=250_000, help="Tokens of answers to learn from.")
@option("--minutes", default=30.0, help="Training time of all runs together.")
@option(
    "--vocabulary",
    "vocab_size",
    default=4096,
    help="Size of the vocabulary that the heads can draft.",
)
@option("--depth", default=4, help="Tokens that the heads draft in a row.")
@option("--ffn", "ffn_size", type=int, help="Feed-forward width [default: 2/3 of the model's].")
@option("--window", default=256, help="Tokens that a head attends to.")
@option("--learning-rate", default=1e-3, help="Learning rate after the warm-up.")
@option("--seed", default=0, help="Seed of the prompts, the first weights and the batches.")
def train_heads(model: str, output: Path, **values: Any) -> None:
    """Train draft heads for MODEL on its own answers, for --speculate eagle or medusa.

    Ctrl-C stops the training and saves usable heads; the same command continues it.
    """
    from twostroke.lab.train.options import TrainOptions

    options = TrainOptions(**values)
    with requires_torch("train-heads"):
        from twostroke.lab.train import run as training
    fetch(model)
    training.train_heads(model, output, options, _report)
    click.echo(f"The heads are in {output}: use them with --heads {output}.")


def _report(line: str) -> None:
    """Print a line about the progress of a training to standard error."""
    click.echo(line, err=True)
