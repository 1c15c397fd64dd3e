"""Check the sizes of files, functions and rooms; the limits may only shrink.

A file has at most 400 lines and a function at most 60. `tools/size_exceptions.toml` names the
exceptions with their exact sizes. `tools/size_budgets.toml` gives each room of the package the
lines of Python that it may have. A limit that is higher than it needs to be is an error too.
"""

from __future__ import annotations

import ast
import re
import sys
import tomllib
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator, Mapping

MAX_FILE_LINES = 400
MAX_FUNCTION_LINES = 60
ROOT = Path(__file__).resolve().parent.parent
PACKAGE = "src/twostroke"
FOLDERS = ("src", "native", "tests", "tools", "benchmarks")
CPP_SUFFIXES = {".cpp", ".h", ".inc"}

# What a C++ block is a part of when it is no function: functions are looked for inside these.
CONTAINER = re.compile(r'^(template\s*<.*>\s*)?(namespace|struct|class|union|enum|extern\s*""\s*$)')
CPP_NOISE = re.compile(
    r'//[^\n]*|/\*.*?\*/|"(?:\\.|[^"\\\n])*"|\'(?:\\.|[^\'\\\n])\'|^[ \t]*#(?:\\\n|[^\n])*',
    re.DOTALL | re.MULTILINE,
)


def main() -> int:
    """Print the lines of each room, then one line for each fault; return 1 if there is one."""
    exceptions = tomllib.loads((ROOT / "tools/size_exceptions.toml").read_text())
    budgets = tomllib.loads((ROOT / "tools/size_budgets.toml").read_text())
    sizes: dict[str, int] = {}
    for name, lines in measure(ROOT):
        sizes[name] = max(lines, sizes.get(name, 0))  # overloads share a name
    rooms = count_rooms(ROOT / PACKAGE, budgets["rooms"])
    for name, lines in rooms.items():
        print(f"{name:<20}{lines:>7,}")
    print(f"{'all':<20}{sum(rooms.values()):>7,}")
    faults = [*find_faults(sizes, exceptions), *find_room_faults(rooms, budgets)]
    print("\n".join(faults) or "Sizes: every file, function and room is within its limit.")
    return 1 if faults else 0


def measure(root: Path) -> Iterator[tuple[str, int]]:
    """Yield `("path", lines)` for each file and `("path::function", lines)` for each function."""
    for folder in FOLDERS:
        for path in sorted((root / folder).rglob("*")):
            if path.suffix != ".py" and path.suffix not in CPP_SUFFIXES:
                continue
            name, text = path.relative_to(root).as_posix(), path.read_text()
            yield name, text.count("\n")
            functions = (
                python_functions(ast.parse(text)) if path.suffix == ".py" else cpp_functions(text)
            )
            for function, lines in functions:
                yield f"{name}::{function}", lines


def python_functions(tree: ast.AST, prefix: str = "") -> Iterator[tuple[str, int]]:
    """Yield each function's dotted name and lines; a docstring costs nothing."""
    for node in ast.iter_child_nodes(tree):
        if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            yield from python_functions(node, prefix)
            continue
        if not isinstance(node, ast.ClassDef):
            lines = (node.end_lineno or node.lineno) - node.lineno + 1
            if ast.get_docstring(node) is not None:
                docstring = node.body[0]
                lines -= (docstring.end_lineno or docstring.lineno) - docstring.lineno + 1
            yield prefix + node.name, lines
        yield from python_functions(node, f"{prefix}{node.name}.")


def cpp_functions(text: str) -> Iterator[tuple[str, int]]:
    """Yield each function's name and lines, found by matching braces outside of function bodies."""
    text = CPP_NOISE.sub(_blank, text)
    header_start, position = 0, 0
    while match := re.compile(r"[{};]").search(text, position):
        position = match.end()
        header = text[header_start : match.start()].strip()
        header_start = position
        if match[0] == "{" and "(" in header and not CONTAINER.match(header):
            position = header_start = _closing_brace(text, match.start()) + 1
            first_line = text.rfind(header.splitlines()[0], 0, match.start())
            name = re.search(r"([\w~:]+)\s*\(", header)
            yield name[1] if name else "?", text.count("\n", first_line, position) + 1


def find_faults(sizes: Mapping[str, int], exceptions: Mapping[str, int]) -> Iterator[str]:
    """Yield a sentence for each size over its limit and for each exception that is not exact."""
    for name, lines in sizes.items():
        limit = MAX_FUNCTION_LINES if "::" in name else MAX_FILE_LINES
        allowed = exceptions.get(name, limit)
        if lines > allowed:
            yield f"{name}: {lines} lines, the limit is {allowed}; split it."
        elif name in exceptions and lines < allowed:
            yield f"{name}: {lines} lines now; lower its exception from {allowed} or remove it."
    for name in exceptions.keys() - sizes.keys():
        yield f"{name}: is gone; remove its exception."


def count_rooms(package: Path, named: Collection[str] = ()) -> dict[str, int]:
    """Return the lines of Python in each room; modules outside of the rooms are `(top)`.

    A part of a room that is `named`, such as `serve/ollama`, counts for itself.
    """
    rooms: dict[str, int] = {}
    for path in sorted(package.rglob("*.py")):
        parts = path.relative_to(package).parts
        inner = "/".join(parts[:2])
        room = inner if inner in named else parts[0] if len(parts) > 1 else "(top)"
        rooms[room] = rooms.get(room, 0) + path.read_text().count("\n")
    return rooms


def find_room_faults(rooms: Mapping[str, int], budgets: Mapping[str, Any]) -> Iterator[str]:
    """Yield a sentence for each room over its budget and for each budget with too much slack."""
    allowed: dict[str, int] = budgets["rooms"]
    for name, lines in rooms.items():
        if name not in allowed:
            yield f"{name}: {lines} lines and no budget; add one to tools/size_budgets.toml."
        elif lines > allowed[name]:
            yield f"{name}: {lines} lines, the budget is {allowed[name]}; delete before you add."
        elif allowed[name] > lines * (1 + budgets["max_slack"]):
            yield f"{name}: {lines} lines now; lower its budget from {allowed[name]}."


def _blank(match: re.Match[str]) -> str:
    """Return the noise's line breaks, so that line counts stay; a string stays as two quotes."""
    return ('""' if match[0].startswith('"') else "") + "\n" * match[0].count("\n")


def _closing_brace(text: str, opening: int) -> int:
    depth = 0
    for match in re.compile(r"[{}]").finditer(text, opening):
        depth += 1 if match[0] == "{" else -1
        if depth == 0:
            return match.start()
    return len(text) - 1


if __name__ == "__main__":
    sys.exit(main())
