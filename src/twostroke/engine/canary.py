"""A canary: a short text that a sound model predicts well, and garbage does not.

It is scored at a file's first load; ADR 0031 has the statistics.
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

from twostroke.core import env
from twostroke.core.activation_bits import ActivationBits
from twostroke.core.errors import Field, ModelFormatError, QualityError, TwostrokeError
from twostroke.core.files import is_there
from twostroke.core.frozen import Frozen
from twostroke.core.json_io import read_json, write_json
from twostroke.core.options import ACTIVATION_BITS
from twostroke.model.weights import GgufTokenizer

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from numpy.typing import NDArray

    from twostroke.backends.interface import Backend
    from twostroke.core.options import EngineOptions
    from twostroke.model.program import Program
    from twostroke.model.tokenizer import Tokenizer
    from twostroke.model.weights import LoadedModel

VERSION: Final = 1  # of text and limits: raise it when either changes
REPORT_KEY: Final = "twostroke.report"  # metadata of a GGUF file
REPORT_FILE: Final = "twostroke-report.json"  # in a folder

# A copy, a list that everybody knows, and counting: predictable in every language, in words or in
# bytes.
_TEXT: Final = (
    "river stone cloud music paper\n" * 2
    + "Monday, Tuesday, Wednesday, Thursday, Friday, Saturday, Sunday.\n"
    + ", ".join(map(str, range(1, 41)))
)
_NUM_TOKENS: Final = 64
_NUM_EASY: Final = 32  # the last tokens, after the pattern is known

MAX_NATS: Final = 0.8  # of an easy token; files of 3 to 16 bits had at most 0.15, Q2_K 0.48
MAX_DRIFT: Final = 0.12  # root mean square in nats, from a recorded canary; sound files had 0.061
_COARSE: Final = 2  # times as much with 8-bit activations: with int8 keys sound files had 0.119
_LEAST_JUDGED: Final = 20_000_000  # values in layers; nothing is known about smaller models

_logger = logging.getLogger("twostroke.engine")


class Canary(Frozen):
    """A model's answers to the canary.

    `nats[i]` is the negative log-probability of token i + 1, `likeliest` the likeliest token at
    each place.
    """

    nats: tuple[float, ...]
    likeliest: tuple[int, ...]
    version: int = VERSION

    @property
    def easy_nats(self) -> float:
        """The mean over the tokens that a sound model predicts."""
        easy = self.nats[-_NUM_EASY:]
        return sum(easy) / len(easy)

    @property
    def is_finite(self) -> bool:
        """Whether all logits were numbers."""
        return bool(self.nats)

    def drift(self, recorded: Canary) -> float:
        """Return how far the log-probabilities are from recorded ones (root mean square, nats).

        Infinity where the text has other tokens.
        """
        if len(self.nats) != len(recorded.nats) or not self.nats:
            return math.inf
        return math.dist(self.nats, recorded.nats) / math.sqrt(len(self.nats))

    def fault(self) -> str | None:
        """Return what is wrong with the answers, None if they are plausible."""
        if not self.is_finite:
            return "its logits are not finite numbers"
        if len(self.nats) > _NUM_EASY and len(set(self.likeliest[-_NUM_EASY:])) == 1:
            return "it answers with one token again and again"
        if self.easy_nats > MAX_NATS:
            found, most = math.exp(min(self.easy_nats, 99.0)), math.exp(MAX_NATS)
            return f"its perplexity on counting is {found:.3g}, and must be below {most:.1f}"
        return None


def measure_canary(backend: Backend, tokenizer: Tokenizer, context_length: int) -> Canary:
    """Return a backend's answers to the canary; no request may be running."""
    return score_canary(backend, canary_tokens(tokenizer, context_length))


def canary_tokens(tokenizer: Tokenizer, context_length: int) -> list[int]:
    """Return the canary's tokens, as many as fit."""
    return tokenizer.encode(_TEXT, add_special=True)[: min(_NUM_TOKENS, context_length)]


def score_canary(backend: Backend, tokens: Sequence[int]) -> Canary:
    """Return a backend's answers to these tokens, which are those of `canary_tokens`."""
    logits = backend.score(tokens)
    if not np.isfinite(logits).all():
        return Canary((), ())
    nats = [_nats(row, token) for row, token in zip(logits, tokens[1:], strict=False)]
    return Canary(tuple(nats), tuple(map(int, logits.argmax(axis=1))))


def _nats(logits: NDArray[np.float32], token: int) -> float:
    """Return the negative log-probability of a token."""
    highest = logits.max()
    return round(float(np.log(np.exp(logits - highest).sum()) + highest - logits[token]), 4)


class FirstLoad(Frozen):
    """What the check of a model's first load needs, gathered before its tensors are read.

    `identity` tells apart files, and ways to compute them. A model that is not `judged`, because it
    embeds or is too small, has to give finite logits and to repeat a recorded canary, no more.
    `accepts` turns a refusal into a warning.
    """

    name: str
    identity: str
    tokens: list[int]
    recorded: Canary | None
    judged: bool
    accepts: bool
    max_drift: float

    @classmethod
    def of(
        cls,
        loaded: LoadedModel,
        tokenizer: Tokenizer,
        program: Program,
        options: EngineOptions,
    ) -> FirstLoad:
        """Describe the check of `loaded`."""
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
            judged=size >= _LEAST_JUDGED and loaded.pooling is None,
            accepts=options.accept_quality,
            max_drift=MAX_DRIFT * (_COARSE if min(ACTIVATION_BITS) in used else 1),
        )

    def check(self, backend: Backend) -> None:
        """Score the canary, unless this file has passed before.

        Models that are not judged are scored each time: that takes milliseconds, or they embed.

        Raises:
            QualityError: the model writes garbage, or not what its report says.
        """
        path = env.cache_dir() / "canaries" / f"{self.identity}.json"
        if _has_passed(path) or len(self.tokens) < 2:
            return
        canary = score_canary(backend, self.tokens)
        fault = self.fault(canary)
        if fault is None:
            if not self.judged:
                return
            with suppress(OSError):  # then the next load checks again
                path.parent.mkdir(parents=True, exist_ok=True)
                write_json(path, {"model": self.name, "version": VERSION})
        elif self.accepts:
            _logger.warning("%s writes garbage: %s. It is used as you asked.", self.name, fault)
        else:
            raise QualityError(
                "{model} would write garbage: {fault}. Its file may be damaged or badly quantized; "
                "fetch it again, or choose another. {option} uses it all the same.",
                model=self.name,
                fault=fault,
                option=Field("accept_quality"),
            )

    def fault(self, canary: Canary) -> str | None:
        """Return what is wrong with the model's answers, None if nothing is."""
        fault = canary.fault() if self.judged or not canary.is_finite else None
        if fault is not None or self.recorded is None or self.recorded.version != VERSION:
            return fault
        drift = canary.drift(self.recorded)
        if drift <= self.max_drift:
            return None
        most = f"at most {self.max_drift:g}"
        return f"its answers are {drift:.2f} nats from those in its report ({most})"


def read_report(loaded: LoadedModel) -> str | None:
    """Return the text of the report in a model's files, None if they have none."""
    source = loaded.tokenizer_source
    if isinstance(source, GgufTokenizer):
        text = source.metadata.get(REPORT_KEY)
        return text if isinstance(text, str) else None
    path = loaded.path / REPORT_FILE
    return json.dumps(read_json(path)) if is_there(path) else None


def _recorded(loaded: LoadedModel) -> Canary | None:
    text = read_report(loaded)
    if text is None:
        return None
    try:
        return msgspec.json.decode(text, type=_HasCanary).canary
    except msgspec.DecodeError as error:
        raise ModelFormatError(f"{loaded.name}: its report is damaged: {error}.") from None


class _HasCanary(Frozen):
    """The part of a report that a load reads."""

    canary: Canary | None = None


def _identity(loaded: LoadedModel, options: EngineOptions) -> str:
    """Return what changes with a model's files, and with the arithmetic on them."""
    source, compute = loaded.tokenizer_source, options.compute
    paths = [mapping.path for mapping in loaded.mappings]
    if not isinstance(source, GgufTokenizer):
        paths += [source.path, loaded.path / "config.json", loaded.path / REPORT_FILE]
    how = (
        VERSION,
        compute.backend,
        compute.level,
        compute.activation_bits,
        options.cache.kv_format,
    )
    text = repr((how, [_stamp(path) for path in paths]))
    return hashlib.sha256(text.encode()).hexdigest()[:24]


def _stamp(path: Path) -> tuple[str, int, int]:
    try:
        facts = path.stat()
    except OSError:
        return (str(path), 0, 0)
    return (str(path.resolve()), facts.st_size, facts.st_mtime_ns)


def _has_passed(path: Path) -> bool:
    try:
        return read_json(path).get("version") == VERSION
    except TwostrokeError:
        return False
