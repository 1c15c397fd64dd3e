"""A roofline as SVG: what a machine can do, and operations under it (Williams et al., 2009).

Logarithmic axes: floating-point operations a byte to the right, operations a second upwards. The
roof is bandwidth times intensity, then the arithmetic peak.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from html import escape
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

_WIDTH, _HEIGHT = 1000, 640
_LEFT, _RIGHT, _TOP, _BOTTOM = 76, 24, 96, 64  # margins of the plot
_COLOURS: Final = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9")
_LETTER, _LINE = 6.2, 13.0  # of a label, in pixels
_LEGEND_LINE = 20
_STEPS_AWAY: Final = sorted(range(-24, 25), key=abs)  # lines that a label may be moved by


@dataclass(frozen=True, slots=True)
class Point:
    """An operation: FLOPs a byte, FLOPs a second, and its share of its step's time."""

    label: str
    intensity: float
    flops_per_s: float
    share: float


@dataclass(frozen=True, slots=True)
class Series:
    """Operations of one step, in a colour of their own."""

    name: str
    points: Sequence[Point]


@dataclass(frozen=True, slots=True)
class Roof:
    """Bytes a second, operations a second, and what each is called."""

    bandwidth: float
    peak: float
    bandwidth_name: str
    peak_name: str


def draw(title: str, roof: Roof, series: Sequence[Series]) -> str:
    """Return the picture; circles are as large as the operation's share of its step."""
    scale = _Scale.over(roof, [point for one in series for point in one.points])
    placed = _Placed()
    lower = _LEGEND_LINE * max(0, (len(series) - 1) // 2 - 1)  # by the lines of a long legend
    size = f'width="{_WIDTH}" height="{_HEIGHT + lower}" viewBox="0 0 {_WIDTH} {_HEIGHT + lower}"'
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" {size} font-family="sans-serif">',
        f"<title>{escape(title)}</title>",
        '<rect width="100%" height="100%" fill="white"/>',
        _text(_LEFT, 26, title, size=16, weight="bold"),
        *(_legend(number, one.name) for number, one in enumerate(series)),
        f'<g transform="translate(0 {lower})">',
        *_axes(scale),
        *_roof(scale, roof, placed),
    ]
    coloured = [
        (point, _colour(number)) for number, one in enumerate(series) for point in one.points
    ]
    for point, colour in sorted(coloured, key=lambda pair: -pair[0].share):  # small ones on top
        placed.add_circle(*scale.place(point), _radius(point))
        lines.append(_circle(point, *scale.place(point), colour))
    for point, colour in sorted(coloured, key=lambda pair: -pair[0].flops_per_s):
        lines += _label(point, *scale.place(point), colour, placed)
    return "\n".join([*lines, "</g>", "</svg>", ""])


@dataclass(frozen=True, slots=True)
class _Scale:
    """Decades shown: from and to which power of ten, to the right and upwards."""

    x: tuple[float, float]
    y: tuple[float, float]

    @classmethod
    def over(cls, roof: Roof, points: Sequence[Point]) -> _Scale:
        """Show all points, and the ridge of the roof with some room around it."""
        ridge = roof.peak / roof.bandwidth
        xs = [ridge / 30, ridge * 10, *(point.intensity for point in points)]
        ys = [roof.peak / 300, roof.peak * 1.6, *(point.flops_per_s for point in points)]
        return cls(
            (math.log10(min(xs)) - 0.2, math.log10(max(xs)) + 0.5),
            (math.log10(min(ys)) - 0.2, math.log10(max(ys)) + 0.1),
        )

    def right(self, intensity: float) -> float:
        share = (math.log10(intensity) - self.x[0]) / (self.x[1] - self.x[0])
        return _LEFT + share * (_WIDTH - _LEFT - _RIGHT)

    def down(self, flops_per_s: float) -> float:
        share = (self.y[1] - math.log10(flops_per_s)) / (self.y[1] - self.y[0])
        return _TOP + share * (_HEIGHT - _TOP - _BOTTOM)

    def place(self, point: Point) -> tuple[float, float]:
        return self.right(point.intensity), self.down(point.flops_per_s)


class _Placed:
    """What labels must not lie on: boxes (left, top, right, bottom)."""

    def __init__(self) -> None:
        self._boxes: list[tuple[float, float, float, float]] = []

    def add_circle(self, x: float, y: float, radius: float) -> None:
        self._boxes.append((x - radius, y - radius, x + radius, y + radius))

    def find(self, x: float, y: float, away: float, label: str) -> tuple[float, float]:
        """Return where a label of (x, y) may begin: beside it, or as few lines off as can be."""
        width = _LETTER * len(label)
        for lines in _STEPS_AWAY:
            for left in (x + away, x - away - width):
                box = (left, y + (lines - 0.5) * _LINE, left + width, y + (lines + 0.5) * _LINE)
                if self._is_free(box):
                    self._boxes.append(box)
                    return left, y + lines * _LINE
        return x + away, y

    def _is_free(self, box: tuple[float, float, float, float]) -> bool:
        left, top, right, bottom = box
        if left < _LEFT or right > _WIDTH or top < _TOP or bottom > _HEIGHT - _BOTTOM:
            return False
        return all(
            right <= other[0] or other[2] <= left or bottom <= other[1] or other[3] <= top
            for other in self._boxes
        )


def _radius(point: Point) -> float:
    return 3 + 12 * math.sqrt(point.share)


def _circle(point: Point, x: float, y: float, colour: str) -> str:
    return (
        f'<circle cx="{x:.1f}" cy="{y:.1f}" r="{_radius(point):.1f}" fill="{colour}" '
        'fill-opacity="0.75" stroke="white"/>'
    )


def _label(point: Point, x: float, y: float, colour: str, placed: _Placed) -> Iterator[str]:
    width = _LETTER * len(point.label)
    left, middle = placed.find(x, y, _radius(point) + 4, point.label)
    if middle != y:
        end = left if left > x else left + width
        yield _line(x, y, end, middle, colour, 0.6)
    box = f'x="{left - 2:.1f}" y="{middle - 5:.1f}" width="{width + 4:.1f}" height="11"'
    yield f'<rect {box} fill="white" fill-opacity="0.7"/>'
    yield _text(left, middle + 4, point.label, size=11)


def _axes(scale: _Scale) -> Iterator[str]:
    bottom, right = _HEIGHT - _BOTTOM, _WIDTH - _RIGHT
    for power in range(math.ceil(scale.x[0]), math.floor(scale.x[1]) + 1):
        x = scale.right(10.0**power)
        yield _line(x, _TOP, x, bottom, "#e4e4e4")
        yield _text(x, bottom + 18, f"{10.0**power:,g}", anchor="middle")
    for power in range(math.ceil(scale.y[0]), math.floor(scale.y[1]) + 1):
        y = scale.down(10.0**power)
        yield _line(_LEFT, y, right, y, "#e4e4e4")
        yield _text(_LEFT - 8, y + 4, f"{10.0 ** (power - 9):,g}", anchor="end")
    middle = (_LEFT + right) / 2
    yield _text(
        middle,
        _HEIGHT - 18,
        "FLOP a byte that must move (circles show the shares of a step)",
        anchor="middle",
    )
    upright = f'transform="rotate(-90 20 {(_TOP + bottom) / 2})"'
    yield _text(20, (_TOP + bottom) / 2, "GFLOP/s", anchor="middle", more=upright)


def _roof(scale: _Scale, roof: Roof, placed: _Placed) -> Iterator[str]:
    ridge = roof.peak / roof.bandwidth
    first = max(10 ** scale.x[0], 10 ** scale.y[0] / roof.bandwidth)
    start = scale.right(first), scale.down(first * roof.bandwidth)
    corner, end = (scale.right(ridge), scale.down(roof.peak)), _WIDTH - _RIGHT
    path = f"{start[0]:.1f},{start[1]:.1f} {corner[0]:.1f},{corner[1]:.1f} {end},{corner[1]:.1f}"
    yield f'<polyline points="{path}" fill="none" stroke="#333333" stroke-width="2"/>'
    angle = math.atan2(corner[1] - start[1], corner[0] - start[0])
    x, y = (start[0] + 2 * corner[0]) / 3, (start[1] + 2 * corner[1]) / 3
    half = len(roof.bandwidth_name) // 2
    for letter in range(-half, half + 1):
        along = letter * _LETTER
        placed.add_circle(x + along * math.cos(angle), y + along * math.sin(angle) - 12, 8)
    turned = f'transform="rotate({math.degrees(angle):.1f} {x:.1f} {y:.1f})"'
    yield _text(x, y - 8, roof.bandwidth_name, anchor="middle", more=turned)
    yield _text(end, corner[1] - 8, roof.peak_name, anchor="end")


def _legend(number: int, name: str) -> str:
    x, y = _LEFT + 6 + number % 2 * 460, 50 + number // 2 * _LEGEND_LINE
    circle = f'<circle cx="{x}" cy="{y}" r="6" fill="{_colour(number)}" fill-opacity="0.75"/>'
    return circle + _text(x + 12, y + 4, name)


def _colour(number: int) -> str:
    return _COLOURS[number % len(_COLOURS)]


def _line(x: float, y: float, to_x: float, to_y: float, colour: str, width: float = 1) -> str:
    ends = f'x1="{x:.1f}" y1="{y:.1f}" x2="{to_x:.1f}" y2="{to_y:.1f}"'
    return f'<line {ends} stroke="{colour}" stroke-width="{width}"/>'


def _text(
    x: float,
    y: float,
    text: str,
    *,
    anchor: str = "start",
    size: int = 12,
    weight: str = "normal",
    more: str = "",
) -> str:
    style = f'text-anchor="{anchor}" font-size="{size}" font-weight="{weight}" fill="#222222"'
    return f'<text x="{x:.1f}" y="{y:.1f}" {style} {more}>{escape(text)}</text>'
