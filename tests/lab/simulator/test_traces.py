"""Traces of requests: formats that are read, errors that name the line, published traces."""

from __future__ import annotations

import io
import json
import re
import urllib.request
from hashlib import sha256
from itertools import pairwise
from pathlib import Path
from urllib.error import URLError

import pytest
from msgspec.structs import replace

from twostroke.core.errors import DownloadError, UsageError
from twostroke.core.recorded_trace import ServerSettings
from twostroke.lab.simulator import (
    PUBLISHED_TRACES,
    RequestArrival,
    SyntheticWorkload,
    read_trace,
    recorded_traces,
)
from twostroke.lab.simulator import traces as module
from twostroke.lab.simulator.recorded_traces import read_recorded_trace

AZURE = """TIMESTAMP,ContextTokens,GeneratedTokens
2023-11-16 18:17:03.9799600,4808,10
2023-11-16 18:17:04.4799600,3180,8
"""
MOONCAKE = (
    '{"timestamp": 27482, "input_length": 900, "output_length": 52, "hash_ids": [46, 47]}\n'
    '\n{"timestamp": 27000, "input_length": 600, "output_length": 2, "hash_ids": [46, 5]}\n'
)


def write(folder, name, text):
    path = folder / name
    path.write_text(text)
    return str(path)


def sizes_of(load):
    return [(arrival.at_s, arrival.num_prompt, arrival.num_output) for arrival in load.arrivals]


def test_published_forms(tmp_path):
    load = read_trace(write(tmp_path, "azure.csv", AZURE))
    assert sizes_of(load) == [
        (0.0, 4808, 10), (pytest.approx(0.5), 3180, 8),
    ]  # fmt: skip
    load = read_trace(write(tmp_path, "mooncake.jsonl", MOONCAKE))
    assert load.arrivals == (
        RequestArrival(0.0, 600, 2, (46, 5), 512),
        RequestArrival(pytest.approx(0.482), 900, 52, (46, 47), 512),
    )
    first, second = (arrival.tokens(n, 49152) for n, arrival in enumerate(load.arrivals))
    assert (len(first), len(second)) == (600, 900)
    assert first[:512] == second[:512]
    assert sum(a == b for a, b in zip(first[512:], second[512:], strict=False)) < 5
    assert max(first) < 49152
    half = load.changed(speed=2, scale=0.5)
    assert half.arrivals[1].at_s == pytest.approx(0.241)
    shared = [arrival.tokens(n, 49152) for n, arrival in enumerate(half.arrivals)]
    assert shared[0][:256] == shared[1][:256]
    assert shared[0][256:300] != shared[1][256:300]


def test_own_columns(tmp_path):
    text = "output_tokens, arrival_s,prompt_tokens\n5,1.5,10\n6,0.5,20\n"
    load = read_trace(write(tmp_path, "own.csv", text))
    assert sizes_of(load) == [
        (0.0, 20, 6), (1.0, 10, 5),
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("a.csv", "time,prompt\n", "line 1: its first line must name a column arrival_s or"),
        ("a.csv", f"arrival_s,{'x' * 200_000}\n", "a.csv, line 1: field larger than"),
        ("a.jsonl", MOONCAKE.replace("900", "true"), "line 1: input_length must be a whole number"),
        ("a.csv", AZURE + "2023-11-16 18:17:05,0,3\n", "line 4: contexttokens must be a whole"),
        ("a.csv", AZURE + "yesterday,7,3\n", "line 4: timestamp must be seconds or a date"),
        ("a.csv", AZURE + "2023-11-16 18:17:05,7\n", "line 4: output_tokens or .* is missing"),
        ("a.csv", AZURE.splitlines()[0], "a.csv has no requests"),
        ("a.csv", "", "a.csv has no requests"),
        ("a.csv", "\n  \n", "a.csv has no requests"),
        ("a.jsonl", "", "a.jsonl has no requests"),
        ("a.jsonl", "\n  \n", "a.jsonl has no requests"),
        ("a.json", "", "a.json has no requests"),
        ("a.json", "\n  \n", "a.json has no requests"),
        ("a.jsonl", MOONCAKE + "{]\n", "line 4: it is not a JSON object"),
        ("a.jsonl", MOONCAKE.replace("52", "1.5"), "line 1: output_length must be a whole number"),
        ("a.jsonl", MOONCAKE.replace("[46, 5]", "[46, -5]"), "line 3: hash_ids must be a list"),
        ("a.jsonl", MOONCAKE.replace("900", "NaN"), "line 1: input_length must be a whole number"),
        ("a.json", '{"requests": [{}]}', "a.json is not a recorded run"),
        ("a.txt", "", "a.txt is not a trace that --record-trace has recorded"),
    ],
)  # fmt: skip
def test_odd_lines_are_named(tmp_path, name, text, message):
    with pytest.raises(UsageError, match=message):
        read_trace(write(tmp_path, name, text))


def test_wrong_names():
    with pytest.raises(UsageError, match="Did you mean 'azure-code'"):
        read_trace("azur-code")
    with pytest.raises(UsageError, match=r"nowhere.csv cannot be read: No such file"):
        read_trace("nowhere.csv")


def test_a_published_trace_is_fetched_once_and_checked(tmp_path, monkeypatch):
    monkeypatch.setenv("TWOSTROKE_CACHE", str(tmp_path))
    urls = []

    def answer(url, timeout):
        urls.append(url)
        return io.BytesIO(AZURE.encode())

    monkeypatch.setattr(urllib.request, "urlopen", answer)
    with pytest.raises(DownloadError, match="is not the published file: delete it"):
        read_trace("azure-conv")
    published = replace(PUBLISHED_TRACES["azure-conv"], sha256=sha256(AZURE.encode()).hexdigest())
    monkeypatch.setitem(module.PUBLISHED_TRACES, "azure-conv", published)
    assert len(read_trace("azure-conv").arrivals) == 2
    assert read_trace("azure-conv").name == "azure-conv"
    assert urls == [published.url], "the file in the cache is used"


def test_an_unreachable_trace_says_what_to_do(tmp_path, monkeypatch):
    monkeypatch.setenv("TWOSTROKE_CACHE", str(tmp_path))

    def refuse(url, timeout):
        raise URLError(OSError("Network is unreachable"))

    monkeypatch.setattr(urllib.request, "urlopen", refuse)
    with pytest.raises(DownloadError, match=r"unreachable. Fetch https://raw.*conversation_trace"):
        read_trace("mooncake-conversation")
    assert not list((tmp_path / "traces").iterdir())


def test_synthetic_loads():
    for arrivals, variation in (("poisson", 1.0), ("constant", 0.0), ("gamma", 2.0)):
        synthetic = SyntheticWorkload(
            4.0, arrivals, burstiness=2.0, count=20_000, spread=0.5, shared=100
        )
        load = synthetic.load(seed=1)
        assert load == synthetic.load(seed=1)
        times = [arrival.at_s for arrival in load.arrivals]
        gaps = [later - before for before, later in pairwise(times)]
        mean = sum(gaps) / len(gaps)
        deviation = (sum((gap - mean) ** 2 for gap in gaps) / len(gaps)) ** 0.5
        assert load.rate == pytest.approx(4.0, rel=0.05)
        assert deviation / mean == pytest.approx(variation, abs=0.1)
        prompts = [arrival.num_prompt for arrival in load.arrivals]
        assert sum(prompts) / len(prompts) == pytest.approx(1024, rel=0.03)
    first, second = (arrival.tokens(n, 1000) for n, arrival in enumerate(load.arrivals[:2]))
    assert first[:100] == second[:100]
    assert first[100:150] != second[100:150]


@pytest.mark.parametrize(
    ("changes", "field"),
    [({"rate": 0.0}, "rate"), ({"count": 0}, "count"), ({"prompt": 0}, "prompt"),
     ({"spread": -1.0}, "spread"), ({"shared": 1024}, "shared"),
     ({"arrivals": "gama"}, "arrivals")],
)  # fmt: skip
def test_loads_out_of_range(changes, field):
    with pytest.raises(UsageError, match=f"{field} must be"):
        SyntheticWorkload(**{"rate": 1.0, **changes})


def test_a_recorded_run_can_be_repeated(tmp_path):
    requests = [
        {"timings": {"arrival_s": at, "started_s": 0, "first_token_s": 3, "last_token_s": 4},
         "sent_s": at, "num_prompt": 7, "num_output": 9} for at in (5.0, 2.0)
    ]  # fmt: skip
    load = read_trace(write(tmp_path, "run.json", json.dumps({"requests": requests})))
    assert load.arrivals == (RequestArrival(0.0, 7, 9), RequestArrival(3.0, 7, 9))
    requests[1]["num_prompt"] = -5
    path = write(tmp_path, "run.json", json.dumps({"requests": requests}))
    with pytest.raises(UsageError, match=r"run.json, request 2: num_prompt must be a whole number"):
        read_trace(path)


HEADER = '{"recorded_trace": 1, "block_tokens": 16}'


def recorded_line(at_s, num_prompt, shared=None):
    line = {"arrival_s": at_s, "prompt_tokens": num_prompt, "output_tokens": 5}
    return json.dumps(line | ({"shared": shared} if shared else {}))


def test_recorded_prompts_share_what_they_shared(tmp_path):
    lines = [
        HEADER,
        recorded_line(10.0, 100),
        recorded_line(12.0, 90, [1, 64]),
        recorded_line(11.0, 200, [1, 80]),
        recorded_line(13.0, 50),
    ]
    load = read_trace(write(tmp_path, "recorded.jsonl", "\n".join(lines)))
    assert [arrival.at_s for arrival in load.arrivals] == [0.0, 1.0, 2.0, 3.0]
    first, third, second, last = (
        arrival.tokens(number, 10**9) for number, arrival in enumerate(load.arrivals)
    )
    assert first[:64] == second[:64] == third[:64]
    assert second[:80] == third[:80]
    assert first[64:80] != second[64:80]
    assert second[80:90] != third[80:90]
    assert last[:16] != first[:16]


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        (recorded_line(1.0, 40, [2, 32]), "not in the file"),
        (recorded_line(1.0, 40, [1, 48]), "Line 3: shared must be two whole numbers"),
        (recorded_line(1.0, 40, [1]), "Line 3: .*length"),
        (recorded_line("soon", 40), "Line 3: .*arrival_s"),
        (recorded_line(1.0, 0), "Line 3: prompt_tokens must be from 1"),
        (recorded_line(1.0, 40)[:30], "1 line is left out. Line 3: it is cut off"),
    ],
)
def test_sound_lines_of_a_damaged_trace_are_kept(tmp_path, line, reason):
    lines = [HEADER, recorded_line(1.0, 40), line]
    load = read_trace(write(tmp_path, "recorded.jsonl", "\n".join(lines)))
    assert load.arrivals[0] == RequestArrival(0.0, 40, 5)
    (note,) = load.notes
    assert re.search(reason, note)


def test_lines_after_a_damaged_line_share_what_they_shared(tmp_path):
    lines = [HEADER, recorded_line(1.0, 40), "{", recorded_line(2.0, 40, [2, 32])]
    load = read_trace(write(tmp_path, "recorded.jsonl", "\n".join(lines) + "\n"))
    first, second = load.arrivals
    assert first.blocks == second.blocks
    assert load.changed(speed=2).first(1).notes == load.notes


@pytest.mark.parametrize("header", [HEADER.replace("1,", "2,"), HEADER.replace("16", "32")])
def test_requests_of_another_version_are_left_out(tmp_path, header):
    lines = [header, recorded_line(1.0, 40)]
    with pytest.raises(UsageError, match=r"another version of Twostroke recorded 1 request "):
        read_trace(write(tmp_path, "recorded.jsonl", "\n".join(lines)))
    lines += [HEADER, recorded_line(2.0, 50)]
    load = read_trace(write(tmp_path, "recorded.jsonl", "\n".join(lines)))
    assert load.arrivals == (RequestArrival(0.0, 50, 5),)
    assert "another version" in load.notes[0]


SETTINGS = '"settings": {"token_budget": 64, "max_running": 8}'


@pytest.mark.parametrize("block_bytes", [16, 100, 1 << 20])
def test_the_newest_lines_of_a_recorded_trace_are_read_as_in_the_whole_file(
    tmp_path, monkeypatch, block_bytes
):
    monkeypatch.setattr(recorded_traces, "_BLOCK_BYTES", block_bytes)
    first, second = HEADER, HEADER[:-1] + f', {SETTINGS}, "continues": true}}'
    lines = [first, *(recorded_line(n, 40) for n in range(5)), second]
    lines += [recorded_line(n, 100, [1, 16 * (n - 5)] if n > 6 else [2, 16]) for n in range(6, 12)]
    path = Path(write(tmp_path, "recorded.jsonl", "\n".join(lines) + "\n"))
    for count in range(1, 16):
        part = read_recorded_trace(path, newest_lines=count)
        whole = read_recorded_trace(path)
        num_read = min(11, count if count < 7 else count - 1)  # the header is a line, too
        assert part.requests[-1] == whole.requests[-1] or num_read == 1
        assert len(part.requests) == num_read
        assert part.settings == whole.settings == ServerSettings(64, 8)
        assert part.num_with_settings == min(6, num_read)
        assert bool(part.notes) is (count < 13)
        if part.notes:
            assert part.notes[0] == (f"recorded.jsonl: only its newest {count} lines are read.")


def test_more_than_a_million_requests_are_refused_unless_the_newest_are_asked_for(
    tmp_path, monkeypatch
):
    monkeypatch.setattr(recorded_traces, "MAX_REQUESTS", 20)
    lines = [HEADER, *(recorded_line(n, 40) for n in range(50))]
    path = write(tmp_path, "recorded.jsonl", "\n".join(lines))
    with pytest.raises(UsageError, match="more than 20 requests"):
        read_trace(path)
    load = read_trace(path, newest_lines=10)
    assert [arrival.at_s for arrival in load.arrivals] == list(range(10))
    assert load.notes == ("recorded.jsonl: only its newest 10 lines are read.",)


@pytest.mark.parametrize("name", ["monday", "trace.log", "trace.csv", "trace.json"])
def test_a_recorded_trace_may_have_any_name(tmp_path, name):
    lines = [HEADER, recorded_line(1.0, 40), recorded_line(2.0, 40, [1, 32])]
    load = read_trace(write(tmp_path, name, "\n".join(lines)))
    assert load.arrivals[0].blocks == load.arrivals[1].blocks
    cut = "\n".join([lines[1][5:], lines[2]])
    assert len(read_trace(write(tmp_path, name, cut)).arrivals) == 1


def test_a_file_of_another_kind_needs_its_suffix(tmp_path):
    with pytest.raises(UsageError, match=r"notes\.txt is not a trace .* \.csv, \.jsonl, \.json"):
        read_trace(write(tmp_path, "notes.txt", "Buy milk.\n"))


@pytest.mark.parametrize("jump_s", [-90_000.0, 1e9])
def test_arrivals_continue_where_the_clock_jumps(tmp_path, jump_s):
    lines = [HEADER]
    for number in range(6):
        at_s = 1e6 + number + (jump_s if number >= 3 else 0.0)
        line = json.loads(recorded_line(at_s, 40)) | {"e2e_s": 0.5}
        lines.append(json.dumps(line))
    load = read_trace(write(tmp_path, "recorded.jsonl", "\n".join(lines)))
    times_s = [arrival.at_s for arrival in load.arrivals]
    assert times_s == pytest.approx([0, 1, 2, *(t + times_s[3] for t in (0, 1, 2))])
    assert 2 <= times_s[3] <= 3
    assert "the clock jumps 1 time;" in load.notes[0]


def test_a_recorded_trace_without_requests_is_empty(tmp_path):
    with pytest.raises(UsageError, match="has no requests"):
        read_trace(write(tmp_path, "recorded.jsonl", HEADER))
