"""Reads the added and special tokens of a Hugging Face folder, by the rules of transformers 5.

Most of these tokens are in `tokenizer.json`. More tokens, or other flags, may be in
`tokenizer_config.json`; in older folders, in `special_tokens_map.json` and `added_tokens.json`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from msgspec.structs import replace

from twostroke.core.errors import ModelFormatError
from twostroke.core.frozen import Frozen
from twostroke.model.tokenizer.specials import AddedToken

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

Json = dict[str, Any]

# Names of special tokens that any tokenizer may have, in the order in which new tokens get ids. A
# folder may have further names, such as `image_token`.
_TOKEN_NAMES: Final = tuple(
    f"{name}_token" for name in ("bos", "eos", "unk", "sep", "pad", "cls", "mask")
)
_FLAGS: Final = ("lstrip", "rstrip", "single_word")
_NO_ID: Final = -1  # the id of a token until `_with_ids` finds its id


class FolderTokens(Frozen):
    """The added tokens of a Hugging Face folder's tokenizer, by ascending id.

    `named_texts` has the texts of special tokens with a name, such as `bos_token`;
    `additional_texts` has the texts of further special tokens, which the files list without names.
    """

    added: tuple[AddedToken, ...]
    named_texts: Mapping[str, str]
    additional_texts: tuple[str, ...] = ()


def read_added_tokens(
    description: Json, config: Json, special_map: Json, added_json: Json
) -> FolderTokens:
    """Return the added tokens of a Hugging Face folder's tokenizer, as transformers 5 reads them.

    The arguments are the contents of tokenizer.json, tokenizer_config.json, special_tokens_map.json
    and added_tokens.json; a missing file is passed as an empty object.

    Raises:
        ModelFormatError: a token's id is not a whole number from 0.
    """
    entries = description.get("added_tokens") or ()
    own_tokens = [_own_token(entry) for entry in entries]
    if config.get("added_tokens_decoder") is not None:
        special_map = {}
        by_id = {_id_of(id_): entry for id_, entry in config["added_tokens_decoder"].items()}
    else:  # an older folder
        by_id = _listed_by_text(config, special_map, added_json)
        by_id |= {_id_of(entry["id"]): entry for entry in entries}
    named_tokens = _named_tokens(config, special_map)
    texts = {name: _text(value) for name, value in named_tokens.items()}
    specials = {*texts.values()}
    listed_tokens = [_token(by_id[id_], specials) for id_ in sorted(by_id)]
    listed_texts = {token.text for token in (*own_tokens, *listed_tokens)}
    unnamed_tokens = _unnamed_tokens(config, special_map)
    unlisted: list[str | Json] = []
    for value in (*named_tokens.values(), *unnamed_tokens):
        if value and value not in unlisted and _text(value) not in listed_texts:
            unlisted.append(value)
    more_tokens = listed_tokens + [_token(value, specials) for value in unlisted]
    added = _with_ids(own_tokens, more_tokens, description["model"]["vocab"])
    additional = tuple(dict.fromkeys(_text(value) for value in unnamed_tokens if value))
    return FolderTokens(added, texts, additional)


def _named_tokens(config: Json, special_map: Json) -> dict[str, str | Json]:
    """Return a folder's special tokens that have names, such as `bos_token`, by name.

    The order is fixed. The value is the token's text, or an object with its text and flags.
    """
    named_tokens = {name: value for name, value in config.items() if _is_named(name, value)}
    extras = config.get("extra_special_tokens")
    if isinstance(extras, dict):
        named_tokens |= {name: value for name, value in extras.items() if value}
    for name, value in special_map.items():
        # For a name outside `_TOKEN_NAMES`, a text in the configuration overrides this file.
        is_fixed = name not in _TOKEN_NAMES and isinstance(named_tokens.get(name), str)
        if _is_named(name, value) and not is_fixed:
            named_tokens[name] = value
    order = {name: index for index, name in enumerate(_TOKEN_NAMES)}
    names = sorted(named_tokens, key=lambda name: order.get(name, len(order)))
    return {name: named_tokens[name] for name in names}


def _unnamed_tokens(config: Json, special_map: Json) -> list[str | Json]:
    """Return the special tokens that a folder lists without names (`additional_special_tokens`)."""
    older, newer = "additional_special_tokens", "extra_special_tokens"
    lists = [config.get(newer) or config.get(older), special_map.get(newer)]
    extras = [value for texts in lists if isinstance(texts, list) for value in texts]
    has_list = older in config or isinstance(config.get(newer), list)
    return extras if extras or has_list else list(special_map.get(older) or [])


def _listed_by_text(config: Json, special_map: Json, added_json: Json) -> dict[int, Json]:
    """Return the tokens of added_tokens.json by id, with the fields of tokenizer.json's entries.

    A token is special if the other files list its text as special.
    """
    named_values = {
        name: value for name, value in config.items() if isinstance(value, str)
    } | special_map
    special_texts = {_text(named_values[name]) for name in _TOKEN_NAMES if named_values.get(name)}
    special_texts |= {value for value in _unnamed_tokens(config, {}) if isinstance(value, str)}
    return {
        _id_of(id_): {
            "content": text,
            "special": text in special_texts,
            "normalized": text not in special_texts,
        }
        for text, id_ in added_json.items()
    }


def _is_named(name: str, value: object) -> bool:
    return name.endswith("_token") and isinstance(value, (str, dict)) and bool(value)


def _text(value: str | Json) -> str:
    return str(value["content"]) if isinstance(value, dict) else value


def _own_token(entry: Json) -> AddedToken:
    """Return an added token from its entry in tokenizer.json; missing flags are false."""
    flags = {flag: bool(entry.get(flag)) for flag in ("special", "normalized", *_FLAGS)}
    return AddedToken(_id_of(entry["id"]), str(entry["content"]), **flags)


def _token(value: str | Json, specials: Iterable[str]) -> AddedToken:
    """Return an added token from an object with flags, or from the text of a special token.

    A token with a text in `specials` is special even without the flag. The token has no id yet;
    `_with_ids` adds it.
    """
    entry = {"content": value, "special": True} if isinstance(value, str) else value
    text = str(entry["content"])
    special = bool(entry.get("special")) or text in specials
    normalized = bool(entry.get("normalized", not special))
    flags = {flag: bool(entry.get(flag)) for flag in _FLAGS}
    return AddedToken(_NO_ID, text, special=special, normalized=normalized, **flags)


def _id_of(value: object) -> int:
    is_number = isinstance(value, int) and not isinstance(value, bool)
    if is_number or (isinstance(value, str) and value.isascii() and value.isdecimal()):
        id_ = int(str(value))
        if id_ >= 0:
            return id_
    raise ModelFormatError(f"An added token has the id {value!r}: it must be an integer from 0 on.")


def _with_ids(
    own_tokens: Iterable[AddedToken], more_tokens: Iterable[AddedToken], vocab: Mapping[str, int]
) -> tuple[AddedToken, ...]:
    """Return the added tokens of tokenizer.json (`own_tokens`) and of the other files, with ids.

    A token of `more_tokens` replaces a token of equal text. A text that has no id in the vocabulary
    gets the next free id.
    """
    added = {token.id: token for token in own_tokens}
    ids = {token.text: token.id for token in added.values()}
    for token in more_tokens:
        if not token.text:
            continue
        id_ = ids.get(token.text, vocab.get(token.text))
        if id_ is None:
            id_ = max(len(vocab), *(added_id + 1 for added_id in ids.values()), 0)
        ids[token.text] = id_
        added[id_] = replace(token, id=id_)
    return tuple(added[id_] for id_ in sorted(added))
