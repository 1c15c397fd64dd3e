"""A tokenizer out of GGUF metadata (`tokenizer.*` keys, ggml-org/ggml docs/gguf.md)."""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeVar, cast

from msgspec.structs import replace

from twostroke.core.errors import ModelFormatError, nearest, warn_of_wrong_token_id
from twostroke.model.tokenizer.alphabets import (
    SPACE,
    byte_level_bytes,
    byte_token,
    cut_before_spaces,
    marking,
    sentencepiece_bytes,
)
from twostroke.model.tokenizer.infill import infill_tokens
from twostroke.model.tokenizer.merges import ListedPairs, MergeOptions, Merges, ScoredPairs
from twostroke.model.tokenizer.pretokenizers import PIECES, pre_tokenizer
from twostroke.model.tokenizer.specials import AddedToken, end_ids
from twostroke.model.tokenizer.tokenizer import Tokenizer, TokenizerParts
from twostroke.model.tokenizer.vocabulary import Vocabulary
from twostroke.model.tokenizer.words import cut_at, normalizing, unicode_form, words_by

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
# The names that templates use, and the names in keys: the format spells "separator" so.
_NAMED = {"bos": "bos", "eos": "eos", "unk": "unknown", "pad": "padding"}
_NAMED |= {"sep": "seperator", "cls": "cls", "mask": "mask"}
_TURNS_OF_PHI3 = frozenset({"<|user|>", "<|assistant|>", "<|end|>"})
_KEPT_BY_PHI3 = frozenset({"<unk>", "<s>", "<|endoftext|>"})  # the white space after these


def from_gguf(metadata: Mapping[str, object]) -> Tokenizer:
    """Return the tokenizer that a GGUF file's metadata describes.

    `metadata` maps keys to Python values: strings, numbers, and sequences for arrays. Raises
    ModelFormatError for an unknown kind of tokenizer or pre-tokenizer, and for metadata whose
    parts do not fit.
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
    return build(_TokenizerFields(metadata))


def _byte_level(fields: _TokenizerFields) -> Tokenizer:
    """GPT-2's kind: words by a pattern, bytes spelled as characters, merges listed."""
    name = fields.get("pre", str) or "default"
    if name in PIECES:
        return _sentencepiece_merges(fields)
    spec = pre_tokenizer(name)
    added = fields.added()
    vocabulary = Vocabulary(fields.tokens, _specials(added))
    lines = fields.array("merges", str, optional=spec.ranks_by_id)
    pairs: ListedPairs | ScoredPairs = ListedPairs(lines, vocabulary)
    if not len(lines) and spec.ranks_by_id:
        pairs = ScoredPairs([-float(id_) for id_ in range(len(fields.tokens))], vocabulary)
    options = MergeOptions(byte_level=True, ignore_merges=spec.ignore_merges)
    merges = Merges(vocabulary, pairs, options)
    normalize = normalizing([unicode_form("NFC")] if spec.nfc else [])
    cut = words_by([*map(cut_at, spec.patterns)])
    parts = _parts(fields, added, merges, cut, begin=spec.add_bos)
    space = fields.get("add_space_prefix", bool) or False
    return Tokenizer(
        replace(parts, normalize=normalize, to_bytes=byte_level_bytes, space_prefix=space)
    )


def _sentencepiece(fields: _TokenizerFields) -> Tokenizer:
    """SentencePiece's kind: characters merged by scores, others as bytes."""
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
    space = fields.get("add_space_prefix", bool) is not False
    merges = Merges(vocabulary, ScoredPairs(scores, vocabulary), _characters(fields, bytes_of))
    words = cut_before_spaces(vocabulary)
    cut = words_by([marking(prefix=space), words])
    # Llama 2 begins each stretch after a special token with a space. Mistral's later files have
    # tokens for the turns, and their templates write the space that belongs after one.
    writes_space = any(token.special and token.text == "[INST]" for token in added)
    cut_exact = words_by([marking(prefix=False), words])
    parts = _parts(fields, added, merges, cut, begin=True)
    return Tokenizer(
        replace(
            parts,
            cut_rest=cut_exact if writes_space else cut,
            cut_exact=cut_exact,
            to_bytes=sentencepiece_bytes,
            strip_space=space,
        )
    )


def _sentencepiece_merges(fields: _TokenizerFields) -> Tokenizer:
    """Gemma 4's kind: characters merged as listed, others as bytes."""
    added, bytes_of = fields.added(), _byte_tokens(fields)
    vocabulary = Vocabulary(fields.tokens, [*_specials(added), *bytes_of])
    pairs = ListedPairs(fields.array("merges", str), vocabulary)
    merges = Merges(vocabulary, pairs, _characters(fields, bytes_of))
    space = fields.get("add_space_prefix", bool) or False
    words = cut_before_spaces(vocabulary)
    cut = words_by([marking(prefix=space), words])
    cut_exact = words_by([marking(prefix=False), words])
    parts = _parts(fields, added, merges, cut, begin=True)
    return Tokenizer(
        replace(parts, cut_exact=cut_exact, to_bytes=sentencepiece_bytes, strip_space=space)
    )


# The readers by `tokenizer.ggml.model`.
_KINDS: dict[str, Callable[[_TokenizerFields], Tokenizer]] = {
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
    """Return the parts that both kinds share; `begin` is the default of `add_bos_token`."""
    prefix, suffix = fields.around(begin=begin)
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


def _stripping(added: tuple[AddedToken, ...]) -> tuple[AddedToken, ...]:
    """Return `added` with Phi-3's flag `rstrip`, which GGUF files cannot hold.

    Its tokens for the turns take the white space after them, which its templates write.
    """
    if not {token.text for token in added if token.special} >= _TURNS_OF_PHI3:
        return added
    return tuple(replace(token, rstrip=token.text not in _KEPT_BY_PHI3) for token in added)


def _specials(added: tuple[AddedToken, ...]) -> list[int]:
    return [token.id for token in added if token.special]


def _is_spaces(text: str) -> bool:
    return bool(text) and not text.strip(" ")


def _characters(fields: _TokenizerFields, bytes_of: Mapping[int, bytes]) -> MergeOptions:
    """Return how SentencePiece's kinds spell a word: as characters, others as bytes."""
    ids_of = {value[0]: id_ for id_, value in bytes_of.items()}
    return MergeOptions(
        byte_level=False,
        byte_ids=tuple(ids_of.get(value) for value in range(256)),
        unknown=fields.unknown_id,
        fuse_unknown=True,
    )


def _byte_tokens(fields: _TokenizerFields) -> dict[int, bytes]:
    """Return the byte tokens; by their texts if SentencePiece's file has none of that type."""
    ids: Iterable[int] = [id_ for id_, kind in fields.types.items() if kind == _BYTE]
    if not ids and fields.spells_pieces:
        ids = range(len(fields.tokens))
    pairs = ((id_, byte_token(fields.tokens[id_])) for id_ in ids)
    return {id_: value for id_, value in pairs if value is not None}


class _TokenizerFields:
    """The fields that every kind of tokenizer has in a file, as Python values.

    Each method raises ModelFormatError for a value that is missing or of the wrong type.
    """

    def __init__(self, metadata: Mapping[str, object]) -> None:
        self._metadata = metadata
        self.tokens = self.array("tokens", str)
        types = self.array("token_type", int, optional=True)
        if len(types) not in (0, len(self.tokens)):
            raise ModelFormatError(
                f"The tokenizer has {len(self.tokens)} tokens but {len(types)} token types."
            )
        # Only of ids that are not ordinary tokens.
        self.types = {id_: kind for id_, kind in enumerate(types) if kind != 1}
        pieces = {"llama", "gemma4"}
        self.spells_pieces = self.get("model", str) in pieces or self.get("pre", str) in PIECES
        self.bos_id = self.token_id("bos_token_id")
        self.unknown_id = self.token_id("unknown_token_id")
        self.ends = [token_id for key in _END_KEYS for token_id in self.token_ids(key)]
        if len(types) == 0:  # an old file: the ids that it names are of control tokens
            named = [self.bos_id, *self.ends, self.token_id("padding_token_id")]
            self.types = {id_: _CONTROL for id_ in named if id_ is not None}
            self.types |= {self.unknown_id: _UNKNOWN} if self.unknown_id is not None else {}

    def added(self) -> tuple[AddedToken, ...]:
        """Return the tokens that are matched whole in a text."""
        return tuple(
            AddedToken(id_, self.tokens[id_], special=kind != _USER_DEFINED)
            for id_, kind in self.types.items()
            if kind in (_UNKNOWN, _CONTROL, _USER_DEFINED)
        )

    def around(self, *, begin: bool) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Return the ids before and after a text; `begin` is the default of `add_bos_token`."""
        wants_begin = self.get("add_bos_token", bool)
        wants_begin = begin if wants_begin is None else wants_begin
        before = self.bos_id if wants_begin else None
        after = self.token_id("eos_token_id") if self.get("add_eos_token", bool) else None
        return () if before is None else (before,), () if after is None else (after,)

    def infill(self) -> tuple[list[int | None], list[int | None], list[int | None]]:
        """Return the ids before prefix, suffix and middle; before repository and file; the ends."""
        named = []
        for key, older in _INFILL_KEYS:
            id_ = self.token_id(f"{key}_token_id")
            named.append(self.token_id(f"{older}_token_id") if id_ is None else id_)
        heads = [self.token_id(key) for key in _INFILL_HEAD_KEYS]
        return named, heads, [self.token_id(key) for key in _INFILL_END_KEYS]

    def named_texts(self) -> dict[str, str]:
        """Return the texts of `bos_token` and the like, by the names that templates use."""
        ids = {name: self.token_id(f"{key}_token_id") for name, key in _NAMED.items()}
        return {f"{name}_token": self.tokens[id_] for name, id_ in ids.items() if id_ is not None}

    def chat_templates(self) -> dict[str, str]:
        """Return the chat templates by name."""
        key = "tokenizer.chat_template"
        # By name first: to read the value of every key would decode the large arrays again.
        names = [name for name in self._metadata if name == key or name.startswith(key + ".")]
        found = {name[len(key) + 1 :] or "default": self._metadata[name] for name in names}
        return {name: source for name, source in found.items() if isinstance(source, str)}

    def get(self, key: str, kind: type[T]) -> T | None:
        """Return a value of that type, or None where the file has none."""
        value = self._metadata.get(f"tokenizer.ggml.{key}")
        if value is None:
            return None
        if not isinstance(value, kind):
            raise ModelFormatError(
                f"tokenizer.ggml.{key} is of type {type(value).__name__}, not {kind.__name__}."
            )
        return value

    def array(self, key: str, kind: type[T], *, optional: bool = False) -> Sequence[T]:
        """Return an array of one type; an optional one that is missing is empty."""
        value = self._metadata.get(f"tokenizer.ggml.{key}")
        if value is None and optional:
            return ()
        if value is None or isinstance(value, (str, bytes)) or not hasattr(value, "__len__"):
            raise ModelFormatError(f"The tokenizer's table tokenizer.ggml.{key} is missing.")
        items = cast("Sequence[T]", value)
        # Arrays with `spans` hold strings; to check their types would decode them all.
        kinds = {str} if hasattr(items, "spans") else {*map(type, items)}
        if not kinds <= {kind}:
            raise ModelFormatError(
                f"The tokenizer's table tokenizer.ggml.{key} is not all of type {kind.__name__}."
            )
        return items

    def token_id(self, key: str) -> int | None:
        """Return a token's id, or None where the file has none, as with -1."""
        ids = self.token_ids(key)
        return ids[0] if ids else None

    def token_ids(self, key: str) -> list[int]:
        """Return the valid token ids at a key, which has one or a list; log the wrong ones."""
        value = self._metadata.get(f"tokenizer.ggml.{key}")
        ids = []
        for token_id in value if isinstance(value, list) else [value]:
            if type(token_id) is int and 0 <= token_id < len(self.tokens):
                ids.append(token_id)
            elif token_id is not None:
                warn_of_wrong_token_id(f"tokenizer.ggml.{key}", token_id)
        return ids
