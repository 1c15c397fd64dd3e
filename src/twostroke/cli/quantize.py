"""`twostroke quantize`: writes a model with fewer bits for each weight, and scores it."""

from __future__ import annotations

from pathlib import Path

import click

from twostroke.cli.help import ByteSizeParam, Command, NumberParam, TextFileParam, WordParam, option
from twostroke.cli.options import requires_torch
from twostroke.cli.pull import fetch
from twostroke.cli.terminal import printable
from twostroke.core.errors import UsageError


@click.command("quantize", cls=Command)
@click.argument("model")
@option("--to", "target", help="Format of the weights, such as q4_k_m or iq4_nl.")
@option(
    "--bits",
    type=NumberParam(1, 16),
    help="Instead of --to: the best mix of formats with this mean number of bits for each "
    "weight of a layer.",
)
@option(
    "--size",
    type=ByteSizeParam(),
    help="Instead of --to: the best mix of formats in a file of this size.",
)
@option(
    "--kl",
    type=NumberParam(0, 10, min_open=True),
    help="Instead of --to: the smallest mix of formats with this KL divergence from MODEL, in "
    "nats.",
)
@option(
    "-o",
    "--out",
    required=True,
    type=click.Path(path_type=Path),
    help="GGUF file to write; for w4a16 and w8a16, the folder.",
)
@option(
    "--text",
    type=TextFileParam(),
    help="File with text like the model's later prompts, for calibration [default: the model's "
    "own answers].",
)
@option(
    "--tokens",
    "num_tokens",
    type=click.IntRange(1024, 1_000_000),
    default=8192,
    help="Tokens of the text to calibrate on.",
)
@option(
    "--tune",
    "tuning_minutes",
    type=NumberParam(0),
    default=0.0,
    help="Minutes of training of scales and norms on MODEL's answers; the quantized codes stay "
    "(needs the extra [train]).",
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
    read back and scored on other text before it is renamed to OUT. The file includes a report of
    its scores: twostroke report FILE.
    """
    from twostroke.cli.report import show_report
    from twostroke.lab.compress.allocate import QuantizationGoal
    from twostroke.lab.compress.quantize import quantize

    if sum(values is not None for values in (target, bits, size, kl)) != 1:
        raise UsageError("Give one of --to, --bits, --size and --kl.")
    goal = QuantizationGoal(bits, size, kl) if target is None else _target(target)
    if tuning_minutes:
        with requires_torch("--tune"):
            import twostroke.lab.train.tune  # noqa: F401
    fetch(model)
    report = quantize(
        model,
        goal,
        out,
        text=text,
        num_tokens=num_tokens,
        notice=lambda line: click.echo(line, err=True),
        tuning_minutes=tuning_minutes,
    )
    click.echo(printable(f"{out}\n"))
    show_report(report)


def _target(name: str) -> str:
    """Return the format that `quantize --to` names.

    Raises:
        UsageError: the format is unknown, or cannot be written.
    """
    from twostroke.lab.compress.quantize import TARGETS
    from twostroke.model.quant import FORMATS

    if name.upper() in FORMATS and name.lower() not in TARGETS:
        targets = ", ".join(TARGETS)
        reason = (
            f"{name} can be read, not written: --to takes {targets}, and --bits mixes of these."
        )
        raise UsageError(reason)
    context = click.get_current_context()
    option = next(param for param in context.command.params if param.name == "target")
    return WordParam(TARGETS).convert(name, option, context)
