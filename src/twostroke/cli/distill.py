"""`twostroke distill`: trains a smaller model on the answers of a larger one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from twostroke.cli.extras import needing_torch
from twostroke.cli.help import Command, option
from twostroke.cli.pull import fetch
from twostroke.core.errors import UsageError


@click.command("distill", cls=Command)
@click.argument("teacher")
@option("--student", help="A smaller model to train, or a file .yaml of the sizes of one to cut.")
@option("--layers", type=int, help="Or so many of TEACHER's layers.")
@option(
    "-o",
    "--output",
    required=True,
    type=click.Path(path_type=Path),
    help="Folder for the student and for what is needed to continue.",
)
@option("--data", default="self", help='File of prompts, one a line; "self": built-in prompts.')
@option("--tokens", "num_tokens", default=250_000, help="Tokens of answers to learn from.")
@option("--minutes", default=30.0, help="Training time of all runs together.")
@option("--length", default=512, help="Most tokens of a prompt with its answer.")
@option("--learning-rate", default=1e-4, help="Learning rate after the warm-up.")
@option("--seed", default=0, help="Seed of the prompts and the batches.")
def command(
    teacher: str, student: str | None, layers: int | None, output: Path, **given: Any
) -> None:
    """Train a smaller model on TEACHER's answers, such as a draft for speculation.

    Its tokens' probabilities learn from TEACHER's; with another vocabulary it learns the text.
    Ctrl-C stops and keeps the training; the same command continues it.
    """
    from twostroke.lab.train.options import DistillOptions, StudentShape

    options = DistillOptions(**given)
    if (student is None) == (layers is None):
        raise UsageError("Give either --student MODEL or --layers N.")
    wanted: str | StudentShape = StudentShape(layers) if student is None else student
    if student is not None and student.endswith((".yaml", ".yml")):
        wanted = StudentShape.read(Path(student))
    with needing_torch("distill"):
        from twostroke.lab.compress.distill import distill
    fetch(teacher)
    if isinstance(wanted, str):
        fetch(wanted)
    path = distill(teacher, wanted, output, options, lambda line: click.echo(line, err=True))
    click.echo(f"The student is {path}: run it, quantize it, or guess with it (--draft {path}).")
