"""Saves the work of `quantize` in the cache folder, so that an interrupted command can continue.

Calibration text that a model has generated is also saved there, for later commands.
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

_METHOD_VERSION: Final = 2  # raised when prompts or rounding change the results
_DIGEST_BYTES: Final = 16
_MAX_AGE_S: Final = 7 * 24 * 3600  # older work of interrupted commands is removed


class SavedWork:
    """Saved results of quantizing one model, with which an interrupted command continues."""

    def __init__(self, source: LoadedModel) -> None:
        """Use the saved results for the model `source`; remove results that are too old."""
        self._identity = weights_identity(source.tensors)[:24]
        self._root = env.cache_dir() / "quantize"
        self._used: set[Path] = set()
        for folder in self._root.glob("*"):
            with suppress(OSError):
                if folder.stat().st_mtime < time.time() - _MAX_AGE_S:
                    shutil.rmtree(folder)

    def pieces(self, num_tokens: int, make: Callable[[], list[list[int]]]) -> list[list[int]]:
        """Return the model's saved calibration text; if there is none, save and return `make()`.

        The text is a list of token sequences, of `num_tokens` tokens in all.
        """
        path = (
            env.cache_dir()
            / "calibration"
            / f"{self._identity}-{num_tokens}-{_METHOD_VERSION}.json"
        )
        with suppress(TwostrokeError, msgspec.MsgspecError):
            return msgspec.convert(read_checked_json(path).get("pieces"), list[list[int]])
        pieces = make()
        with suppress(OSError):  # a full disk: the next command makes it again
            path.parent.mkdir(parents=True, exist_ok=True)
            write_checked_json(path, {"pieces": pieces})
        return pieces

    def matrices(
        self, tensors: Mapping[str, QuantTensor], formats: object, pieces: Pieces
    ) -> SavedMatrices:
        """Return the saved matrices that were rounded to `formats` on a calibration text.

        `pieces` are the text's token sequences. `tensors` are all tensors of the model; tensors
        that are not rounded have final formats.
        """
        tensor_formats = sorted((name, tensor.format.name) for name, tensor in tensors.items())
        folder = self.folder(tensor_formats, formats, [list(piece) for piece in pieces])
        return SavedMatrices(folder)

    def folder(self, *description: object) -> Path:
        """Return the folder of the saved work that is identified by these values."""
        digest = hashlib.sha256(repr((_METHOD_VERSION, *description)).encode()).hexdigest()
        folder = self._root / f"{self._identity}-{digest[:16]}"
        self._used.add(folder)
        return folder

    def drop(self) -> None:
        """Remove all saved work that this command used, because the command is done."""
        for folder in self._used:
            shutil.rmtree(folder, ignore_errors=True)


class SavedMatrices:
    """Saved rounded matrices, each in its own file of a folder."""

    def __init__(self, folder: Path) -> None:
        """Use the files of rounded matrices in `folder`."""
        self._folder = folder

    def get(self, name: str, shape: tuple[int, ...], fmt: Format) -> QuantTensor | None:
        """Return a saved rounded matrix; None if it is not saved, or its file is damaged."""
        try:
            content = read_regular_file(self._path(name))
        except OSError:
            return None
        num_bytes = shape[0] * fmt.num_bytes(shape[1])
        codes, digest = content[:num_bytes], content[num_bytes:]
        if len(codes) != num_bytes or digest != _digest(name, codes, shape, fmt):
            return None  # damaged, or of an earlier version
        return QuantTensor(fmt, shape, np.frombuffer(codes, np.uint8).reshape(shape[0], -1))

    def all_of(self, matrices: Iterable[tuple[str, QuantTensor]]) -> dict[str, QuantTensor]:
        """Save each rounded matrix when it arrives, and return all matrices by name at the end."""
        tensors = {}
        for name, tensor in matrices:
            tensors[name] = tensor
            if self.get(name, tensor.shape, tensor.format) is None:
                self.add(name, tensor)
        return tensors

    def add(self, name: str, tensor: QuantTensor) -> None:
        """Save a rounded matrix; errors such as a full disk are ignored."""
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
    """Return a digest of a rounded matrix, which is saved after it to detect damage."""
    hashed = hashlib.blake2b(codes, digest_size=_DIGEST_BYTES)
    hashed.update(repr((name, shape, fmt.name)).encode())
    return hashed.digest()
