"""Log-probabilities of an answer in a browser."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable

    Visiting = Callable[..., Any]


def test_tokens_tell_what_else_might_have_been(visit: Visiting, server: Any) -> None:
    visit = visit(server)
    visit.set(max_tokens=20, logprobs=True)
    visit.send("Why is the sky blue?")
    assert visit.page.locator(".token").count() >= 10
    visit.page.hover(".token >> nth=3")
    assert visit.page.locator(".token-card li").count() >= 5
    head, names = (visit.page.locator(f".token-card {part} > code") for part in ("p", "li"))
    assert names.first.bounding_box()["x"] == head.bounding_box()["x"]  # no list of Markdown
    visit.page.mouse.move(0, 0)
    assert visit.page.locator(".reply .token-card").is_hidden()
    visit.page.focus(".token >> nth=0")
    visit.page.keyboard.press("ArrowRight")
    assert visit.page.evaluate("document.activeElement.dataset.place") == "1"
    assert visit.page.locator(".reply .token-card").is_visible()


def test_tokens_of_an_answer_that_goes_on_follow_its_beginning(
    visit: Visiting, server: Any
) -> None:
    visit = visit(server)
    visit.set(max_tokens=6, temperature=0, extra='{"ignore_eos": true}')
    visit.send("Why is the sky blue?")
    [begun] = visit.answers()
    visit.set(logprobs=True)
    for number in (6, 12):  # of the beginning nothing is known
        visit.page.click("[aria-label='Continue the answer']")
        visit.wait_for(f"document.querySelectorAll('.reply .token').length >= {number - 1}")
        visit.wait_answered()
        text = visit.page.inner_text(".token-text")
        assert text.startswith(begun)
        assert len(text) > len(begun)


def test_characters_of_several_tokens_are_put_together(visit: Visiting, server: Any) -> None:
    visit = visit(server)
    visit.set(max_tokens=20, logprobs=True, form="regex", form_regex="🎉🦄𐍈!")
    visit.send("Celebrate.")
    assert visit.page.inner_text(".token-text") == "🎉🦄𐍈!"
    assert "�" not in visit.page.inner_text(".reply")


def test_markdown_stays_with_log_probabilities(visit: Visiting, server: Any) -> None:
    text = (
        "# Sky\n\nIt is **very** blue, `print(1)`:\n\n```python\nfor x in y:\n```\n\n* one\n* two"
    )
    visit = visit(server)
    visit.set(
        max_tokens=80,
        logprobs=True,
        form="regex",
        form_regex=re.escape(text).replace("\\\n", r"\n"),
    )
    visit.send("Why?")
    token_texts = visit.page.locator(".reply .token-text")
    for tag, words in {"strong": "very", "p code": "print(1)", "pre": "for x in y:"}.items():
        assert token_texts.locator(tag).inner_text() == words
    assert token_texts.locator("li").all_inner_texts() == ["one", "two"]
    assert token_texts.locator(".as-h1").inner_text() == "Sky"
    assert token_texts.locator("figcaption .token").count() == 0
    letters = "".join(token_texts.locator(".token").all_text_contents())
    assert "".join(letters.split()) == "SkyItisveryblue,print(1):forxiny:onetwo"
    strong = token_texts.locator("strong .token").first
    strong.hover()
    assert "ver" in visit.page.inner_text(".token-card:visible p code")
