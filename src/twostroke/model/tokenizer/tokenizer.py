"""`Tokenizer`: text to token ids and back, exact to the byte."""

from __future__ import annotations

import re
import sys
from functools import cached_property
from types import MappingProxyType
from typing import TYPE_CHECKING

from msgspec import field

from twostroke.core.cancellation import check_not_cancelled
from twostroke.core.errors import RequestError
from twostroke.core.frozen import Frozen
from twostroke.model.tokenizer.alphabets import SPACE
from twostroke.model.tokenizer.merges import TooManyTokensError
from twostroke.model.tokenizer.specials import WHITE_SPACE, AddedToken, AddedTokenSplitter

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    from twostroke.model.tokenizer.merges import Merges
    from twostroke.model.tokenizer.words import Cut, Normalize

_SHORT_TEXT_CHARS = 1 << 16  # encoded to its end, so that errors tell the number of tokens
# A text with more characters per allowed token than this is first checked in pieces, since cutting
# all of it into words takes much time and memory.
_MAX_CHARS_PER_TOKEN = 16
_PIECE_CHARS = 1 << 16
_WORDS_ADDED_BY_CUT = 2  # extra words that appear where a text is cut into pieces

# SentencePiece writes a space as U+2581. If a text has this character, it is encoded as bytes.
_AROUND_SPACE_MARKS = re.compile(f"({SPACE})")


class Piece(Frozen):
    """A segment of a rendered chat prompt: plain text, or one special token.

    `special` is true if the segment is exactly one special token that the template wrote.
    """

    text: str
    special: bool = False


class Prompt(Frozen):
    """A rendered chat prompt: a list of plain texts and special tokens.

    A special piece becomes a single token id; every other piece is encoded as plain text. So text
    in a user's message that looks like a special token never becomes one.
    """

    pieces: tuple[Piece, ...]

    @property
    def text(self) -> str:
        """The rendered chat prompt as one string, as other engines show it."""
        return "".join(piece.text for piece in self.pieces)


class InfillTokens(Frozen):
    """The special tokens with which a model fills in the middle of a text.

    `prefix`, `suffix` and `middle` are the ids of the tokens that stand before these texts in a
    prompt. `repository` and `file` stand before the names of a repository and of a file; None if
    the vocabulary has no such token. `end_ids` end an answer; `texts` are the texts of all these
    tokens.
    """

    prefix: int
    suffix: int
    middle: int
    repository: int | None
    file: int | None
    end_ids: frozenset[int]
    texts: tuple[str, ...]


class TokenizerParts(Frozen):
    """The parts of a `Tokenizer`, which the readers of GGUF and Hugging Face files create.

    Attributes:
        merges: turns words into tokens. Its vocabulary has no added token, so text never becomes a
            control token.
        cut: cuts normalized text into words.
        vocab_size: the number of token ids.
        to_bytes: returns the bytes of an ordinary token, given its text in the vocabulary.
        normalize: normalizes plain text before it is cut.
        added: the added tokens (control and user-defined).
        cut_rest: cuts the segments of a text after the first one, if they are cut differently
            (SentencePiece adds a space only before the first word).
        cut_exact: cuts text without adding a space anywhere, if that differs from `cut`.
        odd_bytes: the bytes of tokens for which `to_bytes` would be wrong, by id.
        bos_id: the begin-of-sequence token; None if there is none.
        eos_ids: the tokens that end an answer.
        prefix_ids, suffix_ids: the tokens that `add_special` puts before and after a text.
        space_prefix: whether a space is added before a text that does not begin with a space.
        strip_space: whether the first space of decoded text is removed (SentencePiece).
        named_texts: the texts of tokens such as `bos_token`, by the names that templates use.
        additional_texts: the texts of special tokens that the files list without names.
        spells_added: whether `to_bytes` also applies to added tokens that are not special.
        chat_templates: the model's chat templates by name.
        infill: the tokens for filling in the middle; None if the vocabulary has none.
    """

    merges: Merges
    cut: Cut
    vocab_size: int
    to_bytes: Callable[[str], bytes]
    normalize: Normalize = str
    added: tuple[AddedToken, ...] = ()
    cut_rest: Cut | None = None
    cut_exact: Cut | None = None
    odd_bytes: Mapping[int, bytes] = field(default_factory=dict)
    bos_id: int | None = None
    eos_ids: frozenset[int] = frozenset()
    prefix_ids: tuple[int, ...] = ()
    suffix_ids: tuple[int, ...] = ()
    space_prefix: bool = False
    strip_space: bool = False
    named_texts: Mapping[str, str] = field(default_factory=dict)
    additional_texts: tuple[str, ...] = ()
    spells_added: bool = False
    chat_templates: Mapping[str, str] = field(default_factory=dict)
    infill: InfillTokens | None = None


class Tokenizer:
    """Encodes text as token ids, decodes ids, and knows every token's exact bytes.

    Special (control) tokens and text are kept apart: `encode` treats its text as plain unless
    `parse_special` is set, and `encode_prompt` makes special tokens only of the pieces that the
    chat template itself wrote. An object can be shared between threads.
    """

    def __init__(self, parts: TokenizerParts) -> None:
        self._parts = parts
        self._merges = parts.merges
        self._added_by_id = {token.id: token for token in parts.added}
        self._added_by_text = {token.text: token for token in parts.added}
        self._bytes: dict[int, bytes] = dict(parts.odd_bytes)
        self.ascii_texts: dict[int, str] = {}  # of ordinary tokens, once they were streamed
        in_raw, in_normalized = (
            [token for token in self._added_by_text.values() if token.normalized is normalized]
            for normalized in (False, True)
        )
        self._raw_splitter = AddedTokenSplitter(in_raw)
        self._normalized_splitter = AddedTokenSplitter(in_normalized, parts.normalize)
        self.strip_space = parts.strip_space
        self.vocab_size = parts.vocab_size
        self.bos_id = parts.bos_id
        self.eos_ids = parts.eos_ids
        self.infill = parts.infill
        self.special_ids = frozenset(token.id for token in parts.added if token.special)
        self.named_texts = MappingProxyType(dict(parts.named_texts))
        self.additional_texts = parts.additional_texts
        self.chat_templates = MappingProxyType(dict(parts.chat_templates))

    @property
    def prefix_ids(self) -> list[int]:
        """The token ids that `add_special` puts before a text, such as begin of sequence."""
        return list(self._parts.prefix_ids)

    @cached_property
    def adds_space(self) -> bool:
        """Whether encoding adds a space before a text that does not begin with a space."""
        return self.encode("a") != self.encode_exact("a")

    @property
    def num_text_ids(self) -> int:
        """The number of token ids that text can have: all ids before the last control tokens.

        Control tokens at the end of the vocabulary do not count. Plain text never gets their ids.
        """
        size = self.vocab_size
        while size - 1 in self.special_ids:
            size -= 1
        return size

    def encode(
        self,
        text: str,
        *,
        add_special: bool = False,
        parse_special: bool = False,
        max_tokens: int | None = None,
    ) -> list[int]:
        """Return the token ids of a text.

        `add_special` adds the begin and end of sequence that the model expects, unless the text has
        them already. `parse_special` turns the texts of control tokens into these tokens: this is
        for raw prompts, never for chat messages. A lone surrogate, which UTF-8 cannot encode,
        becomes U+FFFD.

        Raises:
            TooManyTokensError: a long text has more than `max_tokens` tokens.
        """
        limit = _token_limit(max_tokens, len(text))
        self._check_size((text,), parse_special=parse_special, max_tokens=limit)
        pieces = self._raw_splitter.split(_replace_surrogates(text), parse_special=parse_special)
        ids = self._encode_pieces(pieces, parse_special=parse_special, max_tokens=limit)
        return self._with_ends(ids) if add_special else ids

    def _with_ends(self, ids: list[int]) -> list[int]:
        """Return a text's token ids with begin and end of sequence, unless it has them already."""
        before, after = list(self._parts.prefix_ids), list(self._parts.suffix_ids)
        if before and ids[: len(before)] == before:
            before = []
        if after and ids[-len(after) :] == after:
            after = []
        return [*before, *ids, *after]

    def encode_exact(self, text: str) -> list[int]:
        """Return tokens that spell `text` byte for byte, by the model's merges.

        This is for text that an answer is forced to have: the text is not normalized, no space is
        added before it, and no added tokens are recognized in it. If the vocabulary cannot spell a
        character, the tokens of the text before that character are returned.
        """
        merged = self._merge_exact(text)
        if merged is not None:
            return merged
        ids: list[int] = []
        for part in _AROUND_SPACE_MARKS.split(text):
            merged = self._merge_exact(part)
            if merged is not None:
                ids += merged
                continue
            for char in part:
                spelled = self._spell_character(char)
                if not spelled:
                    return ids
                ids += spelled
        return ids

    def _merge_exact(self, text: str) -> list[int] | None:
        """Return the merged tokens of a text; None if they do not spell it byte for byte."""
        cut = self._parts.cut_exact or self._parts.cut
        ids = self._merges.encode(cut(text))
        return ids if b"".join(map(self.token_bytes, ids)) == text.encode() else None

    def _spell_character(self, char: str) -> list[int]:
        """Return the token of a character, or the tokens of its bytes; empty if there are none."""
        data = char.encode()
        token = self._ids_of_characters.get(data)
        if token is not None:
            return [token]
        byte_tokens = [self._ids_of_characters.get(bytes([value])) for value in data]
        if None in byte_tokens:
            return []
        return [token for token in byte_tokens if token is not None]

    @cached_property
    def _ids_of_characters(self) -> dict[bytes, int]:
        """The ids of ordinary tokens of one character or one byte, by their bytes."""
        ids: dict[bytes, int] = {}
        for token in range(self.vocab_size):
            data = self.token_bytes(token)
            is_character = len(data) == 1 or len(data.decode("utf-8", "ignore")) == 1
            if is_character and token not in self._added_by_id:
                ids.setdefault(data, token)
        return ids

    def encode_prompt(self, prompt: Prompt, *, max_tokens: int | None = None) -> list[int]:
        """Return the token ids of a rendered chat prompt, in which each special piece is one id.

        `max_tokens` limits the number of tokens, with the same error as in `encode`.
        """
        texts = [piece.text for piece in prompt.pieces]
        limit = _token_limit(max_tokens, sum(map(len, texts)))
        pieces: list[str | AddedToken] = []
        strip_next = False
        for piece in prompt.pieces:
            token = self._added_by_text.get(piece.text) if piece.special else None
            if token is not None:
                if token.lstrip and pieces and isinstance(pieces[-1], str):
                    pieces[-1] = pieces[-1].rstrip(WHITE_SPACE)
                pieces.append(token)
                strip_next = token.rstrip
                continue
            text = piece.text.lstrip(WHITE_SPACE) if strip_next else piece.text
            pieces.extend(self._raw_splitter.split(_replace_surrogates(text), parse_special=False))
            strip_next = False
        self._check_size(texts, parse_special=False, max_tokens=limit)
        return self._encode_pieces(pieces, parse_special=False, max_tokens=limit)

    def decode(self, ids: Iterable[int], *, skip_special: bool = True) -> str:
        """Return the text of token ids; bytes that are not UTF-8 become U+FFFD.

        Control tokens are left out unless `skip_special` is false. Bytes are joined before they are
        decoded, so a character that several tokens share is complete.
        """
        skipped = self.special_ids if skip_special else frozenset()
        joined = b"".join([self.token_bytes(id_) for id_ in ids if id_ not in skipped])
        text = joined.decode("utf-8", "replace")
        return text.removeprefix(" ") if self.strip_space else text

    def token_bytes(self, token_id: int) -> bytes:
        """Return the exact bytes of one token; empty for an id outside of the vocabulary."""
        data = self._bytes.get(token_id)
        if data is None:
            data = self._bytes[token_id] = self._spell(token_id)
        return data

    def token_text(self, token_id: int) -> str | None:
        """Return a token's spelling in the vocabulary; None for an id outside of the vocabulary."""
        added = self._added_by_id.get(token_id)
        if added is not None:
            return added.text
        if not 0 <= token_id < 1 << 31:
            raise RequestError(f"Token id {token_id} is out of the vocabulary's range.")
        return self._merges.vocabulary.text(token_id)

    def find(self, token_text: str) -> int | None:
        """Return the id of the token with this spelling in the vocabulary, or None."""
        added = self._added_by_text.get(token_text)
        if added is not None:
            return added.id
        return self._merges.vocabulary.find(token_text.encode("utf-8", "surrogateescape"))

    def special_texts(self) -> list[str]:
        """Return the texts of the control tokens, such as `<|im_start|>`."""
        return [token.text for token in self._added_by_id.values() if token.special]

    def _spell(self, token_id: int) -> bytes:
        text = self.token_text(token_id)
        if text is None:
            return b""
        added = self._added_by_id.get(token_id)
        if added is None:
            return self._parts.to_bytes(text)
        plain = text.encode("utf-8", "replace")
        if added.special or not self._parts.spells_added:
            return plain
        spelled = self._parts.to_bytes(text)
        # A text such as "é" spells bytes that are not UTF-8, so it stands for itself.
        return plain if "\ufffd" in spelled.decode("utf-8", "replace") else spelled

    def _check_size(self, texts: Sequence[str], *, parse_special: bool, max_tokens: int) -> None:
        """Refuse long texts that certainly have more than `max_tokens` tokens, without encoding.

        Two lower bounds are compared with the limit: one is computed from the characters of all
        texts. The other is the number of words, which are counted while the texts are cut, without
        merging. Raises TooManyTokensError.
        """
        if sum(map(len, texts)) <= max_tokens * _MAX_CHARS_PER_TOKEN:
            return
        added = [token for token in self._parts.added if parse_special or not token.special]
        if any(
            token.lstrip or token.rstrip for token in added
        ):  # such tokens include any number of spaces
            return
        longest_added = max((len(token.text.encode()) for token in added), default=1)
        text = self._parts.normalize(_replace_surrogates("".join(texts)))
        if (min_tokens := self._merges.min_tokens(text, longest_added)) > max_tokens:
            raise TooManyTokensError(min_tokens)
        num_words = 0
        for text in texts:
            for start in range(0, len(text), _PIECE_CHARS):
                check_not_cancelled()
                piece = _replace_surrogates(text[start : start + _PIECE_CHARS])
                for part in self._raw_splitter.split(piece, parse_special=parse_special):
                    if isinstance(part, AddedToken):
                        num_words += 1
                    else:
                        words = self._parts.cut(self._parts.normalize(part))
                        num_words += max(
                            0, self._merges.min_tokens_of_words(words) - _WORDS_ADDED_BY_CUT
                        )
                if num_words > max_tokens:
                    raise TooManyTokensError(num_words)

    def _encode_pieces(
        self, pieces: Iterable[str | AddedToken], *, parse_special: bool, max_tokens: int
    ) -> list[int]:
        """Return the token ids of a text that was split at its added tokens.

        `pieces` are the texts between added tokens, not normalized yet, and the added tokens.
        """
        ids: list[int] = []
        parts = self._parts
        cut = parts.cut
        prefix = parts.space_prefix
        cut_rest = parts.cut_rest or parts.cut
        for piece in pieces:
            if isinstance(piece, AddedToken):
                ids.append(piece.id)
            else:
                normal = parts.normalize(piece)
                for part in self._normalized_splitter.split(normal, parse_special=parse_special):
                    if isinstance(part, AddedToken):
                        ids.append(part.id)
                    else:
                        spaced = prefix and not part[0].isspace()
                        words = cut(" " + part if spaced else part)
                        ids += self._merges.encode(words, max_tokens, len(ids))
                    cut, prefix = cut_rest, False
            cut, prefix = cut_rest, False
        return ids


def _token_limit(max_tokens: int | None, num_chars: int) -> int:
    """Return the limit to check while a text is encoded: `max_tokens`, or none for a short text."""
    return sys.maxsize if max_tokens is None or num_chars <= _SHORT_TEXT_CHARS else max_tokens


def _replace_surrogates(text: str) -> str:
    """Return a text without halves of surrogate pairs, which JSON text can contain.

    Two adjacent halves become one character; a single half becomes U+FFFD.
    """
    try:
        text.encode()
    except UnicodeEncodeError:
        return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    return text
