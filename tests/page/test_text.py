"""Texts that the model continues where they stand, without a chat template."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from collections.abc import Callable

    Visiting = Callable[..., Any]

BEGIN = "One, two, three, four,"
WRITTEN = "[...document.querySelectorAll('.written')].map((mark) => mark.textContent).join('')"
FITS = "(area => area.scrollHeight <= area.clientHeight)(document.querySelector('#text'))"


def _body(sent: Any) -> dict[str, Any]:
    body: dict[str, Any] = json.loads(sent.value.post_data)
    return body


def _able(visit: Any, **abilities: bool) -> None:
    """Have the server say that its model can do this, and ask it again."""
    model = {"id": "smollm2", "capabilities": abilities}
    visit.page.route("**/v1/models", lambda route: route.fulfill(json={"data": [model]}))
    visit.page.reload()
    visit.page.wait_for_selector("#lamp[data-state=ok]")


def _text(visit: Any) -> str:
    text: str = visit.page.input_value("#text")
    return text


def test_text_is_continued_in_place_and_marked(visit: Visiting, server: Any) -> None:
    visit = visit(server)
    visit.write(BEGIN)
    visit.set(max_tokens=8, temperature=0)
    with visit.page.expect_request("**/v1/completions") as sent:
        visit.continue_text()
    body = _body(sent)
    assert body["prompt"] == BEGIN
    assert "suffix" not in body
    first = _text(visit)
    assert first.startswith(BEGIN)
    assert visit.page.evaluate(WRITTEN) == first[len(BEGIN) :] != ""
    assert "tokens/s" in visit.page.inner_text(".text-figures summary")
    with visit.page.expect_request("**/v1/completions") as sent:
        visit.page.press("#text", "Control+Enter")
        visit.wait_continued()
    assert _body(sent)["prompt"] == first
    assert visit.page.evaluate(WRITTEN) == _text(visit)[len(BEGIN) :]
    assert visit.page.evaluate(FITS)


def test_continuations_are_made_again_and_taken_back(visit: Visiting, server: Any) -> None:
    visit = visit(server)
    visit.write("The name of the boat was")
    visit.set(max_tokens=8, seed=1)
    visit.continue_text()
    first = _text(visit)
    visit.set(seed=2)
    visit.page.click("[aria-label='Regenerate']")
    visit.wait_continued()
    second = _text(visit)
    assert first != second
    assert visit.page.inner_text(".text-foot .of") == "2 of 2"
    visit.page.click("[aria-label='Previous continuation']")
    assert _text(visit) == first
    visit.page.click("[aria-label='Delete the continuation']")
    assert _text(visit) == second
    visit.page.click("#toasts button")
    assert _text(visit) == first
    visit.page.fill("#text", f"{first} And")  # whoever writes behind it takes it
    assert visit.page.evaluate(WRITTEN) == first.removeprefix("The name of the boat was")
    visit.page.fill("#text", first)
    visit.page.click("[aria-label='Remove the model’s last text']")
    assert _text(visit) == "The name of the boat was"


def test_escape_stops_the_continuation(visit: Visiting, server: Any) -> None:
    visit = visit(server)
    visit.write(BEGIN)
    visit.set(max_tokens=2000, extra='{"ignore_eos": true}')
    visit.page.click(".continue")
    visit.wait_for("document.querySelector('#text').value.length > 40")
    assert visit.page.evaluate("document.querySelector('#text').readOnly")
    visit.page.keyboard.press("Escape")
    visit.wait_continued()
    assert "stopped by you" in visit.page.inner_text(".text-figures summary")
    assert not visit.page.evaluate("document.querySelector('#text').readOnly")


def test_tokens_are_shaded_and_tell_what_else_might_have_been(visit: Visiting, server: Any) -> None:
    visit = visit(server)
    visit.write("🎉 In the harbour")
    visit.set(max_tokens=24, temperature=1, seed=5, logprobs=True)
    visit.continue_text()
    joined = "[...document.querySelectorAll('.pad .token')].map((one) => one.textContent).join('')"
    assert visit.page.evaluate(joined) == _text(visit).removeprefix("🎉 In the harbour")
    box = visit.page.locator(".pad .token").nth(3).bounding_box()
    visit.page.mouse.move(box["x"] + box["width"] / 2, box["y"] + box["height"] / 2)
    assert visit.page.locator(".pad .token-card li").count() >= 5
    visit.page.mouse.move(0, 0)
    assert visit.page.locator(".pad .token-card").is_hidden()
    visit.page.focus("#text")
    visit.page.keyboard.press("Control+End")
    visit.page.keyboard.press("ArrowLeft")
    assert visit.page.locator(".pad .token-card").is_visible()
    assert visit.page.locator(".pad .token.lit").count() == 1
    visit.continue_text()
    assert visit.page.evaluate(joined) == _text(visit).removeprefix("🎉 In the harbour")


def test_marks_move_with_edits(visit: Visiting, server: Any) -> None:
    visit = visit(server)
    visit.write(BEGIN)
    visit.set(max_tokens=8, temperature=0)
    visit.continue_text()
    written = visit.page.evaluate(WRITTEN)
    visit.page.focus("#text")
    visit.page.keyboard.press("Control+Home")
    visit.page.keyboard.type("So: ")
    assert _text(visit) == f"So: {BEGIN}{written}"
    assert visit.page.evaluate(WRITTEN) == written
    assert visit.page.locator("[aria-label='Regenerate']").is_visible()
    visit.page.keyboard.press("Control+End")
    visit.page.keyboard.press("ArrowLeft")
    visit.page.keyboard.press("Backspace")
    visit.page.keyboard.type("XY")
    assert visit.page.evaluate(WRITTEN) == written[:-2] + written[-1]
    assert visit.page.locator(".written >> nth=0").inner_text().strip() == written[:-2].strip()


def test_text_and_marks_are_kept(visit: Visiting, server: Any) -> None:
    visit = visit(server)
    visit.write(BEGIN)
    visit.set(max_tokens=8)
    visit.continue_text()
    visit.page.fill("#text", f"{_text(visit)} the end")
    before, written = _text(visit), visit.page.evaluate(WRITTEN)
    visit.page.reload()
    assert _text(visit) == before  # what was open is open again
    visit.page.click("[data-kind=chat]")
    assert visit.page.locator("#text").is_hidden()
    visit.page.click(".conversations .open")
    assert _text(visit) == before
    assert visit.page.evaluate(WRITTEN) == written
    assert visit.page.input_value("#setting-max_tokens") == "8"
    visit.page.click("[data-kind=chat]")
    assert visit.page.locator(".welcome").is_visible()
    visit.page.click("[data-kind=text]")
    assert _text(visit) == before


def test_two_settings_continue_one_text(visit: Visiting, server: Any) -> None:
    visit = visit(server)
    visit.write(BEGIN)
    visit.set(max_tokens=12, temperature=0, extra='{"ignore_eos": true}')
    visit.page.click("text=Side by side")
    visit.page.click("#column-B")
    visit.set(max_tokens=4)
    visit.continue_text()
    left, right = visit.answers()
    assert left.startswith(right)
    assert len(left) > len(right)
    assert _text(visit) == BEGIN
    visit.page.click("[aria-label='Answer B'] >> text=Take")
    assert _text(visit).rstrip() == f"{BEGIN} {right.strip()}"
    visit.page.click("#toasts button")
    assert _text(visit) == BEGIN
    assert len(visit.answers()) == 2
    with visit.page.expect_request("**/v1/completions") as sent:
        visit.page.click("[aria-label='Answer B'] [aria-label='Continue the answer']")
        visit.wait_continued()
    assert _body(sent)["prompt"].rstrip() == f"{BEGIN} {right.strip()}"


def test_gap_is_offered_where_the_model_fills_it(visit: Visiting, server: Any) -> None:
    visit = visit(server, allowed=("400 (Bad Request)",))
    visit.write("def f():")
    assert visit.page.locator("#suffix").is_hidden()
    _able(visit, completion_chat=True, completion_fim=True)
    visit.write("def f():")
    visit.page.fill("#suffix", "\n\nf()")
    assert visit.page.inner_text(".continue") == "Fill the gap"
    with visit.page.expect_request("**/v1/completions") as sent:
        visit.continue_text()
    body = _body(sent)
    assert (body["prompt"], body["suffix"]) == ("def f():", "\n\nf()")
    # The server knows better than what it was made to say: its sentence is shown.
    assert "has no tokens for filling in the middle" in visit.page.inner_text(".text .trouble")


def test_model_fills_a_gap(visit: Visiting, gap_server: Any) -> None:
    visit = visit(gap_server)
    visit.write("def area(radius):\n    ")
    visit.set(max_tokens=16, temperature=0, logprobs=True)
    visit.page.fill("#suffix", "\n\nprint(area(2))\n")
    visit.continue_text()
    assert "return" in visit.page.evaluate(WRITTEN)
    assert visit.page.locator(".text .trouble").is_hidden()


def test_model_without_a_template_begins_with_texts(visit: Visiting, server: Any) -> None:
    visit = visit(server)
    _able(visit, completion_chat=False, completion_fim=False)
    visit.page.wait_for_selector("#text")
    assert visit.page.get_attribute("[data-kind=text]", "aria-pressed") == "true"


@pytest.mark.parametrize(
    ("text", "temperature", "sentence"),
    [
        ("", "1", "Write some text first: the model continues it."),
        ("Hello", "7", "Temperature must be at most 2."),
    ],
)
def test_what_cannot_be_sent_is_said(
    visit: Visiting, server: Any, text: str, temperature: str, sentence: str
) -> None:
    visit = visit(server)
    visit.write(text)
    visit.set(temperature=temperature)
    visit.page.click(".continue")
    assert visit.page.inner_text(".text .trouble") == sentence
    assert _text(visit) == text


def test_request_for_a_text_can_be_taken_along(visit: Visiting, server: Any) -> None:
    visit = visit(server)
    visit.write(BEGIN)
    visit.set(logprobs=True)
    visit.page.click("text=Code")
    assert "/v1/completions" in visit.page.inner_text("dialog pre >> nth=0")
    visit.page.click("dialog [role=tab]:has-text('Python')")
    program = visit.page.inner_text("dialog [role=tabpanel]:not([hidden]) pre")
    compile(program, "program", "exec")
    assert "client.completions.create" in program
    assert "logprobs=5" in program
