"""Mutations that know the containers: they keep lengths and counts right and damage what is inside.

A blind change of bytes seldom gets past a length field; these reach the checks behind it. Data that
is no longer a container is left to the engine's own mutations.
"""

from __future__ import annotations

import json
import struct
from typing import TYPE_CHECKING, Any

from fuzz.targets import SEPARATOR

if TYPE_CHECKING:
    import random

INTEGERS = (0, 1, 2, 3, 4, 8, 255, 2**15, 2**16, 2**24, 2**31 - 1, 2**32, 2**62, 2**63 - 1, 2**63)
NUMBERS = (*INTEGERS, 2**64 - 1, -1, 0.5, -0.0, 1e-38, 1e38, float("nan"), float("inf"))
ODD = (*NUMBERS, 2**70, True, False, None, "", "x", [], [1], ["a"], {}, {"a": 1}, [[0, 1]])
SIZES = {0: 1, 1: 1, 2: 2, 3: 2, 4: 4, 5: 4, 6: 4, 7: 1, 10: 8, 11: 8, 12: 8}
CODES = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "B", 10: "Q", 11: "q", 12: "d"}
STRING, ARRAY = 8, 9


def mutated(data: bytes, rng: random.Random, words: list[str]) -> bytes:
    """Return `data` with one of its files changed in one to three places."""
    files = data.split(SEPARATOR)
    at = rng.randrange(len(files))
    if rng.random() < 0.02:
        files[at] = rng.choice(files)
    for _ in range(rng.randint(1, 3)):
        if files[at].startswith(b"GGUF"):
            files[at] = Gguf(files[at]).mutated(rng, words)
        elif files[at].startswith(b"{"):
            files[at] = json.dumps(mutated_json(json.loads(files[at]), rng, words)).encode()
        else:
            (length,) = struct.unpack_from("<Q", files[at])
            header = json.loads(files[at][8 : 8 + length])
            raw = json.dumps(mutated_json(header, rng, words)).encode()
            files[at] = struct.pack("<Q", len(raw)) + raw + files[at][8 + length :]
    return SEPARATOR.join(files)


def mutated_json(value: Any, rng: random.Random, words: list[str]) -> Any:
    """Change one place of a JSON value."""
    if isinstance(value, dict) and value and rng.random() < 0.9:
        key = rng.choice(list(value))
        match rng.randrange(8):
            case 0:
                return {k: v for k, v in value.items() if k != key}
            case 1:
                return value | {rng.choice(words): rng.choice([*ODD, *value.values()])}
            case 2:
                return value | {key: rng.choice([*ODD, *words])}
            case 3:
                return value | {key: rng.choice(list(value.values()))}
            case _:
                return value | {key: mutated_json(value[key], rng, words)}
    if isinstance(value, list) and value and rng.random() < 0.9:
        at = rng.randrange(len(value))
        item = rng.choice([mutated_json(value[at], rng, words), *ODD])
        return [*value[:at], *rng.choice([[], [item], [item], [value[at], item]]), *value[at + 1 :]]
    if type(value) is int and rng.random() < 0.6:
        return value + rng.choice([-1, 1, value, 4, 1024])
    return rng.choice([*ODD, *words])


class Gguf:
    """A GGUF file in pieces: keys with their raw values, the table of tensors, and the rest."""

    def __init__(self, data: bytes) -> None:
        """Take a file apart; ValueError or struct.error if it is none."""
        self.data, self.at = data, 4
        self.version, num_tensors, num_keys = self.numbers("<IQQ")
        self.keys = [self.key() for _ in range(min(num_keys, 1 << 10))]
        self.tensors = [self.tensor() for _ in range(min(num_tensors, 1 << 10))]
        self.rest = data[self.at :]

    def mutated(self, rng: random.Random, words: list[str]) -> bytes:
        """Change one key or one tensor and put the file together again."""
        if self.keys and rng.random() < 0.7:
            self.change_key(rng, words)
        elif self.tensors:
            self.change_tensor(rng)
        elif words:
            self.keys.append((rng.choice(words).encode(), *scalar(rng)))
        out = b"GGUF" + struct.pack("<IQQ", self.version, len(self.tensors), len(self.keys))
        out += b"".join(text(name) + struct.pack("<I", kind) + raw for name, kind, raw in self.keys)
        for name, dims, kind, offset in self.tensors:
            packed = struct.pack(f"<I{len(dims)}QIQ", len(dims), *dims, kind, offset)
            out += text(name) + packed
        return out + bytes(-len(out) % rng.choice((8, 8, 32))) + self.rest

    def change_key(self, rng: random.Random, words: list[str]) -> None:
        at = rng.randrange(len(self.keys))
        name, kind, raw = self.keys[at]
        other = rng.choice(self.keys)
        match rng.randrange(8):
            case 0:
                del self.keys[at]
            case 1:
                self.keys.append((rng.choice(words).encode(), *other[1:]))
            case 2:
                self.keys[at] = (name, *other[1:])
            case 3:
                self.keys[at] = (name, *scalar(rng))
            case 4:
                self.keys[at] = (name, STRING, text(rng.choice(words).encode()))
            case 5:
                item, packed = scalar(rng)
                count = rng.randrange(5)
                self.keys[at] = (name, ARRAY, struct.pack("<IQ", item, count) + count * packed)
            case 6 if kind in CODES:
                old = struct.unpack(f"<{CODES[kind]}", raw)[0]
                if isinstance(old, int):
                    new = (old + rng.choice([-1, 1, 4, old])) % (1 << 8 * SIZES[kind])
                    self.keys[at] = (name, kind, new.to_bytes(SIZES[kind], "little"))
            case _:
                self.keys.append((rng.choice(words).encode(), *scalar(rng)))

    def change_tensor(self, rng: random.Random) -> None:
        at = rng.randrange(len(self.tensors))
        name, dims, kind, offset = self.tensors[at]
        match rng.randrange(7):
            case 0:
                del self.tensors[at]
            case 1:
                self.tensors[at] = (name, dims, rng.randrange(45), offset)
            case 2:
                index = rng.randrange(len(dims) + 1)
                size = rng.choice([*INTEGERS[:12], 32, 256])
                dims = (*dims[:index], size, *dims[index + rng.randrange(2) :])
                self.tensors[at] = (name, dims[:5], kind, offset)
            case 3:
                self.tensors[at] = (name, dims, kind, offset + rng.choice([8, 32, 2**32]))
            case 4:
                self.tensors[at] = (name, dims, kind, rng.choice(INTEGERS))
            case 5:
                self.tensors[at] = (rng.choice(self.tensors)[0], dims, kind, offset)
            case _:
                self.tensors.append((name[:-1] + b"x", dims, kind, offset))

    def numbers(self, form: str) -> tuple[int, ...]:
        values = struct.unpack_from(form, self.data, self.at)
        self.at += struct.calcsize(form)
        return values

    def take(self, num_bytes: int) -> bytes:
        self.at += num_bytes
        if self.at > len(self.data):
            raise ValueError
        return self.data[self.at - num_bytes : self.at]

    def key(self) -> tuple[bytes, int, bytes]:
        name = self.take(self.numbers("<Q")[0])
        (kind,) = self.numbers("<I")
        start = self.at
        self.skip(kind)
        return name, kind, self.data[start : self.at]

    def skip(self, kind: int) -> None:
        if kind == STRING:
            self.take(self.numbers("<Q")[0])
        elif kind == ARRAY:
            item, count = self.numbers("<IQ")
            for _ in range(min(count, len(self.data))):
                self.skip(item)
        elif kind in SIZES:
            self.take(SIZES[kind])
        else:
            raise ValueError

    def tensor(self) -> tuple[bytes, tuple[int, ...], int, int]:
        name = self.take(self.numbers("<Q")[0])
        dims = self.numbers(f"<{min(8, self.numbers('<I')[0])}Q")
        return name, dims, *self.numbers("<IQ")


def text(raw: bytes) -> bytes:
    """Return a GGUF string."""
    return struct.pack("<Q", len(raw)) + raw


def scalar(rng: random.Random) -> tuple[int, bytes]:
    """Return a random GGUF number: its kind and its bytes."""
    kind = rng.choice(list(CODES))
    if CODES[kind] in "fd":
        return kind, struct.pack(f"<{CODES[kind]}", float(rng.choice(NUMBERS)))
    number = int(rng.choice(INTEGERS)) % (1 << 8 * SIZES[kind])
    return kind, number.to_bytes(SIZES[kind], "little")
