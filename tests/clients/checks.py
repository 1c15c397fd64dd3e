"""What the clients' scripts share: each call is a function, and a line says how it went."""

from __future__ import annotations

import os
import sys
import traceback
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable

BASE_URL, ROOT_URL, MODEL = (os.environ[name] for name in ("BASE_URL", "ROOT_URL", "MODEL"))
QUESTION = [{"role": "user", "content": "Why is the sky blue? Answer in one sentence."}]
WEATHER = {
    "type": "object",
    "properties": {"city": {"type": "string"}, "unit": {"type": "string", "enum": ["C", "F"]}},
    "required": ["city", "unit"],
    "additionalProperties": False,
}
TOOL = {
    "type": "function",
    "function": {"name": "get_weather", "description": "The weather now.", "parameters": WEATHER},
}
WEATHER_QUESTION = [{"role": "user", "content": "What is the weather in Paris, in Celsius?"}]
PERSON = {
    "type": "object",
    "properties": {"name": {"type": "string"}, "age": {"type": "integer"}},
    "required": ["name", "age"],
    "additionalProperties": False,
}


def run(*checks: Callable[[], Any]) -> None:
    """Make the calls, and end with 1 if one of them failed."""
    failed = 0
    for check in checks:
        try:
            check()
        except Exception:  # noqa: BLE001 - the other calls are made all the same
            failed += 1
            print(f"  FAILED {check.__name__}")
            traceback.print_exc(limit=-3, chain=False)
        else:
            print(f"  ok {check.__name__}", flush=True)
    print(f"  {len(checks) - failed} of {len(checks)}")
    sys.exit(bool(failed))
