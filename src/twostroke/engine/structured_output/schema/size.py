"""Bounds the text that a schema or a pattern can force, which llguidance follows in one step."""

from __future__ import annotations

import json
import math
import re
from typing import Any, Final

MAX_FORCED_BYTES: Final = 8000  # llguidance follows them in about 50 ms
_MINIMA: Final = ("minItems", "minProperties", "minLength")
# A part of a pattern: an escape, a set of characters, a minimum of repetitions, or a character.
_PART: Final = re.compile(r"\\.|\[\^?\]?(?:[^\]\\]|\\.)*\]|\{\s*\d+|.", re.DOTALL)


def forces_little(schema: object) -> bool:
    """Return whether a rewritten JSON schema forces at most about `MAX_FORCED_BYTES` bytes of text.

    Forced text is text without a choice. llguidance follows it to its end within one step, so the
    caller disables this for schemas that force more. The size of a subschema is counted once for
    each time that references or minimum counts repeat it. Counting stops at the limit, so cycles of
    references are no problem.
    """
    defs = schema.get("$defs", {}) if isinstance(schema, dict) else {}
    definitions = {f"#/$defs/{name}": inner for name, inner in defs.items()}
    left = float(MAX_FORCED_BYTES)
    waiting: list[tuple[Any, float]] = [(schema, 1.0)]
    while waiting and left > 0:
        part, times = waiting.pop()
        if isinstance(part, dict):
            counts = (part[name] for name in _MINIMA if isinstance(part.get(name), (int, float)))
            times *= math.prod(max(1.0, min(count, MAX_FORCED_BYTES)) for count in counts)
            left -= 2 * times
            for name, value in part.items():
                if name == "$defs" and part is schema:
                    continue
                left -= (4 + len(name)) * times
                if name == "$ref" and isinstance(value, str):
                    waiting.append((definitions.get(value), times))
                elif name == "pattern" and isinstance(value, str):
                    left -= pattern_size(value) * times
                elif name == "patternProperties" and isinstance(value, dict):
                    left -= sum(map(pattern_size, value)) * times
                    waiting += [(inner, times) for inner in value.values()]
                else:
                    waiting.append((value, times))
        elif isinstance(part, list):
            waiting += [(item, times) for item in part]
            left -= 2 * times
        else:
            left -= len(json.dumps(part)) * times if isinstance(part, str) else 24 * times
    return left > 0


def pattern_size(pattern: str) -> float:
    """Return an upper limit of the text, in bytes, that a regular expression can force."""
    sizes = [0.0]  # of the open groups
    last = 0.0  # size of the part that a count would repeat
    for part in _PART.findall(pattern):
        if part == "(":
            sizes.append(1.0)
            last = 0.0
        elif part == ")" and len(sizes) > 1:
            last = sizes.pop()
            sizes[-1] += last
        elif part[0] == "{" and len(part) > 1:
            sizes[-1] += last * (min(float(part[1:]), MAX_FORCED_BYTES) - 1)
        else:
            last = float(len(part.encode()))
            sizes[-1] += last
    return sum(sizes)
