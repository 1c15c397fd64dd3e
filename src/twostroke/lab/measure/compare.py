"""Measures on a text how far readers, formats and models differ from the right answers."""

from __future__ import annotations

import tempfile
import time
from importlib import resources
from typing import TYPE_CHECKING, Any, Final

import numpy as np
from msgspec import field
from msgspec.structs import replace

from twostroke.backends.activation_bits.resolve import resolve_activation_bits
from twostroke.backends.create import (
    auto_kv_format,
    check_can_run,
    create_backend,
    memory_free,
    weight_bytes,
)
from twostroke.backends.kv_size import size_kv_cache
from twostroke.backends.parallel.division import mesh_for
from twostroke.core.distributed_options import ParallelOptions
from twostroke.core.errors import TwostrokeError, UsageError
from twostroke.core.frozen import Frozen
from twostroke.core.options import BatchOptions, EngineOptions
from twostroke.lab.measure.divergence import compare
from twostroke.model.families import build_program
from twostroke.model.loader import build_tokenizer, load

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from numpy.typing import NDArray

    from twostroke.backends.interface import Backend
    from twostroke.core.options import CacheOptions, ComputeOptions
    from twostroke.lab.measure.divergence import LogitsComparison
    from twostroke.model.program import Program

    Array = NDArray[np.float32]
    Notice = Callable[[str], None]

# How near a reader must be to the reference.
MAX_MEAN_KL: Final = 1e-3  # nats
MIN_TOP1_AGREEMENT: Final = 0.98
MAX_PERPLEXITY_CHANGE: Final = 0.005

_PIECE = 1024  # tokens


class Subject(Frozen):
    """A model, and how it is read."""

    model: str
    compute: ComputeOptions
    cache: CacheOptions
    parallel: ParallelOptions = field(default_factory=ParallelOptions)


class ComparisonReport(Frozen):
    """One subject against the one that counts as right.

    `drift[i]` is the root mean square of the difference of the hidden states after layer i, over
    that of the right ones; () where layers are not alike. `rows_per_s` is the speed of scoring.
    """

    name: str
    comparison: LogitsComparison
    drift: tuple[float, ...]
    rows_per_s: float
    generated: bool = False

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
    """Return some 2,000 tokens of prose and code that no model was trained on."""
    return (
        resources.files("twostroke.lab.measure").joinpath("heldout.txt").read_text(encoding="utf-8")
    )


def pieces_of(
    text: str, models: Sequence[str], length: int | None = None, most: int | None = None
) -> list[list[int]]:
    """Return the text as token ids in pieces of `length`, at most `most` tokens of it in all.

    Without a `length` pieces are as long as the models' contexts allow, up to 1,024 tokens. Each
    piece begins with what the first model's prompts begin with: Gemma without its <bos> is another
    model.

    Raises:
        UsageError: the models cut the text into different tokens, or it has fewer than two.
    """
    loaded = [load(model) for model in models]
    tokenizers = [build_tokenizer(model) for model in loaded]
    first, *others = (tokenizer.encode(text) for tokenizer in tokenizers)
    begin = tokenizers[0].prefix_ids
    length = length or min(_PIECE, *(model.spec.context_length for model in loaded))
    for model, tokens in zip(models[1:], others, strict=True):
        if tokens != first:
            raise UsageError(
                f"{models[0]} and {model} cut text into different tokens: only models with the "
                "same vocabulary can be compared."
            )
    tokens = first[:most]
    num_own = max(length - len(begin), 1)
    cut = [tokens[i : i + num_own] for i in range(0, len(tokens), num_own)]
    kept = [[*begin, *piece] for piece in cut if len(piece) > 1]
    if not kept:
        raise UsageError(f"The text has {len(tokens)} tokens, and at least 2 are needed.")
    return kept


def compare_subjects(
    right: Subject, others: Sequence[Subject], pieces: Sequence[list[int]], notice: Notice
) -> Iterator[ComparisonReport]:
    """Yield a report for each of the others, and two for a reader with two kinds of rows.

    One model at a time is in memory; the logits of the right one are in a temporary file.
    `notice(name)` is called before each is read. Subjects that cannot run here are refused before
    the first is read.

    Raises:
        TwostrokeError: the disk is too small, or logits are not finite.
    """
    for subject in (right, *others):
        check_can_run(subject.compute)
    with tempfile.TemporaryFile() as file:
        answers = _read_right(right, pieces, file, notice)
        for other in others:
            yield from _read_other(other, answers, pieces, notice)


class _Answers(Frozen):
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
                needed = sum(map(len, pieces)) * scored.shape[1] * 4 / 1e6
                raise TwostrokeError(
                    f"The disk is full: the right answers need {needed:,.0f} MB in "
                    f"{tempfile.gettempdir()!r}. Set TMPDIR to another folder, or lower --tokens."
                ) from None
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


def _read_other(
    subject: Subject, right: _Answers, pieces: Sequence[list[int]], notice: Notice
) -> Iterator[ComparisonReport]:
    program, backend = _open(subject, max(map(len, pieces)))
    try:
        name = f"{backend.facts.name}, {backend.facts.full_detail}"
        kinds = {name: False}
        if not backend.facts.one_arithmetic:
            kinds = {f"{name}, prompt rows": False, f"{name}, generated rows": True}
        for line, generated in kinds.items():
            notice(line)
            comparison, seconds = _compared(backend, subject, right, pieces, generated=generated)
            drift = _drift(right.hidden, _hidden(backend, program, pieces[0], generated=generated))
            rows_per_s = sum(map(len, pieces)) / seconds
            yield ComparisonReport(line, comparison, drift, rows_per_s, generated)
    finally:
        backend.close()


def _compared(
    backend: Backend,
    subject: Subject,
    right: _Answers,
    pieces: Sequence[list[int]],
    *,
    generated: bool,
) -> tuple[LogitsComparison, float]:
    """Score all pieces; return the comparison and the seconds that scoring took."""
    seconds = 0.0

    def scored(piece: list[int]) -> Array:
        nonlocal seconds
        began = time.perf_counter()
        logits = backend.score(piece, generated=generated)
        seconds += time.perf_counter() - began
        return _finite(logits, subject)

    both = zip(right.logits, pieces, strict=True)
    comparison = compare((answer, scored(piece), piece) for answer, piece in both)
    return comparison, seconds


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
    compute = resolve_activation_bits(subject.compute, loaded, program)
    subject = replace(subject, compute=compute)
    if length > program.context_length:
        message = f"Pieces of {length} tokens are longer than {program.name}'s context"
        raise UsageError(f"{message} of {program.context_length}: lower --length.")
    cache = replace(subject.cache, context_length=max(length, 2))
    options = EngineOptions(subject.compute, cache, BatchOptions(), parallel=subject.parallel)
    mesh = mesh_for(options, program)
    if mesh.num_ranks > 1 and subject.compute.backend != "reference":
        from twostroke.backends.parallel.rank_group import (
            RankGroup,  # one process needs nothing of it
        )

        with RankGroup(subject.model, loaded, program, mesh, options) as ranks:
            size, tensors = ranks.size(), loaded.tensors
            return program, ranks.backend(
                tensors, program, size, release=loaded.release, tapped_value=None
            )
    size = size_kv_cache(
        program,
        cache,
        length,
        weight_bytes(loaded, subject.compute),
        memory_free(subject.compute, program, loaded.tensors, length),
        auto_format=auto_kv_format(subject.compute),
        mesh=mesh,
    )
    release = loaded.release
    return program, create_backend(
        loaded.tensors, program, subject.compute, size, release=release, mesh=mesh
    )
