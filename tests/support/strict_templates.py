"""Small chat templates, each as strict in some way as templates of published families."""

from __future__ import annotations

from typing import Final

_NEXT: Final = "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
_TURN: Final = "<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n"
_CALLS: Final = (
    "{% for c in m.tool_calls or [] %}<tool_call>\n"
    '{"name": "{{ c.function.name }}", "arguments": {{ c.function.arguments | tojson }}}'
    "\n</tool_call>{% endfor %}"
)
_ALTERNATES: Final = (
    "{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('roles must alternate') }}{% endif %}"
)

# Shows all that it is given.
LENIENT: Final = (
    "{% if tools %}{{ tools | tojson }}{% endif %}{% for m in messages %}"
    "<|im_start|>{{ m.role }}\n{{ m.content }}" + _CALLS + "<|im_end|>\n{% endfor %}" + _NEXT
)
# One system message, at the beginning, and a question (Qwen 3.5).
FIRST_ALONE: Final = (
    "{% if messages | selectattr('role', 'equalto', 'user') | list | length == 0 %}"
    "{{ raise_exception('no question') }}{% endif %}{% for m in messages %}"
    "{% if m.role == 'system' and not loop.first %}"
    "{{ raise_exception('system must be first') }}{% elif m.role == 'developer' %}"
    "{{ raise_exception('unknown role') }}{% endif %}"
    "<|im_start|>{{ m.role }}\n{{ m.content }}" + _CALLS + "<|im_end|>\n{% endfor %}" + _NEXT
)
# Turns alternate after one system message, which the first question shows (Llama 2, Mistral v1).
ALTERNATES: Final = (
    "{% set first = messages[0].content if messages[0].role == 'system' else '' %}"
    "{% for m in (messages[1:] if first else messages) %}"
    + _ALTERNATES
    + "{% if loop.first and first %}[INST] <<SYS>>{{ first }}<</SYS>> "
    "{{ m.content | trim }} [/INST]"
    "{% elif m.role == 'user' %}[INST] {{ m.content | trim }} [/INST]"
    "{% else %} {{ m.content | trim }} </s>{% endif %}{% endfor %}"
)
# The same without system messages (Gemma 2, Mistral v0.1).
NO_SYSTEM: Final = (
    "{% if messages[0].role == 'system' %}{{ raise_exception('no system role') }}{% endif %}"
    "{% for m in messages %}" + _ALTERNATES + _TURN + "{% endfor %}" + _NEXT
)
# Drops the roles that it does not know, silently (Phi-3 mini).
DROPS_ROLES: Final = (
    "{% for m in messages %}{% if m.role in ['user', 'assistant'] %}" + _TURN + "{% endif %}"
    "{% endfor %}" + _NEXT
)
# Of all system messages, it shows the last, at the beginning (DeepSeek R1).
LAST_SYSTEM: Final = (
    "{% set ns = namespace(system='') %}{% for m in messages if m.role == 'system' %}"
    "{% set ns.system = m.content %}{% endfor %}{{ ns.system }}"
    "{% for m in messages if m.role != 'system' %}" + _TURN + "{% endfor %}" + _NEXT
)
# Knows developer messages, but only in the first place (gpt-oss).
DEVELOPER_FIRST: Final = (
    "{% for m in messages %}{% if m.role in ['system', 'developer'] %}{% if loop.first %}"
    "<|im_start|>developer\n{{ m.content }}<|im_end|>\n{% endif %}{% else %}"
    + _TURN
    + "{% endif %}"
    "{% endfor %}" + _NEXT
)
# Refuses answers without text and calls (Mistral Small 3).
NO_EMPTY_ANSWER: Final = (
    "{% for m in messages %}{% if m.role == 'assistant' and not m.content and not m.tool_calls %}"
    "{{ raise_exception('an empty answer') }}{% endif %}<|im_start|>{{ m.role }}\n"
    "{{ m.content }}" + _CALLS + "<|im_end|>\n{% endfor %}" + _NEXT
)
# Turns alternate apart from calls and results; the system message is shown with the last question
# alone; an answer has text or calls; the result of a tool needs its call (Mistral v3).
WITH_LAST_QUESTION: Final = (
    "{% set first = messages[0].content if messages[0].role == 'system' else '' %}"
    "{% set rest = messages[1:] if first else messages %}"
    "{% set ns = namespace(n=0, called=false) %}"
    "{% for m in rest %}{% if m.tool_calls %}{% set ns.called = true %}{% elif m.role == 'tool' %}"
    "{% if not ns.called %}{{ raise_exception('no call') }}{% endif %}{% else %}"
    "{% if (m.role == 'user') != (ns.n % 2 == 0) %}"
    "{{ raise_exception('roles must alternate') }}{% endif %}{% set ns.n = ns.n + 1 %}"
    "{% set ns.called = false %}{% endif %}{% endfor %}{% for m in rest %}"
    "{% if m.role == 'user' %}[INST]{% if loop.last and first %}{{ first }}\n\n{% endif %}"
    "{{ m.content }}[/INST]{% elif m.tool_calls %}" + _CALLS + "</s>{% elif m.role == 'tool' %}"
    "[TOOL_RESULTS]{{ m.content }}[/TOOL_RESULTS]{% elif m.role == 'assistant' %}"
    "{{ m.content }}</s>{% else %}{{ raise_exception('unknown role') }}{% endif %}{% endfor %}"
)
# Shows parts of content alone (models that also see pictures).
ONLY_PARTS: Final = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{% for part in m.content %}"
    "{% if part.type == 'text' %}{{ part.text }}{% endif %}{% endfor %}" + _CALLS + "<|im_end|>\n"
    "{% endfor %}" + _NEXT
)
# Fails without a list of tools (Command R, Hermes).
NEEDS_TOOLS: Final = "{% for t in tools %}{{ t | tojson }}{% endfor %}" + LENIENT
# Writes each argument of a call, and fails on arguments that are not an object (Qwen3-Coder, GLM).
NAMED_ARGUMENTS: Final = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}"
    "{% for c in m.tool_calls or [] %}<tool_call>\n<function={{ c.function.name }}>\n"
    "{% for key, value in c.function.arguments | items %}<parameter={{ key }}>\n{{ value }}\n"
    "</parameter>\n{% endfor %}</function>\n</tool_call>{% endfor %}<|im_end|>\n{% endfor %}"
    + _NEXT
)
# Drops the calls of an answer that has text (DeepSeek R1).
TEXT_OR_CALLS: Final = LENIENT.replace(
    "{{ m.content }}" + _CALLS,
    "{% if m.content %}{{ m.content }}{% else %}" + _CALLS + "{% endif %}",
)
# Shows tools in the first message, whatever its role is (Llama 3.1).
TOOLS_IN_FIRST: Final = (
    "{% if messages[0].role == 'system' %}{{ messages[0].content }}"
    "{% set messages = messages[1:] %}{% endif %}{% if tools %}<|im_start|>user\n"
    "{{ tools | tojson }}{{ messages[0].content }}<|im_end|>\n"
    "{% set messages = messages[1:] %}{% endif %}"
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}"
    + _CALLS
    + "<|im_end|>\n{% endfor %}"
    + _NEXT
)

TEMPLATES: Final = {
    name: value
    for name, value in list(globals().items())
    if name.isupper() and not name.startswith("_")
}
