"""Line charts as small SVG files, readable on light and on dark pages."""

from __future__ import annotations

from dataclasses import dataclass
from html import escape
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

_WIDTH, _HEIGHT = 720, 360
_LEFT, _RIGHT, _TOP, _BOTTOM = 48, 190, 34, 44
_COLOURS = ("#2a7fd0", "#2a9d5c", "#d08030", "#c03060", "#8060c0", "#608020", "#208080", "#a06040")


@dataclass(frozen=True, slots=True)
class Curve:
    """Points (x, y) with a name; a predicted one is drawn in dashes, in the colour before it."""

    name: str
    points: Sequence[tuple[float, float]]
    is_predicted: bool = False


def curves(title: str, x_name: str, y_name: str, lines: Sequence[Curve]) -> str:
    """Return an SVG with all curves, whose x values are spaced evenly in their order.

    The y axis begins at 0, and a grey line marks 1.
    """
    places = sorted({x for line in lines for x, _ in line.points})
    top = max([1.2, *(y for line in lines for _, y in line.points)]) * 1.08

    def at(x: float, y: float) -> tuple[float, float]:
        across = places.index(x) / max(1, len(places) - 1)
        right = _WIDTH - _RIGHT - _LEFT
        return _LEFT + across * right, _TOP + (1 - y / top) * (_HEIGHT - _TOP - _BOTTOM)

    box = f'xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {_HEIGHT}"'
    parts = [
        f'<svg {box} font-family="sans-serif" font-size="12" fill="#777">',
        f'<text x="8" y="16">{escape(title)}</text>',
        f'<text x="{_LEFT}" y="{_HEIGHT - 6}">{escape(x_name)}</text>',
        f'<text x="8" y="{_TOP - 4}">{escape(y_name)}</text>',
    ]
    for tick in _ticks(top):
        x, y = at(places[0], tick)
        width = 2 if tick == 1 else 1
        parts.append(
            f'<path d="M{x:.0f} {y:.1f}H{_WIDTH - _RIGHT}" stroke="#777" '
            f'stroke-opacity=".3" stroke-width="{width}"/>'
        )
        parts.append(f'<text x="{x - 6:.0f}" y="{y + 4:.0f}" text-anchor="end">{tick:g}</text>')
    for place in places:
        x, _ = at(place, 0)
        parts.append(
            f'<text x="{x:.0f}" y="{_HEIGHT - _BOTTOM + 16}" text-anchor="middle">{place:g}</text>'
        )
    colour = -1
    for row, line in enumerate(lines):
        colour += not line.is_predicted
        paint = _COLOURS[colour % len(_COLOURS)]
        dashes = ' stroke-dasharray="5 4"' if line.is_predicted else ""
        path = " ".join(f"{x:.1f},{y:.1f}" for x, y in (at(*point) for point in line.points))
        parts.append(
            f'<polyline points="{path}" fill="none" stroke="{paint}" stroke-width="2"{dashes}/>'
        )
        y = _TOP + 16 * row + 8
        x = _WIDTH - _RIGHT + 14
        parts.append(f'<path d="M{x} {y - 4}h18" stroke="{paint}" stroke-width="2"{dashes}/>')
        parts.append(f'<text x="{x + 24}" y="{y}">{escape(line.name)}</text>')
    return "\n".join([*parts, "</svg>", ""])


def _ticks(top: float) -> list[float]:
    step = next(step for step in (0.25, 0.5, 1, 2, 5, 10) if top / step <= 8)
    return [step * number for number in range(int(top / step) + 1)]
