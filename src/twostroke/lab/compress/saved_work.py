"""Keeps what an interrupted `quantize` has done, in the cache folder, so that it can go on.

The text that a model gives for its own calibration is kept for the next command, too.
"""

from __future__ import annotations

import hashlib
import shutil
import time
from contextlib import suppress
from typing import TYPE_CHECKING, Final

import msgspec
import numpy as np

from twostroke.core import env
from twostroke.core.errors import TwostrokeError
from twostroke.core.files import read_regular_file
from twostroke.core.json_io import read_checked_json, write_checked_json
from twostroke.model.quant import QuantTensor
from twostroke.model.weights import weights_identity

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence
    from pathlib import Path

    from twostroke.model.quant import Format
    from twostroke.model.weights import LoadedModel

    Pieces = Sequence[Sequence[int]]

_METHOD: Final = 2  # raised when prompts or rounding change what would be made
_DIGEST_BYTES: Final = 16
_OLDEST_S: Final = 7 * 24 * 3600  # what was interrupted before is dropped


class SavedWork:
    """What was made of one model."""

    def __init__(self, source: LoadedModel) -> None:
        """Find the folder for `source`; drop what was interrupted long ago."""
        self._identity = weights_identity(source.tensors)[:24]
        self._root = env.cache_dir() / "quantize"
        self._used: set[Path] = set()
        for folder in self._root.glob("*"):
            with suppress(OSError):
                if folder.stat().st_mtime < time.time() - _OLDEST_S:
                    shutil.rmtree(folder)

    def pieces(self, num_tokens: int, make: Callable[[], list[list[int]]]) -> list[list[int]]:
        """Return the model's own calibration text: from before, else what `make` returns."""
        path = env.cache_dir() / "calibration" / f"{self._identity}-{num_tokens}-{_METHOD}.json"
        with suppress(TwostrokeError, msgspec.MsgspecError):
            return msgspec.convert(read_checked_json(path).get("pieces"), list[list[int]])
        pieces = make()
        with suppress(OSError):  # it is then made again next time
            path.parent.mkdir(parents=True, exist_ok=True)
            write_checked_json(path, {"pieces": pieces})
        return pieces

    def matrices(
        self, tensors: Mapping[str, QuantTensor], what: object, pieces: Pieces
    ) -> Matrices:
        """Return the store of matrices that are rounded for `pieces` to `what`, by name.

        `tensors` are all of the model, those that are not rounded in their final formats.
        """
        formats = sorted((name, tensor.format.name) for name, tensor in tensors.items())
        folder = self.folder(formats, what, [list(piece) for piece in pieces])
        return Matrices(folder)

    def folder(self, *what: object) -> Path:
        """Return the folder for work that `what` describes in full."""
        digest = hashlib.sha256(repr((_METHOD, *what)).encode()).hexdigest()
        folder = self._root / f"{self._identity}-{digest[:16]}"
        self._used.add(folder)
        return folder

    def drop(self) -> None:
        """Remove all work that was asked for: the command is done."""
        for folder in self._used:
            shutil.rmtree(folder, ignore_errors=True)


class Matrices:
    """Rounded matrices, each in a file of its own."""

    def __init__(self, folder: Path) -> None:
        """Keep them in `folder`."""
        self._folder = folder

    def get(self, name: str, shape: tuple[int, ...], fmt: Format) -> QuantTensor | None:
        """Return a matrix that was rounded before, None if there is none."""
        try:
            content = read_regular_file(self._path(name))
        except OSError:
            return None
        num_bytes = shape[0] * fmt.num_bytes(shape[1])
        codes, digest = content[:num_bytes], content[num_bytes:]
        if len(codes) != num_bytes or digest != _digest(name, codes, shape, fmt):
            return None  # it is damaged, or of an earlier version
        return QuantTensor(fmt, shape, np.frombuffer(codes, np.uint8).reshape(shape[0], -1))

    def all_of(self, matrices: Iterable[tuple[str, QuantTensor]]) -> dict[str, QuantTensor]:
        """Return matrices by name, each of which is kept as it comes."""
        found = {}
        for name, tensor in matrices:
            found[name] = tensor
            if self.get(name, tensor.shape, tensor.format) is None:
                self.add(name, tensor)
        return found

    def add(self, name: str, tensor: QuantTensor) -> None:
        """Keep a matrix; a full disk is no reason to stop."""
        path = self._path(name)
        part = path.with_suffix(".part")
        with suppress(OSError):
            path.parent.mkdir(parents=True, exist_ok=True)
            codes = tensor.data.tobytes()
            part.write_bytes(codes + _digest(name, codes, tensor.shape, tensor.format))
            part.replace(path)

    def _path(self, name: str) -> Path:
        return self._folder / f"{name}.codes"


def _digest(name: str, codes: bytes, shape: tuple[int, ...], fmt: Format) -> bytes:
    """Return the digest that follows a matrix in its file, so that damage is noticed."""
    hashed = hashlib.blake2b(codes, digest_size=_DIGEST_BYTES)
    hashed.update(repr((name, shape, fmt.name)).encode())
    return hashed.digest()
