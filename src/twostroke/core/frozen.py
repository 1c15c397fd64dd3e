"""`Frozen`: data with named, typed fields that never change; it crosses rooms."""

from __future__ import annotations

from typing import dataclass_transform

from msgspec import Struct, field


@dataclass_transform(frozen_default=True, field_specifiers=(field,))
class Frozen(Struct, frozen=True):
    """Like a frozen dataclass, but made in C by msgspec.

    To define one takes 16 us instead of 700 us, which starts the program sooner; to create one
    takes 0.13 us instead of 1.0 us. `msgspec.structs.replace` copies one with other values.
    """
