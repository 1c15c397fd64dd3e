"""Built-in chat templates with names, for models whose files have no template or a wrong one."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Final

from twostroke.core.errors import UsageError, nearest

if TYPE_CHECKING:
    from twostroke.model.tokenizer import Tokenizer

_SYSTEM_FIRST: Final = (
    "{% set system = messages[0].content | trim if messages and messages[0].role == 'system' "
    "else '' %}{% set turns = messages[1:] if system else messages %}"
)

# The names are llama.cpp's. Marks that a vocabulary does not have become plain text.
BUILT_IN: Final = {
    "chatml": (
        "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' + (m.content or '') "
        "+ '<|im_end|>\n' }}{% endfor %}"
        "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
    ),
    "command-r": (
        "{% for m in messages %}<|START_OF_TURN_TOKEN|>{{ {'system': '<|SYSTEM_TOKEN|>', "
        "'assistant': '<|CHATBOT_TOKEN|>'}.get(m.role, '<|USER_TOKEN|>') }}"
        "{{ (m.content or '') | trim }}<|END_OF_TURN_TOKEN|>{% endfor %}"
        "{% if add_generation_prompt %}<|START_OF_TURN_TOKEN|><|CHATBOT_TOKEN|>{% endif %}"
    ),
    "deepseek": (
        "{% for m in messages %}{% if m.role == 'system' %}{{ (m.content or '') + '\n\n' }}"
        "{% elif m.role == 'assistant' %}{{ 'Assistant: ' + (m.content or '') }}{{ eos_token }}"
        "{% else %}{{ 'User: ' + (m.content or '') + '\n\n' }}{% endif %}{% endfor %}"
        "{% if add_generation_prompt %}Assistant:{% endif %}"
    ),
    "deepseek3": (
        "{% for m in messages %}{% if m.role == 'system' %}{{ (m.content or '') + '\n\n' }}"
        "{% elif m.role == 'assistant' %}<｜Assistant｜>{{ m.content or '' }}"
        "<｜end▁of▁sentence｜>{% else %}<｜User｜>{{ m.content or '' }}{% endif %}{% endfor %}"
        "{% if add_generation_prompt %}<｜Assistant｜>{% endif %}"
    ),
    "falcon3": (
        "{% for m in messages %}{{ '<|' + m.role + '|>\n' + (m.content or '') + '\n' }}"
        "{% endfor %}{% if add_generation_prompt %}{{ '<|assistant|>\n' }}{% endif %}"
    ),
    # Gemma has no system role: the system text stands at the start of the first user turn.
    "gemma": (
        _SYSTEM_FIRST + "{% for m in turns %}<start_of_turn>"
        "{{ ('model' if m.role == 'assistant' else 'user') + '\n' }}"
        "{% if loop.first and system %}{{ system + '\n\n' }}{% endif %}"
        "{{ (m.content or '') | trim }}{{ '<end_of_turn>\n' }}{% endfor %}"
        "{% if add_generation_prompt %}{{ '<start_of_turn>model\n' }}{% endif %}"
    ),
    "llama2": (
        _SYSTEM_FIRST + "{% for m in turns %}{% if m.role == 'assistant' %}"
        "{{ ' ' + (m.content or '') | trim + ' ' }}{{ eos_token }}{% else %}"
        "{% if not loop.first %}{{ bos_token }}{% endif %}{{ '[INST] ' }}"
        "{% if loop.first and system %}{{ '<<SYS>>\n' + system + '\n<</SYS>>\n\n' }}{% endif %}"
        "{{ (m.content or '') | trim + ' [/INST]' }}{% endif %}{% endfor %}"
    ),
    "llama3": (
        "{% for m in messages %}<|start_header_id|>{{ m.role }}<|end_header_id|>{{ '\n\n' }}"
        "{{ (m.content or '') | trim }}<|eot_id|>{% endfor %}{% if add_generation_prompt %}"
        "<|start_header_id|>assistant<|end_header_id|>{{ '\n\n' }}{% endif %}"
    ),
    "mistral-v1": (
        _SYSTEM_FIRST + "{% for m in turns %}{% if m.role == 'assistant' %}"
        "{{ ' ' + (m.content or '') }}{{ eos_token }}{% else %}{{ ' [INST] ' }}"
        "{% if loop.first and system %}{{ system + '\n\n' }}{% endif %}"
        "{{ (m.content or '') + ' [/INST]' }}{% endif %}{% endfor %}"
    ),
    "mistral-v3": (
        _SYSTEM_FIRST + "{% for m in turns %}{% if m.role == 'assistant' %}"
        "{{ ' ' + (m.content or '') }}{{ eos_token }}{% else %}[INST]{{ ' ' }}"
        "{% if loop.first and system %}{{ system + '\n\n' }}{% endif %}"
        "{{ m.content or '' }}[/INST]{% endif %}{% endfor %}"
    ),
    "mistral-v7": (
        "{% for m in messages %}{% if m.role == 'system' %}[SYSTEM_PROMPT]{{ ' ' }}"
        "{{ m.content or '' }}[/SYSTEM_PROMPT]{% elif m.role == 'assistant' %}"
        "{{ ' ' + (m.content or '') }}{{ eos_token }}{% else %}[INST]{{ ' ' }}"
        "{{ m.content or '' }}[/INST]{% endif %}{% endfor %}"
    ),
    "openchat": (
        "{% for m in messages %}{% if m.role == 'system' %}{{ m.content or '' }}<|end_of_turn|>"
        "{% else %}{{ 'GPT4 Correct ' + m.role | title + ': ' + (m.content or '') }}"
        "<|end_of_turn|>{% endif %}{% endfor %}"
        "{% if add_generation_prompt %}GPT4 Correct Assistant:{% endif %}"
    ),
    "phi3": (
        "{% for m in messages %}{{ '<|' + m.role + '|>\n' + (m.content or '') + '<|end|>\n' }}"
        "{% endfor %}{% if add_generation_prompt %}{{ '<|assistant|>\n' }}{% endif %}"
    ),
    "phi4": (
        "{% for m in messages %}<|im_start|>{{ m.role }}<|im_sep|>{{ m.content or '' }}<|im_end|>"
        "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant<|im_sep|>{% endif %}"
    ),
    "vicuna": (
        "{% for m in messages %}{% if m.role == 'system' %}{{ (m.content or '') + '\n\n' }}"
        "{% elif m.role == 'assistant' %}{{ 'ASSISTANT: ' + (m.content or '') }}{{ eos_token }}"
        "{{ '\n' }}{% else %}{{ 'USER: ' + (m.content or '') + '\n' }}{% endif %}{% endfor %}"
        "{% if add_generation_prompt %}ASSISTANT:{% endif %}"
    ),
    "zephyr": (
        "{% for m in messages %}{{ '<|' + m.role + '|>\n' + (m.content or '') }}{{ eos_token }}"
        "{{ '\n' }}{% endfor %}{% if add_generation_prompt %}{{ '<|assistant|>\n' }}{% endif %}"
    ),
}


def check_template(template: str) -> None:
    """Check that a chat template is Jinja source or the name of a built-in chat template.

    Raises:
        UsageError: the template is a single word that is not the name of a built-in template.
    """
    if template in BUILT_IN or "{" in template or len(template.split()) > 1:
        return
    hint = nearest(template, BUILT_IN)
    names = ", ".join(BUILT_IN)
    reason = f"must be a file, a template's text, or one of {names}, got '{{value}}'.{hint}"
    raise UsageError(reason, field="chat_template", value=template[:80])


def template_source(template: str, tokenizer: Tokenizer) -> str:
    """Return the Jinja source of a chat template that is given by name or as source.

    A source is returned unchanged. The source of a built-in template also writes the tokens that
    the tokenizer puts before every text, such as the begin-of-sequence token.
    """
    check_template(template)
    if template not in BUILT_IN:
        return template
    begin = "".join(tokenizer.token_text(id_) or "" for id_ in tokenizer.prefix_ids)
    return f"{{{{ {json.dumps(begin)} }}}}{BUILT_IN[template]}" if begin else BUILT_IN[template]
