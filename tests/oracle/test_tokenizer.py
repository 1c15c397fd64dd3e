"""Token ids and rendered chats, compared with transformers live."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from oracle.record_tokenizer import record
from oracle.tokenizer_texts import texts

from twostroke.tokenize import from_gguf
from twostroke.tokenize.templates import ChatTemplate
from twostroke.weights.gguf import read_gguf

if TYPE_CHECKING:
    from pathlib import Path
