"""`twostroke quantize`: writes a model with fewer bits, scored before it gets its name."""

from __future__ import annotations

from pathlib import Path

import click

from twostroke.cli.help import Command, OneOf, TextFile, option
from twostroke.cli.pull import fetch


def _targets() -> tuple[str, ...]:
    from twostroke.compress.quantize import TARGETS

    return TARGETS


@click.command("quantize", cls=Command)
@click.argument("model")
@option("--to", "target", required=True, help="Format of the weights, such as iq4_nl or q5_0.")
@option(
    "-o", "--out", required=True, type=click.Path(path_type=Path), help="The GGUF file to write."
)
@option(
    "--text",
    type=TextFile(),
    help="A file with text like that which the model will read [default: Python's documentation].",
)
@option("--tokens", "num_tokens", default=8192, help="Tokens of it to calibrate on.")
def command(model: str, target: str, out: Path, text: str | None, num_tokens: int) -> None:
    """Write MODEL with fewer bits for each weight, as a GGUF file.

    Rounding is calibrated on text. The file is read back and scored on other text before it gets
    its name.
    """
    from twostroke.compress.quantize import quantize

    target = OneOf(_targets()).convert(target, None, None)
    fetch(model)
    done = quantize(model, target, out, text, num_tokens, lambda line: click.echo(line, err=True))
    it = done.comparison
    click.echo(
        f"{out}: {done.num_bytes / 1e6:.1f} MB, {done.bits:.2f} bits for each weight of a layer. "
        f"Held-out text: KL {it.mean_kl:.2e} (largest {it.max_kl:.2f}), same top token "
        f"{it.top1_agreement:.1%}, perplexity {it.perplexity:.2f} (source "
        f"{it.right_perplexity:.2f})."
    )
