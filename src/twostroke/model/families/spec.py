"""`ModelSpec`: the sizes and constants of a model, independent of its file's format."""

from __future__ import annotations

import math
from enum import Enum

from twostroke.core.frozen import Frozen
from twostroke.model.program import Activation


class RopeSpec(Frozen):
    """The rotary position embedding (RoPE) of a model (arXiv:2104.09864).

    `dim` of a head's values are rotated. `interleaved`: neighbouring values (2i, 2i+1) are rotated
    as pairs, as GGUF stores the Llama family; otherwise value i is paired with i + dim/2. A context
    extension sets `scaled_frequencies` for the `dim // 2` pairs, and a `magnitude` that multiplies
    sine and cosine. Queries have an attention temperature if `temperature_scale` is not 0; see
    `ops.QueryRope`, whose fields have the same names.
    """

    base: float
    dim: int
    interleaved: bool
    scaled_frequencies: tuple[float, ...] | None = None
    magnitude: float = 1.0
    temperature_scale: float = 0.0
    temperature_length: int = 1
    temperature_offset: int = 0

    @property
    def frequencies(self) -> tuple[float, ...]:
        """The angle per position, in radians, by which each pair of values is rotated."""
        if self.scaled_frequencies is not None:
            return self.scaled_frequencies
        return tuple([self.base ** (-2 * pair / self.dim) for pair in range(self.dim // 2)])


class WindowSpec(Frozen):
    """The sliding window of attention: some layers attend only to the last `size` positions.

    The token's own position counts. `slides[i]` tells whether layer i has the window. `rope`,
    `num_kv_heads` and `head_dim` are for layers with the window; None means the model's values. If
    it `is_chunked`, a token attends to the positions of its own chunk of `size` instead (see
    `ops.Attention`).
    """

    size: int
    slides: tuple[bool, ...]
    rope: RopeSpec | None = None
    num_kv_heads: int | None = None
    head_dim: int | None = None
    is_chunked: bool = False


class LayerKind(Enum):
    """The kind of a layer's block, in models whose layers have one block only (Nemotron-H)."""

    RECURRENT = "recurrent"
    ATTENTION = "attention"
    FEED_FORWARD = "feed-forward"
    EXPERTS = "experts"


class RoutingSpec(Frozen):
    """How a model's router chooses experts, if it is more than a plain softmax.

    The fields have the meanings of `program.ops.Route`; see arXiv:2405.04434, 2412.19437. With
    `has_bias` each layer has a bias per expert, which affects only the choice of experts.
    """

    scale: float = 1.0
    is_sigmoid: bool = False
    has_bias: bool = False
    num_groups: int = 1
    num_used_groups: int = 1
    group_best: int = 1


class ExpertSpec(Frozen):
    """A model's mixture of experts, which replaces each layer's feed-forward (arXiv:2401.04088).

    A token uses `num_used` of `count` experts, each `ffn_size` wide. `normalize` divides the
    routing weights of the used experts by their sum. Every token also uses a shared expert
    `shared_size` wide, if that is not 0. Layers before `first_layer` have a dense feed-forward
    instead of experts, and so does layer i if there are `layers` and `layers[i]` is false.

    With `adds_dense_ffn`, layers have both, and their outputs are added (Gemma 4). With
    `gates_shared` the shared expert's output is multiplied by the sigmoid of one gate for each
    token (Qwen). With `has_biases` the router and the three matrices of each expert have a bias
    (gpt-oss). If `latent_size` is not 0, all routed experts share a projection to vectors of this
    width, which they read, and one from the vectors that they write (Nemotron 3). With
    `scales_inputs` the routing weight of an expert multiplies its input, not its output; see
    `ops.MixtureOfExperts` (Llama 4).
    """

    count: int
    num_used: int
    ffn_size: int
    normalize: bool
    shared_size: int = 0
    first_layer: int = 0
    routing: RoutingSpec | None = None
    adds_dense_ffn: bool = False
    gates_shared: bool = False
    has_biases: bool = False
    latent_size: int = 0
    layers: tuple[bool, ...] | None = None
    scales_inputs: bool = False


class LatentSpec(Frozen):
    """The sizes of latent attention (arXiv:2405.04434).

    A token stores one vector of `rank + rotated` values for all heads: the latent vector and the
    rotary key. In each head, the keys without their rotary part are `key` wide, and the values are
    `value` wide. Queries are computed from vectors of `query_rank` values; if that is 0, by one
    product.
    """

    rank: int
    rotated: int
    key: int
    value: int
    query_rank: int = 0


class DeltaSpec(Frozen):
    """Layers with the gated delta rule in place of attention (arXiv:2412.06464).

    `attends[i]` tells whether layer i has attention; other layers keep a recurrent state. A layer
    has `num_key_heads` heads of queries and keys, `key_dim` wide, and `num_value_heads` heads of
    values, `value_dim` wide. Before the rule, a convolution over `kernel` tokens mixes queries,
    keys and values. `is_tiled` tells which key head a value head uses; see `ops.GatedDeltaRule`. If
    it `gates_channels` (Kimi Linear), each channel of the keys has a decay. The decays and the gate
    of the output are then low-rank projections, through vectors of `gate_rank` values.
    """

    attends: tuple[bool, ...]
    num_key_heads: int
    num_value_heads: int
    key_dim: int
    value_dim: int
    kernel: int
    is_tiled: bool = False
    gates_channels: bool = False
    gate_rank: int = 0

    @property
    def width(self) -> int:
        """The number of values of all value heads of a token together."""
        return self.num_value_heads * self.value_dim


class ConvolutionSpec(Frozen):
    """Layers with a gated short convolution in place of attention (LFM2).

    `attends[i]` tells whether layer i has attention. The convolution is over `kernel` rows. With
    `has_bias`, the convolution and the products before and after it have biases.
    """

    attends: tuple[bool, ...]
    kernel: int
    has_bias: bool = False


class Mamba2Spec(Frozen):
    """Layers with Mamba-2 in place of attention (arXiv:2405.21060).

    `attends[i]` tells whether layer i has attention. `ops.Mamba2` explains the other sizes. Before
    Mamba-2, a convolution over `kernel` tokens mixes values, keys and queries, with biases if
    `has_convolution_bias`. After it, the output is multiplied by a gate, and each group of heads is
    normalized, with `norm_epsilon`. With `has_bias` the input and output projections have biases.
    """

    attends: tuple[bool, ...]
    num_heads: int
    num_groups: int
    state_size: int
    head_dim: int
    kernel: int
    norm_epsilon: float
    has_convolution_bias: bool = True
    has_bias: bool = False
    min_step: float = 0.0
    max_step: float = math.inf

    @property
    def width(self) -> int:
        """The number of values of all heads of a token together."""
        return self.num_heads * self.head_dim

    @property
    def mixed_width(self) -> int:
        """The width of a token's values, keys and queries together, which the convolution mixes."""
        return self.width + 2 * self.num_groups * self.state_size


class SharedKvSpec(Frozen):
    """The last `count` layers of a model read keys and values of earlier layers (arXiv:2405.12981).

    Each reads from the last earlier layer that computes keys and values with the same kind of
    attention (with or without a window). The feed-forward of these layers is `ffn_size` wide.
    """

    count: int
    ffn_size: int


class ModelSpec(Frozen):
    """The sizes and constants of a model, from which `families` builds its `Program`.

    `architecture` is the key into `families.ARCHITECTURES` ("llama"). Sizes are counts of values;
    `context_length` is in tokens. `norm_offset` is added to the weights of norms, but to the weight
    of the last norm only with `offsets_last_norm`. `attention_scale` multiplies scores; None means
    1 / sqrt(head_dim). `embedding_scale` multiplies embeddings, if it is not None, and
    `logit_scale` multiplies logits before their soft cap. With `latent` attention there is one
    key-value head of `latent.rank + latent.rotated` values. Layers with the gated delta rule are
    described by `delta`, layers with short convolutions by `convolution`, layers with Mamba-2 by
    `mamba`.

    Gemma 4 has `layer_inputs`: the width of the additional input vector that each token has for
    each layer. With `layer_factors` a layer's output is multiplied by a learned number. Where
    `keys_give_values`, layers without a window use one matrix for keys and values. With
    `norms_values` each head of values is normalized, without a weight. With `norms_heads` queries
    and keys are normalized by head, with weights; it is set in families where only some models do
    so (`may_norm_heads`). With `gates_attention` the output of attention is multiplied by the
    sigmoid of a gate for each value. With `has_sinks` each query head has an attention sink
    (`ops.Attention`).

    Usually a layer has two blocks: attention or a recurrent block, then a feed-forward or experts.
    If there are `layer_kinds`, layer i has only a block of the kind `layer_kinds[i]`. If not
    `gates_ffn`, feed-forwards and experts have no gate projection, and the up projection is also
    the gate.

    `rotates[i]` tells whether layer i has a RoPE; other layers do not know positions. None: all
    layers have a RoPE. If queries of layers without RoPE have an attention temperature, it is in
    `unrotated_rope`, whose angles are 0. With `norms_embedding` embeddings are normalized, without
    a weight. Norms after attention and after the feed-forward have `post_norm_epsilon`, if it is
    not None.
    """

    architecture: str
    name: str
    num_layers: int
    hidden_size: int
    ffn_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    context_length: int
    norm_epsilon: float
    rope: RopeSpec
    tied_embeddings: bool
    norm_offset: float = 0.0
    activation: Activation = Activation.SILU
    qkv_bias: bool = False
    output_bias: bool = False
    attention_scale: float | None = None
    embedding_scale: float | None = None
    attention_soft_cap: float | None = None
    logit_scale: float = 1.0
    logit_soft_cap: float | None = None
    window: WindowSpec | None = None
    experts: ExpertSpec | None = None
    latent: LatentSpec | None = None
    shared_kv: SharedKvSpec | None = None
    layer_inputs: int = 0
    layer_factors: bool = False
    keys_give_values: bool = False
    norms_values: bool = False
    norms_heads: bool = False
    delta: DeltaSpec | None = None
    convolution: ConvolutionSpec | None = None
    mamba: Mamba2Spec | None = None
    gates_attention: bool = False
    has_sinks: bool = False
    layer_kinds: tuple[LayerKind, ...] | None = None
    gates_ffn: bool = True
    rotates: tuple[bool, ...] | None = None
    unrotated_rope: RopeSpec | None = None
    norms_embedding: bool = False
    offsets_last_norm: bool = True
    post_norm_epsilon: float | None = None

    @property
    def attends(self) -> tuple[bool, ...] | None:
        """Return which layers have attention; None if no layer keeps a recurrent state."""
        recurrent = self.delta or self.convolution or self.mamba
        return None if recurrent is None else recurrent.attends

    @property
    def recurrent_layers(self) -> tuple[int, ...]:
        """Return the indices of the layers that keep a recurrent state."""
        if self.layer_kinds is not None:
            kinds = enumerate(self.layer_kinds)
            return tuple(layer for layer, kind in kinds if kind is LayerKind.RECURRENT)
        attends = self.attends or ()
        return tuple(layer for layer, has_attention in enumerate(attends) if not has_attention)

    def state_layer_of(self, layer: int) -> int:
        """Return the index of a layer when only layers with a recurrent state are counted."""
        return sum(number < layer for number in self.recurrent_layers)

    def window_of(self, layer: int) -> WindowSpec | None:
        """Return the sliding window of a layer; None if the layer reads all positions."""
        return self.window if self.window is not None and self.window.slides[layer] else None

    def rope_of(self, layer: int) -> RopeSpec:
        """Return the RoPE of a layer; the RoPE of a layer without one has an angle of 0."""
        if self.rotates is not None and not self.rotates[layer]:
            plain = RopeSpec(self.rope.base, 2, self.rope.interleaved, scaled_frequencies=(0.0,))
            return self.unrotated_rope or plain
        window = self.window_of(layer)
        return self.rope if window is None or window.rope is None else window.rope

    def has_experts(self, layer: int) -> bool:
        """Return whether a layer has experts, in place of a feed-forward or beside it."""
        if self.experts is None or layer < self.experts.first_layer:
            return False
        return self.experts.layers is None or self.experts.layers[layer]

    def kv_heads_of(self, layer: int) -> tuple[int, int]:
        """Return the number of key-value heads of a layer, and the width of its heads."""
        window = self.window_of(layer)
        if window is None:
            return self.num_kv_heads, self.head_dim
        return window.num_kv_heads or self.num_kv_heads, window.head_dim or self.head_dim

    def kv_source_layer(self, layer: int) -> int | None:
        """Return the layer whose keys and values a layer reads; None if it computes its own."""
        first = self.num_layers - (self.shared_kv.count if self.shared_kv else 0)
        if layer < first:
            return None
        slides = self.window_of(layer) is not None
        return max(i for i in range(first) if (self.window_of(i) is not None) == slides)

    def cache_layer_of(self, layer: int) -> int:
        """Return a layer's index in the KV cache, which counts only layers with attention."""
        return layer if self.attends is None else sum(self.attends[:layer])

    def ffn_size_of(self, layer: int) -> int:
        """Return the width of a layer's feed-forward, in values."""
        if self.shared_kv is None or self.kv_source_layer(layer) is None:
            return self.ffn_size
        return self.shared_kv.ffn_size
