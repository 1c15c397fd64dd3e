"""A tokenizer out of GGUF metadata (`tokenizer.*` keys, ggml-org/ggml docs/gguf.md)."""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeVar, cast

from twostroke.core.errors import ModelFormatError, nearest
from twostroke.tokenize.alphabets import byte_level_bytes, byte_token
from twostroke.tokenize.ends import end_ids
from twostroke.tokenize.merges import MergeOptions, Merges
from twostroke.tokenize.pretokenizers import PreTokenizer, pre_tokenizer
from twostroke.tokenize.specials import AddedToken
from twostroke.tokenize.tokenizer import Tokenizer, TokenizerParts
from twostroke.tokenize.words import cut_at, unicode_form, words_by

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

T = TypeVar("T")

# Token types of the format: normal 1, unknown 2, control 3, user-defined 4, unused 5, byte 6.
_UNKNOWN, _CONTROL, _USER_DEFINED, _BYTE = 2, 3, 4, 6
_END_KEYS = ("eos_token_id", "eot_token_id", "eom_token_id")


def from_gguf(metadata: Mapping[str, object]) -> Tokenizer:
    """Return the tokenizer that a GGUF file's metadata describes.

    `metadata` maps keys to Python values: strings, numbers, and sequences for arrays. Raises
    ModelFormatError for a kind of tokenizer or pre-tokenizer that is not known and for metadata
    that does not hold together.
    """
    kind = _get(metadata, "model", str)
    if kind is None:
        raise ModelFormatError("The model file has no tokenizer (tokenizer.ggml.model is missing).")
    build = _KINDS.get(kind)
    if build is None:
        raise ModelFormatError(
            f"The tokenizer kind '{kind}' (tokenizer.ggml.model) is not known; "
            f"known are {', '.join(_KINDS)}.{nearest(kind, _KINDS)}"
        )
    return build(metadata)


def _byte_level(metadata: Mapping[str, object]) -> Tokenizer:
    spec = pre_tokenizer(_get(metadata, "pre", str) or "default")
    tokens = cast("Sequence[str]", _array(metadata, "tokens"))
    types = cast("Sequence[int]", _array(metadata, "token_type", optional=True))
    if len(types) not in (0, len(tokens)):
        raise ModelFormatError(
            f"The tokenizer has {len(tokens)} tokens but {len(types)} token types."
        )
    odd = [(id_, kind) for id_, kind in enumerate(types) if kind != 1]
    added = tuple(
        AddedToken(id_, tokens[id_], special=kind != _USER_DEFINED)
        for id_, kind in odd
        if kind in (_UNKNOWN, _CONTROL, _USER_DEFINED)
    )
    vocabulary = {text: id_ for id_, text in enumerate(tokens)}
    odd_texts = _doubles(tokens, vocabulary)
    for token in added:
        vocabulary.pop(token.text, None)
    lines = cast("Sequence[str]", _array(metadata, "merges"))
    bos_id = _token_id(metadata, "bos_token_id", len(tokens))
    ends = [_token_id(metadata, key, len(tokens)) for key in _END_KEYS]
    return Tokenizer(
        TokenizerParts(
            merges=_merges(vocabulary, lines, spec, added),
            cut=words_by([unicode_form("NFC")] if spec.nfc else [], [*map(cut_at, spec.patterns)]),
            vocab_size=len(tokens),
            to_bytes=byte_level_bytes,
            added=added,
            odd_texts=odd_texts,
            odd_bytes=_byte_tokens(tokens, odd),
            bos_id=bos_id,
            eos_ids=end_ids((end for end in ends if end is not None), added),
            prefix_ids=_around(metadata, "add_bos_token", bos_id, default=spec.add_bos),
            suffix_ids=_around(metadata, "add_eos_token", ends[0], default=False),
            space_prefix=_get(metadata, "add_space_prefix", bool) or False,
            named_texts=_named_texts(metadata, tokens),
            chat_templates=_chat_templates(metadata),
        )
    )


# A registry that is a visible dictionary: `tokenizer.ggml.model` to its reader.
_KINDS: dict[str, Callable[[Mapping[str, object]], Tokenizer]] = {"gpt2": _byte_level}


def _merges(
    vocabulary: dict[str, int],
    lines: Sequence[str],
    spec: PreTokenizer,
    added: tuple[AddedToken, ...],
) -> Merges:
    options = MergeOptions(byte_level=True, ignore_merges=spec.ignore_merges)
    try:
        return Merges(vocabulary, _pairs(lines), options)
    except ModelFormatError:
        # Merges may pass through a control token, which is not in the vocabulary on purpose.
        apart = {token.text for token in added}
        kept = [(a, b) for a, b in _pairs(lines) if not apart.intersection((a, b, a + b))]
        return Merges(vocabulary, kept, options)


def _pairs(lines: Sequence[str]) -> Iterator[tuple[str, str]]:
    for line in lines:
        left, _, right = line.partition(" ")
        yield left, right


def _doubles(tokens: Sequence[str], vocabulary: dict[str, int]) -> dict[int, str]:
    """Return the ids that share their text with a later id, which the merger cannot name."""
    if len(vocabulary) == len(tokens):
        return {}
    return {id_: text for id_, text in enumerate(tokens) if vocabulary[text] != id_}


def _byte_tokens(tokens: Sequence[str], odd: list[tuple[int, int]]) -> dict[int, bytes]:
    pairs = ((id_, byte_token(tokens[id_])) for id_, kind in odd if kind == _BYTE)
    return {id_: value for id_, value in pairs if value is not None}


def _around(
    metadata: Mapping[str, object], key: str, token_id: int | None, *, default: bool
) -> tuple[int, ...]:
    wanted = _get(metadata, key, bool)
    wanted = default if wanted is None else wanted
    return (token_id,) if wanted and token_id is not None else ()


def _named_texts(metadata: Mapping[str, object], tokens: Sequence[str]) -> dict[str, str]:
    keys = {"bos": "bos", "eos": "eos", "unk": "unknown", "pad": "padding"}
    ids = {name: _token_id(metadata, f"{key}_token_id", len(tokens)) for name, key in keys.items()}
    return {f"{name}_token": tokens[id_] for name, id_ in ids.items() if id_ is not None}


def _chat_templates(metadata: Mapping[str, object]) -> dict[str, str]:
    key = "tokenizer.chat_template"
    # By name first: to read the value of every key would decode the large arrays again.
    names = [name for name in metadata if name == key or name.startswith(key + ".")]
    found = {name[len(key) + 1 :] or "default": metadata[name] for name in names}
    return {name: source for name, source in found.items() if isinstance(source, str)}


def _get(metadata: Mapping[str, object], key: str, kind: type[T]) -> T | None:
    value = metadata.get(f"tokenizer.ggml.{key}")
    if value is None:
        return None
    if not isinstance(value, kind):
        raise ModelFormatError(
            f"tokenizer.ggml.{key} is of type {type(value).__name__}, not {kind.__name__}."
        )
    return value


def _array(metadata: Mapping[str, object], key: str, *, optional: bool = False) -> Sequence[object]:
    value = metadata.get(f"tokenizer.ggml.{key}")
    if value is None and optional:
        return ()
    if value is None or isinstance(value, (str, bytes)) or not hasattr(value, "__len__"):
        raise ModelFormatError(f"The tokenizer's table tokenizer.ggml.{key} is missing.")
    return cast("Sequence[object]", value)


def _token_id(metadata: Mapping[str, object], key: str, vocab_size: int) -> int | None:
    value = _get(metadata, key, int)
    if value is not None and not 0 <= value < vocab_size:
        raise ModelFormatError(
            f"tokenizer.ggml.{key} is {value}, outside the vocabulary of {vocab_size} tokens."
        )
    return value
