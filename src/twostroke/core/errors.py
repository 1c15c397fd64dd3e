"""Errors and notices that a user can act on: each names the fault, the limit and the remedy."""

from __future__ import annotations

import logging
import re
from difflib import SequenceMatcher
from functools import cache, lru_cache
from typing import TYPE_CHECKING, Final, Self

from twostroke.core.message_text import without_passwords

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    Naming = Callable[[str], str]  # maps a field's name in Python to the caller's name
    from collections.abc import Sequence

_PLACEHOLDER: Final = re.compile(r"\{(\w+)(!r)?\}")
# The least ratio of equal letters for words with the same and with another first letter.
_SAME_START_RATIO: Final = 0.7
_OTHER_START_RATIO: Final = 0.8
_MIN_PREFIX_LENGTH: Final = 4  # letters of a word that begins a longer word
_MAX_COMPARED_LENGTH: Final = 200  # longer words are cut, because comparing takes time


class Field(str):
    """A fact of an error that is the name of an option or field, such as "max_tokens".

    When the error is shown, this name becomes the caller's name of the field, such as a command-
    line flag (see `TwostrokeError.sentence`).
    """

    __slots__ = ()


class TwostrokeError(Exception):
    """The base of every error that Twostroke raises on purpose.

    A reason that begins with a capital letter is a whole sentence. Any other reason continues the
    field's name: field `n`, reason "must be at least 1, got 0.".

    Attributes:
        reason: the sentence, or the rest of the sentence after the field's name. `{name}`
            stands for a fact, and `{name!r}` for its `repr`; `{field}` stands for the field.
        field: the name of the wrong option or field in Python, or a path such as
            `messages[3].content`. None if no single field is wrong.
        facts: the values of the placeholders in the reason, by name.
        exit_code: the exit code of the command line.
        http_status: the status of a server's response.
        code: a short machine-readable word (OpenAI's `error.code`).
    """

    exit_code = 1
    http_status = 500
    code: str | None = None

    def __init__(self, reason: str, *, field: str | None = None, **facts: object) -> None:
        super().__init__(reason)
        self.reason = reason
        self.field = field
        self.facts = facts

    def __str__(self) -> str:
        """Return the error as a sentence, in which fields have their names in Python."""
        return self.sentence()

    def sentence(self, naming: Naming = str) -> str:
        """Return the error as a sentence, in which fields have the names that the caller uses.

        `naming` maps a field's name in Python to the caller's name, such as a command-line flag.
        """
        reason, field = self.reason, self.field and naming(self.field)
        is_whole = field is None or reason[:1].isupper()
        facts: dict[str, object] = {
            name: naming(fact) if isinstance(fact, Field) else fact
            for name, fact in self.facts.items()
        }
        if field is not None:
            facts["field"] = field

        def fact_text(match: re.Match[str]) -> str:
            if match[1] not in facts:
                return match[0]
            return repr(facts[match[1]]) if match[2] else str(facts[match[1]])

        # Not str.format: a reason may quote a caller's "{field:>9999999999}".
        reason = _PLACEHOLDER.sub(fact_text, reason)
        text = reason if is_whole else f"{field} {reason}"
        text = without_passwords(text)
        return text[:-1] if text.endswith("..") and not text.endswith("...") else text


class UsageError(TwostrokeError):
    """A wrong option or value on the command line or in the Python interface."""

    exit_code = 2
    http_status = 400
    code = "invalid_value"


class ModelNotFoundError(TwostrokeError):
    """There is no model with the given name or path."""

    exit_code = 3
    http_status = 404
    code = "model_not_found"


class ModelFormatError(TwostrokeError):
    """A model file is truncated, damaged, or has a format that is not supported."""

    exit_code = 4
    http_status = 500
    code = "model_format"


class QualityError(ModelFormatError):
    """A model's files can be read, but the model predicts a known text far too badly."""

    code = "model_quality"


class DownloadError(TwostrokeError):
    """A model could not be fetched completely: network, disk, or checksum."""

    exit_code = 5


class MemoryLimitError(TwostrokeError):
    """A model's weights and KV pages do not fit into memory."""

    exit_code = 6
    code = "insufficient_memory"


class UnreachableError(TwostrokeError):
    """`twostroke plan` finds no plan that meets the request.

    Either the model does not fit on the device, or a latency objective cannot be met.
    """

    exit_code = 9


class PortInUseError(TwostrokeError):
    """The server's address is taken or cannot be bound."""

    exit_code = 7


class BackendError(TwostrokeError):
    """The compute backend is missing, broken, or cannot run on this machine."""

    exit_code = 8


class RanksLostError(BackendError):
    """Ranks (processes that run parts of the model) have ended, or do not answer."""

    code = "ranks_lost"


class DeviceLostError(BackendError):
    """A GPU failed, and this process can no longer use it: the engine must start again."""

    code = "device_lost"


class RequestError(TwostrokeError):
    """A request has a wrong value; the engine is not affected."""

    exit_code = 2
    http_status = 400
    code = "invalid_value"


class ContextLengthError(RequestError):
    """A prompt, or a prompt with its answer, can never fit into the context or the KV cache.

    If the context length is the reason, the error's facts have these numbers of tokens:
    `context_length`, `num_prompt` and, if the prompt alone fits, `num_answer`. The fact `least` is
    "at least " if only a part of the prompt was counted, else empty. Each protocol of the server
    writes its own sentence from these facts.
    """

    code = "context_length_exceeded"


class OverloadedError(TwostrokeError):
    """The queue of requests is full; the same request may be accepted later.

    The error's facts may have `room_s`, the seconds until the queue has room; `turn_s`, the seconds
    by which this request, once queued, would delay later ones; and `is_full`, whether shorter
    requests of the same caller are refused as well.
    """

    http_status = 429
    code = "overloaded"


class DeadlineError(TwostrokeError):
    """The request was not answered within its timeout."""

    http_status = 504
    code = "deadline_exceeded"

    @classmethod
    def of_timeout(
        cls, timeout_s: float, predicate: str = "was stopped: it took longer than"
    ) -> Self:
        """Return the error of a request that took longer than the timeout that its caller set.

        `predicate` is the middle of the sentence "The request ... its timeout of 5 s.".
        """
        return cls(f"The request {predicate} its timeout of {timeout_s:g} s.")


class EngineStoppedError(TwostrokeError):
    """The engine was shut down, or died, before the request was done."""

    http_status = 503
    code = "engine_stopped"


class EngineDiedError(EngineStoppedError):
    """The engine's process died while it computed the request; a new engine process is started.

    The message contains `SENTENCE` in every protocol. So a router recognizes the error also in
    protocols that have no field for the error's code.
    """

    code = "engine_died"
    SENTENCE: Final = "The engine died while it computed this request"


class ModelNotLoadedError(EngineStoppedError):
    """The model of the request cannot be loaded now; the server's other models are served."""

    code = "model_not_loaded"


class EngineKillerError(RequestError):
    """The engine's process died each time it computed this request, so the request is refused.

    The last time, the engine computed no other requests, so the request is the cause.
    """

    code = "engine_killer"


class SchemaMissError(TwostrokeError):
    """The answer breaks its JSON schema, even after it was generated again."""

    exit_code = 10
    code = "schema_miss"


def nearest(word: str, known_words: Iterable[str]) -> str:
    """Return the hint ` Did you mean 'x'?` for an unknown word, for the end of an error message.

    x is the known word most similar to `word`; the hint is empty if no known word is similar. Case
    is ignored. Two words are similar if most of their letters are equal (more if their first
    letters differ), or if one of them, with at least four letters, begins the other.
    """
    return _nearest(word[: _MAX_COMPARED_LENGTH + 1], tuple(known_words))


@lru_cache(1024)  # clients send the same unknown fields in each request
def _nearest(word: str, known_words: tuple[str, ...]) -> str:
    bare_word = _bare(word[:_MAX_COMPARED_LENGTH])
    matcher = SequenceMatcher(None, "", bare_word)
    name_by_ratio: dict[float, str] = {}
    for name in known_words:
        bare_name = _bare(name)
        matcher.set_seq1(bare_name)
        has_same_start = bare_word[:1] == bare_name[:1]
        min_ratio = _SAME_START_RATIO if has_same_start else _OTHER_START_RATIO
        short, long = sorted((bare_word, bare_name), key=len)
        is_prefix = len(short) >= _MIN_PREFIX_LENGTH and long.startswith(short)
        upper_bounds = (matcher.real_quick_ratio, matcher.quick_ratio)  # faster than the ratio
        if not is_prefix and any(bound() < min_ratio for bound in upper_bounds):
            continue
        ratio = matcher.ratio()
        if name != word and (ratio >= min_ratio or is_prefix):
            name_by_ratio.setdefault(ratio, name)
    return f" Did you mean '{name_by_ratio[max(name_by_ratio)]}'?" if name_by_ratio else ""


def _bare(word: str) -> str:
    return word.lower().lstrip("-")


MAX_NAME_LENGTH: Final = 120
_MAX_NAMES: Final = 3
_logger = logging.getLogger("twostroke.weights")


def warn_of_wrong_token_id(key: str, value: object) -> None:
    """Log that a model file gives a special token an id outside of the vocabulary.

    The loader ignores that special token. `key` is the metadata field of the model file.
    """
    id_text = "-1" if value == (1 << 32) - 1 else str(value)[:40]
    notice(f"{key} is {id_text}, which is not the id of a token: left out.")


def first_names(names: Sequence[str]) -> str:
    """Return the first few of `names` in quotes and "and N more", for error messages."""
    text = ", ".join(repr(name[:MAX_NAME_LENGTH]) for name in names[:_MAX_NAMES])
    num_more = len(names) - _MAX_NAMES
    return f"{text} and {num_more} more" if num_more > 0 else text


@cache
def notice(text: str) -> None:
    """Log a sentence as a warning, unless this process has logged the same sentence before."""
    _logger.warning("%s", text)
