"""`twostroke chat`: messages, commands and interruption; and once with real keys."""

from __future__ import annotations

import io
import os
import pty
import re
import select
import signal
import time
from typing import TYPE_CHECKING

import pytest
from rich.console import Console

from support.commands import started
from support.tiny import write_base_gguf, write_tiny_gguf
from support.waiting import wait_for
from twostroke.cli.answer import AnswerStream
from twostroke.cli.chat import ChatSession
from twostroke.core.errors import EngineStoppedError
from twostroke.core.options import CacheOptions, ComputeOptions, EngineOptions
from twostroke.core.sampling import SamplingParams
from twostroke.engine.chat.content_marks import ContentMarks
from twostroke.engine.engine import build
from twostroke.engine.prompts import encode_chat

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from conftest import Ran
    from twostroke.core.constraint import ReasoningSection
    from twostroke.engine.engine import Engine
    from twostroke.model.tokenizer import Tokenizer

SHORT = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)


OPTIONS = EngineOptions(ComputeOptions(backend="reference"), CacheOptions(memory_bytes=2_000_000))


@pytest.fixture(scope="module")
def engine(tiny: str) -> Iterator[Engine]:
    with build(tiny, OPTIONS) as engine:
        yield engine


class Talk:
    """A chat session whose input a test writes and whose console it reads."""

    def __init__(
        self, engine: Engine, params: SamplingParams = SHORT, system: str | None = None
    ) -> None:
        self.file = io.StringIO()
        console = Console(file=self.file, width=100, color_system=None)
        self.prompts: list[str] = []
        self.agrees = True
        self.conversation = ChatSession(engine, params, console, system, ask=self.ask)

    def ask(self, question: str) -> bool:
        self.prompts.append(question)
        return self.agrees

    def say(self, *lines: str) -> str:
        """Type lines, and return the output since the lines before."""
        before = len(self.file.getvalue())
        self.conversation.run(iter(lines))
        return self.file.getvalue()[before:]

    @property
    def roles(self) -> list[str]:
        return [message["role"] for message in self.conversation.messages]


def test_an_answer_is_shown_with_its_figures_and_remembered(engine: Engine) -> None:
    talk = Talk(engine)
    output = talk.say("hello", "and now?")
    assert talk.roles == ["user", "assistant"] * 2
    assert [m["content"] for m in talk.conversation.messages][::2] == ["hello", "and now?"]
    assert output.count("TTFT ") == 2
    assert "cut by --max-tokens" in output


def test_a_model_that_cannot_chat_is_refused_before_its_weights_are_read(
    cli: Callable[..., Ran], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def read(*_: object, **__: object) -> None:
        pytest.fail("the weights were read")

    monkeypatch.setattr("twostroke.backends.recipe.create_backend", read)
    ran = cli("chat", str(write_base_gguf(tmp_path / "base.gguf")), stdin=None)
    assert ran.code == 2
    assert "base has no chat template: use 'twostroke generate --raw' instead." in ran.err


def test_marks_of_an_answer_depend_on_its_prompt(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    template = (
        "{% for m in messages %}{{ m.role }}: "
        "{% if m.role == 'assistant' %}<response>{{ m.content }}</response>"
        "{% else %}{{ m.content }}{% endif %}{% endfor %}"
        "{% if add_generation_prompt %}assistant: <response>{% endif %}"
    )
    model = write_tiny_gguf(tmp_path / "marks.gguf", metadata={"tokenizer.chat_template": template})
    shown_marks: list[ContentMarks | None] = []

    class RecordedStream(AnswerStream):
        def __init__(
            self,
            console: Console,
            preface: ReasoningSection | None,
            tokenizer: Tokenizer,
            content_marks: ContentMarks | None = None,
        ) -> None:
            shown_marks.append(content_marks)
            super().__init__(console, preface, tokenizer, content_marks)

    monkeypatch.setattr("twostroke.cli.answer.AnswerStream", RecordedStream)
    with build(str(model), OPTIONS) as engine:
        Talk(engine).say("hello")
    assert shown_marks == [ContentMarks("", "</response>")]


def test_what_was_said_is_in_the_next_prompt(engine: Engine) -> None:
    talk = Talk(engine)
    talk.say("hello")
    output = talk.say("hello")
    cached = re.search(r"(\d+) of (\d+) prompt tokens cached", output)
    assert cached is not None
    whole_prompt = encode_chat(engine.card, talk.conversation.messages[:3])
    assert int(cached[2]) == len(whole_prompt)


def test_a_system_message_begins_anew_and_stays(engine: Engine) -> None:
    talk = Talk(engine)
    talk.say("hello")
    assert "A new conversation with this system message." in talk.say("/system be kind")
    assert talk.roles == []
    assert talk.conversation.system == "be kind"
    output = talk.say("hello", "/new")
    assert "A new conversation with this system message." in output
    talk.say("/system")
    assert talk.conversation.system is None


def test_again_answers_the_last_message_once_more(engine: Engine) -> None:
    talk = Talk(engine)
    assert "There is no message yet." in talk.say("/again")
    talk.say("hello")
    before = list(talk.conversation.messages)
    assert "TTFT" in talk.say("/again")
    assert talk.conversation.messages == before


def test_commands_are_explained_and_wrong_ones_named(engine: Engine) -> None:
    talk = Talk(engine)
    assert "/again" in talk.say("/help")
    assert "There is no command /hepl. Did you mean '/help'?" in talk.say("/hepl")
    assert "may begin with a space" in talk.say("/zzzzzz")
    assert talk.roles == []


def test_a_space_before_the_slash_makes_it_a_message(engine: Engine) -> None:
    talk = Talk(engine)
    talk.say(" /etc/hosts is what?")
    assert talk.conversation.messages[0]["content"] == "/etc/hosts is what?"


@pytest.mark.parametrize("word", ["/quit", "/exit", "/bye"])
def test_nothing_is_said_after_leaving(engine: Engine, word: str) -> None:
    talk = Talk(engine)
    talk.say(word, "hello")
    assert talk.roles == []


def test_a_conversation_that_outgrows_the_context_goes_on_anew(engine: Engine) -> None:
    talk = Talk(engine)
    talk.say("hello")
    output = talk.say("word " * 600)
    assert "The conversation exceeds 512 tokens: start anew with /new." in output
    assert talk.roles == ["user", "assistant"]
    assert talk.prompts == []  # the message alone is too long
    assert "TTFT" in talk.say("/new", "hello")


def test_a_full_conversation_goes_on_without_its_oldest_turns(engine: Engine) -> None:
    params = SamplingParams(temperature=0, max_tokens=100, ignore_eos=True)
    talk = Talk(engine, params, system="be kind")
    number = 0
    while not talk.prompts:
        number += 1
        output = talk.say(f"message {number}")
    assert "The conversation fills the context of 512 tokens." in output
    assert "TTFT" in output
    messages = talk.conversation.messages
    num_dropped = number - len(messages) // 2
    assert num_dropped >= 1
    assert messages[0]["content"] == f"message {num_dropped + 1}"
    dropped = "turn" if num_dropped == 1 else f"{num_dropped} turns"
    assert talk.prompts == [f"Drop the oldest {dropped} and keep {len(messages) // 2 - 1}?"]
    assert len(encode_chat(engine.card, messages[:-1])) <= 512 - 2 * 512 // 8
    talk.say("/again")
    assert talk.conversation.messages == messages


def test_who_keeps_all_turns_gets_the_room_that_is_left(engine: Engine) -> None:
    talk = Talk(engine, SamplingParams(temperature=0, max_tokens=150, ignore_eos=True))
    talk.agrees = False
    output = ""
    while "the context is full" not in output:
        output = talk.say("hello")
    num_messages = len(talk.roles)
    assert "exceeds 512 tokens: start anew with /new." in talk.say("hello")
    assert len(talk.roles) == num_messages
    talk.agrees = True
    assert "TTFT" in talk.say("hello")
    assert len(talk.roles) <= num_messages


def test_an_answer_gets_what_room_there_is(engine: Engine) -> None:
    params = SamplingParams(temperature=0, max_tokens=500, min_tokens=490, ignore_eos=True)
    talk = Talk(engine, params)
    output = talk.say("hello" * 4)
    assert "the context is full" in output


def test_a_message_that_breaks_the_engine_is_as_if_not_said(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    talk = Talk(engine)
    backend = engine.client.loop._backend

    def fail(plan: object) -> None:
        raise ValueError("no numbers today")

    talk.say("hello")
    monkeypatch.setattr(backend, "run", fail)
    assert "The engine failed on this request" in talk.say("what now?")
    monkeypatch.undo()
    assert talk.roles == ["user", "assistant"]
    assert "TTFT" in talk.say("what now?")


def test_an_engine_that_stopped_ends_the_program(tiny: str) -> None:
    options = EngineOptions(
        ComputeOptions(backend="reference"), CacheOptions(memory_bytes=2_000_000)
    )
    engine = build(tiny, options)
    engine.close()
    with pytest.raises(EngineStoppedError):
        Talk(engine).say("hello")


@pytest.mark.parametrize("after", [0, 3])
def test_ctrl_c_ends_the_answer_and_nothing_else(
    engine: Engine, monkeypatch: pytest.MonkeyPatch, after: int
) -> None:
    params = SamplingParams(temperature=0, ignore_eos=True)
    talk = Talk(engine, params)
    run, steps = engine.client.loop._backend.run, iter(range(10**6))

    def press(plan: object) -> object:
        if next(steps) == after:
            os.kill(os.getpid(), signal.SIGINT)
            time.sleep(0.1)
        return run(plan)  # type: ignore[arg-type]

    before = signal.getsignal(signal.SIGINT)
    monkeypatch.setattr(engine.client.loop._backend, "run", press)
    output = talk.say("hello")
    assert signal.getsignal(signal.SIGINT) is before
    assert "stopped" in output
    wait_for(lambda: engine.client.loop.snapshot().scheduler.num_running == 0)
    assert talk.roles == (["user", "assistant"] if "TTFT" in output else [])
    assert "TTFT" in Talk(engine).say("hello")


def test_a_pipe_is_no_terminal(cli: Callable[..., Ran], tiny: str) -> None:
    ran = cli("chat", tiny)
    assert ran.code == 2
    assert "chat needs a terminal; use 'twostroke generate'" in ran.err


def test_keys_reach_the_conversation(endless: str, monkeypatch: pytest.MonkeyPatch) -> None:
    master, slave = pty.openpty()
    line = ("chat", endless, "--temperature", "0", "--ignore-eos", "--backend", "reference")
    with started(*line, stdin=slave, stdout=slave, stderr=slave) as process:
        os.close(slave)
        keyboard = Keyboard(master)
        keyboard.type("/hlep\r")
        keyboard.wait_for("Did you mean '/help'?")
        keyboard.type("first\x1b\rsecond\r")  # Alt-Enter: one message of two lines
        keyboard.wait_for("…")
        time.sleep(0.3)
        process.send_signal(signal.SIGINT)
        keyboard.wait_for("stopped")
        keyboard.type("half\x03/new\r")  # Ctrl-C clears the line
        keyboard.wait_for("A new conversation.")
        keyboard.type("\x04")
        assert process.wait(120) == 0
    os.close(master)
    assert "Traceback" not in keyboard.seen
    assert keyboard.seen.count("TTFT") == 1


class Keyboard:
    """Types on a pseudo-terminal and reads its screen."""

    def __init__(self, master: int) -> None:
        self._master = master
        self._from = 0
        self.seen = ""

    def type(self, keys: str) -> None:
        """Type keys once the prompt is shown; before, the terminal itself changes some keys."""
        self.wait_for("\x1b[?2004h")
        os.write(self._master, keys.encode())

    def wait_for(self, text: str, timeout_s: float = 30) -> None:
        """Read the screen until `text` appears after the text of the previous wait."""
        deadline = time.monotonic() + timeout_s
        while (result := self.seen.find(text, self._from)) < 0:
            assert time.monotonic() < deadline, f"{text!r} did not come: {self.seen[-500:]!r}"
            if select.select([self._master], [], [], 0.1)[0]:
                self.seen += os.read(self._master, 65536).decode(errors="replace")
        self._from = result + len(text)
