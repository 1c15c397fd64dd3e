"""How much text a schema or a pattern can force, and how large it is."""

from __future__ import annotations

import json
import math
import re
from typing import Any, Final

MOST_FORCED: Final = 8000  # bytes, which llguidance follows in some 50 ms
_MINIMA: Final = ("minItems", "minProperties", "minLength")
# Of a pattern: an escape, a set of characters, the least count of repetitions, or a character.
_PART: Final = re.compile(r"\\.|\[\^?\]?(?:[^\]\\]|\\.)*\]|\{\s*\d+|.", re.DOTALL)


def forces_little(schema: object) -> bool:
    """Return whether a prepared schema forces at most about `MOST_FORCED` bytes in a row.

    Where text can go on in one way only, llguidance follows it to its end without a limit, in the
    middle of a step. This walks over the schema as often as its references and minimum counts
    repeat it, and gives up after as many bytes; so cycles end, too.
    """
    named = schema.get("$defs", {}) if isinstance(schema, dict) else {}
    definitions = {f"#/$defs/{name}": inner for name, inner in named.items()}
    left = float(MOST_FORCED)
    waiting: list[tuple[Any, float]] = [(schema, 1.0)]
    while waiting and left > 0:
        part, times = waiting.pop()
        if isinstance(part, dict):
            counts = (part[name] for name in _MINIMA if isinstance(part.get(name), (int, float)))
            times *= math.prod(max(1.0, min(count, MOST_FORCED)) for count in counts)
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
            waiting += [(one, times) for one in part]
            left -= 2 * times
        else:
            left -= len(json.dumps(part)) * times if isinstance(part, str) else 24 * times
    return left > 0


def pattern_size(pattern: str) -> float:
    """Return a bound on the bytes that a regular expression forces: its size by its counts."""
    sizes, last = [0.0], 0.0  # of the groups that are open, and of what a count would repeat
    for part in _PART.findall(pattern):
        if part == "(":
            sizes.append(1.0)
            last = 0.0
        elif part == ")" and len(sizes) > 1:
            last = sizes.pop()
            sizes[-1] += last
        elif part[0] == "{" and len(part) > 1:
            sizes[-1] += last * (min(float(part[1:]), MOST_FORCED) - 1)
        else:
            last = float(len(part.encode()))
            sizes[-1] += last
    return sum(sizes)
