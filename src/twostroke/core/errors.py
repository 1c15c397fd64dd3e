"""Errors that a user can act on: each says what was wrong, the limit, and the option to change."""

from __future__ import annotations

from difflib import SequenceMatcher
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    Naming = Callable[[str], str]  # the engine's name of a field to the one that a caller uses

_SAME_START_SHARE = 0.7  # of the letters of both words
_OTHER_START_SHARE = 0.8


class Field(str):
    """The name of another field in the facts of an error: it is rendered as the caller's name."""

    __slots__ = ()


class TwostrokeError(Exception):
    """The root of every error that Twostroke raises on purpose.

    An error about a field has the field's name (or a path such as `messages[3].content`) and a
    reason that continues the sentence: "must be at least 1, got 0.". A reason that begins with a
    capital letter is a whole sentence. `facts` fill the places in the reason that they name, and
    `{field}` in it is the field.

    `exit_code` is the command line's exit code, `http_status` the server's status, and `code` a
    short machine-readable word (OpenAI's `error.code`).
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
        if self.facts or "{field}" in reason:
            facts = {
                name: naming(fact) if isinstance(fact, Field) else fact
                for name, fact in self.facts.items()
            }
            reason = reason.format(**facts, field=field)
        return reason if is_whole else f"{field} {reason}"


class UsageError(TwostrokeError):
    """A wrong option or value on the command line or in the Python interface."""

    exit_code = 2
    http_status = 400
    code = "invalid_value"


class ModelNotFoundError(TwostrokeError):
    """No model by that name or path."""

    exit_code = 3
    http_status = 404
    code = "model_not_found"


class ModelFormatError(TwostrokeError):
    """A model file that is truncated, damaged, or of a kind that cannot be read."""

    exit_code = 4
    http_status = 500
    code = "model_format"


class DownloadError(TwostrokeError):
    """A model could not be fetched whole: network, disk, or checksum."""

    exit_code = 5


class MemoryLimitError(TwostrokeError):
    """Weights and key-value pages do not fit into memory."""

    exit_code = 6
    code = "insufficient_memory"


class PortInUseError(TwostrokeError):
    """The server's address is taken or cannot be bound."""

    exit_code = 7


class BackendError(TwostrokeError):
    """The compute backend is missing, broken, or cannot run on this machine."""

    exit_code = 8


class RequestError(TwostrokeError):
    """A request with a wrong value; the engine stays as it was."""

    exit_code = 2
    http_status = 400
    code = "invalid_value"


class ContextLengthError(RequestError):
    """A prompt, or a prompt with its answer, that can never fit.

    Where it exceeds the context length, the facts have `context_length`, `num_prompt` and, if the
    prompt alone fits, `num_answer`, in tokens; `least` is "at least " for a prompt that was not
    counted to its end. Protocols have sentences of their own for these.
    """

    code = "context_length_exceeded"


class OverloadedError(TwostrokeError):
    """The queue is full; the same request may be accepted later."""

    http_status = 429
    code = "overloaded"


class EngineStoppedError(TwostrokeError):
    """The engine was shut down, or died, before the request was done."""

    http_status = 503
    code = "engine_stopped"


_MAX_NAME_LENGTH: Final = 200  # of a word that is compared with names; comparing takes time


def nearest(word: str, known: Iterable[str]) -> str:
    """Return ` Did you mean 'x'?` for the known word closest to `word`, or an empty string.

    Capitals and small letters are alike: OFF is near to off. A word that is not like any of them,
    as a reader would see it, or longer than any name, gets no hint.
    """
    if len(word) > _MAX_NAME_LENGTH:
        return ""
    wanted = _bare(word)
    names = {_bare(name): name for name in known}
    alike = [name for name in names if names[name] != word and _is_like(wanted, name)]
    if not alike:
        return ""
    return f" Did you mean '{names[max(alike, key=lambda name: _share(wanted, name))]}'?"


def _bare(word: str) -> str:
    return word.lower().lstrip("-")  # which all options begin with


def _share(word: str, known: str) -> float:
    return SequenceMatcher(None, known, word).ratio()


def _is_like(word: str, known: str) -> bool:
    """Whether most letters are the same, still more if the first is not, or one begins the other.

    What is shorter than four letters begins too much.
    """
    least = _SAME_START_SHARE if word[:1] == known[:1] else _OTHER_START_SHARE
    if _share(word, known) >= least:
        return True
    short, long = sorted((word, known), key=len)
    return len(short) >= 4 and long.startswith(short)
