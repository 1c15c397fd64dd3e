"""Records answers of an engine with their hidden states, and keeps them in a folder."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from twostroke.core.errors import ModelFormatError, TwostrokeError, UsageError
from twostroke.core.files import read_regular_file
from twostroke.core.frozen import Frozen
from twostroke.core.json_io import read_checked_json, write_checked_json
from twostroke.engine.speculation import drawn_rows

if TYPE_CHECKING:
    from collections import deque
    from collections.abc import Callable
    from pathlib import Path

    from numpy.typing import NDArray

    from twostroke.core.request import Request
    from twostroke.core.step import StepPlan, StepResult

_TINY = np.float32(1e-30)
_DAMAGE = (OSError, ValueError, TypeError, OverflowError, RecursionError, ModelFormatError)
_PART_ROWS = 25_000  # in one pair of files


class RecordedAnswer(Frozen):
    """The last token of a prompt and the tokens of its answer, with the hidden states.

    `hidden[i]`, float16 (width), is the state at `tokens[i]`, from which `tokens[i + 1]` was drawn.
    It is scaled to a mean square of 1: its readers norm it first. There is one token more than
    there are states. `len` counts the states. `prompt` has the tokens before.
    """

    tokens: NDArray[np.int32]
    hidden: NDArray[np.float16]
    prompt: tuple[int, ...] = ()

    def __len__(self) -> int:
        """Return the number of states."""
        return len(self.hidden)


@dataclass(slots=True, eq=False)
class Recorder:
    """A watcher that passes each finished answer to `keep`."""

    keep: Callable[[RecordedAnswer], None]
    _rows: dict[Request, list[NDArray[np.float16]]] = field(default_factory=dict)

    def see(self, plan: StepPlan, result: StepResult) -> None:
        """Keep the rows from which each request's new tokens were drawn."""
        for part, rows in drawn_rows(plan, result):
            if result.hidden is not None:
                kept = result.hidden[rows]
                kept = kept / np.sqrt(np.mean(kept * kept, axis=1, keepdims=True) + _TINY)
                self._rows.setdefault(part.request, []).append(kept.astype(np.float16))

    def finish(self, request: Request) -> None:
        """Pass on an answer, unless it is too short to learn from."""
        rows = self._rows.pop(request, None)
        if rows is None:
            return
        begin = request.num_prompt - 1
        tokens = np.array(request.tokens[begin:], np.int32)
        hidden = np.concatenate(rows)[: len(tokens) - 1]
        if 2 <= len(hidden) == len(tokens) - 1:
            self.keep(RecordedAnswer(tokens, hidden, tuple(request.tokens[:begin])))


@dataclass(slots=True)
class SampleStore:
    """Writes answers in parts; a part's name is the number of answers before it.

    A part is a file of float16 states, and a JSON file with the tokens of each prompt and answer.
    """

    folder: Path
    num_answers: int
    num_rows: int = 0
    _waiting: list[RecordedAnswer] = field(default_factory=list)

    def add(self, answer: RecordedAnswer) -> None:
        """Add an answer; it is written once there are enough of them. Errors as `flush`."""
        self._waiting.append(answer)
        self.num_rows += len(answer)
        if sum(map(len, self._waiting)) >= _PART_ROWS:
            self.flush()

    def take(self, answers: deque[RecordedAnswer]) -> None:
        """Move answers from a list, to which another thread may add."""
        while answers:
            self.add(answers.popleft())

    def flush(self) -> None:
        """Write the answers that are not on disk yet.

        Raises:
            TwostrokeError: the disk is full, or the folder cannot be written.
        """
        if not self._waiting:
            return
        path = self.folder / f"{self.num_answers:07d}.json"
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            hidden = np.concatenate([answer.hidden for answer in self._waiting])
            states = hidden.tobytes()
            path.with_suffix(".f16").write_bytes(states)
            texts = [[list(answer.prompt), answer.tokens.tolist()] for answer in self._waiting]
            write_checked_json(path, {"answers": texts, "states": _digest(states)})
        except OSError as error:
            message = f"Answers cannot be written to {str(self.folder)!r}: {error.strerror}."
            raise TwostrokeError(message) from None
        self.num_answers += len(self._waiting)
        self._waiting = []


def kept_answers(folder: Path, width: int) -> list[RecordedAnswer]:
    """Return the answers in a folder, in their order; states have `width` numbers.

    Raises:
        UsageError: they are damaged, or of another model.
    """
    answers: list[RecordedAnswer] = []
    for path in sorted(folder.glob("*.json")):
        try:
            parts, digest = _read(path)
            prompts = [tuple(map(int, prompt)) for prompt, _ in parts]
            tokens = [np.array(own, np.int32) for _, own in parts]
            states = _states(path, digest)
            hidden = np.frombuffer(states, np.float16)
            counts = [len(own) - 1 for own in tokens]
            rows = hidden.reshape(sum(counts), width)
        except _DAMAGE:
            message = f"{path} is damaged, or of another model: delete {folder} to start again."
            raise UsageError(message) from None
        ends = np.cumsum(counts)
        answers += [
            RecordedAnswer(own, rows[end - count : end], prompt)
            for prompt, own, end, count in zip(prompts, tokens, ends, counts, strict=True)
        ]
    return answers


def _read(path: Path) -> tuple[list[Any], str | None]:
    """Return the tokens of a part's answers, and the digest of its states.

    Parts of earlier versions are a list without a digest. Raises OSError, ValueError, TypeError,
    ModelFormatError.
    """
    data = read_regular_file(path)
    if data.startswith(b"["):
        return json.loads(data), None
    values = read_checked_json(path)
    return list(values.get("answers", ())), str(values.get("states"))


def _states(path: Path, digest: str | None) -> bytes:
    """Return the states of a part; raises OSError, and ValueError if the digest is another."""
    states = read_regular_file(path.with_suffix(".f16"))
    if digest not in {None, _digest(states)}:
        raise ValueError("the states are damaged")
    return states


def _digest(states: bytes) -> str:
    return hashlib.blake2b(states, digest_size=16).hexdigest()
