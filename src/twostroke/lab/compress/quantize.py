"""Quantizes a model: rounds its weights, writes a GGUF file, reads it back and scores it."""

from __future__ import annotations

from contextlib import closing
from typing import TYPE_CHECKING, Final

from twostroke.backends.create import check_can_run
from twostroke.core.errors import TwostrokeError, UsageError
from twostroke.core.files import megabytes, need, unfinished, unfinished_folder
from twostroke.core.options import ComputeOptions
from twostroke.engine.canary import REPORT_KEY
from twostroke.lab.compress.choose import CalibrationText, FormatChooser, check_size, rounded_to
from twostroke.lab.compress.folder import FOLDER_TARGETS, write_folder
from twostroke.lab.compress.mixes import (
    MIXES,
    file_type_of,
    formats_of,
    is_rounded,
    left_in_floats,
    tell_left_in_floats,
)
from twostroke.lab.compress.report import (
    FileReport,
    bits_of,
    make_report,
    scoring_backend,
    sound_canary,
)
from twostroke.lab.train.answers import collect
from twostroke.lab.train.options import LearnOptions
from twostroke.model.families import build_program
from twostroke.model.families.rope import ROPE_TABLES
from twostroke.model.loader import load
from twostroke.model.quant import FORMATS, QuantTensor
from twostroke.model.weights import GgufTokenizer
from twostroke.model.weights.file_names import is_needed
from twostroke.model.weights.gguf import DEFAULT_ALIGNMENT, Metadata
from twostroke.model.weights.gguf_split import read_gguf_parts
from twostroke.model.weights.write_gguf import write_gguf

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Mapping
    from pathlib import Path

    from twostroke.lab.compress.allocate import Goal
    from twostroke.model.weights import LoadedModel
    from twostroke.model.weights.write_gguf import Value

    Notice = Callable[[str], None]

TARGETS: Final = (*MIXES, *FOLDER_TARGETS)

_CHOSEN: Final = "q4_k_m"  # the mix whose tables a chosen mix has
_REPORT_BYTES: Final = 8192  # at most
_NUM_ANSWER_TOKENS: Final = 20_000  # of the answers that a rounded model is tuned on
_DAMAGED: Final = "{model} writes garbage: {fault}. Its file may be damaged: fetch it again."
# What describes the old file alone, or is written anew.
_DROPPED = ("split.", "quantize.", "twostroke.", "general.alignment")


def quantize(
    model: str,
    wanted: str | Goal,
    out: Path,
    text: str | None,
    num_tokens: int,
    notice: Notice,
    *,
    tuning_minutes: float = 0.0,
) -> FileReport:
    """Write `model` as `wanted` (of TARGETS), or as the best mix for a goal, to `out`.

    `out` is a GGUF file, or a folder for FOLDER_TARGETS. Nothing is written if anything fails; the
    same call then goes on from what the cache folder has.
    Calibrates on some `num_tokens` tokens of `text`, without one on the model's own answers. Then
    scales and norms of a file learn from the model for `tuning_minutes`. The report is in the file,
    too.

    Raises:
        UsageError: the text is too short, or has parts of the held-out text; no mix reaches the
            goal.
        QualityError: the model writes garbage, or the written file would.
        TwostrokeError: the model is not a GGUF file of plain layers, or the disk is full.
    """
    is_folder = wanted in FOLDER_TARGETS
    if not is_folder and out.suffix != ".gguf":
        raise UsageError(f"The file {out.name!r} must end with .gguf.", field="out")
    check_can_run(ComputeOptions(backend="cpu"))  # which scores the file
    source = load(model)
    if any(mapping.path.resolve() == out.resolve() for mapping in source.mappings):
        raise UsageError("must not be the source's file.", field="out")
    with closing(scoring_backend(source)) as backend:
        sound_canary(source, backend, _DAMAGED)
    calibration = CalibrationText(source, text, num_tokens, notice)
    if isinstance(wanted, str) and is_folder:
        if tuning_minutes:
            raise UsageError("is for GGUF files, not for folders.", field="tuning_minutes")
        with unfinished_folder(out) as part:
            report = write_folder(source, wanted, part, calibration, notice)
    else:
        with unfinished(out) as part:
            report = _write(source, wanted, part, calibration, notice, tuning_minutes)
        if out.stat().st_size >= source.file_bytes:
            notice(
                f"{out.name} has {megabytes(out.stat().st_size)}, its source "
                f"{megabytes(source.file_bytes)}: it did not get smaller."
            )
    calibration.kept.drop()
    return report


def _write(
    source: LoadedModel,
    wanted: str | Goal,
    part: Path,
    calibration: CalibrationText,
    notice: Notice,
    tuning_minutes: float,
) -> FileReport:
    metadata, fixed = stored(source)
    program = build_program(source.spec)
    mix = MIXES[wanted if isinstance(wanted, str) else _CHOSEN]
    formats = formats_of(program, source.tensors, mix)
    tensors = dict(source.tensors)
    floats = left_in_floats(formats, source.tensors, mix)
    tell_left_in_floats(floats, len(formats), mix.layers, notice)
    rounded = {key: name for key, name in formats.items() if is_rounded(key, name)}
    for key in formats.keys() - rounded.keys():
        tensors[key] = QuantTensor.from_floats(tensors[key].dequantize(), FORMATS[formats[key]])
    if isinstance(wanted, str):
        _tell_if_no_finer(source.tensors, formats, notice)
        other_bytes = _other_bytes(source, tensors, fixed, rounded)
        _tell_if_larger(source, other_bytes + _size(source.tensors, rounded), notice)
        need(part, _size(source.tensors, formats))
        file_type = mix.file_type
        if rounded:
            tensors |= rounded_to(program, tensors, rounded, calibration, notice)
    else:
        other_bytes = _other_bytes(source, tensors, fixed, rounded)
        if wanted.kl is None:
            need(part, other_bytes + check_size(tensors, rounded, wanted, other_bytes))
        chooser = FormatChooser(program, source, tensors, list(rounded), calibration, notice)
        tensors |= chooser.reach(wanted, other_bytes)
        need(part, sum(tensor.num_bytes for tensor in tensors.values()))
        chosen = {key: tensors[key].format.name for key in rounded}
        _tell_if_no_finer(source.tensors, chosen, notice)
        file_type = file_type_of(tensors[key] for key in rounded)
    target = wanted if isinstance(wanted, str) else wanted.describe()
    if tuning_minutes:
        folder = calibration.kept.folder("tuning", target, calibration.pieces, tuning_minutes)
        tensors |= _tuned_tensors(source, tensors, tuning_minutes, folder, notice)
    everything = tensors | fixed
    written: dict[str, Value] = {"general.file_type": file_type}
    write_gguf(part, metadata | written, everything)
    notice("Scoring the written file on held-out text")
    report = make_report(source, part, target, calibration.facts)
    part.unlink()  # it may still be mapped
    write_gguf(part, metadata | written | {REPORT_KEY: report.encode()}, everything)
    load(str(part))
    return report


def _tuned_tensors(
    source: LoadedModel,
    tensors: Mapping[str, QuantTensor],
    minutes: float,
    folder: Path,
    notice: Notice,
) -> dict[str, QuantTensor]:
    """Train scales and norms for `minutes` on answers of `source`; return the changed tensors.

    Work that an interrupted call saved in `folder` is used. Needs PyTorch; raises as `tune` does.
    """
    from twostroke.lab.train.tune import tune

    options = LearnOptions(num_tokens=_NUM_ANSWER_TOKENS)
    answers = collect(str(source.path), source.spec, folder / "answers", options, notice)
    return tune(source, tensors, answers, minutes, folder, notice)


def _tell_if_larger(source: LoadedModel, num_bytes: float, notice: Notice) -> None:
    """Say before the work starts that the file will not be smaller than its source."""
    if num_bytes >= source.file_bytes:
        notice(
            f"The source has {megabytes(source.file_bytes)}, the result will have some "
            f"{megabytes(int(num_bytes))}: it gets no smaller, and no better. Fewer bits would "
            "make it smaller, such as --to iq4_nl, or --size."
        )


def _size(tensors: Mapping[str, QuantTensor], formats: Mapping[str, str]) -> float:
    return sum(FORMATS[name].num_bytes(tensors[key].num_values) for key, name in formats.items())


def _other_bytes(
    source: LoadedModel,
    tensors: Mapping[str, QuantTensor],
    fixed: Mapping[str, QuantTensor],
    rounded: Collection[str],
) -> int:
    """Return the bytes of a file besides those of rounded matrices: at most so many."""
    whole = sum(tensor.num_bytes for tensor in (*source.tensors.values(), *fixed.values()))
    others = [tensors[key] for key in tensors.keys() - set(rounded)] + list(fixed.values())
    kept = [tensor.num_bytes for tensor in others]
    head = source.file_bytes - whole  # metadata, and the table of tensors
    return sum(kept) + head + _REPORT_BYTES + DEFAULT_ALIGNMENT * (len(tensors) + len(fixed))


def stored(source: LoadedModel) -> tuple[dict[str, Value], dict[str, QuantTensor]]:
    """Return the metadata of a model's GGUF file, and the tensors that stay as they are."""
    held = source.tokenizer_source
    if not isinstance(held, GgufTokenizer) or not isinstance(held.metadata, Metadata):
        raise TwostrokeError(f"{source.name} is not a GGUF file: only these can be quantized yet.")
    # A model in a folder is loaded from the one GGUF file there, or from the first of its parts.
    files = read_gguf_parts(source.mappings[0].path)
    fixed = {key: tensor for key, tensor in files.tensors.items() if key in ROPE_TABLES}
    needed = {key for key in files.tensors if is_needed(key)}
    if needed - fixed.keys() != source.tensors.keys():
        raise TwostrokeError(f"{source.name} has stacked weights, which cannot be quantized yet.")
    raw: dict[str, Value] = {
        key: held.metadata.raw(key) for key in held.metadata if not key.startswith(_DROPPED)
    }
    return raw, fixed


def _tell_if_no_finer(
    tensors: Mapping[str, QuantTensor], formats: Mapping[str, str], notice: Notice
) -> None:
    products = {key: tensors[key] for key in formats if key.startswith("blk.")}
    values = sum(tensor.num_values for tensor in products.values())
    bits = bits_of(products)
    wanted = 8 * _size(products, {key: formats[key] for key in products}) / values
    if bits <= wanted:
        notice(
            f"The source already has {bits:.2f} bits for each weight, the result {wanted:.2f}: "
            "figures against it say nothing about the original model."
        )
