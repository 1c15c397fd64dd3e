"""Commands, options, models and make targets that the documentation names exist."""

from __future__ import annotations

import re
import shlex
from pathlib import Path
from typing import TYPE_CHECKING

import click
import pytest

from twostroke.cli.app import COMMANDS, group
from twostroke.model.hub import CATALOGUE

if TYPE_CHECKING:
    from collections.abc import Iterator

ROOT = Path(__file__).parents[2]
PAGES = [
    *(ROOT / name for name in ("README.md", "SECURITY.md", "benchmarks/README.md")),
    *sorted((ROOT / "docs").rglob("*.md")),
]
BLOCK = re.compile(r"^```(?:console|sh|bash)?\n(.*?)^```$", re.DOTALL | re.MULTILINE)
INLINE = re.compile(r"(?<!`)`([^`\n]+)`(?!`)")
MODEL = re.compile(r"(?:smollm|qwen|gemma|llama|mistral|phi|glm)[a-z0-9.-]*\d[a-z0-9.-]*")
FOREIGN = {"--build-arg", "--node-rank", "--nproc-per-node"}  # options of other programs
NAMED = re.compile(r"""\b(?:LLM\(|twostroke (?:[a-z-]+ )+|MODEL(?: \?)?= ?)["']?([\w.-]+)""")


def lines_of(page: Path) -> Iterator[str]:
    """Yield each line of a page's shell blocks, and each piece of inline code."""
    text = page.read_text()
    for block in BLOCK.findall(text):
        yield from block.replace("\\\n", " ").splitlines()
    yield from INLINE.findall(BLOCK.sub("", text))


def words_of(line: str) -> list[str]:
    """Return the words of the first command in a line, without the prompt and comments."""
    bare = line.removeprefix("$ ").removeprefix("sudo ").strip()
    try:
        words = shlex.split(bare, comments=True)
    except ValueError:  # half a command
        return []
    ends = [index for index, word in enumerate(words) if word in {"|", "&&", "&", ">", ";"}]
    return words[: ends[0]] if ends else words


def calls() -> Iterator[tuple[str, str, list[str]]]:
    """Yield each call of `twostroke` in the documentation: page, line, and arguments."""
    for page in PAGES:
        for line in lines_of(page):
            words = words_of(line)
            if words and words[0].split("/")[-1] == "twostroke":
                yield page.name, line, words[1:]


def command_of(words: list[str]) -> tuple[click.Command, list[str]] | None:
    """Return the command that words call, and its arguments.

    Returns None for a placeholder such as COMMAND.
    """
    context = click.Context(group)
    command: click.Command = group
    if " ".join(words[:2]) in COMMANDS:
        words = [" ".join(words[:2]), *words[2:]]
    while isinstance(command, click.Group) and words and not words[0].startswith("-"):
        result = command.get_command(context, words[0])
        if result is None:
            return None if words[0].isupper() or command is not group else (group, words)
        command, words = result, words[1:]
    return command, words


def options_of(command: click.Command) -> set[str]:
    """Return all names of a command's options."""
    names = {"--help", "-h"}
    for param in command.params:
        names.update([*param.opts, *param.secondary_opts])
    return names


def every_command() -> Iterator[click.Command]:
    """Yield all commands, and the commands of groups."""
    waiting = [group.get_command(click.Context(group), name) for name in COMMANDS]
    while waiting:
        command = waiting.pop()
        assert command is not None
        yield command
        if isinstance(command, click.Group):
            waiting += command.commands.values()


def every_option() -> set[str]:
    """Return the options of all commands."""
    return {"--version"}.union(*map(options_of, every_command()))


def test_messages_about_numbers_name_no_type_of_click() -> None:
    """A wrong value of --threads is "not a valid integer", and no "integer range"."""
    unclear_types = {
        f"{command.name} {param.opts[0]}: {param.type.name}"
        for command in every_command()
        for param in command.params
        if "range" in param.type.name or param.type.name == "float"
    }
    assert not unclear_types


def test_documented_calls_name_commands_and_options_that_exist() -> None:
    faults, count = [], 0
    for page, line, words in calls():
        result = command_of(words)
        if result is None:
            continue
        command, rest = result
        count += 1
        if command is group and words and not words[0].startswith("-"):
            faults.append(f"{page}: no command: {line}")
        known_options = options_of(command)
        for word in rest:
            option = word.split("=")[0]
            if re.fullmatch(r"--?[a-z][a-z0-9-]*", option) and option not in known_options:
                faults.append(f"{page}: no option {option}: {line}")
    assert count > 150
    assert not faults, "\n".join(faults)


def test_options_in_the_text_are_those_of_a_command() -> None:
    known_options = every_option() | FOREIGN
    for script in [*ROOT.glob("benchmarks/**/*.py"), *ROOT.glob("tests/*/run.py")]:
        known_options.update(re.findall(r"\"(--[a-z-]+)\"", script.read_text()))
    faults = []
    for page in PAGES:
        if page.parent.name == "benchmarks":  # whose scripts have options of their own
            continue
        for span in INLINE.findall(BLOCK.sub("", page.read_text())):
            option = re.match(r"--[a-z][a-z0-9-]*", span)
            if option is not None and option[0] not in known_options:
                faults.append(f"{page.name}: {span}")
    assert not faults, "\n".join(faults)


@pytest.mark.parametrize("name", ["README.md", "docs", "deploy", "Makefile"])
def test_models_in_calls_are_in_the_catalogue(name: str) -> None:
    """A word after `plan` may be the name of a shape in a file."""
    model_path = ROOT / name
    files = (
        [path for path in model_path.rglob("*") if path.is_file()]
        if model_path.is_dir()
        else [model_path]
    )
    faults = []
    for path in files:
        if path.suffix in {".png", ".pyc"} or "adr" in path.parts or "kernels" in path.parts:
            continue
        text = re.sub(r"twostroke plan .*", "", path.read_text())
        named = NAMED.findall(text)
        faults += [
            f"{path.name}: {word}"
            for word in named
            if MODEL.fullmatch(word) and word not in CATALOGUE and not word.endswith(".gguf")
        ]
    assert not faults, "\n".join(faults)


def test_targets_of_make_exist() -> None:
    targets = set(re.findall(r"^([a-z][a-z0-9-]*):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    faults = []
    for page in [*PAGES, ROOT / "ARCHITECTURE.md"]:
        for line in lines_of(page):
            words = words_of(line)
            if words[:1] != ["make"]:
                continue
            goals = [word for word in words[1:] if re.fullmatch(r"[a-z][a-z0-9-]*", word)]
            faults += [f"{page.name}: make {goal}" for goal in goals if goal not in targets]
    assert not faults, "\n".join(faults)
