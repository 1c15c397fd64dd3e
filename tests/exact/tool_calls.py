"""`make long SUITE=tool-calls`: how often a real model's calls of tools come back as calls.

Fifty prompts ask for what one of four functions does, each with and without a system prompt, and
the model may choose (`tool_choice` is `auto`). Every answer is read as the server reads it: as
calls, as text that looks like a call, or as other text. Text that looks like a call fails the run:
the client would show it to its user.

With `--template`, the model gets the template of another family and an example of its calls. With
`--choice required`, each answer without a call fails the run.
"""

from __future__ import annotations

import argparse
import sys
from collections import Counter
from typing import Any, Final

from support import family_templates
from support.byte_tokenizer import byte_metadata
from twostroke import LLM, SamplingParams
from twostroke.core.options import CacheOptions, EngineOptions
from twostroke.engine.chat.call_reader import CallBegin, TextPiece
from twostroke.engine.chat.conversation import Chat
from twostroke.engine.prompts import chat_of
from twostroke.model.tokenizer import from_gguf
from twostroke.server.protocols.common.tools import FunctionBody, to_tools

_SYSTEM: Final = "You are a helpful assistant of a travel office. Answer briefly."
# By function: its description, its arguments, and prompts that it answers.
_FUNCTIONS: Final[dict[str, tuple[str, dict[str, str], tuple[str, ...]]]] = {
    "get_weather": (
        "Get the weather of a city.",
        {"city": "string", "days": "integer"},
        (
            "What is the weather in Paris?",
            "Will it rain in Oslo tomorrow?",
            "How warm is it in Rome today?",
            "I need the forecast for Lima for 3 days.",
            "Do I need an umbrella in London?",
        ),
    ),
    "find_flights": (
        "Find flights between two cities.",
        {"origin": "string", "destination": "string", "date": "string"},
        (
            "Find flights from Berlin to Madrid on 2025-03-04.",
            "How can I fly from Tokyo to Sydney next Monday?",
            "Show me flights from Boston to Denver on May 3.",
            "Is there a flight from Vienna to Cairo on Friday?",
            "I want to fly from Dublin to Athens on 1 June.",
        ),
    ),
    "convert_currency": (
        "Convert an amount of money.",
        {"amount": "number", "source": "string", "target": "string"},
        (
            "How much is 100 USD in EUR?",
            "Convert 25.5 pounds to yen.",
            "What are 3000 rupees in dollars?",
            "Change 40 euros into Swiss francs.",
            "How many pesos do I get for 15 dollars?",
        ),
    ),
    "book_table": (
        "Book a table in a restaurant.",
        {"restaurant": "string", "people": "integer", "time": "string"},
        (
            "Book a table for 4 at Luigi's at 19:00.",
            "Reserve a table for two at The Ivy at 8 pm.",
            "I need a table for six people at Noma at 20:30.",
            "Please get us a table at Chez Paul for 3, noon.",
            "Table for 5 at Sakura at 18:15, please.",
        ),
    ),
    "get_time": (
        "Get the current time of a city.",
        {"city": "string"},
        (
            "What time is it in Tokyo?",
            "How late is it in New York now?",
            "Tell me the current time in Nairobi.",
            "What's the local time in Mumbai?",
            "Is it already morning in Sydney? Check the time.",
        ),
    ),
    "send_email": (
        "Send an e-mail.",
        {"to": "string", "subject": "string", "body": "string"},
        (
            "Send an email to ann@example.com with the subject Hi and say hello.",
            "Email bob@example.com that the meeting is at 3.",
            "Write to eve@example.com: subject Report, body The report is ready.",
            "Mail joe@example.com and thank him for the gift.",
            "Tell sue@example.com by email that I am late.",
        ),
    ),
    "search_web": (
        "Search the web.",
        {"query": "string"},
        (
            "Search the web for the best museums in Amsterdam.",
            "Look up the opening hours of the Louvre.",
            "Find out online who won the 2022 World Cup.",
            "Search for cheap hotels near Lisbon airport.",
            "Google the height of Mont Blanc for me.",
        ),
    ),
    "create_reminder": (
        "Create a reminder.",
        {"text": "string", "time": "string"},
        (
            "Remind me to call mom at 17:00.",
            "Set a reminder to buy milk tomorrow morning.",
            "Remind me at 9 to take my pills.",
            "Create a reminder: water the plants, Sunday 10:00.",
            "Please remind me of the dentist on Tuesday at 4 pm.",
        ),
    ),
    "run_query": (
        "Run a query on the database of orders.",
        {"sql": "string", "limit": "integer"},
        (
            "How many orders are in the database? Run a query.",
            "Run SELECT * FROM orders with a limit of 5.",
            "Get the ten newest orders from the database.",
            "Query the database for orders above 100 dollars.",
            "List the names of all customers in the database.",
        ),
    ),
    "play_music": (
        "Play music.",
        {"artist": "string", "song": "string"},
        (
            "Play Yesterday by the Beatles.",
            "Put on some music by Mozart.",
            "I want to hear Hello by Adele.",
            "Play a song by Queen.",
            "Start Thriller by Michael Jackson.",
        ),
    ),
}
_OFFERED: Final = 4
_CALLS: Final = ("calls", "calls without marks", "calls of another function")
_KINDS: Final = (*_CALLS, "looks like a call", "text", "cut")


def main() -> int:
    """Ask, print what came back, and return 0 if no text looks like a call."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="qwen2.5-coder-0.5b")
    parser.add_argument("--prompts", type=int, default=50)
    parser.add_argument("--tokens", type=int, default=160)
    parser.add_argument("--choice", choices=("auto", "required"), default="auto")
    parser.add_argument("--template", default="", help="a name in tests/support/family_templates")
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--show", action="store_true", help="print each answer that is no call")
    args = parser.parse_args()
    options = EngineOptions(
        cache=CacheOptions(context_length=2048), chat_template=_family_template(args.template)
    )
    with LLM(args.model, options) as llm:
        print(f"{args.model}, temperature {args.temperature:g}, {args.template or 'own template'}")
        results = [_answer_prompt(llm, system, args) for system in ("", _SYSTEM)]
    if args.choice == "required" and any(kinds["text"] for kinds in results):
        return 1
    return int(any(kinds["looks like a call"] for kinds in results))


def _family_template(name: str) -> str | None:
    """Return the template of a family, with an example of its calls beside the tools."""
    if not name:
        return None
    template: str = getattr(family_templates, name)
    tokenizer = from_gguf(byte_metadata() | {"tokenizer.chat_template": template})
    form = Chat(tokenizer).capabilities.form
    example = form.write([("find_user", '{"name": "John", "age": 7}')])
    tools_text = (
        f"{{{{ tools | tojson }}}}\nCall a function like this:\n{{% raw %}}{example}{{% endraw %}}"
    )
    return template.replace("{{ tools | tojson }}", tools_text)


def _answer_prompt(llm: LLM, system: str, args: argparse.Namespace) -> Counter[str]:
    """Return how many answers are of each kind, and print it."""
    card = llm.engine.card
    turns, wanted_names = [], []
    prompts = [(name, text) for name, (_, _, texts) in _FUNCTIONS.items() for text in texts]
    for name, text in prompts[:: max(1, len(prompts) // args.prompts)][: args.prompts]:
        is_forced = args.choice == "required"
        tools = to_tools(_offered(name), args.choice, parallel=False if is_forced else None)
        assert tools is not None
        messages = [{"role": "system", "content": system}] if system else []
        prompt = chat_of(card).render(
            [*messages, {"role": "user", "content": text}], tools.prompt_tools
        )
        turns.append(chat_of(card).prepare_answer(prompt, tools))
        wanted_names.append(name)
    params = SamplingParams(max_tokens=args.tokens, temperature=args.temperature, seed=0)
    answers = llm.generate(
        [card.tokenizer.encode_prompt(turn.prompt) for turn in turns],
        [turn.constrained(params) for turn in turns],
    )
    kinds = Counter[str]()
    for turn, name, [answer] in zip(turns, wanted_names, answers, strict=True):
        reader = turn.answer_format().reader(card.tokenizer)
        pieces = reader.take(answer)
        names = [piece.name for piece in pieces if isinstance(piece, CallBegin)]
        text = "".join(piece.text for piece in pieces if isinstance(piece, TextPiece))
        kind = _kind(name, names, text, is_whole=reader.has_whole_calls)
        if kind == "calls" and turn.answer_format().form.mark not in answer.text:
            kind = "calls without marks"
        kinds[kind] += 1
        if args.show and kind != "calls":
            print(f"  {kind}, {name}: {answer.text!r}")
    print(f"  {'with' if system else 'without'} a system prompt, of {len(turns)}:", end=" ")
    print(", ".join(f"{kinds[kind]} {kind}" for kind in _KINDS if kinds[kind]))
    return kinds


def _kind(wanted_name: str, names: list[str], text: str, *, is_whole: bool) -> str:
    if any(f'"{name}"' in text and "{" in text for name in _FUNCTIONS):
        return "looks like a call"
    if not names:
        return "text"
    if not is_whole:
        return "cut"
    return "calls" if wanted_name in names else "calls of another function"


def _offered(name: str) -> list[FunctionBody]:
    """Return the function and those after it in the table."""
    names = [*_FUNCTIONS]
    first = names.index(name)
    return [_body(names[(first + index) % len(names)]) for index in range(_OFFERED)]


def _body(name: str) -> FunctionBody:
    description, arguments, _ = _FUNCTIONS[name]
    properties: dict[str, Any] = {key: {"type": kind} for key, kind in arguments.items()}
    schema = {"type": "object", "properties": properties, "required": [*properties][:1]}
    return FunctionBody(name, description, schema)


if __name__ == "__main__":
    sys.exit(main())
