"""A chat template that renders conversations as the published template of gpt-oss does."""

from __future__ import annotations

TEMPLATE = """
{%- macro type_of(schema) -%}
{{ {"string": "string", "integer": "number", "number": "number", "boolean": "boolean"}.get(
    schema.type, "any") }}
{%- endmacro -%}
{%- set instructions = messages[0].content if messages and messages[0].role in
    ["system", "developer"] else "" -%}
{%- set turns = messages[1:] if messages and messages[0].role in ["system", "developer"]
    else messages -%}
{{- "<|start|>system<|message|>You are ChatGPT, a large language model trained by OpenAI.\\n" }}
{{- "Reasoning: " + (reasoning_effort or "medium") + "\\n\\n" }}
{{- "# Valid channels: analysis, commentary, final. Channel must be included for every message." }}
{%- if tools %}
{{- "\\nCalls to these tools must go to the commentary channel: 'functions'." }}
{%- endif %}
{{- "<|end|>" }}
{%- if instructions or tools %}
{{- "<|start|>developer<|message|>" }}
{%- if instructions %}{{ "# Instructions\\n\\n" + instructions + "\\n\\n" }}{% endif %}
{%- if tools %}
{{- "# Tools\\n\\n## functions\\n\\nnamespace functions {\\n\\n" }}
{%- for tool in tools %}
{{- "// " + (tool.function.description or "") + "\\ntype " + tool.function.name + " = (_: {\\n" }}
{%- for name, schema in (tool.function.parameters.properties or {}).items() %}
{{- name + ": " + type_of(schema) + ",\\n" }}
{%- endfor %}
{{- "}) => any;\\n\\n" }}
{%- endfor %}
{{- "} // namespace functions" }}
{%- endif %}
{{- "<|end|>" }}
{%- endif %}
{%- set last = namespace(name="") %}
{%- for message in turns %}
{%- if message.role == "assistant" and message.tool_calls %}
{%- set later = namespace(is_final=false) %}
{%- for other in turns[loop.index:] %}
{%- if other.role == "assistant" and not other.tool_calls %}
{%- set later.is_final = true %}
{%- endif %}
{%- endfor %}
{%- if message.content and message.thinking %}
{{- raise_exception("Cannot pass both content and thinking in a message with tool calls.") }}
{%- endif %}
{%- set analysis = message.content or message.thinking %}
{%- if analysis and not later.is_final %}
{{- "<|start|>assistant<|channel|>analysis<|message|>" + analysis + "<|end|>" }}
{%- endif %}
{%- set call = message.tool_calls[0].function %}
{%- set last.name = call.name %}
{{- "<|start|>assistant to=functions." + call.name + "<|channel|>commentary json<|message|>" }}
{{- call.arguments | tojson + "<|call|>" }}
{%- elif message.role == "assistant" %}
{{- "<|start|>assistant<|channel|>final<|message|>" + message.content }}
{{- "<|return|>" if loop.last and not add_generation_prompt else "<|end|>" }}
{%- elif message.role == "tool" %}
{{- "<|start|>functions." + last.name + " to=assistant<|channel|>commentary<|message|>" }}
{{- message.content | tojson + "<|end|>" }}
{%- else %}
{{- "<|start|>" + message.role + "<|message|>" + message.content + "<|end|>" }}
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{ "<|start|>assistant" }}{% endif %}
"""
