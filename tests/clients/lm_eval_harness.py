"""lm-evaluation-harness against our server, and beside transformers on the same weights.

The tasks of `tasks/` run twice: through the server, and in transformers, which reads the same GGUF
file into float32. Log-likelihoods may differ by a twentieth a token. Then all run once more
with the server's own tokenizer, over `/tokenizer_info`, `/tokenize` and `/detokenize`.
"""

from __future__ import annotations

import json
import os
import subprocess
import tempfile
from functools import cache
from pathlib import Path
from typing import Any

from checks import BASE_URL, MODEL, run
from transformers import AutoTokenizer

FILE = Path(os.environ["MODEL_FILE"])
TASKS = Path(__file__).parent / "tasks"
# Log-likelihood a token, in nats. Against float32 with the same prompts, Qwen2.5-Coder-0.5B has at
# most 0.006 for whole texts and 0.015 for choices. With int16 keys and values, whose codes have 13
# bits, it has 0.052 and 0.043; with activations of 8 bits as well, 0.09.
MOST_APART = 0.05
WITHIN_S = 1200

folder = Path(tempfile.mkdtemp())
tokenizer = AutoTokenizer.from_pretrained(FILE.parent, gguf_file=FILE.name)
tokenizer.save_pretrained(folder / "tokenizer")
for task in TASKS.glob("*.yaml"):
    (folder / task.name).write_text(task.read_text().replace("DATA", str(TASKS)))


def harness(
    name: str, model: str, arguments: dict[str, str], task: str, *more_options: str
) -> list[Any]:
    """Run one task, and return its samples in order."""
    out = folder / name
    command = [
        *("lm_eval", "run", "--model", model, "--tasks", task, "--include_path", str(folder)),
        *("--model_args", ",".join(f"{key}={value}" for key, value in arguments.items())),
        *("--output_path", str(out), "--log_samples", *more_options),
    ]
    environment = os.environ | {"OPENAI_API_KEY": "none", "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(
        command, env=environment, capture_output=True, text=True, check=False, timeout=WITHIN_S
    )
    assert not done.returncode, done.stderr[-3000:]
    (log,) = out.rglob(f"samples_{task}_*.jsonl")
    samples = [json.loads(line) for line in log.read_text().splitlines()]
    return sorted(samples, key=lambda sample: int(sample["doc_id"]))


def ours(task: str) -> list[Any]:
    arguments = {
        "base_url": f"{BASE_URL}/completions",
        "model": MODEL,
        "tokenizer_backend": "huggingface",
        "tokenizer": str(folder / "tokenizer"),
        "tokenized_requests": "True",
        "num_concurrent": "4",
    }
    return harness(f"ours-{task}", "local-completions", arguments, task)


@cache
def theirs(task: str) -> list[Any]:
    arguments = {"pretrained": str(FILE.parent), "gguf_file": FILE.name, "dtype": "float32"}
    return harness(f"theirs-{task}", "hf", arguments, task, "--device", "cpu")


def num_tokens(context: str, text: str) -> int:
    """How many tokens of `text` are judged behind `context`."""
    return max(1, len(tokenizer(context + text).input_ids) - len(tokenizer(context).input_ids))


def loglikelihood() -> None:
    compare_each("twostroke_choice")


def rolling() -> None:
    compare_each("twostroke_rolling")


def compare_each(task: str) -> None:
    worst, total, count = 0.0, 0.0, 0
    for mine, other in zip(ours(task), theirs(task), strict=True):
        assert mine["doc_hash"] == other["doc_hash"]
        requests = mine["arguments"].values()
        for request, (a,), (b,) in zip(requests, mine["resps"], other["resps"], strict=True):
            texts = (request["arg_0"], request.get("arg_1", ""))
            context, text = texts if texts[1] else ("", texts[0])
            difference = abs(value(a) - value(b)) / num_tokens(context, text)
            worst, total, count = max(worst, difference), total + difference, count + 1
    mean = total / count
    print(f"    {task}: {count} compared, {mean:.4f} a token apart on average, {worst:.4f} at most")
    assert worst <= MOST_APART


def value(response: Any) -> float:
    return float(response[0] if isinstance(response, list) else response)


def generate_until() -> None:
    """Greedy answers agree with transformers', but where two tokens are nearly as likely."""
    pairs = zip(ours("twostroke_answer"), theirs("twostroke_answer"), strict=True)
    same = [mine["resps"] == other["resps"] for mine, other in pairs]
    print(f"    twostroke_answer: {sum(same)} of {len(same)} answers are the same")
    assert sum(same) >= 0.7 * len(same)


def chat() -> None:
    arguments = {
        "base_url": f"{BASE_URL}/chat/completions",
        "model": MODEL,
        "num_concurrent": "4",
    }
    more_options = ("--apply_chat_template",)
    samples = harness(
        "chat", "local-chat-completions", arguments, "twostroke_answer", *more_options
    )
    assert all(sample["resps"][0][0].strip() for sample in samples)


def remote_tokenizer() -> None:
    """All tasks with the server's tokenizer; log-likelihoods are the same as with transformers'."""
    arguments = {"base_url": f"{BASE_URL}/completions", "model": MODEL, "num_concurrent": "4"}
    arguments["tokenizer_backend"] = "remote"
    for path in sorted(TASKS.glob("*.yaml")):
        task = f"twostroke_{path.stem}"
        samples = harness(f"remote-{task}", "local-completions", arguments, task)
        assert samples
        if task == "twostroke_choice":
            assert [sample["resps"] for sample in samples] == [
                sample_here["resps"] for sample_here in ours(task)
            ]
    chat = harness(
        *("remote-chat", "local-completions", arguments, "twostroke_answer"),
        "--apply_chat_template",
    )
    assert all(sample["resps"][0][0].strip() for sample in chat)


run(loglikelihood, rolling, generate_until, chat, remote_tokenizer)
