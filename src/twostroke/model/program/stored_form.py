"""Programs as text that does not change when classes or fields are renamed.

The names of stored KV pages contain a hash of this text, so a renamed class must not change it: all
stored pages would be lost.
"""

from __future__ import annotations

from typing import Final

import msgspec

# Names in stored forms, by the present name of a class, or of a class and its field.
STORED_CLASSES: Final = {
    "Projection": "Made",
    "QkProjections": "Origin",
    "SharedKvAttention": "BorrowingAttention",
    "SplitKvAttention": "AttentionPieces",
    "MeshCoordinate": "Place",
}
STORED_FIELDS: Final[dict[tuple[str, str], str]] = {
    ("AllGather", "team_index"): "place",
    ("AllReduce", "team_index"): "place",
    ("SplitKvAttention", "team_index"): "place",
    ("SplitKvAttention", "reads_shared_kv"): "borrows",
}


def stored_form(value: object) -> str:
    """Return a Program as text, from which the names of stored KV pages are hashed.

    Pages outlive the program that stored them, so the text must not change if a class or a field is
    renamed: `STORED_CLASSES` and `STORED_FIELDS` keep the old names. `value` is a value of structs
    and tuples.
    """
    if isinstance(value, tuple):
        items = [stored_form(item) for item in value]
        return f"({items[0]},)" if len(items) == 1 else f"({', '.join(items)})"
    if not isinstance(value, msgspec.Struct):
        return repr(value)
    class_name = type(value).__name__
    fields = [
        f"{STORED_FIELDS.get((class_name, name), name)}={stored_form(getattr(value, name))}"
        for name in value.__struct_fields__
    ]
    return f"{STORED_CLASSES.get(class_name, class_name)}({', '.join(fields)})"
