"""Reads a tokenizer from GGUF metadata (`tokenizer.*` keys, ggml-org/ggml docs/gguf.md)."""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeVar, cast

from msgspec.structs import replace

from twostroke.core.errors import ModelFormatError, nearest, warn_of_wrong_token_id
from twostroke.core.message_text import counted_noun
from twostroke.model.tokenizer.alphabets import (
    SPACE,
    byte_level_bytes,
    byte_token,
    cut_before_spaces,
    mark_spaces,
    sentencepiece_bytes,
)
from twostroke.model.tokenizer.infill import infill_tokens
from twostroke.model.tokenizer.merges import ListedPairs, MergeOptions, Merges, ScoredPairs
from twostroke.model.tokenizer.pretokenizers import SENTENCEPIECE_NAMES, pre_tokenizer
from twostroke.model.tokenizer.specials import AddedToken, end_ids
from twostroke.model.tokenizer.tokenizer import Tokenizer, TokenizerParts
from twostroke.model.tokenizer.vocabulary import Vocabulary
from twostroke.model.tokenizer.words import cut_at, cut_by_all, normalize_by, unicode_form

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    from twostroke.model.tokenizer.words import Cut

T = TypeVar("T")

# Token types of the format: normal 1, unknown 2, control 3, user-defined 4, unused 5, byte 6.
_UNKNOWN, _CONTROL, _USER_DEFINED, _BYTE = 2, 3, 4, 6
_END_KEYS = ("eos_token_id", "eot_token_id", "eom_token_id")
# Fill in the middle: the key, and its name in older files.
_INFILL_KEYS = (("fim_pre", "prefix"), ("fim_suf", "suffix"), ("fim_mid", "middle"))
_INFILL_HEAD_KEYS = ("fim_rep_token_id", "fim_sep_token_id")
_INFILL_END_KEYS = ("fim_pad_token_id", "eot_token_id")
# Keys by the names that templates use; the format misspells "separator".
_TOKEN_NAMES = {"bos": "bos", "eos": "eos", "unk": "unknown", "pad": "padding"}
_TOKEN_NAMES |= {"sep": "seperator", "cls": "cls", "mask": "mask"}
_PHI3_TURN_TOKENS = frozenset({"<|user|>", "<|assistant|>", "<|end|>"})
_PHI3_NOT_STRIPPED = frozenset({"<unk>", "<s>", "<|endoftext|>"})  # white space after these stays


def from_gguf(metadata: Mapping[str, object]) -> Tokenizer:
    """Return the tokenizer that a GGUF file's metadata describes.

    `metadata` maps keys to Python values: strings, numbers, and sequences for arrays. Raises
    ModelFormatError for an unknown kind of tokenizer or pre-tokenizer, and for contradictory
    metadata.
    """
    kind = metadata.get("tokenizer.ggml.model")
    if kind is None:
        raise ModelFormatError("The model file has no tokenizer (tokenizer.ggml.model is missing).")
    build = _READERS.get(str(kind))
    if build is None:
        raise ModelFormatError(
            f"The tokenizer kind '{kind}' (tokenizer.ggml.model) is not known; "
            f"known are {', '.join(_READERS)}.{nearest(str(kind), _READERS)}"
        )
    return build(_TokenizerFields(metadata))


def _byte_level(fields: _TokenizerFields) -> Tokenizer:
    """Read a byte-level (GPT-2) tokenizer from a GGUF file.

    A pattern cuts text into words, bytes are spelled as characters, and the file lists the merges.
    """
    name = fields.get("pre", str) or "default"
    if name in SENTENCEPIECE_NAMES:
        return _sentencepiece_merges(fields)
    spec = pre_tokenizer(name)
    added = fields.added()
    vocabulary = Vocabulary(fields.tokens, _special_ids(added))
    lines = fields.array("merges", str, optional=spec.ranks_by_id)
    pairs: ListedPairs | ScoredPairs = ListedPairs(lines, vocabulary)
    if not len(lines) and spec.ranks_by_id:
        pairs = ScoredPairs([-float(id_) for id_ in range(len(fields.tokens))], vocabulary)
    options = MergeOptions(byte_level=True, ignore_merges=spec.ignore_merges)
    merges = Merges(vocabulary, pairs, options)
    normalize = normalize_by([unicode_form("NFC")] if spec.nfc else [])
    cut = cut_by_all([*map(cut_at, spec.patterns)])
    parts = _parts(fields, added, merges, cut, begin=spec.add_bos)
    adds_space = fields.get("add_space_prefix", bool) or False
    return Tokenizer(
        replace(parts, normalize=normalize, to_bytes=byte_level_bytes, space_prefix=adds_space)
    )


def _sentencepiece(fields: _TokenizerFields) -> Tokenizer:
    """Read a SentencePiece tokenizer from a GGUF file.

    Neighbouring characters are merged in the order of the tokens' scores. A character that is not a
    token becomes the tokens of its bytes.
    """
    # Runs of spaces are listed as user-defined, but are merged like ordinary tokens, and first.
    space_run_ids = {
        token.id for token in fields.added() if not token.special and _is_spaces(token.text)
    }
    changed_texts = {id_: SPACE * len(fields.tokens[id_]) for id_ in space_run_ids}
    added = _with_phi3_stripping(
        tuple(token for token in fields.added() if token.id not in space_run_ids)
    )
    bytes_of = _byte_tokens(fields)
    vocabulary = Vocabulary(fields.tokens, [*_special_ids(added), *bytes_of], changed_texts)
    scores = list(fields.array("scores", float))
    if len(scores) != len(fields.tokens):
        raise ModelFormatError(
            f"The tokenizer has {counted_noun(len(fields.tokens), 'token')} but "
            f"{counted_noun(len(scores), 'score')}."
        )
    for id_ in space_run_ids:
        scores[id_] = float("inf")
    adds_space = fields.get("add_space_prefix", bool) is not False
    merges = Merges(
        vocabulary, ScoredPairs(scores, vocabulary), _character_options(fields, bytes_of)
    )
    word_cut = cut_before_spaces(vocabulary)
    cut = cut_by_all([mark_spaces(prefix=adds_space), word_cut])
    # Llama 2 adds a space after each special token. Mistral's later files have tokens for the
    # turns, and their templates write the space after such a token.
    writes_space = any(token.special and token.text == "[INST]" for token in added)
    cut_exact = cut_by_all([mark_spaces(prefix=False), word_cut])
    parts = _parts(fields, added, merges, cut, begin=True)
    return Tokenizer(
        replace(
            parts,
            cut_rest=cut_exact if writes_space else cut,
            cut_exact=cut_exact,
            to_bytes=sentencepiece_bytes,
            strip_space=adds_space,
        )
    )


def _sentencepiece_merges(fields: _TokenizerFields) -> Tokenizer:
    """Read Gemma 4's tokenizer from a GGUF file.

    It is a SentencePiece tokenizer whose file lists the merges. A character that is not a token
    becomes the tokens of its bytes.
    """
    added = fields.added()
    bytes_of = _byte_tokens(fields)
    vocabulary = Vocabulary(fields.tokens, [*_special_ids(added), *bytes_of])
    pairs = ListedPairs(fields.array("merges", str), vocabulary)
    merges = Merges(vocabulary, pairs, _character_options(fields, bytes_of))
    adds_space = fields.get("add_space_prefix", bool) or False
    word_cut = cut_before_spaces(vocabulary)
    cut = cut_by_all([mark_spaces(prefix=adds_space), word_cut])
    cut_exact = cut_by_all([mark_spaces(prefix=False), word_cut])
    parts = _parts(fields, added, merges, cut, begin=True)
    return Tokenizer(
        replace(parts, cut_exact=cut_exact, to_bytes=sentencepiece_bytes, strip_space=adds_space)
    )


# The readers by `tokenizer.ggml.model`.
_READERS: dict[str, Callable[[_TokenizerFields], Tokenizer]] = {
    "gemma4": _sentencepiece_merges,
    "gpt2": _byte_level,
    "llama": _sentencepiece,
}


def _parts(
    fields: _TokenizerFields,
    added: tuple[AddedToken, ...],
    merges: Merges,
    cut: Cut,
    *,
    begin: bool,
) -> TokenizerParts:
    """Return the parts of a tokenizer, given the parts that differ between kinds of tokenizers.

    `begin` is the default of `add_bos_token`.
    """
    prefix, suffix = fields.surrounding_ids(begin=begin)
    return TokenizerParts(
        merges=merges,
        cut=cut,
        vocab_size=len(fields.tokens),
        to_bytes=str.encode,
        added=added,
        odd_bytes=_byte_tokens(fields),
        bos_id=fields.bos_id,
        eos_ids=end_ids(fields.ends, added),
        prefix_ids=prefix,
        suffix_ids=suffix,
        named_texts=fields.named_texts(),
        chat_templates=fields.chat_templates(),
        infill=infill_tokens(*fields.infill(), added),
    )


def _with_phi3_stripping(added: tuple[AddedToken, ...]) -> tuple[AddedToken, ...]:
    """Return the added tokens with the flag `rstrip` for Phi-3, which GGUF files cannot store.

    With the flag, Phi-3's special tokens of a chat include the white space that its templates write
    after them. Tokens of other models are returned unchanged.
    """
    if not {token.text for token in added if token.special} >= _PHI3_TURN_TOKENS:
        return added
    return tuple(replace(token, rstrip=token.text not in _PHI3_NOT_STRIPPED) for token in added)


def _special_ids(added: tuple[AddedToken, ...]) -> list[int]:
    return [token.id for token in added if token.special]


def _is_spaces(text: str) -> bool:
    return bool(text) and not text.strip(" ")


def _character_options(fields: _TokenizerFields, bytes_of: Mapping[int, bytes]) -> MergeOptions:
    """Return the merge options of SentencePiece tokenizers.

    A word is divided into characters; a character that is not a token becomes its bytes.
    """
    ids_of = {value[0]: id_ for id_, value in bytes_of.items()}
    return MergeOptions(
        byte_level=False,
        byte_ids=tuple(ids_of.get(value) for value in range(256)),
        unknown=fields.unknown_id,
        fuse_unknown=True,
    )


def _byte_tokens(fields: _TokenizerFields) -> dict[int, bytes]:
    """Return the tokens of a GGUF file that spell one byte: a map from token id to the byte.

    If a SentencePiece file does not mark these tokens, they are recognized by their texts.
    """
    ids: Iterable[int] = [id_ for id_, kind in fields.types.items() if kind == _BYTE]
    if not ids and fields.spells_pieces:
        ids = range(len(fields.tokens))
    pairs = ((id_, byte_token(fields.tokens[id_])) for id_ in ids)
    return {id_: value for id_, value in pairs if value is not None}


class _TokenizerFields:
    """Reads the tokenizer fields of a GGUF file's metadata as Python values.

    Each method raises ModelFormatError for a value that is missing or of the wrong type.
    """

    def __init__(self, metadata: Mapping[str, object]) -> None:
        self._metadata = metadata
        self.tokens = self.array("tokens", str)
        types = self.array("token_type", int, optional=True)
        if len(types) not in (0, len(self.tokens)):
            raise ModelFormatError(
                f"The tokenizer has {counted_noun(len(self.tokens), 'token')} but "
                f"{counted_noun(len(types), 'token type')}."
            )
        # Without ordinary tokens.
        self.types = {id_: kind for id_, kind in enumerate(types) if kind != 1}
        pieces = {"llama", "gemma4"}
        self.spells_pieces = (
            self.get("model", str) in pieces or self.get("pre", str) in SENTENCEPIECE_NAMES
        )
        self.bos_id = self.token_id("bos_token_id")
        self.unknown_id = self.token_id("unknown_token_id")
        self.ends = [token_id for key in _END_KEYS for token_id in self.token_ids(key)]
        if len(types) == 0:  # an old file: the tokens that it names are control tokens
            named_ids = [self.bos_id, *self.ends, self.token_id("padding_token_id")]
            self.types = {id_: _CONTROL for id_ in named_ids if id_ is not None}
            self.types |= {self.unknown_id: _UNKNOWN} if self.unknown_id is not None else {}

    def added(self) -> tuple[AddedToken, ...]:
        """Return the GGUF file's tokens that are recognized as a whole in a text."""
        return tuple(
            AddedToken(id_, self.tokens[id_], special=kind != _USER_DEFINED)
            for id_, kind in self.types.items()
            if kind in (_UNKNOWN, _CONTROL, _USER_DEFINED)
        )

    def surrounding_ids(self, *, begin: bool) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Return the token ids that the model expects before and after a text.

        `begin` is the default of `add_bos_token`.
        """
        wants_begin = self.get("add_bos_token", bool)
        wants_begin = begin if wants_begin is None else wants_begin
        before_id = self.bos_id if wants_begin else None
        after_id = self.token_id("eos_token_id") if self.get("add_eos_token", bool) else None
        return () if before_id is None else (before_id,), () if after_id is None else (after_id,)

    def infill(self) -> tuple[list[int | None], list[int | None], list[int | None]]:
        """Return the ids of tokens for filling in the middle: (marks, heads, end tokens).

        The three marks stand before the prefix, the suffix and the middle. The two heads stand
        before the name of a repository, and of a file. An id is None if the file has no such token.
        """
        mark_ids = []
        for key, older_key in _INFILL_KEYS:
            id_ = self.token_id(f"{key}_token_id")
            mark_ids.append(self.token_id(f"{older_key}_token_id") if id_ is None else id_)
        heads = [self.token_id(key) for key in _INFILL_HEAD_KEYS]
        return mark_ids, heads, [self.token_id(key) for key in _INFILL_END_KEYS]

    def named_texts(self) -> dict[str, str]:
        """Return the texts of special tokens by their names in templates, such as `bos_token`."""
        ids = {name: self.token_id(f"{key}_token_id") for name, key in _TOKEN_NAMES.items()}
        return {f"{name}_token": self.tokens[id_] for name, id_ in ids.items() if id_ is not None}

    def chat_templates(self) -> dict[str, str]:
        """Return the chat templates of the GGUF file by name."""
        key = "tokenizer.chat_template"
        # Select by name first: reading the value of every key would decode the large arrays.
        names = [name for name in self._metadata if name == key or name.startswith(key + ".")]
        sources = {name[len(key) + 1 :] or "default": self._metadata[name] for name in names}
        return {name: source for name, source in sources.items() if isinstance(source, str)}

    def get(self, key: str, kind: type[T]) -> T | None:
        """Return the tokenizer field at `key`, a value of type `kind`; None if it is missing."""
        value = self._metadata.get(f"tokenizer.ggml.{key}")
        if value is None:
            return None
        if not isinstance(value, kind):
            raise ModelFormatError(
                f"tokenizer.ggml.{key} is of type {type(value).__name__}, not {kind.__name__}."
            )
        return value

    def array(self, key: str, kind: type[T], *, optional: bool = False) -> Sequence[T]:
        """Return the tokenizer field at `key`, an array of one type.

        A missing array is empty if it is `optional`.
        """
        value = self._metadata.get(f"tokenizer.ggml.{key}")
        if value is None and optional:
            return ()
        if value is None or isinstance(value, (str, bytes)) or not hasattr(value, "__len__"):
            raise ModelFormatError(f"The tokenizer's table tokenizer.ggml.{key} is missing.")
        items = cast("Sequence[T]", value)
        # Arrays with `spans` hold strings; checking their types would decode them all.
        kinds = {str} if hasattr(items, "spans") else {*map(type, items)}
        if not kinds <= {kind}:
            raise ModelFormatError(
                f"The tokenizer's table tokenizer.ggml.{key} is not all of type {kind.__name__}."
            )
        return items

    def token_id(self, key: str) -> int | None:
        """Return the token id at `key`; None if the file has none, or an invalid id such as -1."""
        ids = self.token_ids(key)
        return ids[0] if ids else None

    def token_ids(self, key: str) -> list[int]:
        """Return the valid token ids at a key, whose value is an id or a list; log invalid ids."""
        value = self._metadata.get(f"tokenizer.ggml.{key}")
        ids = []
        for token_id in value if isinstance(value, list) else [value]:
            if type(token_id) is int and 0 <= token_id < len(self.tokens):
                ids.append(token_id)
            elif token_id is not None:
                warn_of_wrong_token_id(f"tokenizer.ggml.{key}", token_id)
        return ids
