"""Programs of models that the engine cannot run, built from a config.json, only for plans."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from msgspec.structs import replace

from twostroke.model.families import MODEL_TYPES, build_program
from twostroke.model.families.blocks import (
    attention,
    decoder,
    feed_forward,
    mixture_of_experts,
    norm,
)
from twostroke.model.families.common_fields import all_but_every, config_window, read_sizes
from twostroke.model.families.fields import MAX_EXPERTS, MAX_LAYERS, MAX_VOCAB, MAX_WIDTH, Fields
from twostroke.model.families.gemma4 import with_shared_kv_layers
from twostroke.model.families.spec import ExpertSpec, ModelSpec, RopeSpec
from twostroke.model.program import ops
from twostroke.model.weights.hf_model import (
    SIZE_KEYS,
    hf_fields,
    hf_spec,
    refuse_architecture,
    text_fields,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from twostroke.model.program import Op, Program

    Part = Callable[[ModelSpec, int, str, str], list[Op]]  # spec, layer, input, output

# Layers of these models keep states of a fixed size, which a KV cache does not describe.
_WITH_STATES: Final = frozenset(
    [
        "bamba",
        "falcon_h1",
        "falcon_mamba",
        "jamba",
        "mamba",
        "mamba2",
        "minimax",
        "phi4flash",
        "recurrent_gemma",
        "rwkv",
        "zamba",
        "zamba2",
    ]
)


def described_program(file: str, config: Mapping[str, Any], name: str) -> Program | None:
    """Return a Program for plans of a model that the engine cannot run, from its config.json.

    Returns None if the engine can run the model: its weights then tell more than its config.json.

    Raises:
        ModelFormatError: the model type is known neither to a family nor to this module.
    """
    fields = text_fields(file, config)
    model_type = fields.text("model_type")
    if model_type in MODEL_TYPES and model_type not in _FAMILIES:
        return None
    if model_type in _WITH_STATES:
        fields.fault(
            f"has the architecture {model_type!r}, whose layers keep states of a fixed size: "
            "plans count keys and values alone"
        )
    if model_type not in _FAMILIES:
        refuse_architecture(fields, model_type, [*MODEL_TYPES, *_FAMILIES])
    defaults, describe = _FAMILIES[model_type]
    return describe(Fields(file, {**defaults, **fields.values}), name)


def _qwen2_moe(fields: Fields, name: str) -> Program:
    """Return the Program of Qwen1.5 and Qwen2 with experts (arXiv:2407.10671).

    One expert is shared.
    """
    fields.expect("decoder_sparse_step", 1)
    fields.expect("mlp_only_layers", [])
    fields.expect("use_sliding_window", False)  # noqa: FBT003 - the only value
    spec = replace(_common_spec(fields, name), qkv_bias=True)
    width = fields.integer("shared_expert_intermediate_size", MAX_WIDTH, low=0)
    return _with_experts(fields, spec, attention, "num_experts", shared_width=width)


def _gpt_oss(fields: Fields, name: str) -> Program:
    """Return the Program of gpt-oss (arXiv:2508.10925), which the engine can run.

    Headers of the published folders do not show the shapes of the experts in MXFP4.
    """
    return build_program(hf_spec(hf_fields(fields.name, fields.values), name))


def _hunyuan(fields: Fields, name: str) -> Program:
    """Return the Program of Hunyuan-Large (arXiv:2411.02265).

    Adjacent layers share keys and values, and there is a shared expert.
    """
    spec = _common_spec(fields, name)
    period = 1
    if fields.flag("use_cla", default=False):
        period = fields.integer("cla_share_factor", MAX_LAYERS)

    def part(spec: ModelSpec, layer: int, x: str, output: str) -> list[Op]:
        if layer % period:
            return _shared_kv_attention(spec, layer, x, output, layer // period)
        layer_ops = attention(spec, layer, x, output)
        return [op.with_layers({layer: layer // period}) for op in layer_ops]

    width, top_k_key = spec.ffn_size, "moe_topk"
    keys = ("num_experts", "num_shared_expert", top_k_key)
    flat = Fields(
        fields.name, {**fields.values, **{key: _same_in_all_layers(fields, key) for key in keys}}
    )
    shared = flat.integer("num_shared_expert", MAX_EXPERTS, low=0) * width
    return _with_experts(
        flat, spec, part, "num_experts", width=width, shared_width=shared, top_k_key=top_k_key
    )


def _gemma3n(fields: Fields, name: str) -> Program:
    """Return the Program of Gemma 3n's text model.

    The last layers use keys and values of earlier layers. Each layer has its own embeddings (a row
    for each token), and a residual of low rank. Before the first layer and after the last, four
    residual streams are mixed.
    """
    width = _same_in_all_layers(fields, "intermediate_size")
    spec = _common_spec(Fields(fields.name, {**fields.values, "intermediate_size": width}), name)
    count, hidden = spec.num_layers, spec.hidden_size
    spec = replace(spec, window=config_window(fields, all_but_every(5, count)))
    num_shared = fields.integer("num_kv_shared_layers", count - 1, low=0)
    spec = with_shared_kv_layers(fields, spec, num_shared, spec.ffn_size)
    rank = fields.integer("laurel_rank", MAX_WIDTH)
    each = fields.integer("hidden_size_per_layer_input", MAX_WIDTH)
    vocab = fields.integer("vocab_size_per_layer_input", MAX_VOCAB)
    streams = fields.integer("altup_num_inputs", 64) - 1

    def part(spec: ModelSpec, layer: int, x: str, output: str) -> list[Op]:
        source_layer = spec.kv_source_layer(layer)
        if source_layer is None:
            return attention(spec, layer, x, output)
        return _shared_kv_attention(spec, layer, x, output, source_layer)

    def layer_of(spec: ModelSpec, layer: int, x: str, output: str) -> list[Op]:
        name = f"blk.{layer}"
        steps = [("laurel_l", x, hidden, rank), ("laurel_r", "laurel_l", rank, hidden)]
        steps += [("per_layer_gate", x, hidden, each), ("proj", "per_layer_gate", each, hidden)]
        if layer == 0:
            steps.append(("per_layer_model_proj", x, hidden, each * count))
        if layer in {0, count - 1}:
            steps += [(f"altup_{n}", x, hidden, hidden) for n in range(streams)]
        layer_ops: list[Op] = []
        if layer == 0:
            table = "per_layer_token_embd"
            layer_ops.append(ops.Embed(table, f"{table}.weight", vocab, each * count))
        for step, read, wide, out in steps:
            value = read if read == x else f"{name}.{read}"
            weight = f"{name}.{step}.weight"
            layer_ops.append(ops.Linear(f"{name}.{step}", value, weight, wide, out))
        return [*layer_ops, *_layer(spec, layer, x, output, (part, feed_forward))]

    return decoder(spec, layer_of)


def _with_experts(
    fields: Fields,
    spec: ModelSpec,
    part: Part,
    count: str,
    *,
    width: int | None = None,
    shared_width: int = 0,
    top_k_key: str = "num_experts_per_tok",
) -> Program:
    """Return the Program of a decoder in which a mixture of experts is the feed-forward.

    `part` builds the attention. `count` and `top_k_key` are the config.json keys of the number of
    experts, and of the number that a token uses.
    """
    if width is None:
        width = fields.integer("moe_intermediate_size", MAX_WIDTH)
    num_experts = fields.integer(count, MAX_EXPERTS)
    top_k = fields.integer(top_k_key, num_experts)
    experts = ExpertSpec(num_experts, top_k, width, normalize=True)

    def feed(spec: ModelSpec, layer: int, x: str, output: str) -> list[Op]:
        routed = replace(spec, experts=experts)
        if not shared_width:
            return mixture_of_experts(routed, layer, x, output)
        routed_output, shared_output = f"{output}.routed", f"{output}.shared"
        shared = replace(spec, ffn_size=shared_width)
        return [
            *mixture_of_experts(routed, layer, x, routed_output),
            *feed_forward(shared, layer, x, shared_output),
            ops.Add(output, routed_output, shared_output, spec.hidden_size),
        ]

    def layer_of(spec: ModelSpec, layer: int, x: str, output: str) -> list[Op]:
        return _layer(spec, layer, x, output, (part, feed))

    return decoder(spec, layer_of)


def _layer(spec: ModelSpec, layer: int, x: str, output: str, parts: tuple[Part, Part]) -> list[Op]:
    """Return the operations of a decoder layer from two parts, attention and feed-forward.

    They compute `h = x + attention(norm(x))` and `h + feed_forward(norm(h))`.
    """
    layer_ops: list[Op] = []
    steps = zip(parts, (x, f"h{layer}"), (f"h{layer}", output), ("attn", "ffn"), strict=True)
    for part, start, end, name in steps:
        normed, result = f"{end}.normed", f"{end}.part"
        layer_ops.append(norm(spec, normed, start, f"blk.{layer}.{name}_norm"))
        layer_ops += part(spec, layer, normed, result)
        layer_ops.append(ops.Add(end, start, result, spec.hidden_size))
    return layer_ops


def _shared_kv_attention(
    spec: ModelSpec, layer: int, x: str, output: str, cache_layer: int
) -> list[Op]:
    """Return the operations of a layer that attends to keys and values of an earlier layer.

    They are stored in the KV cache's layer `cache_layer`.
    """
    name, width = f"blk.{layer}", spec.num_heads * spec.head_dim
    q, mixed, window = f"{name}.q", f"{name}.mixed", spec.window_of(layer)
    return [
        ops.Linear(q, x, f"{name}.attn_q.weight", spec.hidden_size, width),
        ops.SharedKvAttention(
            mixed,
            q,
            k="",
            v="",
            layer=cache_layer,
            num_heads=spec.num_heads,
            num_kv_heads=spec.num_kv_heads,
            head_dim=spec.head_dim,
            scale=1.0,
            window=None if window is None else window.size,
        ),
        ops.Linear(output, mixed, f"{name}.attn_output.weight", width, spec.hidden_size),
    ]


def _common_spec(fields: Fields, name: str) -> ModelSpec:
    """Read the fields that all model families share from a configuration, for plans.

    The base of RoPE is a fixed number, since plans do not depend on it.
    """
    sizes = read_sizes(fields, SIZE_KEYS)
    biased = fields.flag("attention_bias", default=False)
    return ModelSpec(
        **sizes,
        architecture=fields.text("model_type"),
        name=name,
        vocab_size=fields.integer("vocab_size", MAX_VOCAB),
        norm_epsilon=1e-6,
        rope=RopeSpec(10_000.0, sizes["head_dim"], interleaved=False),
        tied_embeddings=fields.flag("tie_word_embeddings", default=False),
        qkv_bias=biased,
        output_bias=biased,
    )


def _same_in_all_layers(fields: Fields, key: str) -> Any:
    """Return a value of the configuration that must be the same in all layers.

    The file has one value, or a list with one value per layer.
    """
    value = fields.value(key)
    if not isinstance(value, list) or not value:
        return value
    if any(each != value[0] for each in value):
        fields.refuse(key, "which differs between layers: plans do not know that")
    return value[0]


_GEMMA3N: Final = {
    "vocab_size": 262_400, "hidden_size": 2048, "intermediate_size": 16_384, "head_dim": 256,
    "num_hidden_layers": 35, "num_attention_heads": 8, "num_key_value_heads": 2,
    "max_position_embeddings": 32_768, "tie_word_embeddings": True, "sliding_window": 512,
    "vocab_size_per_layer_input": 262_144, "hidden_size_per_layer_input": 256,
    "altup_num_inputs": 4, "num_kv_shared_layers": 15, "laurel_rank": 64,
}  # fmt: skip

# By `model_type`: default values of fields, as in transformers, and the function that describes it.
_FAMILIES: Final[dict[str, tuple[dict[str, Any], Callable[[Fields, str], Program]]]] = {
    "gemma3n": (_GEMMA3N, _gemma3n),
    "gemma3n_text": (_GEMMA3N, _gemma3n),
    "gpt_oss": ({}, _gpt_oss),
    "hunyuan": ({}, _hunyuan),
    "qwen2_moe": ({}, _qwen2_moe),
}
