"""Events and bodies of the Responses protocol, in a form that tests compare."""

from __future__ import annotations

import json
from typing import Any

Fields = dict[str, Any]


def events_of(text: str, first: int = 0) -> list[Fields]:
    *blocks, rest = text.split("\n\n")
    assert rest == ""
    results = []
    for index, block in enumerate(block for block in blocks if not block.startswith(":")):
        name, data = block.split("\n")
        results.append(json.loads(data.removeprefix("data: ")))
        assert name == f"event: {results[-1]['type']}"
        assert results[-1]["sequence_number"] == first + index
    return results


def kinds_of(events: list[Fields]) -> list[str]:
    return [event["type"].removeprefix("response.") for event in events]


def plain(value: Any) -> Any:
    """Return a response without the values that differ between equal responses."""
    if isinstance(value, list):
        return [plain(item) for item in value]
    if not isinstance(value, dict):
        return value
    changing = {"id", "created_at", "completed_at", "cached_tokens", "call_id"}
    return {key: plain(inner_value) for key, inner_value in value.items() if key not in changing}
