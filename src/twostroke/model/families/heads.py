"""Heads that guess a model's next tokens from its hidden states, as separate Programs.

Sources: Medusa (arXiv:2401.10774), EAGLE (arXiv:2401.15077, 2406.16858, 2503.01840), and of the
reduced vocabulary FR-Spec (arXiv:2502.14856).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from twostroke.core.frozen import Frozen
from twostroke.model.families.blocks import norm, residual_layer
from twostroke.model.families.spec import ModelSpec, RopeSpec, WindowSpec
from twostroke.model.program import Program, ops

if TYPE_CHECKING:
    from collections.abc import Mapping

    from twostroke.model.program import Op

EAGLE: Final = "eagle"
MEDUSA: Final = "medusa"
KINDS: Final = (EAGLE, MEDUSA)
TABLE: Final = "token_embd.weight"  # EAGLE reads the target's own
NUMBERS: Final = "numbers.weight"  # Medusa: which block a row takes

# Facts of a model that a layer of its heads shares; the layer's `ffn_size` may differ.
LAYER_SIZES: Final = (
    *("hidden_size", "ffn_size", "num_heads", "num_kv_heads", "head_dim", "vocab_size"),
    *("context_length", "norm_epsilon"),
)


class HeadsSpec(Frozen):
    """The shapes of heads.

    `layer` has those of the decoder layer (EAGLE) or of the residual blocks (Medusa); its
    `vocab_size` and `hidden_size` are the target's. Heads guess one of `num_tokens` tokens, and
    learned to guess `depth` of them in a row.
    """

    kind: str
    layer: ModelSpec
    num_tokens: int
    depth: int


def heads_for(
    target: ModelSpec, kind: str, *, num_tokens: int, depth: int, ffn_size: int, window: int
) -> HeadsSpec:
    """Return the shapes of heads for a model; their attention sees `window` tokens."""
    sizes = {name: getattr(target, name) for name in LAYER_SIZES} | {"ffn_size": ffn_size}
    rope = RopeSpec(target.rope.base, target.head_dim, target.rope.interleaved)
    return HeadsSpec(kind, heads_layer(target.name, rope, window, sizes), num_tokens, depth)


def heads_layer(name: str, rope: RopeSpec, window: int, sizes: Mapping[str, Any]) -> ModelSpec:
    """Return the shapes of a layer for heads; `sizes` are those of `LAYER_SIZES`."""
    return ModelSpec(
        architecture="llama",
        name=name,
        num_layers=1,
        rope=rope,
        tied_embeddings=False,
        window=WindowSpec(window, (True,)),
        **sizes,
    )


def build_heads(spec: HeadsSpec) -> Program:
    """Return the Program of heads; `last_hidden` names the state that it returns."""
    return _eagle(spec) if spec.kind == EAGLE else _medusa(spec)


def last_hidden(program: Program) -> str:
    """Return the hidden state from which a Program's logits are computed, before its last norm."""
    return program.layer_outputs[-1]


def _eagle(spec: HeadsSpec) -> Program:
    """Return one decoder layer that writes the next hidden state, and from it the next token.

    A row's input is a token's embedding and the hidden state from which that token was drawn: the
    target's, or the layer's own where the token is a guess. Both are normed and projected.
    """
    layer = spec.layer
    hidden = layer.hidden_size
    parts: list[Op] = [
        ops.Embed("embedding", TABLE, layer.vocab_size, hidden),
        ops.ExternalInput("given", hidden),
        norm(layer, "embedding.normed", "embedding", "embd_norm"),
        ops.Linear("embedding.part", "embedding.normed", "fc_embd.weight", hidden, hidden),
        norm(layer, "given.normed", "given", "given_norm"),
        ops.Linear("given.part", "given.normed", "fc_given.weight", hidden, hidden),
        ops.Add("x0", "embedding.part", "given.part", hidden),
        *residual_layer(layer, 0, "x0", "x1"),
    ]
    return _finished(spec, parts, "x1", layer.vocab_size)


def _medusa(spec: HeadsSpec) -> Program:
    """Return residual blocks that all read one hidden state; block i guesses i tokens further on.

    A row's "token" is the number of its block. The blocks are experts, and a row uses the one with
    its number: the table of scores has a large number on its diagonal.
    """
    layer, count = spec.layer, spec.depth
    hidden = layer.hidden_size
    blocks = tuple(
        ops.Expert(*(f"blk.{index}.ffn_{part}.weight" for part in ("gate", "up", "down")))
        for index in range(count)
    )
    parts: list[Op] = [
        ops.ExternalInput("given", hidden),
        norm(layer, "given.normed", "given", "given_norm"),
        ops.Embed("scores", NUMBERS, count, count),
        ops.MixtureOfExperts(
            "part", "given.normed", "scores", blocks, hidden, layer.ffn_size, 1, normalize=True
        ),
        ops.Add("x1", "given.normed", "part", hidden),
    ]
    return _finished(spec, parts, "x1", count)


def _finished(spec: HeadsSpec, parts: list[Op], x: str, num_ids: int) -> Program:
    layer = spec.layer
    last: list[Op] = [
        norm(layer, "last", x, "output_norm"),
        ops.Logits("logits", "last", "output.weight", layer.hidden_size, spec.num_tokens),
    ]
    name = f"{spec.kind} heads of {layer.name}"
    return Program(name, (*parts, *last), num_ids, layer.context_length, (x,))
