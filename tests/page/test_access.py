"""Everybody's page: keyboard, screen readers, phones, light and dark, servers that restart."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from collections.abc import Callable

    Visiting = Callable[..., Any]

PHONE = {"viewport": {"width": 360, "height": 740}, "has_touch": True, "is_mobile": True}
DESKTOP = {"viewport": {"width": 1440, "height": 900}}
TOO_WIDE = """
[...document.querySelectorAll("main *")]
  .filter((element) => element.checkVisibility() && !element.closest(".wide, pre, .unseen"))
  .filter((element) => element.getBoundingClientRect().right > 361)
  .map((element) => element.outerHTML.slice(0, 80))
"""
NUM_LINES = """all => all.map((one) => {
  const range = document.createRange();
  range.selectNodeContents(one);
  return new Set([...range.getClientRects()].map(({ top }) => top)).size;
})"""
LISTEN = """{
  const news = document.querySelector(".middle > [role=status]");
  window.said = [];
  new MutationObserver(() => said.push(news.textContent)).observe(news, {childList: true});
}"""
ANIMATION = """
getComputedStyle(document.querySelector(".busy .body > .markdown > :last-child"), "::after")
  .animationName
"""


def _fill(visit: Any) -> None:
    """Have something of everything on the page."""
    visit.page.click("[title='Send the same messages with two settings']")
    if visit.page.locator(".settings").is_hidden():
        visit.page.click(".head [aria-label=Settings]")
    for group in ("Tools", "More"):
        visit.page.click(f".panel summary:has-text('{group}')")
    visit.set(max_tokens=12, logprobs=True, form="json_schema")
    visit.page.click("#column-B")
    visit.set(max_tokens=12)
    visit.page.keyboard.press("Escape")
    visit.send("Hello.")


def _fill_tools(visit: Any) -> None:
    """Have calls that wait for their results, and some that were sent."""
    first, second = (
        {"index": index, "id": f"c{index}", "function": {"name": name, "arguments": "{}"}}
        for index, name in enumerate(("weather", "population"))
    )
    calls = [{"content": "Let me look."}, {"tool_calls": [first]}, {"tool_calls": [second]}]
    visit.tell(calls, [{"content": "Done."}], calls)
    visit.send("What is it like in Rome?")
    for name in ("weather", "population"):
        visit.page.fill(f"[aria-label='Result of {name}']", "a " * 200)
    visit.page.press("[aria-label='Result of population']", "Enter")
    visit.page.wait_for_selector(".next .reply:not(.busy) .tools .icon")
    visit.send("And now?")
    visit.page.press("[aria-label='Result of weather']", "Enter")


def _fill_text(visit: Any) -> None:
    """Have a text with marks and shades, a gap, and two continuations."""
    able = {"id": "smollm2", "capabilities": {"completion_chat": True, "completion_fim": True}}
    visit.page.route("**/v1/models", lambda route: route.fulfill(json={"data": [able]}))
    visit.page.reload()
    visit.page.wait_for_selector("#lamp[data-state=ok]")
    visit.write("Once upon a time " * 12)
    visit.page.wait_for_selector("#suffix")
    if visit.page.locator(".settings").is_hidden():
        visit.page.click(".head [aria-label=Settings]")
    visit.set(max_tokens=12, logprobs=True)
    visit.page.keyboard.press("Escape")
    visit.continue_text()
    visit.page.click("[title='Send the same messages with two settings']")
    visit.page.click("text=Take >> nth=0")
    visit.continue_text()


FILL = {"playground": _fill, "tools": _fill_tools, "text": _fill_text}


@pytest.mark.parametrize("view", [*FILL, "dashboard", "plan"])
@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("screen", [DESKTOP, PHONE], ids=["desktop", "phone"])
def test_no_barrier_is_found(
    visit: Visiting, server: Any, view: str, scheme: str, screen: dict[str, Any]
) -> None:
    axe = Path(os.environ.get("AXE", ""))
    if not axe.is_file():
        pytest.skip("needs axe-core: run by `make long SUITE=page`")
    visit = visit(server, color_scheme=scheme, **screen)
    if view in FILL:
        FILL[view](visit)
    else:
        visit.page.click(f"#tab-{view}")
        visit.page.wait_for_timeout(1500)
    visit.page.evaluate(axe.read_text())
    result = visit.page.evaluate("axe.run()")["violations"]
    faults = [(fault["id"], fault["impact"], fault["nodes"][0]["html"]) for fault in result]
    assert not faults


@pytest.mark.parametrize("view", [*FILL, "dashboard", "plan"])
def test_phone_does_not_scroll_sideways(visit: Visiting, server: Any, view: str) -> None:
    visit = visit(server, **PHONE)
    if view in FILL:
        FILL[view](visit)
    else:
        visit.page.tap(f"#tab-{view}")
        visit.page.wait_for_timeout(1500)
    assert visit.page.evaluate("document.documentElement.scrollWidth") <= 360
    assert visit.page.evaluate("document.documentElement.scrollHeight") <= 740  # views scroll
    assert visit.page.evaluate(TOO_WIDE) == []


def test_sides_open_and_close_on_a_phone(visit: Visiting, server: Any) -> None:
    visit = visit(server, **PHONE)
    settings = visit.page.locator("#settings")
    assert settings.is_hidden()
    visit.page.tap(".head [aria-label=Settings]")
    assert settings.is_visible()
    visit.page.keyboard.press("Escape")
    assert settings.is_hidden()
    assert visit.page.evaluate("document.activeElement.getAttribute('aria-label')") == "Settings"


def test_nothing_kept_is_told_as_fits_the_mode(visit: Visiting, server: Any) -> None:
    visit = visit(server)
    assert visit.page.inner_text(".conversations") == "No chats yet."
    visit.page.click("[data-kind=text]")
    assert visit.page.inner_text(".conversations") == "No texts yet."


def test_on_a_phone_closing_and_deleting_look_different(visit: Visiting, server: Any) -> None:
    visit = visit(server, **PHONE)
    visit.tell([{"content": "yes"}], [{"content": "yes"}])
    visit.send("first")
    for side in (".head [aria-label=Conversations]", ".sidebar .primary"):
        visit.page.tap(side)
    visit.send("second")
    visit.page.tap(".head [aria-label=Conversations]")
    buttons = visit.page.locator(".sidebar .icon")
    shapes = buttons.evaluate_all("all => all.map((one) => one.querySelector('path').outerHTML)")
    assert len(shapes) == 5  # to close, and to rename and delete two conversations
    assert len({*shapes}) == 3
    opacity = "all => all.map((one) => getComputedStyle(one).opacity)"
    opacities = visit.page.locator(".sidebar .acts").evaluate_all(opacity)
    assert opacities == ["1", "1"]  # no finger hovers over them
    visit.page.tap("[aria-label='Delete “first”']")
    assert visit.page.locator(".conversations .open").all_inner_texts() == ["second"]


def test_a_touched_token_tells_of_itself_in_whole_words(visit: Visiting, server: Any) -> None:
    visit = visit(server, **PHONE)
    words = [" a", " telecommunications", " of", " a", " internationalization", " it", "."]
    stream = "".join(
        f"data: {json.dumps(_likely(words, index))}\n\n" for index in range(len(words))
    )
    visit.page.route(
        "**/v1/chat/completions",
        lambda route: route.fulfill(
            content_type="text/event-stream", body=stream + "data: [DONE]\n\n"
        ),
    )
    visit.send("hello")
    card = visit.page.locator(".reply .token-card")
    for word_index, word in enumerate(words):
        visit.page.locator(".reply .token").nth(word_index).tap()
        assert card.is_visible()
        assert card.locator("p code").inner_text() == word.replace(" ", "␣")
        assert set(card.locator("code, p span").evaluate_all(NUM_LINES)) == {1}
        box = card.bounding_box()
        assert box["x"] >= 0
        assert box["x"] + box["width"] <= 360
    visit.page.tap(".head .kinds")
    visit.page.focus("#message")
    assert card.is_hidden()


def _likely(words: list[str], index: int) -> dict[str, Any]:
    """Return the chunk of a stream that has one of the words, with all as what else might be."""
    tokens: list[dict[str, Any]] = [
        {"token": word, "bytes": [*word.encode()], "logprob": -1.5} for word in words
    ]
    token_entry = {**tokens[index], "top_logprobs": tokens[:5]}
    delta = {"content": words[index]}
    return {"choices": [{"index": 0, "delta": delta, "logprobs": {"content": [token_entry]}}]}


def test_keyboard_alone_is_enough(visit: Visiting, server: Any) -> None:
    visit = visit(server)
    keyboard = visit.page.keyboard
    focused = "document.activeElement.id || document.activeElement.textContent"
    keyboard.press("Tab")
    assert visit.page.evaluate(focused) == "Skip to the content"
    keyboard.press("Tab")
    assert visit.page.evaluate(focused) == "tab-playground"
    keyboard.press("ArrowRight")
    assert visit.page.evaluate(focused) == "tab-dashboard"
    assert visit.page.locator("#view-dashboard").is_visible()
    assert visit.page.evaluate("location.hash") == "#dashboard"
    keyboard.press("ArrowLeft")
    assert visit.page.locator("#view-playground").is_visible()
    for _ in range(40):
        keyboard.press("Tab")
        if visit.page.evaluate(focused) == "message":
            break
    keyboard.type("One")
    keyboard.press("Shift+Enter")
    keyboard.type("two")
    assert visit.page.input_value("#message") == "One\ntwo"
    keyboard.press("Enter")
    visit.page.wait_for_selector(".send.stop")
    keyboard.press("Escape")
    visit.wait_answered()
    outline = "getComputedStyle(document.activeElement).outlineStyle"
    keyboard.press("Tab")
    assert visit.page.evaluate(outline) != "none"


def test_finished_answers_are_announced_once(visit: Visiting, server: Any) -> None:
    visit = visit(server)
    visit.set(max_tokens=20)
    visit.page.evaluate(LISTEN)
    visit.send("Hello.")
    visit.wait_for("said.length > 0")
    assert len(visit.page.evaluate("said")) == 1
    assert visit.page.get_attribute(".transcript", "aria-live") == "off"


def test_colours_follow_the_system_until_chosen(visit: Visiting, server: Any) -> None:
    visit = visit(server, color_scheme="dark")
    ground = "getComputedStyle(document.body).backgroundColor"
    dark = visit.page.evaluate(ground)
    visit.page.click("#theme")
    light = visit.page.evaluate(ground)
    assert dark != light
    visit.page.reload()
    assert visit.page.evaluate(ground) == light
    visit.page.click("#theme")
    assert visit.page.evaluate(ground) == dark


def test_motion_is_left_out_where_it_is_unwanted(visit: Visiting, server: Any) -> None:
    visit = visit(server, reduced_motion="reduce")
    visit.set(max_tokens=900, extra='{"ignore_eos": true}')
    visit.send("Count to a hundred.", wait=False)
    visit.page.wait_for_selector(".busy .body > .markdown > *")
    assert visit.page.evaluate(ANIMATION) == "none"
    visit.page.keyboard.press("Escape")
    visit.wait_answered()


def test_page_recovers_from_a_restart(visit: Visiting, own_server: Any) -> None:
    allowed = (
        "ERR_CONNECTION_REFUSED",
        "ERR_INCOMPLETE_CHUNKED_ENCODING",
        "ERR_CONNECTION_RESET",
        "503",
        "ERR_EMPTY_RESPONSE",
    )
    visit = visit(own_server, allowed=allowed)
    visit.set(max_tokens=1000)
    visit.send("Count to a thousand in words.", wait=False)
    visit.wait_for("document.querySelector('.body > .markdown')?.textContent.length > 5")
    own_server.stop()
    visit.wait_answered()
    assert visit.page.locator(".reply .trouble").is_visible()
    visit.page.wait_for_selector("#lamp[data-state=gone]", timeout=15_000)
    visit.page.click("[aria-label='Regenerate']")
    visit.page.wait_for_selector(".reply .trouble:has-text('cannot be reached')")
    own_server.start()
    visit.page.wait_for_selector("#lamp[data-state=ok]", timeout=15_000)
    visit.set(max_tokens=5)
    visit.page.click("[aria-label='Regenerate']")
    visit.page.wait_for_selector(".figures summary:has-text('TTFT')", timeout=30_000)
    assert visit.page.locator(".reply .trouble").is_hidden()
