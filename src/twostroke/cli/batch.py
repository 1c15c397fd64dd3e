"""`twostroke batch`: run a file of requests with a model, or on a server."""

from __future__ import annotations

import sys
import time
from contextlib import closing, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import click
from msgspec.structs import replace

from twostroke.cli.help import Command, option
from twostroke.cli.options import (
    MACHINE_PARAMS,
    PARALLEL_PARAMS,
    check_batching,
    click_params,
    engine_options,
    speculation_params,
)
from twostroke.cli.pull import open_engine
from twostroke.cli.terminal import TerminalProgressBar, printable, run_in_event_loop
from twostroke.core import env
from twostroke.core.errors import EngineStoppedError, UsageError
from twostroke.core.message_text import counted_noun
from twostroke.core.options import BatchOptions, GenerationOptions

if TYPE_CHECKING:
    from collections.abc import Iterator

    from twostroke.server.batch.lines import BatchLine
    from twostroke.server.batch.offline import BatchProgress, Send
    from twostroke.server.http.internal_requests import InternalResponse
    from twostroke.server.http.limits import RequestLimits

_NUM_QUEUED_LINES: Final = 32  # requests that wait in the engine, so that no step is short
_QUEUE_FULL_STATUS: Final = 429  # a few long prompts can fill the queue
_RETRY_INTERVAL_S: Final = 0.05
_DEFAULT_CONCURRENCY: Final = 32  # requests at once on a server
_MAX_SHOWN_ERRORS: Final = 20


@click.command(
    "batch",
    cls=Command,
    params=[
        *(*MACHINE_PARAMS, *PARALLEL_PARAMS, *speculation_params(draft="auto")),
        *(*click_params(GenerationOptions), *click_params(BatchOptions)),
    ],
)
@click.argument("file", type=click.Path(path_type=Path), metavar="INPUT")
@option(
    "-o",
    "--output",
    type=click.Path(path_type=Path, dir_okay=False),
    required=True,
    metavar="FILE",
    help="File for the results, in the order of INPUT.",
)
@option("--model", help="Model that answers: a path, hf:owner/repo, or a name.")
@option("--url", help="Server that answers; the key in TWOSTROKE_API_KEY is sent to it.")
@option(
    "--errors",
    type=click.Path(path_type=Path, dir_okay=False),
    metavar="FILE",
    help="File for the requests that failed [default: OUTPUT with .errors before its suffix].",
)
@option(
    "--concurrency",
    type=click.IntRange(1, 4096),
    help="Most requests at once on a server [default: 32].",
)
@option("-q", "--quiet", is_flag=True, help="Show no progress.")
def command(**values: Any) -> int:
    """Run the requests of INPUT: JSON lines, as in OpenAI's Batch API.

    Results are written as soon as they are ready, to a file that ends in .partial until the last
    one. If the command is interrupted, the same command continues: requests with a result are not
    run again. The exit code is 1 if some requests failed; the file of errors lists them.
    """
    from twostroke.server.batch.offline import BatchProgress, OfflineFiles, ResultFile, run
    from twostroke.server.http.limits import RequestLimits

    path = values.pop("file")
    output = values.pop("output")
    model = values.pop("model")
    url = values.pop("url")
    errors_path = values.pop("errors")
    errors = errors_path or output.with_suffix(f".errors{output.suffix}")
    concurrency = values.pop("concurrency")
    quiet = values.pop("quiet")
    if (model is None) == (url is None):
        raise UsageError("Give either --model, to answer on this machine, or --url of a server.")
    if url is None and concurrency is not None:
        raise UsageError("--concurrency is for --url; with --model see --max-running.")
    limits = replace(RequestLimits(), max_batch_lines=sys.maxsize)
    total = _check(path, limits)
    with (
        ResultFile(output, resumes=True) as results,
        ResultFile(
            errors, resumes=False, replaces=results.is_resumed and not errors_path
        ) as failures,
        TerminalProgressBar(quiet=quiet, counts=True) as bar,
    ):
        files = OfflineFiles(path, results, failures, model)
        files.check(limits)
        num_before = len(results.extents)
        progress = BatchProgress(total, num_before=num_before, num_done=num_before)

        def show(now: BatchProgress) -> None:
            bar.show("Running lines", now.num_done, now.total)

        sender = (
            _remote_sender(url, concurrency or _DEFAULT_CONCURRENCY)
            if url
            else _local_sender(model, values, quiet=quiet)
        )
        try:
            with sender as (send, max_at_once):
                started_s = time.monotonic()
                run_in_event_loop(
                    run(files, send, max_at_once, limits=limits, progress=progress, show=show)
                )
                elapsed_s = time.monotonic() - started_s
        except KeyboardInterrupt:
            raise KeyboardInterrupt(_how_to_continue(progress, results.partial)) from None
        except EngineStoppedError as error:
            raise EngineStoppedError(
                f"{error} {_how_to_continue(progress, results.partial)}"
            ) from None
    if not quiet:
        click.secho(_summary(progress, elapsed_s), dim=True, err=True)
    if not progress.num_failed:
        return 0
    click.echo(
        f"{progress.num_failed} of {counted_noun(total, 'line')} failed: see {errors}.", err=True
    )
    return 1


def _check(path: Path, limits: RequestLimits) -> int:
    """Check a user's file of batch requests before it is run, and return its number of lines.

    Raises:
        UsageError: the file cannot be read, or some lines are wrong; the wrong lines are
            printed.
    """
    from twostroke.server.batch.lines import check, parse, read_lines
    from twostroke.server.batch.openai import ENDPOINTS

    try:
        total, errors, num_errors = check(path, None, limits)
    except OSError as error:
        raise UsageError(f"{path} cannot be read: {error.strerror}.") from None
    if not total:
        raise UsageError(f"{path} has no request: each line must be one, as in OpenAI's Batch API.")
    if num_errors:
        for line_error in errors[:_MAX_SHOWN_ERRORS]:
            location = "" if line_error.line is None else f"line {line_error.line}: "
            click.echo(printable(f"{path}: {location}{line_error.message}"), err=True)
        noun = "a wrong line" if num_errors == 1 else counted_noun(num_errors, "wrong line")
        raise UsageError(f"{path} has {noun}; none was run.")
    url = parse(*next(read_lines(path, limits.max_body_bytes)), limits).url
    if url not in ENDPOINTS:
        raise UsageError(f"'url' must be one of {', '.join(ENDPOINTS)}, got '{url[:40]}'.")
    return total


@contextmanager
def _remote_sender(url: str, max_at_once: int) -> Iterator[tuple[Send, int]]:
    """Connect to a server, to send it batch requests, until the `with` block ends.

    Yields (function that sends a batch request, number of requests to send at the same time).
    """
    from twostroke.server.batch.remote import RemoteServer

    with closing(RemoteServer(url, env.client_api_key(), max_at_once)) as remote:
        yield remote.send, max_at_once


@contextmanager
def _local_sender(model: str, values: dict[str, Any], *, quiet: bool) -> Iterator[tuple[Send, int]]:
    """Start an engine in this process, to run batch requests, until the `with` block ends.

    Yields (function that runs a batch request, number of requests to run at the same time).
    """
    import asyncio  # commands without an event loop start sooner without it

    from twostroke.core.process_tuning import tune_garbage_collector
    from twostroke.core.request import DEFAULT_SERVICE_TIER
    from twostroke.engine.process.served import LocalEngine
    from twostroke.engine.status import Health
    from twostroke.server.app import Api
    from twostroke.server.http.internal_requests import Sender, post
    from twostroke.server.middleware import build_app
    from twostroke.server.options import ServeOptions

    check_batching(values["policy"])
    with open_engine(model, engine_options(values, model), quiet=quiet) as engine:
        loop = engine.client.loop
        engine.client.grammars.prepare()
        serving = ServeOptions(max_stored=0, any_model=True)
        with closing(Api(LocalEngine(engine.client), serving, engine.limits)) as api:
            app, sender = build_app(api), Sender("", DEFAULT_SERVICE_TIER)
            tune_garbage_collector()

            async def send(line: BatchLine) -> InternalResponse:
                answer = await post(app, line.url, line.body, sender)
                while answer.status == _QUEUE_FULL_STATUS:
                    await asyncio.sleep(_RETRY_INTERVAL_S)
                    answer = await post(app, line.url, line.body, sender)
                if answer.status >= 500 and loop.health is Health.STOPPED:
                    raise EngineStoppedError("The engine has stopped.")
                return answer

            waiting = min(_NUM_QUEUED_LINES, loop.config.max_waiting_requests)
            yield send, loop.config.max_running + waiting


def _how_to_continue(progress: BatchProgress, partial: Path) -> str:
    """Return a sentence that says how many lines have results, and how to run the other lines."""
    num = progress.num_done - progress.num_failed
    location = f" in {partial}" if num else ""  # an empty file is removed
    return (
        f"{num} of {counted_noun(progress.total, 'line')} {'has' if num == 1 else 'have'} "
        f"results{location}; the same command runs the rest."
    )


def _summary(progress: BatchProgress, elapsed_s: float) -> str:
    speed = f"{progress.num_tokens / elapsed_s:.0f} tokens/s" if elapsed_s > 0 else ""
    num_new = progress.num_done - progress.num_before
    earlier_note = (
        f"; {progress.num_before} had results from an earlier run" if progress.num_before else ""
    )
    lines, tokens = counted_noun(num_new, "line"), counted_noun(progress.num_tokens, "token")
    result = f"{lines} in {elapsed_s:.1f} s: {tokens}, {speed}"
    return result + earlier_note
