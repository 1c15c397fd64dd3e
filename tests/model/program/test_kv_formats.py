"""The bytes of keys and values in each format."""

from __future__ import annotations

from twostroke.core.options import KV_FORMATS
from twostroke.model.program import CacheLayer
from twostroke.model.program.kv_layout import DEFAULT_FORMAT, FORMATS


def test_every_format_has_the_bytes_that_its_pages_take():
    layer = CacheLayer(num_kv_heads=3, head_dim=96)
    values = 2 * 3 * 96
    assert layer.bytes_per_token(FORMATS["f32"]) == 4 * values
    assert layer.bytes_per_token(FORMATS["f16"]) == 2 * values
    assert layer.bytes_per_token(FORMATS["bf16"]) == 2 * values
    for name in ("int8", "fp8"):
        assert layer.bytes_per_token(FORMATS[name]) == values + 2 * 3 * 2
    assert layer.bytes_per_token(FORMATS["int16"]) == 2 * values + 2 * 3 * 2


def test_options_name_exactly_the_known_formats():
    assert {*KV_FORMATS, "f32"} == {"auto", *FORMATS}
    assert DEFAULT_FORMAT in FORMATS
