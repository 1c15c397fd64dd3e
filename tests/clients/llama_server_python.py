"""Clients of llama.cpp's llama-server: an agent, a monitor, LangChain's model, editor plugins."""

from __future__ import annotations

import json
import subprocess
from typing import Any

import requests
from checks import MODEL, PERSON, QUESTION, ROOT_URL, TOOL, WEATHER_QUESTION, run
from langchain_llama_cpp import ChatLlama
from swaag.config import load_config
from swaag.model import LlamaCppClient
from swaag.types import ContractSpec

agent = LlamaCppClient(load_config(env={}))
agent.config.model.base_url = ROOT_URL
chat = ChatLlama(model=MODEL, base_url=ROOT_URL, max_tokens=200, temperature=0)
FILE = {"text": "def total(prices):\n    return sum(prices)\n", "filename": "shop.py", "time": 1.5}


def agent_completes() -> None:
    """Text, a grammar and a schema."""
    assert agent.health()["status"] == "ok"
    assert agent.tokenize("The capital of France is") == 5
    plain = ContractSpec(name="plain", mode="plain")
    result = agent.complete("The capital of France is", max_tokens=8, contract=plain)
    assert "Paris" in result.text
    assert result.prompt_tokens == 5
    grammar = ContractSpec(name="yes", mode="gbnf", grammar='root ::= "yes" | "no"')
    assert agent.complete("Is 2 even?", max_tokens=8, contract=grammar).text in {"yes", "no"}
    schema = ContractSpec(name="person", mode="json_schema", json_schema=PERSON)
    result = agent.complete("Ada, 36, as JSON: ", max_tokens=60, contract=schema)
    assert set(json.loads(result.text)) == {"name", "age"}


def monitor_reads_the_state() -> None:
    """What llamastat shows of /health, /slots, /props, /v1/models and /metrics."""
    command = ["llamastat", "--url", ROOT_URL, "--once", "--json", "--no-host"]
    output = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    body = json.loads(output)
    assert body["ok"]
    assert MODEL in output


def chat_is_answered() -> None:
    answer = chat.invoke(QUESTION)
    assert answer.content
    assert answer.response_metadata["system_fingerprint"]
    assert answer.usage_metadata is not None


def chat_streams_with_timings() -> None:
    message: Any = None
    for chunk in chat.bind(timings_per_token=True, return_progress=True).stream(QUESTION):
        message = chunk if message is None else message + chunk
    assert message.content
    assert message.response_metadata["timings"]["predicted_n"] > 0


def chat_takes_every_field() -> None:
    """Those of llama-server that the package knows, with values as its users have them."""
    model = ChatLlama(
        model=MODEL,
        base_url=ROOT_URL,
        max_tokens=8,
        top_k=40,
        top_p=0.95,
        min_p=0.05,
        seed=7,
        repeat_penalty=1.1,
        repeat_last_n=64,
        typical_p=1.0,
        mirostat=0,
        dry_multiplier=0.0,
        samplers=["top_k", "top_p", "temperature"],
        cache_prompt=True,
        n_keep=0,
        id_slot=-1,
        reasoning_format="auto",
    )
    assert model.invoke(QUESTION).content


def chat_calls_a_tool() -> None:
    answer = chat.bind_tools([TOOL], tool_choice="required").invoke(WEATHER_QUESTION)
    assert answer.tool_calls[0]["name"] == "get_weather"


def chat_keeps_to_a_form() -> None:
    schema = {"title": "Person", **PERSON}
    for method in ("json_schema", "function_calling"):
        result = chat.with_structured_output(schema, method=method).invoke("Ada is 36 years old.")
        assert set(result) == {"name", "age"}
    result = chat.bind(grammar='root ::= "yes" | "no"').invoke("Is 2 even?")
    assert result.content in {"yes", "no"}


def editors_fill_gaps() -> None:
    """The requests of llama.vim and llama.vscode: first the files alone, then the gap."""
    always = {"samplers": [], "cache_prompt": True, "t_max_prompt_ms": 1, "t_max_predict_ms": 1}
    gap: dict[str, Any] = {"input_prefix": "", "input_suffix": "", "prompt": ""}
    gap |= {"input_extra": [FILE], "n_predict": 0, "stream": False, **always}
    assert requests.post(f"{ROOT_URL}/infill", json=gap, timeout=60).status_code == 200
    names = ["content", "timings/prompt_n", "timings/predicted_per_second", "tokens_cached"]
    gap |= {"input_prefix": "def add(a, b):\n", "input_suffix": "\n", "prompt": "    return "}
    gap |= {"n_predict": 16, "n_indent": 4, "top_k": 40, "top_p": 0.99, "response_fields": names}
    gap |= {"samplers": ["top_k", "top_p", "infill"], "stop": ["\n"]}
    body = requests.post(f"{ROOT_URL}/infill", json=gap, timeout=60).json()
    assert set(body) == set(names)
    assert body["content"].strip()
    assert body["timings/prompt_n"] > 0


run(
    agent_completes,
    monitor_reads_the_state,
    chat_is_answered,
    chat_streams_with_timings,
    chat_takes_every_field,
    chat_calls_a_tool,
    chat_keeps_to_a_form,
    editors_fill_gaps,
)
