"""`twostroke batch`: a file of requests, run in this process or by a server."""

from __future__ import annotations

import json
import re
import signal
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import TYPE_CHECKING, Any, ClassVar

import pytest

from support.commands import started
from twostroke.server.batch.offline import ResultFile

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from conftest import Ran

    Cli = Callable[..., Ran]

URL = "/v1/completions"
SMALL = ("--kv-memory", "4MB")


def line(id_: object, **fields: Any) -> dict[str, Any]:
    body = {"prompt": "hello", "max_tokens": 2, "model": "any", **fields}
    return {"custom_id": id_, "method": "POST", "url": URL, "body": body}


def write(path: Path, *lines: object) -> str:
    path.write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    return str(path)


def ids(path: Path) -> list[str]:
    return [json.loads(line)["custom_id"] for line in path.read_text().splitlines()]


def test_results_are_in_the_order_of_the_input(cli: Cli, tiny: str, tmp_path: Path) -> None:
    names = [f"n{i}" for i in range(20)]
    lines = [line(id_, max_tokens=1 + 19 % (i + 1)) for i, id_ in enumerate(names)]
    input_path = write(tmp_path / "in.jsonl", *lines, line("bad", temperature=-1))
    out = tmp_path / "out.jsonl"
    ran = cli("batch", input_path, "-o", str(out), "--model", tiny, *SMALL, "-q")
    errors = tmp_path / "out.errors.jsonl"
    assert (ran.code, ran.out) == (1, "")
    assert ran.err.splitlines()[-1] == f"1 of 21 lines failed: see {errors}."
    assert ids(out) == names
    assert ids(errors) == ["bad"]
    body = json.loads(out.read_text().splitlines()[0])["response"]["body"]
    assert body["choices"][0]["finish_reason"]
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "in.jsonl",
        "out.errors.jsonl",
        "out.jsonl",
    ]
    ran = cli("batch", input_path, "-o", str(out), "--model", tiny, *SMALL)
    assert (ran.code, "exists already" in ran.err) == (2, True)


def test_second_run_does_not_repeat_finished_lines(cli: Cli, tiny: str, tmp_path: Path) -> None:
    input_path = write(tmp_path / "in.jsonl", *map(line, "abc"))
    out, partial = tmp_path / "out.jsonl", tmp_path / "out.jsonl.partial"
    earlier_result = {"custom_id": "b", "response": "of an earlier run"}
    partial.write_text(json.dumps(earlier_result) + '\n{"custom_id": "c", "resp')
    ran = cli("batch", input_path, "-o", str(out), "--model", tiny, *SMALL)
    assert ran.code == 0
    assert "2 lines in" in ran.err
    assert "; 1 had results from an earlier run" in ran.err
    assert ids(out) == ["a", "b", "c"]
    assert json.loads(out.read_text().splitlines()[1]) == earlier_result
    assert not partial.exists()


def test_a_run_cut_after_its_errors_were_named_goes_on(cli: Cli, tiny: str, tmp_path: Path) -> None:
    input_path = write(tmp_path / "in.jsonl", line("a"), line("bad", temperature=-1))
    out, errors = tmp_path / "out.jsonl", tmp_path / "out.errors.jsonl"
    (tmp_path / "out.jsonl.partial").write_text(json.dumps({"custom_id": "a"}) + "\n")
    errors.write_text('{"custom_id": "bad", "response": "of an earlier run"}\n')
    ran = cli("batch", input_path, "-o", str(out), "--model", tiny, *SMALL, "--errors", str(errors))
    assert (ran.code, "exists already" in ran.err) == (2, True)  # a file that the user chose
    ran = cli("batch", input_path, "-o", str(out), "--model", tiny, *SMALL)
    assert ran.code == 1
    assert (ids(out), ids(errors)) == (["a"], ["bad"])
    assert "earlier" not in errors.read_text()


def test_a_run_without_results_leaves_no_file(cli: Cli, tmp_path: Path) -> None:
    input_path = write(tmp_path / "in.jsonl", line("a"))
    assert cli(
        "batch", input_path, "-o", str(tmp_path / "out.jsonl"), "--model", "nowhere.gguf"
    ).code
    assert [path.name for path in tmp_path.iterdir()] == ["in.jsonl"]


def test_two_writers_of_one_file_are_refused(cli: Cli, tiny: str, tmp_path: Path) -> None:
    input_path, out = write(tmp_path / "in.jsonl", *map(line, "ab")), tmp_path / "out.jsonl"
    earlier_line = json.dumps({"custom_id": "a"}) + "\n"
    (tmp_path / "out.jsonl.partial").write_text(earlier_line)
    words = ("batch", input_path, "-o", str(out), "--model", tiny, *SMALL)
    with ResultFile(out, resumes=True):
        ran = cli(*words)
    assert (ran.code, "is being written" in ran.err) == (2, True)
    ran = cli(*words, "--errors", str(out))
    assert (ran.code, "is being written" in ran.err) == (2, True)
    assert (tmp_path / "out.jsonl.partial").read_text() == earlier_line


def test_interrupted_run_says_how_to_go_on(cli: Cli, endless: str, tmp_path: Path) -> None:
    lines = [line("a"), line("b"), line("long", max_tokens=100_000, ignore_eos=True)]
    input_path, out = write(tmp_path / "in.jsonl", *lines), tmp_path / "out.jsonl"
    partial = tmp_path / "out.jsonl.partial"
    with started("batch", input_path, "-o", str(out), "--model", endless, "-q") as process:
        deadline = time.monotonic() + 30
        while not partial.exists() or partial.read_bytes().count(b"\n") < 2:
            assert time.monotonic() < deadline
            time.sleep(0.05)
        process.send_signal(signal.SIGINT)
        _, err = process.communicate(timeout=120)
    assert process.returncode == 130
    output = f"2 of 3 lines have results in {partial}; the same command runs the rest."
    assert err.decode() == f"twostroke: {output}\n"
    assert sorted(ids(partial)) == ["a", "b"]
    assert not out.exists()
    input_path = write(tmp_path / "in.jsonl", line("a"), line("b"), line("long"))
    assert cli("batch", input_path, "-o", str(out), "--model", endless).code == 0
    assert ids(out) == ["a", "b", "long"]


@pytest.mark.parametrize(
    ("lines", "sentence"),
    [
        ((), "has no request: each line must be one"),
        ((line("a"), line("a"), line(7)), "has 2 wrong lines; none was run."),
        ((line("a", stream=True),), "has a wrong line; none was run."),
        (({**line("a"), "url": "/v1/messages"},), "'url' must be one of /v1/chat/completions"),
    ],
)
def test_wrong_input_is_refused_before_the_model_is_loaded(
    cli: Cli, tmp_path: Path, lines: tuple[object, ...], sentence: str
) -> None:
    input_path = write(tmp_path / "in.jsonl", *lines)
    ran = cli(
        "batch", input_path, "-o", str(tmp_path / "out.jsonl"), "--model", "/nowhere/model.gguf"
    )
    assert ran.code == 2
    assert sentence in ran.err
    assert len(list(tmp_path.iterdir())) == 1


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ((), "Give either --model"),
        (("--model", "m", "--url", "http://x"), "Give either --model"),
        (("--model", "m", "--concurrency", "3"), "--concurrency is for --url"),
        (("--url", "ftp://x"), "--url must be like http://127.0.0.1:8000"),
        (("--url", "http://127.0.0.1:1"), "cannot be reached"),
    ],
)
def test_wrong_options_are_one_sentence(
    cli: Cli,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    options: tuple[str, ...],
    sentence: str,
) -> None:
    monkeypatch.setattr("twostroke.server.batch.remote._MAX_TRIES", 2)
    input_path = write(tmp_path / "in.jsonl", line("a"))
    ran = cli("batch", input_path, "-o", str(tmp_path / "out.jsonl"), *options)
    assert ran.code != 0
    assert sentence in ran.err
    assert ran.err.count("\n") == 1


def test_line_that_changed_after_its_answer_is_refused(
    cli: Cli, tmp_path: Path, busy: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("twostroke.server.batch.remote._MAX_PAUSE_S", 0.01)
    out, partial = tmp_path / "out.jsonl", tmp_path / "out.jsonl.partial"
    input_path = write(tmp_path / "in.jsonl", line("a"), line("b"))
    assert cli("batch", input_path, "-o", str(out), "--url", busy, "-q").code == 0
    first, second = out.read_text().splitlines(keepends=True)
    assert list(json.loads(first)) == ["id", "custom_id", "response", "error"]
    assert re.fullmatch("batch_req_[0-9a-f]{40}", json.loads(first)["id"])
    out.unlink()
    words = ("-o", str(out), "--url", busy, "-q")
    for cut in range(len(first), len(first + second)):  # of a line that was cut nothing stays
        partial.write_text((first + second)[:cut])
        with ResultFile(out, resumes=True) as results:
            assert list(results.ids) == ["a"]
    for changed, other, message in (
        (line("a", prompt="other"), words, "The line 'a' has"),
        (line("a"), ("-o", str(out), "--model", "other.gguf"), "--model has"),
    ):
        ran = cli("batch", write(tmp_path / "in.jsonl", changed, line("b")), *other)
        advice = f"changed since {partial} was started: choose another output, or remove it."
        assert (ran.code, ran.err) == (2, f"twostroke: {message} {advice}\n")
        assert partial.read_text() == first
    input_path = write(tmp_path / "in.jsonl", line("a"), line("b", prompt="other"))
    ran = cli("batch", input_path, *words[:-1])
    assert (ran.code, ran.err[:10]) == (0, "1 line in ")
    assert out.read_text().startswith(first)


def test_interrupt_while_the_model_is_loaded_counts_earlier_results(
    cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def load(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("twostroke.cli.batch.open_engine", load)
    input_path, partial = write(tmp_path / "in.jsonl", line("a"), line("b")), tmp_path / "o.partial"
    partial.write_text(json.dumps({"custom_id": "a"}) + "\n")
    ran = cli("batch", input_path, "-o", str(tmp_path / "o"), "--model", "any")
    assert f"1 of 2 lines has results in {partial}; the same" in ran.err


def test_missing_folder_of_the_output_is_named(cli: Cli, tmp_path: Path) -> None:
    input_path = write(tmp_path / "in.jsonl", line("a"))
    ran = cli(
        "batch", input_path, "-o", str(tmp_path / "no" / "out"), "--url", "http://127.0.0.1:1"
    )
    assert (ran.code, ran.err) == (2, f"twostroke: There is no folder {tmp_path / 'no'}.\n")


def test_results_of_another_input_are_refused(cli: Cli, tmp_path: Path) -> None:
    input_path = write(tmp_path / "in.jsonl", line("a"))
    out, partial = tmp_path / "out.jsonl", tmp_path / "out.jsonl.partial"
    for text, message in (
        ('{"custom_id": "other"}\n', "has a result of 'other'"),
        ("my notes\n", "is not a file of results"),
    ):
        partial.write_text(text)
        ran = cli("batch", input_path, "-o", str(out), "--url", "http://127.0.0.1:1")
        assert ran.code == 2
        assert message in ran.err
        assert partial.read_text() == text


class _Busy(BaseHTTPRequestHandler):
    """A server that refuses each request once.

    It answers as a busy server, as a proxy that has no server, or closes the connection.
    """

    protocol_version = "HTTP/1.1"
    seen: ClassVar[dict[str, list[float]]] = {}
    keys: ClassVar[set[str | None]] = set()
    num_running = most_running = 0
    lock = threading.Lock()

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["content-length"])))
        cls = type(self)
        with cls.lock:
            cls.num_running += 1
            cls.most_running = max(cls.most_running, cls.num_running)
            cls.keys.add(self.headers["authorization"])
            times = cls.seen.setdefault(body["prompt"], [])
            times.append(time.monotonic())
        time.sleep(0.02)
        with cls.lock:
            cls.num_running -= 1
        if len(times) == 1 and body["prompt"] == "cut":
            self.close_connection = True
            self.connection.close()
            return
        data = b'{"usage": {"completion_tokens": 3}}'
        status = {"bad": 502, "slow": 504}.get(body["prompt"], 429)
        self.send_response(status if len(times) == 1 else 200)
        self.send_header("retry-after", "1")
        self.send_header("content-length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *_: object) -> None: ...


@pytest.fixture
def busy() -> Iterator[str]:
    """Yield the address of a busy server."""
    _Busy.keys.clear()
    _Busy.seen.clear()
    server = ThreadingHTTPServer(("127.0.0.1", 0), _Busy)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}/v1/"
    server.shutdown()
    server.server_close()


def test_server_says_when_to_ask_again(
    cli: Cli, tmp_path: Path, busy: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TWOSTROKE_API_KEY", "secret")
    prompts = [*map(str, range(12)), "bad", "slow", "cut"]
    input_path = write(tmp_path / "in.jsonl", *(line(prompt, prompt=prompt) for prompt in prompts))
    out = tmp_path / "out.jsonl"
    ran = cli("batch", input_path, "-o", str(out), "--url", busy, "--concurrency", "4")
    assert ran.code == 0, ran.err
    assert "15 lines in" in ran.err
    assert "45 tokens" in ran.err
    assert ids(out) == prompts
    assert _Busy.most_running <= 4
    assert _Busy.keys == {"Bearer secret"}
    for prompt, times in _Busy.seen.items():
        assert len(times) == 2
        assert times[1] - times[0] >= (1 if prompt != "cut" else 0.2)


class _Odd(BaseHTTPRequestHandler):
    """A server that answers as proxies, other servers and web sites do."""

    ANSWERS: ClassVar = {
        "gone": (502, b"<html></html>"),
        "proxy": (413, b"<html>\n<h1>Too large</h1>\n</html>"),
        "pretty": (200, '{\n  "usage": "un\u2028known"\n}'.encode()),
        "key": (401, b'{"error": {"message": "no"}}'),
        "page": (200, b"<html></html>"),
    }

    def do_POST(self) -> None:
        prompt = json.loads(self.rfile.read(int(self.headers["content-length"])))["prompt"]
        status, data = self.ANSWERS[prompt]
        self.send_response(status)
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *_: object) -> None: ...


@pytest.fixture
def odd() -> Iterator[str]:
    """Yield the address of an odd server."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), _Odd)
    server.handle_error = lambda *_: None  # type: ignore[method-assign]  # clients leave
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    server.server_close()


def test_what_a_proxy_says_is_one_line(cli: Cli, tmp_path: Path, odd: str) -> None:
    input_path = write(
        tmp_path / "in.jsonl", *(line(prompt, prompt=prompt) for prompt in ("proxy", "pretty"))
    )
    out, errors = tmp_path / "out.jsonl", tmp_path / "out.errors.jsonl"
    ran = cli("batch", input_path, "-o", str(out), "--url", odd, "-q")
    assert ran.code == 1
    assert (ids(out), ids(errors)) == (["pretty"], ["proxy"])
    assert len(out.read_text().splitlines()) == 1
    output = json.loads(errors.read_text())["response"]
    assert output["status_code"] == 413
    assert "Too large" in output["body"]["error"]["message"]


def test_proxy_without_a_server_is_asked_ten_times(
    cli: Cli, tmp_path: Path, odd: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("twostroke.server.batch.remote._MAX_PAUSE_S", 0.01)
    input_path = write(tmp_path / "in.jsonl", line("gone", prompt="gone"))
    ran = cli("batch", input_path, "-o", str(tmp_path / "out.jsonl"), "--url", odd, "-q")
    assert ran.code == 1
    assert ids(tmp_path / "out.errors.jsonl") == ["gone"]


@pytest.mark.parametrize(
    ("prompt", "sentence"), [("key", "refuses the key"), ("page", "no server of")]
)
def test_server_that_answers_no_line_ends_the_run(
    cli: Cli, tmp_path: Path, odd: str, prompt: str, sentence: str
) -> None:
    input_path = write(
        tmp_path / "in.jsonl", *(line(f"{index}", prompt=prompt) for index in range(100))
    )
    ran = cli("batch", input_path, "-o", str(tmp_path / "out.jsonl"), "--url", odd, "-q")
    assert (ran.code, ran.err.count("\n")) == (2, 1)
    assert sentence in ran.err


def test_line_waits_as_long_as_the_queue_is_full(
    cli: Cli, tiny: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from twostroke.server.http import internal_requests as inside

    answer, number = inside.post, [0]

    async def post(*args: Any) -> inside.InternalResponse:
        number[0] += 1
        return inside.InternalResponse(429, {}, b"{}") if number[0] < 3000 else await answer(*args)

    monkeypatch.setattr(inside, "post", post)
    monkeypatch.setattr("twostroke.cli.batch._RETRY_INTERVAL_S", 0)
    input_path = write(tmp_path / "in.jsonl", line("a"))
    ran = cli("batch", input_path, "-o", str(tmp_path / "o"), "--model", tiny, *SMALL, "-q")
    assert ran.code == 0, ran.err
