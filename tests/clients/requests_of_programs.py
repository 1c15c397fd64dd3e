"""Requests in the shapes of programs that are too large to be installed for a test.

They have the fields that Open WebUI, Continue, Cline, aider, Codex and Claude Code send; the texts
are ours.
"""

from __future__ import annotations

import json
import urllib.request
from typing import TYPE_CHECKING, Any

from checks import MODEL, QUESTION, ROOT_URL, TOOL, WEATHER, run

if TYPE_CHECKING:
    from collections.abc import Callable

CHAT, RESPONSES = "/v1/chat/completions", "/v1/responses"
MESSAGES = "/v1/messages?beta=true"
USAGE = {"stream": True, "stream_options": {"include_usage": True}}
CACHED = {"cache_control": {"type": "ephemeral"}}
SYSTEM = {"role": "system", "content": "You are a helpful assistant."}
PARTS = [{"role": "user", "content": [{"type": "text", "text": "Why is the sky blue?"}]}]
CALL = {"id": "call_1", "type": "function", "function": {"name": "get_weather", "arguments": "{}"}}
AFTER_A_CALL = [
    SYSTEM,
    *PARTS,
    {"role": "assistant", "content": "", "tool_calls": [CALL]},
    {"role": "tool", "tool_call_id": "call_1", "content": "17 degrees"},
]
STRICT_TOOL = {"type": "function", "function": {**TOOL["function"], "strict": False}}
TITLE = {
    "messages": [{"role": "user", "content": "### Task: give a title as JSON."}],
    "stream": False,
    "max_completion_tokens": 1000,
}
TURN = {"type": "message", "role": "developer", "content": [{"type": "input_text", "text": "Hi"}]}
LAST_TURN = {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "Why?"}]}
PATCH = {
    "type": "custom",
    "name": "apply_patch",
    "description": "Change files.",
    "format": {"type": "grammar", "syntax": "lark", "definition": 'start: "x" /[a-z]{1,8}/'},
}
CODEX = {
    "instructions": "You are a coding agent.",
    "input": [TURN, LAST_TURN],
    "tools": [
        {"type": "function", **TOOL["function"], "strict": False},
        PATCH,
    ],
    "tool_choice": "auto",
    "parallel_tool_calls": False,
    "reasoning": {"effort": "medium", "summary": "auto"},
    "store": False,
    "stream": True,
    "include": ["reasoning.encrypted_content"],
    "prompt_cache_key": "0199a213-81c0-7800-8aa1-bbab2a035a53",
    "text": {"verbosity": "low"},
    "client_metadata": {"x-codex-installation-id": "0199a213"},
}
CLAUDE_TOOL = {
    "name": "get_weather",
    "description": "The weather now.",
    "input_schema": {"$schema": "https://json-schema.org/draft/2020-12/schema", **WEATHER},
}
CLAUDE_CODE = {
    "system": [
        {"type": "text", "text": "You are a coding agent.", **CACHED},
        {"type": "text", "text": "Answer briefly.", "cache_control": {"type": "ephemeral"}},
    ],
    "messages": [{"role": "user", "content": [{"type": "text", "text": "Hi", **CACHED}]}],
    "tools": [CLAUDE_TOOL],
    "metadata": {"user_id": "user_1_account__session_2"},
    "max_tokens": 32000,
    "thinking": {"type": "adaptive"},
    "context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
    "output_config": {"effort": "high"},
    "stream": True,
}
CLAUDE_RESULT = [
    {"role": "user", "content": "What is the weather?"},
    {
        "role": "assistant",
        "content": [
            {"type": "thinking", "thinking": "Ask.", "signature": "c2ln"},
            {"type": "tool_use", "id": "toolu_1", "name": "get_weather", "input": {"city": "Rome"}},
        ],
    },
    {
        "role": "user",
        "content": [
            {
                "type": "tool_result",
                "tool_use_id": "toolu_1",
                "content": [{"type": "text", "text": "17 degrees"}],
                "is_error": False,
                **CACHED,
            },
            {"type": "text", "text": "Go on.", **CACHED},
        ],
    },
]

REQUESTS: dict[str, tuple[str, dict[str, Any]]] = {
    "Open WebUI: a chat": (CHAT, {"messages": [SYSTEM, *QUESTION], **USAGE}),
    "Open WebUI: a chat with settings": (
        CHAT,
        {
            "messages": PARTS,
            **USAGE,
            "temperature": 0.8,
            "top_p": 0.9,
            "top_k": 40,
            "min_p": 0.0,
            "max_tokens": 128,
            "frequency_penalty": 0,
            "presence_penalty": 0,
            "repeat_penalty": 1.1,
            "seed": 0,
            "stop": ["</s>"],
            "logit_bias": {},
            "reasoning_effort": "medium",
            "mirostat": 0,
            "num_ctx": 2048,
            "keep_alive": "5m",
            "function_calling": "native",
        },
    ),
    "Open WebUI: a tool": (CHAT, {"messages": [SYSTEM, *QUESTION], "tools": [TOOL], **USAGE}),
    "Open WebUI: after a call": (CHAT, {"messages": AFTER_A_CALL, "tools": [TOOL], **USAGE}),
    "Open WebUI: a title": (CHAT, TITLE),
    "Continue: a chat": (
        CHAT,
        {
            "messages": [SYSTEM, *PARTS],
            "max_tokens": 4096,
            "temperature": 0.5,
            "stream": True,
            "top_p": 1,
            "frequency_penalty": 0,
            "presence_penalty": 0,
            "stream_options": {"include_usage": True},
        },
    ),
    "Continue: an agent": (
        CHAT,
        {"messages": AFTER_A_CALL, "tools": [TOOL], "parallel_tool_calls": False, **USAGE},
    ),
    "Continue: an edit": (
        CHAT,
        {
            "messages": QUESTION,
            "prediction": {"type": "content", "content": "def f():\n    pass\n"},
            "stream": True,
        },
    ),
    "Continue: completing code": (
        "/v1/completions",
        {
            "prompt": "<|fim_prefix|>def add(a, b):\n    <|fim_suffix|>\n<|fim_middle|>",
            "max_tokens": 64,
            "temperature": 0.01,
            "stream": True,
            "suffix": None,
            "stop": [
                "<|endoftext|>",
                "<|fim_prefix|>",
                "<|fim_middle|>",
                "<|fim_suffix|>",
                "<|fim_pad|>",
                "<|repo_name|>",
                "<|file_sep|>",
                "<|im_start|>",
                "<|im_end|>",
                "/src/",
                "#- coding: utf-8",
                "```",
            ],
        },
    ),
    "Continue: an index": ("/v1/embeddings", {"input": ["def f(): pass", "def g(): pass"]}),
    "Cline: a task": (
        CHAT,
        {
            "messages": [SYSTEM, *PARTS],
            "temperature": 0,
            "max_tokens": None,
            "reasoning_effort": None,
            **USAGE,
        },
    ),
    "Cline: native tools": (
        CHAT,
        {
            "messages": AFTER_A_CALL,
            "temperature": 0,
            "tools": [STRICT_TOOL],
            "tool_choice": "auto",
            "parallel_tool_calls": False,
            **USAGE,
        },
    ),
    "Cline: Anthropic's protocol": (
        MESSAGES,
        {
            "max_tokens": 8192,
            "temperature": 0,
            "system": [{"type": "text", "text": "You are Cline.", **CACHED}],
            "messages": [{"role": "user", "content": [{"type": "text", "text": "Hi", **CACHED}]}],
            "stream": True,
        },
    ),
    "aider: an edit": (
        CHAT,
        {
            "messages": [SYSTEM, *QUESTION],
            "temperature": 0,
            "stream": True,
            "n": 1,
        },
    ),
    "Codex: a turn": (RESPONSES, CODEX),
    "Codex: after a call": (
        RESPONSES,
        {
            **CODEX,
            "input": [
                *CODEX["input"],
                {"type": "reasoning", "summary": [], "content": None, "encrypted_content": None},
                {
                    "type": "function_call",
                    "name": "get_weather",
                    "arguments": "{}",
                    "call_id": "call_1",
                },
                {"type": "function_call_output", "call_id": "call_1", "output": "17 degrees"},
            ],
        },
    ),
    "Codex: a form": (
        RESPONSES,
        {
            **CODEX,
            "text": {
                "verbosity": "low",
                "format": {
                    "type": "json_schema",
                    "name": "codex_output_schema",
                    "strict": True,
                    "schema": WEATHER,
                },
            },
        },
    ),
    "Claude Code: a turn": (MESSAGES, CLAUDE_CODE),
    "Claude Code: after a call": (MESSAGES, {**CLAUDE_CODE, "messages": CLAUDE_RESULT}),
    "Claude Code: thinking": (
        MESSAGES,
        {**CLAUDE_CODE, "thinking": {"type": "enabled", "budget_tokens": 31999}},
    ),
    "Claude Code: is there a quota": (
        MESSAGES,
        {"max_tokens": 1, "messages": [{"role": "user", "content": "quota"}]},
    ),
    "Claude Code: counting": (
        "/v1/messages/count_tokens?beta=true",
        {"messages": CLAUDE_RESULT, "tools": [CLAUDE_TOOL]},
    ),
}
HEADERS = {
    "content-type": "application/json",
    "authorization": "Bearer none",
    "http-referer": "https://openwebui.com/",
    "x-title": "Open WebUI",
}
ANTHROPIC = {
    "x-api-key": "none",
    "anthropic-version": "2023-06-01",
    "anthropic-beta": "claude-code-20250219,interleaved-thinking-2025-05-14",
}


def _request(name: str, path: str, body: dict[str, Any]) -> Callable[[], None]:
    def check() -> None:
        headers = HEADERS | (ANTHROPIC if "messages" in path else {})
        sent = json.dumps({"model": MODEL, **body}).encode()
        request = urllib.request.Request(ROOT_URL + path, sent, headers)
        with urllib.request.urlopen(request, timeout=300) as answer:
            # An answer that has no limit may go on for long: some of it is enough.
            lines = [answer.readline() for _ in range(200)]
        assert not any(b'"error": {' in line or b'"error":{' in line for line in lines), lines
        assert any(lines)

    check.__name__ = name
    return check


run(*(_request(name, path, body) for name, (path, body) in REQUESTS.items()))
