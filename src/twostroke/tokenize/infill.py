"""Fill in the middle: tokens that mark the text before a gap and the text after it.

The order is prefix, suffix, middle (arXiv:2207.14255).
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from twostroke.tokenize.specials import AddedToken
    from twostroke.tokenize.tokenizer import Tokenizer

# Marks before the prefix, the suffix and the answer, family by family.
_FORMS: Final = (
    ("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>"),
    ("<fim_prefix>", "<fim_suffix>", "<fim_middle>"),
    ("<fim-prefix>", "<fim-suffix>", "<fim-middle>"),
    ("<|code_prefix|>", "<|code_suffix|>", "<|code_middle|>"),
    ("<｜fim▁begin｜>", "<｜fim▁hole｜>", "<｜fim▁end｜>"),
    ("▁<PRE>", "▁<SUF>", "▁<MID>"),
    ("<PRE>", "<SUF>", "<MID>"),
)
# Such models write this after a middle: padding, or the head of another file or repository.
_ENDS: Final = frozenset(
    {
        "<|fim_pad|>",
        "<fim_pad>",
        "<fim-pad>",
        "<|file_sep|>",
        "<|file_separator|>",
        "<file_sep>",
        "<filename>",
        "<|repo_name|>",
        "<repo_name>",
        "<reponame>",
        "▁<EOT>",
        "<EOT>",
    }
)


@dataclass(frozen=True, slots=True)
class InfillTokens:
    """The ids that come before prefix, suffix and answer, and the ids that end an answer.

    `texts` are how the vocabulary spells all of them.
    """

    prefix: int
    suffix: int
    middle: int
    end_ids: frozenset[int]
    texts: tuple[str, ...]


def infill_tokens(
    named: Sequence[int | None], ends: Iterable[int | None], added: Iterable[AddedToken]
) -> InfillTokens | None:
    """Return a vocabulary's tokens for filling in; None if it has none.

    `named` are those for prefix, suffix and middle that the model's files name, and `ends` others
    of theirs that end an answer. Where one of the three is missing, well-known added tokens count.
    """
    texts = {token.id: token.text for token in added}
    ids = {text: id_ for id_, text in texts.items()}
    three = tuple(id_ for id_ in named if id_ is not None)
    if len(three) != 3:
        forms = (tuple(ids[text] for text in form if text in ids) for form in _FORMS)
        three = next((form for form in forms if len(form) == 3), ())
    if not three:
        return None
    prefix, suffix, middle = three
    known = (ids[text] for text in _ENDS if text in ids)
    all_ids = frozenset((*three, *known, *(id_ for id_ in ends if id_ is not None)))
    spelled = tuple(texts[id_] for id_ in sorted(all_ids) if id_ in texts)
    return InfillTokens(prefix, suffix, middle, all_ids, spelled)


def encode_infill(
    tokenizer: Tokenizer,
    tokens: InfillTokens,
    prefix: str | Sequence[int],
    suffix: str,
    most: int | None = None,
) -> list[int]:
    """Return the prompt whose answer belongs between `prefix` (a text, or ids) and `suffix`.

    What looks like one of the special tokens in either text stays text. Neither may surely have
    more than `most` tokens, as in `Tokenizer.encode`.
    """
    before = prefix
    if isinstance(prefix, str):
        before = _encode(tokenizer, tokens, prefix, most)
    after = _encode(tokenizer, tokens, suffix, most, goes_on=True)
    start = [*tokenizer.prefix_ids, tokens.prefix, *before]
    return [*start, tokens.suffix, *after, tokens.middle]


def _encode(
    tokenizer: Tokenizer,
    tokens: InfillTokens,
    text: str,
    most: int | None,
    *,
    goes_on: bool = False,
) -> list[int]:
    """Return the ids of a text; one that `goes_on` gets no space before it (SentencePiece)."""
    # Some files have these tokens as ordinary added ones, which are found in every text. None of
    # them is found where the text is cut after the first character of one.
    cut = "|".join(f"(?<={re.escape(t[0])})(?={re.escape(t[1:])})" for t in tokens.texts if t)
    ids: list[int] = []
    for count, part in enumerate(re.split(cut, text) if cut else [text]):
        if goes_on or count:
            ids += _going_on(tokenizer, part, most)
        else:
            ids += tokenizer.encode(part, most=most)
    return ids


def _going_on(tokenizer: Tokenizer, text: str, most: int | None) -> list[int]:
    if not tokenizer.strip_space:
        return tokenizer.encode(text, most=most)
    # No token reaches over this mark, so what follows it is as it would be after other text.
    mark = tokenizer.encode("\n")
    ids = tokenizer.encode("\n" + text, most=None if most is None else most + len(mark))
    return ids[len(mark) :] if ids[: len(mark)] == mark else tokenizer.encode(text, most=most)
