"""The `tokenizer.*` keys of GGUF metadata, checked one by one (ggml-org/ggml docs/gguf.md)."""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeVar, cast

from twostroke.core.errors import ModelFormatError
from twostroke.tokenize.specials import AddedToken

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

T = TypeVar("T")

# Token types of the format: normal 1, unknown 2, control 3, user-defined 4, unused 5, byte 6.
_UNKNOWN, _CONTROL, _USER_DEFINED, BYTE = 2, 3, 4, 6
_END_KEYS = ("eos_token_id", "eot_token_id", "eom_token_id")
# Fill in the middle: as they are called now, and in older files.
_INFILL_KEYS = (("fim_pre", "prefix"), ("fim_suf", "suffix"), ("fim_mid", "middle"))
_INFILL_END_KEYS = ("fim_pad_token_id", "fim_rep_token_id", "fim_sep_token_id", "eot_token_id")
_NAMED = {"bos": "bos", "eos": "eos", "unk": "unknown", "pad": "padding"}


class Fields:
    """What every kind of tokenizer has in a file, as Python values.

    Raises ModelFormatError, from anywhere, for a value that is missing or not what it must be.
    """

    def __init__(self, metadata: Mapping[str, object]) -> None:
        self._metadata = metadata
        self.tokens = self.array("tokens", str)
        types = self.array("token_type", int, optional=True)
        if len(types) not in (0, len(self.tokens)):
            raise ModelFormatError(
                f"The tokenizer has {len(self.tokens)} tokens but {len(types)} token types."
            )
        # Of the ids that are no ordinary tokens.
        self.types = {id_: kind for id_, kind in enumerate(types) if kind != 1}
        self.bos_id = self.token_id("bos_token_id")
        self.unknown_id = self.token_id("unknown_token_id")
        self.ends = [self.token_id(key) for key in _END_KEYS]

    def added(self) -> tuple[AddedToken, ...]:
        """Return the tokens that are matched whole in a text."""
        return tuple(
            AddedToken(id_, self.tokens[id_], special=kind != _USER_DEFINED)
            for id_, kind in self.types.items()
            if kind in (_UNKNOWN, _CONTROL, _USER_DEFINED)
        )

    def around(self, *, begin: bool, end: bool) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Return the ids before and after a text; `begin` and `end` where the file is silent."""
        wanted = [self.get("add_bos_token", bool), self.get("add_eos_token", bool)]
        before, after = (
            default if want is None else want
            for want, default in zip(wanted, (begin, end), strict=True)
        )
        ids = [(self.bos_id,) if before else (), (self.ends[0],) if after else ()]
        first, last = (tuple(id_ for id_ in some if id_ is not None) for some in ids)
        return first, last

    def infill(self) -> tuple[list[int | None], list[int | None]]:
        """Return the ids that come before prefix, suffix and middle, and those that end one."""
        named = [
            now if now is not None else old
            for now, old in (
                (self.token_id(f"{new}_token_id"), self.token_id(f"{older}_token_id"))
                for new, older in _INFILL_KEYS
            )
        ]
        return named, [self.token_id(key) for key in _INFILL_END_KEYS]

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
        """Return an array of one type; an empty one for an optional one that is not there."""
        value = self._metadata.get(f"tokenizer.ggml.{key}")
        if value is None and optional:
            return ()
        if value is None or isinstance(value, (str, bytes)) or not hasattr(value, "__len__"):
            raise ModelFormatError(f"The tokenizer's table tokenizer.ggml.{key} is missing.")
        items = cast("Sequence[T]", value)
        # Arrays that offer their bytes hold strings, and are not decoded to be looked at.
        kinds = {str} if hasattr(items, "spans") else {*map(type, items)}
        if not kinds <= {kind}:
            raise ModelFormatError(
                f"The tokenizer's table tokenizer.ggml.{key} is not all of type {kind.__name__}."
            )
        return items

    def token_id(self, key: str) -> int | None:
        """Return a token's id, or None where the file has none."""
        value = self.get(key, int)
        if value is not None and not 0 <= value < len(self.tokens):
            raise ModelFormatError(
                f"tokenizer.ggml.{key} is {value}, "
                f"outside the vocabulary of {len(self.tokens)} tokens."
            )
        return value
