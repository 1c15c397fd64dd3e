"""Which tokens end a generation: those that the model's files name, and well-known texts."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable

    from twostroke.tokenize.specials import AddedToken

# Files often name one end only, say the end of a document, while the chat template closes turns
# with another; every engine that reads them therefore knows these texts.
_END_TEXTS = frozenset(
    {
        "<|im_end|>",
        "<|endoftext|>",
        "<|end_of_text|>",
        "<|eot_id|>",
        "<|eom_id|>",
        "<|end|>",
        "<|return|>",
        "<|call|>",
        "<|endofturn|>",
        "<end_of_turn>",
        "<turn|>",
        "<EOT>",
        "<｜end▁of▁sentence｜>",
    }
)


def end_ids(named: Iterable[int], added: Iterable[AddedToken]) -> frozenset[int]:
    """Return the ids that end a generation: `named` by the files, and added tokens known to.

    Where `<|return|>` exists (the harmony format), `<|end|>` closes a message and not the answer.
    """
    by_text = {token.text: token.id for token in added}
    known = {text for text in _END_TEXTS if text in by_text}
    if "<|return|>" in known:
        known.discard("<|end|>")
    return frozenset(named) | {by_text[text] for text in known}
