"""Prompts that heads learn from by default: what the model answers to them is the lesson.

Subjects, tasks and passages are put together by a seeded generator, so that a few lists make many
thousands of prompts, in the kinds that a model is used for: questions and advice, code, prose to be
gone on with, passages to be quoted or rewritten.
"""

from __future__ import annotations

import ast
import importlib
import inspect
import random
from dataclasses import dataclass
from functools import cache
from textwrap import dedent
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

_SUBJECTS = (
    "volcanoes", "the human heart", "public libraries", "rainbows", "the printing press", "yoga",
    "electric cars", "coral reefs", "the Roman Empire", "compound interest", "photosynthesis",
    "video games", "growing tomatoes", "black holes", "the French Revolution", "job interviews",
    "coffee", "wolves", "solar panels", "the water cycle", "Mozart", "vaccines", "desert plants",
    "good sleep", "the stock market", "bridges", "dinosaurs", "remote work", "olive oil",
    "glaciers", "machine learning", "the Silk Road", "migraine", "running a marathon", "owls",
    "recycling", "the Eiffel Tower", "public speaking", "earthquakes", "knitting", "DNA",
    "Japanese gardens", "bank loans", "dolphins", "stress at work", "the Moon landing", "cheese",
    "wind turbines", "ancient Egypt", "house plants", "the immune system", "jazz", "city traffic",
    "camping", "penguins", "the internet", "dog training", "tornadoes", "the Great Wall",
    "budgeting", "chocolate", "the solar system", "carpentry", "poetry", "antibiotics", "rice",
    "airports", "mushrooms", "the Renaissance", "meditation", "encryption", "wild horses",
    "tea ceremonies", "the periodic table", "first aid", "folk music", "castles", "pasta",
    "satellites", "deserts", "time management", "lighthouses", "grammar", "elephants", "inflation",
    "hiking", "museums", "the Olympic Games", "sharks", "negotiation", "batteries", "saffron",
    "the violin", "robots", "climate change", "bamboo", "democracy", "swimming pools", "diabetes",
    "opera", "hummingbirds", "steel", "the Amazon river", "learning a language", "cats", "pottery",
    "plate tectonics", "a healthy breakfast", "the telephone", "forests in winter", "teamwork",
    "gravity", "salt",
)  # fmt: skip
_QUESTIONS = (
    "What are the main facts about {}?", "Give me five facts about {}.", "Why does {} matter?",
    "Write a short paragraph on {}.", "Explain {} in simple words.", "How would you teach {}?",
    "What are the benefits and the drawbacks of {}?", "Summarize the history of {}.",
    "Write a short poem about {}.", "What mistakes do people make with {}?",
    "Make a list of ten words that belong to {}, each with its meaning.",
    "Write an email to a colleague in which you recommend a book on {}.",
    "Tell a short story in which {} plays a part.", "Compare {} and {}.",
    "What is the difference between {} and {}?", "Write a dialogue of two friends about {}.",
    "I know nothing about {}. Where should I begin?", "Describe {} in three sentences.",
    "Write an introduction for an article on {}.", "Give step by step advice on {}.",
    "What does a day in the life of somebody who works with {} look like?",
    "Write a quiz with four questions on {}, with answers.", "Plan a lesson of one hour on {}.",
    "Which questions about {} are still open?", "Write an advertisement that has to do with {}.",
    "Is {} important for children? Give reasons.", "Write a haiku about {} and explain it.",
    "How has {} changed over the last hundred years?", "Name three myths about {}.",
    "What would the world be like without {}?",
)  # fmt: skip
_PLAIN = (
    "Hello! How are you today?", "Who are you?", "Tell me a joke.", "What can you help me with?",
    "Recommend a book for a long journey.", "Good morning!", "Help me to choose a name for a cat.",
    "What is {} times {}?", "Thank you for your help.", "I feel tired today. What should I do?",
    "What should I cook tonight with {} eggs and rice?",
    "If a train goes {} km in {} hours, how fast is it?", "Name {} animals that live in water.",
)  # fmt: skip
_TASKS = (
    "adds up the even numbers of a list", "reverses a string", "counts the words of a text",
    "finds the largest value of a dictionary", "checks whether a number is prime",
    "reads a CSV file and returns its rows", "sorts a list of people by age",
    "computes the factorial of n", "removes duplicates from a list and keeps the order",
    "merges two sorted lists", "checks whether a text is a palindrome", "flattens nested lists",
    "converts Celsius to Fahrenheit", "returns the n-th Fibonacci number", "validates an email",
    "writes a dictionary to a JSON file", "counts the vowels of a word", "finds common elements",
    "computes the mean and the median", "generates a random password", "parses a date",
    "groups words by their first letter", "multiplies two matrices", "does a binary search",
    "downloads a web page", "logs in a user", "splits a list into chunks", "finds missing numbers",
    "transposes a table", "caches the results of another function", "converts Roman numerals",
    "computes the distance of two points", "walks through a folder and lists large files",
    "counts how often each character occurs", "rotates a list by k places", "draws a triangle",
    "simulates the throw of dice", "rounds prices to two digits", "implements a stack",
    "implements a queue with two stacks", "checks balanced brackets", "finds the shortest path",
)  # fmt: skip
_LANGUAGES = ("Python", "Python", "Python", "JavaScript", "Java", "C++", "SQL", "Rust", "bash")
_CODE = (
    "Write a {language} function that {task}.", "Write a {language} program that {task}.",
    "Show me how one {task} in {language}, with an example.",
    "Write a {language} class that {task}, with comments.",
    "Write unit tests for a {language} function that {task}.",
    "Explain step by step how a {language} function {task}.",
)  # fmt: skip
_NAMES = ("values", "items", "data", "text", "path", "user", "rows", "config", "node", "numbers")
_VERBS = ("load", "count", "update", "find", "parse", "format", "merge", "check", "build", "remove")
_TYPES = ("list[int]", "str", "dict[str, int]", "float", "list[str]", "bool")
_PLACES = ("the harbour", "an old farm", "a small town", "the night train", "a school", "the woods")
_PEOPLE = ("Maria", "the doctor", "two brothers", "an old sailor", "Mr. Chen", "the teacher", "Tom")
_DEEDS = (
    "found a letter", "lost the key", "waited for the rain to end", "heard a strange noise",
    "decided to leave", "met a stranger", "opened the box", "began to sing", "counted the money",
)  # fmt: skip
_EDITS = (
    "Rewrite this more politely:", "Correct the mistakes in this text:", "Summarize this:",
    "Repeat this text word for word:", "Turn this into a list of points:", "Continue this text:",
    "Rewrite this in the past tense:", "Put the most important sentence of this in quotes:",
)  # fmt: skip


_WISHES = ("Keep it short.", "Explain each line.", "Give an example.", "Do not use loops.")
_SENTENCES = (
    "In {place}, {who} {deed}.", "{who} {deed} in {place}.", "Nobody knew why {who} {deed}.",
    "It was late when {who} {deed}.", "There were many stories about {subject}.",
    "After that {who} talked about {subject} for an hour.", '"I like {subject}," said {who}.',
    "The weather in {place} was cold, and {who} {deed}.",
    "Years ago {who} had read about {subject}.",
)  # fmt: skip
_OPENINGS = (
    "are often misunderstood.", "can be described in many ways. The most common",
    "has a long history", "- a short introduction\n\n", "in everyday life:\n\n1.",
    ": what you should know\n\nFirst,", "played an important role in the", "is one of the most",
    "became popular because",
)  # fmt: skip
_CODE_EDITS = (
    "Add comments to this code:", "What does this function do?", "Find the mistake in this code:",
    "Complete this function:", "Add type hints to this code. Answer with the code only:",
    "Write this code once more, with better names:", "Write a docstring for this function:",
)  # fmt: skip
_MODULES = (
    "ast", "base64", "bisect", "cmd", "codecs", "collections", "contextlib", "copy", "csv",
    "dataclasses", "datetime", "difflib", "email.message", "email.utils", "filecmp", "fnmatch",
    "functools", "getpass", "gettext", "glob", "gzip", "html.parser", "http.client", "http.cookies",
    "imaplib", "inspect", "json.decoder", "json.encoder", "locale", "logging", "mailbox",
    "mimetypes", "numbers", "os", "pathlib", "pickle", "platform", "posixpath", "pprint", "queue",
    "random", "sched", "shelve", "shlex", "shutil", "smtplib", "socket", "socketserver", "string",
    "subprocess", "tarfile", "tempfile", "threading", "timeit", "trace", "traceback", "types",
    "typing", "unittest.case", "unittest.mock", "urllib.parse", "urllib.request", "uuid", "weakref",
    "xml.dom.minidom", "zipfile",
)  # fmt: skip
_SHARE_OF_CHAT = 0.7


@dataclass(frozen=True, slots=True)
class Prompt:
    """What is asked: a message of a chat, or a text to be gone on with."""

    text: str
    is_chat: bool


def prompts(seed: int, *, chat: bool) -> Iterator[Prompt]:
    """Yield prompts without end; the same seed gives the same ones.

    Without `chat` all are texts to be gone on with, for models that know no conversations.
    """
    rng = random.Random(seed)
    while True:
        is_chat = chat and rng.random() < _SHARE_OF_CHAT
        kinds = _ASKED if is_chat else _CONTINUED
        (make,) = rng.choices(list(kinds), list(kinds.values()))
        yield Prompt(make(rng), is_chat)


def _question(rng: random.Random) -> str:
    return _filled(rng, rng.choice(_QUESTIONS), _SUBJECTS)


def _plain(rng: random.Random) -> str:
    return _filled(rng, rng.choice(_PLAIN), [str(number) for number in range(2, 60)])


def _program(rng: random.Random) -> str:
    task = rng.choice(_CODE).format(language=rng.choice(_LANGUAGES), task=rng.choice(_TASKS))
    return task if rng.random() < 0.7 else f"{task} {rng.choice(_WISHES)}"


def _edit(rng: random.Random) -> str:
    return f"{rng.choice(_EDITS)}\n\n{_passage(rng, rng.randrange(3, 9))}"


def _edit_code(rng: random.Random) -> str:
    code = rng.choice(_functions())
    return f"{rng.choice(_CODE_EDITS)}\n\n```python\n{_beginning(rng, code, 24)}\n```"


def _story(rng: random.Random) -> str:
    return _passage(rng, rng.randrange(2, 7))


def _article(rng: random.Random) -> str:
    subject = rng.choice(_SUBJECTS)
    return f"{subject[0].upper()}{subject[1:]} {rng.choice(_OPENINGS)}"


def _code(rng: random.Random) -> str:
    return _beginning(rng, rng.choice(_functions()), 40) + "\n"


def _stub(rng: random.Random) -> str:
    """Return the head of a function that nobody has written."""
    verb, name, kind = rng.choice(_VERBS), rng.choice(_NAMES), rng.choice(_TYPES)
    task = rng.choice(_TASKS)
    return f'def {verb}_{name}({name}: {kind}):\n    """A function that {task}."""\n'


_ASKED: dict[Callable[[random.Random], str], float] = {
    _question: 6, _plain: 0.5, _program: 2.5, _edit: 1, _edit_code: 1,
}  # fmt: skip
_CONTINUED: dict[Callable[[random.Random], str], float] = {
    _code: 3, _stub: 1, _story: 1.5, _article: 1.5,
}  # fmt: skip


def _filled(rng: random.Random, text: str, words: Sequence[str]) -> str:
    while "{}" in text:
        text = text.replace("{}", rng.choice(words), 1)
    return text


def _passage(rng: random.Random, num_sentences: int) -> str:
    people = rng.sample(_PEOPLE, 2)
    sentences = []
    for _ in range(num_sentences):
        who, place, deed = rng.choice(people), rng.choice(_PLACES), rng.choice(_DEEDS)
        sentence = rng.choice(_SENTENCES).format(
            who=who, place=place, deed=deed, subject=rng.choice(_SUBJECTS)
        )
        sentences.append(sentence[0].upper() + sentence[1:])
    return " ".join(sentences)


def _beginning(rng: random.Random, code: str, most: int) -> str:
    """Return about the first half of a function, `most` lines at most."""
    lines = code.splitlines()
    return "\n".join(lines[: min(most, max(3, rng.randrange(len(lines))))])


@cache
def _functions() -> list[str]:
    """Functions and methods of Python's standard library, as it is installed here."""
    found = []
    for name in _MODULES:
        try:
            source = inspect.getsource(importlib.import_module(name))
        except (ImportError, OSError):  # not on every system, or without its source
            continue
        lines = source.splitlines()
        for node in ast.walk(ast.parse(source)):
            if isinstance(node, ast.FunctionDef):
                own = lines[node.lineno - 1 : node.end_lineno]
                if 6 <= len(own) <= 60:
                    found.append(dedent("\n".join(own)))
    return found
