"""A server that asks for keys: the page asks its user once, and remembers while the tab is open."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from collections.abc import Callable

    Visiting = Callable[..., Any]

REFUSED = ("401",)  # which the browser complains about


def _give(page: Any, key: str) -> None:
    page.fill("#key-field", key)
    page.press("#key-field", "Enter")


def test_a_key_is_asked_for_until_it_is_right(key_server: Any, visit: Visiting) -> None:
    visit = visit(key_server, allowed=REFUSED)
    page = visit.page
    page.wait_for_selector("dialog.wanted")
    assert page.evaluate("document.activeElement.id") == "key-field"
    assert page.inner_text("#key-why").startswith("This server needs an API key")
    assert "header" not in page.inner_text("dialog.wanted").lower()
    _give(page, "two words")
    assert "without spaces" in page.inner_text("#key-why")
    _give(page, "sk-wrong")
    page.wait_for_selector("#key-why:has-text('not valid')")
    _give(page, "sk-right")
    page.wait_for_selector("dialog.wanted", state="detached")
    visit.set(max_tokens=8)
    visit.send("hello")
    assert visit.answers()[0]
    page.reload()
    page.wait_for_selector("#lamp[data-state=ok]")
    visit.send("hello again")
    assert page.locator("dialog.wanted").count() == 0
    page.click("#tab-dashboard")
    page.wait_for_selector("#view-dashboard svg")
    assert page.locator("dialog.wanted").count() == 0


def test_who_has_no_key_is_left_alone_and_can_give_one_later(
    key_server: Any, visit: Visiting
) -> None:
    visit = visit(key_server, allowed=REFUSED)
    page = visit.page
    page.wait_for_selector("dialog.wanted")
    page.keyboard.press("Escape")
    page.wait_for_selector("dialog.wanted", state="detached")
    page.click("#tab-dashboard")
    page.wait_for_timeout(1500)  # in which the page looks how the server is
    assert page.locator("dialog.wanted").count() == 0
    page.click("#tab-playground")
    visit.send("hello", wait=False)
    page.wait_for_selector("dialog.wanted")  # who sends wants to be answered
    page.keyboard.press("Escape")
    page.wait_for_selector(".reply :text('This server needs an API key')")
    assert page.locator("dialog.wanted").count() == 0
    page.click("#key")
    _give(page, "sk-right")
    page.wait_for_selector("#lamp[data-state=ok]")
    visit.set(max_tokens=8)
    visit.send("hello")
    assert visit.answers()[-1]


def test_looking_for_the_key_is_no_part_of_the_time_to_first_token(
    key_server: Any, visit: Visiting
) -> None:
    visit = visit(key_server, allowed=REFUSED)
    page = visit.page
    page.wait_for_selector("dialog.wanted")
    page.keyboard.press("Escape")
    visit.set(max_tokens=8)
    visit.send("hello", wait=False)
    page.wait_for_selector("dialog.wanted")
    page.evaluate("const now = performance.now(); performance.now = () => now + 3_600_000")
    _give(page, "sk-right")
    visit.wait_answered()
    assert "TTFT 0" in page.inner_text(".reply .figures summary")  # its clock stands still now


def test_code_takes_the_key_out_of_the_environment(key_server: Any, visit: Visiting) -> None:
    visit = visit(key_server, allowed=REFUSED)
    page = visit.page
    page.wait_for_selector("dialog.wanted")
    _give(page, "sk-right")
    page.wait_for_selector("dialog.wanted", state="detached")
    visit.set(max_tokens=8)
    visit.send("hello")
    page.click("button:has-text('Code')")
    assert "Bearer $TWOSTROKE_API_KEY" in page.inner_text("dialog.request")
    page.click("#request-tab-1")
    request_text = page.inner_text("dialog.request")
    assert 'api_key=os.environ["TWOSTROKE_API_KEY"]' in request_text
    assert "sk-right" not in page.content()


def test_everybody_can_give_a_key(key_server: Any, visit: Visiting) -> None:
    axe = Path(os.environ.get("AXE", ""))
    if not axe.is_file():
        pytest.skip("needs axe-core: run by `make long SUITE=page`")
    visit = visit(key_server, allowed=REFUSED, viewport={"width": 360, "height": 740})
    page = visit.page
    page.wait_for_selector("dialog.wanted")
    page.evaluate(axe.read_text())
    result = page.evaluate("axe.run().then(({violations}) => violations.map(({id}) => id))")
    assert result == []
    box = page.locator("dialog.wanted").bounding_box()
    assert box["x"] >= 0
    assert 300 < box["width"] <= 360
    assert 200 < box["height"] < 400


def test_without_keys_there_is_no_button_for_one(server: Any, visit: Visiting) -> None:
    assert not visit(server).page.is_visible("#key")
