"""Answers in a folder: what was made before an interruption is not made again."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from twostroke.core.errors import TwostrokeError, UsageError
from twostroke.train.record import Answer

if TYPE_CHECKING:
    from collections import deque
    from pathlib import Path

_PART_ROWS = 25_000  # in one pair of files


@dataclass(slots=True)
class Store:
    """Writes answers in parts, each named by how many answers came before it.

    A part is a file of float16 states, and then one with the tokens of each answer, as JSON.
    """

    folder: Path
    num_answers: int
    num_rows: int = 0
    _waiting: list[Answer] = field(default_factory=list)

    def add(self, answer: Answer) -> None:
        """Keep an answer, on disk once there are enough of them; errors as `flush`."""
        self._waiting.append(answer)
        self.num_rows += len(answer)
        if sum(map(len, self._waiting)) >= _PART_ROWS:
            self.flush()

    def take(self, answers: deque[Answer]) -> None:
        """Keep answers as `add` does, and take them off the list, to which others may add."""
        while answers:
            self.add(answers.popleft())

    def flush(self) -> None:
        """Write what is not on disk yet.

        Raises:
            TwostrokeError: the disk is full, or the folder cannot be written.
        """
        if not self._waiting:
            return
        path = self.folder / f"{self.num_answers:07d}.json"
        part = path.with_suffix(".part")
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            hidden = np.concatenate([answer.hidden for answer in self._waiting])
            path.with_suffix(".f16").write_bytes(hidden.tobytes())
            part.write_text(json.dumps([answer.tokens.tolist() for answer in self._waiting]))
            part.replace(path)
        except OSError as error:
            message = f"Answers cannot be written to {str(self.folder)!r}: {error.strerror}."
            raise TwostrokeError(message) from None
        self.num_answers += len(self._waiting)
        self._waiting = []


def kept_answers(folder: Path, width: int) -> list[Answer]:
    """Return the answers in a folder, in the order in which they came; states have this width.

    Raises:
        UsageError: they are damaged, or another model's.
    """
    answers: list[Answer] = []
    for path in sorted(folder.glob("*.json")):
        try:
            tokens = [np.array(own, np.int32) for own in json.loads(path.read_text())]
            hidden = np.fromfile(path.with_suffix(".f16"), np.float16)
            counts = [len(own) - 1 for own in tokens]
            rows = hidden.reshape(sum(counts), width)
        except (OSError, ValueError, TypeError, OverflowError):
            message = f"{path} is damaged or another model's: delete {folder} to begin anew."
            raise UsageError(message) from None
        ends = np.cumsum(counts)
        answers += [
            Answer(own, rows[end - count : end])
            for own, end, count in zip(tokens, ends, counts, strict=True)
        ]
    return answers
