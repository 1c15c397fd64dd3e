"""Programs of trained heads that propose a model's next tokens from its hidden states.

Sources: Medusa (arXiv:2401.10774), EAGLE (arXiv:2401.15077, 2406.16858, 2503.01840), and for the
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
TABLE: Final = "token_embd.weight"  # EAGLE reads the target model's table
NUMBERS: Final = "numbers.weight"  # Medusa: selects a row's block

# Sizes of a model that the layer of its heads shares, except perhaps `ffn_size`.
LAYER_SIZES: Final = (
    *("hidden_size", "ffn_size", "num_heads", "num_kv_heads", "head_dim", "vocab_size"),
    *("context_length", "norm_epsilon"),
)


class HeadsSpec(Frozen):
    """The shapes of trained draft heads (EAGLE or Medusa), which propose a model's next tokens.

    `layer` describes the decoder layer (EAGLE) or the residual blocks (Medusa); its `vocab_size`
    and `hidden_size` are the target model's. Heads can propose the `num_tokens` tokens of a reduced
    vocabulary, and were trained to propose `depth` tokens in a row.
    """

    kind: str
    layer: ModelSpec
    num_tokens: int
    depth: int


def heads_for(
    target: ModelSpec, kind: str, *, num_tokens: int, depth: int, ffn_size: int, window: int
) -> HeadsSpec:
    """Return the shapes of draft heads to train for a target model.

    `kind` is "eagle" or "medusa". `num_tokens` and `depth` are as in `HeadsSpec`. The heads'
    attention window has `window` tokens.
    """
    sizes = {name: getattr(target, name) for name in LAYER_SIZES} | {"ffn_size": ffn_size}
    rope = RopeSpec(target.rope.base, target.head_dim, target.rope.interleaved)
    return HeadsSpec(kind, heads_layer(target.name, rope, window, sizes), num_tokens, depth)


def heads_layer(name: str, rope: RopeSpec, window: int, sizes: Mapping[str, Any]) -> ModelSpec:
    """Return the spec of a decoder layer of draft heads, from the sizes that `heads.json` stores.

    `sizes` has a value for each of `LAYER_SIZES`.
    """
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
    """Return the Program of draft heads, from a hidden state of the target model to logits.

    `last_hidden` names the hidden state that the Program computes.
    """
    return _eagle(spec) if spec.kind == EAGLE else _medusa(spec)


def last_hidden(program: Program) -> str:
    """Return the name of a Program's last hidden state before the final norm."""
    return program.layer_outputs[-1]


def _eagle(spec: HeadsSpec) -> Program:
    """Return the Program of an EAGLE head: one decoder layer, and logits.

    A row's inputs are a token's embedding and the hidden state from which that token was sampled:
    the target's, or the layer's own if the token is a draft. Both are normalized and projected. The
    layer computes the next hidden state.
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
    """Return the Program of Medusa heads: residual blocks that each propose one token.

    All blocks read one hidden state. Block i proposes the token i steps after the next one. Each
    row computes one block: the row's "token" is the number of that block. The blocks are the
    experts of a mixture, whose table of scores has a large number on its diagonal, so that a row
    uses the expert with its number.
    """
    layer = spec.layer
    count = spec.depth
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
            "part",
            x="given.normed",
            scores="scores",
            experts=blocks,
            width=hidden,
            ffn_width=layer.ffn_size,
            num_used=1,
            normalize=True,
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
