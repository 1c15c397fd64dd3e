"""Layers for multi-token prediction agree with transformers' layers, and run on PyTorch."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from msgspec.structs import replace

torch = pytest.importorskip("torch", reason="no PyTorch here")
pytest.importorskip("transformers", reason="no transformers here")

from support.speculating_engines import GREEDY, PROMPTS, comparable_fields, engine_of  # noqa: E402
from support.tiny import tiny_config, tiny_of, tiny_weights  # noqa: E402
from support.tiny_mtp import (  # noqa: E402
    MTP_FAMILIES,
    layer_source,
    own_weights,
    write_mtp_folder,
    write_mtp_gguf,
)
from support.tiny_weights import folder_weights  # noqa: E402
from support.transformers_models import text_model  # noqa: E402
from twostroke.backends.reference import ReferenceBackend  # noqa: E402
from twostroke.backends.torch import TorchBackend  # noqa: E402
from twostroke.core.request import Request  # noqa: E402
from twostroke.core.sampling import SamplingParams  # noqa: E402
from twostroke.core.step import Slice, StepPlan  # noqa: E402
from twostroke.model.families.mtp import mtp_program, mtp_spec  # noqa: E402
from twostroke.model.weights import load_path  # noqa: E402
from twostroke.model.weights.mtp import mtp_tensors  # noqa: E402

if TYPE_CHECKING:
    from pathlib import Path

    from torch import Tensor

torch.set_num_threads(1)
NUM_TOKENS = 20


def their_states(family: str, embeddings: Tensor, hidden: Tensor) -> Tensor:
    """Return the states after the last norm: the layer is transformers' model with one layer."""
    tiny = tiny_of(family)
    source, number = layer_source(tiny)
    config: dict[str, Any] = tiny_config(source) | {"num_hidden_layers": 1}
    if tiny.variant.delta is not None:
        config["layer_types"] = ["full_attention"]
    if "first_k_dense_replace" in config:
        config["first_k_dense_replace"] = 0
    if config["model_type"] == "glm4_moe_lite":
        config["mlp_layer_types"] = ["sparse"]
    model = text_model(config)
    own = {name: torch.from_numpy(values) for name, values in own_weights(tiny).items()}
    old = f"model.layers.{number}."
    stored = folder_weights(source, tiny_weights(source))
    state = {
        name.replace(old, "model.layers.0."): torch.from_numpy(np.ascontiguousarray(values))
        for name, values in stored.items()
        if name.startswith(old)
    }
    state["model.norm.weight"] = own["shared_head_norm"] - tiny.variant.norm_offset
    state = with_stacked_experts(state, model)
    left = model.load_state_dict(state, strict=False)
    assert not left.unexpected_keys
    assert not [
        name for name in left.missing_keys if "embed_tokens" not in name and "lm_" not in name
    ]
    pairs = ((embeddings, own["enorm"]), (hidden, own["hnorm"]))
    both = [
        torch.nn.functional.rms_norm(x, x.shape[-1:], weight, tiny.norm_epsilon)
        for x, weight in pairs
    ]
    inputs = torch.cat(both, dim=-1) @ own["eh_proj"].T
    with torch.inference_mode():
        states: Tensor = model.model(inputs_embeds=inputs[None]).last_hidden_state[0]
    return states


def with_stacked_experts(state: dict[str, Tensor], model: Any) -> dict[str, Tensor]:
    """Return the weights with experts in stacks, where transformers' model has them in stacks."""
    prefix = "model.layers.0.mlp.experts."
    if f"{prefix}gate_up_proj" not in model.state_dict():
        return state
    others = {name: values for name, values in state.items() if not name.startswith(prefix)}
    count = len(model.state_dict()[f"{prefix}gate_up_proj"])
    parts = {
        part: [state[f"{prefix}{expert}.{part}.weight"] for expert in range(count)]
        for part in ("gate_proj", "up_proj", "down_proj")
    }
    pairs = zip(parts["gate_proj"], parts["up_proj"], strict=True)
    others[f"{prefix}gate_up_proj"] = torch.stack([torch.cat(pair) for pair in pairs])
    others[f"{prefix}down_proj"] = torch.stack(parts["down_proj"])
    return others


@pytest.mark.parametrize("family", MTP_FAMILIES)
def test_the_layer_has_the_states_of_transformers(tmp_path: Path, family: str) -> None:
    loaded = load_path(write_mtp_folder(tmp_path / "folder", family))
    spec = mtp_spec(loaded.spec)
    program = mtp_program(spec, loaded.spec.vocab_size)
    tensors = mtp_tensors(loaded, spec, program)
    rng = np.random.default_rng(5)
    tokens = rng.integers(3, 250, NUM_TOKENS).tolist()
    hidden = rng.standard_normal((NUM_TOKENS, spec.hidden_size)).astype(np.float32)
    table = torch.from_numpy(loaded.tensors["token_embd.weight"].dequantize())
    theirs = their_states(family, table[tokens], torch.from_numpy(hidden)).numpy()
    request = Request("a", tokens, len(tokens), SamplingParams(temperature=0), 0, pages=[[0, 1]])
    plan = StepPlan((Slice(request, 0, len(tokens), samples=True),), external=hidden)
    for backend in (
        ReferenceBackend(program, tensors, 4, 16, tapped_value="last"),
        TorchBackend(program, tensors, 4, 16, tapped_value="last"),
    ):
        ours = backend.run(plan).row_states
        assert ours is not None
        np.testing.assert_allclose(ours, theirs, atol=2e-4)


@pytest.mark.parametrize("family", ["qwen3.5", "glm4"])
def test_the_torch_backend_drafts(tmp_path: Path, family: str) -> None:
    path = write_mtp_gguf(tmp_path / "m.gguf", family)
    params = [replace(GREEDY, max_tokens=12), SamplingParams(max_tokens=12, seed=1)] * 2
    with engine_of(path, "torch", method="off") as llm:
        plain = comparable_fields(llm.generate(PROMPTS, params))
    with engine_of(path, "torch", method="mtp", count=3) as llm:
        assert comparable_fields(llm.generate(PROMPTS, params)) == plain
        assert llm.engine.client.loop.snapshot().speculation.proposed["mtp"] > 20
