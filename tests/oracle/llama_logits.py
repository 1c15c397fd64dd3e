"""Scores the next token after prompts with llama.cpp; run by `compare_llama.py` in its environment.

python llama_logits.py QUESTION.json ANSWER.json

The question has the path of a GGUF file, prompts of tokens, and the size of the vocabulary. The
answer has the log-probability of each token after each prompt.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import xllamacpp

_BIAS = 1000.0  # draws a token whose text is whole: llama.cpp hides scores of half characters


def main() -> int:
    """Read the question, and write the answer."""
    question = json.loads(Path(sys.argv[1]).read_text())
    params = xllamacpp.CommonParams()
    params.model.path = question["model"]
    params.n_ctx, params.n_parallel = question["context_length"], 1
    params.warmup = params.fit_params = False
    params.verbosity = 1  # errors
    params.cache_type_k = params.cache_type_v = xllamacpp.ggml_type.GGML_TYPE_F32
    params.flash_attn_type = xllamacpp.llama_flash_attn_type.LLAMA_FLASH_ATTN_TYPE_DISABLED
    for threads in (params.cpuparams, params.cpuparams_batch):
        threads.n_threads = 1
    server = xllamacpp.Server(params)
    answers = []
    for prompt in question["prompts"]:
        body = {
            "prompt": prompt,
            "n_predict": 1,
            "n_probs": question["vocab_size"],
            "temperature": 0.0,
            "cache_prompt": False,
            "logit_bias": [[question["drawn_token"], _BIAS]],
        }
        response = server.handle_completions(body)
        content = response["choices"][0]["logprobs"]["content"]
        answers.append({entry["id"]: entry["logprob"] for entry in content[0]["top_logprobs"]})
    Path(sys.argv[2]).write_text(json.dumps(answers))
    return 0


if __name__ == "__main__":
    sys.exit(main())
