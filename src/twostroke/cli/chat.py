"""`twostroke chat`: a conversation in the terminal."""

from __future__ import annotations

import sys
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

import click
from msgspec.structs import replace

from twostroke.cli.figures import Figures, describe
from twostroke.cli.help import Command, option
from twostroke.cli.options import MACHINE, SAMPLING, engine_options, sampling_params, speculation
from twostroke.cli.pull import open_engine
from twostroke.cli.terminal import no_echo, on_interrupt, printable
from twostroke.core.errors import (
    ContextLengthError,
    EngineStoppedError,
    TwostrokeError,
    UsageError,
    nearest,
)
from twostroke.core.request import FinishReason

if TYPE_CHECKING:
    from collections.abc import Iterator

    from prompt_toolkit import PromptSession
    from rich.console import Console

    from twostroke.core.sampling import SamplingParams
    from twostroke.engine.build import Engine
    from twostroke.engine.client import ModelCard
    from twostroke.engine.output import Completion, Output

_HELP: Final = {
    "/help": "show this help",
    "/new": "start a new conversation",
    "/again": "answer the last message once more",
    "/system TEXT": "start a new conversation with this system message; without TEXT, with none",
    "/quit": "leave, as Ctrl-D does",
    "Ctrl-C": "stop the answer, or clear the line",
    "Alt-Enter": "start a new line in the message",
}


@click.command(
    "chat", cls=Command, params=[*SAMPLING, *MACHINE.values(), *speculation(draft="auto")]
)
@click.argument("model")
@option("--system", help="A system message for the conversation.")
def command(**given: Any) -> None:
    """Talk with MODEL (a path, hf:owner/repo, or a name from `twostroke models`).

    Ctrl-C stops an answer, Ctrl-D ends the conversation, and /help shows more.
    """
    model, system = given.pop("model"), given.pop("system")
    params, options = sampling_params(given), engine_options(given)
    if sys.stdin is None or not sys.stdin.isatty():
        raise UsageError("chat needs a terminal; use 'twostroke generate' in scripts.")
    with open_engine(model, options, accept=_check_template) as engine:
        from rich.console import Console

        card, console = engine.card, Console(highlight=False)
        about = f"{card.format} · {engine.facts.detail} · {engine.context_length} tokens of context"
        if engine.draft is not None:
            about += f" · {engine.draft} guesses ahead"
        console.print(f"{printable(card.name)} · {about}", style="bold", markup=False)
        console.print("/help shows the commands, Ctrl-D leaves.", style="dim")
        Conversation(engine, params, console, system).run(_lines())


def _check_template(card: ModelCard) -> None:
    if card.chat_template is None:
        message = f"{card.name} has no chat template: use 'twostroke generate --raw' instead."
        raise UsageError(message)


@dataclass(slots=True)
class Conversation:
    """The messages so far, and how the next is answered."""

    engine: Engine
    params: SamplingParams
    console: Console
    system: str | None
    messages: list[dict[str, str]] = field(default_factory=list)

    def run(self, lines: Iterator[str]) -> None:
        """Answer each line, or obey it, until the person leaves."""
        for line in lines:
            try:
                if not line.startswith("/"):
                    self._turn(line.strip())
                elif not self._obey(line):
                    return
            except KeyboardInterrupt:  # before there is an answer to stop, or pressed again
                self._say("stopped", "dim")

    def _obey(self, line: str) -> bool:
        """Do what a /command says; False to leave."""
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
                self._again()
            case "/help":
                for name, text in _HELP.items():
                    self._say(f"  {name:14} {text}", "none")
            case _:
                hint = nearest(word, [name.split()[0] for name in _HELP])
                how = "" if hint else " A message may begin with a space before its slash."
                self._say(f"There is no command {word}.{hint}{how} See /help.", "red")
        return True

    def _begin_anew(self) -> None:
        self.messages.clear()
        about = " with this system message" if self.system else ""
        self._say(f"A new conversation{about}.", "dim")

    def _again(self) -> None:
        if not self.messages:
            self._say("There is no message yet.", "dim")
            return
        earlier, self.messages = self.messages, self.messages[:-2]
        try:
            self._turn(earlier[-2]["content"])
        finally:
            if len(self.messages) < len(earlier):  # no new answer: keep the old one
                self.messages = earlier

    def _turn(self, text: str) -> None:
        """Answer one message; without an answer, the message is forgotten."""
        from twostroke.engine.prompts import encode_turn

        question = {"role": "user", "content": text}
        system = [{"role": "system", "content": self.system}] if self.system else []
        try:
            messages = [*system, *self.messages, question]
            tokens, params = encode_turn(self.engine.card, messages, self.params)
            answer = self._answer(tokens, self._within_room(params, len(tokens)))
        except EngineStoppedError:
            raise
        except ContextLengthError:
            limit = self.engine.context_length
            self._say(f"The conversation exceeds {limit} tokens: start anew with /new.", "red")
            return
        except TwostrokeError as error:
            self._say(str(error), "red")
            return
        if answer:
            self.messages += [question, answer]

    def _answer(self, tokens: list[int], params: SamplingParams) -> dict[str, str] | None:
        """Show one answer as it comes, until Ctrl-C; return its message if it has any text."""
        from twostroke.cli.answer import AnswerStream
        from twostroke.engine.output import join

        loop = self.engine.client.loop
        before = loop.snapshot().strokes
        generation = self.engine.client.generate(tokens, params)
        outputs: list[Output] = []
        try:
            with (
                no_echo(),
                on_interrupt(generation.cancel),
                AnswerStream(self.console, params.preface, self.engine.card.tokenizer) as stream,
            ):
                for output in generation.outputs():
                    outputs.append(output)
                    stream.feed(output)
        finally:
            generation.cancel()
        completion = join(outputs)
        strokes = loop.snapshot().strokes - before
        hardware = self.engine.limits.above(strokes, may_measure=True)
        figures = Figures.of(completion.usage, completion.timings, strokes, hardware)
        notes = self._notes(completion)
        width = self.console.width
        self._say(describe(figures, completion.usage, notes=notes, width=width), "dim")
        self.console.print()
        return stream.message

    def _within_room(self, params: SamplingParams, num_prompt: int) -> SamplingParams:
        """Return `params` with --max-tokens lowered to the room that is left."""
        room = self.engine.context_length - num_prompt
        if params.max_tokens is None or not 1 <= room < params.max_tokens:
            return params
        return replace(params, max_tokens=room, min_tokens=min(room, params.min_tokens))

    def _notes(self, completion: Completion) -> tuple[str, ...]:
        """Return why an answer is incomplete."""
        if completion.finish_reason is FinishReason.CANCEL:
            return ("stopped",)
        if completion.finish_reason is not FinishReason.LENGTH:
            return ()
        if completion.usage.completion_tokens == self.params.max_tokens:
            return ("cut by --max-tokens",)
        return ("the context is full: start anew with /new",)

    def _say(self, text: str, style: str) -> None:
        self.console.print(printable(text), style=style, markup=False, highlight=False)


def _lines() -> Iterator[str]:
    """Yield what the person types, until Ctrl-D; Ctrl-C clears the line."""
    session = _line_editor()
    while True:
        try:
            line = session.prompt("> ", prompt_continuation="  ")
        except KeyboardInterrupt:
            continue
        except EOFError:
            return
        if line.strip():
            yield line


def _line_editor() -> PromptSession[str]:
    """Return a line editor that remembers earlier sessions; Alt-Enter starts a new line."""
    from prompt_toolkit import PromptSession
    from prompt_toolkit.history import FileHistory, History, InMemoryHistory
    from prompt_toolkit.key_binding import KeyBindings, KeyPressEvent

    from twostroke.core.env import cache_dir

    keys = KeyBindings()

    @keys.add("escape", "enter")
    def new_line(event: KeyPressEvent) -> None:
        event.current_buffer.insert_text("\n")

    history: History
    path = cache_dir() / "chat_history"
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch(mode=0o600)
        path.open("ab").close()
        history = FileHistory(path)
    except OSError:
        history = InMemoryHistory()
    return PromptSession(history=history, key_bindings=keys)
