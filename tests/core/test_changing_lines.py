"""Lines of agents' prompts that change with each request: which are removed, and which stay."""

from __future__ import annotations

import json
from typing import Any

import pytest

from twostroke.core.changing_lines import without_changing_json_lines, without_changing_lines

CHANGING = [
    ("x-anthropic-billing-header: cc_version=2.1.37; cc_entrypoint=cli; cch=fa690;\n", "billing"),
    ("x-anthropic-billing-header: cc_version=2.1.37; cch=fa690;", "billing"),  # a part by itself
    ("x-anthropic-billing-header: cc_version=2\n", "billing"),
    ("Today's date: 2026-11-30\n", "date"),
    ("  Today’s date is Mon Nov 30 2026\n", "date"),
    ("- **Current date**: Monday, June 9, 2026\n", "date"),
    ("The current date and time is 3:04 PM.\n", "date"),
    ("Current date and time in ISO format: 2026-06-11T00:44:42.714237\n", "date"),
    ("# Current Time\n2026-11-30 12:00 (UTC)\n", "date"),
    ("<CURRENT_DATETIME>\n2026-06-11T00:44\n</CURRENT_DATETIME>\n", "date"),
    ("  <current_date>2026-11-30</current_date>\n", "date"),
    ("Today's date is 9. Juni 2026.\n", "date"),
    ("current time: Tuesday, 5 PM\n", "date"),
    ("The current time is 3:04 PM in the user's time zone.\n", "date"),
    ("Current time: Tue. Jun 9 2026, 3:04 p.m. CET\n", "date"),
    ("# Current Time\n5/5/2025, 3:04:05 PM (Europe/Berlin, UTC+2:00)\n", "date"),
    ("<timestamp>1780000000</timestamp>\n", "date"),
    ("Session ID: 3f2b1c00-1111\n", "id"),
    ("request_id=abcdef123\n", "id"),
    ("<session_id>abcdef123</session_id>\n", "id"),
]
STABLE = [
    "The current date is used by the tool, and never shown.\n",
    "Ask for today's date if it matters.\n",
    "Say the session id: it is in the header.\n",
    "A session id: x\n",
    "Never write x-anthropic-billing-header: into a file.\n",
    "timestamp: 5\n",
    "Current directory: /src/2026\n",
    # Instructions about dates and ids are no dates and ids.
    "Today's date is important. Count to 10 in each answer.\n",
    "The current time complexity is O(n^2): lower it.\n",
    "Current date format: YYYY-MM-DD, such as 2026-11-30\n",
    "Current date: see line 3\n",
    "Today's date is 2026-11-30. Always answer in French.\n",
    "Current time: 12:00 (UTC); answer in «Répondez» first.\n",
    "Current time: unknown\n2026 files follow.\n",
    "Current time is 5 pm in the story; keep it.\n",
    "The current time is 5 pm in our story, keep to it.\n",
    "## Current time\nIf the user asks for 5 things, list them.\n",
    "<timestamp>int64</timestamp>\n",
    "thread_id: integer\n",
    "Session ID: string\n2026 sessions\n",
    "request id: must_be_returned\n",
]


@pytest.mark.parametrize(("line", "kind"), CHANGING)
def test_a_line_that_changes_is_removed_from_instructions(line: str, kind: str) -> None:
    for before in ("", "Be brief.\n", "a" * 300 + "\n"):
        text = f"{before}{line}You are an agent.\n"
        for role in ("system", "developer"):
            [message], kinds = without_changing_lines([{"role": role, "content": text}])
            assert message["content"] == f"{before}You are an agent.\n"
            assert kinds == (kind,)
        parts = [{"type": "text", "text": text}]
        [message], _ = without_changing_lines([{"role": "system", "content": parts}])
        assert message["content"][0]["text"] == f"{before}You are an agent.\n"
        assert json.loads(without_changing_json_lines(json.dumps(text).encode())) == (
            f"{before}You are an agent.\n"
        )


@pytest.mark.parametrize("line", STABLE)
def test_other_lines_stay(line: str) -> None:
    messages = [{"role": "system", "content": f"A\n{line}B\n"}]
    assert without_changing_lines(messages) == (messages, ())
    body = json.dumps(messages).encode()
    assert without_changing_json_lines(body) == body


def test_only_blocks_of_the_first_messages_of_a_user_are_changed() -> None:
    block = "<env>\nDirectory: /src\nToday's date: 2026-11-30\n</env>"
    stable = "<env>\nDirectory: /src\n</env>"
    date = "Today's date: 2026-11-30\n"
    messages: list[dict[str, Any]] = [
        {"role": "user", "content": f"{date}{block}\n{block}<env>{date}"},
        {"role": "user", "content": [{"type": "text", "text": block}, {"type": "image"}]},
        {"role": "assistant", "content": date},
        {"role": "user", "content": block},
        {"role": "tool", "content": date},
        {"role": "system", "content": None},
    ]
    result, kinds = without_changing_lines(messages)
    assert kinds == ("date",)
    assert result[0]["content"] == f"{date}{stable}\n{stable}<env>{date}"
    assert result[1]["content"] == [{"type": "text", "text": stable}, {"type": "image"}]
    assert result[2:] == messages[2:]


def test_each_kind_is_told_once() -> None:
    text = "".join(line for line, _ in CHANGING if line.endswith("\n"))
    [message], kinds = without_changing_lines([{"role": "system", "content": text}])
    assert message["content"] == ""
    assert sorted(kinds) == ["billing", "date", "id"]
