"""`twostroke chat`: a conversation in the terminal."""

from __future__ import annotations

import sys
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

import click

from twostroke.cli.fetch import fetch
from twostroke.cli.options import compute_options, engine_options, sampling_options, sampling_params
from twostroke.cli.terminal import Figures, loading_bar
from twostroke.core.errors import RequestError, UsageError, nearest

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from rich.console import Console

    from twostroke.core.sampling import SamplingParams
    from twostroke.engine.build import Engine
    from twostroke.engine.output import Completion, Output

_HELP: Final = {
    "/help": "show this",
    "/new": "begin a new conversation",
    "/again": "answer the last message once more",
    "/system TEXT": "set the system message and begin anew",
    "/quit": "leave (Ctrl-D does too)",
}


@click.command("chat")
@click.argument("model")
@click.option("--system", help="A system message.")
@sampling_options
@compute_options
def command(**given: Any) -> None:
    """Talk with MODEL. Ctrl-C stops an answer, Ctrl-D leaves."""
    model, system = given.pop("model"), given.pop("system")
    params, options = sampling_params(given), engine_options(given)
    if not sys.stdin.isatty():
        raise UsageError("chat needs a terminal; use 'twostroke generate' in scripts.")
    fetch(model)
    from rich.console import Console

    from twostroke.engine.build import build

    with loading_bar(f"Loading {model}") as progress:
        engine = build(model, options, progress)
    with engine:
        if engine.card.chat_template is None:
            message = f"{engine.card.name} has no chat template: use 'generate --raw' instead."
            raise UsageError(message)
        console = Console()
        console.print(f"[bold]{engine.card.name}[/bold] · {engine.facts.detail} · /help for help")
        Conversation(engine, params, console, system).run()


@dataclass(slots=True)
class Conversation:
    """What was said so far, and how to go on."""

    engine: Engine
    params: SamplingParams
    console: Console
    system: str | None
    messages: list[dict[str, str]] = field(default_factory=list)

    def run(self) -> None:
        """Take turns until the person leaves."""
        for line in _lines():
            if not line.startswith("/"):
                self._turn(line)
            elif not self._obey(line):
                return

    def _obey(self, line: str) -> bool:
        """Do what a /command says; False to leave."""
        word, _, rest = line.partition(" ")
        match word:
            case "/quit" | "/exit" | "/bye":
                return False
            case "/new":
                self.messages.clear()
                self.console.print("A new conversation.", style="dim")
            case "/system":
                self.system = rest.strip() or None
                self.messages.clear()
                self.console.print("A new conversation with this system message.", style="dim")
            case "/again":
                self._again()
            case "/help":
                for name, text in _HELP.items():
                    self.console.print(f"  {name:14} {text}", markup=False, highlight=False)
            case _:
                hint = nearest(word, [name.split()[0] for name in _HELP])
                self.console.print(f"There is no command {word}.{hint}", style="red", markup=False)
        return True

    def _again(self) -> None:
        while self.messages and self.messages[-1]["role"] == "assistant":
            self.messages.pop()
        if self.messages:
            self._turn(self.messages.pop()["content"])
        else:
            self.console.print("Nothing was said yet.", style="dim")

    def _turn(self, text: str) -> None:
        from twostroke.engine.prompts import encode_chat

        self.messages.append({"role": "user", "content": text})
        system = [{"role": "system", "content": self.system}] if self.system else []
        try:
            tokens = encode_chat(self.engine.card, [*system, *self.messages])
            completion = self._answer(tokens)
        except RequestError as error:
            self.messages.pop()
            self.console.print(f"{error.message} (/new begins anew)", style="red", markup=False)
            return
        self.messages.append({"role": "assistant", "content": completion.text})

    def _answer(self, tokens: list[int]) -> Completion:
        """Show one answer as it comes; Ctrl-C ends it, and what was said stays said."""
        from twostroke.cli.markdown import MarkdownStream
        from twostroke.engine.build import limits
        from twostroke.engine.output import join

        meter = self.engine.client.loop.meter
        before = meter.strokes
        generation = self.engine.client.generate(tokens, self.params)
        outputs: list[Output] = []
        with MarkdownStream(self.console) as stream:
            while not outputs or outputs[-1].finish_reason is None:
                try:
                    for output in generation.outputs():
                        outputs.append(output)
                        stream.feed(output.text)
                except KeyboardInterrupt:
                    generation.cancel()
        completion = join(outputs)
        figures = Figures.of(
            completion.usage, completion.timings, meter.strokes - before, limits(self.engine)
        )
        self.console.print(figures.line(completion.usage), style="dim", highlight=False)
        self.console.print()
        return completion


def _lines() -> Iterator[str]:
    """Yield what the person types, until Ctrl-D; Ctrl-C clears the line."""
    read = _reader()
    while True:
        try:
            line = read().strip()
        except KeyboardInterrupt:
            continue
        except EOFError:
            return
        if line:
            yield line


def _reader() -> Callable[[], str]:
    """Return a line editor that remembers earlier sessions; Alt-Enter starts a new line."""
    from prompt_toolkit import PromptSession
    from prompt_toolkit.history import FileHistory, History, InMemoryHistory

    from twostroke.core.env import cache_dir

    history: History
    try:
        cache_dir().mkdir(parents=True, exist_ok=True)
        path = cache_dir() / "chat_history"
        path.touch(mode=0o600)
        history = FileHistory(path)
    except OSError:
        history = InMemoryHistory()
    session: PromptSession[str] = PromptSession(history=history)
    return lambda: session.prompt("> ", prompt_continuation="  ")
