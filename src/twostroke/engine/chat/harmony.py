"""Harmony: answers in channels, as gpt-oss writes them; their marks and their grammar.

An answer consists of messages. A message is a header, `<|message|>`, text and an end mark. The
header names a channel: `analysis` is reasoning, `final` the answer, and `commentary` a tool call if
it has a recipient (`to=functions.NAME`), else text for the user. The prompt ends with the first
header's `<|start|>assistant`. Source: OpenAI's description of the format (openai/harmony).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from twostroke.engine.structured_output.lark import TEXT, special_marks, to_lark

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from twostroke.model.tokenizer import Tokenizer

START: Final = "<|start|>"
CHANNEL: Final = "<|channel|>"
CONSTRAIN: Final = "<|constrain|>"
MESSAGE: Final = "<|message|>"
END: Final = "<|end|>"
CALL: Final = "<|call|>"
RETURN: Final = "<|return|>"
MARKS: Final = (START, CHANNEL, CONSTRAIN, MESSAGE, END, CALL, RETURN)
BEGIN_OF_REASONING: Final = f"{CHANNEL}analysis{MESSAGE}"
END_OF_REASONING: Final = f"{END}{START}assistant"
BEGIN_OF_ANSWER: Final = f"{CHANNEL}final{MESSAGE}"


def is_harmony(template: str, tokenizer: Tokenizer) -> bool:
    """Return whether a chat template writes answers in channels, whose marks are tokens."""
    marks = (START, CHANNEL, MESSAGE, END)
    return all(mark in template and tokenizer.find(mark) is not None for mark in marks)


def with_one_analysis(messages: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return messages in which an answer with calls has reasoning or text, but not both.

    The chat template writes the reasoning or the text as the analysis before the call; it refuses a
    message with both.
    """
    merged = []
    for message in messages:
        reasoning, content = message.get("reasoning_content"), message.get("content")
        if message.get("tool_calls") and reasoning and isinstance(content, str) and content:
            both = {"reasoning_content": f"{reasoning}\n\n{content}", "content": ""}
            merged.append(message | both)
        else:
            merged.append(message)
    return merged


class HarmonyGrammar:
    """Writes the grammar, in Lark's notation, of answers in channels that may call tools.

    An answer has at most one call, because the end of a call ends the answer. Reasoning is not part
    of this grammar: the constraint's reasoning section comes before it.
    """

    def __init__(
        self, names: tuple[str, ...], arguments: Iterable[str], tokenizer: Tokenizer
    ) -> None:
        """Prepare the grammar of calls of the functions with these names.

        `arguments` are the rules `args0`, `args1` and so on, of the functions' arguments.
        """
        self._names = names
        self._arguments = tuple(arguments)
        self._specials = special_marks(MARKS, tokenizer)

    def calls(self) -> Iterator[str]:
        """Yield the rules of a grammar for answers that must be a tool call, without text."""
        yield from self._rules()
        yield "start: call"

    def calls_or_text(self) -> Iterator[str]:
        """Yield the rules of a grammar for answers with a tool call or with text."""
        yield from self._rules()
        channel, message = self._to_lark(CHANNEL), self._to_lark(MESSAGE)
        end = self._to_lark(END_OF_REASONING)
        yield f'preamble: {channel} "commentary" {message} TEXT {end}'
        yield f"final: {self._to_lark(BEGIN_OF_ANSWER)} TEXT"
        yield "start: preamble? (call | final)"

    def _rules(self) -> Iterator[str]:
        """Yield the rules of text and of calls; a call's header may have either of two orders."""
        yield TEXT
        yield from self._arguments
        constrain, message = self._to_lark(CONSTRAIN), self._to_lark(MESSAGE)
        yield f'kind: (" "? {constrain} "json" | " json")? {message}'
        calls = []
        for index, name in enumerate(self._names):
            first = self._to_lark(f"{CHANNEL}commentary to=functions.{name}")
            last = self._to_lark(f" to=functions.{name}{CHANNEL}commentary")
            yield f"call{index}: ({first} | {last}) kind args{index}"
            calls.append(f"call{index}")
        yield f"call: {' | '.join(calls)}"

    def _to_lark(self, text: str) -> str:
        return to_lark(text, self._specials)
