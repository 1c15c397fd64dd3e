"""Quantizes a model: rounds its weights, writes them to a file, loads and scores the file."""

from __future__ import annotations

from contextlib import closing
from typing import TYPE_CHECKING, Final

from twostroke.backends.create import check_can_run
from twostroke.core.errors import TwostrokeError, UsageError
from twostroke.core.files import atomic_output, atomic_output_folder, require_disk_space
from twostroke.core.message_text import format_bytes
from twostroke.core.options import ComputeOptions
from twostroke.engine.canary import REPORT_KEY
from twostroke.lab.compress.choose import (
    CalibrationText,
    FormatChooser,
    max_matrix_bytes,
    round_matrices,
)
from twostroke.lab.compress.folder import FOLDER_TARGETS, write_folder
from twostroke.lab.compress.mixes import (
    MIXES,
    file_type_of,
    float_matrix_widths,
    formats_of,
    is_rounded,
    report_float_matrices,
)
from twostroke.lab.compress.report import (
    FileReport,
    bits_per_value,
    check_canary,
    make_report,
    scoring_backend,
)
from twostroke.lab.train.answers import collect
from twostroke.lab.train.options import LearnOptions, check_trainable
from twostroke.model.families import build_program
from twostroke.model.families.rope import ROPE_TABLES
from twostroke.model.loader import load
from twostroke.model.quant import FORMATS, QuantTensor
from twostroke.model.weights import GgufTokenizer
from twostroke.model.weights.file_names import must_be_read
from twostroke.model.weights.gguf import DEFAULT_ALIGNMENT, Metadata
from twostroke.model.weights.gguf_split import read_gguf_parts
from twostroke.model.weights.write_gguf import write_gguf

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Mapping
    from pathlib import Path

    from twostroke.lab.compress.allocate import QuantizationGoal
    from twostroke.model.weights import LoadedModel
    from twostroke.model.weights.write_gguf import Value

    Notice = Callable[[str], None]

TARGETS: Final = (*MIXES, *FOLDER_TARGETS)

_DEFAULT_MIX: Final = "q4_k_m"  # gives the tables of a mix that is chosen for a goal
_MAX_REPORT_BYTES: Final = 8192
_NUM_ANSWER_TOKENS: Final = 20_000  # of the answers that a rounded model is tuned on
_DAMAGED: Final = "{model} writes garbage: {fault}. Its file may be damaged: fetch it again."
# Prefixes of metadata that describes only the old file, or is written anew.
_DROPPED_KEYS = ("split.", "quantize.", "twostroke.", "general.alignment")


def quantize(
    model: str,
    target: str | QuantizationGoal,
    out: Path,
    text: str | None,
    num_tokens: int,
    notice: Notice,
    *,
    tuning_minutes: float = 0.0,
) -> FileReport:
    """Quantize a model, write it to `out`, and return the report that is stored in the file.

    If anything fails, no file is written. The same call later continues from saved work.

    Args:
        model: name or path of a GGUF file or model folder.
        target: a name of `TARGETS`; or a goal, for which the best mix of formats is chosen.
        out: path of a GGUF file, or of a folder for `FOLDER_TARGETS`.
        text: calibration text; None for the model's own answers.
        num_tokens: calibration tokens.
        notice: called with lines of progress.
        tuning_minutes: time for which scales and norms of the file are trained on the model's
            answers; needs PyTorch.

    Raises:
        UsageError: the text is too short, or contains parts of the held-out text; no mix reaches
            the goal; the model to be tuned has recurrent layers.
        QualityError: the model or the written file writes garbage.
        TwostrokeError: the model is not a GGUF file of plain layers, or the disk is full.
    """
    is_folder = target in FOLDER_TARGETS
    if not is_folder and out.suffix != ".gguf":
        raise UsageError(f"The file {out.name!r} must end with .gguf.", field="out")
    check_can_run(ComputeOptions(backend="cpu"))  # this backend scores the file
    source = load(model)
    if any(mapping.path.resolve() == out.resolve() for mapping in source.mappings):
        raise UsageError("must not be the source's file.", field="out")
    if tuning_minutes:
        check_trainable(source.spec, "leave out --tune")
    with closing(scoring_backend(source)) as backend:
        check_canary(source, backend, _DAMAGED)
    calibration = CalibrationText(source, text, num_tokens, notice)
    if isinstance(target, str) and is_folder:
        if tuning_minutes:
            raise UsageError("is for GGUF files, not for folders.", field="tuning_minutes")
        with atomic_output_folder(out) as part:
            report = write_folder(source, target, part, calibration, notice)
    else:
        with atomic_output(out) as part:
            report = _write(
                source,
                target,
                part=part,
                calibration=calibration,
                notice=notice,
                tuning_minutes=tuning_minutes,
            )
        if out.stat().st_size >= source.file_bytes:
            notice(
                f"{out.name} has {format_bytes(out.stat().st_size)}, its source "
                f"{format_bytes(source.file_bytes)}: it did not get smaller."
            )
    calibration.saved_work.drop()
    return report


def _write(
    source: LoadedModel,
    target: str | QuantizationGoal,
    *,
    part: Path,
    calibration: CalibrationText,
    notice: Notice,
    tuning_minutes: float,
) -> FileReport:
    """Quantize a model to a GGUF file, and score the file for its quality report.

    The file `part` is written twice, first without and then with its report.
    """
    metadata, fixed = gguf_contents(source)
    program = build_program(source.spec)
    mix = MIXES[target if isinstance(target, str) else _DEFAULT_MIX]
    formats = formats_of(program, source.tensors, mix)
    tensors = dict(source.tensors)
    floats = float_matrix_widths(formats, source.tensors, mix)
    report_float_matrices(floats, len(formats), mix.layers, notice)
    rounded = {key: name for key, name in formats.items() if is_rounded(key, name)}
    for key in formats.keys() - rounded.keys():
        tensors[key] = QuantTensor.from_floats(tensors[key].dequantize(), FORMATS[formats[key]])
    other_bytes = _max_other_bytes(source, tensors, fixed, rounded)
    if isinstance(target, str):
        _warn_if_not_fewer_bits(source.tensors, formats, notice)
        _warn_if_larger(source, other_bytes + _size_in_formats(source.tensors, rounded), notice)
        require_disk_space(part, _size_in_formats(source.tensors, formats))
        file_type = mix.file_type
        if rounded:
            tensors |= round_matrices(program, tensors, rounded, calibration, notice)
    else:
        if target.kl is None:
            require_disk_space(
                part, other_bytes + max_matrix_bytes(tensors, rounded, target, other_bytes)
            )
        chooser = FormatChooser(
            program,
            source,
            tensors=tensors,
            names=list(rounded),
            calibration=calibration,
            notice=notice,
        )
        tensors |= chooser.reach(target, other_bytes)
        require_disk_space(part, sum(tensor.num_bytes for tensor in tensors.values()))
        formats_by_key = {key: tensors[key].format.name for key in rounded}
        _warn_if_not_fewer_bits(source.tensors, formats_by_key, notice)
        file_type = file_type_of(tensors[key] for key in rounded)
    target_name = target if isinstance(target, str) else target.describe()
    if tuning_minutes:
        folder = calibration.saved_work.folder(
            "tuning", target_name, calibration.pieces, tuning_minutes
        )
        tensors |= _tuned_tensors(source, tensors, tuning_minutes, folder, notice)
    all_tensors = tensors | fixed
    new_metadata: dict[str, Value] = {"general.file_type": file_type}
    write_gguf(part, metadata | new_metadata, all_tensors)
    notice("Scoring the written file on held-out text")
    report = make_report(source, part, target_name, calibration.facts)
    part.unlink()  # it may still be mapped
    write_gguf(part, metadata | new_metadata | {REPORT_KEY: report.encode()}, all_tensors)
    load(str(part))
    return report


def _tuned_tensors(
    source: LoadedModel,
    tensors: Mapping[str, QuantTensor],
    minutes: float,
    folder: Path,
    notice: Notice,
) -> dict[str, QuantTensor]:
    """Train the scales and norms of a quantized model for `minutes`; return the changed tensors.

    The training text is answers of `source`. Work that an interrupted call saved in `folder` is
    used. Needs PyTorch.

    Raises:
        MemoryLimitError: several float32 copies of the weights do not fit into memory.
    """
    from twostroke.lab.train.tune import tune

    options = LearnOptions(num_tokens=_NUM_ANSWER_TOKENS)
    answers = collect(str(source.path), source.spec, folder / "answers", options, notice)
    return tune(source, tensors, answers, minutes=minutes, folder=folder, report=notice)


def _warn_if_larger(source: LoadedModel, num_bytes: float, notice: Notice) -> None:
    """Warn, before the work starts, if the quantized file will not be smaller than its source."""
    if num_bytes >= source.file_bytes:
        notice(
            f"The source has {format_bytes(source.file_bytes)}, the result will have some "
            f"{format_bytes(int(num_bytes))}: it will be neither smaller nor better. Use fewer "
            "bits, such as --to iq4_nl, or --size."
        )


def _size_in_formats(tensors: Mapping[str, QuantTensor], formats: Mapping[str, str]) -> float:
    return sum(FORMATS[name].num_bytes(tensors[key].num_values) for key, name in formats.items())


def _max_other_bytes(
    source: LoadedModel,
    tensors: Mapping[str, QuantTensor],
    fixed: Mapping[str, QuantTensor],
    rounded: Collection[str],
) -> int:
    """Return an upper bound for the size of a quantized file, without its rounded matrices."""
    all_tensors = (*source.tensors.values(), *fixed.values())
    header_bytes = source.file_bytes - sum(tensor.num_bytes for tensor in all_tensors)
    others = [tensors[key] for key in tensors.keys() - set(rounded)] + list(fixed.values())
    other_bytes = sum(tensor.num_bytes for tensor in others)
    padding = DEFAULT_ALIGNMENT * (len(tensors) + len(fixed))
    return other_bytes + header_bytes + _MAX_REPORT_BYTES + padding


def gguf_contents(source: LoadedModel) -> tuple[dict[str, Value], dict[str, QuantTensor]]:
    """Return the metadata and the tensors that a quantized file copies from its source file.

    Raises:
        TwostrokeError: the model is not a GGUF file, or has stacked weights.
    """
    tokenizer = source.tokenizer_source
    if not isinstance(tokenizer, GgufTokenizer) or not isinstance(tokenizer.metadata, Metadata):
        raise TwostrokeError(
            f"{source.name} is not a GGUF file: only GGUF files can be quantized to GGUF yet."
        )
    metadata = tokenizer.metadata
    # The file of a model in a folder is its only GGUF file, or the first of its parts.
    files = read_gguf_parts(source.mappings[0].path)
    fixed = {key: tensor for key, tensor in files.tensors.items() if key in ROPE_TABLES}
    needed = {key for key in files.tensors if must_be_read(key)}
    if needed - fixed.keys() != source.tensors.keys():
        raise TwostrokeError(f"{source.name} has stacked weights, which cannot be quantized yet.")
    copied: dict[str, Value] = {
        key: metadata.raw(key) for key in metadata if not key.startswith(_DROPPED_KEYS)
    }
    return copied, fixed


def _warn_if_not_fewer_bits(
    tensors: Mapping[str, QuantTensor], formats: Mapping[str, str], notice: Notice
) -> None:
    """Warn if the quantized layers have no fewer bits per weight than the source's layers."""
    products = {key: tensors[key] for key in formats if key.startswith("blk.")}
    num_values = sum(tensor.num_values for tensor in products.values())
    source_bits = bits_per_value(products)
    result_bytes = _size_in_formats(products, {key: formats[key] for key in products})
    result_bits = 8 * result_bytes / num_values
    if source_bits <= result_bits:
        notice(
            f"The source already has {source_bits:.2f} bits for each weight, the result "
            f"{result_bits:.2f}: comparisons with it say nothing about the original model."
        )
