"""Quantizes a model: rounds its weights, writes a GGUF file, reads it back and scores it."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Final

from twostroke.compress.calibrate import own_pieces, text_pieces
from twostroke.compress.mixes import MIXES, formats_of, is_rounded
from twostroke.compress.report import FileReport, TextFacts, bits_of, make_report
from twostroke.compress.unfinished import need, unfinished
from twostroke.compress.walk import round_products
from twostroke.core.config import ComputeOptions
from twostroke.core.errors import TwostrokeError, UsageError
from twostroke.engine.canary import REPORT_KEY
from twostroke.engine.compute import check_can_run
from twostroke.engine.loading import build_tokenizer, load
from twostroke.models import build_program
from twostroke.models.rope import ROPE_TABLES
from twostroke.quant import FORMATS, QuantTensor
from twostroke.weights import GgufTokenizer
from twostroke.weights.gguf import Metadata
from twostroke.weights.gguf_split import read_gguf_parts
from twostroke.weights.write_gguf import write_gguf

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from pathlib import Path

    from twostroke.weights import LoadedModel
    from twostroke.weights.write_gguf import Value

    Notice = Callable[[str], None]

TARGETS: Final = tuple(MIXES)

_NOTICE_EVERY = 14  # matrices
# What describes the old file alone, or is written anew.
_DROPPED = ("split.", "quantize.", "twostroke.", "general.alignment")


def quantize(
    model: str, target: str, out: Path, text: str | None, num_tokens: int, notice: Notice
) -> FileReport:
    """Write `model` in the format `target` (of TARGETS) to `out`; nothing, if anything fails.

    Calibrates on some `num_tokens` tokens of `text`, without one on the model's own answers. The
    report is in the file, too.

    Raises:
        UsageError: the text is too short, or has parts of the held-out text.
        QualityError: the written file would write garbage.
        TwostrokeError: the model is not a GGUF file of plain layers, or the disk is full.
    """
    if out.suffix != ".gguf":
        raise UsageError(f"The file {out.name!r} must end with .gguf.", field="out")
    check_can_run(ComputeOptions(backend="cpu"))  # which scores the file
    source = load(model)
    if any(mapping.path.resolve() == out.resolve() for mapping in source.mappings):
        raise UsageError("must not be the source's file.", field="out")
    with unfinished(out) as part:
        return _write(source, target, part, text, num_tokens, notice)


def _write(
    source: LoadedModel, target: str, part: Path, text: str | None, num_tokens: int, notice: Notice
) -> FileReport:
    metadata, fixed = stored(source)
    program, mix = build_program(source.spec), MIXES[target]
    formats = formats_of(program, source.tensors, mix)
    _tell_if_no_finer(source.tensors, formats, notice)
    sizes = (
        source.tensors[key].num_values * FORMATS[formats[key]].bits_per_value for key in formats
    )
    need(part, sum(sizes) / 8)
    tensors = dict(source.tensors)
    rounded = {key: name for key, name in formats.items() if is_rounded(key, name)}
    for key in formats.keys() - rounded.keys():
        tensors[key] = QuantTensor.from_floats(tensors[key].dequantize(), FORMATS[formats[key]])
    written: dict[str, Value] = {"general.file_type": mix.file_type}
    calibration = None
    if rounded:
        if text is None:
            notice("Asking the model for text to calibrate on")
            pieces = own_pieces(source, num_tokens)
            text = "\n".join(map(build_tokenizer(source).decode, pieces))
        else:
            pieces = text_pieces(source, text, num_tokens)
        calibration = TextFacts.of(text, pieces)
        began = time.perf_counter()
        for count, (key, tensor) in enumerate(
            round_products(program, tensors, rounded, pieces), start=1
        ):
            tensors[key] = tensor
            if count % _NOTICE_EVERY and count < len(rounded):
                continue
            left_s = (time.perf_counter() - began) * (len(rounded) / count - 1)
            notice(f"Rounded {count} of {len(rounded)} matrices, {left_s:.0f} s left")
    everything = tensors | fixed
    write_gguf(part, metadata | written, everything)
    notice("Scoring the written file on held-out text")
    report = make_report(source, part, target, calibration)
    part.unlink()  # it may still be mapped
    write_gguf(part, metadata | written | {REPORT_KEY: report.encode()}, everything)
    load(str(part))
    return report


def stored(source: LoadedModel) -> tuple[dict[str, Value], dict[str, QuantTensor]]:
    """Return the metadata of a model's GGUF file, and the tensors that stay as they are."""
    held = source.tokenizer_source
    if not isinstance(held, GgufTokenizer) or not isinstance(held.metadata, Metadata):
        raise TwostrokeError(f"{source.name} is not a GGUF file: only these can be quantized yet.")
    # A model in a folder is loaded from the one GGUF file there, or from the first of its parts.
    files = read_gguf_parts(source.mappings[0].path)
    fixed = {key: tensor for key, tensor in files.tensors.items() if key in ROPE_TABLES}
    if files.tensors.keys() - fixed.keys() != source.tensors.keys():
        raise TwostrokeError(f"{source.name} has stacked weights, which cannot be quantized yet.")
    raw: dict[str, Value] = {
        key: held.metadata.raw(key) for key in held.metadata if not key.startswith(_DROPPED)
    }
    return raw, fixed


def _tell_if_no_finer(
    tensors: Mapping[str, QuantTensor], formats: Mapping[str, str], notice: Notice
) -> None:
    products = {key: tensors[key] for key in formats if key.startswith("blk.")}
    bits, wanted = bits_of(products), max(FORMATS[formats[key]].bits_per_value for key in products)
    if bits <= wanted:
        notice(
            f"The source already has {bits:.2f} bits for each weight, the result {wanted:.2f}: "
            "figures against it say nothing about the original model."
        )
