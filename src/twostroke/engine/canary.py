"""The canary: a short text that a working model predicts well, and a damaged model does not.

Each model scores the text at its first load, so that a model that generates garbage is refused.
ADR 0031 has the statistics.
"""

from __future__ import annotations

import hashlib
import json
import logging
import math
from contextlib import suppress
from typing import TYPE_CHECKING, Final

import msgspec
import numpy as np
from msgspec.structs import asdict

from twostroke.core import env
from twostroke.core.errors import Field, ModelFormatError, QualityError, TwostrokeError
from twostroke.core.files import is_there
from twostroke.core.frozen import Frozen
from twostroke.core.json_io import read_json, write_json
from twostroke.core.options import ACTIVATION_BITS, ActivationBits
from twostroke.model.weights import GgufTokenizer

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from numpy.typing import NDArray

    from twostroke.backends.interface import Backend
    from twostroke.backends.recipe import EngineRecipe
    from twostroke.core.options import EngineOptions
    from twostroke.model.tokenizer import Tokenizer
    from twostroke.model.weights import LoadedModel

VERSION: Final = 1  # raise it when the text or a limit changes
REPORT_KEY: Final = "twostroke.report"  # metadata of a GGUF file
REPORT_FILE: Final = "twostroke-report.json"  # in a folder

# A repeated line, the days of the week, and counting: predictable for every model and tokenizer.
_TEXT: Final = (
    "river stone cloud music paper\n" * 2
    + "Monday, Tuesday, Wednesday, Thursday, Friday, Saturday, Sunday.\n"
    + ", ".join(map(str, range(1, 41)))
)
_NUM_TOKENS: Final = 64
_NUM_EASY_TOKENS: Final = 32  # the last tokens, which continue a clear pattern

# Nats for each easy token. Working files of 3 to 16 bits had at most 0.15, and of Q2_K 0.48.
MAX_NATS: Final = 0.8
# Nats (root mean square) from a recorded canary. Working files had at most 0.061.
MAX_DRIFT_NATS: Final = 0.12
# Factor of `MAX_DRIFT_NATS` with 8-bit activations. Working files with int8 keys had 0.119 nats.
_COARSE_DRIFT_RATIO: Final = 2
# Values in the layers. Smaller models may be too weak to predict the text.
_MIN_JUDGED_VALUES: Final = 20_000_000

_logger = logging.getLogger("twostroke.engine")


class CanaryScores(Frozen):
    """A model's scores of the canary, a short text that a working model predicts well.

    Attributes:
        nats: the negative log-probability of each token of the text but the first; empty if a
            logit was not finite.
        likeliest: the model's likeliest token at each of these positions.
        version: the version of the text.
    """

    nats: tuple[float, ...]
    likeliest: tuple[int, ...]
    version: int = VERSION

    @property
    def easy_nats(self) -> float:
        """The mean negative log-probability of the canary's easy tokens, in nats.

        These are the last tokens of the text, which continue a clear pattern: numbers counted up.
        """
        easy = self.nats[-_NUM_EASY_TOKENS:]
        return sum(easy) / len(easy)

    @property
    def is_finite(self) -> bool:
        """Whether all of the model's logits on the canary were finite."""
        return bool(self.nats)

    def drift(self, recorded: CanaryScores) -> float:
        """Return how far this canary's log-probabilities are from recorded ones, in nats.

        The result is the root mean square of the differences; infinity if the recorded canary has
        another number of tokens.
        """
        if len(self.nats) != len(recorded.nats) or not self.nats:
            return math.inf
        return math.dist(self.nats, recorded.nats) / math.sqrt(len(self.nats))

    def fault(self) -> str | None:
        """Describe why these scores show a damaged model; None if they are plausible.

        A damaged model has logits that are not finite, repeats one token, or has a high perplexity.
        """
        if not self.is_finite:
            return "its logits are not finite numbers"
        if len(self.nats) > _NUM_EASY_TOKENS and len(set(self.likeliest[-_NUM_EASY_TOKENS:])) == 1:
            return "it answers with one token again and again"
        if self.easy_nats > MAX_NATS:
            perplexity = math.exp(min(self.easy_nats, 99.0))
            limit = math.exp(MAX_NATS)
            return f"its perplexity on counting is {perplexity:.3g}, and must be below {limit:.1f}"
        return None


def measure_canary(backend: Backend, tokenizer: Tokenizer, context_length: int) -> CanaryScores:
    """Score the canary text with a model's backend; no request may be running."""
    return score_canary(backend, canary_tokens(tokenizer, context_length))


def canary_tokens(tokenizer: Tokenizer, context_length: int) -> list[int]:
    """Return the token ids of the canary text, truncated to the model's context length."""
    return tokenizer.encode(_TEXT, add_special=True)[: min(_NUM_TOKENS, context_length)]


def score_canary(backend: Backend, tokens: Sequence[int]) -> CanaryScores:
    """Run the canary's token ids, from `canary_tokens`, through a backend; return the scores."""
    logits = backend.score(tokens)
    if not np.isfinite(logits).all():
        return CanaryScores((), ())
    nats = [
        _negative_log_probability(row, token)
        for row, token in zip(logits, tokens[1:], strict=False)
    ]
    return CanaryScores(tuple(nats), tuple(map(int, logits.argmax(axis=1))))


def _negative_log_probability(logits: NDArray[np.float32], token: int) -> float:
    """Return a token's negative log-probability, in nats, under one row of logits."""
    highest = logits.max()
    return round(float(np.log(np.exp(logits - highest).sum()) + highest - logits[token]), 4)


class FirstLoadCheck(Frozen):
    """The check of a model at its first load, which refuses a damaged model.

    It scores the canary, a short text that a working model predicts well. It is prepared before the
    model's weights are read.

    Attributes:
        name: the model's name.
        identity: identifies the model's files and the arithmetic on them.
        tokens: the token ids of the canary text.
        recorded: the canary's scores in the quality report of the model's files, if any.
        is_judged: whether the perplexity is checked. It is not for small models and models made for
            embeddings; for these, only finite logits and the drift from recorded scores are
            checked.
        is_remembered: whether a result is kept for later loads. Small models are scored at each
            load, which takes no time.
        accepts: whether a damaged model is used with a warning instead of refused.
        max_drift: the largest allowed drift from the recorded canary, in nats.
    """

    name: str
    identity: str
    tokens: list[int]
    recorded: CanaryScores | None
    is_judged: bool
    is_remembered: bool
    accepts: bool
    max_drift: float

    @classmethod
    def of(cls, recipe: EngineRecipe, tokenizer: Tokenizer) -> FirstLoadCheck:
        """Prepare the first-load check for an engine's model, before its weights are read."""
        loaded, program, options = recipe.loaded, recipe.program, recipe.options
        size = sum(
            math.prod(shape) for key, shape in program.weight_shapes.items() if key[:4] == "blk."
        )
        bits = options.compute.activation_bits
        used = bits.bits.values() if isinstance(bits, ActivationBits) else [bits]
        return cls(
            name=loaded.name,
            identity=_identity(loaded, options),
            tokens=canary_tokens(tokenizer, program.context_length),
            recorded=_recorded(loaded),
            is_judged=size >= _MIN_JUDGED_VALUES and loaded.pooling is None,
            is_remembered=size >= _MIN_JUDGED_VALUES,
            accepts=options.accept_quality,
            max_drift=MAX_DRIFT_NATS * (_COARSE_DRIFT_RATIO if min(ACTIVATION_BITS) in used else 1),
        )

    def check(self, backend: Backend) -> None:
        """Refuse a damaged model: score the canary, and compare the scores with their limits.

        A model is not scored again if its files have passed the check before, or have failed it
        and are accepted.

        Raises:
            QualityError: the model generates garbage, or differs from the scores in its report.
        """
        if len(self.tokens) < 2:
            return
        path = env.cache_dir() / "canaries" / f"{self.identity}.json"
        result = _read_result(path)
        if result is None or (result.fault is not None and not self.accepts):
            result = _Result(model=self.name, fault=self.fault(score_canary(backend, self.tokens)))
            if self.is_remembered and (result.fault is None or self.accepts):
                with suppress(OSError):  # the next load checks again
                    path.parent.mkdir(parents=True, exist_ok=True)
                    write_json(path, asdict(result))
        if result.fault is None:
            return
        if self.accepts:
            _logger.warning(
                "%s writes garbage: %s. It is used, as accept_quality says.",
                self.name,
                result.fault,
            )
            return
        raise QualityError(
            "{model} would write garbage: {fault}. Its file may be damaged or badly quantized; "
            "fetch it again, or choose another. {option} uses it all the same.",
            model=self.name,
            fault=result.fault,
            option=Field("accept_quality"),
        )

    def fault(self, canary: CanaryScores) -> str | None:
        """Describe why the canary's scores show a damaged model; None if they are plausible.

        The scores are compared with the recorded scores, too, if there are any.
        """
        fault = canary.fault() if self.is_judged or not canary.is_finite else None
        if fault is not None or self.recorded is None or self.recorded.version != VERSION:
            return fault
        drift = canary.drift(self.recorded)
        if drift <= self.max_drift:
            return None
        return (
            f"its scores differ by {drift:.2f} nats from the scores in its report "
            f"(at most {self.max_drift:g})"
        )


def read_report(loaded: LoadedModel) -> str | None:
    """Return the quality report in a model's files as JSON text; None without a report.

    `twostroke quantize` writes the report.
    """
    source = loaded.tokenizer_source
    if isinstance(source, GgufTokenizer):
        text = source.metadata.get(REPORT_KEY)
        return text if isinstance(text, str) else None
    path = loaded.path / REPORT_FILE
    return json.dumps(read_json(path)) if is_there(path) else None


def _recorded(loaded: LoadedModel) -> CanaryScores | None:
    text = read_report(loaded)
    if text is None:
        return None
    try:
        return msgspec.json.decode(text, type=_ReportedCanary).canary
    except msgspec.DecodeError as error:
        raise ModelFormatError(f"{loaded.name}: its report is damaged: {error}.") from None


class _ReportedCanary(Frozen):
    """The canary's scores in a model's quality report, whose other fields are not read."""

    canary: CanaryScores | None = None


class _Result(Frozen):
    """The result of a model's first-load check; `fault` is None if the model has passed."""

    model: str
    fault: str | None = None
    version: int = VERSION


def _identity(loaded: LoadedModel, options: EngineOptions) -> str:
    """Return a hash of a model's files and of the options that change its arithmetic.

    A model that has passed the first-load check is found again by this hash.
    """
    source = loaded.tokenizer_source
    compute = options.compute
    paths = [mapping.path for mapping in loaded.mappings]
    if not isinstance(source, GgufTokenizer):
        paths += [source.path, loaded.path / "config.json", loaded.path / REPORT_FILE]
    arithmetic = (
        VERSION,
        compute.backend,
        compute.level,
        compute.activation_bits,
        options.cache.kv_format,
    )
    text = repr((arithmetic, [_stamp(path) for path in paths]))
    return hashlib.sha256(text.encode()).hexdigest()[:24]


def _stamp(path: Path) -> tuple[str, int, int]:
    try:
        facts = path.stat()
    except OSError:
        return (str(path), 0, 0)
    return (str(path.resolve()), facts.st_size, facts.st_mtime_ns)


def _read_result(path: Path) -> _Result | None:
    """Return the result of an earlier check; None if there is none with the current text."""
    try:
        result = msgspec.convert(read_json(path), _Result)
    except (TwostrokeError, msgspec.ValidationError):
        return None
    return result if result.version == VERSION else None
