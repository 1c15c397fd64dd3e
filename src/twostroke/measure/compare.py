"""Measures on a text how far readers, formats and models differ from the right answers."""

from __future__ import annotations

import tempfile
import time
from dataclasses import dataclass, replace
from importlib import resources
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from twostroke.core.errors import TwostrokeError, UsageError
from twostroke.core.hardware import memory_available
from twostroke.engine.compute import auto_kv_format, check_can_run, make_backend, weight_bytes
from twostroke.engine.loading import build_tokenizer, load
from twostroke.engine.sizing import size_cache
from twostroke.measure.divergence import Divergence
from twostroke.models import build_program

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from numpy.typing import NDArray

    from twostroke.backends import Backend
    from twostroke.core.config import CacheOptions, ComputeOptions
    from twostroke.measure.divergence import Comparison
    from twostroke.program import Program

    Array = NDArray[np.float32]
    Notice = Callable[[str], None]

# What a reader must keep to the reference to be called right.
MAX_MEAN_KL: Final = 1e-3  # nats
MIN_TOP1_AGREEMENT: Final = 0.98
MAX_PERPLEXITY_CHANGE: Final = 0.005

_PIECE = 1024  # tokens


@dataclass(frozen=True, slots=True)
class Subject:
    """A model, and how it is read."""

    model: str
    compute: ComputeOptions
    cache: CacheOptions


@dataclass(frozen=True, slots=True)
class Report:
    """One subject against the one that is held to be right.

    `drift[i]` is the root mean square of the difference of the hidden states after layer i, over
    that of the right ones; () where layers are not alike. `rows_per_s` is the speed of scoring.
    """

    name: str
    comparison: Comparison
    drift: tuple[float, ...]
    rows_per_s: float

    @property
    def is_within_limits(self) -> bool:
        """Whether KL, agreement and perplexity are within this module's limits."""
        it = self.comparison
        return (
            it.mean_kl < MAX_MEAN_KL
            and it.top1_agreement >= MIN_TOP1_AGREEMENT
            and it.perplexity_change <= MAX_PERPLEXITY_CHANGE
        )


def held_out_text() -> str:
    """Return some two thousand tokens of prose and code, written for this, unknown to any model."""
    return resources.files("twostroke.measure").joinpath("heldout.txt").read_text(encoding="utf-8")


def pieces_of(
    text: str, models: Sequence[str], length: int | None = None, most: int | None = None
) -> list[list[int]]:
    """Return the text as token ids in pieces of `length`, at most `most` tokens in all.

    Without a `length` pieces are as long as the models' contexts allow, up to 1,024 tokens.

    Raises:
        UsageError: the models cut the text into different tokens, or it has fewer than two.
    """
    loaded = [load(model) for model in models]
    first, *others = (build_tokenizer(model).encode(text) for model in loaded)
    length = length or min(_PIECE, *(model.spec.context_length for model in loaded))
    for model, tokens in zip(models[1:], others, strict=True):
        if tokens != first:
            raise UsageError(
                f"{models[0]} and {model} cut text into different tokens: only models with the "
                "same vocabulary can be compared."
            )
    tokens = first[:most]
    cut = [tokens[i : i + length] for i in range(0, len(tokens), length)]
    kept = [piece for piece in cut if len(piece) > 1]
    if not kept:
        raise UsageError(f"The text has {len(tokens)} tokens, too few to compare anything.")
    return kept


def compare_subjects(
    right: Subject, others: Sequence[Subject], pieces: Sequence[list[int]], notice: Notice
) -> Iterator[Report]:
    """Yield a report for each of the others, and two where it has two kinds of rows.

    One model at a time is in memory; the logits of the right one wait in a temporary file;
    a TwostrokeError says so if the disk is too small for them.
    `notice(name)` is called before each is read. What cannot run here is refused before the first.
    """
    for subject in (right, *others):
        check_can_run(subject.compute)
    with tempfile.TemporaryFile() as file:
        answers = _read_right(right, pieces, file, notice)
        for other in others:
            yield from _read_other(other, answers, pieces, notice)


@dataclass(frozen=True, slots=True)
class _Answers:
    """The right logits of each piece, and the hidden states of the first."""

    logits: list[Array]
    hidden: list[Array]


def _read_right(
    subject: Subject, pieces: Sequence[list[int]], file: Any, notice: Notice
) -> _Answers:
    program, backend = _open(subject, max(map(len, pieces)))
    notice(backend.facts.name)
    try:
        logits: list[Array] = []
        for piece in pieces:
            scored = _finite(backend.score(piece), subject)
            offset = file.seek(0, 2)
            try:
                scored.tofile(file)
            except OSError:
                raise _no_room(pieces, scored.shape[1]) from None
            logits.append(np.memmap(file, np.float32, "r", offset, scored.shape))
        return _Answers(logits, _hidden(backend, program, pieces[0], generated=False))
    finally:
        backend.close()


def _finite(logits: Array, subject: Subject) -> Array:
    if np.isfinite(logits).all():
        return logits
    raise TwostrokeError(
        f"{subject.model}: the {subject.compute.backend} reader computes logits that are not "
        "finite. The weights may be damaged."
    )


def _no_room(pieces: Sequence[list[int]], vocab_size: int) -> TwostrokeError:
    needed = sum(map(len, pieces)) * vocab_size * 4
    return TwostrokeError(
        f"The disk is full: the right answers need {needed / 1e6:,.0f} MB in "
        f"{tempfile.gettempdir()!r}: free some, set TMPDIR to another folder, or lower --tokens."
    )


def _read_other(
    subject: Subject, right: _Answers, pieces: Sequence[list[int]], notice: Notice
) -> Iterator[Report]:
    program, backend = _open(subject, max(map(len, pieces)))
    try:
        name = f"{backend.facts.name}, {backend.facts.detail}"
        kinds = {name: False}
        if not backend.facts.one_arithmetic:
            kinds = {f"{name}, prompt rows": False, f"{name}, generated rows": True}
        for line, generated in kinds.items():
            notice(line)
            divergence, seconds = Divergence(), 0.0
            for answer, piece in zip(right.logits, pieces, strict=True):
                started = time.perf_counter()
                scored = _finite(backend.score(piece, generated=generated), subject)
                seconds += time.perf_counter() - started
                width = min(answer.shape[1], scored.shape[1])  # tables may be padded differently
                divergence.add(answer[:, :width], scored[:, :width], piece)
            hidden = _hidden(backend, program, pieces[0], generated=generated)
            drift = _drift(right.hidden, hidden)
            yield Report(line, divergence.result(), drift, sum(map(len, pieces)) / seconds)
    finally:
        backend.close()


def _hidden(
    backend: Backend, program: Program, tokens: list[int], *, generated: bool
) -> list[Array]:
    values = backend.trace(tokens, program.layer_outputs, generated=generated)
    return [values[name] for name in program.layer_outputs]


def _drift(right: Sequence[Array], other: Sequence[Array]) -> tuple[float, ...]:
    if [x.shape for x in right] != [x.shape for x in other]:
        return ()
    return tuple(
        float(np.linalg.norm(b.astype(np.float64) - a) / np.linalg.norm(a.astype(np.float64)))
        for a, b in zip(right, other, strict=True)
    )


def _open(subject: Subject, length: int) -> tuple[Program, Backend]:
    loaded = load(subject.model)
    program = build_program(loaded.spec)
    if length > program.context_length:
        message = f"Pieces of {length} tokens are longer than {program.name}'s context"
        raise UsageError(f"{message} of {program.context_length}: lower --length.")
    cache = replace(subject.cache, context_length=max(length, 2))
    size = size_cache(
        program,
        cache,
        length,
        weight_bytes(loaded, subject.compute),
        memory_available(),
        auto_format=auto_kv_format(subject.compute),
    )
    release = loaded.release
    return program, make_backend(loaded.tensors, program, subject.compute, size, release=release)
