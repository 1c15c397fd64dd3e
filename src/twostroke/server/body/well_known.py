"""Unknown fields that clients often send: hints to ignore, and fields that must be refused."""

from __future__ import annotations

from typing import Final

# Ignored, by the clients that send them; docs/reference/api.md has this table.
HINTS: Final = {
    "OpenRouter's SDKs, and agents that know it (Cline, Roo Code, LiteLLM)": (
        *("debug", "include_reasoning", "models", "provider", "reasoning", "route", "session_id"),
        *("trace", "transforms", "usage"),
    ),
    "OpenAI's newer SDKs": ("prompt_cache_options", "safety_identifier", "verbosity"),
    "LiteLLM, LangChain and agents that mark what Anthropic's server shall cache": (
        *("cache_control", "messages[].cache_control", "messages[].content[].cache_control"),
        *("tools[].cache_control", "tools[].function.cache_control"),
    ),
    "Clients of vLLM and SGLang": (
        *("detokenize", "early_stopping", "guided_decoding_backend", "guided_whitespace_pattern"),
        *("separate_reasoning", "stream_reasoning", "kv_transfer_params", "nvext"),
    ),
    "Clients of reasoning models (DeepSeek, Groq, Qwen, GLM)": (
        *("enable_thinking", "reasoning_format", "reasoning_split", "thinking", "thinking_budget"),
    ),
    "Open WebUI": (
        *("background_tasks", "chat_id", "features", "id", "model_item", "params", "tool_ids"),
        *("tool_servers", "variables"),
    ),
    "Text generation front ends (SillyTavern, text-generation-webui)": (
        *("add_bos_token", "do_sample", "dynatemp_high", "dynatemp_low", "mirostat_mode", "preset"),
        *("num_beams", "sampler_order", "tfs", "top_a", "truncation_length", "typical_p"),
    ),
    "Ollama's clients on OpenAI's paths": ("keep_alive", "num_ctx", "options"),
}
KNOWN_HINTS: Final = frozenset(name for names in HINTS.values() for name in names)

# Without these fields the answer would mean something else, so they are refused unless empty.
_FORMS: Final = """
    ebnf format grammar guided_choice guided_grammar guided_json guided_regex json_schema
    output_format regex response_format structured_outputs
"""
_PROMPTS: Final = """
    context input instructions messages prompt prompt_embeds suffix system system_prompt
"""
_LIMITS: Final = """
    max_completion_tokens max_new_tokens max_output_tokens max_tokens stop stop_sequences
    stopping_strings
"""
_TOOLS: Final = """
    data_sources enable_search functions plugins search_parameters tool_resources tools
    web_search web_search_options
"""
_OTHERS: Final = "adapter_id logprobs lora lora_path n negative_prompt"
_MEDIA: Final = """
    attachments audio documents file files image image_data image_url images
    input_audio video
"""
_TOP_LEVEL_NAMES: Final = frozenset(" ".join((_FORMS, _PROMPTS, _LIMITS, _TOOLS, _OTHERS)).split())
_NAMES_ANYWHERE: Final = frozenset(_MEDIA.split())


def has_meaning(name: str, value: object, parent: str) -> bool:
    """Whether ignoring an unknown request field would give a wrong answer.

    True for fields such as `tools` and `images`, unless their value is empty. `parent` is the path
    of the object that has the field; it is empty for fields of the body itself.
    """
    is_empty = value is None or value in (False, "", [], {}) or (name == "n" and value == 1)
    return not is_empty and (name in _NAMES_ANYWHERE or (not parent and name in _TOP_LEVEL_NAMES))
