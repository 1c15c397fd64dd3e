"""Answers to conversations in Python: their text, their reasoning and their tool calls."""

from __future__ import annotations

import secrets
from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, Any, Final, NamedTuple, TypedDict

from msgspec.structs import replace

from twostroke.core.errors import RequestError, UsageError, nearest
from twostroke.core.json_io import parse_json
from twostroke.engine.chat.call_reader import ArgumentsPiece, CallBegin, ReasoningPiece, TextPiece
from twostroke.engine.chat.messages import to_plain_json
from twostroke.engine.chat.reasoning import Thinking
from twostroke.engine.chat.tools import Function, Tools
from twostroke.engine.output import AnswerCall, AnswerChunk
from twostroke.engine.prompts import (
    chat_of,
    encode_rendered,
    to_hints,
    with_reasoning_budget,
    with_shared_lengths,
)

if TYPE_CHECKING:
    from twostroke.core.request import Hints
    from twostroke.core.sampling import SamplingParams
    from twostroke.engine.chat.call_reader import Piece
    from twostroke.engine.chat.reader import AnswerFormat, AnswerReader
    from twostroke.engine.model_card import ModelCard
    from twostroke.engine.output import Completion, Output
    from twostroke.model.tokenizer import Tokenizer

_CHOICES: Final = ("auto", "none", "required")
_CALL_ID_BYTES: Final = 12

Message = Mapping[str, Any]


class ChatOptions(TypedDict, total=False):
    """The options of `LLM.chat` besides the sampling parameters.

    `tools` are functions in OpenAI's form, with a JSON schema of their `parameters`. `tool_choice`
    is "auto", "none", "required", or the function to call: its name, or OpenAI's object.
    `chat_template_kwargs` are variables for the model's chat template, such as `enable_thinking`.
    `reasoning_effort` is "none", "minimal", "low", "medium", "high" or "xhigh". With
    `continue_final_message` the answer continues the last message, which an assistant wrote.
    `speculate` names the speculation method, and `prediction` is the text of the expected answer:
    both change the speed and never the answers.
    """

    tools: Sequence[Mapping[str, Any]]
    tool_choice: str | Mapping[str, Any]
    chat_template_kwargs: Mapping[str, Any]
    reasoning_effort: str
    continue_final_message: bool
    speculate: str
    prediction: str


def check_options(options: Mapping[str, object]) -> None:
    """Raise UsageError for a keyword argument of `LLM.chat` that `ChatOptions` does not have."""
    known_names = ChatOptions.__annotations__
    for name in options:
        if name not in known_names:
            has = f"It has {', '.join(known_names)}."
            raise UsageError(f"chat has no option '{name}'.{nearest(name, known_names)} {has}")


def encode_conversation(
    card: ModelCard, messages: Sequence[Message], params: SamplingParams, options: ChatOptions
) -> tuple[list[int], SamplingParams, Hints, AnswerFormat, tuple[Function, ...]]:
    """Encode the messages of a conversation as a prompt.

    Returns the prompt's token ids, the parameters and the hints of the answer, the format in which
    the answer is read, and the functions that the answer may call.

    Raises:
        RequestError: the model has no chat template, the template refuses the messages, or an
            option has a wrong value.
    """
    chat = chat_of(card)
    tools = read_tools(options.get("tools") or (), options.get("tool_choice") or "auto")
    continues = bool(options.get("continue_final_message"))
    variables = options.get("chat_template_kwargs") or {}
    if not isinstance(variables, Mapping):
        raise RequestError("must be an object with variables.", field="chat_template_kwargs")
    prompt_tools = () if tools is None else tools.prompt_tools
    thinking = chat.thinking_with_budget(
        Thinking(
            effort=options.get("reasoning_effort"),
            param="reasoning_effort",
            budget=params.reasoning_budget,
            variables=dict(variables),
        ),
        default=None,
        has_tools=bool(prompt_tools),
    )
    params = with_reasoning_budget(card, params, thinking)
    render = partial(
        chat.render,
        tools=prompt_tools,
        add_generation_prompt=not continues,
        continue_final_message=continues,
        thinking=thinking,
    )
    prompt = render(messages)
    last = messages[-1]
    turn = chat.prepare_answer(
        prompt,
        tools,
        params.constraint,
        continued=str(last.get("content") or "") if continues else "",
        has_result=last.get("role") == "tool" and not continues,
    )
    tokens = encode_rendered(card, turn.prompt)
    hints = with_shared_lengths(
        card,
        to_hints(card, options.get("speculate", "auto"), options.get("prediction", "")),
        turn.prompt,
        tokens,
        messages=messages,
        render=render,
    )
    functions = () if tools is None else tools.functions
    return tokens, turn.constrained(params), hints, turn.answer_format(), functions


def read_tools(
    tools: Sequence[Mapping[str, Any]], choice: str | Mapping[str, Any] = "auto"
) -> Tools | None:
    """Return the tools that an answer may call, or None if it may call none.

    `choice` is "auto", "none", "required", a function's name, or OpenAI's object with the name.

    Raises:
        RequestError: a tool is not in OpenAI's form, or `choice` names no tool of the list.
    """
    if isinstance(tools, (str, Mapping)) or not hasattr(tools, "__len__"):
        raise RequestError("must be a list of functions.", field="tools")
    shown_tools: list[dict[str, Any]] = []
    functions: dict[str, Function] = {}
    for index, tool in enumerate(tools):
        description = _function_of(tool, f"tools[{index}]")
        name = description["name"]
        if name in functions:
            raise RequestError("has the name of an earlier tool.", field=f"tools[{index}].name")
        functions[name] = Function.described(
            name,
            description.get("parameters"),
            f"tools[{index}].parameters",
            is_strict=bool(description.pop("strict", False)),
        )
        shown_tools.append({"type": "function", "function": description})
    mode = choice if isinstance(choice, str) and choice in _CHOICES else None
    is_object = isinstance(choice, Mapping)
    if isinstance(choice, Mapping):
        function = choice.get("function", choice)
        choice = function.get("name", choice) if isinstance(function, Mapping) else choice
    if mode is None and (not isinstance(choice, str) or choice not in functions):
        choices = tuple(functions) if is_object and functions else (*_CHOICES, *functions)
        hint = nearest(str(choice), choices)
        reason = f"must be one of {', '.join(choices)}, got {{word!r}}.{hint}"
        raise RequestError(reason, field="tool_choice", word=choice)
    if mode == "required" and not functions:
        raise RequestError("needs tools.", field="tool_choice")
    if mode == "none" or not functions:
        return None
    allowed = tuple(functions.values()) if mode else (functions[str(choice)],)
    return Tools(
        tuple(shown_tools),
        allowed,
        is_forced=mode in {None, "required"},
        is_parallel=mode is not None,
    )


def _function_of(tool: object, where: str) -> dict[str, Any]:
    """Check a tool of a chat request, and return its name, description and parameters.

    A tool may be a function, or an object with a `function`, as in OpenAI's API. `where` is the
    tool's field in the request, for errors.
    """
    inner = tool.get("function", tool) if isinstance(tool, Mapping) else None
    if not isinstance(inner, Mapping):
        raise RequestError("must be an object with a function's name.", field=where)
    name, parameters = inner.get("name"), inner.get("parameters")
    if not isinstance(name, str) or not name:
        raise RequestError("must be a function's name.", field=f"{where}.name")
    if not isinstance(parameters, Mapping | None):
        raise RequestError("must be a JSON schema.", field=f"{where}.parameters")
    keys = ("name", "description", "parameters", "strict")
    description: dict[str, Any] = to_plain_json(
        {key: inner[key] for key in keys if inner.get(key) is not None}, where
    )
    return description


class ChunkReader:
    """Turns engine outputs for a conversation into chunks of text, reasoning and tool calls.

    One reader serves all choices of one prompt. A tool call is in a chunk once it is complete.
    """

    def __init__(self, reading: AnswerFormat, tokenizer: Tokenizer) -> None:
        """Read answers that the model writes in the format `reading`.

        `tokenizer` decodes the answers' tokens.
        """
        self._reading = reading
        self._tokenizer = tokenizer
        self._answers: dict[int, CallCollector] = {}  # by choice

    def read(self, output: Output) -> AnswerChunk:
        """Return the chunk of text, reasoning and complete tool calls in one engine output."""
        text, reasoning, calls = output.text, "", tuple[AnswerCall, ...]()
        if not self._reading.is_plain:
            if output.index not in self._answers:
                reader = self._reading.reader(self._tokenizer)
                self._answers[output.index] = CallCollector(reader)
            text, reasoning, written_calls = self._answers[output.index].take(output)
            calls = _to_calls(written_calls)
        return AnswerChunk(
            index=output.index,
            text=text,
            reasoning=reasoning,
            tool_calls=calls,
            token_ids=output.token_ids,
            logprobs=output.logprobs,
            prompt_logprobs=output.prompt_logprobs,
            finish_reason=output.finish_reason,
            stop=output.stop,
            usage=output.usage,
            timings=output.timings,
            schema_miss=output.schema_miss,
        )


def read_completion(answer: Completion, reading: AnswerFormat, tokenizer: Tokenizer) -> Completion:
    """Return a complete answer with its reasoning and its tool calls separated from the text."""
    if reading.is_plain:
        return answer
    text, reasoning, calls = CallCollector(reading.reader(tokenizer)).take(answer)
    return replace(answer, text=text, reasoning=reasoning, tool_calls=_to_calls(calls))


class WrittenCall(NamedTuple):
    """A tool call as the model wrote it. If the answer was cut short, its arguments may be, too."""

    name: str
    arguments: str


class CallCollector:
    """Splits one answer into text, reasoning and tool calls, and returns each call when it ends."""

    def __init__(self, reader: AnswerReader) -> None:
        """Collect the text, reasoning and tool calls that `reader` finds in one answer."""
        self._reader = reader
        self._name = ""
        self._arguments: list[str] = []

    def take(self, output: Output | Completion) -> tuple[str, str, list[WrittenCall]]:
        """Return the text, the reasoning and the complete tool calls that an engine output adds.

        The text and the reasoning are what this output adds; together, all outputs give the answer.
        """
        text, reasoning, calls = "", "", list[WrittenCall]()
        for piece in self._reader.take(output):
            text += piece.text if isinstance(piece, TextPiece) else ""
            reasoning += piece.text if isinstance(piece, ReasoningPiece) else ""
            calls += self._calls_before(piece)
        if output.finish_reason is not None:
            calls += self._calls_before(None)
        return text, reasoning, calls

    def _calls_before(self, piece: Piece | None) -> list[WrittenCall]:
        """Read the answer's next piece, and return the tool call that it ends, if any.

        A call ends at the beginning of the next call or at the end of the answer (None).
        """
        if isinstance(piece, ArgumentsPiece):
            self._arguments.append(piece.text)
        if piece is not None and not isinstance(piece, CallBegin):
            return []
        calls = [WrittenCall(self._name, "".join(self._arguments))] if self._name else []
        self._name, self._arguments = "" if piece is None else piece.name, []
        return calls


def _to_calls(written_calls: list[WrittenCall]) -> tuple[AnswerCall, ...]:
    """Parse the arguments of tool calls as JSON; drop a call whose arguments cannot be read.

    The arguments cannot be read if the answer was cut short, or if a number is too large for a
    float.
    """
    calls: list[AnswerCall] = []
    for written in written_calls:
        with suppress(ValueError, RecursionError):
            values = parse_json(written.arguments or "{}")
            calls.append(
                AnswerCall(f"call_{secrets.token_hex(_CALL_ID_BYTES)}", written.name, values)
            )
    return tuple(calls)
