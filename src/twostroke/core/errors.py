"""Errors and notices that a user can act on: what was wrong, the limit, the option to change."""

from __future__ import annotations

import logging
import re
from difflib import SequenceMatcher
from functools import cache, lru_cache
from typing import TYPE_CHECKING, Final, Self

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    Naming = Callable[[str], str]  # from the engine's name of a field to the caller's
    from collections.abc import Sequence

_FACT: Final = re.compile(r"\{(\w+)(!r)?\}")
_SAME_START_SHARE: Final = 0.7  # of the letters of both words
_OTHER_START_SHARE: Final = 0.8
_MAX_NAME_LENGTH: Final = 200  # longer words are cut: comparing takes time


class Field(str):
    """The name of another field in the facts of an error; errors show the caller's name."""

    __slots__ = ()


class TwostrokeError(Exception):
    """The base of every error that Twostroke raises on purpose.

    An error about a field has the field's name (or a path such as `messages[3].content`), and its
    reason continues the sentence: "must be at least 1, got 0.". A reason that begins with a
    capital letter is a whole sentence. `facts` replace their names in braces in the reason
    (`{name}`, or `{name!r}` as Python writes them), and the field replaces `{field}`.

    `exit_code` is the command line's, `http_status` the server's, and `code` a short
    machine-readable word (OpenAI's `error.code`).
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
        """The sentence with the engine's own names."""
        return self.sentence()

    def sentence(self, naming: Naming = str) -> str:
        """Return the sentence; `naming` gives the caller's name of each field."""
        reason, field = self.reason, self.field and naming(self.field)
        is_whole = field is None or reason[:1].isupper()
        facts: dict[str, object] = {
            name: naming(fact) if isinstance(fact, Field) else fact
            for name, fact in self.facts.items()
        }
        if field is not None:
            facts["field"] = field

        def fact(found: re.Match[str]) -> str:
            if found[1] not in facts:
                return found[0]
            return repr(facts[found[1]]) if found[2] else str(facts[found[1]])

        # Not str.format: reasons quote callers, whose "{field:>9999999999}" it would obey.
        reason = _FACT.sub(fact, reason)
        text = reason if is_whole else f"{field} {reason}"
        return text[:-1] if text.endswith("..") and not text.endswith("...") else text


class UsageError(TwostrokeError):
    """A wrong option or value on the command line or in the Python interface."""

    exit_code = 2
    http_status = 400
    code = "invalid_value"


class ModelNotFoundError(TwostrokeError):
    """There is no model with this name or path."""

    exit_code = 3
    http_status = 404
    code = "model_not_found"


class ModelFormatError(TwostrokeError):
    """A model file is truncated, damaged, or of a kind that is not supported."""

    exit_code = 4
    http_status = 500
    code = "model_format"


class QualityError(ModelFormatError):
    """A model's files can be read, and what the model writes is garbage."""

    code = "model_quality"


class DownloadError(TwostrokeError):
    """A model could not be fetched completely: network, disk, or checksum."""

    exit_code = 5


class MemoryLimitError(TwostrokeError):
    """Weights and key-value pages do not fit into memory."""

    exit_code = 6
    code = "insufficient_memory"


class UnreachableError(TwostrokeError):
    """No plan does what is asked: it does not fit, or its objectives cannot be met."""

    exit_code = 9


class PortInUseError(TwostrokeError):
    """The server's address is taken or cannot be bound."""

    exit_code = 7


class BackendError(TwostrokeError):
    """The compute backend is missing, broken, or cannot run on this machine."""

    exit_code = 8


class RanksLostError(BackendError):
    """Processes that run parts of the model have ended, or do not answer."""

    code = "ranks_lost"


class DeviceLostError(BackendError):
    """A GPU has failed in a way that ends the process's use of it; the engine must start again."""

    code = "device_lost"


class RequestError(TwostrokeError):
    """A request has a wrong value; the engine is not affected."""

    exit_code = 2
    http_status = 400
    code = "invalid_value"


class ContextLengthError(RequestError):
    """A prompt, or a prompt with its answer, can never fit.

    If the context length is the reason, the facts have `context_length`, `num_prompt` and, if the
    prompt alone fits, `num_answer`, in tokens; `least` is "at least " if the prompt was not counted
    to its end. Protocols replace the sentence by their own.
    """

    code = "context_length_exceeded"


class OverloadedError(TwostrokeError):
    """The queue is full; the same request may be accepted later.

    If it is known when, the facts have `room_s`, the seconds until then, and perhaps `turn_s`, how
    long the request's own tokens will keep the queue. `is_full` says that shorter requests of the
    same caller would be refused, too.
    """

    http_status = 429
    code = "overloaded"


class DeadlineError(TwostrokeError):
    """The request's time was over before it was answered."""

    http_status = 504
    code = "deadline_exceeded"

    @classmethod
    def of_timeout(cls, timeout_s: float, what: str = "was stopped: it took longer than") -> Self:
        """Return the error of a request that is past its own timeout."""
        return cls(f"The request {what} its timeout of {timeout_s:g} s.")


class EngineStoppedError(TwostrokeError):
    """The engine was shut down, or died, before the request was done."""

    http_status = 503
    code = "engine_stopped"


class EngineDiedError(EngineStoppedError):
    """The engine's process died while it computed the request; another one starts.

    The error has the words `SENTENCE` in every protocol, so that a router can recognize it. Some
    protocols have no field for the error's code.
    """

    code = "engine_died"
    SENTENCE: Final = "The engine died while it computed this request"


class ModelNotLoadedError(EngineStoppedError):
    """One of several models cannot be loaded now; the others are served."""

    code = "model_not_loaded"


class EngineKillerError(RequestError):
    """The engine died each time that it computed the request, the last time alone."""

    code = "engine_killer"


class SchemaMissError(TwostrokeError):
    """The answer breaks its schema, even after it was generated again."""

    exit_code = 10
    code = "schema_miss"


def nearest(word: str, known: Iterable[str]) -> str:
    """Return ` Did you mean 'x'?` for the known word most like `word`, or an empty string.

    Upper and lower case are the same. Words are alike if most of their letters are the same (more
    of them if the first letters differ), or if one, of at least four letters, begins the other.
    """
    return _nearest(word[: _MAX_NAME_LENGTH + 1], tuple(known))


@lru_cache(1024)  # clients send the same unknown fields in each request
def _nearest(word: str, known_words: tuple[str, ...]) -> str:
    wanted = _bare(word[:_MAX_NAME_LENGTH])
    matcher = SequenceMatcher(None, "", wanted)
    alike: dict[float, str] = {}
    for name in known_words:
        bare = _bare(name)
        matcher.set_seq1(bare)
        least_share = _SAME_START_SHARE if wanted[:1] == bare[:1] else _OTHER_START_SHARE
        short, long = sorted((wanted, bare), key=len)
        begins = len(short) >= 4 and long.startswith(short)
        bounds = (matcher.real_quick_ratio, matcher.quick_ratio)  # not below the ratio, and fast
        if not begins and any(bound() < least_share for bound in bounds):
            continue
        share = matcher.ratio()
        if name != word and (share >= least_share or begins):
            alike.setdefault(share, name)
    return f" Did you mean '{alike[max(alike)]}'?" if alike else ""


def _bare(word: str) -> str:
    return word.lower().lstrip("-")  # options begin with it


MAX_NAME_LENGTH: Final = 120
_MAX_NAMES: Final = 3
_logger = logging.getLogger("twostroke.weights")


def warn_of_wrong_token_id(key: str, value: object) -> None:
    """Log that a special token of a file is left out because no token has its id."""
    id_text = "-1" if value == (1 << 32) - 1 else str(value)[:40]
    notice(f"{key} is {id_text}, which is not the id of a token: left out.")


def first_names(names: Sequence[str]) -> str:
    """Return the first names in quotes, and the number of other names."""
    text = ", ".join(repr(name[:MAX_NAME_LENGTH]) for name in names[:_MAX_NAMES])
    num_more = len(names) - _MAX_NAMES
    return f"{text} and {num_more} more" if num_more > 0 else text


@cache
def notice(text: str) -> None:
    """Log a sentence as a warning, unless it was logged before."""
    _logger.warning("%s", text)
