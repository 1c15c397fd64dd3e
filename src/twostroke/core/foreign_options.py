"""Options of other inference programs, and the options of Twostroke that do the same."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Collection

# By the name without dashes, in lower case: our names of the same option (the name in Python, and
# the flag on the command line).
_SAME_OPTION: Final[dict[str, tuple[str, ...]]] = {
    # vLLM
    "allowed_origins": ("cors_origins", "--cors-origin"),
    "block_size": ("page_size", "--page-size"),
    "cpu_offload_gb": ("page_cache", "--page-cache"),
    "decode_context_parallel_size": ("context", "--context-parallel"),
    "enable_expert_parallel": ("expert", "--expert-parallel"),
    "enable_prefix_caching": ("prefix_cache", "--prefix-cache"),
    "gpu_memory_utilization": ("memory_bytes", "--kv-memory"),
    "kv_cache_dtype": ("kv_format", "--kv-format"),
    "kv_cache_memory_bytes": ("memory_bytes", "--kv-memory"),
    "max_model_len": ("context_length", "--context-length"),
    "max_num_batched_tokens": ("token_budget", "--token-budget"),
    "max_num_seqs": ("max_running", "--max-running"),
    "no_enable_prefix_caching": ("prefix_cache", "--no-prefix-cache"),
    "num_speculative_tokens": ("count", "--drafts"),
    "pipeline_parallel_size": ("pipeline", "--pipeline-parallel"),
    "prefill_context_parallel_size": ("context", "--context-parallel"),
    "reasoning_parser": ("splits_reasoning", "--reasoning"),
    "served_model_name": ("model_names", "--name"),
    "speculative_config": ("draft", "--draft"),
    "speculative_model": ("draft", "--draft"),
    "swap_space": ("page_cache", "--page-cache"),
    "tensor_parallel_size": ("tensor", "--tensor-parallel"),
    "uvicorn_log_level": ("log_level", "--log-level"),
    # llama.cpp and Ollama
    "alias": ("model_names", "--name"),
    "b": ("token_budget", "--token-budget"),
    "c": ("context_length", "--context-length"),
    "cache_ram": ("memory_bytes", "--kv-memory"),
    "cache_type_k": ("kv_format", "--kv-format"),
    "cache_type_v": ("kv_format", "--kv-format"),
    "ctk": ("kv_format", "--kv-format"),
    "ctv": ("kv_format", "--kv-format"),
    "ctx_size": ("context_length", "--context-length"),
    "draft_max": ("count", "--drafts"),
    "draft_n": ("count", "--drafts"),
    "gpu_layers": ("backend", "--backend gpu"),
    "md": ("draft", "--draft"),
    "model_draft": ("draft", "--draft"),
    "n": ("max_tokens", "--max-tokens"),
    "n_batch": ("token_budget",),
    "n_ctx": ("context_length",),
    "n_gpu_layers": ("backend", "--backend gpu"),
    "n_parallel": ("max_running",),
    "n_predict": ("max_tokens", "--max-tokens"),
    "n_threads": ("num_threads",),
    "ngl": ("backend", "--backend gpu"),
    "np": ("max_running", "--max-running"),
    "num_batch": ("token_budget",),
    "num_ctx": ("context_length", "--context-length"),
    "num_gpu": ("backend", "--backend gpu"),
    "num_predict": ("max_tokens", "--max-tokens"),
    "num_thread": ("num_threads", "--threads"),
    "parallel": ("max_running", "--max-running"),
    "predict": ("max_tokens", "--max-tokens"),
    "repeat_penalty": ("repetition_penalty", "--repetition-penalty"),
    "s": ("seed", "--seed"),
    "split_mode": ("tensor", "--tensor-parallel"),
    "t": ("num_threads", "--threads"),
    "temp": ("temperature", "--temperature"),
    "tensor_split": ("shares", "--shares"),
    "ts": ("shares", "--shares"),
    "ub": ("token_budget", "--token-budget"),
    "ubatch_size": ("token_budget", "--token-budget"),
    # SGLang
    "chunked_prefill_size": ("token_budget", "--token-budget"),
    "cp_size": ("context", "--context-parallel"),
    "disaggregation_mode": ("role", "--role"),
    "ep_size": ("expert", "--expert-parallel"),
    "max_running_requests": ("max_running", "--max-running"),
    "max_total_tokens": ("memory_bytes", "--kv-memory"),
    "mem_fraction_static": ("memory_bytes", "--kv-memory"),
    "pp_size": ("pipeline", "--pipeline-parallel"),
    "speculative_algorithm": ("method", "--speculate"),
    "speculative_draft_model_path": ("draft", "--draft"),
    "speculative_num_draft_tokens": ("count", "--drafts"),
    "tp": ("tensor", "--tensor-parallel"),
    "tp_size": ("tensor", "--tensor-parallel"),
    # sampling in vLLM, transformers and llama.cpp
    "best_of": ("n",),
    "eos_token_id": ("stop_token_ids",),
    "guided_decoding": ("constraint",),
    "guided_json": ("constraint", "--json-schema"),
    "guided_regex": ("constraint", "--regex"),
    "include_stop_str_in_output": ("include_stop",),
    "max_completion_tokens": ("max_tokens", "--max-tokens"),
    "max_new_tokens": ("max_tokens", "--max-tokens"),
    "min_new_tokens": ("min_tokens", "--min-tokens"),
    "num_return_sequences": ("n",),
    "response_format": ("constraint", "--json-schema"),
    "stop_sequences": ("stop", "--stop"),
    "stop_strings": ("stop", "--stop"),
    "structured_outputs": ("constraint", "--json-schema"),
    "thinking_budget": ("reasoning_budget", "--reasoning-budget"),
    "thinking_budget_tokens": ("reasoning_budget", "--reasoning-budget"),
    "thinking_token_budget": ("reasoning_budget", "--reasoning-budget"),
}

# Options that name the model, which is an argument of Twostroke's commands.
_MODEL_OPTIONS: Final = frozenset(
    {"hf_repo", "m", "model", "model_name", "model_name_or_path", "model_path", "model_tag"}
)

# Options that Twostroke does not have or need, and why.
_WITHOUT_OPTION: Final = {
    **dict.fromkeys(
        (
            *("enable_lora", "lora", "lora_modules", "lora_paths", "lora_scaled", "max_cpu_loras"),
            *("max_lora_rank", "max_loras", "max_loras_per_batch"),
        ),
        "Adapters (LoRA) are not served: merge the adapter into its model, as "
        "`merge_and_unload` of the package peft does, and serve the result.",
    ),
    "api_key": "Set the key in TWOSTROKE_API_KEY, or put keys into a file for --api-keys.",
    "cont_batching": "Leave it out: batching is always continuous.",
    "data_parallel_size": "Start several servers, and put `twostroke route` in front of them.",
    "do_sample": "The temperature 0 always takes the likeliest token.",
    "dp_size": "Start several servers, and put `twostroke route` in front of them.",
    "dtype": "Weights keep the format of the model's file; `twostroke quantize` writes others.",
    "enable_chunked_prefill": "Chunked prefill is always on.",
    "enable_auto_tool_choice": "Leave it out: the model's chat template decides.",
    "enforce_eager": "Leave it out.",
    "fa": "Leave it out: attention never stores the whole matrix.",
    "flash_attn": "Leave it out: attention never stores the whole matrix.",
    "jinja": "Leave it out: chat templates are always rendered.",
    "metrics": "Leave it out: /metrics is always served.",
    "mlock": "Leave it out.",
    "no_mmap": "Leave it out.",
    "num_beams": "Beam search is not supported; n gives several independent answers.",
    "quantization": "Weights keep the format of the model's file; `twostroke quantize` writes "
    "others.",
    "skip_special_tokens": "Special tokens never appear in an answer's text.",
    "tool_call_parser": "Leave it out: the model's chat template decides.",
    "trust_remote_code": "Leave it out: no code of a model is ever run.",
    "typical_p": "Use min_p or top_p.",
}


def names_model(option_name: str) -> bool:
    """Return whether other inference programs have an option of this name for the model."""
    return _bare(option_name) in _MODEL_OPTIONS


def foreign_hint(name: str, known_names: Collection[str]) -> str:
    """Return a hint for an unknown option that another inference program has, such as vLLM.

    The hint is a sentence that names Twostroke's option and begins with a space. It is empty if no
    other program is known to have the option, or if none of `known_names`, the options of the
    command, does the same.
    """
    bare = _bare(name)
    same_option = ("--model",) if bare in _MODEL_OPTIONS else _SAME_OPTION.get(bare, ())
    for candidate in same_option:
        if candidate.partition(" ")[0] in known_names:
            return f" Use '{candidate}' instead."
    if bare in _MODEL_OPTIONS:
        return " Name the model as an argument, without an option."
    return f" {_WITHOUT_OPTION[bare]}" if bare in _WITHOUT_OPTION else ""


def _bare(option_name: str) -> str:
    return option_name.lstrip("-").replace("-", "_").lower()
