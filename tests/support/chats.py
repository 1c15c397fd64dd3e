"""Chats with tools, and small templates that use what the published ones use."""

from __future__ import annotations

from typing import Any

TOOLS: list[dict[str, Any]] = [
    {
        "type": "function",
        "function": {
            "name": "get_weather",
            "description": 'Get the <current> weather & "more" für 東京.',
            "parameters": {
                "type": "object",
                "properties": {
                    "city": {"type": "string", "description": "The city"},
                    "unit": {"type": "string", "enum": ["c", "f"]},
                },
                "required": ["city"],
            },
        },
    },
    {
        "type": "function",
        "function": {
            "name": "add",
            "description": "Add",
            "parameters": {"type": "object", "properties": {"a": {"type": "number"}}},
        },
    },
]


def _call(name: str, arguments: dict[str, object], call_id: str = "abcdef123") -> dict[str, Any]:
    return {
        "id": call_id,
        "type": "function",
        "function": {"name": name, "arguments": arguments},
    }


_ODD = {"city": 'Paris "x"', "n": 1.5, "ok": True, "z": None}
_ANSWER = {"role": "tool", "content": "20 °C", "tool_call_id": "abcdef123", "name": "get_weather"}
_SUM = {"role": "tool", "content": "3", "tool_call_id": "abcdef124", "name": "add"}

TOOL_CHATS: list[list[dict[str, Any]]] = [
    [
        {"role": "user", "content": "Weather?"},
        {"role": "assistant", "content": "", "tool_calls": [_call("get_weather", _ODD)]},
        _ANSWER,
    ],
    [
        {"role": "system", "content": "S"},
        {"role": "user", "content": "Weather?"},
        {"role": "assistant", "content": None, "tool_calls": [_call("get_weather", {"city": "a"})]},
        _ANSWER,
        {"role": "assistant", "content": "It is 20."},
        {"role": "user", "content": "Thanks"},
    ],
    [
        {"role": "user", "content": "Both?"},
        {
            "role": "assistant",
            "content": "Let me see",
            "tool_calls": [_call("get_weather", {}), _call("add", {"a": 1}, "abcdef124")],
        },
        _ANSWER,
        _SUM,
    ],
]

TEMPLATES = {
    "tools as JSON, in both forms": (
        "{%- if tools %}{{ tools | tojson(indent=4) }}\n{% for tool in tools %}"
        "{{ tool.function | tojson }}{{ loop.index }}{% endfor %}{% endif %}"
        "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m.content or '' }}"
        "{% for c in m.tool_calls or [] %}{{ c.function.name }}{{ c.function.arguments | tojson }}"
        "{% endfor %}<|im_end|>{% endfor %}{% if add_generation_prompt %}!{% endif %}"
    ),
    "turns that must alternate": (
        "{{ bos_token }}{% if messages[0]['role'] == 'system' %}"
        "{% set rest = messages[1:] %}{% set first = messages[0].content | trim %}"
        "{% else %}{% set rest = messages %}{% set first = '' %}{% endif %}"
        "{% for m in rest %}{% if (m['role'] == 'user') != (loop.index0 % 2 == 0) %}"
        "{{ raise_exception('Roles must alternate') }}{% endif %}"
        "{% if loop.first and first %}[INST] {{ first ~ '\n\n' ~ m.content }} [/INST]"
        "{% elif m.role == 'user' %}[INST] {{ m['content'].strip() }} [/INST]"
        "{% else %}{% generation %}{{ ' ' + m.content + eos_token }}{% endgeneration %}"
        "{% endif %}{% endfor %}"
    ),
    "the date, loop controls, namespaces and macros": (
        "{% macro turn(role, text) -%}<{{ role }}>{{ text | trim }}{%- endmacro %}"
        "{% set ns = namespace(n=0) %}{{ strftime_now('%d %b %Y') }}"
        "{% for m in messages[::-1] %}{% if m.role == 'tool' %}{% continue %}{% endif %}"
        "{% set ns.n = ns.n + 1 %}{{ turn(m.role, m.content) }}{% if ns.n > 2 %}{% break %}"
        "{% endif %}{% endfor %}{{ '%d turns' | format(ns.n) }}{{ ns.n is defined }}"
        "{{ documents is defined }}{{ (messages | map(attribute='role') | list) | tojson }}"
    ),
}
