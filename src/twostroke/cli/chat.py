"""`twostroke chat`: a conversation in the terminal."""

from __future__ import annotations

import sys
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Final

import click

from twostroke.cli.fetch import open_engine
from twostroke.cli.figures import Figures, describe
from twostroke.cli.help import SectionedCommand
from twostroke.cli.options import (
    compute_options,
    engine_options,
    lasting_speculation_options,
    sampling_options,
    sampling_params,
)
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
    from collections.abc import Callable, Iterator

    from rich.console import Console

    from twostroke.core.sampling import SamplingParams
    from twostroke.engine.build import Engine
    from twostroke.engine.client import ModelCard
    from twostroke.engine.output import Completion, Output

_HELP: Final = {
    "/help": "show this",
    "/new": "begin a new conversation",
    "/again": "answer the last message once more",
    "/system TEXT": "set the system message and begin anew; without TEXT, remove it",
    "/quit": "leave, as Ctrl-D does",
    "Ctrl-C": "stop the answer, or clear the line",
    "Alt-Enter": "a new line in the message",
}


@click.command("chat", cls=SectionedCommand)
@click.argument("model")
@click.option("--system", help="A system message.")
@sampling_options
@compute_options
@lasting_speculation_options
def command(**given: Any) -> None:
    """Talk with MODEL (a path, hf:owner/repo, or a name from `twostroke models`).

    Ctrl-C stops an answer, Ctrl-D leaves, /help shows more.
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
        console.print("/help shows what else there is, Ctrl-D leaves.", style="dim")
        Conversation(engine, params, console, system).run(_lines())


def _check_template(card: ModelCard) -> None:
    if card.chat_template is None:
        message = f"{card.name} has no chat template: use 'twostroke generate --raw' instead."
        raise UsageError(message)


@dataclass(slots=True)
class Conversation:
    """What was said so far, and how to go on."""

    engine: Engine
    params: SamplingParams
    console: Console
    system: str | None
    messages: list[dict[str, str]] = field(default_factory=list)

    def run(self, lines: Iterator[str]) -> None:
        """Take turns until the person leaves."""
        for line in lines:
            try:
                if not line.startswith("/"):
                    self._turn(line.strip())
                elif not self._obey(line):
                    return
            except KeyboardInterrupt:  # before there was an answer to stop, or once more
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
            self._say("Nothing was said yet.", "dim")
            return
        earlier, self.messages = self.messages, self.messages[:-2]
        try:
            self._turn(earlier[-2]["content"])
        finally:
            if len(self.messages) < len(earlier):  # no new answer: the old one stands
                self.messages = earlier

    def _turn(self, text: str) -> None:
        """Have one message answered; a turn without any answer is as if it had not been."""
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
            self._say(f"The conversation has outgrown {limit} tokens: /new begins anew.", "red")
            return
        except TwostrokeError as error:
            self._say(str(error), "red")
            return
        if answer:
            self.messages += [question, answer]

    def _answer(self, tokens: list[int], params: SamplingParams) -> dict[str, str] | None:
        """Show one answer as it comes; Ctrl-C ends it, and what was said stays said.

        Returns its message, if anything was said.
        """
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
        """Return how to choose tokens: --max-tokens, or as many as there is room for."""
        room, most = self.engine.context_length - num_prompt, params.max_tokens
        if most is None or room < 1 or most <= room:
            return params
        return replace(params, max_tokens=room, min_tokens=min(room, params.min_tokens))

    def _notes(self, completion: Completion) -> tuple[str, ...]:
        """Return why an answer is not whole."""
        match completion.finish_reason:
            case FinishReason.CANCEL:
                return ("stopped",)
            case FinishReason.LENGTH if (
                completion.usage.completion_tokens == self.params.max_tokens
            ):
                return ("cut by --max-tokens",)
            case FinishReason.LENGTH:
                return ("the context is full: /new begins anew",)
            case _:
                return ()

    def _say(self, text: str, style: str) -> None:
        self.console.print(printable(text), style=style, markup=False, highlight=False)


def _lines() -> Iterator[str]:
    """Yield what the person types, until Ctrl-D; Ctrl-C clears the line."""
    read = _reader()
    while True:
        try:
            line = read()
        except KeyboardInterrupt:
            continue
        except EOFError:
            return
        if line.strip():
            yield line


def _reader() -> Callable[[], str]:
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
    session: PromptSession[str] = PromptSession(history=history, key_bindings=keys)
    return lambda: session.prompt("> ", prompt_continuation="  ")
