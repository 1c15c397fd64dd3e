"""The roofline: well-formed, complete, legible."""

from __future__ import annotations

import re
from xml.etree import ElementTree as ET

from twostroke.cli.roofline import Point, Roof, Series, draw

ROOF = Roof(50e9, 1.5e12, "50 GB/s <memory>", "1.5 T operations/s & more")
SVG = "{http://www.w3.org/2000/svg}"


def series(count: int) -> list[Series]:
    """Return series of five operations that lie close together."""
    return [
        Series(
            f"step {n} & so on",
            [Point(f"op {n}.{i}", 3.0 * 4**n, 4e10 * (1 + i / 9), 0.2) for i in range(5)],
        )
        for n in range(count)
    ]


def test_every_label_of_every_step_is_in_the_picture() -> None:
    root = ET.fromstring(draw("a <model> & a machine", ROOF, series(7)))
    texts = [element.text for element in root.iter(f"{SVG}text")]
    wanted = [point.label for one in series(7) for point in one.points]
    names = [one.name for one in series(7)]
    for text in (*wanted, *names, ROOF.bandwidth_name, ROOF.peak_name, "a <model> & a machine"):
        assert texts.count(text) == 1
    assert len(list(root.iter(f"{SVG}circle"))) == 7 * 5 + 7


def test_labels_do_not_lie_on_each_other() -> None:
    root = ET.fromstring(draw("title", ROOF, series(3)))
    labels = [
        (float(element.get("x", 0)), float(element.get("y", 0)))
        for element in root.iter(f"{SVG}text")
        if re.match(r"op \d", element.text or "")
    ]
    for number, (x, y) in enumerate(labels):
        others = labels[:number]
        assert not any(abs(x - left) < 36 and abs(y - down) < 12 for left, down in others)


def test_points_under_the_roof_are_drawn_under_it() -> None:
    """Twice the rate is higher up, twice the intensity farther to the right."""
    points = [Point("a", 2, 1e10, 0.1), Point("b", 4, 2e10, 0.1), Point("c", 1e6, 1e6, 0.1)]
    root = ET.fromstring(draw("title", ROOF, [Series("s", points)]))
    _, a, b, c = (
        (float(one.get("cx", 0)), float(one.get("cy", 0))) for one in root.iter(f"{SVG}circle")
    )
    by_height = sorted([a, b, c], key=lambda place: place[1])
    assert by_height[0][0] > by_height[1][0]
    assert all(76 <= x <= 976 and 96 <= y <= 576 for x, y in (a, b, c))


def test_a_machine_without_operations_is_still_a_roof() -> None:
    root = ET.fromstring(draw("title", ROOF, [Series("nothing", [])]))
    assert len(list(root.iter(f"{SVG}polyline"))) == 1
