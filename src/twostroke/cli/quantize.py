"""`twostroke quantize`: writes a model with fewer bits, scored before it gets its name."""

from __future__ import annotations

from pathlib import Path

import click

from twostroke.cli.help import ByteSize, Command, NumberParam, OneOf, TextFile, option
from twostroke.cli.options import needing_torch
from twostroke.cli.pull import fetch
from twostroke.cli.terminal import printable
from twostroke.core.errors import UsageError


@click.command("quantize", cls=Command)
@click.argument("model")
@option("--to", "target", help="Format of the weights, such as q4_k_m or iq4_nl.")
@option(
    "--bits",
    type=NumberParam(1, 16),
    help="Instead: the best mix of formats with so many bits for each weight of a layer.",
)
@option("--size", type=ByteSize(), help="Instead: the best mix of a file of this size.")
@option(
    "--kl",
    type=NumberParam(0, 10, min_open=True),
    help="Instead: the smallest mix with this KL divergence from MODEL, in nats.",
)
@option(
    "-o",
    "--out",
    required=True,
    type=click.Path(path_type=Path),
    help="The GGUF file to write; the folder for w4a16 and w8a16.",
)
@option(
    "--text",
    type=TextFile(),
    help="A file with text like that which the model will read [default: its own answers].",
)
@option(
    "--tokens",
    "num_tokens",
    type=click.IntRange(1024, 1_000_000),
    default=8192,
    help="Tokens of it to calibrate on.",
)
@option(
    "--tune",
    "tuning_minutes",
    type=NumberParam(0),
    default=0.0,
    help="Minutes in which scales and norms learn from MODEL, codes unchanged (extra [train]).",
)
def command(
    model: str,
    target: str | None,
    bits: float | None,
    size: int | None,
    kl: float | None,
    out: Path,
    text: str | None,
    num_tokens: int,
    tuning_minutes: float,
) -> None:
    """Write MODEL with fewer bits for each weight, as a GGUF file.

    Rounding is calibrated on text: without --text, on MODEL's answers to many prompts. The file is
    read back and scored on other text before it gets its name. A report of how it scored stands in
    the file: twostroke report FILE.
    """
    from twostroke.cli.report import show_report
    from twostroke.lab.compress.allocate import Goal
    from twostroke.lab.compress.quantize import quantize

    if sum(values is not None for values in (target, bits, size, kl)) != 1:
        raise UsageError("Give one of --to, --bits, --size and --kl.")
    wanted = Goal(bits, size, kl) if target is None else _target(target)
    if tuning_minutes:
        with needing_torch("--tune"):
            import twostroke.lab.train.tune  # noqa: F401
    fetch(model)
    done = quantize(
        model,
        wanted,
        out,
        text,
        num_tokens,
        lambda line: click.echo(line, err=True),
        tuning_minutes=tuning_minutes,
    )
    click.echo(printable(f"{out}\n"))
    show_report(done)


def _target(name: str) -> str:
    """Return a format that can be written; raises UsageError."""
    from twostroke.lab.compress.quantize import TARGETS
    from twostroke.model.quant import FORMATS

    if name.upper() in FORMATS and name.lower() not in TARGETS:
        known = ", ".join(TARGETS)
        reason = f"{name} can be read, not written: --to takes {known}, and --bits mixes of these."
        raise UsageError(reason)
    context = click.get_current_context()
    option = next(one for one in context.command.params if one.name == "target")
    return OneOf(TARGETS).convert(name, option, context)
