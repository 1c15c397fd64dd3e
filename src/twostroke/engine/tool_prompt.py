"""Tools and their calls in the words of a prompt, for chat templates that know nothing of them."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

_INSTRUCTIONS = """\
You can call these functions, each described on a line of its own as JSON:
{tools}
To call one, write its name and its arguments as JSON, in this form and nothing else:
<tool_call>
{{"name": "the function's name", "arguments": {{"the argument's name": "its value"}}}}
</tool_call>
The result comes in the next message. Without need of a function, answer as usual."""


def with_tools_in_words(
    messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]]
) -> list[dict[str, Any]]:
    """Return a conversation in which tools, calls and results are plain text."""
    described = "\n".join(json.dumps(tool["function"], ensure_ascii=False) for tool in tools)
    instructions = _INSTRUCTIONS.format(tools=described) if tools else ""
    told = [_in_words(message) for message in messages]
    if instructions and told and told[0]["role"] == "system":
        told[0] = told[0] | {"content": f"{told[0]['content']}\n\n{instructions}"}
    elif instructions:
        told.insert(0, {"role": "system", "content": instructions})
    return _joined(told)


def _in_words(message: Mapping[str, Any]) -> dict[str, Any]:
    role, content = message["role"], message.get("content") or ""
    if role == "tool":
        return {"role": "user", "content": f"<tool_response>\n{content}\n</tool_response>"}
    calls = [_call(call["function"]) for call in message.get("tool_calls") or ()]
    return {"role": role, "content": "\n".join(filter(None, [content, *calls]))}


def _call(function: Mapping[str, Any]) -> str:
    name, arguments = json.dumps(function["name"]), function["arguments"]
    return f'<tool_call>\n{{"name": {name}, "arguments": {arguments}}}\n</tool_call>'


def _joined(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the messages with several results of tools in a row as one: speakers take turns."""
    joined: list[dict[str, Any]] = []
    texts: list[list[str]] = []  # of each
    for message in messages:
        if joined and joined[-1]["role"] == message["role"] == "user":
            texts[-1].append(message["content"])
        else:
            joined.append(message)
            texts.append([message["content"]])
    pairs = zip(joined, texts, strict=True)
    return [message | {"content": "\n".join(said)} for message, said in pairs]
