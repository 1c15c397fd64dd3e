"""Commands as processes: signals, closed pipes, full disks, and the server."""

from __future__ import annotations

import json
import os
import pty
import signal
import socket
import subprocess
import sys
import time
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import TYPE_CHECKING

import httpx
import pytest

from support.commands import MAIN, SOURCE, started
from support.waiting import wait_for

if TYPE_CHECKING:
    from collections.abc import Callable

    from conftest import Ran

LONG = ("--temperature", "0", "--ignore-eos", "--backend", "reference", "hello")


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_the_answer_with_a_whole_line(endless: str, number: signal.Signals) -> None:
    with started("generate", endless, *LONG) as process:
        assert process.stdout is not None
        first = process.stdout.read(1)
        process.send_signal(number)
        out, err = process.communicate(timeout=120)
    assert process.returncode == 128 + number
    assert (first + out).endswith(b"\n")
    output = b"twostroke: Interrupted.\n" if number == signal.SIGINT else b""
    assert err == output


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_a_batch_that_continues_later(
    tmp_path: Path, endless: str, number: signal.Signals
) -> None:
    body = {"model": "tiny", "prompt": "hello", "max_tokens": 3000, "ignore_eos": True}
    line = {"method": "POST", "url": "/v1/completions", "body": body}
    requests, results = tmp_path / "requests.jsonl", tmp_path / "results.jsonl"
    requests.write_text(
        "\n".join(json.dumps({"custom_id": str(n)} | line) for n in range(200)) + "\n"
    )
    arguments = ("batch", str(requests), "-o", str(results), "--model", endless)
    with started(*arguments, "--max-running", "2", "--backend", "reference") as process:
        assert process.stderr is not None
        wait_for(lambda: results.with_name("results.jsonl.partial").exists())
        time.sleep(1.5)
        process.send_signal(number)
        out, err = process.communicate(timeout=120)
    assert process.returncode == 128 + number
    assert out == b""
    assert b"Traceback" not in err
    assert b"Exception" not in err
    assert not results.exists()


@pytest.mark.parametrize("after_s", [0.1, 0.2, 0.4, 1.5])
def test_an_interrupted_script_gets_no_half_object(endless: str, after_s: float) -> None:
    script = MAIN.replace("\n", "; sys.stderr.write('!'); sys.stderr.flush()\n", 1)
    with started("generate", endless, *LONG, "--json", script=f"import sys; {script}") as process:
        assert process.stderr is not None
        assert process.stderr.read(1) == b"!"  # before that Python itself answers the signal
        time.sleep(after_s)
        process.send_signal(signal.SIGINT)
        try:
            out, err = process.communicate(timeout=8)
        except subprocess.TimeoutExpired:  # Python can lose one while it imports: press again
            process.send_signal(signal.SIGINT)
            out, err = process.communicate(timeout=120)
    assert process.returncode == 130, err
    assert out == b""
    assert b"Traceback" not in err
    assert b"\n" not in err.strip()  # click may begin a line before the sentence


@pytest.mark.parametrize(
    ("where", "sentence"),
    [("main", b""), ("run", b""), ("group.main", b"twostroke: Interrupted.\n")],
)
def test_an_interrupted_definition_ends_with_the_code_of_others(
    tmp_path: Path, where: str, sentence: bytes
) -> None:
    # `python -m` would end by the signal here: it came while source text was run.
    script = f"""
from twostroke.cli import app, main
def interrupted(*given, **options):
    exec("raise KeyboardInterrupt")
app.{where} = interrupted
main()
"""
    (tmp_path / "interrupted.py").write_text(script)
    env = {**os.environ, "PYTHONPATH": f"{SOURCE}{os.pathsep}{tmp_path}"}
    line = (sys.executable, "-m", "interrupted", "models")
    ran = subprocess.run(line, env=env, capture_output=True, timeout=120, check=False)
    assert (ran.returncode, ran.stderr) == (130, sentence)


def test_a_ctrl_c_is_heard_before_anything_is_imported() -> None:
    script = "import sys; import twostroke.cli; print(*{'typing', 'enum', 're'} & {*sys.modules})"
    with started(script=script) as process:
        out, _ = process.communicate(timeout=120)
    assert out.split() == []


def test_a_reader_that_leaves_ends_the_answer_silently(endless: str) -> None:
    with started("generate", endless, *LONG) as process:
        assert process.stdout is not None
        process.stdout.read(1)
        process.stdout.close()
        assert process.wait(120) == 128 + signal.SIGPIPE
        assert process.stderr is not None
        assert process.stderr.read() == b""


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
def test_a_full_disk_is_one_sentence(tiny: str) -> None:
    with Path("/dev/full").open("wb") as full, started("models", stdout=full) as process:
        _, err = process.communicate(timeout=120)
    assert process.returncode == 1
    assert err == b"twostroke: No space left on device.\n"


@pytest.mark.parametrize("closed", ["sys.stdin", "sys.stdout", "sys.stderr"])
def test_streams_that_a_shell_closed_are_missed_by_nobody(tiny: str, closed: str) -> None:
    script = f"import sys; {closed} = None; from twostroke.cli import main; main()"
    with started("generate", tiny, "-p", "a", "--max-tokens", "2", script=script) as process:
        _, err = process.communicate(timeout=120)
    assert process.returncode == 0
    assert b"Traceback" not in err


def test_controls_are_shown_on_a_terminal_and_kept_in_a_pipe(tiny: str) -> None:
    escape = "\x1b[2J"
    tokens = ("generate", tiny, "--raw", "--temperature", "0", "--max-tokens", "40", "-q")
    line = (*tokens, "--ignore-eos", "--seed", "1", escape)
    with started(*line) as process:
        piped, _ = process.communicate(timeout=120)
    master, slave = pty.openpty()
    with started(*line, stdout=slave) as process:
        os.close(slave)
        output = b""
        with suppress(OSError):  # how a pseudo-terminal says that its other end is closed
            while new_bytes := os.read(master, 65536):
                output += new_bytes
    os.close(master)
    controls = {code for code in piped if code < 32 and code not in b"\t\n"}
    assert controls, "the tiny model's answer has none: choose another prompt"
    assert not controls & (set(output) - {0x0D})  # the terminal itself writes \r\n


def test_the_server_answers_and_drains(tiny: str, shared_cache: Path) -> None:
    with started("serve", tiny, "--port", "0", "--name", "mine", "--name", "other") as process:
        assert process.stderr is not None
        output = process.stderr.readline().decode()
        assert "Twostroke serves mine at http://127.0.0.1:" in output
        url = output.split(" at ")[1].split()[0]
        with httpx.Client(base_url=url, trust_env=False, timeout=20) as http:
            assert http.get("/health").status_code == 200
            listed = {entry["id"] for entry in http.get("/v1/models").json()["data"]}
            assert "mine" in listed
            body = {"model": "mine", "prompt": "hello", "max_tokens": 3, "ignore_eos": True}
            answer = http.post("/v1/completions", json=body).json()
            assert answer["usage"]["completion_tokens"] == 3
        process.terminate()
        out, err = process.communicate(timeout=120)
    assert (process.returncode, out) == (0, b"")
    assert err.decode().splitlines()[-1] == "Stopping."
    assert "curl" in err.decode()


def test_a_static_batch_that_does_not_fill_starts_after_its_time(
    tiny: str, shared_cache: Path
) -> None:
    options = ("--policy", "static", "--batch-size", "8", "--max-wait", "0.1")
    with started("serve", tiny, "--port", "0", *options) as process:
        assert process.stderr is not None
        output = process.stderr.readline().decode()
        assert (
            "until 8 of them make a batch (--batch-size), or until the first has waited" in output
        )
        url = output.split(" at ")[1].split()[0]
        body = {"prompt": "hello", "max_tokens": 3}
        answer = httpx.post(f"{url}/v1/completions", json=body, timeout=30, trust_env=False)
        assert answer.status_code == 200


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
def test_a_server_whose_log_is_on_a_full_disk_serves(tiny: str, shared_cache: Path) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    with (
        Path("/dev/full").open("wb") as full,
        started("serve", tiny, "--port", str(port), stderr=full) as process,
        httpx.Client(base_url=f"http://127.0.0.1:{port}", trust_env=False, timeout=20) as http,
    ):
        wait_for(lambda: process.poll() is not None or _answers(http))
        assert http.post("/v1/completions", json={"prompt": "a", "max_tokens": 1}).is_success
        process.terminate()
        assert process.wait(120) == 0


def _answers(http: httpx.Client) -> bool:
    with suppress(httpx.TransportError):
        return http.get("/health").is_success
    return False


def test_a_log_for_programs_is_an_object_a_line(tiny: str, shared_cache: Path) -> None:
    arguments = ("--port", "0", "--log-format", "json", "--objective", "e2e=100")
    with started("serve", tiny, *arguments) as process:
        assert process.stderr is not None
        first = json.loads(process.stderr.readline())
        url = first["message"].split(" at ")[1].split()[0]
        with httpx.Client(base_url=url, trust_env=False, timeout=20) as http:
            http.post("/v1/completions", json={"prompt": "hello", "max_tokens": 3})
            metrics = http.get("/metrics").text
        process.terminate()
        err = process.communicate(timeout=120)[1]
    log_records = [json.loads(line) for line in err.splitlines()]
    assert [record["message"] for record in log_records] == ["request", "Stopping."]
    assert log_records[0]["path"] == "/v1/completions"
    assert 'objective="all",result="met"} 1.0' in metrics


def test_a_server_for_others_asks_for_keys_or_says_that_it_does_not(
    tiny: str, shared_cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "keys").write_text("anna sk-file\n")
    monkeypatch.setenv("TWOSTROKE_API_KEY", "sk-variable")
    arguments = ("--port", "0", "--host", "0.0.0.0", "--api-keys", str(tmp_path / "keys"))
    with started("serve", tiny, *arguments) as process:
        assert process.stderr is not None
        output = process.stderr.readline().decode()
        url = output.split(" at ")[1].split()[0]
        with httpx.Client(base_url=url, trust_env=False, timeout=20) as http:
            assert http.get("/v1/models").status_code == 401
            for key in ("sk-file", "sk-variable"):
                headers = {"authorization": f"Bearer {key}"}
                assert http.get("/v1/models", headers=headers).status_code == 200
        lines = [process.stderr.readline() for _ in range(2)]
        assert any(b"Bearer KEY" in line for line in lines)
    monkeypatch.delenv("TWOSTROKE_API_KEY")
    with started("serve", tiny, *arguments[:4]) as process:
        assert process.stderr is not None
        assert b"demand keys with --api-keys" in process.stderr.readline()


def test_killed_server_keeps_usage_and_learns_what_was_revoked_meanwhile(
    cli: Callable[..., Ran], tiny: str, shared_cache: Path, tmp_path: Path
) -> None:
    records = ("--records", str(tmp_path / "records"))
    key, other = (cli("keys", "add", name, *records).out.strip() for name in ("app", "other"))
    body = {"prompt": "hello", "max_tokens": 2, "ignore_eos": True}

    def send_request(url: str, key: str) -> int:
        headers = {"x-api-key": key}
        response = httpx.post(f"{url}/v1/completions", json=body, headers=headers, trust_env=False)
        return response.status_code

    def num_requests() -> int:
        rows = json.loads(cli("usage", *records, "--json").out)
        return sum(row["requests"] for row in rows)

    command = ("serve", tiny, "--port", "0", *records)
    with started(*command) as process:
        assert process.stderr is not None
        url = process.stderr.readline().decode().split(" at ")[1].split()[0]
        assert [send_request(url, key) for _ in range(4)] == [200] * 4
        wait_for(lambda: num_requests() == 4)
        assert [send_request(url, key) for _ in range(3)] == [200] * 3
        process.kill()
        assert process.wait(120) == -signal.SIGKILL
        assert cli("keys", "revoke", "app", *records).code == 0
    assert 4 <= num_requests() <= 7  # without what was used last
    with started(*command) as process:
        assert process.stderr is not None
        url = process.stderr.readline().decode().split(" at ")[1].split()[0]
        assert (send_request(url, key), send_request(url, other), send_request(url, "")) == (
            401,
            200,
            401,
        )
        process.terminate()
        err = process.communicate(timeout=120)[1].decode()
    assert key not in err
    assert 5 <= num_requests() <= 8


def test_more_clients_than_a_shell_allows_files(tiny: str, shared_cache: Path) -> None:
    few = "import resource as r; r.setrlimit(r.RLIMIT_NOFILE, (64, 4096))"
    command = ("serve", tiny, "--port", "0")
    with started(*command, script=f"{few}\n{MAIN}") as process, ExitStack() as clients:
        assert process.stderr is not None
        url = process.stderr.readline().decode().split(" at ")[1].split()[0]
        for _ in range(100):
            http = clients.enter_context(httpx.Client(base_url=url, trust_env=False, timeout=20))
            assert http.get("/health").status_code == 200  # and its connection stays open


def test_a_port_in_use_is_known_before_the_model_is_loaded(
    cli: Callable[..., Ran], tiny: str
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as used_socket:
        port = str(used_socket.getsockname()[1])
        ran = cli("serve", "/nowhere/model.gguf", "--port", port)  # else the code is 3
    assert ran.code == 7
    assert ran.err == (
        f"twostroke: Port {port} on 127.0.0.1 is already in use: stop its program, "
        "or choose --port.\n"
    )


@pytest.mark.parametrize(
    ("arguments", "code", "sentence"),
    [
        (("--host", "no.such.host.invalid"), 7, "check --host"),
        (("--port", "99999"), 2, "--port must be from 0 to 65535"),
        (("--port", "http"), 2, "'http' is not a valid integer"),
        (("--port", "0", "--drain", "-1"), 2, "--drain must be from 0 to 86400, got -1.0"),
        (("--port", "0", "--drain", "nan"), 2, "--drain must be from 0 to 86400, got nan"),
        (("--port", "0", "--policy", "static", "--batch-size", "300"), 2, "A batch of 300"),
        (("--port", "0", "--batch-size", "4"), 2, "--batch-size has no effect without --policy"),
        (("--port", "0", "--objective", "tttf=1"), 2, "with a name of queue, ttft"),
        (("--port", "0", *["--objective", "e2e=1"] * 2), 2, "--objective is given twice for e2e"),
        (("--port", "0", "--otlp-endpoint", "localhost"), 2, "must be the address of a collector"),
        (("--port", "0", "--api-keys", "/nowhere/keys"), 2, "--api-keys takes the path of a file"),
        (("--port", "0", "--log-format", "xml"), 2, "'xml' is not one of text, json"),
        (("--port", "0", "--log-level", "inf"), 2, "Did you mean 'info'?"),
    ],
)
def test_what_cannot_be_served_is_one_sentence(
    cli: Callable[..., Ran], tiny: str, arguments: tuple[str, ...], code: int, sentence: str
) -> None:
    ran = cli("serve", tiny, *arguments)
    assert ran.code == code
    assert sentence in ran.err
    assert ran.err.count("\n") == 1


@pytest.mark.parametrize("command", [("serve", "tiny"), ("route", "--replica", "http://h")])
@pytest.mark.parametrize("secret", ["sk-hunter2", "c2Vj/hunter2=", "/hunter2", "hunter2" * 40])
def test_a_key_in_place_of_its_file_is_not_shown(
    cli: Callable[..., Ran], tiny: str, command: tuple[str, ...], secret: str
) -> None:
    arguments = (tiny if word == "tiny" else word for word in command)
    ran = cli(*arguments, "--port", "0", "--api-keys", secret)
    assert ran.code == 2
    assert "--api-keys takes the path of a file with keys" in ran.err
    assert "set TWOSTROKE_API_KEY" in ran.err
    assert "hunter2" not in ran.err + ran.out


def test_a_file_of_keys_that_cannot_be_read_is_named(
    cli: Callable[..., Ran], tiny: str, tmp_path: Path
) -> None:
    for path in (tmp_path, tmp_path / "missing.txt"):
        ran = cli("serve", tiny, "--port", "0", "--api-keys", str(path))
        assert ran.code == 2
        assert f"{path} cannot be read" in ran.err


@pytest.mark.parametrize(
    "arguments",
    [
        ("route", "--port", "0", "--replica", "http://user:hunter2@host:8000"),
        ("route", "--port", "0", "--replica", "user:hunter2@host"),
        ("route", "--port", "0", "--discover", "http://user:hunter2@host:8000"),
        ("route", "--port", "0", "--replicas-file", "LIST"),
        ("serve", "MODEL", "--port", "0", "--otlp-endpoint", "ftp://user:hunter2@host:4318"),
        ("serve", "MODEL", "--port", "0", "--otlp-endpoint", "user:hunter2@host:4318"),
        ("serve", "MODEL", "--port", "0", "--page-store", "user:hunter2@host"),
        ("serve", "MODEL", "--port", "0", "--page-store", "redis://user:hunter2@host:x"),
        ("batch", "LIST", "-o", "OUT", "--url", "http://user:hunter2@host:x"),
        ("batch", "LIST", "-o", "OUT", "--url", "http://user:hunter2@127.0.0.1:1"),
        ("plan", "MODEL", "--server", "http://user:hunter2@127.0.0.1:1", "--calibrate"),
        ("pull", "hf:owner/repo"),
    ],
)
def test_passwords_of_urls_are_not_shown(
    cli: Callable[..., Ran],
    tiny: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    arguments: tuple[str, ...],
) -> None:
    monkeypatch.setenv("HF_ENDPOINT", "http://user:hunter2@127.0.0.1:1")
    monkeypatch.setenv("TWOSTROKE_STORE_KEY", "0" * 64)
    listing = tmp_path / "list"
    if arguments[0] == "batch":
        fields = {"custom_id": "a", "method": "POST", "url": "/v1/completions", "body": {}}
        listing.write_text(json.dumps(fields))
    else:
        listing.write_text("http://user:hunter2@host")
    words = {"MODEL": tiny, "LIST": str(listing), "OUT": str(tmp_path / "out.jsonl")}
    ran = cli(*(words.get(word, word) for word in arguments))
    assert ran.code != 0
    assert ran.err
    assert "hunter2" not in ran.err + ran.out


def test_a_port_is_free_again_after_a_model_that_cannot_be_loaded(
    cli: Callable[..., Ran], tmp_path: Path
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    (tmp_path / "bad.gguf").write_bytes(b"nothing")
    assert cli("serve", str(tmp_path / "bad.gguf"), "--port", str(port)).code == 4
    with socket.socket() as free_socket:
        free_socket.bind(("127.0.0.1", port))


@pytest.mark.model
def test_peak_memory_stays_near_the_model_s(smollm2_path: Path) -> None:
    script = (
        "import re, sys; from twostroke.cli.app import run\n"
        "assert run(sys.argv[1:]) == 0\n"
        "status = open('/proc/self/status').read()\n"
        "print(int(re.search(r'VmHWM:\\s+(\\d+)', status)[1]) * 1024, file=sys.stderr)"
    )
    cache_bytes = 24_000_000
    line = ("generate", str(smollm2_path), "-p", "Hello", "--max-tokens", "20", "--json")
    size = ("--context-length", "1024", "--kv-memory", str(cache_bytes))
    for _ in range(2):  # the first one also measures the machine, if no test before it has
        with started(*line, *size, script=script) as process:
            out, err = process.communicate(timeout=120)
    assert json.loads(out)["usage"]["completion_tokens"] > 0
    # A second copy of the weights would double it. How much of the mapped libraries counts depends
    # on the system's page cache: 1.57 to 1.68 times were seen.
    assert int(err) < 1.85 * smollm2_path.stat().st_size + cache_bytes


def test_ctrl_c_while_the_last_one_is_answered_is_the_same_one() -> None:
    script = """
import signal
from twostroke.cli import app, main
signal.signal(signal.SIGINT, signal.default_int_handler)  # in the background a shell ignores it
def run(arguments):
    signal.raise_signal(signal.SIGINT)  # in this thread: not when the process has ended
app.run = run
main()
"""
    with started(script=script) as process:
        _, err = process.communicate(timeout=120)
    assert (process.returncode, err) == (130, b"")
