"""Small chat templates that show tools and mark reasoning as families of models do."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from support.gguf_writer import I32, Typed
from support.servers import live_server
from support.tiny import SPECIAL_TOKENS, Tiny, byte_alphabet, vocabulary

if TYPE_CHECKING:
    from contextlib import AbstractContextManager
    from pathlib import Path

    from support.servers import LiveServer
    from twostroke.server.options import ServeOptions

_TURN: Final = "{{ '<|im_start|>' + m.role + '\\n' }}{{ m.content or '' }}{{ '<|im_end|>\\n' }}"
_NEXT: Final = "{% if add_generation_prompt %}<|im_start|>assistant\n"

# The model opens its reasoning; a switch has the prompt do so and close it again.
THINKS: Final = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n"
    "{% if m.reasoning_content %}<think>\n{{ m.reasoning_content }}\n</think>\n\n{% endif %}"
    "{{ m.content or '' }}<|im_end|>\n{% endfor %}" + _NEXT + "{% if enable_thinking is defined "
    "and enable_thinking is false %}<think>\n\n</think>\n\n{% endif %}{% endif %}"
)
# The prompt opens it, always; earlier reasoning is forgotten.
ALWAYS_THINKS: Final = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n"
    "{{ (m.content or '').split('</think>')[-1] }}<|im_end|>\n{% endfor %}"
    + _NEXT
    + "<think>\n{% endif %}"
)
# The prompt opens or closes it; the template knows degrees of it.
GRADES: Final = (
    "{% for m in messages %}" + _TURN + "{% endfor %}{{ reasoning_effort or 'low' }}"
    "{% if add_generation_prompt %}{{ '[THINK]' if thinking else '[THINK][/THINK]' }}{% endif %}"
)

HERMES: Final = (
    "{% if tools %}<|im_start|>system\n{% for t in tools %}{{ t | tojson }}\n{% endfor %}"
    '<tool_call>\n{"name": ..., "arguments": ...}\n</tool_call><|im_end|>\n{% endif %}'
    "{% for m in messages %}{% if m.role == 'tool' %}<|im_start|>user\n<tool_response>"
    "{{ m.content }}</tool_response><|im_end|>\n{% else %}<|im_start|>{{ m.role }}\n"
    "{{ m.content }}{% for c in m.tool_calls or [] %}\n<tool_call>\n"
    '{"name": "{{ c.function.name }}", "arguments": {{ c.function.arguments | tojson }}}'
    "\n</tool_call>{% endfor %}<|im_end|>\n{% endif %}{% endfor %}" + _NEXT + "{% endif %}"
)
# Tools and the form are shown, calls and results of earlier are not.
HERMES_WITHOUT_CALLS: Final = (
    "{% if tools %}{{ tools | tojson }} Write <tool_call>\n"
    '{"name": <name>, "arguments": <object>}\n</tool_call>.{% endif %}'
    "{% for m in messages %}{% if m.role != 'tool' %}" + _TURN + "{% endif %}{% endfor %}"
)
LLAMA: Final = (
    "{% for m in messages %}{% if m.tool_calls %}{% if m.tool_calls | length != 1 %}"
    "{{ raise_exception('one call at once') }}{% endif %}<|im_start|>assistant\n\n"
    '{"name": "{{ m.tool_calls[0].function.name }}", "parameters": '
    "{{ m.tool_calls[0].function.arguments | tojson }}}<|im_end|>"
    "{% elif m.role == 'tool' %}<|im_start|>ipython\n\n{{ m.content | tojson }}<|im_end|>"
    "{% else %}<|im_start|>{{ m.role }}\n\n{% if loop.first and tools %}"
    "{{ tools | tojson(indent=4) }}{% endif %}{{ m.content }}<|im_end|>{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n\n{% endif %}"
)
_MISTRAL: Final = (
    "{% for m in messages %}{% if m.role == 'user' %}{% if tools %}[AVAILABLE_TOOLS]"
    "{{ tools | tojson }}[/AVAILABLE_TOOLS]{% endif %}[INST]{{ m.content }}[/INST]"
    "{% elif m.tool_calls %}{% for c in m.tool_calls %}{% if c.id | length != 9 %}"
    "{{ raise_exception('ids have nine letters') }}{% endif %}{% endfor %}@CALLS@<|im_end|>"
    "{% elif m.role == 'tool' %}[TOOL_RESULTS]{{ m.tool_call_id }}:{{ m.content }}"
    "{% else %}{{ m.content }}<|im_end|>{% endif %}{% endfor %}"
)
MISTRAL_LIST: Final = _MISTRAL.replace(
    "@CALLS@",
    "[TOOL_CALLS] [{% for c in m.tool_calls %}{{ (c.function | tojson)[:-1] }}"
    ', "id": "{{ c.id }}"}{% if not loop.last %}, {% endif %}{% endfor %}]',
)
MISTRAL: Final = _MISTRAL.replace(
    "@CALLS@",
    "{% for c in m.tool_calls %}[TOOL_CALLS]{{ c.function.name }}[ARGS]"
    "{{ c.function.arguments | tojson }}{% endfor %}",
)
MISTRAL_IDS: Final = MISTRAL.replace("[ARGS]", "[CALL_ID]{{ c.id }}[ARGS]")
# The system message has the tools; the vocabulary alone tells the form.
PHI: Final = (
    "{% for m in messages %}<|im_start|>{{ m.role }}{{ m.content }}"
    "{% if m.role == 'system' and m.tools %}<|tool|>{{ m.tools }}<|/tool|>{% endif %}"
    "<|im_end|>{% endfor %}"
)
GRANITE: Final = (
    "{% if tools %}{{ tools | tojson }}{% endif %}{% for m in messages %}"
    "<|im_start|>{{ m.role }}\n{{ m.content }}{% if m.tool_calls %}<|tool_call|>["
    "{% for c in m.tool_calls %}{{ c.function | tojson }}{% if not loop.last %}, {% endif %}"
    "{% endfor %}]{% endif %}<|im_end|>{% endfor %}"
)
_DEEPSEEK: Final = (
    "{% if tools %}{{ tools | tojson }}{% endif %}{% for m in messages %}"
    "{% if m.tool_calls %}@BEGIN@{% for c in m.tool_calls %}@CALL@{% endfor %}"
    "<｜tool▁calls▁end｜>{% endif %}{% if m.content is not none %}<|im_start|>{{ m.content }}"
    "<|im_end|>{% endif %}{% endfor %}"
).replace("@BEGIN@", "<|im_start|><｜tool▁calls▁begin｜>")
# Arguments are wanted as a string, and null for the content of a message with calls.
DEEPSEEK_FENCED: Final = _DEEPSEEK.replace(
    "@CALL@",
    "{% if not loop.first %}\n{% endif %}<｜tool▁call▁begin｜>{{ c.type }}<｜tool▁sep｜>"
    "{{ c.function.name + '\\n```json\\n' + c.function.arguments + '\\n```' }}"
    "<｜tool▁call▁end｜>",
)
DEEPSEEK: Final = _DEEPSEEK.replace(
    "@CALL@",
    "<｜tool▁call▁begin｜>{{ c.function.name }}<｜tool▁sep｜>"
    "{{ c.function.arguments | tojson }}<｜tool▁call▁end｜>",
)
# Calls are written, tools are not shown.
DEEPSEEK_WITHOUT_TOOLS: Final = DEEPSEEK.replace(
    "{% if tools %}{{ tools | tojson }}{% endif %}", ""
)
PHI_WITHOUT_LISTS: Final = (
    "{% for t in tools or [] %}<|tool|>{{ t.function | tojson }}<|/tool|>{% endfor %}"
    "{% for m in messages %}{% if m.role == 'tool' %}<|tool_response|>{{ m.content }}<|im_end|>"
    "{% else %}<|im_start|>{{ m.role }}{{ m.content or '' }}{% for c in m.tool_calls or [] %}"
    "<|tool_call|>{{ c.function | tojson }}<|/tool_call|>{% endfor %}<|im_end|>{% endif %}"
    "{% endfor %}"
)
# A form that nobody here knows.
TAGS: Final = (
    "{% if tools %}{{ tools | tojson }}{% endif %}{% for m in messages %}"
    + _TURN
    + "{% for c in m.tool_calls or [] %}<tool_call>\n<function={{ c.function.name }}>"
    "</function></tool_call>{% endfor %}{% endfor %}"
)
# As GLM 4.5: tags around each argument, and reasoning that the prompt closes if it is unwanted.
GLM: Final = (
    "{% if tools %}{{ tools | tojson }} <tool_call>{function-name}\n<arg_key>{arg-key-1}</arg_key>"
    "\n<arg_value>{arg-value-1}</arg_value>\n</tool_call>{% endif %}{% for m in messages %}"
    + _TURN
    + "{% for c in m.tool_calls or [] %}<tool_call>{{ c.function.name }}\n"
    "{% for k, v in c.function.arguments.items() %}<arg_key>{{ k }}</arg_key>\n"
    "<arg_value>{{ v }}</arg_value>\n{% endfor %}</tool_call>{% endfor %}{% endfor %}"
    + _NEXT
    + "{% if enable_thinking is defined and not enable_thinking %}<think></think>{% endif %}"
    "{% endif %}"
)

_VALUE: Final = "{{ v if v is string else v | tojson }}"
_EACH: Final = "{% for k, v in c.function.arguments.items() %}"
_TAGGED: Final = (
    "{% if tools %}<|im_start|>system\n{{ tools | tojson }}<|im_end|>\n{% endif %}"
    "{% for m in messages %}{% if m.role == 'tool' %}<|im_start|>user\n<tool_response>\n"
    "{{ m.content }}\n</tool_response><|im_end|>\n{% else %}<|im_start|>{{ m.role }}\n"
    "{{ m.content or '' }}@CALLS@<|im_end|>\n{% endif %}{% endfor %}" + _NEXT + "{% endif %}"
)
# As Qwen3-Coder: each argument in tags, with its value on lines of its own.
TAGGED: Final = _TAGGED.replace(
    "@CALLS@",
    "{% for c in m.tool_calls or [] %}\n<tool_call>\n<function={{ c.function.name }}>\n"
    + _EACH
    + "<parameter={{ k }}>\n"
    + _VALUE
    + "\n</parameter>\n{% endfor %}</function>\n</tool_call>{% endfor %}",
)
# The same tags, with other blanks between them.
TAGGED_CLOSELY: Final = _TAGGED.replace(
    "@CALLS@",
    "{% for c in m.tool_calls or [] %}<tool_call><function={{ c.function.name }}>"
    + _EACH
    + "<parameter={{ k }}>"
    + _VALUE
    + "</parameter>{% endfor %}</function></tool_call>{% endfor %}",
)
SEED: Final = _TAGGED.replace(
    "@CALLS@",
    "{% for c in m.tool_calls or [] %}\n<seed:tool_call>\n<function={{ c.function.name }}>\n"
    + _EACH
    + "<parameter={{ k }}>"
    + _VALUE
    + "</parameter>\n{% endfor %}</function>\n</seed:tool_call>{% endfor %}",
)
# As GLM 4.7: no blanks between the tags.
PAIRS_CLOSELY: Final = _TAGGED.replace(
    "@CALLS@",
    "{% for c in m.tool_calls or [] %}<tool_call>{{ c.function.name }}"
    + _EACH
    + "<arg_key>{{ k }}</arg_key><arg_value>"
    + _VALUE
    + "</arg_value>{% endfor %}</tool_call>{% endfor %}",
)
# As MiniMax M2, DeepSeek V3.2 and Muse: named elements, in one element for all calls.
_INVOKES: Final = (
    "{% if m.tool_calls %}\n<@function_calls>\n{% for c in m.tool_calls %}"
    '<@invoke name="{{ c.function.name }}">\n'
    + _EACH
    + '<@parameter name="{{ k }}"@TYPE@>'
    + _VALUE
    + "</@parameter>\n{% endfor %}</@invoke>\n{% endfor %}</@function_calls>{% endif %}"
)
INVOKES: Final = _TAGGED.replace(
    "@CALLS@",
    _INVOKES.replace("@function_calls", "minimax:tool_call").replace("@TYPE@", "").replace("@", ""),
)
ATEM: Final = _TAGGED.replace("@CALLS@", _INVOKES.replace("@TYPE@", "").replace("@", "atem:"))
DSML: Final = _TAGGED.replace(
    "@CALLS@",
    _INVOKES.replace("@TYPE@", " string=\"{{ 'true' if v is string else 'false' }}\"").replace(
        "@", "｜DSML｜"
    ),
)
GCML: Final = DSML.replace("DSML", "GCML").replace("function_calls", "tool_calls")  # GigaChat 3.5
HY3: Final = _TAGGED.replace(
    "@CALLS@",
    "{% if m.tool_calls %}\n<tool_calls:s>\n{% for c in m.tool_calls %}<tool_call:s>"
    "{{ c.function.name }}<tool_sep:s>\n"
    + _EACH
    + "<arg_key:s>{{ k }}</arg_key:s>\n<arg_value:s>"
    + _VALUE
    + "</arg_value:s>\n{% endfor %}</tool_call:s>\n{% endfor %}</tool_calls:s>{% endif %}",
).replace(":s>", ":opensource>")
# As LFM2.5: Python's keyword arguments.
_KEYWORDS: Final = (
    "{% if m.tool_calls %}@BEGIN@{% for c in m.tool_calls %}{{ c.function.name }}("
    + _EACH
    + "{{ k }}={{ \"'\" + v + \"'\" if v is string else v }}{{ ', ' if not loop.last }}"
    "{% endfor %}){{ @BETWEEN@ if not loop.last }}{% endfor %}@END@{% endif %}"
)
KEYWORDS: Final = _TAGGED.replace(
    "@CALLS@",
    _KEYWORDS.replace("@BEGIN@", "<|tool_call_start|>[")
    .replace("@BETWEEN@", "', '")
    .replace("@END@", "]<|tool_call_end|>"),
)
# As Olmo 3: a call on each line.
KEYWORDS_IN_LINES: Final = _TAGGED.replace(
    "@CALLS@",
    _KEYWORDS.replace("@BEGIN@", "<function_calls>{{ '\n' }}")
    .replace("@BETWEEN@", "'\n'")
    .replace("@END@", "{{ '\n' }}</function_calls>")
    .replace('"\'"', "'\"'"),
)
# As Llama 4 with Python's calls: a list without marks.
BARE_KEYWORDS: Final = _TAGGED.replace(
    "@CALLS@",
    _KEYWORDS.replace("@BEGIN@", "[").replace("@BETWEEN@", "', '").replace("@END@", "]"),
)
# As Gemma 4: names without quotes, in alphabetical order, and marks as quotes.
GEMMA4: Final = _TAGGED.replace(
    "@CALLS@",
    "{% for c in m.tool_calls or [] %}<|tool_call>call:{{ c.function.name }}{{ '{' }}"
    "{% for k, v in c.function.arguments | dictsort %}{{ k }}:"
    "{{ '<|\"|>' + v + '<|\"|>' if v is string else v | tojson }}{{ ',' if not loop.last }}"
    "{% endfor %}{{ '}' }}<tool_call|>{% endfor %}",
)
# Results are a field of the answer with the calls.
GEMMA4_RESPONSES: Final = GEMMA4.replace(
    "<tool_call|>{% endfor %}",
    "<tool_call|>{% endfor %}"
    "{% for r in m.tool_responses or [] %}<|tool_response>response:{{ r.name }}"
    "{{ '{value:<|\"|>' + r.response + '<|\"|>}' }}<tool_response|>{% endfor %}",
)
# The id of a call stands in place of its name.
KIMI: Final = _TAGGED.replace(
    "@CALLS@",
    "{% if m.tool_calls %}<|tool_calls_section_begin|>{% for c in m.tool_calls %}"
    "<|tool_call_begin|>{{ c.id }}<|tool_call_argument_begin|>"
    "{{ c.function.arguments | tojson }}<|tool_call_end|>{% endfor %}"
    "<|tool_calls_section_end|>{% endif %}",
).replace("<tool_response>\n", "<tool_response>\n{{ m.tool_call_id }}: ")
COHERE: Final = _TAGGED.replace(
    "@CALLS@",
    "{% if m.tool_calls %}<|START_ACTION|>[{{ '\\n' }}{% for c in m.tool_calls %}"
    '    {"tool_call_id": "{{ loop.index0 }}", "tool_name": "{{ c.function.name }}", '
    '"parameters": {{ c.function.arguments | tojson }}}{% if not loop.last %},{% endif %}'
    "{{ '\\n' }}{% endfor %}]<|END_ACTION|>{% endif %}",
)
NEMOTRON_LIST: Final = _TAGGED.replace(
    "@CALLS@",
    "{% if m.tool_calls %}<TOOLCALL>[{% for c in m.tool_calls %}"
    '{"name": "{{ c.function.name }}", "arguments": {{ c.function.arguments | tojson }}}'
    "{% if not loop.last %}, {% endif %}{% endfor %}]</TOOLCALL>{% endif %}",
)
_JSON_CALL: Final = (
    '{"name": "{{ c.function.name }}", "arguments": {{ c.function.arguments | tojson }}}'
)
# As Apriel: a list, with ids in earlier answers only.
LIST: Final = _TAGGED.replace(
    "@CALLS@",
    "{% if m.tool_calls %}\n<tool_calls>[{% for c in m.tool_calls %}"
    + _JSON_CALL[:-1]
    + '{% if not outer_last %}, "id": "{{ c.id }}"{% endif %}}{% if not loop.last %}, '
    "{% endif %}{% endfor %}]</tool_calls>{% endif %}",
).replace("{% if m.role == 'tool' %}", "{% set outer_last = loop.last %}{% if m.role == 'tool' %}")
# As MiniMax M1: a call on each line.
LINES: Final = _TAGGED.replace(
    "@CALLS@",
    "{% if m.tool_calls %}<tool_calls>{{ '\n' }}{% for c in m.tool_calls %}"
    + _JSON_CALL
    + "{{ '\n' }}{% endfor %}</tool_calls>{% endif %}",
)
# As Apertus: the name is a key; a tool needs a description, and a description of its arguments.
APERTUS: Final = _TAGGED.replace(
    "@CALLS@",
    "{% if m.tool_calls %}<|tools_prefix|>[{% for c in m.tool_calls %}"
    '{"{{ c.function.name }}": {{ c.function.arguments | tojson }}}'
    "{% if not loop.last %}, {% endif %}{% endfor %}]<|tools_suffix|>{% endif %}",
).replace(
    "{{ tools | tojson }}",
    "{% for t in tools %}{{ '// ' + t.function.description + t.function.parameters.type }}"
    "{{ t | tojson }}{% endfor %}",
)
# As functionary 3.1.
FUNCTIONS: Final = _TAGGED.replace(
    "@CALLS@",
    "{% for c in m.tool_calls or [] %}<function={{ c.function.name }}>"
    "{{ c.function.arguments | tojson }}</function>{% endfor %}",
)
# As firefunction 2: tools are text in a variable.
FUNCTOOLS: Final = _TAGGED.replace(
    "@CALLS@",
    "{% if m.tool_calls %} functools[{% for c in m.tool_calls %}"
    + _JSON_CALL
    + "{% if not loop.last %}, {% endif %}{% endfor %}]{% endif %}",
).replace(
    "{% if tools %}<|im_start|>system\n{{ tools | tojson }}<|im_end|>\n{% endif %}",
    "{{ 'Functions: ' + functions + ' Today is ' + datetime + '.' }}",
)
# As GigaChat 3.1 and 3.0: one call in an answer, or in a message after the answer.
GIGACHAT: Final = _TAGGED.replace(
    "@CALLS@",
    "{% if m.tool_calls %}{% set c = m.tool_calls[0] %}<|function_call|>"
    + _JSON_CALL
    + "{% endif %}",
)
GIGACHAT_MESSAGE: Final = GIGACHAT.replace(
    "<|function_call|>", "<|message_sep|>\n\nfunction call<|role_sep|>\n"
)
# As Kimi K3: macros write all marks, also around the text of an answer.
XTML: Final = (
    "{% macro open(tag) %}{{ '<|open|>' + tag + '<|sep|>' }}{% endmacro %}"
    "{% macro close(tag) %}{{ '<|close|>' + tag + '<|sep|>' }}{% endmacro %}"
    "{% if tools %}{{ open('message') }}{{ tools | tojson }}{{ close('message') }}{% endif %}"
    "{% for m in messages %}{{ open('message role=\"' + m.role + '\"') }}"
    "{% if m.role == 'assistant' %}{% if m.reasoning_content %}{{ open('think') }}"
    "{{ m.reasoning_content }}{{ close('think') }}{% endif %}{{ open('response') }}"
    "{{ m.content or '' }}{{ close('response') }}{% if m.tool_calls %}{{ open('tools') }}"
    "{% for c in m.tool_calls %}"
    "{{ open('call tool=\"' + c.function.name + '\" index=\"' + loop.index | string + '\"') }}"
    + _EACH
    + "{% set type = 'string' if v is string else 'array' if v is iterable else 'number' %}"
    "{{ open('argument key=\"' + k + '\" type=\"' + type + '\"') }}"
    + _VALUE
    + "{{ close('argument') }}{% endfor %}{{ close('call') }}{% endfor %}{{ close('tools') }}"
    "{% endif %}{% else %}{{ m.content }}{% endif %}{{ close('message') }}{% endfor %}"
    "{% if add_generation_prompt %}{{ open('message role=\"assistant\"') }}"
    "{% if thinking is defined %}{{ open('think' if thinking else 'response') }}{% endif %}"
    "{% endif %}"
)
# As MiniCPM5: texts with signs of XML or line breaks are in CDATA.
PARAMS: Final = _TAGGED.replace(
    "@CALLS@",
    "{% for c in m.tool_calls or [] %}{% if not loop.first %}{{ '\n' }}{% endif %}"
    '<function name="{{ c.function.name }}">'
    + _EACH
    + "<param name=\"{{ k }}\">{% if v is string and ('<' in v or '&' in v or '\n' in v) %}"
    "{{ '<![CDATA[' + v + ']]>' }}{% else %}{{ v }}{% endif %}</param>{% endfor %}</function>"
    "{% endfor %}",
)
# As Solar Open: messages in channels, and ids of calls that the model makes up.
SOLAR: Final = (
    "{% if tools %}<|begin|>system<|content|>{{ tools | tojson }}<|end|>{% endif %}"
    "{% for m in messages %}{% if m.reasoning %}<|begin|>assistant<|think|>{{ m.reasoning }}"
    "<|end|>{% endif %}<|begin|>{{ m.role }}{% if m.tool_calls %}<|tool_calls|>"
    "{% for c in m.tool_calls %}<|tool_call:begin|>{{ c.id }}<|tool_call:name|>"
    "{{ c.function.name }}<|tool_call:args|>{{ c.function.arguments | tojson }}"
    "<|tool_call:end|>{% endfor %}<|calls|>{% else %}<|content|>{{ m.content }}<|end|>{% endif %}"
    "{% endfor %}{% if add_generation_prompt %}<|begin|>assistant{% endif %}"
)
# As Muse Glimmer: each message names its recipient, which is the model itself for its reasoning.
MUSE: Final = (
    "<|start|>system<|message|>Reasoning strength: {{ reasoning_strength or 'high' }}."
    "{% if tools %}{{ tools | tojson }}{% endif %}<|eot|>"
    "{% for m in messages %}{% if m.reasoning_content %}<|start|>assistant to=self<|message|>"
    "{{ m.reasoning_content }}<|eom|>{% endif %}<|start|>{{ m.role }}{% if m.tool_calls %}"
    " to={{ m.tool_calls[0].function.name }}<|message|>{% elif m.role == 'assistant' %}"
    " to=user<|message|>{% else %}<|message|>{% endif %}{{ m.content or '' }}"
    + _INVOKES.replace("@TYPE@", "").replace("@", "atem:")
    + "<|eot|>{% endfor %}{% if add_generation_prompt %}<|start|>assistant{% endif %}"
)
# As Granite 3.3: the instructions name the marks and the form of calls.
GRANITE_RESPONSES: Final = (
    "{% if thinking %}Think between <think></think>, answer between <response></response>."
    "{% endif %}"
    "{% if tools %}Respond only with <|tool_call|> followed by a JSON list of tools used."
    "{{ tools | tojson }}{% endif %}"
    "{% for m in messages %}" + _TURN + "{% endfor %}" + _NEXT + "{% endif %}"
)
# As Apriel 1.6: the prompt opens the reasoning, whose end is a line.
APRIEL: Final = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    + _NEXT
    + "Here are my reasoning steps:\n{# then [BEGIN FINAL RESPONSE] #}{% endif %}"
)


def talker(
    folder: Path,
    template: str,
    controls: tuple[str, ...] = (),
    options: ServeOptions | None = None,
) -> AbstractContextManager[LiveServer]:
    """Return a server whose model has this template, and answers as `say` determines.

    `controls` are control tokens, in place of bytes that no text has.
    """
    tokens, _ = vocabulary()
    for byte, text in zip(range(0xF5, 0x100), controls, strict=False):
        tokens[tokens.index(byte_alphabet()[byte])] = text
    kinds = [3 if token in {*SPECIAL_TOKENS, *controls} else 1 for token in tokens]
    metadata: dict[str, Any] = {
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": Typed(I32, kinds),
        "tokenizer.chat_template": template,
    }
    return live_server(folder, options, tiny=Tiny(context_length=4096), metadata=metadata)


def say(server: LiveServer, text: str, *others: str) -> list[int]:
    """Make every answer this text, which may have control tokens; return its tokens.

    Where an answer's constraint forbids the text, the answer is the first of the `others` that
    begins alike. The engine samples among the allowed tokens as ever: an answer with none of the
    texts is another one.
    """
    tokenizer = server.client.card.tokenizer
    scripts = [tokenizer.encode(script, parse_special=True) for script in (text, *others)]
    end = min(tokenizer.eos_ids)
    server.backend.script = (*scripts[0], end)
    server.backend.other_scripts = tuple((*script, end) for script in scripts[1:])
    return scripts[0]
