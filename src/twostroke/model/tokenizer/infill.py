"""Fill in the middle: tokens that mark the text before a gap and the text after it.

The order is prefix, suffix, middle (arXiv:2207.14255).
"""

from __future__ import annotations

import re
from itertools import chain
from typing import TYPE_CHECKING, Final

from twostroke.model.tokenizer.tokenizer import InfillTokens

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from twostroke.model.tokenizer.specials import AddedToken
    from twostroke.model.tokenizer.tokenizer import Tokenizer

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
# Before the name of a repository, and before the name of one of its files.
_HEADS: Final = (
    ("<|repo_name|>", "<repo_name>", "<reponame>"),
    ("<|file_sep|>", "<|file_separator|>", "<file_sep>", "<filename>"),
)
# Models write these after a middle, as they do the head of another file or repository.
_ENDS: Final = "<|fim_pad|> <fim_pad> <fim-pad> ▁<EOT> <EOT>"


def infill_tokens(
    named: Sequence[int | None],
    heads: Sequence[int | None],
    ends: Iterable[int | None],
    added: Iterable[AddedToken],
) -> InfillTokens | None:
    """Return a vocabulary's tokens for filling in; None if it has none.

    `named` are those for prefix, suffix and middle that the model's files name, `heads` those for
    repository and file, and `ends` others of theirs that end an answer. Where one of the three is
    missing, well-known added tokens count; so they do for each of the two.
    """
    texts = {token.id: token.text for token in added}
    ids = {text: id_ for id_, text in texts.items()}
    known = [next((ids[text] for text in form if text in ids), None) for form in _HEADS]
    repository, file = (
        other if id_ is None else id_ for id_, other in zip(heads or known, known, strict=True)
    )
    candidates = [named, *([ids.get(text) for text in form] for form in _FORMS)]
    three = next((found for found in candidates if found and None not in found), None)
    if three is None:
        return None
    all_ends = (*_ENDS.split(), *chain(*_HEADS))
    all_ids = frozenset(
        id_
        for id_ in (*three, *heads, *ends, *(ids.get(text) for text in all_ends))
        if id_ is not None
    )
    spelled = tuple(texts[id_] for id_ in sorted(all_ids) if id_ in texts)
    prefix, suffix, middle = (id_ for id_ in three if id_ is not None)
    return InfillTokens(prefix, suffix, middle, repository, file, all_ids, spelled)


def encode_infill(
    tokenizer: Tokenizer,
    tokens: InfillTokens,
    prefix: str | Sequence[int],
    suffix: str,
    most: int | None = None,
) -> list[int]:
    """Return the prompt whose answer belongs between `prefix` (a text, or ids) and `suffix`.

    Text that looks like one of the special tokens stays text. `most` limits the tokens of each of
    the two texts, as in `Tokenizer.encode`.
    """
    before = prefix
    if isinstance(prefix, str):
        before = encode_part(tokenizer, tokens, prefix, most)
    after = encode_part(tokenizer, tokens, suffix, most, goes_on=True)
    start = [*tokenizer.prefix_ids, tokens.prefix, *before]
    return [*start, tokens.suffix, *after, tokens.middle]


def encode_part(
    tokenizer: Tokenizer,
    tokens: InfillTokens,
    text: str,
    most: int | None = None,
    *,
    goes_on: bool = False,
) -> list[int]:
    """Return the ids of a text in such a prompt, in which the texts of `tokens` stay text.

    If the text `goes_on` after another one, no space is added before it, even if the tokenizer adds
    a space before each text. `most` as in `Tokenizer.encode`.
    """
    # Some files list these tokens as ordinary added ones, which are found in every text. Cut after
    # the first character of each, so that none is found.
    cut = "|".join(f"(?<={re.escape(t[0])})(?={re.escape(t[1:])})" for t in tokens.texts if t)
    ids: list[int] = []
    for count, part in enumerate(re.split(cut, text) if cut else [text]):
        if (goes_on or count) and tokenizer.adds_space:
            # After a line break text is encoded without a space, unless a token reaches over both.
            mark = tokenizer.encode("\n")
            found = tokenizer.encode("\n" + part, most=most and most + len(mark))
            if found[: len(mark)] == mark:
                ids += found[len(mark) :]
                continue
        ids += tokenizer.encode(part, most=most)
    return ids
