"""Finds and runs a command of `twostroke`, and turns errors into a sentence and an exit code."""

from __future__ import annotations

import _thread
import importlib
import os
import re
import shlex
import signal
import sys
import threading
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import click
from click import Option

from twostroke.cli.help import CommandGroup
from twostroke.core.errors import MemoryLimitError, TwostrokeError, nearest
from twostroke.core.foreign_options import foreign_hint, names_model
from twostroke.core.message_text import without_passwords

if TYPE_CHECKING:
    from collections.abc import Sequence
    from types import FrameType

# A command's module is imported when the command is called, so that starting stays quick.
COMMANDS: Final = {
    "pull": "Fetch a model into the cache.",
    "generate": "Answer one prompt.",
    "chat": "Talk with a model in the terminal.",
    "serve": "Serve a model over an OpenAI-compatible API.",
    "route": "Route requests from one address to many servers.",
    "batch": "Run a file of requests with a model, or on a server.",
    "keys": "Make, limit and revoke the API keys of a server.",
    "usage": "Show the requests, tokens and costs of a server's keys and tenants.",
    "cache": "List, fill, check and clean the folder of a page cache (--page-cache).",
    "embed": "Turn texts into vectors.",
    "compare": "Measure how much backends, formats or models differ.",
    "quantize": "Write a model with fewer bits for each weight, and score it.",
    "report": "Show the scores of a quantized file.",
    "distill": "Train a smaller model on the answers of a larger one.",
    "profile": "Show the time of each operation of a step.",
    "plan": "Predict the speed, memory and costs of a model on a device.",
    "fit": "Show which models fit a device, before any download.",
    "simulate": "Simulate a load of requests on replicas, in virtual time.",
    "advise": "Find the options of a server for recorded traffic.",
    "bench": "Load a server, measure its answers, and audit the measurement.",
    "bench compare": "Show what changed between two runs of bench.",
    "fleet": "Start, show and stop servers and their router on a Ray cluster.",
    "plan fleet": "Choose devices to buy, or place many models on a stock of devices.",
    "plan buy": "Compare the costs of hosting a model with the prices of APIs.",
    "train-heads": "Train draft heads for speculative decoding (eagle, medusa).",
    "models": "List, verify and remove models.",
    "doctor prompts": "Show where similar prompts part, and what that costs.",
    "doctor": "Show the limits of this machine, and the automatic choices on it.",
}
# Modules and functions of commands that do not have a module of their own, by command.
_FUNCTIONS: Final = {
    "distill": ("train", "distill"),
    "train-heads": ("train", "train_heads"),
}
_EPILOG: Final = "To begin: twostroke generate smollm2 -p 'Why is the sky blue?'"
_PIPE_CLOSED_CODE: Final = 128 + signal.SIGPIPE  # the exit code that shells use


class Interruption(click.ClickException):
    """The error for a command that Ctrl-C has ended; its message may say how to continue."""

    exit_code = 128 + signal.SIGINT


class CommandFailure(click.ClickException):
    """A `TwostrokeError` as click prints it, with command-line options in place of field names."""

    def __init__(self, error: TwostrokeError, command: click.Command | None) -> None:
        """Replace field names in the message of `error` by the options of `command`."""
        params = command.params if command else []
        flags = {
            param.name: max(param.opts, key=len) for param in params if isinstance(param, Option)
        }
        super().__init__(error.sentence(lambda field: flags.get(field, field)))
        self.exit_code = error.exit_code  # type: ignore[misc]


class Commands(CommandGroup):
    """The group of all `twostroke` commands; a command's module is imported when it is called."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        """Return the names of all commands, in the order of `COMMANDS`."""
        del ctx
        return list(COMMANDS)

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """Find the command that the arguments name; some names, as `plan buy`, have two words."""
        if (both := " ".join(args[:2])) in COMMANDS:
            args = [both, *args[2:]]
        return super().resolve_command(ctx, args)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """Import a command and return it; None if there is no command with this name."""
        del ctx
        if cmd_name not in COMMANDS:
            return None
        default = re.sub("[- ]", "_", cmd_name), "command"
        module_name, function = _FUNCTIONS.get(cmd_name, default)
        module = importlib.import_module(f"twostroke.cli.{module_name}")
        command: click.Command = getattr(module, function)
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the list of commands in the help of `twostroke`.

        The commands' modules are not imported.
        """
        del ctx
        with formatter.section("Commands"):
            formatter.write_dl(list(COMMANDS.items()))

    def invoke(self, ctx: click.Context) -> Any:
        """Run the command, and turn TwostrokeError and Ctrl-C into exceptions that click prints.

        If the program that reads the output has ended, the command ends, too.
        """
        try:
            return super().invoke(ctx)
        except TwostrokeError as error:
            raise CommandFailure(
                error, self.get_command(ctx, ctx.invoked_subcommand or "")
            ) from None
        except KeyboardInterrupt as error:
            raise Interruption(str(error) or "Interrupted.") from None
        except BrokenPipeError:  # the program that reads the output has ended, as in `| head`
            _discard_output()
            ctx.exit(_PIPE_CLOSED_CODE)


@click.command(
    cls=Commands,
    invoke_without_command=True,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
    epilog=_EPILOG,
)
@click.option("--version", is_flag=True, help="Show the version and exit.")
@click.pass_context
def group(ctx: click.Context, version: bool) -> None:
    """Run language models on this machine, and see how close to its limits they run."""
    if version:
        click.echo(f"twostroke {_version()}")
        ctx.exit()
    if ctx.invoked_subcommand is None:
        click.echo(ctx.get_help(), err=True)
        ctx.exit(2)


def main() -> int:
    """Run the command line of this process; return the exit code."""
    # A shell may have closed these streams. The replacements stay open until the process ends.
    sys.stdout = sys.stdout or Path(os.devnull).open("w")  # noqa: SIM115
    sys.stderr = sys.stderr or Path(os.devnull).open("w")  # noqa: SIM115
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):  # a terminal may not have all characters of an answer
            stream.reconfigure(errors="replace")
    for number in (signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(number) is not signal.SIG_IGN:  # nohup ignores SIGHUP
            signal.signal(number, _exit_on_signal)
    sys.unraisablehook = _interrupt_again
    code = run(sys.argv[1:])
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # silent while the interpreter ends
    return code


def _interrupt_again(ignored: sys.UnraisableHookArgs) -> None:
    """Raise KeyboardInterrupt again if Python ignored it while an object was being deleted.

    Python calls this hook (`sys.unraisablehook`) with each exception that it ignores.
    """
    if ignored.exc_type is not KeyboardInterrupt:
        sys.__unraisablehook__(ignored)
        return
    timer = threading.Timer(0.02, _thread.interrupt_main)  # after the deletion
    timer.daemon = True
    timer.start()


def run(arguments: list[str]) -> int:
    """Run the command that the arguments name, and return its exit code.

    Errors are printed as a sentence, without a traceback.
    """
    try:
        code = group.main(arguments, prog_name="twostroke", standalone_mode=False)
        sys.stdout.flush()
    except click.exceptions.NoArgsIsHelpError as error:
        click.echo(error.format_message(), err=True)
        return error.exit_code
    except click.ClickException as error:
        return _fail(_usage_error_text(error, arguments), error.exit_code)
    except (click.Abort, KeyboardInterrupt):
        return _fail("Interrupted.", Interruption.exit_code)
    except BrokenPipeError:
        _discard_output()
        return _PIPE_CLOSED_CODE
    except OSError as error:  # such as a full disk, if the output goes to a file
        _discard_output()
        location = f"{error.filename}: " if error.filename else ""
        return _fail(f"{location}{error.strerror or error}.", 1)
    except MemoryError:
        message = "Memory ran out: lower --context-length or --kv-memory, or take a smaller model."
        return _fail(message, MemoryLimitError.exit_code)
    return code if isinstance(code, int) else 0


def _version() -> str:
    from importlib.metadata import PackageNotFoundError, version

    try:
        return version("twostroke")
    except PackageNotFoundError:
        return "from a source tree that is not installed"


def _fail(message: str, code: int) -> int:
    from twostroke.cli.terminal import printable

    with suppress(OSError):  # standard error is closed
        if code == Interruption.exit_code and sys.stderr.isatty():
            click.echo(err=True)  # after the ^C on the screen
        sentence = without_passwords(" ".join(message.split()))
        click.echo(f"twostroke: {printable(sentence)}", err=True)
    return code


def _usage_error_text(error: click.ClickException, arguments: Sequence[str]) -> str:
    """Return the message about a wrong command line.

    It names the nearest known option, and the command that prints help.
    """
    context = error.ctx if isinstance(error, click.UsageError) else None
    if context is None:
        return error.format_message()
    see_help = f" See: {context.command_path} --help"
    if isinstance(error, click.NoSuchOption):
        flags = _flags(context)
        name = _option_as_written(error.option_name, arguments)
        if names_model(name) and (param := _model_argument(context.command)):
            model = _value_of(name, arguments) or param.human_readable_name
            return f"The model is given without {name}: '{context.command_path} {model}'.{see_help}"
        hint = foreign_hint(name, flags) or nearest(name, flags)
        return f"There is no option '{name}'.{hint}{see_help}"
    if isinstance(error, click.MissingParameter) and _is_model(error.param):
        return f"Which model? Give a path, or a name that 'twostroke models' lists.{see_help}"
    message = error.format_message()
    if "unexpected extra argument" in message and "against" in context.params:
        return f"Name the model to compare with by --against: {message}.{see_help}"
    if "unexpected extra argument" in message and "text" in context.params:
        return f"Put a prompt of several words in quotes: {message}.{see_help}"
    return message + ("" if message.endswith((".", "?")) else ".") + see_help


def _flags(context: click.Context) -> list[str]:
    """Return the flags of a command's options, such as "--threads" or "--no-prefix-cache"."""
    params = context.command.get_params(context)
    names = (name for param in params for name in (*param.opts, *param.secondary_opts))
    return [name for name in names if name.startswith("-")]


def _option_as_written(option_name: str, arguments: Sequence[str]) -> str:
    """Return an unknown option in full, because click reports only `-n` of `-ngl`."""
    if len(option_name) == 2:
        return next((word for word in arguments if word.startswith(option_name)), option_name)
    return option_name


def _value_of(option_name: str, arguments: Sequence[str]) -> str:
    """Return the value of an option on the command line, quoted for a shell; "" if it has none."""
    for word, next_word in zip(arguments, [*arguments[1:], ""], strict=True):
        name, equals, value = word.partition("=")
        if name == option_name:
            value = value if equals else next_word
            return "" if value.startswith("-") else value and shlex.quote(value)
    return ""


def _model_argument(command: click.Command) -> click.Argument | None:
    """Return the argument that names a command's model; None if the command has none."""
    arguments = (param for param in command.params if isinstance(param, click.Argument))
    return next(filter(_is_model, arguments), None)


def _is_model(param: click.Parameter | None) -> bool:
    return param is not None and param.name in {"model", "models", "teacher"}


def _discard_output() -> None:
    """Discard output that is not written yet, so that Python exits without another error.

    This is for output that no program reads any more.
    """
    with suppress(OSError, ValueError), Path(os.devnull).open("w") as nowhere:
        os.dup2(nowhere.fileno(), sys.stdout.fileno())  # ValueError: not a file


def _exit_on_signal(number: int, frame: FrameType | None) -> None:
    """Exit on SIGTERM or SIGHUP by an exception, so that unfinished work is cleaned up.

    Python ignores an exception that is raised while it imports a module. In that case the signal is
    sent again a moment later.
    """
    if frame is not None and frame.f_code.co_filename.startswith("<frozen importlib"):
        own_thread = threading.get_ident()
        timer = threading.Timer(0.02, signal.pthread_kill, (own_thread, number))
        timer.daemon = True
        timer.start()
        return
    sys.exit(128 + number)
