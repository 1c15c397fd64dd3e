"""`make long SUITE=durable`: each kind of file beside `--records` is damaged in each way, and read.

The reader has the values of before, none where they can be made again, or an error that names the
file. A file that the product wrote never yields other values; one that people write never ends in
an exception that is not an answer to them.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import random
import shutil
import signal
import sys
import tempfile
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from file_damages import DAMAGES

from support.heads import write_random_heads
from support.stored_pages import PAGE_VALUE, content_of, kind
from support.tiny import write_tiny_folder, write_tiny_gguf
from twostroke.backends import machine_limits as limits
from twostroke.backends.activation_bits import resolve as activations
from twostroke.backends.cpu.packed_store import PackedStore
from twostroke.core.errors import TwostrokeError
from twostroke.core.frozen import Frozen
from twostroke.core.json_io import write_checked_json
from twostroke.core.options import ActivationBits
from twostroke.engine.canary import REPORT_FILE, read_report
from twostroke.engine.kv_offload import build as tiers
from twostroke.engine.kv_offload.disk import DiskTier
from twostroke.engine.kv_offload.folder import read_folder, verify
from twostroke.fleet.cluster.own_ray import OwnRay
from twostroke.fleet.cluster.spec import read_spec
from twostroke.fleet.router import health_checker as watch
from twostroke.lab.compress import sensitivity
from twostroke.lab.compress.saved_work import SavedMatrices, SavedWork
from twostroke.lab.compress.sensitivity import Sensitivity
from twostroke.lab.planner import calibration, devices
from twostroke.lab.planner.fleet_file import read_fleet
from twostroke.lab.planner.prices import load_prices
from twostroke.lab.simulator.traces import read_trace
from twostroke.lab.train.checkpoint import Checkpoint, load_checkpoint, save_checkpoint
from twostroke.lab.train.record import AnswerStore, RecordedAnswer, load_answers
from twostroke.model.hub.records import ModelRecord, StoredFile, stored_records
from twostroke.model.loader import build_tokenizer
from twostroke.model.quant import FORMATS, QuantTensor
from twostroke.model.weights import load_heads, load_path
from twostroke.server.auth.keys import ApiKeys
from twostroke.server.auth.prices import read_prices
from twostroke.server.batch.offline import OfflineFiles, ResultFile
from twostroke.server.http.internal_requests import InternalResponse
from twostroke.server.http.limits import RequestLimits

if TYPE_CHECKING:
    from collections.abc import Callable

_HANG_S = 20
_TOKENS = 8
_PACKED_BYTES = 3 << 12


class FileKind(Frozen):
    """A kind of files.

    Attributes:
        make: writes files into a folder and returns those that are damaged; the number makes
            others of the same kind.
        read: returns what the product reads from the folder.
        is_checked: whether values that nobody wrote are noticed: the product wrote the file.
        may_be_swapped: whether another file of the kind may take its place.
        may_lack: whether None, or a part of what was kept, is right: it can be made again.
        names: what an error names, beside the file itself.
    """

    make: Callable[[Path, int], list[Path]]
    read: Callable[[Path], Any]
    is_checked: bool = True
    may_be_swapped: bool = False
    may_lack: Callable[[Any, Any], bool] = lambda value, _before: value is None
    names: tuple[str, ...] = ()


def cached(path: str) -> Callable[[Path], Path]:
    """Return a function that makes the parent of a path in a folder, and returns the path."""

    def cached_folder(folder: Path) -> Path:
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        return folder / path

    return cached_folder


def make_calibration(folder: Path, number: int) -> list[Path]:
    os.environ["TWOSTROKE_CACHE"] = str(folder)
    points = tuple(
        calibration.MeasuredStep(1, 512, rows, 1e-3, 2e-3, 3e-4 + number)
        for rows in (1, 2 + number)
    )
    result = calibration.Calibration(points, "2026-01-01", 1)
    calibration._store(f"model{number}", result)
    return list((folder / "calibrations").iterdir())


def read_calibration(folder: Path) -> Any:
    os.environ["TWOSTROKE_CACHE"] = str(folder)
    return calibration.load_calibration("model0", 1)


def make_limits(folder: Path, number: int) -> list[Path]:
    path = folder / f"machine-{number}.json"
    values = {"name": "cpu", "num_threads": 2, "memory_bytes": 1 << 30, "bandwidth": 1e10 + number}
    write_checked_json(path, {**values, "peak": 1e12, "peak_kind": "int8", "source": "measured"})
    return [path]


def make_bits(folder: Path, number: int) -> list[Path]:
    path = folder / f"bits-{number}.json"
    bits = ActivationBits(f"model{number}", activations.METHOD, {"a": 8, "b": 9}, 0.01, 7)
    write_checked_json(path, {name: getattr(bits, name) for name in bits.__struct_fields__})
    return [path]


def make_sensitivity(folder: Path, number: int) -> list[Path]:
    path = folder / f"sensitivity-{number}.json"
    result = Sensitivity(f"model{number}", {"a": {"Q4_K": 0.125}}, {"a 3": 0.5 + number})
    sensitivity._write(path, result)
    return [path]


def make_digest(folder: Path, number: int) -> list[Path]:
    os.environ["TWOSTROKE_CACHE"] = str(folder)
    path = write_tiny_gguf(folder / "model.gguf", metadata={"number": number})
    os.utime(path, (1, 1))
    tiers.weights_digest(load_path(path))
    return list((folder / "digests").iterdir())


def read_digest(folder: Path) -> Any:
    """Return the digest; the file's name has the path, so that a copied folder makes another."""
    os.environ["TWOSTROKE_CACHE"] = str(folder)
    os.utime(folder / "model.gguf", (1, 1))
    return tiers.weights_digest(load_path(folder / "model.gguf"))


def make_pieces(folder: Path, number: int) -> list[Path]:
    os.environ["TWOSTROKE_CACHE"] = str(folder)
    loaded = load_path(write_tiny_gguf(folder / "model.gguf"))
    SavedWork(loaded).pieces(64 + number, lambda: [[1, 2, 3], [4 + number]])
    return list((folder / "calibration").iterdir())


def read_pieces(folder: Path) -> Any:
    os.environ["TWOSTROKE_CACHE"] = str(folder)
    remade: list[list[int]] = []
    result = SavedWork(load_path(folder / "model.gguf")).pieces(64, lambda: remade)
    return None if result is remade else result


def make_packed(folder: Path, number: int) -> list[Path]:
    weights = np.arange(_PACKED_BYTES, dtype=np.uint8) + np.uint8(number)
    store, path = packed_store_of(folder, number)
    writer = store.write_later(path, weights.ctypes.data, weights.nbytes)
    assert writer is not None
    writer.close(_HANG_S)
    return [path]


def read_packed(folder: Path) -> Any:
    store, path = packed_store_of(folder, 0)
    mapped = store.open(path, _PACKED_BYTES)
    if mapped is None:
        return None
    weights = mapped.bytes[:_PACKED_BYTES].tobytes()
    mapped.close()
    return weights


def packed_store_of(folder: Path, number: int) -> tuple[PackedStore, Path]:
    """Return a store in a folder, and the path of its file with the weights of a number."""
    store = PackedStore(folder, f"model {number}", min_bytes=0)
    library_path = folder / "library.so"
    library_path.write_bytes(b"kernels")
    return store, store.path_of(library_path, ["a Q8_0 (1, 64)"], "identity")


def make_matrices(folder: Path, number: int) -> list[Path]:
    values = np.arange(512, dtype=np.float32).reshape(2, 256) + number
    name = f"blk.{number}.weight"
    SavedMatrices(folder).add(name, QuantTensor.from_floats(values, FORMATS["Q8_0"]))
    return [folder / f"{name}.codes"]


def read_matrices(folder: Path) -> Any:
    result = SavedMatrices(folder).get("blk.0.weight", (2, 256), FORMATS["Q8_0"])
    return None if result is None else result.data.tolist()


def make_checkpoint(folder: Path, number: int) -> list[Path]:
    arrays = {"w": np.arange(64, dtype=np.float32).reshape(8, 8) + number}
    save_checkpoint(folder, Checkpoint({"model": "m"}, (1, 2, 3), 4.5, 6, arrays))
    return [folder / "checkpoint.json", folder / "checkpoint-6.safetensors"]


def read_checkpoint(folder: Path) -> Any:
    result = load_checkpoint(folder, {"model": "m"})
    if result is None:
        return None
    values = {name: array.tolist() for name, array in result.arrays.items()}
    return result.token_ids, result.seconds, result.num_steps, values


def make_answers(folder: Path, number: int) -> list[Path]:
    store = AnswerStore(folder, 0)
    for first in range(2):
        tokens = np.arange(5, dtype=np.int32) + first + number
        store.add(RecordedAnswer(tokens, np.full((4, 8), first + number, np.float16), (1, 2)))
    store.flush()
    return [folder / "0000000.json", folder / "0000000.f16"]


def read_answers(folder: Path) -> Any:
    result = load_answers(folder, 8)
    return [
        (example.prompt, example.tokens.tolist(), example.hidden.tolist()) for example in result
    ] or None


def make_heads(folder: Path, number: int) -> list[Path]:
    model = write_tiny_gguf(folder / "model.gguf")
    write_random_heads(folder, model, "medusa", seed=number)
    return [folder / "heads.json", folder / "heads.safetensors"]


def read_heads(folder: Path) -> Any:
    result = load_heads(folder)
    return result.facts, sorted(result.tensors)


def make_record(folder: Path, number: int) -> list[Path]:
    os.environ["TWOSTROKE_CACHE"] = str(folder)
    (folder / "models").mkdir(parents=True)
    path = write_tiny_gguf(folder / "models" / f"m{number}.gguf")
    file = StoredFile(path, path.stat().st_size, "00" * 32)
    record = ModelRecord(name=f"m{number}", title="A model", path=path, files=(file,))
    record.write()
    return [record.file]


def read_record(folder: Path) -> Any:
    os.environ["TWOSTROKE_CACHE"] = str(folder)
    results = [
        (
            stored_record.name,
            stored_record.title,
            stored_record.files[0].sha256,
            stored_record.num_bytes,
        )
        for stored_record in stored_records()
    ]
    return results or None


def make_pages(folder: Path, number: int) -> list[Path]:
    tier = DiskTier(folder / "pages", kind(), 1 << 30, "m")
    tier.wait()
    for page in (2 * number, 2 * number + 1):
        tier.offer(page.to_bytes(32, "big"), memoryview(bytearray(content_of(page))), PAGE_VALUE)
    [about] = (folder / "pages").glob("*/*.json")
    return [*sorted((folder / "pages").glob("*/??/*")), about]


def read_pages(folder: Path) -> Any:
    tier = DiskTier(folder / "pages", kind(), 1 << 30, "m")
    tier.wait()
    read_folder(folder / "pages", 0.0)
    results = {}
    for page in range(4):
        buffer = bytearray(len(content_of(0)))
        if tier.fetch(page.to_bytes(32, "big"), memoryview(buffer)):
            results[page] = bytes(buffer) == content_of(page)
    list(verify(folder / "pages"))
    return results


def lacks_pages(values: Any, _before: Any) -> bool:
    """Return whether at most one page is missing, and the others are right."""
    return len(values) >= 1 and all(values.values())


_LIMITS = RequestLimits()


def make_partial(folder: Path, number: int) -> list[Path]:
    requests = [
        {
            "custom_id": f"{number}-{line}",
            "method": "POST",
            "url": "/v1/completions",
            "body": {"prompt": str(line)},
        }
        for line in range(4)
    ]
    (folder / "in.jsonl").write_text("".join(f"{json.dumps(request)}\n" for request in requests))
    with (
        ResultFile(folder / "out", resumes=True) as out,
        ResultFile(folder / "err", resumes=True) as err,
    ):
        files = OfflineFiles(folder / "in.jsonl", out, err, "m")
        files.check(_LIMITS)
        for line in files.lines(_LIMITS):
            answer = InternalResponse(
                200, {"x-request-id": "r"}, b'{"choices": [{"text": "some text 1"}]}'
            )
            out.add(line.custom_id, files.result(line, answer))
    return [folder / "out.partial"]


def read_partial(folder: Path) -> Any:
    """Return the results that the next run takes over."""
    with (
        ResultFile(folder / "out", resumes=True) as out,
        ResultFile(folder / "err", resumes=True) as err,
    ):
        OfflineFiles(folder / "in.jsonl", out, err, "m").check(_LIMITS)
        out.finish(iter(sorted(out.extents)))
    path = folder / "out"
    return path.read_text().splitlines() if path.exists() else None


def lacks_lines(lines: Any, before: Any) -> bool:
    """Return whether results are missing, and the others are as they were."""
    return lines is None or set(lines) <= set(before)


def make_ray(folder: Path, number: int) -> list[Path]:
    os.environ["TWOSTROKE_CACHE"] = str(folder)
    path = cached("fleet/ray.json")(folder)
    facts = {"address": f"127.0.0.1:{number}", "token": "secret", "pid": 2, "begun": "1"}
    write_checked_json(path, {**facts, "folder": str(folder / "twostroke-ray-1")})
    return [path]


def read_ray(folder: Path) -> Any:
    os.environ["TWOSTROKE_CACHE"] = str(folder)
    result = OwnRay()
    result.find()
    return result._read()


def make_model(folder: Path, number: int) -> list[Path]:
    write_tiny_folder(folder / "model", num_shards=2)
    report = folder / "model" / REPORT_FILE
    config = json.loads((folder / "model" / "generation_config.json").read_text())
    config["temperature"] = 0.5 + number / 10
    (folder / "model" / "generation_config.json").write_text(json.dumps(config))
    report.write_text(json.dumps({"canary": None, "version": number}))
    return sorted((folder / "model").iterdir())


def read_model(folder: Path) -> Any:
    loaded = load_path(folder / "model")
    tokenizer = build_tokenizer(loaded)
    read_report(loaded)
    return tokenizer.encode("a text"), (loaded.eos_token_ids, loaded.sampling)


_TEXTS: dict[str, tuple[str, Callable[[Path], Any]]] = {
    "keys.txt": (
        "# keys\nanna key-{n}-abcdefgh\nkey-without-tenant-{n}\n",
        lambda path: ApiKeys.read(path, None),
    ),
    "prices.toml": (
        '[models."m"]\ninput = 0.{n}5\noutput = 1.5\nbatch_discount = 0.5\n',
        read_prices,
    ),
    "api-prices.csv": (
        "model,input_usd_per_1m,output_usd_per_1m,source_date\nsome-{n},0.25,1.5,2026-07\n",
        load_prices,
    ),
    "device.toml": (
        (
            'name = "box-{n}"\nmemory_gb = 48\nbandwidth_gb_s = 900\nbf16_tflops = 180\n'
            "usd_per_hour = 0.80\nlink_gb_s = 32\n"
        ),
        lambda path: devices.find_device(str(path)),
    ),
    "replicas.txt": (
        "# replicas\nhttp://127.0.0.1:800{n}\nhttp://127.0.0.1:9000\n",
        watch._read_listing,
    ),
    "fleet.yaml": (
        "name: shop{n}\nmodels:\n  - model: smollm2\n    cpus: 2\n    options: {{strict: true}}\n",
        read_spec,
    ),
    "question.yaml": (
        "models:\n  - model: smollm2\n    requests_per_s: {n}.5\n",
        read_fleet,
    ),
    "trace.jsonl": (
        (
            '{{"timestamp": {n}, "input_length": 10, "output_length": 5}}\n'
            '{{"timestamp": 2000, "input_length": 11, "output_length": 6}}\n'
        ),
        lambda path: read_trace(str(path)),
    ),
    "trace.json": (
        (
            '{{"requests": [{{"timings": {{"arrival_s": {n}, "started_s": 1, '
            '"first_token_s": 2, "last_token_s": 3}}, "sent_s": 0.5, "num_prompt": 10, '
            '"num_output": 4}}]}}\n'
        ),
        lambda path: read_trace(str(path)),
    ),
}


def text_kind(name: str) -> FileKind:
    """Return the kind of a file that people write."""
    text, read = _TEXTS[name]

    def make(folder: Path, number: int) -> list[Path]:
        (folder / name).write_text(text.format(n=number + 1))
        return [folder / name]

    return FileKind(make=make, read=lambda folder: repr(read(folder / name)), is_checked=False)


KINDS: dict[str, FileKind] = {
    "page cache": FileKind(make=make_pages, read=read_pages, may_lack=lacks_pages),
    "partial results": FileKind(make=make_partial, read=read_partial, may_lack=lacks_lines),
    "calibration": FileKind(make=make_calibration, read=read_calibration),
    "machine limits": FileKind(
        make=make_limits, read=lambda folder: limits._read(folder / "machine-0.json")
    ),
    "bits of activations": FileKind(
        make=make_bits, read=lambda folder: activations._read(folder / "bits-0.json", "model0")
    ),
    "sensitivity": FileKind(
        make=make_sensitivity,
        read=lambda folder: sensitivity._read(folder / "sensitivity-0.json", "model0"),
    ),
    "digest of weights": FileKind(make=make_digest, read=read_digest),
    "calibration text": FileKind(make=make_pieces, read=read_pieces),
    "packed weights": FileKind(make=make_packed, read=read_packed),
    "rounded matrices": FileKind(make=make_matrices, read=read_matrices),
    "checkpoint": FileKind(make=make_checkpoint, read=read_checkpoint),
    "recorded answers": FileKind(make=make_answers, read=read_answers),
    "heads": FileKind(make=make_heads, read=read_heads, is_checked=False),
    "model record": FileKind(make=make_record, read=read_record),
    "Ray's record": FileKind(make=make_ray, read=read_ray, may_be_swapped=True),
    "model folder": FileKind(make=make_model, read=read_model, is_checked=False),
    **{name: text_kind(name) for name in _TEXTS},
}


def renew(*folders: Path) -> None:
    """Make empty folders."""
    for folder in folders:
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir()


class HangError(BaseException):
    """A reader waits."""


def check_case(
    file_kind: FileKind, folders: tuple[Path, Path], number: int, damage: str, seed: int
) -> None:
    """Damage a copy of a file, and read all; raise AssertionError if a rule is broken."""
    folder, other = folders
    renew(*folders)
    file_kind.make(folder, 0)
    before = file_kind.read(folder)  # which may change what is there
    assert before is not None
    renew(folder)
    path, other_path = file_kind.make(folder, 0)[number], file_kind.make(other, 1)[number]
    DAMAGES[damage][0](path, other_path, random.Random(seed))
    try:
        result = file_kind.read(folder)
    except TwostrokeError as error:
        names = (path.name, path.parent.name, *file_kind.names)
        if not any(name in str(error) for name in names):
            raise AssertionError(f"no file is named: {error}") from error
        return
    except OSError as error:  # the command line says the file and the reason
        if str(path) not in str(error.filename):
            raise AssertionError(f"no file is named: {error!r}") from error
        return
    except (Exception, HangError) as error:
        raise AssertionError(f"{type(error).__name__}: {error}") from error
    if not file_kind.is_checked and damage in {"a folder", "a pipe", "unreadable"}:
        assert result == before, "what is no file is read as if it were missing"
    if file_kind.is_checked and not (damage == "swapped" and file_kind.may_be_swapped):
        is_same = result == before
        assert is_same or file_kind.may_lack(result, before), f"other values: {str(result)[:200]}"


def main() -> int:
    """Try all cases, or some; print how many of each kind held and return 0 if all did."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--only", default="", help="only kinds with this in their names")
    parser.add_argument("--cases", type=int, default=0, help="of each kind, chosen at random")
    options = parser.parse_args()
    logging.disable(logging.CRITICAL)
    signal.signal(signal.SIGALRM, _interrupt)
    counts, failures = Counter[str](), Counter[str]()
    with tempfile.TemporaryDirectory() as name:
        folders = Path(name) / "kept", Path(name) / "other"
        for kind_name, file_kind in KINDS.items():
            if options.only not in kind_name:
                continue
            rng = random.Random(f"{options.seed} {kind_name}")
            renew(*folders)
            num_files = len(file_kind.make(folders[0], 0))
            cases = [
                (number, damage, rng.randrange(1 << 32))
                for damage, (_, times) in DAMAGES.items()
                for number in range(num_files)
                for _ in range(times)
            ]
            for case in (
                rng.sample(cases, min(options.cases, len(cases))) if options.cases else cases
            ):
                counts[kind_name] += 1
                signal.alarm(_HANG_S)
                try:
                    check_case(file_kind, folders, *case)
                except AssertionError as error:
                    failures[kind_name] += 1
                    print(f"FAILED: {kind_name}, {case}: {str(error)[:300]}", flush=True)
                finally:
                    signal.alarm(0)
    for kind_name, count in counts.items():
        print(f"{kind_name:22} {count:4} cases, {failures[kind_name]} failed")
    print(f"{counts.total()} cases, {failures.total()} failed")
    return int(bool(failures))


def _interrupt(_number: int, _frame: object) -> None:
    raise HangError("it waits")


if __name__ == "__main__":
    sys.exit(main())
