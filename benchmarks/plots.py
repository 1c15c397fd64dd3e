"""Bar charts as small SVG files, readable on light and on dark pages."""

from __future__ import annotations

import math
from dataclasses import dataclass
from html import escape
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

_LABELS, _WIDTH, _ROW, _HEAD = 440, 860, 26, 34
_TICKS = (0.5, 1, 2, 3, 5, 10, 20, 50)


@dataclass(frozen=True, slots=True)
class Bar:
    """A ratio, and the one that was meant to be reached."""

    label: str
    ratio: float
    goal: float


def bars(title: str, rows: Sequence[Bar]) -> str:
    """Return an SVG with a bar for each row on a logarithmic scale, and a mark at each goal."""
    every = [value for row in rows for value in (row.ratio, row.goal)]
    low, high = min(0.5, *every) * 0.9, max(2.0, *every) * 1.15

    def at(value: float) -> float:
        share = math.log(value / low) / math.log(high / low)
        return _LABELS + share * (_WIDTH - _LABELS - 60)

    height = _HEAD + _ROW * len(rows) + 10
    box = f'xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {height}"'
    parts = [
        f'<svg {box} font-family="sans-serif" font-size="12" fill="#777">',
        f'<text x="8" y="14">{escape(title)}</text>',
    ]
    for tick in (tick for tick in _TICKS if low <= tick <= high):
        x = f"{at(tick):.0f}"
        parts.append(f'<path d="M{x} {_HEAD}V{height - 10}" stroke="#777" stroke-opacity=".3"/>')
        parts.append(f'<text x="{x}" y="{_HEAD - 4}" text-anchor="middle">{tick:g}</text>')
    for number, row in enumerate(rows):
        top, start, end = _HEAD + _ROW * number, at(1), at(row.ratio)
        left, width = min(start, end), max(1.0, abs(end - start))
        colour = "#2a9d5c" if row.ratio >= row.goal else "#d08030"
        middle = top + _ROW / 2 + 4
        parts += [
            f'<text x="{_LABELS - 8}" y="{middle}" text-anchor="end">{escape(row.label)}</text>',
            f'<rect x="{left:.0f}" y="{top + 5}" width="{width:.0f}" height="16" fill="{colour}"/>',
            f'<path d="M{at(row.goal):.0f} {top + 2}v22" stroke="#c03" stroke-width="2"/>',
            f'<text x="{max(start, end) + 6:.0f}" y="{middle}">{row.ratio:.2f}</text>',
        ]
    return "\n".join([*parts, "</svg>", ""])
