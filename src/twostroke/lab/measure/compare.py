"""Compares logits of backends, number formats and models with the expected logits on a text."""

from __future__ import annotations

import tempfile
import time
from importlib import resources
from typing import TYPE_CHECKING, Any, Final

import numpy as np
from msgspec import field
from msgspec.structs import replace

from twostroke.backends.activation_bits.resolve import resolve_activation_bits
from twostroke.backends.create import check_can_run
from twostroke.backends.recipe import EngineRecipe
from twostroke.core.distributed_options import ParallelOptions
from twostroke.core.errors import TwostrokeError, UsageError
from twostroke.core.frozen import Frozen
from twostroke.core.message_text import counted_noun
from twostroke.core.options import BatchOptions, EngineOptions
from twostroke.lab.measure.divergence import compare
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

# Limits for the difference between a backend and the reference.
MAX_MEAN_KL: Final = 1e-3  # nats
MIN_TOP1_AGREEMENT: Final = 0.98
MAX_PERPLEXITY_CHANGE: Final = 0.005

_MAX_PIECE_TOKENS = 1024


class ComparedModel(Frozen):
    """A model to compare with others, and the options with which it is loaded."""

    model: str
    compute: ComputeOptions
    cache: CacheOptions
    parallel: ParallelOptions = field(default_factory=ParallelOptions)


class ComparisonReport(Frozen):
    """The difference of one model's logits from the expected logits on a text.

    `drift[i]` is the root mean square difference of the hidden states after layer i, divided by the
    root mean square of the expected states; empty if layers have other shapes. `rows_per_s` is the
    speed of scoring. `generated` is true if rows were computed as decode steps compute them, false
    if as prefill.
    """

    name: str
    comparison: LogitsComparison
    drift: tuple[float, ...]
    rows_per_s: float
    generated: bool = False

    @property
    def is_within_limits(self) -> bool:
        """Whether the differences are so small that the model counts as equally good.

        KL divergence, agreement and perplexity each have a limit, a constant of this module.
        """
        comparison = self.comparison
        return (
            comparison.mean_kl < MAX_MEAN_KL
            and comparison.top1_agreement >= MIN_TOP1_AGREEMENT
            and comparison.perplexity_change <= MAX_PERPLEXITY_CHANGE
        )


def held_out_text() -> str:
    """Return about 2,000 tokens of prose and code that no model was trained on."""
    return (
        resources.files("twostroke.lab.measure").joinpath("heldout.txt").read_text(encoding="utf-8")
    )


def pieces_of(
    text: str, models: Sequence[str], length: int | None = None, max_tokens: int | None = None
) -> list[list[int]]:
    """Return the first `max_tokens` tokens of a text, divided into sequences of `length` tokens.

    Without a `length`, sequences are as long as the models' contexts allow, up to 1,024 tokens.
    Each sequence begins with the first model's prefix (such as <bos>), as prompts do.

    Raises:
        UsageError: the models split the text into different tokens, or it has fewer than two.
    """
    loaded = [load(model) for model in models]
    tokenizers = [build_tokenizer(model) for model in loaded]
    first, *others = (tokenizer.encode(text) for tokenizer in tokenizers)
    begin = tokenizers[0].prefix_ids
    length = length or min(_MAX_PIECE_TOKENS, *(model.spec.context_length for model in loaded))
    for model, tokens in zip(models[1:], others, strict=True):
        if tokens != first:
            raise UsageError(
                f"{models[0]} and {model} cut text into different tokens: only models with the "
                "same vocabulary can be compared."
            )
    tokens = first[:max_tokens]
    num_text_tokens = max(length - len(begin), 1)
    pieces = [tokens[i : i + num_text_tokens] for i in range(0, len(tokens), num_text_tokens)]
    pieces = [[*begin, *piece] for piece in pieces if len(piece) > 1]
    if not pieces:
        raise UsageError(
            f"The text has {counted_noun(len(tokens), 'token')}, and at least 2 are needed."
        )
    return pieces


def compare_models(
    expected: ComparedModel,
    others: Sequence[ComparedModel],
    pieces: Sequence[list[int]],
    notice: Notice,
) -> Iterator[ComparisonReport]:
    """Compare the logits of other models or settings with the `expected` logits on a text.

    `pieces` is the text as token sequences. Only one model at a time is in memory; the expected
    logits are in a temporary file. `notice` is called with a name before each report. All models
    are checked before the first is loaded.

    Yields:
        A report on each of the `others`. If a backend computes prompt rows and generated rows
            differently, there are two reports.

    Raises:
        BackendError: a model cannot run here.
        TwostrokeError: the disk is too small, or logits are not finite.
    """
    for subject in (expected, *others):
        check_can_run(subject.compute)
    with tempfile.TemporaryFile() as file:
        results = _score_expected(expected, pieces, file, notice)
        for other in others:
            yield from _score_other(other, results, pieces, notice)


class _ExpectedResults(Frozen):
    """Results of the expected model: the logits of each token sequence.

    `hidden` has the hidden states of the first sequence after each layer.
    """

    logits: list[Array]
    hidden: list[Array]


def _score_expected(
    subject: ComparedModel, pieces: Sequence[list[int]], file: Any, notice: Notice
) -> _ExpectedResults:
    program, backend = _open_backend(subject, max(map(len, pieces)))
    notice(backend.facts.name)
    try:
        logits: list[Array] = []
        for piece in pieces:
            piece_logits = _check_finite(backend.score(piece), subject)
            offset = file.seek(0, 2)
            try:
                piece_logits.tofile(file)
            except OSError:
                needed = sum(map(len, pieces)) * piece_logits.shape[1] * 4 / 1e6
                raise TwostrokeError(
                    f"The disk is full: the expected logits need {needed:,.0f} MB in "
                    f"{tempfile.gettempdir()!r}. Set TMPDIR to another folder, or lower --tokens."
                ) from None
            logits.append(np.memmap(file, np.float32, "r", offset, piece_logits.shape))
        return _ExpectedResults(logits, _hidden(backend, program, pieces[0], generated=False))
    finally:
        backend.close()


def _check_finite(logits: Array, subject: ComparedModel) -> Array:
    if np.isfinite(logits).all():
        return logits
    raise TwostrokeError(
        f"{subject.model}: the {subject.compute.backend} backend computes logits that are not "
        "finite. The weights may be damaged."
    )


def _score_other(
    subject: ComparedModel, expected: _ExpectedResults, pieces: Sequence[list[int]], notice: Notice
) -> Iterator[ComparisonReport]:
    program, backend = _open_backend(subject, max(map(len, pieces)))
    try:
        name = f"{backend.facts.name}, {backend.facts.full_detail}"
        row_kinds = {name: False}
        if not backend.facts.one_arithmetic:
            row_kinds = {f"{name}, prompt rows": False, f"{name}, generated rows": True}
        for row_name, generated in row_kinds.items():
            notice(row_name)
            comparison, seconds = _compare_pieces(
                backend, subject, expected, pieces, generated=generated
            )
            hidden = _hidden(backend, program, pieces[0], generated=generated)
            yield ComparisonReport(
                row_name,
                comparison,
                drift=_drift(expected.hidden, hidden),
                rows_per_s=sum(map(len, pieces)) / seconds,
                generated=generated,
            )
    finally:
        backend.close()


def _compare_pieces(
    backend: Backend,
    subject: ComparedModel,
    expected: _ExpectedResults,
    pieces: Sequence[list[int]],
    *,
    generated: bool,
) -> tuple[LogitsComparison, float]:
    """Score all token sequences with one model, and compare its logits with the expected logits.

    With `generated`, rows are computed as decode steps. Also returns the seconds that scoring took.
    """
    seconds = 0.0

    def score(piece: list[int]) -> Array:
        nonlocal seconds
        start_s = time.perf_counter()
        logits = backend.score(piece, generated=generated)
        seconds += time.perf_counter() - start_s
        return _check_finite(logits, subject)

    pairs = zip(expected.logits, pieces, strict=True)
    comparison = compare((logits, score(piece), piece) for logits, piece in pairs)
    return comparison, seconds


def _hidden(
    backend: Backend, program: Program, tokens: list[int], *, generated: bool
) -> list[Array]:
    values = backend.trace(tokens, program.layer_outputs, generated=generated)
    return [values[name] for name in program.layer_outputs]


def _drift(expected: Sequence[Array], actual: Sequence[Array]) -> tuple[float, ...]:
    if [states.shape for states in expected] != [states.shape for states in actual]:
        return ()
    return tuple(
        float(np.linalg.norm(b.astype(np.float64) - a) / np.linalg.norm(a.astype(np.float64)))
        for a, b in zip(expected, actual, strict=True)
    )


def _open_backend(subject: ComparedModel, length: int) -> tuple[Program, Backend]:
    options = EngineOptions(
        subject.compute,
        replace(subject.cache, context_length=max(length, 2)),
        BatchOptions(max_running=1),
        parallel=subject.parallel,
    )
    recipe = EngineRecipe.of(subject.model, options)
    program = recipe.program
    recipe = recipe.with_compute(resolve_activation_bits(subject.compute, recipe.loaded, program))
    if length > program.context_length:
        message = (
            f"Pieces of {counted_noun(length, 'token')} are longer than {program.name}'s context"
        )
        raise UsageError(f"{message} of {program.context_length}: lower --length.")
    if recipe.mesh.num_ranks > 1 and subject.compute.backend != "reference":
        # Imported here: one process needs nothing of it.
        from twostroke.backends.parallel.rank_group import RankGroup

        with RankGroup(recipe) as ranks:
            return program, ranks.create_backend(ranks.size_kv_cache())
    return program, recipe.create_backend(recipe.size_kv_cache(max_rows=length))
