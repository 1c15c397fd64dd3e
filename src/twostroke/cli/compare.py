"""`twostroke compare`: readers, formats and models against one that is held to be right."""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import click

from twostroke.cli.help import OneOf
from twostroke.cli.terminal import printable, show_table
from twostroke.core.config import (
    ACTIVATION_BITS,
    BACKENDS,
    KV_FORMATS,
    CacheOptions,
    ComputeOptions,
)
from twostroke.core.errors import UsageError, nearest

if TYPE_CHECKING:
    from collections.abc import Sequence

    from twostroke.measure.compare import Report, Subject

_READERS: Final = tuple(name for name in BACKENDS if name != "auto")
_LAYERS_SHOWN: Final = 6


@click.command("compare")
@click.argument("model")
@click.option(
    "--readers", default="cpu", show_default=True, help="Who reads it, such as cpu,torch."
)
@click.option("--levels", help="Instruction sets of the cpu reader: 'all', or such as avx2,avx512.")
@click.option(
    "--kv-formats",
    help="How the cpu reader stores keys and values: 'all', or such as f16,int8 [default: f16].",
)
@click.option(
    "--activation-bits",
    metavar="BITS",
    help="What the cpu reader keeps of activations: 'all', or such as 15,9 [default: 15].",
)
@click.option("--against", metavar="MODEL", help="The model that is right [default: the same].")
@click.option(
    "--right",
    type=OneOf(_READERS),
    default="reference",
    show_default=True,
    help="Who reads the one that is right.",
)
@click.option(
    "--text",
    type=click.Path(path_type=Path),
    help="A file of text [default: prose and code that no model was trained on].",
)
@click.option("--length", type=click.IntRange(2), help="Tokens a piece [default: up to 1024].")
@click.option("--tokens", type=click.IntRange(2), help="Take at most so many [default: all].")
@click.option("--threads", "num_threads", type=click.IntRange(1, 1024), help="Compute threads.")
@click.option("--device", default="auto", show_default=True, help="Of the torch reader.")
@click.option("--layers", is_flag=True, help="Show the drift behind every layer.")
@click.option("--check", is_flag=True, help="End with 1 if a reader is beyond the limits.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def command(model: str, as_json: bool, layers: bool, check: bool, **given: Any) -> None:
    """Measure how far MODEL's answers lie from the right ones, on a text.

    For each reader: the divergence of its next-token distributions (KL, in nats), how often it has
    the same likeliest token, the text's perplexity, and how far hidden states drift apart.
    """
    from twostroke.measure import compare as measured

    against = model if given["against"] is None else given["against"]
    subjects = _subjects(model, given)
    right = measured.Subject(against, _compute(given["right"], given), CacheOptions())
    text = _read(given["text"]) if given["text"] else measured.held_out_text()
    models = [model] if against == model else [model, against]
    pieces = measured.pieces_of(text, models, given["length"], given["tokens"])
    reports = list(measured.compare_subjects(right, subjects, pieces, _notice))
    num_tokens = sum(map(len, pieces))
    if as_json:
        result = {"model": model, "against": against, "right": given["right"]}
        lines = [asdict(report) for report in reports]
        click.echo(json.dumps({**result, "num_tokens": num_tokens, "readers": lines}))
    else:
        what = f"{against} read by {given['right']}" if against != model else given["right"]
        click.echo(printable(f"{model} against {what}, {num_tokens:,} tokens\n"))
        show_table(_table(reports))
        click.echo()
        show_table(_drift_table(reports, every=layers))
    beyond = [report.name for report in reports if not report.is_within_limits]
    if check and beyond:
        limits = (
            f"mean KL below {measured.MAX_MEAN_KL:g}, the same likeliest token at least"
            f" {measured.MIN_TOP1_AGREEMENT:.0%}, perplexity within"
            f" {measured.MAX_PERPLEXITY_CHANGE:.1%}"
        )
        raise click.ClickException(f"Beyond the limits ({limits}): {'; '.join(beyond)}.")


def _subjects(model: str, given: dict[str, Any]) -> list[Subject]:
    from twostroke.measure.compare import Subject

    subjects = []
    for reader in _names(given["readers"], _READERS, "reader"):
        compute = _compute(reader, given)
        computes, caches = [compute], [CacheOptions()]
        if reader == "cpu" and given["activation_bits"] is not None:
            kept = _activation_bits(given["activation_bits"])
            computes = [replace(compute, activation_bits=bits) for bits in kept]
        if reader == "cpu" and given["levels"] is not None:
            levels = _levels(given["levels"])
            computes = [replace(one, level=level) for one in computes for level in levels]
        if reader == "cpu" and given["kv_formats"] is not None:
            caches = [CacheOptions(kv_format=name) for name in _kv_formats(given["kv_formats"])]
        subjects += [Subject(model, one, cache) for one in computes for cache in caches]
    readers = {subject.compute.backend for subject in subjects}
    for name, reader, all_readers in (
        ("levels", "cpu", readers),
        ("kv_formats", "cpu", readers),
        ("activation_bits", "cpu", readers),
        ("device", "torch", readers | {given["right"]}),
    ):
        if given[name] not in {None, "auto"} and reader not in all_readers:
            flag = f"--{name.replace('_', '-')}"
            raise UsageError(f"{flag} is the {reader} reader's: add it to --readers.")
    return subjects


def _compute(reader: str, given: dict[str, Any]) -> ComputeOptions:
    device = given["device"] if reader == "torch" else "auto"
    return ComputeOptions(reader, given["num_threads"], device=device)


def _levels(wanted: str) -> list[str]:
    from twostroke.backends.cpu.library import level_reports

    reports = level_reports()
    if wanted == "all":
        return [name for name, report in reports.items() if report.startswith("runs")]
    # The cpu reader says which of them it does not know.
    return [name.strip() for name in wanted.split(",")]


def _activation_bits(wanted: str) -> list[int]:
    known = [str(bits) for bits in ACTIVATION_BITS]
    return [int(b) for b in (known if wanted == "all" else _names(wanted, known, "number of bits"))]


def _kv_formats(wanted: str) -> list[str]:
    known = [name for name in KV_FORMATS if name != "auto"]
    return known if wanted == "all" else _names(wanted, known, "format of keys and values")


def _names(wanted: str, known: Sequence[str], what: str) -> list[str]:
    names = [name.strip() for name in wanted.split(",")]
    for name in names:
        if name not in known:
            choices = ", ".join(known)
            message = f"There is no {what} '{name}'; there are: {choices}."
            raise UsageError(message + nearest(name, known))
    return names


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except OSError as error:
        raise UsageError(f"{str(path)!r} cannot be read: {error.strerror}.") from None
    except UnicodeDecodeError:
        raise UsageError(f"{str(path)!r} is not text in UTF-8.") from None


def _notice(name: str) -> None:
    click.echo(f"Reading with {name}", err=True)


def _table(reports: Sequence[Report]) -> list[tuple[str, ...]]:
    headings = ("READER", "MEAN KL", "MAX KL", "SAME TOP-1", "PERPLEXITY", "CHANGE", "ROWS/S")
    lines: list[tuple[str, ...]] = [headings]
    for report in reports:
        it = report.comparison
        lines.append(
            (
                report.name,
                f"{it.mean_kl:.1e}",
                f"{it.max_kl:.1e}",
                f"{it.top1_agreement:.2%}",
                f"{it.perplexity:.3f}",
                f"{it.perplexity / it.right_perplexity - 1:+.3%}",
                f"{report.rows_per_s:,.0f}",
            )
        )
    return lines


def _drift_table(reports: Sequence[Report], *, every: bool) -> list[tuple[str, ...]]:
    """Relative difference of hidden states by layer; a few layers unless `every`."""
    drifting = [report for report in reports if report.drift]
    if not drifting:
        return [("The layers are not alike: no drift to show.",)]
    count = max(len(report.drift) for report in drifting)
    shown = list(range(count))
    if not every and count > _LAYERS_SHOWN:
        shown = sorted({round(i * (count - 1) / (_LAYERS_SHOWN - 1)) for i in range(_LAYERS_SHOWN)})
    lines = [("DRIFT BEHIND LAYER", *(report.name for report in drifting))]
    lines += [
        (str(layer + 1), *(f"{report.drift[layer]:.1e}" for report in drifting)) for layer in shown
    ]
    return lines
