"""Models that plans know by their config.json, although no family here runs them.

They are Programs like others, made of the same operations. What is small beside these (rotation,
gates of shared experts, sinks, biases of experts) is left out.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from msgspec.structs import replace

from twostroke.model.families import MODEL_TYPES
from twostroke.model.families.blocks import attention, decoder, feed_forward, mixture, norm
from twostroke.model.families.common_fields import all_but_every, config_window, read_sizes
from twostroke.model.families.fields import MAX_EXPERTS, MAX_LAYERS, MAX_VOCAB, MAX_WIDTH, Fields
from twostroke.model.families.gemma4 import borrowing_layers
from twostroke.model.families.spec import ExpertSpec, ModelSpec, RopeSpec
from twostroke.model.program import ops
from twostroke.model.weights.hf_model import SIZE_KEYS, refuse_architecture, text_fields

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from twostroke.model.program import Op, Program

    Part = Callable[[ModelSpec, int, str, str], list[Op]]  # spec, layer, input, output

# Their layers keep states of a fixed size, which a cache by tokens does not describe.
_WITH_STATES: Final = frozenset(
    [
        "bamba",
        "falcon_h1",
        "falcon_mamba",
        "granitemoehybrid",
        "jamba",
        "kimi_linear",
        "lfm2",
        "lfm2_moe",
        "mamba",
        "mamba2",
        "minimax",
        "nemotron_h",
        "phi4flash",
        "qwen3_5",
        "qwen3_next",
        "recurrent_gemma",
        "rwkv",
        "zamba",
        "zamba2",
    ]
)


def described_program(file: str, config: Mapping[str, Any], name: str) -> Program | None:
    """Return the Program of a model that no family runs, None if one does.

    Raises:
        ModelFormatError: neither a family nor this file knows the model type.
    """
    fields = text_fields(file, config)
    model_type = fields.text("model_type")
    if model_type in MODEL_TYPES:
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
    """Qwen1.5 and Qwen2 with experts (arXiv:2407.10671), one of them shared."""
    fields.expect("decoder_sparse_step", 1)
    fields.expect("mlp_only_layers", [])
    fields.expect("use_sliding_window", False)  # noqa: FBT003 - the only value
    spec = replace(_spec(fields, name), qkv_bias=True)
    width = fields.integer("shared_expert_intermediate_size", MAX_WIDTH, low=0)
    return _with_experts(fields, spec, attention, "num_experts", shared_width=width)


def _gpt_oss(fields: Fields, name: str) -> Program:
    """gpt-oss (arXiv:2508.10925): every other layer slides; biases everywhere."""
    spec = _spec(fields, name)
    spec = replace(spec, window=config_window(fields, all_but_every(2, spec.num_layers)))
    return _with_experts(fields, spec, attention, "num_local_experts", width=spec.ffn_size)


def _hunyuan(fields: Fields, name: str) -> Program:
    """Hunyuan-Large (arXiv:2411.02265): neighbours share keys and values, and a shared expert."""
    spec = _spec(fields, name)
    period = 1
    if fields.flag("use_cla", default=False):
        period = fields.integer("cla_share_factor", MAX_LAYERS)

    def part(spec: ModelSpec, layer: int, x: str, output: str) -> list[Op]:
        if layer % period:
            return _borrowing(spec, layer, x, output, layer // period)
        own = attention(spec, layer, x, output)
        return [op.with_layers({layer: layer // period}) for op in own]

    width, used = spec.ffn_size, "moe_topk"
    each = {key: _only(fields, key) for key in ("num_experts", "num_shared_expert", used)}
    flat = Fields(fields.name, {**fields.values, **each})
    shared = flat.integer("num_shared_expert", MAX_EXPERTS, low=0) * width
    return _with_experts(
        flat, spec, part, "num_experts", width=width, shared_width=shared, used=used
    )


def _gemma3n(fields: Fields, name: str) -> Program:
    """Gemma 3n's text model: the last layers read keys and values of earlier ones.

    Each layer has embeddings of its own (a row for each token), and a residual of low rank; four
    streams instead of one are mixed before the first layer and after the last.
    """
    width = _only(fields, "intermediate_size")
    spec = _spec(Fields(fields.name, {**fields.values, "intermediate_size": width}), name)
    count, hidden = spec.num_layers, spec.hidden_size
    spec = replace(spec, window=config_window(fields, all_but_every(5, count)))
    borrowing = fields.integer("num_kv_shared_layers", count - 1, low=0)
    spec = borrowing_layers(fields, spec, borrowing, spec.ffn_size)
    rank = fields.integer("laurel_rank", MAX_WIDTH)
    each = fields.integer("hidden_size_per_layer_input", MAX_WIDTH)
    vocab = fields.integer("vocab_size_per_layer_input", MAX_VOCAB)
    streams = fields.integer("altup_num_inputs", 64) - 1

    def part(spec: ModelSpec, layer: int, x: str, output: str) -> list[Op]:
        lender = spec.lender_of(layer)
        if lender is None:
            return attention(spec, layer, x, output)
        return _borrowing(spec, layer, x, output, lender)

    def layer_of(spec: ModelSpec, layer: int, x: str, output: str) -> list[Op]:
        name = f"blk.{layer}"
        steps = [("laurel_l", x, hidden, rank), ("laurel_r", "laurel_l", rank, hidden)]
        steps += [("per_layer_gate", x, hidden, each), ("proj", "per_layer_gate", each, hidden)]
        if layer == 0:
            steps.append(("per_layer_model_proj", x, hidden, each * count))
        if layer in {0, count - 1}:
            steps += [(f"altup_{n}", x, hidden, hidden) for n in range(streams)]
        found: list[Op] = []
        if layer == 0:
            table = "per_layer_token_embd"
            found.append(ops.Embed(table, f"{table}.weight", vocab, each * count))
        for step, read, wide, out in steps:
            value = read if read == x else f"{name}.{read}"
            found.append(ops.Linear(f"{name}.{step}", value, f"{name}.{step}.weight", wide, out))
        return [*found, *_layer(spec, layer, x, output, (part, feed_forward))]

    return decoder(spec, layer_of)


def _with_experts(
    fields: Fields,
    spec: ModelSpec,
    part: Part,
    count: str,
    *,
    width: int | None = None,
    shared_width: int = 0,
    used: str = "num_experts_per_tok",
) -> Program:
    """Return a decoder whose layers have experts; `count` and `used` are keys."""
    if width is None:
        width = fields.integer("moe_intermediate_size", MAX_WIDTH)
    most = fields.integer(count, MAX_EXPERTS)
    experts = ExpertSpec(most, fields.integer(used, most), width, normalize=True)

    def feed(spec: ModelSpec, layer: int, x: str, output: str) -> list[Op]:
        routed = replace(spec, experts=experts)
        if not shared_width:
            return mixture(routed, layer, x, output)
        names = f"{output}.routed", f"{output}.shared"
        shared = replace(spec, ffn_size=shared_width)
        return [
            *mixture(routed, layer, x, names[0]),
            *feed_forward(shared, layer, x, names[1]),
            ops.Add(output, *names, spec.hidden_size),
        ]

    def layer_of(spec: ModelSpec, layer: int, x: str, output: str) -> list[Op]:
        return _layer(spec, layer, x, output, (part, feed))

    return decoder(spec, layer_of)


def _layer(spec: ModelSpec, layer: int, x: str, output: str, parts: tuple[Part, Part]) -> list[Op]:
    """Return `x + attention(norm(x))`, then the same of a feed-forward."""
    found: list[Op] = []
    steps = zip(parts, (x, f"h{layer}"), (f"h{layer}", output), ("attn", "ffn"), strict=True)
    for part, start, end, name in steps:
        normed, result = f"{end}.normed", f"{end}.part"
        found.append(norm(spec, normed, start, f"blk.{layer}.{name}_norm"))
        found += part(spec, layer, normed, result)
        found.append(ops.Add(end, start, result, spec.hidden_size))
    return found


def _borrowing(spec: ModelSpec, layer: int, x: str, output: str, stored: int) -> list[Op]:
    """Return attention to the keys and values of an earlier layer, cache layer `stored`."""
    name, width = f"blk.{layer}", spec.num_heads * spec.head_dim
    q, mixed, window = f"{name}.q", f"{name}.mixed", spec.window_of(layer)
    size = None if window is None else window.size
    sizes = spec.num_heads, spec.num_kv_heads, spec.head_dim
    return [
        ops.Linear(q, x, f"{name}.attn_q.weight", spec.hidden_size, width),
        ops.SharedKvAttention(mixed, q, "", "", stored, *sizes, 1.0, size),
        ops.Linear(output, mixed, f"{name}.attn_output.weight", width, spec.hidden_size),
    ]


def _spec(fields: Fields, name: str) -> ModelSpec:
    """Return what all have in common; rotation costs the same whatever its base is."""
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


def _only(fields: Fields, key: str) -> Any:
    """Return a value that may be a list with one for each layer, if these are all equal."""
    value = fields.value(key)
    if not isinstance(value, list) or not value:
        return value
    if any(one != value[0] for one in value):
        fields.refuse(key, "which differs between layers: plans do not know that")
    return value[0]


_GEMMA3N: Final = {
    "vocab_size": 262_400, "hidden_size": 2048, "intermediate_size": 16_384, "head_dim": 256,
    "num_hidden_layers": 35, "num_attention_heads": 8, "num_key_value_heads": 2,
    "max_position_embeddings": 32_768, "tie_word_embeddings": True, "sliding_window": 512,
    "vocab_size_per_layer_input": 262_144, "hidden_size_per_layer_input": 256,
    "altup_num_inputs": 4, "num_kv_shared_layers": 15, "laurel_rank": 64,
}  # fmt: skip
_GPT_OSS: Final = {"head_dim": 64, "sliding_window": 128, "attention_bias": True}

# By `model_type`: what files may leave out, as in transformers, and who describes it.
_FAMILIES: Final[dict[str, tuple[dict[str, Any], Callable[[Fields, str], Program]]]] = {
    "gemma3n": (_GEMMA3N, _gemma3n),
    "gemma3n_text": (_GEMMA3N, _gemma3n),
    "gpt_oss": (_GPT_OSS, _gpt_oss),
    "hunyuan": ({}, _hunyuan),
    "qwen2_moe": ({}, _qwen2_moe),
}
