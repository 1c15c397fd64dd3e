"""`twostroke chat`: a conversation in the terminal."""

from __future__ import annotations

import sys
from bisect import bisect_left
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

import click
from msgspec.structs import replace

from twostroke.cli.figures import AnswerFigures, describe
from twostroke.cli.help import Command, option, verbose_option
from twostroke.cli.options import (
    MACHINE_PARAMS,
    PARALLEL_PARAMS,
    SAMPLING_PARAMS,
    TEMPLATE_PARAMS,
    engine_options,
    sampling_params,
    speculation_params,
)
from twostroke.cli.pull import open_engine
from twostroke.cli.terminal import no_echo, on_interrupt, printable
from twostroke.core.errors import (
    ContextLengthError,
    EngineStoppedError,
    TwostrokeError,
    UsageError,
    nearest,
)
from twostroke.core.message_text import counted_noun
from twostroke.core.request import FinishReason

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from rich.console import Console

    from twostroke.core.request import Hints
    from twostroke.core.sampling import SamplingParams
    from twostroke.engine.chat.content_marks import ContentMarks
    from twostroke.engine.engine import Engine
    from twostroke.engine.model_card import ModelCard
    from twostroke.engine.output import Completion, Output

_CHAT_COMMANDS: Final = {
    "/help": "show this help",
    "/new": "start a new conversation",
    "/again": "answer the last message once more",
    "/system TEXT": "start a new conversation with this system message; without TEXT, with none",
    "/quit": "leave, as Ctrl-D does",
    "Ctrl-C": "stop the answer, or clear the line",
    "Alt-Enter": "start a new line in the message",
}
_MIN_ROOM_DIVISOR: Final = 8  # the answer should have at least an eighth of the context


@click.command(
    "chat",
    cls=Command,
    params=[
        *SAMPLING_PARAMS,
        *TEMPLATE_PARAMS,
        *MACHINE_PARAMS,
        *PARALLEL_PARAMS,
        *speculation_params(draft="auto"),
    ],
)
@click.argument("model")
@option("--system", help="System message of the conversation.")
@verbose_option
def command(**values: Any) -> None:
    """Talk with MODEL (a path, hf:owner/repo, or a name from `twostroke models`).

    Ctrl-C stops an answer, Ctrl-D ends the conversation, and /help shows more.
    """
    model = values.pop("model")
    system = values.pop("system")
    is_verbose = values.pop("is_verbose")
    params = sampling_params(values)
    options = engine_options(values, model)
    if sys.stdin is None or not sys.stdin.isatty():
        raise UsageError("chat needs a terminal; use 'twostroke generate' in scripts.")
    with open_engine(model, options, accept=_check_template) as engine:
        from rich.console import Console

        from twostroke.cli.line_editor import typed_messages

        card, console = engine.card, Console(highlight=False)
        detail = engine.facts.full_detail if is_verbose else engine.facts.detail
        about = (
            f"{card.format} · {detail} · {counted_noun(engine.context_length, 'token')} of context"
        )
        if engine.draft is not None:
            about += f" · {engine.draft} drafts tokens"
        console.print(f"{printable(card.name)} · {about}", style="bold", markup=False)
        console.print("/help shows the commands, Ctrl-D leaves.", style="dim")
        ChatSession(engine, params, console, system).run(typed_messages())


def _check_template(card: ModelCard) -> None:
    if card.chat_template is None:
        message = f"{card.name} has no chat template: use 'twostroke generate --raw' instead."
        raise UsageError(message)
    if card.chat_template.refusal is not None:
        reason = card.chat_template.refusal
        raise UsageError(
            f"{card.name} cannot chat: {reason} Use 'twostroke generate --raw' instead."
        )


def _confirm(question: str) -> bool:
    """Ask the user a yes-or-no question on the terminal; Ctrl-C and Ctrl-D mean no."""
    try:
        return click.confirm(question, default=True)
    except click.Abort:
        return False


@dataclass(slots=True)
class ChatSession:
    """A conversation of `twostroke chat`: its messages, and the engine that answers.

    Attributes:
        engine: the engine.
        params: how answers are sampled.
        console: where answers are printed.
        system: the system message, if there is one.
        messages: the messages so far, without the system message.
        ask: asks the user a yes-or-no question.
    """

    engine: Engine
    params: SamplingParams
    console: Console
    system: str | None
    messages: list[dict[str, str]] = field(default_factory=list)
    ask: Callable[[str], bool] = _confirm

    def run(self, lines: Iterator[str]) -> None:
        """Answer each message, and run each /command, until the user leaves."""
        for line in lines:
            try:
                if not line.startswith("/"):
                    self._turn(line.strip())
                elif not self._run_command(line):
                    return
            except KeyboardInterrupt:  # before an answer has started, or pressed a second time
                self._say("stopped", "dim")

    def _run_command(self, line: str) -> bool:
        """Run a /command; return False if the user wants to leave."""
        word, _, rest = line.strip().partition(" ")
        match word:
            case "/quit" | "/exit" | "/bye":
                return False
            case "/new":
                self._begin_anew()
            case "/system":
                self.system = rest.strip() or None
                self._begin_anew()
            case "/again":
                self._answer_again()
            case "/help":
                for name, text in _CHAT_COMMANDS.items():
                    self._say(f"  {name:14} {text}", "none")
            case _:
                hint = nearest(word, [name.split()[0] for name in _CHAT_COMMANDS])
                advice = "" if hint else " A message may begin with a space before its slash."
                self._say(f"There is no command {word}.{hint}{advice} See /help.", "red")
        return True

    def _begin_anew(self) -> None:
        self.messages.clear()
        about = " with this system message" if self.system else ""
        self._say(f"A new conversation{about}.", "dim")

    def _answer_again(self) -> None:
        if not self.messages:
            self._say("There is no message yet.", "dim")
            return
        earlier = self.messages
        self.messages = earlier[:-2]
        is_answered = False
        try:
            is_answered = self._turn(earlier[-2]["content"])
        finally:
            if not is_answered:  # keep the old answer
                self.messages = earlier

    def _turn(self, text: str) -> bool:
        """Answer one message of the user, and add both to the conversation.

        Returns False if there was no answer; the message is then not added.
        """
        question = {"role": "user", "content": text}
        try:
            self._make_room(question)
            tokens, params, hints, marks = self._encode([*self.messages, question])
            answer = self._answer(tokens, self._within_room(params, len(tokens)), hints, marks)
        except EngineStoppedError:
            raise
        except ContextLengthError:
            limit = self.engine.context_length
            self._say(
                f"The conversation exceeds {counted_noun(limit, 'token')}: start anew with /new.",
                "red",
            )
            return False
        except TwostrokeError as error:
            self._say(str(error), "red")
            return False
        if answer:
            self.messages += [question, answer]
        return answer is not None

    def _encode(
        self, messages: list[dict[str, str]]
    ) -> tuple[list[int], SamplingParams, Hints, ContentMarks | None]:
        """Return the token ids of the system message and the given messages as a prompt.

        Also returns the sampling parameters, the hints and the content marks of the answer.
        """
        from twostroke.engine.prompts import encode_turn

        system = [{"role": "system", "content": self.system}] if self.system else []
        return encode_turn(self.engine.card, [*system, *messages], self.params)

    def _make_room(self, question: dict[str, str]) -> None:
        """Offer to drop the oldest messages if the context has too little room for an answer.

        `question` is the user's new message.
        """
        limit = self.engine.context_length
        num_turns = len(self.messages) // 2
        min_room = min(limit // _MIN_ROOM_DIVISOR, self.params.max_tokens or limit)

        def room_after(num_dropped: int) -> int:
            try:
                return limit - len(self._encode([*self.messages[2 * num_dropped :], question])[0])
            except ContextLengthError:
                return 0

        if not num_turns or room_after(0) >= min_room or room_after(num_turns) < 1:
            return
        # Twice that room, so that the next turns also have some.
        num_dropped = bisect_left(range(num_turns), 2 * min_room, key=room_after)
        turns = "turn" if num_dropped == 1 else counted_noun(num_dropped, "turn")
        num_kept = num_turns - num_dropped
        question_text = f"Drop the oldest {turns} and keep {num_kept}?"
        self._say(
            f"The conversation fills the context of {counted_noun(limit, 'token')}.", "yellow"
        )
        if self.ask(question_text if num_kept else "Drop all messages before this one?"):
            del self.messages[: 2 * num_dropped]

    def _answer(
        self,
        tokens: list[int],
        params: SamplingParams,
        hints: Hints,
        content_marks: ContentMarks | None,
    ) -> dict[str, str] | None:
        """Print the answer while it is generated; return it as a chat message, or None if empty."""
        from twostroke.cli.answer import AnswerStream
        from twostroke.engine.output import join

        loop = self.engine.client.loop
        totals_before = loop.snapshot().phases
        generation = self.engine.client.generate(tokens, params, hints=hints)
        outputs: list[Output] = []
        try:
            with (
                no_echo(),
                on_interrupt(generation.cancel),
                AnswerStream(
                    self.console, params.preface, self.engine.card.tokenizer, content_marks
                ) as stream,
            ):
                for output in generation.outputs():
                    outputs.append(output)
                    stream.feed(output)
        finally:
            generation.cancel()
        completion = join(outputs)
        phase_totals = loop.snapshot().phases - totals_before
        hardware = self.engine.limits.above(
            bytes_per_s=phase_totals.max_bytes_per_s,
            flops_per_s=phase_totals.max_flops_per_s,
            may_measure=True,
        )
        figures = AnswerFigures.of(completion.usage, completion.timings, phase_totals, hardware)
        notes = self._notes(completion)
        width = self.console.width
        self._say(describe(figures, completion.usage, notes=notes, width=width), "dim")
        self.console.print()
        return stream.message

    def _within_room(self, params: SamplingParams, num_prompt: int) -> SamplingParams:
        """Lower --max-tokens in `params` to the room that a prompt leaves in the context."""
        room = self.engine.context_length - num_prompt
        if params.max_tokens is None or not 1 <= room < params.max_tokens:
            return params
        return replace(params, max_tokens=room, min_tokens=min(room, params.min_tokens))

    def _notes(self, completion: Completion) -> tuple[str, ...]:
        """Return notes to print after an answer that say why it is incomplete, if it is."""
        if completion.finish_reason is FinishReason.CANCEL:
            return ("stopped",)
        if completion.finish_reason is not FinishReason.LENGTH:
            return ()
        if completion.usage.completion_tokens == self.params.max_tokens:
            return ("cut by --max-tokens",)
        return ("the context is full",)

    def _say(self, text: str, style: str) -> None:
        self.console.print(printable(text), style=style, markup=False, highlight=False)
