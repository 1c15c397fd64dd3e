"""`Variant`: a family's departures from Llama, in both kinds of files."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from msgspec import field

from twostroke.core.frozen import Frozen

if TYPE_CHECKING:
    from support.tiny_attention import Latent, Wide
    from support.tiny_kimi import Channels
    from support.tiny_mixers import Convolution, Mamba
    from support.tiny_recurrent import Delta


class Variant(Frozen):
    """A family's departures from Llama.

    `metadata` is for GGUF files (keys without the architecture), `config` for config.json; `sizes`
    are changed fields of Tiny. `layer_names` are Hugging Face's names of a layer's weights that
    differ from Llama's, and `dense_names` those of a feed-forward where layers with experts have
    other names; `state_names` are complete names, and `model_names` names of weights outside of
    layers. `gguf_names` are other names in GGUF files. `fused` are stacks of rows that both files
    store, `folder_fused` those that only folders store; `expert_stacks` are folders' names of the
    experts' matrices, gates and ups in one stack, with inputs before outputs if `are_transposed`;
    every `expert_step`-th layer has experts. `factors` is a RoPE table that the GGUF file
    stores as a tensor. `norm_offset` is subtracted from the norm weights of folders.
    """

    architecture: str = "llama"
    model_type: str = "llama"
    sizes: dict[str, Any] = field(default_factory=dict)
    metadata: dict[str, Any] = field(default_factory=dict)
    config: dict[str, Any] = field(default_factory=dict)
    layer_names: dict[str, str] = field(default_factory=dict)
    dense_names: dict[str, str] = field(default_factory=dict)
    model_names: dict[str, str] = field(default_factory=dict)
    gguf_names: dict[str, str] = field(default_factory=dict)
    fused: dict[str, tuple[str, ...]] = field(default_factory=dict)
    folder_fused: dict[str, tuple[str, ...]] = field(default_factory=dict)
    expert_stacks: tuple[str, str] | None = None
    are_transposed: bool = False
    expert_step: int = 1
    state_names: dict[str, str] = field(default_factory=dict)
    factors: dict[str, tuple[float, ...]] = field(default_factory=dict)
    interleaves: bool = False
    qkv_bias: bool = False
    query_key_norm: str | None = None
    query_norm_in_gguf: float | None = None  # the constant weight of norms without weights
    gates_attention: bool = False
    last_norm_has_offset: bool = True
    pre_norms: bool = True
    post_norms: bool = False
    norm_offset: float = 0.0
    num_experts: int = 0
    latent: Latent | None = None
    wide: Wide | None = None
    delta: Delta | None = None
    convolution: Convolution | None = None
    mamba: Mamba | None = None
    channels: Channels | None = None
    blocks: str | None = None  # of each layer, if it has one block only: M, *, - or E
    expert_width: int | None = None  # of what experts read, if it is not the model's width
    layer_prefix: str = "model"  # of names in folders
    first_with_experts: int = 0
    num_shared: int = 0
    has_choice_bias: bool = False
    output_bias: bool = False
    has_sinks: bool = False
    has_expert_biases: bool = False  # of the router, too; folders then have gpt-oss's stacks
    ffn_norm: str = "ffn_norm"  # as GGUF files call the norm before the feed-forward

    @property
    def attends(self) -> tuple[bool, ...] | None:
        """Return which layers have attention, repeated; None if all of them do."""
        if self.delta is not None:
            return tuple(self.delta.attends(layer) for layer in range(self.delta.interval))
        mixer = self.convolution or self.mamba or self.channels
        return None if mixer is None else mixer.attends
