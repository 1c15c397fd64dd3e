"""Count what makes the code hard to read: names without nouns, packed calls, words of its own.

    python tools/plain.py              totals of each package, and the 20 worst files
    python tools/plain.py --list KIND  each finding of a kind, or of `all`; exits with 1 if any
    python tools/plain.py --diff main  the same for changed lines only (`git add -N` new files)

Kinds:
    nameless    a name that is a participle, pronoun, adverb or adjective alone: `found`, `one`
    splat       a call that unpacks a tuple or list built for it: `f(*sizes)`, `f(*(1, 2))`
    positional  a call with six or more positional arguments, except of native functions
    twice       a class whose name another class of the package has, too
    constant    a numeric constant whose name has no noun, or one word and no unit: `_LATE`
    retired     a name with a word that docs/development/glossary.md replaces: `errand`
    phrase      a line of a comment or docstring whose noun is missing: "those of", "what is"
"""

from __future__ import annotations

import argparse
import ast
import re
import subprocess
import sys
from collections import Counter, defaultdict
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Iterator

KINDS = ("nameless", "splat", "positional", "twice", "constant", "retired", "phrase")
MAX_POSITIONAL = 5
# Functions that take any number of arguments, or none by name (HiGHS's `addCol`).
VARIADIC = frozenset(
    ("print", "max", "min", "zip", "chain", "join", "joinpath", "pack", "pack_into", "addCol")
)
NAMELESS_WORDS = (
    "one ones found given asked place places known kept held said told whole wanted made meant "
    "shown taken gone lent drawn served chosen judged counted passed awaited late here there away "
    "aside apart behind beside beyond ahead alike again own most least more far near what who "
    "those these such it its thing things began ended"
)
ADJECTIVES_AND_UNITS = (
    "max min first last next new old big small long short full fast slow half worth s ms ns"
)
NAMELESS = set(NAMELESS_WORDS.split())
NOUNLESS = NAMELESS | set(ADJECTIVES_AND_UNITS.split())
RETIRED = re.compile(
    "(?i)errand|passage|lender|lending|borrow|guest|sketch|handover|guess|ticket|flights(?!teps)"
    "|roster|desk|shelf|valve|ongoing|carrier|upkeep|evener|residence"
)
PHRASES = re.compile(
    r"(?i)\bthose (?:of|that|which|with|whose|before|after)\b|\bthat of\b|\bof (?:which|whom)\b"
    r"|\bwhat (?:is|are|was|were|has|have|becomes?|became|it|they|an?|the|of)\b|\breturn what\b"
    r"|\bso (?:many|much)\b|\bas (?:many|much|far) as\b|\b(?:is|are) to be\b|\bthe latter\b"
    r"|\b(?:nobody|somebody)\b|\bone (?:that|with|which)\b|\bif (?:any|one) (?:is|does|has)\b"
    r"|\bnone (?:is|does|has)\b|\bin vain\b|\bgoes? on\b|\balike\b"
)
COMMENT = re.compile(r"(?:^|\s)# (.*)$")


class Finding(NamedTuple):
    """A line to rewrite."""

    path: str
    line: int
    kind: str
    text: str


def main() -> int:
    """Print the findings that the command line asks for; return 1 if there are any."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--root", type=Path, default=Path("src/twostroke"))
    parser.add_argument("--diff", metavar="BASE")
    parser.add_argument("--list", metavar="KIND", nargs="+", choices=("all", *KINDS), default=[])
    options = parser.parse_args()
    findings = sorted(find_all(options.root))
    if options.diff and not is_commit(options.diff):
        print(f"Nothing to compare: git knows no commit named {options.diff}.")
        return 0
    if options.diff:
        added = added_lines(options.diff, options.root)
        findings = [finding for finding in findings if finding.line in added[finding.path]]
    kinds = options.list or (KINDS if options.diff else ())
    listed = [finding for finding in findings if finding.kind in kinds or "all" in kinds]
    for finding in listed:
        print(f"{finding.path}:{finding.line}: {finding.kind}: {finding.text}")
    print_totals(findings, options.root)
    return 1 if listed else 0


def is_foreign(called: str) -> bool:
    """Whether a call is one of a native function, which knows positions only.

    Native functions are known by their library's prefix: `library.ts_pack`, `ucp_ep_create`,
    `_libc.mmap`. Three more are members: the declaration of a function type, a function in a
    record, and a binding of NIXL.
    """
    name = called.rpartition(".")[2]
    is_member = name in {"CFUNCTYPE", "createXferReq"} or called == "record.all_gather"
    return is_member or called.startswith("_libc.") or name.startswith(("ts_", "ucp_"))


def find_all(root: Path) -> Iterator[Finding]:
    """Yield the findings of every Python file below a folder."""
    classes: dict[str, list[Finding]] = defaultdict(list)
    for file in sorted(root.rglob("*.py")):
        path, source = file.as_posix(), file.read_text(encoding="utf-8")
        tree = ast.parse(source)
        yield from find_phrases(path, source.splitlines(), tree)
        yield from find_constants(path, tree)
        for node in ast.walk(tree):
            if isinstance(node, ast.ClassDef):
                classes[node.name].append(Finding(path, node.lineno, "twice", node.name))
            if isinstance(node, ast.Call) and len(node.args) > MAX_POSITIONAL:
                called = ast.unparse(node.func)
                if called.rpartition(".")[2] not in VARIADIC and not is_foreign(called):
                    yield Finding(path, node.lineno, "positional", called)
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Module):
                yield from find_splats(path, node)
            name = bound_name(node) or ""
            line_number = getattr(node, "lineno", 0)
            if name.strip("_").lower() in NAMELESS:
                yield Finding(path, line_number, "nameless", name)
            elif RETIRED.search(name):
                yield Finding(path, line_number, "retired", name)
    for same_name in classes.values():
        yield from same_name if len(same_name) > 1 else ()


def bound_name(node: ast.AST) -> str | None:
    """Return the name that a node introduces."""
    if isinstance(node, ast.Name | ast.Attribute) and not isinstance(node.ctx, ast.Store):
        return None
    fields = ("id", "attr", "arg", "name") if not isinstance(node, ast.keyword | ast.alias) else ()
    return next((getattr(node, field) for field in fields if hasattr(node, field)), None)


def find_splats(path: str, scope: ast.AST) -> Iterator[Finding]:
    """Yield calls that unpack a tuple written out, or a variable that this scope set to one."""
    nodes = list(nodes_of_scope(scope))
    assigned = [node for node in nodes if isinstance(node, ast.Assign) and is_display(node.value)]
    tuples = {ast.unparse(target) for node in assigned for target in node.targets}
    for call in nodes:
        for argument in call.args if isinstance(call, ast.Call) else ():
            value = argument.value if isinstance(argument, ast.Starred) else None
            if value and (is_display(value) or ast.unparse(value) in tuples):
                yield Finding(path, argument.lineno, "splat", ast.unparse(argument))


def nodes_of_scope(scope: ast.AST) -> Iterator[ast.AST]:
    """Yield the nodes of a function or module, without those inside its inner functions."""
    for child in ast.iter_child_nodes(scope):
        if not isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef):
            yield child
            yield from nodes_of_scope(child)


def is_display(value: ast.AST) -> bool:
    """Whether an expression is a tuple or list written out, perhaps conditional or repeated."""
    match value:
        case ast.IfExp(body=left, orelse=right) | ast.BinOp(left=left, right=right):
            return is_display(left) or is_display(right)
    return isinstance(value, ast.Tuple | ast.List)


def find_constants(path: str, module: ast.Module) -> Iterator[Finding]:
    """Yield numeric constants of a module whose names lack the measured quantity."""
    for node in module.body:
        target = node.targets[0] if isinstance(node, ast.Assign) else getattr(node, "target", None)
        number = getattr(getattr(node, "value", None), "value", None)
        if isinstance(target, ast.Name) and target.id.isupper() and type(number) in (int, float):
            words = target.id.lower().strip("_").split("_")
            nouns = set(words) - NOUNLESS
            if not nouns or (len(words) == 1 and type(number) is float and words != ["epsilon"]):
                yield Finding(path, node.lineno, "constant", target.id)


def find_phrases(path: str, lines: list[str], tree: ast.Module) -> Iterator[Finding]:
    """Yield lines of docstrings and comments that have a phrase of the dialect, each line once."""
    texts = {at: text for at, line in enumerate(lines, 1) for text in COMMENT.findall(line)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
            numbers = range(node.lineno, (node.end_lineno or node.lineno) + 1)
            texts |= {number: lines[number - 1] for number in numbers}
    for number, text in texts.items():
        if match := PHRASES.search(text):
            yield Finding(path, number, "phrase", f'"{match[0]}" in: {text.strip()[:80]}')


def is_commit(name: str) -> bool:
    """Whether the current folder is a git checkout that has this commit."""
    command = ["git", "rev-parse", "--quiet", "--verify", f"{name}^{{commit}}"]
    return subprocess.run(command, capture_output=True, check=False).returncode == 0


def added_lines(base: str, root: Path) -> dict[str, set[int]]:
    """Return the lines of each file that were added or changed since a commit."""
    command = ["git", "diff", "--unified=0", "--no-color", "--relative", base, "--", str(root)]
    diff = subprocess.check_output(command, text=True)
    path, added = "", defaultdict[str, set[int]](set)
    for line in diff.splitlines():
        path = line[6:] if line.startswith("+++ b/") else path
        if hunk := re.match(r"@@ -\S+ \+(\d+)(?:,(\d+))? @@", line):
            added[path].update(range(int(hunk[1]), int(hunk[1]) + int(hunk[2] or 1)))
    return added


def print_totals(findings: list[Finding], root: Path) -> None:
    """Print a row for each package and for all, and the files with the most findings."""
    packages: dict[str, Counter[str]] = defaultdict(Counter)
    for finding in findings:
        parts = Path(finding.path).relative_to(root).parts
        packages[parts[0] if len(parts) > 1 else "(top)"][finding.kind] += 1
    packages["all"] = sum(packages.values(), Counter())
    print(f"{'package':<12}" + "".join(f"{kind:>11}" for kind in (*KINDS, "sum")))
    for package, counts in packages.items():
        row = [*(counts[kind] for kind in KINDS), counts.total()]
        print(f"{package:<12}" + "".join(f"{count:>11,}" for count in row))
    for path, count in Counter(finding.path for finding in findings).most_common(20):
        print(f"{count:>6}  {path}")


if __name__ == "__main__":
    sys.exit(main())
