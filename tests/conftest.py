"""What every room's tests share: where the real model is, and what to do without it."""

from __future__ import annotations

import inspect
import os
import signal
from pathlib import Path
from typing import TYPE_CHECKING

import httpx
import hypothesis
import pytest

from twostroke.core.errors import ModelNotFoundError
from twostroke.lab.measure import questions
from twostroke.model.hub import resolve

pytest.register_assert_rewrite("support")  # so that its failures say what was found

from support import authorities, native  # noqa: E402 only now

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

_TESTS = Path(__file__).parent

authorities.share()

# Two busy cores make any deadline a coin toss.
hypothesis.settings.register_profile("house", deadline=None, print_blob=True)
hypothesis.settings.load_profile("house")


# Clients of httpx would give up after 5 seconds, which a busy machine may take for an answer.
_httpx_timeout = inspect.signature(httpx.get).parameters["timeout"].default
for _phase in ("connect", "read", "write", "pool"):
    setattr(_httpx_timeout, _phase, 60.0)

# What is started in a shell's background ignores Ctrl-C, which tests send.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_configure(config: pytest.Config) -> None:
    """Give each of several worker processes one thread: those of two would hold each other up.

    Let `support.native` announce that it compiles.
    """
    if (capture := config.pluginmanager.getplugin("capturemanager")) is not None:
        native.uncaptured = capture.global_and_fixture_disabled
    if config.getoption("numprocesses", None):
        os.environ.setdefault("TWOSTROKE_NUM_THREADS", "1")
        os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")  # NumPy's


@pytest.hookimpl(tryfirst=True)
def pytest_collection(session: pytest.Session) -> None:
    """Let each worker begin to import all tests with another folder.

    Every worker imports all test files. If they do so in the same order, each one compiles and
    rewrites them all; now it finds two thirds of them in the bytecode cache, from other workers.
    """
    worker = getattr(session.config, "workerinput", None)
    if worker is None or session.config.args != ["tests"]:
        return
    entries = sorted(path for path in _TESTS.iterdir() if path.is_dir() or path.match("test_*.py"))
    num_files = {path: len([*path.rglob("test_*.py")]) or path.is_file() for path in entries}
    entries = [path for path in entries if num_files[path]]
    num_before = sum(num_files.values()) * int(worker["workerid"][2:]) // worker["workercount"]
    while num_before > 0:
        num_before -= num_files[entries[0]]
        entries = [*entries[1:], entries[0]]
    session.config.args = [str(path) for path in entries]


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Let workers begin with the files that have slow tests, so that no other one waits at last."""
    if hasattr(config, "workerinput"):
        slow = {item.path for item in items if item.get_closest_marker("slow")}
        items.sort(key=lambda item: (item.path not in slow, item.path))


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add `--require-model` and `--require-models`: a missing model fails its tests."""
    parser.addoption(
        "--require-model",
        action="store_true",
        help="fail, not skip, when the SmolLM2 file is not in the cache (`make test` sets this)",
    )
    parser.addoption(
        "--require-models",
        action="store_true",
        help="fail, not skip, when a real model is missing (`make long SUITE=models` sets this)",
    )
    parser.addoption(
        "--rounds",
        type=int,
        default=1,
        help="multiplies the number of random cases of a test (`make long SUITE=rounds`: 10)",
    )


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Give a test marked `seeds(n)` the seeds from 0 on, n for each round."""
    marker = metafunc.definition.get_closest_marker("seeds")
    if marker is not None:
        metafunc.parametrize("seed", range(marker.args[0] * metafunc.config.getoption("--rounds")))


@pytest.fixture(scope="session")
def rounds(request: pytest.FixtureRequest) -> int:
    """How many times as long a test marked `rounds` plays (`make long SUITE=rounds`: 10)."""
    count: int = request.config.getoption("--rounds")
    return count


@pytest.fixture(scope="module")
def few_questions() -> Iterator[int]:
    """Reports of rounded models ask every sixth question only; returns how many that are."""
    chosen_questions = questions.questions()[::6]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(questions, "questions", lambda: chosen_questions)
        yield len(chosen_questions)


@pytest.fixture
def patient_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let rank 0 bear ranks that a busy machine does not run for some seconds."""
    from twostroke.backends.parallel import ranks

    monkeypatch.setattr(ranks, "_HEARTBEAT_TIMEOUT_S", 60.0)
    monkeypatch.setattr(ranks, "_STALL_TIMEOUT_S", 66.0)


@pytest.fixture(scope="session")
def real_model(request: pytest.FixtureRequest) -> Callable[[str], Path]:
    """Where a real model of the catalogue lies; skips, or fails, if it is not in the cache."""

    def find(name: str) -> Path:
        try:
            return resolve(name)
        except ModelNotFoundError as error:
            reason = f"needs the real model: {error}"
            option = "--require-model" if name == "smollm2" else "--require-models"
            if request.config.getoption(option):
                pytest.fail(reason)
            pytest.skip(reason)

    return find


@pytest.fixture(scope="session")
def smollm2_path(real_model: Callable[[str], Path]) -> Path:
    """The real SmolLM2-135M-Instruct file in the cache; skips, or fails, where it is missing."""
    return real_model("smollm2")
