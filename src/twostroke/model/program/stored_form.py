"""Programs as text that stays the same when classes or fields are renamed.

The names of stored pages contain a hash of it: a renamed class must not empty the page caches.
"""

from __future__ import annotations

from typing import Final

import msgspec

# By the present name of a class or a field: the name in stored forms.
STORED_CLASSES: Final = {
    "Projection": "Made",
    "QkProjections": "Origin",
    "SharedKvAttention": "BorrowingAttention",
    "SplitKvAttention": "AttentionPieces",
    "MeshCoordinate": "Place",
}
STORED_FIELDS: Final[dict[tuple[str, str], str]] = {}


def stored_form(value: object) -> str:
    """Return a value of structs and tuples as text, with the names that are stored."""
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
