"""Errors that a user can act on: each says what was wrong, the limit, and the knob to turn."""

from __future__ import annotations

from difflib import SequenceMatcher
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable


_SAME_START_SHARE = 0.7  # of the letters of both words
_OTHER_START_SHARE = 0.8


class TwostrokeError(Exception):
    """The root of every error that Twostroke raises on purpose.

    `exit_code` is what the command line exits with, `http_status` what the server answers,
    `code` a short machine-readable word (OpenAI's `error.code`) and `param` the field at fault.
    """

    exit_code = 1
    http_status = 500
    code: str | None = None

    def __init__(self, message: str, *, param: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.param = param


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

    `sizes` are the tokens of the prompt, those asked for, and the context length that both exceed:
    protocols have sentences of their own for it. None where something else is too small.
    With `is_counted` false, the prompt has at least so many tokens.
    """

    code = "context_length_exceeded"

    def __init__(
        self,
        message: str,
        *,
        param: str | None = None,
        sizes: tuple[int, int, int] | None = None,
        is_counted: bool = True,
    ) -> None:
        super().__init__(message, param=param)
        self.sizes = sizes
        self.is_counted = is_counted


class OverloadedError(TwostrokeError):
    """The queue is full; the same request may be accepted later."""

    http_status = 429
    code = "overloaded"


class EngineStoppedError(TwostrokeError):
    """The engine was shut down, or died, before the request was done."""

    http_status = 503
    code = "engine_stopped"


def nearest(word: str, known: Iterable[str]) -> str:
    """Return ` Did you mean 'x'?` for the known word closest to `word`, or an empty string.

    Capitals and small letters are alike: OFF is near to off. What is not like any, as a reader
    would see it, gets no hint.
    """
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
