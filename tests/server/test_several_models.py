"""Several models in one server, with real processes: loads, swaps, waits and failures."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING

import httpx
import pytest

from support.several_models import ModelServer, serving, write_models
from support.waiting import wait_for
from twostroke.engine.kv_offload.folder import read_folder

if TYPE_CHECKING:
    from collections.abc import Iterator


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    return write_models(tmp_path_factory.mktemp("models"))


@pytest.fixture(scope="module")
def server(models: list[str], tmp_path_factory: pytest.TempPathFactory) -> Iterator[ModelServer]:
    with serving(tmp_path_factory.mktemp("several"), models) as model_server:
        yield model_server


def pids(server: ModelServer) -> list[int]:
    """Return the process ids of engines, the newest last."""
    results = []
    for entry in Path("/proc").iterdir():
        try:
            parent = (entry / "stat").read_text().rsplit(")", 1)[1].split()[1]
            command = (entry / "cmdline").read_bytes()
        except OSError:
            continue
        if int(parent) == server.process.pid and b"twostroke.engine.process.main" in command:
            results.append(int(entry.name))
    return sorted(results)


def test_a_model_loads_on_request_and_another_makes_room(server: ModelServer) -> None:
    assert server.http.get("/health/ready").status_code == 200
    assert server.loaded == []
    assert server.http.get("/api/load").json()["numerics"] == "", "which nobody can know yet"
    assert server.http.get("/api/ps").json() == {"models": []}
    texts = {}
    for name in ("a", "b", "C:latest"):
        answer = server.complete(name)
        assert answer.status_code == 200, answer.text
        assert answer.json()["model"] == name
        texts[name] = answer.json()["choices"][0]["text"]
    assert len(set(texts.values())) == 3
    loaded = server.loaded
    assert len(loaded) == 2
    assert "c" in loaded
    [unloaded] = {"a", "b"} - set(loaded)  # the one that has loaded faster
    body = server.http.get("/api/load").json()
    assert body["numerics"] == body["numerics_by_model"]["a"]
    assert set(body["numerics_by_model"]) == {"a", "b", "c"}
    assert body["horizon_s"] > 0, "the pages of the model that was unloaded are gone"
    assert body["prompt_tokens"] > 0, "of others than the first"
    assert body["takes_any_name"] is False
    assert server.count("model_loads_total") == {"a": 1, "b": 1, "c": 1}
    assert server.count("model_unloads_total") == {"a": 0, "b": 0, "c": 0} | {unloaded: 1}
    present = [model["name"] for model in server.http.get("/api/ps").json()["models"]]
    assert present == [f"{name}:latest" for name in loaded]
    tags = server.http.get("/api/tags").json()["models"]
    assert [tag["name"] for tag in tags] == ["a:latest", "b:latest", "c:latest"]
    assert len(pids(server)) == 2


def test_hostile_requests_all_succeed_with_the_same_answers(server: ModelServer) -> None:
    before = sum(server.count("model_loads_total").values())
    with ThreadPoolExecutor(12) as pool:
        model_names = "abcacbbcacab" * 3
        answers = list(pool.map(server.complete, model_names))
    texts: dict[str, set[str]] = {}
    for name, answer in zip(model_names, answers, strict=True):
        assert answer.status_code == 200, answer.text
        texts.setdefault(name, set()).add(answer.json()["choices"][0]["text"])
    assert [len(text) for text in texts.values()] == [1, 1, 1]
    assert sum(server.count("model_loads_total").values()) - before <= 6


def test_requests_without_an_engine_load_no_model(server: ModelServer) -> None:
    before = server.count("model_loads_total")
    body = {"model": "a", "prompt": "hello"}
    assert server.http.post("/tokenize", json=body).status_code == 200
    assert server.http.post("/api/show", json={"model": "b"}).status_code == 200
    unknown = server.complete("bb")
    assert unknown.status_code == 404
    assert unknown.json()["error"]["message"] == ("The model 'bb' does not exist. Served: a, b, c.")
    assert server.complete("a", temperature=-1).status_code == 400
    assert server.count("model_loads_total") == before


def test_requests_that_can_never_run_load_no_model(server: ModelServer) -> None:
    loads = server.count("model_loads_total")
    asleep, *_ = [name for name, state in server.states().items() if state == "unloaded"]
    prompt = server.complete(asleep, prompt="a" * 9000)
    text = server.http.post("/v1/embeddings", json={"model": asleep, "input": "a" * 9000})
    for answer in (prompt, text):
        assert answer.status_code == 400
        assert answer.json()["error"]["code"] == "context_length_exceeded"
    assert server.count("model_loads_total") == loads


def test_embeddings_grammars_and_the_state_of_each_model(server: ModelServer) -> None:
    for name in "ab":
        body = {"model": name, "input": "hello"}
        assert server.http.post("/v1/embeddings", json=body).status_code == 200
        response = server.complete(name, max_tokens=20, guided_regex="(ab){3}", ignore_eos=False)
        assert response.status_code == 200, response.text
        assert response.json()["choices"][0]["text"] == "ababab"
    state = server.http.get("/api/state", params={"model": "b"}).json()
    assert state["model"]["names"] == ["b"]
    assert [model["name"] for model in state["models"]] == ["a", "b", "c"]
    assert server.http.get("/api/state", params={"model": "x"}).status_code == 404
    assert server.http.get("/props", params={"model": "b"}).json()["model_alias"] == "b"


def test_keep_alive_loads_unloads_and_keeps(server: ModelServer) -> None:
    def ollama(**fields: object) -> dict[str, object]:
        answer = server.http.post("/api/generate", json={"model": "a", "stream": False, **fields})
        body: dict[str, object] = answer.json()
        return body

    assert ollama(keep_alive=0)["done_reason"] == "unload"
    server.wait_until("a", "unloaded")
    assert ollama()["done_reason"] == "load"
    server.wait_until("a", "loaded")
    assert ollama(prompt="hello", keep_alive="1h", options={"num_predict": 2})["done"]
    [loaded] = [
        model for model in server.http.get("/api/ps").json()["models"] if model["model"][0] == "a"
    ]
    left_s = time.mktime(
        time.strptime(loaded["expires_at"][:19], "%Y-%m-%dT%H:%M:%S")
    ) - time.mktime(time.gmtime())
    assert 3590 < left_s <= 3601
    assert ollama(prompt="hello", keep_alive=0, options={"num_predict": 2})["done"]
    server.wait_until("a", "unloaded")
    wrong = server.http.post("/api/generate", json={"model": "a", "keep_alive": "5 years"})
    assert wrong.status_code == 400
    assert "keep_alive" in wrong.json()["error"]


def test_a_model_is_not_unloaded_under_a_stream(server: ModelServer) -> None:
    server.complete("a")
    server.complete("b")
    body = {"model": "a", "prompt": "hello", "max_tokens": 1500, "stream": True, "temperature": 0}
    answered_s: dict[str, float] = {}

    def ask_for_c() -> None:
        assert server.complete("c").status_code == 200
        assert server.complete("b").status_code == 200  # perhaps only after the stream
        answered_s["answered"] = time.monotonic()

    other = threading.Thread(target=ask_for_c)
    with server.http.stream("POST", "/v1/completions", json={**body, "ignore_eos": True}) as stream:
        lines = stream.iter_lines()
        next(lines)
        other.start()
        text = list(lines)
    assert text[-2:] == ["data: [DONE]", ""]
    other.join()
    assert answered_s


def test_timeouts_and_clients_that_leave_while_a_model_loads(
    models: list[str], tmp_path: Path
) -> None:
    with serving(tmp_path, models) as server:
        response = server.http.post(
            "/v1/completions",
            json={"model": "a", "prompt": "hello", "max_tokens": 2},
            headers={"x-request-timeout": "0.05"},
        )
        assert response.status_code == 504, response.text
        with pytest.raises(httpx.ReadTimeout):
            server.http.post(
                "/v1/completions", json={"model": "b", "prompt": "hello"}, timeout=0.05
            )
        server.wait_until("a", "loaded")  # the loads went on
        server.wait_until("b", "loaded")
        assert server.complete("b").status_code == 200

        # An engine that dies while it loads is started again.
        before = pids(server)
        with ThreadPoolExecutor(1) as pool:
            answer = pool.submit(server.complete, "c")
            server.wait_until("c", "loading")
            wait_for(lambda: not set(pids(server)).issubset(before))
            [new] = set(pids(server)).difference(before)
            os.kill(new, signal.SIGKILL)
            assert answer.result().status_code == 200
        assert "did not start" in server.log.read_text()


def test_a_broken_model_is_refused_and_the_others_go_on(tmp_path: Path) -> None:
    models = write_models(tmp_path)
    with serving(tmp_path, models, "--idle-timeout", "1") as server:
        assert server.complete("a").status_code == 200
        broken = tmp_path / "b.gguf"
        broken.rename(tmp_path / "away")
        for _ in range(2):
            answer = server.complete("b")
            assert answer.status_code == 503
            assert answer.json()["error"]["code"] == "model_not_loaded"
            assert int(answer.headers["retry-after"]) >= 1
            assert "gguf" not in answer.text
        assert server.count("model_failed_loads_total") == {"a": 0, "b": 1, "c": 0}
        assert server.complete("a").status_code == 200
        server.wait_until("a", "unloaded")  # after a second without requests
        stream = server.http.post(
            "/v1/completions", json={"model": "c", "prompt": "hello", "stream": True}
        )
        assert stream.text.endswith("data: [DONE]\n\n")
        first = stream.text.split("\n", 1)[0].removeprefix("data: ")
        assert json.loads(first)["model"] == "c"
        # SIGTERM while a model loads: its request is answered, then all processes end.
        with ThreadPoolExecutor(1) as pool:
            waiting = pool.submit(server.complete, "a")
            server.wait_until("a", "loading")
            server.process.send_signal(signal.SIGTERM)
            assert waiting.result().status_code == 200
        assert server.process.wait(120) == 0
    assert pids(server) == []


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        (["--memory", "100MB"], "With 100 MB of memory for all models (--memory), "),
        (["--in-process"], "--in-process runs one model"),
        (["--name", "x"], "--name is for one model"),
        (["--role", "decode", "--prefill-peer", "localhost:1"], "--role is for one model"),
        (["--models", "{a}"], "has two models called 'a'"),
        (["--models", "nothing-like-it"], "nothing-like-it"),
        (["--models", ","], "needs models with commas between them"),
    ],
)
def test_wrong_options_end_the_command_with_a_sentence(
    run_serve: object, models: list[str], options: list[str], sentence: str
) -> None:
    words = [models[0] if word == "{a}" else word for word in options]
    code, err = run_serve("--models", ",".join(models), *words)  # type: ignore[operator]
    assert code != 0
    assert sentence in err
    assert err.count("\n") <= 2
    assert "Traceback" not in err


@pytest.fixture
def run_serve() -> object:
    from support.commands import started

    def run(*words: str) -> tuple[int, str]:
        with started("serve", *words, stderr=subprocess.PIPE) as process:
            _, err = process.communicate(timeout=120)
            return process.returncode, err.decode()

    return run


def test_models_share_a_page_cache_in_which_requests_keep_prompts(
    models: list[str], tmp_path: Path
) -> None:
    folder = tmp_path / "pages"
    fields = {"prompt": "This prompt comes again. " * 12, "prompt_cache_retention": "24h"}
    with serving(tmp_path, models[:2], "--page-cache", str(folder)) as server:
        for name in "ab":
            assert "twostroke-ignored" not in server.complete(name, **fields).headers
    kinds = read_folder(folder, time.time())
    assert len(kinds) == 2
    assert all(kind.num_kept == kind.num_pages > 0 for kind in kinds)
