"""Texts that are stored: renaming a class or a field must not change them.

If a test fails because a class or a field was renamed, add the old name to the tables of
`model/program/program.py`. If the tiny models of the tests or the arithmetic changed, write
the new values here.
"""

from __future__ import annotations

from hashlib import sha256
from typing import TYPE_CHECKING

import pytest

from support.tiny import FAMILIES, tiny_of, write_tiny_folder
from twostroke.engine.kv_offload.tier import KvCacheSpec
from twostroke.model.families import build_program
from twostroke.model.loader import load
from twostroke.model.program.kv_layout import PageGroups
from twostroke.model.program.program import stored_form

if TYPE_CHECKING:
    from pathlib import Path

PROGRAMS = {
    "llama": "23bdd4191e9c8e57",
    "llama-3.1": "877bc48edf44e79d",
    "mistral": "3a285e7e849c5eff",
    "mixtral": "50dc7870d2ddef87",
    "qwen2": "ff4df1b39255ff29",
    "qwen2-yarn": "37874adbe0c40636",
    "qwen3": "7b8a25b1aed952b8",
    "qwen3-moe": "76fab0b00386045a",
    "qwen3.5": "a9fc14465db4cb52",
    "qwen3.5-moe": "d1cea90affc45504",
    "qwen3-next": "d1cea90affc45504",
    "gemma2": "0c4145408ef92cd6",
    "gemma3": "6dc75aa3fe156626",
    "gemma4": "7acc701fc4b0c9e7",
    "gemma4-large": "c159423b8c2926ce",
    "gemma4-experts": "f1ef675b3cd40b62",
    "olmo2": "839424ccc8097042",
    "olmo3": "03ad2533bb8b0333",
    "exaone4": "b638044e08ff23a1",
    "exaone4-small": "7f685f425a8bd320",
    "seed-oss": "47d90b010ec162a9",
    "ernie4.5": "5456cb7c8d78a8f5",
    "ernie4.5-experts": "cda6b5da2c5cb0e6",
    "phi3": "3a285e7e849c5eff",
    "phi3-long": "10d00e4bf9b16967",
    "youtu": "d037ab75d9971401",
    "deepseek-v2": "de75fc8633a3bd3d",
    "deepseek-v3": "21fca7578f93005f",
    "glm4-lite": "bf91923513104a6e",
    "glm4-air": "458cd38d0d23c3ed",
    "glm4": "c59785e4dbe62aa9",
    "gpt-oss": "20c48865caee9ab7",
    "granite": "6591b33977494812",
    "kimi-linear": "b9edbaf49c78cf98",
    "llama4": "b445c91691f512b8",
    "minimax-m2": "6b3d4e2d7f1a7ef2",
    "hy3": "7c1876cc22a7497a",
    "mellum": "f9a2bf2bad8a83f7",
    "ministral3": "338d208b4362585d",
    "muse-glimmer": "57dde10f2b773873",
    "smollm3": "5bbace4f9a064fb4",
    "lfm2": "9e63c5a0485e96e4",
    "lfm2-moe": "53a292b4e4b38cf8",
    "granite-hybrid": "bcaad2ec5b2bcf19",
    "granite-hybrid-experts": "dbd2317c0bfcc729",
    "nemotron-h": "a6d8cfcc8c555093",
    "nemotron-h-experts": "335d74dd5def99d0",
}


def test_every_family_has_its_stored_form() -> None:
    assert set(PROGRAMS) == set(FAMILIES)


@pytest.mark.parametrize("family", FAMILIES)
def test_stored_form_of_a_program_does_not_change(tmp_path: Path, family: str) -> None:
    folder = write_tiny_folder(tmp_path / "model", tiny_of(family))
    program = build_program(load(str(folder)).spec)
    assert sha256(stored_form(program.ops).encode()).hexdigest()[:16] == PROGRAMS[family]


def test_names_of_stored_pages_do_not_change() -> None:
    groups = PageGroups(page_size=16, windows=(None, 4))
    kind = KvCacheSpec(
        model="m",
        kv_format="f16",
        page_bytes=4096,
        groups=groups,
        arithmetic="cpu avx2 8",
        only_prompts=True,
        version=2,
    )
    name = kind.name((1, b"x" * 32)).hex()
    assert name == "a2c28bf454e067e3f303aa40b00d81f54c5b66c4c701a959449940846493f0c9"
