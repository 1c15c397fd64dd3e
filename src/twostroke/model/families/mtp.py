"""Programs of layers for multi-token prediction (MTP), which draft a model's next tokens.

Sources: arXiv:2404.19737, and DeepSeek-V3 (arXiv:2412.19437).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from msgspec.structs import replace

from twostroke.model.families import ARCHITECTURES
from twostroke.model.families.blocks import norm
from twostroke.model.families.heads import TABLE
from twostroke.model.families.spec import WindowSpec
from twostroke.model.program import Program, ops

if TYPE_CHECKING:
    from twostroke.model.families.spec import ModelSpec
    from twostroke.model.program import Op

OUTPUT: Final = "output.weight"  # the matrix of logits: the layer's own, or the target model's


def mtp_spec(target: ModelSpec, window: int | None = None) -> ModelSpec:
    """Return a model's spec with one more layer: the layer for multi-token prediction.

    The layer has attention, also in models with recurrent layers. With a `window` its attention
    reads only the last tokens, for speed; its weights were trained without one. Latent attention
    has no window.
    """
    spec = replace(target, num_layers=target.num_layers + 1)
    if target.delta is not None:
        spec = replace(spec, delta=replace(target.delta, attends=(*target.delta.attends, True)))
    if window is not None and target.latent is None:
        slides = (False,) * target.num_layers + (True,)
        spec = replace(spec, window=WindowSpec(window, slides))
    return spec


def mtp_weight(spec: ModelSpec, part: str) -> str:
    """Return the name of a weight that only MTP layers have, such as "enorm"."""
    return f"blk.{spec.num_layers - 1}.nextn.{part}.weight"


def mtp_program(spec: ModelSpec, num_tokens: int) -> Program:
    """Return the Program of the MTP layer of an `mtp_spec`: a decoder layer, and logits.

    A row's inputs are a token's embedding and the hidden state from which the token was sampled:
    the target's after its last norm, or the layer's own if the token is a draft. Both are
    normalized, concatenated and projected. The layer proposes one of the `num_tokens` tokens with
    the lowest ids.
    """
    number, hidden = spec.num_layers - 1, spec.hidden_size
    layer = ARCHITECTURES[spec.architecture].layer(spec, number, "x0", "x1")
    parts: list[Op] = [
        ops.Embed("embedding", TABLE, spec.vocab_size, hidden),
        ops.ExternalInput("given", hidden),
        *_projected(spec, "embedding", "enorm"),
        *_projected(spec, "given", "hnorm"),
        ops.Add("x0", "embedding.part", "given.part", hidden),
        *[replace(op, layer=0) if isinstance(op, ops.Attention) else op for op in layer],
        norm(spec, "last", "x1", mtp_weight(spec, "shared_head_norm").removesuffix(".weight")),
        ops.Logits("logits", "last", OUTPUT, hidden, num_tokens),
    ]
    name = f"MTP layer of {spec.name}"
    return Program(name, tuple(parts), spec.vocab_size, spec.context_length, ("x1",))


def _projected(spec: ModelSpec, x: str, norm_name: str) -> list[Op]:
    """Return the operations that normalize an input and multiply it by its half of `eh_proj`.

    `eh_proj` projects two concatenated inputs: the embedding, and the hidden state.
    """
    name = mtp_weight(spec, norm_name).removesuffix(".weight")
    return [
        norm(spec, f"{x}.normed", x, name),
        ops.Linear(
            f"{x}.part",
            f"{x}.normed",
            weight=mtp_weight(spec, projection_half(norm_name)),
            in_width=spec.hidden_size,
            width=spec.hidden_size,
        ),
    ]


def projection_half(norm_name: str) -> str:
    """Return the weight name of the half of `eh_proj` that multiplies the output of a norm.

    `norm_name` is "enorm" (of the embedding) or "hnorm" (of the hidden state).
    """
    return f"eh_proj.{norm_name}"
