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

# Marks before the prefix, the suffix and the middle, by family.
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
# Models write these tokens, or the head of another file or repository, after a middle.
_ENDS: Final = "<|fim_pad|> <fim_pad> <fim-pad> ▁<EOT> <EOT>"


def infill_tokens(
    mark_ids: Sequence[int | None],
    head_ids: Sequence[int | None],
    extra_end_ids: Iterable[int | None],
    added: Iterable[AddedToken],
) -> InfillTokens | None:
    """Return a vocabulary's tokens for filling in the middle of a text; None if it has none.

    Args:
        mark_ids: ids of the tokens before prefix, suffix and middle, as the model's files name
            them.
        head_ids: ids of the tokens before the name of a repository, and before the name of a file.
        extra_end_ids: further tokens that end a middle.
        added: the added tokens of the vocabulary. If a mark is missing, tokens with well-known
            texts replace all marks; if a head is missing, such a token replaces this head.
    """
    texts = {token.id: token.text for token in added}
    ids = {text: id_ for id_, text in texts.items()}
    well_known_heads = [next((ids[text] for text in form if text in ids), None) for form in _HEADS]
    repository, file = (
        well_known_id if id_ is None else id_
        for id_, well_known_id in zip(head_ids or well_known_heads, well_known_heads, strict=True)
    )
    candidates = [mark_ids, *([ids.get(text) for text in form] for form in _FORMS)]
    marks = next(
        (candidate for candidate in candidates if candidate and None not in candidate), None
    )
    if marks is None:
        return None
    all_ends = (*_ENDS.split(), *chain(*_HEADS))
    all_ids = frozenset(
        id_
        for id_ in (*marks, *head_ids, *extra_end_ids, *(ids.get(text) for text in all_ends))
        if id_ is not None
    )
    texts_of_all = tuple(texts[id_] for id_ in sorted(all_ids) if id_ in texts)
    prefix, suffix, middle = (id_ for id_ in marks if id_ is not None)
    return InfillTokens(
        prefix=prefix,
        suffix=suffix,
        middle=middle,
        repository=repository,
        file=file,
        end_ids=all_ids,
        texts=texts_of_all,
    )


def encode_infill(
    tokenizer: Tokenizer,
    tokens: InfillTokens,
    prefix: str | Sequence[int],
    suffix: str,
    max_tokens: int | None = None,
) -> list[int]:
    """Return the prompt that asks a model for the text between `prefix` and `suffix`.

    `prefix` is a text or token ids. Text that looks like one of the special tokens stays text.
    `max_tokens` limits the tokens of each of the two texts, as in `Tokenizer.encode`.
    """
    before = prefix
    if isinstance(prefix, str):
        before = encode_part(tokenizer, tokens, prefix, max_tokens)
    after = encode_part(tokenizer, tokens, suffix, max_tokens, continues_text=True)
    start = [*tokenizer.prefix_ids, tokens.prefix, *before]
    return [*start, tokens.suffix, *after, tokens.middle]


def encode_part(
    tokenizer: Tokenizer,
    tokens: InfillTokens,
    text: str,
    max_tokens: int | None = None,
    *,
    continues_text: bool = False,
) -> list[int]:
    """Return the token ids of one text, such as the suffix, in a fill-in-the-middle prompt.

    The texts of special tokens in it stay text. With `continues_text`, no space is added before the
    text, even if the tokenizer usually adds one. `max_tokens` is as in `Tokenizer.encode`.
    """
    # Some files list these tokens as ordinary added tokens, which are recognized in every text.
    # The text is cut after the first character of each, so that they stay text.
    split_pattern = "|".join(
        f"(?<={re.escape(t[0])})(?={re.escape(t[1:])})" for t in tokens.texts if t
    )
    ids: list[int] = []
    for count, part in enumerate(re.split(split_pattern, text) if split_pattern else [text]):
        if (continues_text or count) and tokenizer.adds_space:
            # After a line break, text is encoded without a space, unless a token includes both.
            line_break = tokenizer.encode("\n")
            with_line_break = tokenizer.encode(
                "\n" + part, max_tokens=max_tokens and max_tokens + len(line_break)
            )
            if with_line_break[: len(line_break)] == line_break:
                ids += with_line_break[len(line_break) :]
                continue
        ids += tokenizer.encode(part, max_tokens=max_tokens)
    return ids
