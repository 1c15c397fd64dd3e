"""Tools in the playground: calls, results that people type, and what the model then reads."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable

    Visiting = Callable[..., Any]

CITY = {
    "type": "object",
    "properties": {"city": {"type": "string", "maxLength": 12}},
    "required": ["city"],
    "additionalProperties": False,
}
TOOLS = json.dumps([{"name": "weather", "parameters": CITY}])
FIRST = "[aria-label='Result of weather']"
SECOND = "[aria-label='Result of population']"
QUESTION = "What is it like in Rome?"


def _calls(*names: str) -> list[dict[str, Any]]:
    """Return the deltas of an answer that calls these, with their arguments in two pieces."""
    deltas: list[dict[str, Any]] = [{"content": "Let me look."}]
    for index, name in enumerate(names):
        begin = {"id": f"id-{name}", "function": {"name": name, "arguments": '{"city": '}}
        deltas.append({"tool_calls": [{"index": index, **begin}]})
        deltas.append({"tool_calls": [{"index": index, "function": {"arguments": '"Rome"}'}}]})
    return deltas


def _says(text: str) -> list[dict[str, Any]]:
    return [{"content": text}]


def _messages(sent: Any) -> list[dict[str, Any]]:
    messages: list[dict[str, Any]] = json.loads(sent.value.post_data)["messages"]
    return messages


def _wait_for_step(visit: Any, text: str) -> None:
    visit.page.wait_for_selector(f".next .body:has-text('{text}')")
    visit.wait_answered()


def test_model_calls_reads_the_result_and_answers(visit: Visiting, server: Any) -> None:
    visit = visit(server)
    visit.set(max_tokens=40, temperature=0, tools=TOOLS, tool_choice="required")
    visit.set(parallel_tool_calls=False)
    with visit.page.expect_request("**/v1/chat/completions") as sent:
        visit.send(QUESTION)
    assert json.loads(sent.value.post_data)["tool_choice"] == "required"
    call = visit.page.locator(".call")
    assert "Calls weather" in call.inner_text()
    visit.page.fill(FIRST, '{"celsius": 18}')
    with visit.page.expect_request("**/v1/chat/completions") as sent:
        visit.page.click("text=Send the result")
    visit.page.wait_for_selector(".next .figures")
    body = json.loads(sent.value.post_data)
    assert "tool_choice" not in body  # or it would have to call for ever
    user, call_message, result_message = body["messages"]
    [tool_call] = call_message["tool_calls"]
    assert user == {"role": "user", "content": QUESTION}
    assert tool_call["function"]["name"] == "weather"
    assert set(json.loads(tool_call["function"]["arguments"])) == {"city"}
    assert result_message == {
        "role": "tool",
        "tool_call_id": tool_call["id"],
        "content": '{"celsius": 18}',
    }
    assert visit.page.locator(".trouble:visible").count() == 0


def test_results_of_several_calls_go_with_their_ids(visit: Visiting, server: Any) -> None:
    visit = visit(server)
    visit.tell(_calls("weather", "population"), _says("Warm and full."), _says("Yes."))
    visit.send(QUESTION)
    visit.page.click("text=Send the results")
    assert "The result of weather is missing." in visit.page.inner_text(".results")
    visit.page.keyboard.type("18 degrees")
    visit.page.keyboard.press("Enter")  # on to the one that is still empty
    visit.page.keyboard.type("three")
    visit.page.keyboard.press("Shift+Enter")
    visit.page.keyboard.type("million")
    with visit.page.expect_request("**/v1/chat/completions") as sent:
        visit.page.keyboard.press("Enter")
    _wait_for_step(visit, "Warm and full.")
    _, call_message, *result_messages = _messages(sent)
    assert call_message["content"] == "Let me look."
    assert [call["id"] for call in call_message["tool_calls"]] == ["id-weather", "id-population"]
    assert {call["function"]["arguments"] for call in call_message["tool_calls"]} == {
        '{"city": "Rome"}'
    }
    assert [(message["tool_call_id"], message["content"]) for message in result_messages] == [
        ("id-weather", "18 degrees"),
        ("id-population", "three\nmillion"),
    ]
    with visit.page.expect_request("**/v1/chat/completions") as sent:
        visit.send("Is that all?")
    roles = [message["role"] for message in _messages(sent)]
    assert roles == ["user", "assistant", "tool", "tool", "assistant", "user"]


def test_other_results_are_another_way_on(visit: Visiting, server: Any) -> None:
    visit = visit(server)
    visit.tell(_calls("weather"), _says("Warm."), _says("Cold."), _says("Very cold."))
    visit.send(QUESTION)
    visit.page.fill(FIRST, "30")
    visit.page.press(FIRST, "Enter")
    _wait_for_step(visit, "Warm.")
    visit.page.click("text=Edit the result")
    assert visit.page.input_value(FIRST) == "30"
    visit.page.fill(FIRST, "-5")
    with visit.page.expect_request("**/v1/chat/completions") as sent:
        visit.page.press(FIRST, "Enter")
    _wait_for_step(visit, "Cold.")
    assert _messages(sent)[-1]["content"] == "-5"
    visit.page.click(".next [aria-label='Regenerate']")
    _wait_for_step(visit, "Very cold.")
    visit.page.click("[aria-label='Previous answer'] >> nth=0")  # that of the first step
    assert "30" in visit.page.inner_text(".call")
    assert "Warm." in visit.page.inner_text(".next")
    visit.page.click("text=Edit the result")
    visit.page.keyboard.press("Escape")
    assert visit.page.locator(FIRST).count() == 0


def test_whole_turns_are_kept_and_begin_anew_where_wanted(visit: Visiting, server: Any) -> None:
    visit = visit(server)
    second_calls = _calls("weather")
    visit.tell(_calls("weather"), _calls("population"), _says("All known."), second_calls)
    visit.send(QUESTION)
    visit.page.fill(FIRST, "18")
    visit.page.press(FIRST, "Enter")
    visit.page.fill(SECOND, "not sent yet")
    visit.page.wait_for_timeout(600)
    visit.page.reload()
    visit.page.click(".conversations .open")
    assert visit.page.input_value(SECOND) == "not sent yet"
    with visit.page.expect_request("**/v1/chat/completions") as sent:
        visit.page.press(SECOND, "Enter")
    _wait_for_step(visit, "All known.")
    ids = [message.get("tool_call_id") for message in _messages(sent)]
    assert ids == [None, None, "id-weather", None, "id-population"]
    visit.page.click("text=Code")
    assert "id-population" in visit.page.inner_text("dialog")
    visit.page.keyboard.press("Escape")
    with visit.page.expect_request("**/v1/chat/completions") as sent:
        visit.page.click("[aria-label='Regenerate'] >> nth=0")
    visit.page.wait_for_selector(FIRST)
    assert len(_messages(sent)) == 1
    assert visit.page.locator(".next .reply").count() == 0


def test_columns_have_calls_and_results_of_their_own(visit: Visiting, server: Any) -> None:
    visit = visit(server)
    visit.tell(_calls("weather"), _calls("weather"), _says("Only one."))
    visit.page.click("text=Side by side")
    visit.page.click("#column-B")
    visit.set(system="Be short.")
    visit.send(QUESTION)
    assert visit.page.locator(FIRST).count() == 2
    visit.page.fill(f"[aria-label='Answer B'] {FIRST}", "12")
    with visit.page.expect_request("**/v1/chat/completions") as sent:
        visit.page.press(f"[aria-label='Answer B'] {FIRST}", "Enter")
    _wait_for_step(visit, "Only one.")
    roles = [message["role"] for message in _messages(sent)]
    assert roles == ["system", "user", "assistant", "tool"]
    assert visit.page.locator("[aria-label='Answer A'] .next .reply").count() == 0
    assert visit.page.locator(f"[aria-label='Answer A'] {FIRST}").is_visible()


def test_wrong_tools_are_told_in_sentences(visit: Visiting, server: Any) -> None:
    visit = visit(server, allowed=("400 (Bad Request)",))
    visit.set(tools="[{]")
    verdict = visit.page.locator("#verdict-tools")
    assert "The list of tools is not JSON: look at line 1, column 3" in verdict.inner_text()
    visit.set(tools="[{}]")
    assert verdict.inner_text() == "Tool 1 needs a “name”."
    visit.set(tools='{"name": "f", "parameters": {"not": {}}, "strict": true}')
    visit.page.click(".panel details:has(#setting-tools) button:has-text('Check')")
    visit.page.wait_for_selector("#verdict-tools[data-kind=wrong]:has-text('parameters')")
    visit.page.click(".panel details:has(#setting-tools) button:has-text('Example')")
    visit.page.click(".panel details:has(#setting-tools) button:has-text('Check')")
    visit.page.wait_for_selector("#verdict-tools[data-kind=right]")
