"""The command line's frame: help, unknown names, and errors as one sentence with an exit code."""

from __future__ import annotations

import errno
import signal
import subprocess
import sys
from typing import TYPE_CHECKING

import click
import pytest

from support.commands import SOURCE
from twostroke.cli import app, pull
from twostroke.cli.terminal import printable
from twostroke.core import errors

if TYPE_CHECKING:
    from collections.abc import Callable

    from conftest import Ran

    Cli = Callable[..., Ran]


def test_no_command_shows_help_and_is_no_success(cli: Cli) -> None:
    ran = cli()
    assert ran.code == 2
    assert "Usage: twostroke" in ran.err
    assert "twostroke generate smollm2" in ran.err


@pytest.mark.parametrize("name", ["cache", "fleet", "keys"])
def test_a_group_alone_shows_its_help_as_it_is(cli: Cli, name: str) -> None:
    ran = cli(name)
    assert (ran.code, ran.err) == (2, cli(name, "--help").out)


@pytest.mark.parametrize("flag", ["--help", "-h"])
def test_help_lists_every_command(cli: Cli, flag: str) -> None:
    ran = cli(flag)
    assert ran.code == 0
    assert all(f"  {name} " in ran.out for name in app.COMMANDS)


@pytest.mark.parametrize("name", app.COMMANDS)
def test_every_command_explains_itself(cli: Cli, name: str) -> None:
    ran = cli(name, "--help")
    assert ran.code == 0
    assert ran.out.startswith(f"Usage: twostroke {name}")
    command = app.group.get_command(click.Context(app.group), name)
    assert command is not None
    assert command.name == name


@pytest.mark.parametrize("name", ["generate", "chat", "serve"])
def test_every_option_has_its_help(name: str) -> None:
    command = app.group.get_command(click.Context(app.group), name)
    assert command is not None
    options = [param for param in command.params if isinstance(param, click.Option)]
    assert options
    assert [option.name for option in options if not option.help] == []


def test_options_stand_in_sections(cli: Cli) -> None:
    out = cli("serve", "--help").out
    assert out.index("\nOptions:") < out.index("\nMachine:") < out.index("\nBatching:")
    out = cli("generate", "--help").out
    assert out.index("\nChoosing tokens:") < out.index("--top-p X") < out.index("\nMachine:")


def test_version_is_printed(cli: Cli) -> None:
    ran = cli("--version")
    assert ran.code == 0
    assert ran.out.startswith("twostroke ")


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["genrate"], "no command 'genrate'. Did you mean 'generate'?"),
        (["models", "remov"], "no command 'remov'. Did you mean 'remove'?"),
        (["--vresion"], "no option '--vresion'. Did you mean '--version'?"),
        (["generate", "x", "--max-token", "3"], "no option '--max-token'. Did you mean '--max-tok"),
        (["serve", "x", "--polciy", "static"], "no option '--polciy'. Did you mean '--policy'?"),
        (["generate"], "Which model?"),
        (["pull"], "Which model?"),
        (["models", "show", "a", "b"], "unexpected extra argument (b). See: twostroke models show"),
        (["generate", "x", "--backend", "cpuu"], "Did you mean 'cpu'? See: twostroke generate"),
        (["compare", "x", "--right", "refrence"], "Did you mean 'reference'? See: twostroke"),
        (["serve", "--model", "x"], "without --model: 'twostroke serve x'. See: twostroke serve"),
        (["generate", "--model=a b", "-p", "x"], "without --model: 'twostroke generate 'a b''."),
        (["chat", "--model-path", "x"], "without --model-path: 'twostroke chat x'. See: two"),
        (["embed", "-m", "x", "text"], "without -m: 'twostroke embed x'. See: twostroke embed"),
        (["compare", "--model"], "without --model: 'twostroke compare MODEL'. See: twostroke com"),
        (["pull", "--model", "x"], "without --model: 'twostroke pull x'. See: twostroke pull"),
        (["distill", "--model", "x"], "without --model: 'twostroke distill x'. See: twostroke d"),
        (["plan", "--hf-repo", "o/r"], "without --hf-repo: 'twostroke plan o/r'. See: twostroke"),
        (["batch", "x", "-m", "x"], "no option '-m'. Use '--model' instead. See: twostroke batch"),
        (["serve", "x", "--enable-lora"], "no option '--enable-lora'. Adapters (LoRA) are not"),
        (["serve", "x", "--lora-modules", "a=b"], "'--lora-modules'. Adapters (LoRA) are not"),
        (["generate", "x", "--lora", "a.gguf"], "no option '--lora'. Adapters (LoRA) are not"),
        (["compare", "x", "y"], "to compare with by --against: Got unexpected extra argument (y)."),
        (["generate", "x", "-p"], "requires an argument"),
        (["generate", "x", "Why", "is", "it"], "words in quotes: Got unexpected extra arg"),
        (["generate", "x", "-p", "Why", "is", "it"], "words in quotes: Got unexpected ext"),
    ],
)
def test_a_wrong_line_is_one_sentence(cli: Cli, arguments: list[str], sentence: str) -> None:
    ran = cli(*arguments)
    assert ran.code == 2
    assert ran.err.startswith("twostroke: ")
    assert sentence in ran.err
    assert ran.err.count("\n") == 1
    assert ran.out == ""


class Planted:
    """Makes `twostroke pull` raise an error that a test chooses."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._monkeypatch = monkeypatch

    def __call__(self, error: BaseException) -> None:
        def fail(models: tuple[str, ...]) -> None:
            raise error

        monkeypatch = self._monkeypatch
        monkeypatch.setattr(pull.command, "callback", fail)


@pytest.fixture
def planted(monkeypatch: pytest.MonkeyPatch) -> Planted:
    return Planted(monkeypatch)


@pytest.mark.parametrize(
    "kind",
    [
        errors.UsageError,
        errors.ModelNotFoundError,
        errors.ModelFormatError,
        errors.DownloadError,
        errors.MemoryLimitError,
        errors.PortInUseError,
        errors.BackendError,
        errors.EngineStoppedError,
    ],
)
def test_every_kind_of_error_has_its_code(
    cli: Cli, planted: Planted, kind: type[errors.TwostrokeError]
) -> None:
    planted(kind("It is\n so."))
    ran = cli("pull", "x")
    assert (ran.code, ran.err) == (kind.exit_code, "twostroke: It is so.\n")


@pytest.mark.parametrize(
    ("error", "code", "sentence"),
    [
        (KeyboardInterrupt(), 130, "Interrupted."),
        (KeyboardInterrupt("Nothing was kept."), 130, "Nothing was kept."),
        (OSError(errno.ENOSPC, "No space left"), 1, "No space left."),
        (OSError(errno.EACCES, "Not allowed", "/x"), 1, "/x: Not allowed."),
        (MemoryError(), 6, "Memory ran out"),
        (errors.UsageError("A \x1b[2J trap."), 2, "A ␛[2J trap."),
    ],
)
def test_what_else_may_happen_is_one_sentence_too(
    cli: Cli, planted: Planted, error: BaseException, code: int, sentence: str
) -> None:
    planted(error)
    ran = cli("pull", "x")
    assert ran.code == code
    assert sentence in ran.err
    assert ran.err.strip().count("\n") == 0


def test_a_closed_pipe_is_silent(
    cli: Cli, planted: Planted, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(app, "_discard_output", lambda: None)
    planted(BrokenPipeError(errno.EPIPE, "Broken pipe"))
    ran = cli("pull", "x")
    assert (ran.code, ran.err, ran.out) == (128 + signal.SIGPIPE, "", "")


def test_text_cannot_steer_the_terminal() -> None:
    text = "a\x1b[31mb\x07\x00\r\nc\td\x7f\x9b2Je é 漢"
    assert printable(text) == "a␛[31mb␇␀\nc\td␡�2Je é 漢"


def test_help_needs_no_numpy() -> None:
    script = (
        "import sys; from twostroke.cli.app import run\n"
        "for name in ('', 'generate', 'chat', 'serve', 'models', 'pull'):\n"
        "    assert run([name, '--help'] if name else ['--help']) == 0\n"
        "heavy = {'numpy', 'rich', 'jinja2', 'starlette', 'uvicorn', 'asyncio'}\n"
        "print(*sorted(heavy & set(sys.modules)), file=sys.stderr)"
    )
    done = subprocess.run(
        [sys.executable, "-c", script],
        env={"PYTHONPATH": str(SOURCE)},
        capture_output=True,
        check=True,
    )
    assert done.stderr.split() == []


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_a_signal_while_a_module_is_compiled_is_not_lost(number: int) -> None:
    source = "import os, time; os.kill(os.getpid(), {}); {}"
    program = f"""
import signal
from twostroke.cli import app
signal.signal({int(number)}, app._exit_on_signal)
try:
    exec(compile({source.format(int(number), "1")!r}, "<frozen importlib._bootstrap>", "exec"))
except SystemExit:
    print("could be lost")
import time
time.sleep(20)
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, check=False)
    assert (done.returncode, done.stdout) == (128 + number, b"")


def test_nohup_keeps_a_command_running() -> None:
    program = """
import os, signal, sys
signal.signal(signal.SIGHUP, signal.SIG_IGN)
from twostroke.cli import app
app.run = lambda _: os.kill(os.getpid(), signal.SIGHUP) or 7
sys.exit(app.main())
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, check=False)
    assert done.returncode == 7
