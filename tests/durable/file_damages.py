"""The damages of a file: each changes one file, in the same way for the same seed."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import random
    from collections.abc import Callable
    from pathlib import Path

    Damage = Callable[[Path, Path, random.Random], None]  # the file, a valid other one, chance

_APPENDED = b'\x00\xff{"a": 1}\n'


def _flip(path: Path, _other: Path, rng: random.Random) -> None:
    """Flip a bit anywhere."""
    data = bytearray(path.read_bytes())
    data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
    path.write_bytes(data)


def _change_digit(path: Path, _other: Path, rng: random.Random) -> None:
    """Change a digit, if there is one, so that a text file still parses."""
    data = bytearray(path.read_bytes())
    digit_offsets = [at for at, byte in enumerate(data) if 0x30 <= byte <= 0x38]
    if digit_offsets:
        data[rng.choice(digit_offsets)] ^= 1
    path.write_bytes(data)


def _change_letter(path: Path, _other: Path, rng: random.Random) -> None:
    """Change a letter, if there is one."""
    data = bytearray(path.read_bytes())
    letter_offsets = [at for at, byte in enumerate(data) if 0x61 <= byte <= 0x7A]
    if letter_offsets:
        at = rng.choice(letter_offsets)
        data[at] = 0x61 + (data[at] - 0x61 + 1) % 26
    path.write_bytes(data)


def _zero(path: Path, _other: Path, rng: random.Random) -> None:
    """Fill a part with zeros, as a file system does after a loss of power."""
    data = bytearray(path.read_bytes())
    start = rng.randrange(len(data))
    data[start : start + 512] = bytes(len(data[start : start + 512]))
    path.write_bytes(data)


def _cut(path: Path, _other: Path, rng: random.Random) -> None:
    os.truncate(path, rng.randrange(path.stat().st_size))


def _cut_last_byte(path: Path, _other: Path, _rng: random.Random) -> None:
    os.truncate(path, path.stat().st_size - 1)


def _empty(path: Path, _other: Path, _rng: random.Random) -> None:
    os.truncate(path, 0)


def _append(path: Path, _other: Path, _rng: random.Random) -> None:
    path.write_bytes(path.read_bytes() + _APPENDED)


def _double(path: Path, _other: Path, _rng: random.Random) -> None:
    path.write_bytes(path.read_bytes() * 2)


def _swap(path: Path, other: Path, _rng: random.Random) -> None:
    """Put a valid file of the same kind in its place."""
    path.write_bytes(other.read_bytes())


def _write(content: bytes) -> Damage:
    return lambda path, _other, _rng: path.write_bytes(content) and None


def _replace(make: Callable[[Path], object]) -> Damage:
    """Return a damage that puts something else in a file's place."""

    def damage(path: Path, _other: Path, _rng: random.Random) -> None:
        path.unlink()
        make(path)

    return damage


def _loop(path: Path) -> None:
    """Make a link to itself: unlike permissions, this stops the administrator as well."""
    path.symlink_to(path)


# A damage with a number is tried as often, at other places.
DAMAGES: dict[str, tuple[Damage, int]] = {
    "a flipped bit": (_flip, 12),
    "another digit": (_change_digit, 4),
    "another letter": (_change_letter, 4),
    "zeros": (_zero, 2),
    "truncated": (_cut, 4),
    "without its last byte": (_cut_last_byte, 1),
    "emptied": (_empty, 1),
    "appended bytes": (_append, 1),
    "twice its content": (_double, 1),
    "swapped": (_swap, 1),
    "another format": (_write(b"GGUF\xff\xff\xff\x7f" + bytes(64)), 1),
    "another version": (_write(b'{"version": 99999}'), 1),
    "a JSON list": (_write(b"[[], {}]"), 1),
    "deep JSON": (_write(b"[" * 100_000), 1),
    "a folder": (_replace(lambda path: path.mkdir()), 1),
    "a pipe": (_replace(os.mkfifo), 1),
    "unreadable": (_replace(_loop), 1),
    "missing": (lambda path, _other, _rng: path.unlink(), 1),
}
