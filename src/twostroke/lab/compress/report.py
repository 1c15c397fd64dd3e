"""The quality report in a quantized model's file: divergence from its source, sizes and speed."""

from __future__ import annotations

import hashlib
import statistics
from contextlib import closing
from typing import TYPE_CHECKING

import msgspec

from twostroke.backends.cpu import CpuBackend
from twostroke.backends.recipe import EngineRecipe
from twostroke.core.errors import ModelFormatError, QualityError
from twostroke.core.frozen import Frozen
from twostroke.core.hardware import resolve_num_threads
from twostroke.core.json_io import encode_json
from twostroke.core.options import (
    DEFAULT_ACTIVATION_BITS,
    CacheOptions,
    ComputeOptions,
    EngineOptions,
)
from twostroke.engine.canary import CanaryScores, FirstLoadCheck, read_report, score_canary
from twostroke.lab.measure.compare import ComparedModel, compare_models, held_out_text, pieces_of
from twostroke.lab.measure.divergence import LogitsComparison  # noqa: TC001 - msgspec needs it
from twostroke.lab.measure.questions import Flips, likeliest_answers
from twostroke.lab.measure.single_step import NUM_CYCLES, SingleStep, StepShape
from twostroke.model.families import build_program
from twostroke.model.loader import build_tokenizer, load
from twostroke.model.program.kv_layout import DEFAULT_FORMAT, FORMATS, PageGroups

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from twostroke.model.program import Program
    from twostroke.model.quant import QuantTensor
    from twostroke.model.weights import LoadedModel

_PAGE_SIZE = 16
_CONTEXT_TOKENS = 64  # before the token whose decode step is timed
_NUM_TIMED_STEPS = 5
_REMOVED = "The new file would write garbage: {fault}. It was removed."
_STORED_TOKENS = 1024  # whose keys and values count as memory


class TextFacts(Frozen):
    """Facts about a text in a quality report: its SHA-256, and how many tokens were used."""

    sha256: str
    num_tokens: int

    @classmethod
    def of(cls, text: str, pieces: list[list[int]]) -> TextFacts:
        """Return the digest and the token count of a text; `pieces` are its token sequences."""
        return cls(hashlib.sha256(text.encode()).hexdigest(), sum(map(len, pieces)))


class MatrixReport(Frozen):
    """A line of a quality report: the formats, bits per value, and bytes of one kind of matrix.

    A kind is all matrices with the same name in their layers, such as `ffn_down`.
    """

    name: str
    formats: str
    bits: float
    num_bytes: int


class _FileMeasurement(Frozen):
    """Measurements of a quantized model's file.

    `memory_bytes` counts the weights, and keys and values of 1,024 tokens. `tokens_per_s` is the
    decode speed of one stream on `machine`. `choices` are the model's answers to the
    multiple-choice questions.
    """

    canary: CanaryScores
    memory_bytes: int
    tokens_per_s: float
    machine: str
    choices: list[int]


class FileReport(Frozen):
    """The quality report that a quantized model's file contains.

    Attributes:
        source, source_sha256, source_bits: name, digest, and bits per layer weight of the
            source.
        target: the requested format or goal.
        bits: bits per weight of the layers, with scales.
        kinds: formats by kind of matrix.
        num_bytes: size of the weights.
        memory_bytes: size of the weights, and of keys and values of 1,024 tokens.
        comparison: divergence from the source on held-out text.
        held_out, calibration: the texts; `calibration` is None if nothing was calibrated.
        rows_per_s: prefill speed.
        tokens_per_s: decode speed of one stream.
        machine: the machine of both speeds.
        canary: scores of the canary text, which later loads of the file must reproduce.
        flips: multiple-choice questions that the file answers differently from its source.
        version: version of the report.
    """

    source: str
    source_sha256: str
    source_bits: float
    target: str
    bits: float
    kinds: tuple[MatrixReport, ...]
    num_bytes: int
    memory_bytes: int
    comparison: LogitsComparison
    held_out: TextFacts
    calibration: TextFacts | None
    rows_per_s: float
    tokens_per_s: float
    machine: str
    canary: CanaryScores
    flips: Flips | None = None
    version: int = 1

    @property
    def source_warning(self) -> str | None:
        """A warning if the source already had as few bits as this file; else None.

        The divergence from such a source says nothing about the original model.
        """
        if self.source_bits > self.bits:
            return None
        return (
            f"The source already had {self.source_bits:.2f} bits for each weight, this file has "
            f"{self.bits:.2f}: figures against it say nothing about the original model."
        )

    def encode(self) -> str:
        """Return the quality report as JSON."""
        return encode_json(self).decode()


def make_report(
    source: LoadedModel, path: Path, target: str, calibration: TextFacts | None
) -> FileReport:
    """Load a quantized model's file, compare it with its source, and return the quality report.

    Raises:
        QualityError: the file writes garbage.
    """
    written, text = load(str(path)), held_out_text()
    source.release(source.tensors.values())  # memory that rounding used
    measured = _measure(written)
    pieces = pieces_of(text, [str(source.path)])
    compute = ComputeOptions(backend="cpu", activation_bits=DEFAULT_ACTIVATION_BITS)
    expected, actual = (
        ComparedModel(str(model_path), compute, CacheOptions())
        for model_path in (source.path, path)
    )
    (scored, *_) = compare_models(expected, [actual], pieces, lambda _: None)
    with closing(scoring_backend(source)) as backend:
        source_choices = likeliest_answers(backend, build_tokenizer(source))
    return FileReport(
        source=source.name,
        source_sha256=_files_sha256(source),
        source_bits=bits_per_value(_layer_matrices(source.tensors)),
        target=target,
        bits=bits_per_value(_layer_matrices(written.tensors)),
        kinds=_matrix_reports(written.tensors),
        num_bytes=sum(tensor.num_bytes for tensor in written.tensors.values()),
        memory_bytes=measured.memory_bytes,
        comparison=scored.comparison,
        held_out=TextFacts.of(text, pieces),
        calibration=calibration,
        rows_per_s=scored.rows_per_s,
        tokens_per_s=measured.tokens_per_s,
        machine=measured.machine,
        canary=measured.canary,
        flips=Flips.between(source_choices, measured.choices),
    )


def check_canary(loaded: LoadedModel, backend: CpuBackend, message: str = _REMOVED) -> CanaryScores:
    """Check that a model writes no garbage, by its scores of the canary text; return them.

    `message` is the text of the error, with fields `model` and `fault`.

    Raises:
        QualityError: the model writes garbage.
    """
    recipe = EngineRecipe(loaded.name, EngineOptions(), loaded, build_program(loaded.spec))
    first_load = FirstLoadCheck.of(recipe, recipe.build_tokenizer())
    canary = score_canary(backend, first_load.tokens)
    if fault := first_load.fault(canary):
        raise QualityError(message, model=loaded.name, fault=fault)
    return canary


def load_report(model: str) -> FileReport:
    """Return the quality report that a quantized model's files contain.

    Raises:
        ModelFormatError: the files have no report, or it is damaged.
        TwostrokeError: the model cannot be loaded, as in `load`.
    """
    loaded = load(model)
    text = read_report(loaded)
    if text is None:
        raise ModelFormatError(f"{loaded.name} has no report: 'twostroke quantize' writes them.")
    try:
        return msgspec.json.decode(text, type=FileReport)
    except msgspec.DecodeError as error:
        raise ModelFormatError(f"{loaded.name}: its report is damaged: {error}.") from None


def bits_per_value(tensors: Mapping[str, QuantTensor]) -> float:
    """Return the average number of bits per value of some tensors."""
    values = sum(tensor.num_values for tensor in tensors.values())
    return 8 * sum(tensor.num_bytes for tensor in tensors.values()) / values


def _measure(loaded: LoadedModel) -> _FileMeasurement:
    program, tokenizer = build_program(loaded.spec), build_tokenizer(loaded)
    with closing(scoring_backend(loaded)) as backend:
        return _FileMeasurement(
            check_canary(loaded, backend),
            backend.facts.weight_bytes + _stored_bytes(program),
            1 / _step_s(backend, program, _shape(program)),
            backend.facts.full_detail,
            likeliest_answers(backend, tokenizer),
        )


def scoring_backend(loaded: LoadedModel) -> CpuBackend:
    """Return a backend to score a quantized model, with KV pages for one short stream."""
    program = build_program(loaded.spec)
    groups = PageGroups(_PAGE_SIZE, tuple(group.window for group in program.cache_groups))
    return CpuBackend(
        program,
        loaded.tensors,
        num_pages=_shape(program).num_pages(groups),
        page_size=_PAGE_SIZE,
        num_threads=resolve_num_threads(None),
        num_states=_shape(program).num_states,
        release=loaded.release,
    )


def _shape(program: Program) -> StepShape:
    """Return the shape of the decode step that is timed for a report."""
    return StepShape.decode(1, min(_CONTEXT_TOKENS, program.context_length - NUM_CYCLES - 2))


def _stored_bytes(program: Program) -> int:
    page_bytes = program.page_bytes(_STORED_TOKENS, FORMATS[DEFAULT_FORMAT])
    return page_bytes * len(program.cache_groups)


def _step_s(backend: CpuBackend, program: Program, shape: StepShape) -> float:
    single = SingleStep(backend, program, shape)
    try:
        single.run()  # fills caches
        return statistics.median(single.run().elapsed_s for _ in range(_NUM_TIMED_STEPS))
    finally:
        single.close()


def _matrix_reports(tensors: Mapping[str, QuantTensor]) -> tuple[MatrixReport, ...]:
    """Return a quality report's lines about matrices, one for each kind of matrix."""
    groups: dict[str, dict[str, QuantTensor]] = {}
    for key, tensor in tensors.items():
        if len(tensor.shape) == 2:
            name = key.removesuffix(".weight").split(".")[-1]
            groups.setdefault(name, {})[key] = tensor
    return tuple(
        MatrixReport(
            name,
            ", ".join(sorted({tensor.format.name for tensor in group.values()})),
            bits=bits_per_value(group),
            num_bytes=sum(tensor.num_bytes for tensor in group.values()),
        )
        for name, group in groups.items()
    )


def _layer_matrices(tensors: Mapping[str, QuantTensor]) -> dict[str, QuantTensor]:
    """Return the matrices of layers among some tensors, by name."""
    return {k: t for k, t in tensors.items() if k.startswith("blk.") and len(t.shape) == 2}


def _files_sha256(loaded: LoadedModel) -> str:
    """Return the SHA-256 of all weight files of a model, in order."""
    digest = hashlib.sha256()
    for mapping in loaded.mappings:
        with mapping.path.open("rb") as file:
            hashlib.file_digest(file, lambda: digest)
    return digest.hexdigest()
