"""Records an engine's answers with their hidden states, and stores them in a folder."""

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
from twostroke.engine.speculation import sampled_rows

if TYPE_CHECKING:
    from collections import deque
    from collections.abc import Callable
    from pathlib import Path

    from numpy.typing import NDArray

    from twostroke.core.request import Request
    from twostroke.core.step import StepPlan, StepResult

_EPSILON = np.float32(1e-30)
_READ_ERRORS = (OSError, ValueError, TypeError, OverflowError, RecursionError, ModelFormatError)
_PART_ROWS = 25_000  # in one pair of files


class RecordedAnswer(Frozen):
    """The tokens of a model's answer, with its hidden states, for training.

    Attributes:
        tokens: last token of the prompt, and the tokens of the answer.
        hidden: `hidden[i]` is the state at `tokens[i]`, from which `tokens[i + 1]` was sampled,
            scaled to a mean square of 1; float16 (len(tokens) - 1, width).
        prompt: tokens before the last token of the prompt.

    `len` is the number of states.
    """

    tokens: NDArray[np.int32]
    hidden: NDArray[np.float16]
    prompt: tuple[int, ...] = ()

    def __len__(self) -> int:
        """Return the number of hidden states of the answer."""
        return len(self.hidden)


@dataclass(slots=True, eq=False)
class Recorder:
    """Records the answers of an engine with their hidden states, as the engine's watcher.

    `on_answer` is called with each finished answer.
    """

    on_answer: Callable[[RecordedAnswer], None]
    _rows: dict[Request, list[NDArray[np.float16]]] = field(default_factory=dict)

    def see(self, plan: StepPlan, result: StepResult) -> None:
        """Keep the hidden states from which a step sampled each request's new tokens."""
        for slice_, rows in sampled_rows(plan, result):
            if result.hidden is not None:
                states = result.hidden[rows]
                states = states / np.sqrt(
                    np.mean(states * states, axis=1, keepdims=True) + _EPSILON
                )
                self._rows.setdefault(slice_.request, []).append(states.astype(np.float16))

    def finish(self, request: Request) -> None:
        """Call `on_answer` with the answer of a finished request.

        An answer with fewer than two hidden states is dropped.
        """
        rows = self._rows.pop(request, None)
        if rows is None:
            return
        begin = request.num_prompt - 1
        tokens = np.array(request.tokens[begin:], np.int32)
        hidden = np.concatenate(rows)[: len(tokens) - 1]
        if 2 <= len(hidden) == len(tokens) - 1:
            self.on_answer(RecordedAnswer(tokens, hidden, tuple(request.tokens[:begin])))


@dataclass(slots=True)
class AnswerStore:
    """Writes recorded answers with their hidden states to a folder, many answers in one part.

    A part consists of a file with float16 states, and a JSON file with the tokens of each prompt
    and answer. A part's name is the number of answers before it.
    """

    folder: Path
    num_answers: int
    num_rows: int = 0
    _unwritten: list[RecordedAnswer] = field(default_factory=list)

    def add(self, answer: RecordedAnswer) -> None:
        """Add a recorded answer; when there are enough answers, a part is written.

        Raises:
            TwostrokeError: the disk is full, or the folder cannot be written.
        """
        self._unwritten.append(answer)
        self.num_rows += len(answer)
        if sum(map(len, self._unwritten)) >= _PART_ROWS:
            self.flush()

    def take(self, answers: deque[RecordedAnswer]) -> None:
        """Add all recorded answers of a queue, which another thread fills."""
        while answers:
            self.add(answers.popleft())

    def flush(self) -> None:
        """Write the recorded answers that are not on disk yet.

        Raises:
            TwostrokeError: the disk is full, or the folder cannot be written.
        """
        if not self._unwritten:
            return
        path = self.folder / f"{self.num_answers:07d}.json"
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            hidden = np.concatenate([answer.hidden for answer in self._unwritten])
            states = hidden.tobytes()
            path.with_suffix(".f16").write_bytes(states)
            texts = [[list(answer.prompt), answer.tokens.tolist()] for answer in self._unwritten]
            write_checked_json(path, {"answers": texts, "states": _digest(states)})
        except OSError as error:
            message = f"Answers cannot be written to {str(self.folder)!r}: {error.strerror}."
            raise TwostrokeError(message) from None
        self.num_answers += len(self._unwritten)
        self._unwritten = []


def load_answers(folder: Path, width: int) -> list[RecordedAnswer]:
    """Return the recorded answers in a folder, in order; hidden states have `width` values.

    Raises:
        UsageError: the files are damaged, or of another model.
    """
    answers: list[RecordedAnswer] = []
    for path in sorted(folder.glob("*.json")):
        try:
            parts, digest = _read(path)
            prompts = [tuple(map(int, prompt)) for prompt, _ in parts]
            tokens = [np.array(answer_tokens, np.int32) for _, answer_tokens in parts]
            states = _states(path, digest)
            hidden = np.frombuffer(states, np.float16)
            counts = [len(answer_tokens) - 1 for answer_tokens in tokens]
            rows = hidden.reshape(sum(counts), width)
        except _READ_ERRORS:
            message = f"{path} is damaged, or of another model: delete {folder} to start again."
            raise UsageError(message) from None
        ends = np.cumsum(counts)
        answers += [
            RecordedAnswer(answer_tokens, rows[end - count : end], prompt)
            for prompt, answer_tokens, end, count in zip(prompts, tokens, ends, counts, strict=True)
        ]
    return answers


def _read(path: Path) -> tuple[list[Any], str | None]:
    """Return the tokens of the answers in one part of a folder, and the digest of its states.

    Parts of earlier versions are a list and have no digest. Raises OSError, ValueError, TypeError,
    ModelFormatError.
    """
    data = read_regular_file(path)
    if data.startswith(b"["):
        return json.loads(data), None
    values = read_checked_json(path)
    return list(values.get("answers", ())), str(values.get("states"))


def _states(path: Path, digest: str | None) -> bytes:
    """Return the hidden states in one part of a folder of answers, as bytes.

    Raises OSError, and ValueError if the digest differs.
    """
    states = read_regular_file(path.with_suffix(".f16"))
    if digest not in {None, _digest(states)}:
        raise ValueError("the states are damaged")
    return states


def _digest(states: bytes) -> str:
    return hashlib.blake2b(states, digest_size=16).hexdigest()
