"""From a model's name to its files on this machine, its checked weights and its tokenizer."""

from __future__ import annotations

from types import MappingProxyType
from typing import TYPE_CHECKING

from twostroke.core.errors import ModelFormatError
from twostroke.model import hub as fetch
from twostroke.model.built_in_templates import template_source
from twostroke.model.tokenizer import from_gguf, from_tokenizer_json
from twostroke.model.weights import GgufTokenizer, load_path, peek_family

if TYPE_CHECKING:
    from pathlib import Path

    from twostroke.model.hub import Watcher
    from twostroke.model.tokenizer import Tokenizer
    from twostroke.model.weights import LoadedModel


def pull(name: str, watch: Watcher | None = None) -> Path:
    """Fetch the model called `name`, unless it is here, and return its path.

    Raises:
        ModelNotFoundError: the name is not known.
        ModelFormatError: the model cannot run here; at most some megabytes were fetched.
        DownloadError: it cannot be fetched whole.
    """
    return fetch.pull(name, peek_family, watch)


def load(name: str) -> LoadedModel:
    """Map and check the model called `name`, which must be here (see `pull`).

    Raises:
        ModelNotFoundError: it is not here, or the name is not known.
        ModelFormatError: it cannot be read, or it cannot run here.
    """
    found = fetch.use(name)
    return load_path(found.path, found.name, found.licence)


def build_tokenizer(loaded: LoadedModel, chat_template: str | None = None) -> Tokenizer:
    """Return the tokenizer from a model's files; `chat_template` replaces the model's own.

    Raises:
        ModelFormatError: it cannot be read, or the model has no row for some of its tokens.
        UsageError: there is no chat template of that name.
    """
    tokenizer = _own_tokenizer(loaded)
    if chat_template is not None:
        source = template_source(chat_template, tokenizer)
        tokenizer.chat_templates = MappingProxyType({"default": source})
    return tokenizer


def _own_tokenizer(loaded: LoadedModel) -> Tokenizer:
    source = loaded.tokenizer_source
    if isinstance(source, GgufTokenizer):
        return from_gguf(source.metadata)
    tokenizer = from_tokenizer_json(source.path, loaded.spec.vocab_size)
    if tokenizer.num_text_ids > loaded.spec.vocab_size:
        raise ModelFormatError(
            f"{loaded.name}: its {source.path.name} has {tokenizer.num_text_ids} tokens, its "
            f"embedding table {loaded.spec.vocab_size} rows: it is the tokenizer of another model."
        )
    return tokenizer
