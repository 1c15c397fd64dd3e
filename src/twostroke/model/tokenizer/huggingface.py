"""Reads a tokenizer from a Hugging Face folder: `tokenizer.json` and the small files next to it."""

from __future__ import annotations

import json
import re
from typing import TYPE_CHECKING, Any

from twostroke.core.errors import ModelFormatError, ModelNotFoundError, first_names, notice
from twostroke.core.files import BYTE_ORDER_MARK, is_there, open_regular_file, read_at_most
from twostroke.core.message_text import counted_noun
from twostroke.model.tokenizer.added_tokens import read_added_tokens
from twostroke.model.tokenizer.alphabets import (
    SPACE,
    byte_level_bytes,
    byte_token,
    sentencepiece_bytes,
)
from twostroke.model.tokenizer.descriptions import pattern_of, read_words
from twostroke.model.tokenizer.infill import infill_tokens
from twostroke.model.tokenizer.merges import ListedPairs, MergeOptions, Merges
from twostroke.model.tokenizer.specials import end_ids
from twostroke.model.tokenizer.steps import check_characters, check_steps, flatten_steps
from twostroke.model.tokenizer.template_files import read_chat_templates
from twostroke.model.tokenizer.tokenizer import Tokenizer, TokenizerParts
from twostroke.model.tokenizer.vocabulary import Vocabulary
from twostroke.model.tokenizer.words import normalize_by, replace_matches

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from twostroke.model.tokenizer.specials import AddedToken

_MAX_FILE_BYTES = 256 * 1024**2
# Halves of surrogate pairs without the other half.
_SURROGATE = re.compile(
    rb"\\u[dD][89abAB]..(?!\\u[dD][c-fC-F])|(?<!\\u[dD][89abAB]..)\\u[dD][c-fC-F]"
)
_MAX_UNUSED_IDS = 1 << 14  # an id without a text takes memory, too
_AROUND_BY_NAME = ("RobertaProcessing", "BertProcessing")  # with one token on each side
_DECODERS = ("ByteLevel", "Replace", "ByteFallback", "Fuse", "Strip", "Metaspace")
# Unsupported options of the format, which change the ids and which no language model sets.
_UNSUPPORTED_OPTIONS = ("dropout", "continuing_subword_prefix", "end_of_word_suffix")


def from_tokenizer_json(path: Path, num_rows: int | None = None) -> Tokenizer:
    """Return the tokenizer of a Hugging Face folder, or of a `tokenizer.json` in a folder.

    If `num_rows`, the rows of the model's embedding table, is given, added tokens without a row are
    left out.

    Reads BPE models: byte-level models, and SentencePiece models as converted by Hugging Face. Also
    reads these files if they exist: `tokenizer_config.json`, the other files with added tokens
    (`added_tokens.py`), `generation_config.json`, `config.json` and the chat templates
    (`template_files.py`). Raises ModelNotFoundError or ModelFormatError.
    """
    file = path / "tokenizer.json" if path.is_dir() else path
    if not file.is_file():
        raise ModelNotFoundError(f"There is no tokenizer.json at {path}.")
    folder = file.parent
    description = _read_json_object(file)
    model = description.get("model")
    if not isinstance(model, dict) or model.get("type", "BPE") != "BPE":
        kind = model.get("type") if isinstance(model, dict) else None
        raise ModelFormatError(
            f"{file.name} holds a tokenizer of type {kind}, which this version cannot read; "
            "it reads type BPE."
        )
    config = _read_json_object(folder / "tokenizer_config.json")
    try:
        return _build(description, model, config, folder, num_rows)
    except (LookupError, TypeError, AttributeError, ValueError, OverflowError) as error:
        raise ModelFormatError(
            f"{file.name} is damaged: a part is missing or of another type ({error})."
        ) from error


def _build(
    description: dict[str, Any],
    model: dict[str, Any],
    config: dict[str, Any],
    folder: Path,
    num_rows: int | None,
) -> Tokenizer:
    try:
        check_steps(description)
    except ModelFormatError as error:
        raise ModelFormatError(f"tokenizer.json cannot be used: {error}") from error
    tokens = read_added_tokens(
        description,
        config,
        special_map=_read_json_object(folder / "special_tokens_map.json"),
        added_json=_read_json_object(folder / "added_tokens.json"),
    )
    named_texts = tokens.named_texts
    added = _with_rows(tokens.added, num_rows)
    by_text = {token.text: token.id for token in added}
    try:
        words = read_words(description)
        byte_level = words.has_bytes and not words.spells_bytes
        merges, num_texts = _read_merges(model, added, byte_level=byte_level)
        strip_space = _strips_space(description)
        prefix, suffix = _surrounding_ids(description.get("post_processor"))
    except ModelFormatError as error:
        raise ModelFormatError(f"tokenizer.json cannot be used: {error}") from error
    _check_added_ids(added, limit=num_texts + len(added) + _MAX_UNUSED_IDS)
    vocab_size = max(num_texts, *(token.id + 1 for token in added), 0)
    for id_ in (*prefix, *suffix):
        if id_ >= vocab_size:
            raise ModelFormatError(f"tokenizer.json is damaged: its post-processor has id {id_}.")
    ends = [by_text[named_texts["eos_token"]]] if named_texts.get("eos_token") in by_text else []
    ends += [id_ for id_ in _configured_ends(folder) if 0 <= id_ < vocab_size]
    return Tokenizer(
        TokenizerParts(
            merges=merges,
            normalize=words.normalize,
            cut=words.cut,
            cut_rest=words.cut_rest,
            cut_exact=words.cut_exact,
            vocab_size=vocab_size,
            to_bytes=byte_level_bytes if words.has_bytes else _piece_bytes(description),
            spells_added=True,
            added=added,
            bos_id=by_text.get(named_texts.get("bos_token", "")),
            eos_ids=end_ids(ends, added),
            prefix_ids=prefix,
            suffix_ids=suffix,
            strip_space=strip_space,
            named_texts=named_texts,
            additional_texts=tokens.additional_texts,
            chat_templates=read_chat_templates(folder, config),
            infill=infill_tokens((), (), (), added),
        )
    )


def _check_added_ids(added: tuple[AddedToken, ...], *, limit: int) -> None:
    """Refuse an added token whose id is far above all other ids.

    All ids up to the largest take memory, so a damaged file could otherwise take much.
    """
    for token in added:
        if token.id >= limit:
            raise ModelFormatError(
                f"tokenizer.json is damaged: its added token {token.text[:40]!r} has the id "
                f"{token.id}, which is far beyond the others."
            )


def _with_rows(added: tuple[AddedToken, ...], num_rows: int | None) -> tuple[AddedToken, ...]:
    """Return the added tokens that have a row in the model's embedding table; log other tokens."""
    if num_rows is None:
        return added
    rowless = [token.text for token in added if token.id >= num_rows]
    if not rowless:
        return added
    notice(
        f"The added tokens {first_names(rowless)} of tokenizer.json are left out: their ids are "
        f"beyond the {counted_noun(num_rows, 'row')} of the embedding table."
    )
    return tuple(token for token in added if token.text not in rowless)


def _texts(vocab: dict[str, int]) -> list[str]:
    """Return the texts of a vocabulary by token id; an id that the file lacks has no text."""
    ids = vocab.values()
    limit = len(vocab) + _MAX_UNUSED_IDS
    if any(type(id_) is not int or not 0 <= id_ < limit for id_ in ids):
        raise ModelFormatError(f"its token ids are not whole numbers below {limit}.")
    texts = [""] * (max(ids, default=-1) + 1)
    for text, id_ in vocab.items():
        texts[id_] = text
    return texts


def _read_merges(
    model: dict[str, Any], added: tuple[AddedToken, ...], *, byte_level: bool
) -> tuple[Merges, int]:
    """Return a tokenizer.json's merges, and the number of token ids.

    The vocabulary of the merges has no special tokens, so that text never becomes a special token.
    """
    for name in _UNSUPPORTED_OPTIONS:
        if model.get(name):
            raise ModelFormatError(f"its option {name} is not known.")
    texts = _texts(model["vocab"])
    # `Merges` writes the unknown token itself; merges may result in tokens that are not special.
    hidden_tokens = [t for t in added if t.special and t.text != model.get("unk_token")]
    vocabulary = Vocabulary(texts, [token.id for token in hidden_tokens if token.id < len(texts)])
    merge_lines = _merge_lines(model)
    bytes_of = [vocabulary.find(f"<0x{value:02X}>".encode()) for value in range(256)]
    options = MergeOptions(
        byte_level=byte_level,
        ignore_merges=bool(model.get("ignore_merges")),
        byte_ids=tuple(bytes_of) if model.get("byte_fallback") else (),
        unknown=_unknown_id(model, vocabulary),
        fuse_unknown=bool(model.get("fuse_unk")),
    )
    return Merges(vocabulary, ListedPairs(merge_lines, vocabulary), options), len(texts)


def _merge_lines(model: dict[str, Any]) -> Iterator[str]:
    """Yield each BPE merge of a tokenizer.json as a line of two texts.

    Both texts and the merged text must be tokens.
    """
    vocab = model["vocab"]
    for merge in model["merges"]:
        left, right = merge.split(" ", 1) if isinstance(merge, str) else merge
        if left not in vocab or right not in vocab or left + right not in vocab:
            raise ModelFormatError(f"its merge of '{left}' and '{right}' does not fit its tokens.")
        yield f"{left} {right}"


def _unknown_id(model: dict[str, Any], vocabulary: Vocabulary) -> int | None:
    text = model.get("unk_token")
    token_id = None if text is None else vocabulary.find(str(text).encode())
    if text is not None and token_id is None:
        raise ModelFormatError(f"the tokenizer's unknown token '{text}' is not in its vocabulary.")
    return token_id


def _surrounding_ids(processor: dict[str, Any] | None) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return the ids that a tokenizer.json's post-processor puts (before, after) a text."""
    before: list[int] = []
    after: list[int] = []
    for step in flatten_steps(processor, "processors"):
        kind = step.get("type")
        if kind == "ByteLevel":  # it changes only offsets, which are not used
            continue
        if kind in _AROUND_BY_NAME:
            before, after = [int(step["cls"][1]), *before], [*after, int(step["sep"][1])]
            continue
        if kind != "TemplateProcessing":
            raise ModelFormatError(
                f"its post-processor '{kind}' is not known; known are TemplateProcessing, "
                f"ByteLevel, {', '.join(_AROUND_BY_NAME)}, Sequence."
            )
        first, last = _template_ids(step)
        before, after = [*first, *before], [*after, *last]
    return tuple(before), tuple(after)


def _template_ids(step: dict[str, Any]) -> tuple[list[int], list[int]]:
    """Return the ids that a TemplateProcessing post-processor puts (before, after) a text."""
    before: list[int] = []
    after: list[int] = []
    side = before
    for item in step["single"]:
        if "Sequence" in item:
            side = after
        else:
            side.extend(step["special_tokens"][item["SpecialToken"]["id"]]["ids"])
    return before, after


def _strips_space(description: dict[str, Any]) -> bool:
    """Return whether a tokenizer.json's decoder removes the first space of a decoded text.

    An unknown decoder is refused.
    """
    strips = False
    for step in flatten_steps(description.get("decoder"), "decoders"):
        kind = step.get("type")
        if kind not in _DECODERS:
            raise ModelFormatError(
                f"its decoder '{kind}' is not known; known are {', '.join(_DECODERS)}, Sequence."
            )
        prefixed = step.get("prepend_scheme") != "never"
        from_start = bool(step.get("start")) and (step.get("content") or " ") == " "
        strips |= (kind == "Strip" and from_start) or (kind == "Metaspace" and prefixed)
    return strips


def _piece_bytes(description: dict[str, Any]) -> Callable[[str], bytes]:
    """Return a function that turns a token's text into its bytes, as the decoder's steps say.

    `description` is the content of tokenizer.json.
    """
    replacements = []
    for step in flatten_steps(description.get("decoder"), "decoders"):
        if step.get("type") == "Replace":
            replacements.append(replace_matches(pattern_of(step), str(step["content"])))
        elif step.get("type") == "Metaspace":
            replacements.append(replace_matches(re.escape(step.get("replacement") or SPACE), " "))
    if not replacements:
        return sentencepiece_bytes
    replaced = normalize_by(replacements)

    def to_bytes(text: str) -> bytes:
        value = byte_token(text)
        return replaced(text).encode("utf-8", "replace") if value is None else value

    return to_bytes


def _configured_ends(folder: Path) -> Iterator[int]:
    for name in ("generation_config.json", "config.json"):
        try:
            value = _read_json_object(folder / name).get("eos_token_id")
        except ModelFormatError:  # who loads the model refuses the file or leaves it out
            continue
        for id_ in value if isinstance(value, list) else [value]:
            if isinstance(id_, int) and not isinstance(id_, bool):
                yield id_


def _read_json_object(file: Path) -> dict[str, Any]:
    """Return a JSON object from a file; an empty object if there is no such file."""
    if not is_there(file):
        return {}
    try:
        with open_regular_file(file) as open_file:
            data = read_at_most(open_file, _MAX_FILE_BYTES + 1)
    except OSError as error:
        raise ModelFormatError(f"{file.name} cannot be read: {error.strerror}.") from None
    if len(data) > _MAX_FILE_BYTES:
        raise ModelFormatError(f"{file.name} is larger than {_MAX_FILE_BYTES // 1024**2} MiB.")
    try:
        value = json.loads(data.removeprefix(BYTE_ORDER_MARK).decode())
    except (ValueError, RecursionError) as error:
        raise ModelFormatError(f"{file.name} is not valid JSON ({error}).") from error
    if _SURROGATE.search(data):
        try:
            check_characters(value)
        except ModelFormatError as error:
            raise ModelFormatError(f"{file.name} is damaged: {error}") from None
    if not isinstance(value, dict):
        raise ModelFormatError(f"{file.name} does not hold a JSON object.")
    return value
