"""Loads models by name: finds their files, checks their weights, builds their tokenizers."""

from __future__ import annotations

from types import MappingProxyType
from typing import TYPE_CHECKING

from twostroke.core.errors import ModelFormatError
from twostroke.core.message_text import counted_noun
from twostroke.model import hub
from twostroke.model.built_in_templates import template_source
from twostroke.model.tokenizer import from_gguf, from_tokenizer_json
from twostroke.model.weights import GgufTokenizer, load_path, peek_family

if TYPE_CHECKING:
    from pathlib import Path

    from twostroke.model.hub import Watcher
    from twostroke.model.tokenizer import Tokenizer
    from twostroke.model.weights import LoadedModel


def pull(name: str, watch: Watcher | None = None) -> Path:
    """Return the path of the model called `name`; fetch it if it is not on this machine.

    Raises:
        ModelNotFoundError: the name is not known.
        ModelFormatError: the model cannot run here; at most some megabytes were fetched.
        DownloadError: the model cannot be fetched completely.
    """
    return hub.pull(name, peek_family, watch)


def load(name: str) -> LoadedModel:
    """Map the weights of the model called `name`, and check that the model can run.

    The model must be on this machine (see `pull`).

    Raises:
        ModelNotFoundError: the model is not on this machine, or the name is not known.
        ModelFormatError: the model cannot be read, or it cannot run here.
    """
    local_model = hub.use(name)
    return load_path(local_model.path, local_model.name, local_model.licence)


def build_tokenizer(loaded: LoadedModel, chat_template: str | None = None) -> Tokenizer:
    """Return the tokenizer from a model's files; `chat_template` replaces the model's template.

    Raises:
        ModelFormatError: the tokenizer cannot be read, or has more tokens than the model.
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
            f"{loaded.name}: its {source.path.name} has "
            f"{counted_noun(tokenizer.num_text_ids, 'token')}, its embedding table "
            f"{counted_noun(loaded.spec.vocab_size, 'row')}: it is the tokenizer of another model."
        )
    return tokenizer
