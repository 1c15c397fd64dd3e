"""Random damage to whole files: a model or a ModelFormatError, quickly, and in little memory."""

from __future__ import annotations

import json
import random
import resource
import struct
import time
from typing import TYPE_CHECKING

import pytest

from support.safetensors_writer import with_header
from support.tiny import Tiny, write_tiny_folder, write_tiny_gguf
from twostroke.core.errors import ModelFormatError, ModelNotFoundError
from twostroke.model.weights import load_path
from twostroke.model.weights.gguf import read_gguf

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

SMALL = Tiny(num_layers=1, hidden_size=32, ffn_size=32, num_heads=2, num_kv_heads=1, fmt="F16")
EXTREMES = (0, 1, 2**7, 2**8 - 1, 2**15, 2**16, 2**24, 2**31 - 1, 2**31, 2**32 - 1)
EXTREMES += (2**32, 2**40, 2**62, 2**63 - 1, 2**63, 2**64 - 1)


def mutated(data: bytes, rng: random.Random, header_bytes: int) -> bytes:
    """Damage `data` in one to four places, mostly in its header."""
    out = bytearray(data)
    for _ in range(rng.randint(1, 4)):
        end = header_bytes if rng.random() < 0.9 else len(out)
        at = rng.randrange(max(1, min(end, len(out) - 8)))
        match rng.randrange(7):
            case 0:
                out[at] ^= 1 << rng.randrange(8)
            case 1:
                out[at] = rng.randrange(256)
            case 2:
                out[at : at + 8] = struct.pack("<Q", rng.choice(EXTREMES))
            case 3:
                out[at : at + 4] = struct.pack("<I", rng.choice(EXTREMES) % 2**32)
            case 4:
                del out[at : at + rng.randint(1, 64)]
            case 5:
                out[at:at] = out[at : at + rng.randint(1, 64)]
            case _:
                del out[rng.randrange(len(out)) :]
        if not out:
            break
    return bytes(out)


def rewrite(path: Path, data: bytes) -> None:
    """Replace a file; creating a new file is faster than truncating the old one."""
    path.unlink(missing_ok=True)
    path.write_bytes(data)


def survive(cases: int, step: Callable[[random.Random], None]) -> int:
    """Run `step` on many random inputs, which it must read or refuse; return the number refused."""
    messages = []
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    for seed in range(cases):
        start = time.perf_counter()
        try:
            step(random.Random(seed))
        except (ModelFormatError, ModelNotFoundError) as error:
            messages.append(str(error))
        assert time.perf_counter() - start < 5, f"seed {seed} took too long"
    grown_kib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - peak
    assert grown_kib < 128 << 10
    assert not any("\n" in message for message in messages)
    return len(messages)


def test_damaged_gguf_files_are_read_or_refused(tmp_path: Path) -> None:
    data = write_tiny_gguf(tmp_path / "whole.gguf", SMALL).read_bytes()
    path = tmp_path / "damaged.gguf"

    def step(rng: random.Random) -> None:
        rewrite(path, mutated(data, rng, 12_000))
        file = read_gguf(path)
        for tensor in file.tensors.values():
            tensor.dequantize()
        dict(file.metadata)
        load_path(path)

    assert survive(4000, step) > 1000


def test_damaged_safetensors_files_are_read_or_refused(tmp_path: Path) -> None:
    folder = write_tiny_folder(tmp_path / "whole", SMALL)
    path = folder / "model.safetensors"
    data = path.read_bytes()

    def step(rng: random.Random) -> None:
        rewrite(path, mutated(data, rng, 1200))
        for tensor in load_path(folder).tensors.values():
            tensor.dequantize()

    assert survive(2000, step) > 1000


@pytest.mark.parametrize("name", ["config.json", "generation_config.json", "tokenizer_config.json"])
def test_damaged_configurations_are_read_or_refused(tmp_path: Path, name: str) -> None:
    folder = write_tiny_folder(tmp_path / "whole", SMALL)
    path = folder / name
    config = json.loads(path.read_text())
    odd = [None, True, -1, 0, 1, 3, 2**31, 2**70, 1e308, float("nan"), "x", [], [1], {}, {"a": 1}]
    odd += [float("inf"), -0.5, [2**70], ["a"], {"rope_type": "yarn"}, {"rope_theta": -1}]

    def step(rng: random.Random) -> None:
        changed = dict(config)
        for _ in range(rng.randint(1, 3)):
            changed[rng.choice([*config, "rope_parameters"])] = rng.choice(odd)
        rewrite(path, json.dumps(changed).encode())
        load_path(folder)

    refused = survive(600, step)
    assert name != "config.json" or refused > 100


def test_random_json_headers_are_refused(tmp_path: Path) -> None:
    folder = write_tiny_folder(tmp_path / "whole", SMALL)
    odd = [None, True, -1, 2**70, 0.5, "F32", "x" * 5000, [], [0], [0, 2**63], [-1, 4], {}]

    def step(rng: random.Random) -> None:
        entry = {
            "dtype": rng.choice(["F32", "F16", "I64", *odd]),
            "shape": rng.choice([[1], [2, 2**62], [0], [1] * 9, *odd]),
            "data_offsets": rng.choice([[0, 4], [4, 0], [0, 4, 8], [2**62, 2**62 + 4], *odd]),
        }
        data = with_header({"a": rng.choice([entry, *odd]), "b": entry}, bytes(8))
        rewrite(folder / "model.safetensors", data)
        load_path(folder)

    assert survive(1000, step) == 1000
