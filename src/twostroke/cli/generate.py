"""`twostroke generate`: answers one prompt, as text or as one JSON object."""

from __future__ import annotations

import os
import sys
from typing import TYPE_CHECKING, Any

import click
from msgspec.structs import asdict, replace

from twostroke.cli.figures import AnswerFigures, describe
from twostroke.cli.help import Command, TextFileParam, option, read_text
from twostroke.cli.options import (
    CONSTRAINT_PARAMS,
    MACHINE_PARAMS,
    PARALLEL_PARAMS,
    SAMPLING_PARAMS,
    TEMPLATE_PARAMS,
    constraint,
    engine_options,
    is_given_by_user,
    sampling_params,
    speculation_params,
)
from twostroke.cli.pull import open_engine
from twostroke.cli.terminal import printable
from twostroke.core.errors import ContextLengthError, Field, SchemaMissError, UsageError
from twostroke.core.json_io import encode_json
from twostroke.core.message_text import counted_noun
from twostroke.core.request import FinishReason

if TYPE_CHECKING:
    from twostroke.core.request import Hints
    from twostroke.core.sampling import SamplingParams
    from twostroke.engine.chat.content_marks import ContentMarks, UnmarkedText
    from twostroke.engine.counters import PrefillDecodeTotals
    from twostroke.engine.engine import Engine
    from twostroke.engine.model_card import ModelCard
    from twostroke.engine.output import Completion, Output, Usage

_HOW_TO_PROMPT = "give one with -p TEXT, -f FILE, or on standard input."


@click.command(
    "generate",
    cls=Command,
    params=[
        *SAMPLING_PARAMS,
        *CONSTRAINT_PARAMS,
        *TEMPLATE_PARAMS,
        *MACHINE_PARAMS,
        *PARALLEL_PARAMS,
        *speculation_params(),
    ],
)
@click.argument("model")
@click.argument("text", required=False, metavar="[PROMPT]")
@option("-p", "--prompt", help="The prompt; - is standard input, which is also the default.")
@option("-f", "--file", type=TextFileParam(may_be_empty=True), help="File with the prompt.")
@option("--system", help="System message before the prompt.")
@option("--raw", is_flag=True, help="Continue the prompt's text, without the chat template.")
@option(
    "--parse-special/--no-parse-special",
    default=True,
    help="Turn the texts of special tokens, such as <|im_start|>, into these tokens in a prompt "
    "without the chat template.",
)
@option(
    "--suffix",
    metavar="TEXT|@FILE",
    help="Generate the text between the prompt and this suffix, without the chat template; for "
    "models that can fill in the middle.",
)
@option(
    "--prediction",
    type=TextFileParam(may_be_empty=True),
    help="File that the answer will resemble, such as code to edit: speeds the answer up.",
)
@option("--json", "as_json", is_flag=True, help="Print one JSON object, for scripts.")
@option("-q", "--quiet", is_flag=True, help="Print the answer and nothing else.")
def command(**values: Any) -> None:
    """Answer one prompt with MODEL (a path, hf:owner/repo, or a name from `twostroke models`).

    If the model has a chat template, the prompt is sent as a user's message. Otherwise, or with
    --raw, the model continues the prompt's text. The answer goes to standard output, and a line
    with its speed to standard error.
    """
    text = _prompt(values.pop("text"), values.pop("prompt"), values.pop("file"))
    as_json = values.pop("as_json")
    quiet = values.pop("quiet")
    system = values.pop("system")
    raw = values.pop("raw")
    model = values.pop("model")
    prediction = values.pop("prediction") or ""
    suffix = values.pop("suffix") or ""
    parse_special = values.pop("parse_special")
    if raw or suffix:
        _check_chat_options("raw" if raw else "suffix")
    if suffix.startswith("@"):
        suffix = read_text(suffix[1:])
    params = sampling_params(values, constraint(values))
    options = engine_options(values, model)
    from twostroke.engine.prompts import to_hints

    with open_engine(model, options, quiet=quiet or as_json) as engine:
        card = replace(engine.card, parses_special=parse_special)
        tokens, params, marks = _encode(card, text, params, system, suffix, raw=raw)
        hints = to_hints(engine.card, "auto", prediction)
        completion = _run(engine, tokens, params, hints, marks, show=not as_json)
        phase_totals = engine.client.loop.snapshot().phases
    if not quiet or as_json:
        _report(engine, completion, phase_totals, as_json=as_json)
    if completion.schema_miss:
        raise SchemaMissError(
            f"The answer breaks the rule {completion.schema_miss} of the schema, also after it was "
            "drawn again: describe the rule in the prompt, or relax it."
        )


def _report(
    engine: Engine, completion: Completion, phase_totals: PrefillDecodeTotals, *, as_json: bool
) -> None:
    """Print an answer as one JSON object; or only its speed, since the text is printed already."""
    hardware = engine.limits.above(
        bytes_per_s=phase_totals.max_bytes_per_s,
        flops_per_s=phase_totals.max_flops_per_s,
        may_measure=True,
    )
    figures = AnswerFigures.of(completion.usage, completion.timings, phase_totals, hardware)
    if as_json:
        result = {
            "text": completion.text,
            "token_ids": list(completion.token_ids),
            "finish_reason": completion.finish_reason.value,
            "usage": _usage_fields(completion.usage),
            "timings": asdict(figures),
        }
        if completion.schema_miss:
            result["schema_miss"] = completion.schema_miss
        click.echo(encode_json(result).decode())
    else:
        click.secho(
            describe(figures, completion.usage, width=_terminal_width()), dim=True, err=True
        )


def _usage_fields(usage: Usage) -> dict[str, int]:
    """Return an answer's token counts as --json prints them."""
    fields = asdict(usage)
    del fields["reused_tokens"]
    return fields


def _prompt(text: str | None, option: str | None, file: str | None) -> str:
    """Return the prompt's text, from the argument, the option -p, a file, or standard input."""
    sources = [source for source in (text, option, file) if source is not None]
    if len(sources) > 1:
        raise UsageError("Give the prompt once: in quotes, with -p TEXT, or with -f FILE.")
    if file is not None:
        return file
    if sources == ["-"] or (not sources and sys.stdin is not None and not sys.stdin.isatty()):
        return read_text("-")
    if not sources:
        raise UsageError(f"There is no prompt: {_HOW_TO_PROMPT}")
    return sources[0]


def _check_chat_options(other: str) -> None:
    """Raise UsageError if the user gave an option that has no effect without a chat template.

    `other` is the option, --raw or --suffix, that prevents the chat template.
    """
    for name in ("chat_template", "chat_template_file", "reasoning_budget"):
        if is_given_by_user(name):
            reason = "cannot be combined with {other}: leave one of them out."
            raise UsageError(reason, field=name, other=Field(other))


def _encode(
    card: ModelCard,
    text: str,
    params: SamplingParams,
    system: str | None,
    suffix: str,
    *,
    raw: bool,
) -> tuple[list[int], SamplingParams, ContentMarks | None]:
    """Return the token ids of the prompt, and the sampling parameters of its answer.

    Also returns the marks around the text of the answer, if the model writes such marks.

    The prompt is a user's message for the chat template. With `raw`, or without a chat template, it
    is a text that the answer continues. With a `suffix`, the answer fills the gap between the
    prompt and the suffix. Chat templates and gaps may add to the sampling parameters.
    """
    from twostroke.engine.prompts import (
        encode_infill_prompt,
        encode_text,
        encode_turn,
        with_infill_end_ids,
    )

    if suffix or raw or card.chat_template is None:
        if system is not None:
            reason = f"{card.name} has none"
            reason = (
                "--suffix is without one" if suffix else "--raw is without one" if raw else reason
            )
            raise UsageError(f"--system needs a chat template, and {reason}.")
        if suffix:
            tokens = encode_infill_prompt(card, text, suffix)
            return tokens, with_infill_end_ids(card, params), None
        return encode_text(card, text), params, None
    if card.chat_template.refusal is not None:
        reason = card.chat_template.refusal
        raise UsageError(f"{card.name} cannot chat: {reason} --raw continues a text instead.")
    if not text.strip():
        raise UsageError(f"The prompt is empty: {_HOW_TO_PROMPT}")
    messages = [{"role": "system", "content": system}] if system is not None else []
    # Files and `echo` end in a newline that is not part of the message.
    message = {"role": "user", "content": text.removesuffix("\n")}
    tokens, params, _, marks = encode_turn(card, [*messages, message], params)
    return tokens, params, marks


def _run(
    engine: Engine,
    tokens: list[int],
    params: SamplingParams,
    hints: Hints,
    marks: ContentMarks | None,
    *,
    show: bool,
) -> Completion:
    """Generate the answer to the prompt's tokens; with `show`, print its text as it arrives.

    The `marks` that some models write around their text are removed.
    """
    from twostroke.engine.chat.content_marks import UnmarkedText
    from twostroke.engine.client import Caller
    from twostroke.engine.output import join
    from twostroke.engine.redraw import EncodedPrompt, with_seed

    safe = printable if sys.stdout.isatty() else str
    outputs = []
    stream = EncodedPrompt(tokens, with_seed(params), Caller(), hints).stream(engine.client)
    if marks is not None:
        unmarked = UnmarkedText(marks, params.preface)
        stream = (_without_marks(output, unmarked) for output in stream)
    try:
        for output in stream:
            outputs.append(output)
            if show:
                sys.stdout.write(safe(output.text))
                sys.stdout.flush()
    except ContextLengthError:
        raise _context_length_error(engine, len(tokens), params.max_tokens) from None
    finally:
        if show and outputs:  # also after an interrupted answer
            sys.stdout.write("\n")
            sys.stdout.flush()
    return join(outputs)


def _without_marks(output: Output, unmarked: UnmarkedText) -> Output:
    """Return an output of the engine without the marks around the answer's text."""
    text = unmarked.feed(output.text)
    if output.finish_reason is not None:
        text += unmarked.finish(is_cut=output.finish_reason is FinishReason.LENGTH)
    return replace(output, text=text)


def _context_length_error(
    engine: Engine, num_prompt: int, max_tokens: int | None
) -> ContextLengthError:
    """Return the error for a prompt that does not fit into the context, with options that help."""
    limit, model_limit = engine.context_length, engine.card.cost.program.context_length
    remedy = f", or raise --context-length (up to {model_limit})" if limit < model_limit else ""
    if num_prompt >= limit:
        return ContextLengthError(
            f"The prompt has {counted_noun(num_prompt, 'token')}, but prompt and answer together "
            f"may have {limit}: shorten it{remedy}."
        )
    return ContextLengthError(
        f"The prompt has {counted_noun(num_prompt, 'token')} and --max-tokens is {max_tokens}, but "
        f"prompt and answer together may have {limit}: lower --max-tokens to "
        f"{limit - num_prompt}{remedy}."
    )


def _terminal_width() -> int:
    """Return the width of the terminal on standard error; 0 if it is not a terminal."""
    try:
        return os.get_terminal_size(sys.stderr.fileno()).columns
    except (OSError, ValueError):
        return 0
