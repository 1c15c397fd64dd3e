"""Check that no file has more than 800 lines and no function more than 60."""

from __future__ import annotations

import ast
import re
import sys
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

MAX_FILE_LINES = 800
MAX_FUNCTION_LINES = 60
ROOT = Path(__file__).resolve().parent.parent
FOLDERS = ("src", "native", "tests", "tools", "benchmarks")
CPP_SUFFIXES = {".cpp", ".h", ".inc"}

# What a C++ block is a part of when it is no function: functions are looked for inside these.
CONTAINER = re.compile(r'^(template\s*<.*>\s*)?(namespace|struct|class|union|enum|extern\s*""\s*$)')
CPP_NOISE = re.compile(
    r'//[^\n]*|/\*.*?\*/|"(?:\\.|[^"\\\n])*"|\'(?:\\.|[^\'\\\n])\'|^[ \t]*#(?:\\\n|[^\n])*',
    re.DOTALL | re.MULTILINE,
)


def main() -> int:
    """Print one line for each file or function over its limit; return 1 if there is one."""
    errors = list(find_oversized(measure(ROOT)))
    print("\n".join(errors) or "Sizes: every file and every function is within its limit.")
    return 1 if errors else 0


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
    """Yield each function's dotted name and lines, without the docstring.

    Of a Triton kernel only the body counts: its parameters are separate by nature.
    """
    for node in ast.iter_child_nodes(tree):
        if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            yield from python_functions(node, prefix)
            continue
        if not isinstance(node, ast.ClassDef):
            lines = (node.end_lineno or node.lineno) - node.lineno + 1
            if ast.get_docstring(node) is not None:
                docstring = node.body[0]
                lines -= (docstring.end_lineno or docstring.lineno) - docstring.lineno + 1
            if any("triton.jit" in ast.unparse(decorator) for decorator in node.decorator_list):
                lines -= node.body[0].lineno - node.lineno
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


def find_oversized(sizes: Iterable[tuple[str, int]]) -> Iterator[str]:
    """Yield a sentence for each file or function that has too many lines."""
    for name, num_lines in sizes:
        limit = MAX_FUNCTION_LINES if "::" in name else MAX_FILE_LINES
        if num_lines > limit:
            yield f"{name}: {num_lines} lines, the limit is {limit}; split it."


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
