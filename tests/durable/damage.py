"""`make long SUITE=durable`: each kept thing is damaged in each way, and the next server reads it.

The server starts, or says in one sentence which file is wrong. Each request has the answer of
before, or an error that says why; other things are as they were. Nothing waits.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import sqlite3
import sys
import tempfile
import time
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING, Any

import httpx

from support.servers import live_server
from twostroke.server.storage import Records, RecordsError

if TYPE_CHECKING:
    from collections.abc import Callable

CONTENT = (
    b'{"custom_id": "1", "method": "POST", "url": "/v1/completions", "body": {"prompt": "x"}}\n'
)
MAX_START_S = 60.0
NUM_BITS = 60  # flipped in the database, one in each case


def flip(path: Path) -> None:
    """Flip bits in the middle of a file."""
    data = bytearray(path.read_bytes())
    for offset in range(len(data) // 2, min(len(data), len(data) // 2 + 8)):
        data[offset] ^= 4
    path.write_bytes(data)


def flip_anywhere(path: Path, seed: int) -> None:
    """Flip a bit where the database has something."""
    data = bytearray(path.read_bytes())
    at = random.Random(seed).choice([at for at, byte in enumerate(data) if byte])
    data[at] ^= 1 << random.Random(seed + 1).randrange(8)
    path.write_bytes(data)


def truncate(path: Path) -> None:
    """Cut a file to its first half."""
    os.truncate(path, path.stat().st_size // 2)


def replace_by(make: Callable[[Path], object]) -> Callable[[Path], None]:
    """Return a damage that puts something else in a file's place."""

    def damage(path: Path) -> None:
        path.unlink()
        make(path)

    return damage


DAMAGES: dict[str, Callable[[Path], None]] = {
    "flipped bits": flip,
    "truncated": truncate,
    "empty": lambda path: os.truncate(path, 0),
    "missing": Path.unlink,
    "a folder": replace_by(Path.mkdir),
    "a pipe": replace_by(os.mkfifo),
    "a dangling link": replace_by(lambda path: path.symlink_to(path.with_name("nowhere"))),
}


def change_letter(data: bytes) -> bytes:
    """Change a letter in the middle, so that JSON stays JSON."""
    letter_offsets = [at for at, byte in enumerate(data) if 0x62 <= byte <= 0x79]
    at = letter_offsets[len(letter_offsets) // 2]
    return data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :]


def change_digit(data: bytes) -> bytes:
    """Change a digit in the middle, so that counts and times are others."""
    digit_offsets = [at for at, byte in enumerate(data) if 0x30 <= byte <= 0x39]
    if not digit_offsets:
        return change_letter(data)
    at = digit_offsets[len(digit_offsets) // 2]
    return data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :]


ROW_DAMAGES: dict[str, Callable[[bytes], Any]] = {
    "another letter": change_letter,
    "another digit": change_digit,
    "flipped bits": lambda data: data[:1] + bytes(byte ^ 0x80 for byte in data[1:3]) + data[3:],
    "truncated": lambda data: data[: len(data) // 2],
    "empty": lambda data: b"",
    "a number": lambda data: 7,
}
ROWS = (
    ("answers", "items"),
    ("answers", "asked"),
    ("answers", "answer"),
    ("batches", "body"),
    ("uploads", "body"),
    ("files", "filename"),
    ("files", "tenant"),
    ("files", "digest"),
)
# Rows whose content another row of the table gets, as if it were written to a wrong place.
SWAPPED = (("answers", "answer"), ("answers", "items"), ("files", "filename"))


def main() -> int:
    """Try all cases, or some; print how many held and return 0 if all did."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--cases", type=int, default=0, help="only so many, chosen at random")
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    failures, cases = 0, []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        answers_by_path = keep_things(folder)
        files = sorted(path.name for path in (folder / "records" / "files").iterdir())
        for damage_name in DAMAGES:
            cases += [("file", f"files/{file}", damage_name) for file in files]
            cases += [("file", "records.db", damage_name)]
        cases += [
            ("row", f"{table}.{column}", way) for table, column in ROWS for way in ROW_DAMAGES
        ]
        cases += [("bit", "records.db", str(seed)) for seed in range(NUM_BITS)]
        cases += [("swap", f"{table}.{column}", "swapped") for table, column in SWAPPED]
        if options.cases:
            number = min(options.cases, len(cases))
            cases = random.Random(options.seed).sample(cases, number)
        for kind, file_name, damage_name in cases:
            try:
                check_case(folder, answers_by_path, kind, file_name, damage_name)
            except AssertionError as error:
                failures += 1
                print(f"FAILED: {file_name}, {damage_name}: {str(error)[:300]}", flush=True)
    print(f"{len(cases)} cases, {failures} failed")
    return int(bool(failures))


def keep_things(folder: Path) -> dict[str, str]:
    """Fill a records folder; return each path that reads something, and its answer."""
    with (
        closing(Records(folder / "records")) as records,
        live_server(folder, records=records) as server,
    ):
        http = server.http
        post = {"file": ("x.jsonl", CONTENT), "purpose": (None, "batch")}
        file_id = http.post("/v1/files", files=post).json()["id"]
        other = {"file": ("y.txt", b"some text"), "purpose": (None, "user_data")}
        other_id = http.post("/v1/files", files=other).json()["id"]
        about = {"endpoint": "/v1/completions", "completion_window": "24h"}
        batch = http.post("/v1/batches", json={"input_file_id": file_id, **about}).json()
        end_s = time.monotonic() + MAX_START_S
        while batch["status"] not in {"completed", "failed"} and time.monotonic() < end_s:
            time.sleep(0.05)
            batch = http.get(f"/v1/batches/{batch['id']}").json()
        about = {"bytes": 3, "filename": "z", "mime_type": "text/plain", "purpose": "user_data"}
        upload = http.post("/v1/uploads", json=about).json()["id"]
        http.post(f"/v1/uploads/{upload}/parts", files={"data": ("d", b"abc")})
        talk = {"input": "hello", "max_output_tokens": 16, "store": True}
        responses = [http.post("/v1/responses", json=talk).json()["id"] for _ in range(2)]
        talk["previous_response_id"] = responses[0]
        responses.append(http.post("/v1/responses", json=talk).json()["id"])
        messages = [{"type": "message", "role": "user", "content": "hello"}]
        talks = http.post("/v1/conversations", json={"items": messages}).json()["id"]
        chat = {"messages": [{"role": "user", "content": "hello"}], "store": True, "max_tokens": 4}
        chat_id = http.post("/v1/chat/completions", json=chat).json()["id"]
        results = batch.get("output_file_id") or batch["error_file_id"]
        paths = [f"/v1/files/{id_}/content" for id_ in (file_id, other_id, results)]
        paths += [f"/v1/batches/{batch['id']}", "/v1/files", "/v1/batches"]
        paths += [f"/v1/uploads/{upload}", *(f"/v1/responses/{id_}" for id_ in responses)]
        paths += [f"/v1/conversations/{talks}", f"/v1/conversations/{talks}/items"]
        paths += [f"/v1/responses/{responses[2]}/input_items", f"/v1/chat/completions/{chat_id}"]
        time.sleep(0.2)
        return {path: http.get(path).text for path in paths}


def check_case(
    folder: Path, answers_by_path: dict[str, str], kind: str, file_name: str, damage_name: str
) -> None:
    """Damage one thing in a copy of the records, and read all."""
    copy = folder / "copy"
    shutil.rmtree(copy, ignore_errors=True)
    shutil.copytree(folder / "records", copy)
    if kind == "file":
        DAMAGES[damage_name](copy / file_name)
    elif kind == "bit":
        flip_anywhere(copy / file_name, int(damage_name))
    else:
        table, column = file_name.split(".")
        with closing(sqlite3.connect(copy / "records.db")) as db, db:
            damage_row(db, table, column, damage_name)
    try:
        records = Records(copy)
    except RecordsError as error:
        if file_name != "records.db" or str(copy) not in str(error):
            raise AssertionError(f"the server does not start: {error}") from None
        return
    with closing(records), live_server(folder, records=records) as server:
        http = httpx.Client(base_url=server.url, timeout=20, trust_env=False)
        with http:
            check_answers(http, answers_by_path, file_name)


def damage_row(db: sqlite3.Connection, table: str, column: str, damage_name: str) -> None:
    """Damage a column of the first row; or give it that of another row."""
    row_id, value = db.execute(f"SELECT rowid, {column} FROM {table}").fetchone()
    if damage_name == "swapped":
        query = f"SELECT {column} FROM {table} WHERE {column} != ?"
        [other] = db.execute(query, (value,)).fetchone()
    else:
        value = value if isinstance(value, bytes) else str(value).encode()
        other = ROW_DAMAGES[damage_name](value or b"x")
    db.execute(f"UPDATE {table} SET {column} = ? WHERE rowid = ?", (other, row_id))


def check_answers(http: httpx.Client, answers_by_path: dict[str, str], file_name: str) -> None:
    """Check that each answer is that of before, or an error with its reason."""
    num_errors = 0
    for path, before in answers_by_path.items():
        response = http.get(path)
        if response.status_code == 200:
            if path in {"/v1/files", "/v1/batches"}:  # of which a damaged one is left out
                remaining_items = [item for item in response.json()["data"] if item["id"] in before]
                assert all(json.loads(before)["data"].count(item) for item in remaining_items), path
            else:
                assert response.text == before, f"{path} has another answer: {response.text}"
        else:
            num_errors += 1
            assert response.status_code in {404, 500, 503}, f"{path}: {response.status_code}"
            assert response.json()["error"]["message"], path
    # A response may be continued by another, and a conversation's items have a page of their own.
    max_errors = len(answers_by_path) if file_name == "records.db" else 2
    assert num_errors <= max_errors, f"{num_errors} things are gone"


if __name__ == "__main__":
    sys.exit(main())
