"""`twostroke compare`: measures how much backends, formats and models differ from a reference."""

from __future__ import annotations

import json
from itertools import product
from typing import TYPE_CHECKING, Any, Final

import click
import msgspec
from msgspec.structs import replace

from twostroke.cli.help import Command, TextFileParam, WordListParam, WordParam, option
from twostroke.cli.options import PARALLEL_PARAMS, take_struct
from twostroke.cli.terminal import printable, show_table
from twostroke.core.distributed_options import ParallelOptions
from twostroke.core.errors import UsageError
from twostroke.core.message_text import counted_noun
from twostroke.core.options import (
    ACTIVATION_BITS,
    AUTO_BITS,
    BACKENDS,
    DEFAULT_ACTIVATION_BITS,
    KV_FORMATS,
    CacheOptions,
    ComputeOptions,
)

if TYPE_CHECKING:
    from collections.abc import Sequence

    from twostroke.lab.measure.compare import ComparedModel, ComparisonReport

_READERS: Final = tuple(name for name in BACKENDS if name != "auto")
_LAYERS_SHOWN: Final = 6


def _levels() -> list[str]:
    from twostroke.backends.cpu.library import level_reports

    return [name for name, report in level_reports().items() if report.startswith("runs")]


@click.command("compare", cls=Command, params=[*PARALLEL_PARAMS])
@click.argument("model")
@option(
    "--readers",
    type=WordListParam(lambda: _READERS),
    default="cpu",
    help="Backends that compute MODEL, such as cpu,torch, or 'all'.",
)
@option(
    "--levels",
    type=WordListParam(_levels),
    help="Instruction-set levels of the backend cpu, such as avx2,avx512, or 'all' [default: the "
    "best that runs here].",
)
@option(
    "--kv-formats",
    type=WordListParam(lambda: [name for name in KV_FORMATS if name not in {"auto", "fp8"}]),
    help="Number formats of keys and values on the backend cpu, such as f16,int8, or 'all' "
    "[default: as `serve` uses].",
)
@option(
    "--activation-bits",
    type=WordListParam(lambda: [AUTO_BITS, *map(str, ACTIVATION_BITS)]),
    help="Bits of activations on the backend cpu, such as auto,9, or 'all' [default: "
    f"{ComputeOptions().activation_bits}].",
)
@option(
    "--against",
    metavar="MODEL",
    help="Model that gives the reference answers [default: MODEL itself].",
)
@option(
    "--right",
    type=WordParam(_READERS),
    default="reference",
    help="Backend that computes the reference.",
)
@option(
    "--text",
    type=TextFileParam(),
    help="File with the text to measure on [default: prose and code that no model was trained on].",
)
@option(
    "--length",
    type=click.IntRange(2),
    help="Tokens in each piece of the text [default: up to 1024].",
)
@option("--tokens", type=click.IntRange(2), help="Most tokens of the text to use [default: all].")
@option(
    "--threads",
    "num_threads",
    type=click.IntRange(1, 1024),
    help="Threads that compute [default: one for each core].",
)
@option("--device", default="auto", help="Device of the backends gpu and torch, such as cuda:1.")
@option("--layers", is_flag=True, help="Show the drift after every layer instead of after a few.")
@option(
    "--check", is_flag=True, help="Exit with code 1 if a backend differs by more than the limits."
)
@option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def command(model: str, as_json: bool, layers: bool, check: bool, **values: Any) -> None:
    """Measure on a text how much MODEL's predictions differ from a reference.

    For each reader (a backend with its settings) this shows the KL divergence of its next-token
    distributions in nats, how often the likeliest token is the same, the perplexity of the text,
    the mean absolute difference of its tokens' log-probabilities in nats (LOGPROB CHANGE), and the
    relative difference of the hidden states.
    """
    from twostroke.lab.measure import compare as measured

    against = model if values["against"] is None else values["against"]
    subjects = _compared_models(model, values)
    precise = replace(_compute(values["right"], values), activation_bits=DEFAULT_ACTIVATION_BITS)
    right = measured.ComparedModel(against, precise, CacheOptions())
    text = measured.held_out_text() if values["text"] is None else values["text"]
    models = [model] if against == model else [model, against]
    pieces = measured.pieces_of(text, models, values["length"], values["tokens"])

    def notice(name: str) -> None:
        click.echo(f"Reading with {name}", err=True)

    reports = list(measured.compare_models(right, subjects, pieces, notice))
    num_tokens = sum(map(len, pieces))
    if as_json:
        result = {"model": model, "against": against, "right": values["right"]}
        lines = [msgspec.to_builtins(report) for report in reports]
        click.echo(json.dumps({**result, "num_tokens": num_tokens, "readers": lines}))
    else:
        reference = values["right"]
        if against != model:
            reference = f"{against} read by {reference}"
        click.echo(
            printable(
                f"{model} against {reference}, {counted_noun(num_tokens, 'token', form=',')}\n"
            )
        )
        show_table(_table(reports))
        click.echo()
        show_table(_drift_table(reports, every=layers))
    failing_names = [report.name for report in reports if not report.is_within_limits]
    if check and failing_names:
        limits = (
            f"mean KL below {measured.MAX_MEAN_KL:g}, the same likeliest token at least"
            f" {measured.MIN_TOP1_AGREEMENT:.0%}, perplexity within"
            f" {measured.MAX_PERPLEXITY_CHANGE:.1%}"
        )
        raise click.ClickException(f"Beyond the limits ({limits}): {'; '.join(failing_names)}.")


def _compared_models(model: str, values: dict[str, Any]) -> list[ComparedModel]:
    """Return the models to compare with the reference.

    These are MODEL with each combination of settings of the cpu backend, and with each other
    backend.
    """
    from twostroke.lab.measure.compare import ComparedModel

    readers, parallel = values["readers"], take_struct(ParallelOptions, values)
    for name, reader, used in (
        ("levels", "cpu", readers),
        ("kv_formats", "cpu", readers),
        ("activation_bits", "cpu", readers),
        ("device", "torch" if "gpu" not in readers else "gpu", [*readers, values["right"]]),
    ):
        if values[name] not in (None, "auto") and reader not in used:
            raise UsageError(f"needs the {reader} backend: add it to --readers.", field=name)
    settings = product(
        values["activation_bits"] or [ComputeOptions().activation_bits],
        values["levels"] or [None],
        values["kv_formats"] or ["auto"],
    )
    on_cpu = [
        ComparedModel(
            model,
            ComputeOptions(
                "cpu",
                values["num_threads"],
                level,
                activation_bits=bits if bits == AUTO_BITS else int(bits),
            ),
            CacheOptions(kv_format=kv_format),
            parallel,
        )
        for bits, level, kv_format in settings
    ]
    subjects: list[ComparedModel] = []
    for reader in readers:
        other = ComparedModel(model, _compute(reader, values), CacheOptions(), parallel)
        subjects += on_cpu if reader == "cpu" else [other]
    return subjects


def _compute(reader: str, values: dict[str, Any]) -> ComputeOptions:
    device = values["device"] if reader in {"gpu", "torch"} else "auto"
    return ComputeOptions(reader, values["num_threads"], device=device)


def _table(reports: Sequence[ComparisonReport]) -> list[tuple[str, ...]]:
    quality = ("MEAN KL", "MAX KL", "SAME TOP-1", "PERPLEXITY", "CHANGE", "LOGPROB CHANGE")
    lines: list[tuple[str, ...]] = [("READER", *quality, "ROWS/S")]
    for report in reports:
        logprob_change = f"{report.comparison.mean_logprob_change:.4f}"
        cells = (*report.comparison.cells(), logprob_change, f"{report.rows_per_s:,.0f}")
        lines.append((report.name, *cells))
    return lines


def _drift_table(reports: Sequence[ComparisonReport], *, every: bool) -> list[tuple[str, ...]]:
    """Return the rows of a table that shows how far hidden states drift after the model's layers.

    The table has a few layers, or all layers if `every` is true.
    """
    drifting = [report for report in reports if report.drift]
    if not drifting:
        return [("The layers differ in number or width, so there is no drift to show.",)]
    count = max(len(report.drift) for report in drifting)
    layer_indices = list(range(count))
    if not every and count > _LAYERS_SHOWN:
        layer_indices = sorted(
            {round(i * (count - 1) / (_LAYERS_SHOWN - 1)) for i in range(_LAYERS_SHOWN)}
        )
    lines = [("DRIFT AFTER LAYER", *(report.name for report in drifting))]
    lines += [
        (str(layer + 1), *(f"{report.drift[layer]:.1e}" for report in drifting))
        for layer in layer_indices
    ]
    return lines
