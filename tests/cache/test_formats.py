"""How many bytes keys and values take in each format."""

from __future__ import annotations

from twostroke.cache import DEFAULT_FORMAT, FORMATS
from twostroke.core.config import KV_FORMATS
from twostroke.program import CacheLayer


def test_every_format_has_the_bytes_that_its_pages_take():
    layer = CacheLayer(num_kv_heads=3, head_dim=96)
    values = 2 * 3 * 96
    assert layer.bytes_per_token(FORMATS["f32"]) == 4 * values
    assert layer.bytes_per_token(FORMATS["f16"]) == 2 * values
    assert layer.bytes_per_token(FORMATS["bf16"]) == 2 * values
    assert layer.bytes_per_token(FORMATS["int8"]) == values + 2 * 3 * 2


def test_formats_that_can_be_asked_for_are_those_that_there_are():
    assert {*KV_FORMATS, "f32"} == {"auto", *FORMATS}
    assert DEFAULT_FORMAT in FORMATS
