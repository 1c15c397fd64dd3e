"""`twostroke fit`: which models fit a device within objectives, before any download."""

from __future__ import annotations

import shlex
from typing import TYPE_CHECKING, Any, Final

import click

from twostroke.cli.help import Command, WordParam, option
from twostroke.cli.options import is_given_by_user
from twostroke.cli.planning import (
    THIS_MACHINE,
    check_threads,
    efficiency_options,
    objective_options,
    price_option,
    threads_option,
)
from twostroke.cli.terminal import printable, show_table
from twostroke.core.errors import DownloadError, TwostrokeError, UnreachableError
from twostroke.core.json_io import encode_json
from twostroke.core.message_text import counted_noun
from twostroke.model.program.kv_layout import FORMATS

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from twostroke.lab.planner import Device, PlannedModel
    from twostroke.lab.planner.fit import CalibrationOf, FitCandidate, FitQuestion
    from twostroke.lab.planner.fit_models import UnreadModel

_HEADINGS: Final = (
    "MODEL", "FORMAT", "KV", "DRAFT", "G WEIGHTS", "KL", "GB", "TTFT MS", "MS/TOKEN", "TOKENS/S",
    "$/1M",
)  # fmt: skip
_MAX_DEFAULT_PROMPT: Final = 1024


@click.command("fit", cls=Command)
@click.argument("models", nargs=-1, metavar="[MODEL]...")
@option(
    "--on",
    "device",
    default=THIS_MACHINE,
    help="Device: a name of the table, a .toml file, or `here`, this machine as measured.",
)
@option("--devices", "count", default=1, help="Number of devices that divide each layer.")
@threads_option
@option("--context", default=4096, help="Tokens of each request for which memory must be there.")
@option("--prompt", type=int, help="Tokens of a prompt [default: 1024, or what --context leaves].")
@option("--output", default=256, help="Tokens of an answer.")
@option("--streams", default=1, help="Requests at once.")
@objective_options()
@option(
    "--kl",
    "max_kl",
    type=float,
    help="Most mean KL divergence from the published model, in nats, such as 0.1.",
)
@option(
    "--kv-format",
    "kv_formats",
    multiple=True,
    type=WordParam(tuple(FORMATS)),
    help="Format of keys and values to consider; repeatable [default: the device's usual, and "
    "int8].",
)
@efficiency_options(0.5, 0.7)
@price_option
@option(
    "--all", "shows_all", is_flag=True, help="Show also candidates that do not fit or are beaten."
)
@option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def command(
    models: tuple[str, ...],
    device: str,
    *,
    num_threads: int | None,
    shows_all: bool,
    as_json: bool,
    **values: Any,
) -> None:
    """Show which models, files and formats of keys and values fit a device, before any download.

    MODEL is as for `plan`; of hf:owner/repo, all GGUF files are considered. Without MODEL, the
    models that `twostroke models` lists are. Only headers are fetched. The table has the models
    that no other beats in size, KL, speed, memory and price together. The exit code is 9 if
    nothing fits.
    """
    from twostroke.lab import planner
    from twostroke.lab.planner.fit import find_candidates, nearest_text
    from twostroke.lab.planner.fit_models import fit_files

    check_threads(device)
    is_here = device == THIS_MACHINE
    question = _question(values, is_here=is_here)
    machine = planner.this_machine(num_threads) if is_here else planner.find_device(device)

    def notice(name: str) -> None:
        click.echo(printable(f"Reading the header of {name}"), err=True)

    files, unread = fit_files(models, _reported_kl, notice)
    if not files:
        raise DownloadError(f"No model could be read. {unread[0].name}: {unread[0].reason}")
    calibration_of = _calibration_of(machine, num_threads, is_here=is_here)
    candidates = find_candidates(files, machine, question, calibration_of)
    if as_json:
        fields = {"device": machine.name, "candidates": candidates, "unread": unread}
        click.echo(encode_json(fields).decode())
    else:
        _show(candidates, unread, question, shows_all=shows_all)
    if not candidates[0].fits:
        raise UnreachableError(f"Nothing fits {machine.name}: {nearest_text(candidates)}.")


def _question(values: dict[str, Any], *, is_here: bool) -> FitQuestion:
    from twostroke.lab import planner
    from twostroke.lab.planner.fit import FitQuestion

    usual_format = planner.default_kv_format(is_here=is_here)
    kv_formats = tuple(dict.fromkeys(values.pop("kv_formats") or (usual_format, "int8")))
    context, prompt, output = values.pop("context"), values.pop("prompt"), values.pop("output")
    if prompt is None:
        prompt = max(1, min(_MAX_DEFAULT_PROMPT, context - output))
    if is_here:  # measured steps correct its times
        for name in ("mfu", "mbu"):
            values[name] = values[name] if is_given_by_user(name) else 1.0
    max_kl = values.pop("max_kl")
    load = planner.Question(
        prompt=prompt,
        output=output,
        kv_format=kv_formats[0],
        token_budget=planner.default_token_budget(is_here=is_here),
        **values,
    )
    return FitQuestion(load=load, context=context, max_kl=max_kl, kv_formats=kv_formats)


def _calibration_of(machine: Device, num_threads: int | None, *, is_here: bool) -> CalibrationOf:
    """Return a function that returns the measured steps that correct a model's planned times.

    The function returns None, for no correction, if the device is not this machine or if the user
    has given --mfu or --mbu.
    """
    from twostroke.lab import planner

    has_shares = is_given_by_user("mfu") or is_given_by_user("mbu")
    if not is_here or has_shares:
        return lambda _model: None
    reference = planner.reference_steps(machine)

    def calibration_of(model: PlannedModel) -> Any:
        measured = planner.load_calibration(model.identity, num_threads) if model.identity else None
        return measured or reference

    return calibration_of


def _reported_kl(path: Path) -> float | None:
    """Return the KL in the report that `quantize` wrote into a file; None if it has none."""
    from twostroke.lab.compress.report import load_report

    try:
        return load_report(str(path)).comparison.mean_kl
    except TwostrokeError:
        return None


def _show(
    candidates: Sequence[FitCandidate],
    unread: Sequence[UnreadModel],
    question: FitQuestion,
    *,
    shows_all: bool,
) -> None:
    fitting = [candidate for candidate in candidates if candidate.fits]
    best = [candidate for candidate in fitting if candidate.is_best]
    if fitting:
        first = best[0]
        click.echo(
            printable(
                f"{counted_noun(len(fitting), 'candidate')} of {len(candidates)} "
                f"{'fits' if len(fitting) == 1 else 'fit'}; no other beats these {len(best)} in "
                "size, KL, speed, memory and price together. The largest:"
            )
        )
        for line in _commands(first):
            click.echo(printable(f"  {line}"))
        click.echo()
    listed_candidates = candidates if shows_all else best
    if listed_candidates:
        headings = (*_HEADINGS, "") if shows_all else _HEADINGS
        rows = [(*_row(c), _remark(c)) if shows_all else _row(c) for c in listed_candidates]
        show_table([headings, *rows], range(4, len(_HEADINGS)))
        click.echo(_about(question))
    for reason in dict.fromkeys(model.reason for model in unread):
        names = ", ".join(model.name for model in unread if model.reason == reason)
        click.echo(printable(f"Not considered: {names}. {reason}"))


def _commands(candidate: FitCandidate) -> list[str]:
    name = shlex.quote(candidate.name)
    words = ["twostroke serve", name, f"--kv-format {candidate.kv_format}"]
    pulls = [] if candidate.is_here else [name]
    if candidate.draft:
        words.append(f"--draft {candidate.draft}")
        pulls.append(candidate.draft)
    pull = [f"twostroke pull {' '.join(pulls)}"] if pulls else []
    return [*pull, " ".join(words)]


def _row(candidate: FitCandidate) -> tuple[str, ...]:
    from twostroke.lab.measure.report_text import format_ms, format_number

    usd = candidate.usd_per_million
    return (
        candidate.name,
        candidate.label,
        candidate.kv_format,
        candidate.draft or "–",
        f"{candidate.num_weights / 1e9:.3g}",
        "?" if candidate.mean_kl is None else f"{candidate.mean_kl:.2g}",
        format_number(candidate.memory_bytes / 1e9),
        format_ms(candidate.ttft_s),
        format_ms(candidate.tpot_s),
        format_number(candidate.tokens_per_s),
        "–" if usd is None else f"{usd:,.3g}",
    )


def _remark(candidate: FitCandidate) -> str:
    if candidate.excesses:
        return "; ".join(excess.text for excess in candidate.excesses)
    return "" if candidate.is_best else "beaten"


def _about(question: FitQuestion) -> str:
    load = question.load
    streams = counted_noun(question.streams, "request")
    return (
        f"For {streams} at once with {load.prompt:,} prompt and {load.output:,} output tokens; GB "
        f"with keys and values of {question.context:,} tokens each. KL is an estimate by format, "
        "from a model of 135M weights; larger models lose less. With a draft model, 70% of drafts "
        "are assumed to be right."
    )
