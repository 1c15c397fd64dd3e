"""A tokenizer out of GGUF metadata (`tokenizer.*` keys, ggml-org/ggml docs/gguf.md)."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from twostroke.core.errors import ModelFormatError, nearest
from twostroke.tokenize.alphabets import (
    SPACE,
    byte_level_bytes,
    byte_token,
    cut_before_spaces,
    marking,
    sentencepiece_bytes,
)
from twostroke.tokenize.gguf_fields import BYTE, Fields
from twostroke.tokenize.infill import infill_tokens
from twostroke.tokenize.merges import MergeOptions, Merges
from twostroke.tokenize.pairs import ListedPairs, ScoredPairs
from twostroke.tokenize.pretokenizers import pre_tokenizer
from twostroke.tokenize.specials import end_ids
from twostroke.tokenize.tokenizer import Tokenizer, TokenizerParts
from twostroke.tokenize.vocabulary import Vocabulary
from twostroke.tokenize.words import cut_at, normalizing, unicode_form, words_by

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from twostroke.tokenize.specials import AddedToken
    from twostroke.tokenize.words import Cut

_TURNS_OF_PHI3 = frozenset({"<|user|>", "<|assistant|>", "<|end|>"})
_KEPT_BY_PHI3 = frozenset({"<unk>", "<s>", "<|endoftext|>"})  # the white space after these


def from_gguf(metadata: Mapping[str, object]) -> Tokenizer:
    """Return the tokenizer that a GGUF file's metadata describes.

    `metadata` maps keys to Python values: strings, numbers, and sequences for arrays. Raises
    ModelFormatError for a kind of tokenizer or pre-tokenizer that is not known and for metadata
    that does not hold together.
    """
    kind = metadata.get("tokenizer.ggml.model")
    if kind is None:
        raise ModelFormatError("The model file has no tokenizer (tokenizer.ggml.model is missing).")
    build = _KINDS.get(str(kind))
    if build is None:
        raise ModelFormatError(
            f"The tokenizer kind '{kind}' (tokenizer.ggml.model) is not known; "
            f"known are {', '.join(_KINDS)}.{nearest(str(kind), _KINDS)}"
        )
    return build(Fields(metadata))


def _byte_level(fields: Fields) -> Tokenizer:
    """GPT-2's kind: words by a pattern, bytes spelled as characters, merges listed."""
    spec = pre_tokenizer(fields.get("pre", str) or "default")
    added = fields.added()
    vocabulary = Vocabulary(fields.tokens, _specials(added))
    merges = Merges(
        vocabulary,
        ListedPairs(fields.array("merges", str), vocabulary),
        MergeOptions(byte_level=True, ignore_merges=spec.ignore_merges),
    )
    normalize = normalizing([unicode_form("NFC")] if spec.nfc else [])
    cut = words_by([*map(cut_at, spec.patterns)])
    parts = _parts(fields, added, merges, cut, begin=spec.add_bos)
    space = fields.get("add_space_prefix", bool) or False
    return Tokenizer(
        replace(parts, normalize=normalize, to_bytes=byte_level_bytes, space_prefix=space)
    )


def _sentencepiece(fields: Fields) -> Tokenizer:
    """SentencePiece's kind: characters merged by the scores of what they make, bytes for others."""
    # Runs of spaces are listed as user-defined, but are merged like ordinary tokens, before them.
    runs = {token.id for token in fields.added() if not token.special and _is_spaces(token.text)}
    changed = {id_: SPACE * len(fields.tokens[id_]) for id_ in runs}
    added = _stripping(tuple(token for token in fields.added() if token.id not in runs))
    bytes_of = _byte_tokens(fields)
    vocabulary = Vocabulary(fields.tokens, [*_specials(added), *bytes_of], changed)
    scores = list(fields.array("scores", float))
    if len(scores) != len(fields.tokens):
        raise ModelFormatError(
            f"The tokenizer has {len(fields.tokens)} tokens but {len(scores)} scores."
        )
    for id_ in runs:
        scores[id_] = float("inf")
    ids_of = {value[0]: id_ for id_, value in bytes_of.items()}
    options = MergeOptions(
        byte_level=False,
        byte_ids=tuple(ids_of.get(value) for value in range(256)),
        unknown=fields.unknown_id,
        fuse_unknown=True,
    )
    space = fields.get("add_space_prefix", bool) is not False
    merges = Merges(vocabulary, ScoredPairs(scores, vocabulary), options)
    words = cut_before_spaces(vocabulary)
    cut = words_by([marking(prefix=space), words])
    # Llama 2 begins each stretch after a special token with a space. Mistral's later files have
    # tokens for the turns, and their templates write the space that belongs after one.
    writes_space = any(token.special and token.text == "[INST]" for token in added)
    cut_rest = words_by([marking(prefix=False), words]) if writes_space else cut
    parts = _parts(fields, added, merges, cut, begin=True)
    return Tokenizer(
        replace(parts, cut_rest=cut_rest, to_bytes=sentencepiece_bytes, strip_space=space)
    )


# A registry that is a visible dictionary: `tokenizer.ggml.model` to its reader.
_KINDS: dict[str, Callable[[Fields], Tokenizer]] = {
    "gpt2": _byte_level,
    "llama": _sentencepiece,
}


def _parts(
    fields: Fields, added: tuple[AddedToken, ...], merges: Merges, cut: Cut, *, begin: bool
) -> TokenizerParts:
    """Return what both kinds read alike; `begin` is whether they add `bos_token` by default."""
    prefix, suffix = fields.around(begin=begin, end=False)
    return TokenizerParts(
        merges=merges,
        cut=cut,
        vocab_size=len(fields.tokens),
        to_bytes=str.encode,
        added=added,
        odd_bytes=_byte_tokens(fields),
        bos_id=fields.bos_id,
        eos_ids=end_ids((end for end in fields.ends if end is not None), added),
        prefix_ids=prefix,
        suffix_ids=suffix,
        named_texts=fields.named_texts(),
        chat_templates=fields.chat_templates(),
        infill=infill_tokens(*fields.infill(), added),
    )


def _stripping(added: tuple[AddedToken, ...]) -> tuple[AddedToken, ...]:
    """Return `added` with what Phi-3's tokenizer.json says, for which a GGUF file has no place.

    Its tokens for the turns take the white space after them, which its templates write.
    """
    if not {token.text for token in added if token.special} >= _TURNS_OF_PHI3:
        return added
    return tuple(replace(token, rstrip=token.text not in _KEPT_BY_PHI3) for token in added)


def _specials(added: tuple[AddedToken, ...]) -> list[int]:
    return [token.id for token in added if token.special]


def _is_spaces(text: str) -> bool:
    return bool(text) and not text.strip(" ")


def _byte_tokens(fields: Fields) -> dict[int, bytes]:
    pairs = (
        (id_, byte_token(fields.tokens[id_])) for id_, kind in fields.types.items() if kind == BYTE
    )
    return {id_: value for id_, value in pairs if value is not None}
