"""The lists of docs/guide/models.md equal what loads: families, number formats, tokenizers."""

from __future__ import annotations

import re
from pathlib import Path
from unicodedata import normalize

import pytest

from support.tiny import tiny_of, write_tiny_gguf
from support.tiny_families import FAMILIES
from support.vocabulary_kinds import GGUF_KINDS, kind_metadata
from twostroke.model.families import ARCHITECTURES, MODEL_TYPES
from twostroke.model.loader import build_tokenizer, load
from twostroke.model.quant import FORMATS
from twostroke.model.tokenizer.pretokenizers import PRE_TOKENIZERS, SENTENCEPIECE_NAMES

PAGE = (Path(__file__).parents[3] / "docs" / "guide" / "models.md").read_text(encoding="utf-8")
TEXT = "Hello, it's 12345 words:\n\n  日本語 café e\u0301 \U0001f44d\u3000한국어 ALLCaps/x"
PIECES_OF = ("pieces_with_prefix", "pieces")
# The vocabularies of published files, by `general.architecture`: values of `tokenizer.ggml.pre`,
# or the name of a kind of vocabulary that has none.
VOCABULARIES = {
    "llama": (
        *("llama-bpe", "llama3", "llama-v3", "smollm", "tekken", "pixtral", "smaug-bpe", "falcon3"),
        *("deepseek-llm", "deepseek-coder", "gpt-2", "refact", "default", *PIECES_OF),
    ),
    "qwen2": ("qwen2", "deepseek-r1-qwen", "megrez"),
    "qwen3": ("qwen2",),
    "qwen3moe": ("qwen2",),
    "qwen3next": ("qwen2",),
    "qwen35": ("qwen35",),
    "qwen35moe": ("qwen35",),
    "gemma2": PIECES_OF,
    "gemma3": PIECES_OF,
    "gemma4": ("gemma4", "pieces_by_merges"),
    "gpt-oss": ("gpt-4o",),
    "phi3": ("gpt-4o", *PIECES_OF),
    "nemotron_h": ("pixtral",),
    "nemotron_h_moe": ("pixtral",),
    "olmo2": ("dbrx", "olmo", "superbpe"),
    "exaone4": ("exaone4",),
    "seed_oss": ("seed-coder",),
    "ernie4_5": PIECES_OF,
    "ernie4_5-moe": PIECES_OF,
    "smollm3": ("llama-bpe",),
    "glm4moe": ("glm4",),
    "granite": ("refact", "dbrx"),
    "granitehybrid": ("dbrx",),
    "hy_v3": ("hunyuan-dense", "hunyuan"),
    "kimi-linear": ("kimi-k2",),
    "lfm2": ("lfm2",),
    "lfm2moe": ("lfm2",),
    "llama4": ("llama4",),
    "mellum": ("mellum2",),
    "minimax-m2": ("minimax-m2",),
    "mistral3": ("tekken",),
    "muse-glimmer": ("llama4", "gpt-4o"),
    "deepseek2": ("deepseek-llm", "deepseek-coder", "deepseek-v3", "kimi-k2", "youtu", "glm4"),
}


def rows(heading: str) -> list[list[str]]:
    """Return the cells of the first table under a heading, without its first two lines."""
    section = PAGE.split(f"\n## {heading}\n\n")[1].split("\n\n")
    lines = next(part for part in section if part.startswith("|")).splitlines()
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines[2:]]


def quoted(text: str) -> list[str]:
    return re.findall(r"`([^`]+)`", text)


def test_the_families_are_those_that_run() -> None:
    families = rows("Families")
    assert {name for row in families for name in quoted(row[1])} == ARCHITECTURES.keys()
    assert {name for row in families for name in quoted(row[2])} == MODEL_TYPES.keys()
    assert VOCABULARIES.keys() == ARCHITECTURES.keys()


@pytest.mark.parametrize(
    ("architecture", "vocabulary"),
    [(name, pre) for name in VOCABULARIES for pre in VOCABULARIES[name]],
)
def test_a_file_of_each_family_loads_with_its_vocabularies(
    tmp_path: Path, architecture: str, vocabulary: str
) -> None:
    family = next(name for name in FAMILIES if FAMILIES[name].architecture == architecture)
    metadata = {"tokenizer.ggml.pre": vocabulary}
    if vocabulary in GGUF_KINDS or vocabulary in SENTENCEPIECE_NAMES:
        metadata = kind_metadata(GGUF_KINDS[vocabulary.replace("gemma4", "pieces_by_merges")])
    path = write_tiny_gguf(tmp_path / "tiny.gguf", tiny_of(family), metadata)
    tokenizer = build_tokenizer(load(str(path)))
    decoded = tokenizer.decode(tokenizer.encode(TEXT))
    assert normalize("NFC", decoded) == normalize("NFC", TEXT)


def test_the_pre_tokenizers_are_those_that_are_known() -> None:
    listed = PAGE.split("known pre-tokenizers (`tokenizer.ggml.pre`): ")[1].split(". ")[0]
    assert set(quoted(listed)) == PRE_TOKENIZERS.keys() | SENTENCEPIECE_NAMES


def test_the_formats_are_those_that_are_read() -> None:
    line = PAGE.split("\n## Formats\n\n")[1].splitlines()[0]
    named = re.findall(r"\b[A-Z]+[0-9]\w*", line.partition("Safetensors")[0])
    assert set(named) == FORMATS.keys()
