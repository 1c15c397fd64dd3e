"""`twostroke report`: prints the quality report in a file that `quantize` wrote."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from twostroke.cli.help import Command, option
from twostroke.cli.terminal import printable, show_table
from twostroke.core.message_text import counted_noun, format_bytes

if TYPE_CHECKING:
    from twostroke.lab.compress.report import FileReport, TextFacts
    from twostroke.lab.measure.questions import Flips


@click.command("report", cls=Command)
@click.argument("model", metavar="FILE")
@option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def command(model: str, as_json: bool) -> None:
    """Print the report in FILE: its differences from the source model, its sizes and its speed.

    The report was measured when the file was written; nothing is measured now.
    """
    from twostroke.lab.compress.report import load_report

    report = load_report(model)
    if as_json:
        click.echo(report.encode())
    else:
        show_report(report)


def show_report(report: FileReport) -> None:
    """Print a quality report of a quantized model as tables."""
    comparison = report.comparison
    mean_kl, high_kl = f"{comparison.mean_kl:.2e}", f"{comparison.high_kl:.2e}"
    divergence = f"mean {mean_kl}, 99.9% {high_kl}, largest {comparison.max_kl:.2e}"
    lines = [
        ("Source", f"{report.source}, {report.source_bits:.2f} bits for each weight"),
        ("SHA-256", report.source_sha256),
        ("Format", f"{report.target}, {report.bits:.2f} bits for each weight of a layer"),
        (
            "Size",
            f"{format_bytes(report.num_bytes)}, in memory {format_bytes(report.memory_bytes)}",
        ),
        ("KL", divergence),
        ("Same top token", f"{comparison.top1_agreement:.2%}"),
        ("Perplexity", f"{comparison.perplexity:.3f}, source {comparison.right_perplexity:.3f}"),
        ("Flipped answers", _flips(report.flips)),
        (
            "Speed",
            f"prompts {report.rows_per_s:,.0f} t/s, one stream {report.tokens_per_s:,.0f} t/s",
        ),
        ("Measured on", report.machine),
        ("Calibration", _text(report.calibration)),
        ("Held-out text", _text(report.held_out)),
        ("Canary", f"{report.canary.easy_nats:.3f} nats for each easy token"),
    ]
    for name, text in lines:
        click.echo(printable(f"{name:<16}{text}"))
    click.echo()
    rows = [
        (kind.name, kind.formats, f"{kind.bits:.2f}", format_bytes(kind.num_bytes))
        for kind in report.kinds
    ]
    show_table([("MATRICES", "FORMAT", "BITS", "SIZE"), *rows], right=(2, 3))
    if report.source_warning:
        click.echo(f"\n{printable(report.source_warning)}")


def _flips(flips: Flips | None) -> str:
    if flips is None:
        return "not measured"
    num_right = f"right {flips.num_right}, source {flips.source_right}"
    return f"{flips.num_flipped} of {flips.num_questions}; {num_right}"


def _text(text: TextFacts | None) -> str:
    return (
        f"{counted_noun(text.num_tokens, 'token', form=',')}, SHA-256 {text.sha256}"
        if text
        else "none"
    )
