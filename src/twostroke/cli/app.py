"""The command group: finds the command, runs it, and turns errors into a sentence and a code."""

from __future__ import annotations

import importlib
import sys
from typing import Final

import click

from twostroke.core.errors import TwostrokeError, nearest

# Each command lives in a module of its own, imported when it is called: starting stays quick.
COMMANDS: Final = {
    "pull": "Fetch a model into the cache.",
    "generate": "Answer one prompt.",
    "chat": "Talk with a model in the terminal.",
    "serve": "Serve a model over an OpenAI-compatible API.",
    "models": "List, verify and remove models.",
    "doctor": "Show what this machine can do and what 'auto' means here.",
}
_INTERRUPTED = 130  # 128 + SIGINT, as shells have it


class Commands(click.Group):
    """The commands of `COMMANDS`, by name."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        """Return the names in the order of `COMMANDS`."""
        del ctx
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """Import one command."""
        del ctx
        if cmd_name not in COMMANDS:
            return None
        module = importlib.import_module(f"twostroke.cli.{cmd_name}")
        command: click.Command = module.command
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the list of commands without importing them."""
        del ctx
        with formatter.section("Commands"):
            formatter.write_dl(list(COMMANDS.items()))

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """Find the command, or name the nearest."""
        if args and args[0] not in COMMANDS and not args[0].startswith("-"):
            hint = nearest(args[0], COMMANDS)
            known = ", ".join(COMMANDS)
            ctx.fail(f"There is no command '{args[0]}'.{hint} Commands: {known}.")
        return super().resolve_command(ctx, args)


@click.command(cls=Commands, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(package_name="twostroke", message="twostroke %(version)s")
def group() -> None:
    """Run language models on this machine, and see how close to its limits they run."""


def main() -> None:
    """Run the command line and exit."""
    sys.exit(run(sys.argv[1:]))


def run(arguments: list[str]) -> int:
    """Run the command line and return its exit code; no error leaves a trace."""
    try:
        code = group.main(arguments, prog_name="twostroke", standalone_mode=False)
    except click.ClickException as error:
        error.show()
        return error.exit_code
    except (click.Abort, KeyboardInterrupt):
        click.echo("Interrupted.", err=True)
        return _INTERRUPTED
    except TwostrokeError as error:
        click.echo(f"twostroke: {error.message}", err=True)
        return error.exit_code
    except BrokenPipeError:  # the reader of our output has gone, as `| head` does
        sys.stderr.close()
        return 0
    return code if isinstance(code, int) else 0
