"""The playground in a browser, with a model that really answers."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    Visiting = Callable[..., Any]

SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 20},
        "age": {"type": "integer", "maximum": 99, "minimum": 1},
    },
    "required": ["name", "age"],
    "additionalProperties": False,
}
EVIL = """<img src=x onerror="window.hit=1"><script>window.hit=1</script>
[a](javascript:window.hit=1) ![b](https://x.example/y.png) **bold** <https://ok.example>"""
MARKDOWN = """# Title

1. one
2. two
   - inner

| a | b |
|---|--:|
| 1 | `x` |

> quote

```python
x = 1  # y
```
end_of_line stays"""
DELTAS: tuple[dict[str, Any], ...] = (
    {"role": "assistant", "content": ""},
    {"reasoning_content": "Rain is "},
    {"reasoning_content": "likely."},
    {"content": "Let me look."},
    {"tool_calls": [{"index": 0, "id": "c1", "function": {"name": "weather", "arguments": ""}}]},
    {"tool_calls": [{"index": 0, "function": {"arguments": '{"city": '}}]},
    {"tool_calls": [{"index": 0, "function": {"arguments": '"Rome"}'}}]},
)
COUNT = "Count from one to five hundred in words."


def test_answer_comes_in_pieces_with_its_figures(visit: Visiting, server: Any) -> None:
    visit = visit(server)
    visit.set(max_tokens=800)
    visit.send(COUNT, wait=False)
    text = "(document.querySelector('.body > .markdown')?.textContent.length ?? 0)"
    visit.wait_for(f"{text} > 5")
    early = visit.page.evaluate(text)
    assert visit.page.locator(".send.stop").is_visible()
    visit.wait_answered()
    assert visit.page.evaluate(text) > early
    figures = visit.page.inner_text(".figures summary")
    assert "TTFT" in figures
    assert "tokens/s" in figures
    visit.page.click(".figures summary")
    assert "of that queue time" in visit.page.inner_text(".figures table")


def test_speed_is_not_that_of_pieces_which_were_held_back(visit: Visiting, server: Any) -> None:
    visit = visit(server)
    timings = {"decode_tokens_per_s": 50.0}
    chunks = [{"choices": [{"index": 0, "delta": delta}]} for delta in DELTAS]
    end = {"index": 0, "delta": {}, "finish_reason": "tool_calls", "timings": timings}
    chunks += [{"choices": [end]}, {"choices": [], "usage": {"completion_tokens": 1000}}]
    body = "".join(f"data: {json.dumps(chunk)}\n\n" for chunk in chunks) + "data: [DONE]\n\n"
    stream = {"content_type": "text/event-stream", "body": body}
    visit.page.route("**/v1/chat/completions", lambda route: route.fulfill(**stream))
    visit.send(COUNT)
    assert "50.0 tokens/s" in visit.page.inner_text(".figures summary")


def test_escape_stops_and_the_answer_goes_on_from_there(visit: Visiting, server: Any) -> None:
    visit = visit(server)
    visit.set(temperature=0, max_tokens=900, extra='{"ignore_eos": true}')
    visit.send(COUNT, wait=False)
    visit.wait_for("document.querySelector('.body > .markdown')?.textContent.length > 20")
    visit.page.keyboard.press("Escape")
    visit.wait_answered()
    assert "stopped by you" in visit.page.inner_text(".figures summary")
    [begun] = visit.answers()
    visit.set(max_tokens=8)
    visit.page.click("[aria-label='Continue the answer']")
    visit.wait_answered()
    [longer] = visit.answers()
    assert "".join(longer.split()).startswith("".join(begun.split())[:20])
    assert visit.page.inner_text(".reply .of") == "2 of 2"


def test_answers_are_made_again_and_turned_through(visit: Visiting, server: Any) -> None:
    visit = visit(server)
    visit.set(max_tokens=12, seed=1)
    visit.send("Invent a name for a boat.")
    [first] = visit.answers()
    visit.set(seed=2)
    visit.page.click("[aria-label='Regenerate']")
    visit.wait_answered()
    [second] = visit.answers()
    assert first != second
    visit.page.click("[aria-label='Previous answer']")
    assert visit.answers() == [first]
    visit.page.click("[aria-label='Delete the answer']")
    assert visit.answers() == [second]
    visit.page.click("#toasts button")
    assert visit.answers() == [first]


def test_edited_message_goes_on_from_there(visit: Visiting, server: Any) -> None:
    visit = visit(server)
    visit.set(max_tokens=6)
    for text in ("First message.", "Second message."):
        visit.send(text)
    visit.page.click("[aria-label='Edit the message and continue from there'] >> nth=0")
    visit.page.fill(".editor textarea", "Another message.")
    visit.page.press(".editor textarea", "Enter")
    visit.wait_answered()
    assert visit.page.locator(".prompt-text").all_inner_texts() == ["Another message."]
    assert len(visit.answers()) == 1
    visit.page.click("#toasts button")
    assert visit.page.locator(".prompt-text").all_inner_texts() == [
        "First message.",
        "Second message.",
    ]


def test_edited_answer_is_what_the_model_reads(visit: Visiting, server: Any) -> None:
    visit = visit(server)
    visit.set(max_tokens=4, temperature=0)
    visit.send("Hello.")
    visit.page.click("[aria-label='Edit the answer']")
    visit.page.fill(".editor textarea", "The word is fish.")
    visit.page.press(".editor textarea", "Enter")
    assert visit.answers() == ["The word is fish."]
    with visit.page.expect_request("**/v1/chat/completions") as sent:
        visit.send("Repeat it.")
    body = json.loads(sent.value.post_data)
    assert [message["content"] for message in body["messages"]] == [
        "Hello.",
        "The word is fish.",
        "Repeat it.",
    ]


def test_two_settings_answer_side_by_side(visit: Visiting, server: Any) -> None:
    visit = visit(server)
    visit.set(max_tokens=60, temperature=0, extra='{"ignore_eos": true}')
    visit.page.click("text=Side by side")
    visit.page.click("#column-B")
    assert visit.page.input_value("#setting-temperature") == "0"  # it begins as A is
    visit.set(max_tokens=5)
    visit.send(COUNT, wait=False)
    visit.wait_for("document.querySelectorAll('.reply.busy').length === 2")
    visit.wait_answered()
    left, right = visit.answers()
    assert left.startswith(right[:5])
    assert len(left) > len(right)
    figures = visit.page.locator(".figures summary").all_inner_texts()
    assert "60\u202ftokens" in figures[0]
    assert "5\u202ftokens" in figures[1]


def test_answer_keeps_to_a_schema(visit: Visiting, server: Any) -> None:
    visit = visit(server)
    visit.set(
        max_tokens=100, temperature=1, form="json_schema", form_json_schema=json.dumps(SCHEMA)
    )
    visit.page.click("button.small:has-text('Check')")
    visit.page.wait_for_selector(".verdict[data-kind=right]")
    visit.send("Describe Anna.")
    [text] = visit.answers()
    assert set(json.loads(text)) == {"name", "age"}
    assert "valid JSON" in visit.page.inner_text(".figures summary")


def test_refusals_are_sentences(visit: Visiting, server: Any) -> None:
    visit = visit(server, allowed=("400 (Bad Request)",))
    visit.set(form="json_schema", form_json_schema='{"not": {}}')
    visit.page.click("button.small:has-text('Check')")
    visit.page.wait_for_selector(".verdict[data-kind=wrong]:has-text('not')")
    visit.set(form_json_schema='{\n  "type": }')
    assert "line 2" in visit.page.inner_text(".verdict")
    visit.set(form="", temperature=7)
    visit.send("Hello.")
    assert visit.page.inner_text(".reply .trouble") == "Temperature must be at most 2."
    visit.set(temperature=1, extra='{"seed": "one"}')
    visit.page.click("[aria-label='Regenerate']")
    visit.page.wait_for_selector(".reply .trouble:has-text('seed')")


def test_refusal_of_several_answers_is_told_once(visit: Visiting, server: Any) -> None:
    visit = visit(server, allowed=("400 (Bad Request)",))
    visit.set(n=3, extra='{"seed": "one"}')
    visit.send("Hello.")
    assert "seed" in visit.page.inner_text(".reply .trouble")
    assert "of 3" not in visit.page.inner_text(".reply .tools")
    assert visit.page.locator(".reply .figures").count() == 0  # of figures, where there are none


def test_verdict_is_where_it_is_seen(visit: Visiting, server: Any) -> None:
    visit = visit(server, viewport={"width": 1280, "height": 800})
    visit.set(form="json_schema", form_json_schema=json.dumps(SCHEMA))
    visit.page.click("button.small:has-text('Check')")
    visit.page.wait_for_selector(".verdict[data-kind=right]")
    box = visit.page.locator("#verdict-form_json_schema").bounding_box()
    assert box["y"] + box["height"] <= 800


def test_request_can_be_taken_along(visit: Visiting, server: Any) -> None:
    visit = visit(server)
    visit.set(max_tokens=5, min_p="0.1")
    visit.page.fill("#message", 'It\'s "quoted" $HOME')
    visit.page.click("text=Code")
    assert "It'\\''s" in visit.page.inner_text("dialog pre >> nth=0")
    visit.page.keyboard.press("ArrowRight")
    visit.page.click("dialog [role=tab]:has-text('Python')")
    program = visit.page.inner_text("dialog [role=tabpanel]:not([hidden]) pre")
    compile(program, "program", "exec")
    assert 'extra_body={"min_p": 0.1' in program
    visit.page.keyboard.press("Escape")
    visit.page.wait_for_selector("dialog", state="detached")


def test_conversations_are_kept_and_travel(visit: Visiting, server: Any, tmp_path: Path) -> None:
    visit = visit(server)
    visit.set(max_tokens=5, temperature="0.3")
    visit.send("Remember me.")
    before = visit.answers()
    visit.page.reload()
    visit.page.click(".conversations .open")
    assert visit.answers() == before
    assert visit.page.input_value("#setting-temperature") == "0.3"
    with visit.page.expect_download() as download:
        visit.page.click("text=Export")
    file = tmp_path / "kept.json"
    download.value.save_as(file)
    visit.page.click("[aria-label^='Delete “Remember']")
    assert visit.page.locator(".conversations .open").count() == 0
    visit.page.set_input_files("input[type=file]", file)
    visit.page.wait_for_selector(".conversations .open")
    assert visit.answers() == before
    visit.page.set_input_files(
        "input[type=file]", {"name": "x.json", "mimeType": "application/json", "buffer": b"{}"}
    )
    visit.page.wait_for_selector("#toasts:has-text('no conversations')")


def test_old_conversations_give_way(visit: Visiting, server: Any) -> None:
    visit = visit(server)
    conversations = [
        {"id": str(i), "turns": [{"prompt": f"{i} " + "x" * 100_000, "replies": []}]}
        for i in range(80)
    ]
    body = {"format": "twostroke-conversations-1", "conversations": conversations}
    file = {"name": "x.json", "mimeType": "application/json", "buffer": json.dumps(body).encode()}
    visit.page.set_input_files("input[type=file]", file)
    visit.page.wait_for_selector("#toasts:has-text('80 conversations')")
    assert visit.page.locator(".conversations .open").count() == 60
    assert visit.page.evaluate("localStorage.getItem('twostroke.conversations').length") < 3_000_001


def test_what_a_model_writes_is_never_markup(visit: Visiting, server: Any) -> None:
    visit = visit(server)
    visit.set(max_tokens=5)
    visit.send("Hello.")
    visit.page.click("[aria-label='Edit the answer']")
    visit.page.fill(".editor textarea", EVIL)
    visit.page.press(".editor textarea", "Enter")
    answer = visit.page.locator(".body > .markdown")
    assert "<img src=x" in answer.inner_text()
    assert answer.locator("img, script").count() == 0
    assert answer.locator("strong").inner_text() == "bold"
    hrefs = [link.get_attribute("href") for link in answer.locator("a").element_handles()]
    assert hrefs == ["https://x.example/y.png", "https://ok.example"]
    assert visit.page.evaluate("window.hit") is None


def test_markdown_is_drawn(visit: Visiting, server: Any) -> None:
    visit = visit(server)
    visit.set(max_tokens=5)
    visit.send("Hello.")
    visit.page.click("[aria-label='Edit the answer']")
    visit.page.fill(".editor textarea", MARKDOWN)
    visit.page.press(".editor textarea", "Enter")
    answer = visit.page.locator(".body > .markdown")
    for part, count in {
        "ol > li": 2,
        "ol ul > li": 1,
        "table tr": 2,
        "td code": 1,
        "blockquote": 1,
        "pre": 1,
        "em": 0,
        ".hl-comment": 1,
    }.items():
        assert answer.locator(part).count() == count, part


def test_words_in_a_table_stay_whole_on_a_phone(visit: Visiting, server: Any) -> None:
    visit = visit(server, viewport={"width": 390, "height": 844})
    heads = ["Planet", "Diameter in kilometres", "Distance from the sun", "Moons"]
    cells = ["Mercury", "4879", "57.9 million kilometres", "0"]
    rows = [heads, ["---"] * 4, cells]
    visit.tell([{"content": "\n".join(f"| {' | '.join(row)} |" for row in rows)}])
    visit.send("Hello.")
    lines = """[...document.querySelectorAll('.body :is(th, td):first-child')].map((cell) => {
        const range = document.createRange();
        range.selectNodeContents(cell);
        return range.getClientRects().length;
    })"""
    assert visit.page.evaluate(lines) == [1, 1]


def test_reasoning_is_folded_and_calls_are_shown(visit: Visiting, server: Any) -> None:
    visit = visit(server)
    visit.tell(list(DELTAS), [{"content": "It will."}])
    visit.send("Will it rain in Rome?")
    thoughts = visit.page.locator(".thoughts")
    assert thoughts.get_attribute("open") is None
    assert "Rain" not in thoughts.inner_text()
    thoughts.locator("summary").click()
    assert "Rain is likely." in thoughts.inner_text()
    call = visit.page.locator(".call").inner_text()
    assert "Calls weather" in call
    assert '"city": "Rome"' in call
    assert "calls a tool" in visit.page.inner_text(".figures summary")
    with visit.page.expect_request("**/v1/chat/completions") as sent:
        visit.send("And now?")
    messages = json.loads(sent.value.post_data)["messages"]
    assert [message["role"] for message in messages] == ["user", "assistant", "user"]


def test_escape_stops_an_answer_to_an_example(visit: Visiting, server: Any) -> None:
    visit = visit(server)
    visit.set(max_tokens=900, extra='{"ignore_eos": true}')
    visit.page.click(".welcome li button >> nth=0")
    visit.wait_for("document.querySelector('.body > .markdown')?.textContent.length > 20")
    visit.page.keyboard.press("Escape")
    visit.wait_answered()
    assert "stopped by you" in visit.page.inner_text(".figures summary")


def test_escape_stops_wherever_the_focus_is(visit: Visiting, server: Any) -> None:
    visit = visit(server)
    visit.set(max_tokens=900, extra='{"ignore_eos": true}')
    visit.send(COUNT, wait=False)
    visit.wait_for("document.querySelector('.body > .markdown')?.textContent.length > 20")
    visit.page.evaluate("document.activeElement.blur()")
    visit.page.keyboard.press("Escape")
    visit.wait_answered()
    assert "stopped by you" in visit.page.inner_text(".figures summary")


def test_a_message_written_during_an_answer_is_sent_after_it(visit: Visiting, server: Any) -> None:
    visit = visit(server)
    visit.set(max_tokens=60, temperature=0, extra='{"ignore_eos": true}')
    visit.send(COUNT, wait=False)
    visit.page.wait_for_selector(".send.stop")
    visit.send("And then?", wait=False)
    assert "Sent after this answer: And then?" in visit.page.inner_text(".waiting")
    assert visit.page.input_value("#message") == ""
    visit.wait_for("document.querySelectorAll('.prompt-text').length === 2")
    visit.wait_answered()
    assert visit.page.locator(".prompt-text").all_inner_texts() == [COUNT, "And then?"]
    assert not visit.page.locator(".waiting").is_visible()


def test_a_message_that_waits_is_not_sent_after_an_answer_that_was_stopped(
    visit: Visiting, server: Any
) -> None:
    visit = visit(server)
    visit.set(max_tokens=900, extra='{"ignore_eos": true}')
    visit.send(COUNT, wait=False)
    visit.wait_for("document.querySelector('.body > .markdown')?.textContent.length > 5")
    visit.send("And then?", wait=False)
    visit.page.keyboard.press("Escape")
    visit.wait_answered()
    assert visit.page.input_value("#message") == "And then?"
    assert visit.page.locator(".prompt-text").all_inner_texts() == [COUNT]


def test_a_reload_keeps_the_open_chat_and_the_message_that_is_written(
    visit: Visiting, server: Any
) -> None:
    visit = visit(server)
    visit.set(max_tokens=5)
    visit.send("The first chat.")
    visit.page.click("nav.sidebar .primary")
    visit.set(max_tokens=900, extra='{"ignore_eos": true}')
    visit.send("The second chat.", wait=False)
    visit.wait_for("document.querySelector('.body > .markdown')?.textContent.length > 5")
    visit.page.fill("#message", "Half a message")
    visit.page.reload()
    visit.page.wait_for_selector("#lamp[data-state=ok]")
    assert visit.page.locator(".prompt-text").all_inner_texts() == ["The second chat."]
    assert visit.page.input_value("#message") == "Half a message"
    assert visit.answers() != [""]  # what had come of the answer
    assert visit.page.locator(".conversations li").count() == 2


def test_a_chat_is_renamed_and_found_by_its_name_and_its_words(
    visit: Visiting, server: Any
) -> None:
    visit = visit(server)
    visit.set(max_tokens=3)
    visit.send("Tell me of whales.")
    visit.page.click("nav.sidebar .primary")
    visit.send("Tell me of rockets.")
    visit.page.hover(".conversations li >> nth=1")
    visit.page.click("[aria-label='Rename “Tell me of whales.”']")
    visit.page.fill(".conversations input", "Sea animals")
    visit.page.press(".conversations input", "Enter")
    titles = visit.page.locator(".conversations .open")
    assert titles.all_inner_texts() == ["Tell me of rockets.", "Sea animals"]
    for words, titles_found in (
        ("WHALES", ["Sea animals"]),
        ("animals sea", ["Sea animals"]),
        ("tell", ["Tell me of rockets.", "Sea animals"]),
        ("nowhere", []),
    ):
        visit.page.fill("[aria-label='Search conversations']", words)
        assert titles.all_inner_texts() == titles_found
    assert visit.page.inner_text(".conversations .none") == "No matches."
    visit.page.reload()
    visit.page.wait_for_selector("#lamp[data-state=ok]")
    assert titles.all_inner_texts() == ["Tell me of rockets.", "Sea animals"]


def test_attached_files_go_along_with_the_message(
    visit: Visiting, server: Any, tmp_path: Path
) -> None:
    visit = visit(server)
    code, picture = tmp_path / "code.py", tmp_path / "picture.png"
    code.write_text("x = '```'\n")
    picture.write_bytes(b"\x89PNG\x00\xff")
    sent: list[dict[str, Any]] = []

    def note(route: Any) -> None:
        sent.append(route.request.post_data_json)
        route.continue_()

    visit.page.route("**/v1/chat/completions", note)
    visit.set(max_tokens=3)
    visit.page.set_input_files(".composer input[type=file]", [str(code), str(picture)])
    visit.page.wait_for_selector(".toast")
    assert visit.page.inner_text(".toast") == "picture.png is not a text file."
    assert visit.page.locator(".composer .file").all_inner_texts() == ["code.py\n10 characters"]
    visit.send("What is x?")
    message = "code.py:\n````\nx = '```'\n````\n\nWhat is x?"
    assert sent[0]["messages"] == [{"role": "user", "content": message}]
    assert visit.page.locator(".prompt .file span").all_inner_texts() == ["code.py"]
    assert visit.page.locator(".prompt-text").all_inner_texts() == ["What is x?"]
    visit.page.reload()
    visit.page.wait_for_selector("#lamp[data-state=ok]")
    visit.send("Are you sure?")
    assert sent[1]["messages"][0]["content"] == message
