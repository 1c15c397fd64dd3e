"""The house's own rules: what sources may not contain; documents that agree with the tree."""

from __future__ import annotations

import ast
import importlib.util
import itertools
import re
import subprocess
import sys
import tomllib
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

if TYPE_CHECKING:
    from collections.abc import Iterator
    from types import ModuleType

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "src" / "twostroke"
SOURCES = sorted(PACKAGE.rglob("*.py"))
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
README = (ROOT / "README.md").read_text()
# The documents that describe the present code; the changelog also has names of earlier versions.
DOCUMENTS = sorted(
    path
    for pattern in ("*.md", "docs/**/*.md", "tests/**/*.md", "benchmarks/*.md")
    for path in ROOT.glob(pattern)
    if path.name != "CHANGELOG.md"
)
FOLDERS = ("benchmarks/", "deploy/", "docs/", "native/", "src/", "tests/", "tools/")
PACKAGES = {path.name for path in PACKAGE.iterdir() if path.is_dir()}

FORBIDDEN_MODULES = {"pickle", "cPickle", "dill", "cloudpickle", "marshal", "shelve", "joblib"}
FORBIDDEN_BUILTINS = {"eval", "exec", "compile", "__import__"}
FORBIDDEN_CALLS = {"torch.load", "np.load", "numpy.load", "os.system", "os.popen"}
ENVIRONMENT = {"os.environ", "os.getenv", "os.environb", "os.putenv"}
FRAMEWORKS = (
    "torch",
    "triton",
    "transformers",
    "ray",
    "mpi4py",
    "libucx",
    "nixl_cu12",
    "huggingface_hub",
    "matplotlib",
    "opentelemetry",
    "cryptography",
    "redis",
)


def test_no_source_runs_code_from_data() -> None:
    faults = [
        f"{path.relative_to(ROOT)}:{line}: {name}"
        for path in SOURCES
        for line, name in _names_in(path)
        if name.split(".")[0] in FORBIDDEN_MODULES
        or name in FORBIDDEN_BUILTINS
        or name in FORBIDDEN_CALLS
    ]
    assert not faults


def test_catching_every_exception_has_a_reason_beside_it() -> None:
    """`except BaseException` also catches Ctrl-C and a task's cancellation: a comment says why."""
    faults = [
        f"{path.relative_to(ROOT)}:{number}"
        for path in SOURCES
        for number, line in enumerate(path.read_text().splitlines(), 1)
        if re.match(r"\s*except(?: \(?.*BaseException.*)?:", line)
        and not re.search(r"# (?:noqa: \w+ )?\w+ \w+", line)
    ]
    assert not faults


@pytest.mark.parametrize(
    "line",
    [
        "import pickle",
        "from marshal import loads",
        "import torch; torch.load('x')",
        "eval('1')",
        "f = exec",
        "import numpy as np; np.load(p, allow_pickle=True)",
    ],
)
def test_the_search_finds_each_way_to_run_data(line: str) -> None:
    names = {name for _, name in _names_used(ast.parse(line))}
    roots = {name.split(".")[0] for name in names}
    assert roots & FORBIDDEN_MODULES or names & (FORBIDDEN_BUILTINS | FORBIDDEN_CALLS)


def test_threads_share_decoders_that_are_made_at_import() -> None:
    """msgspec reads a struct's fields at its first use; two threads at once crash the process."""
    packages = ("server", "fleet")
    sources = [path for package in packages for path in (PACKAGE / package).rglob("*.py")]
    results = {
        f"{path}:{node.lineno}"
        for path in sources
        for node in ast.walk(_tree(path))
        if isinstance(node, ast.keyword) and node.arg == "type"
        if isinstance(node.value, ast.Name) and node.value.id.lstrip("_")[:1].isupper()
    }
    assert len(sources) > 100
    assert not results


def test_environment_is_read_in_one_place() -> None:
    faults = [
        f"{path.relative_to(ROOT)}:{line}: {name}"
        for path in SOURCES
        if path != PACKAGE / "core" / "env.py"
        for line, name in _names_in(path)
        if name in ENVIRONMENT
    ]
    assert not faults


def test_every_environment_variable_is_documented() -> None:
    page = (ROOT / "docs" / "reference" / "configuration.md").read_text()
    read, documented = (
        set(re.findall(r"TWOSTROKE_[A-Z_]+", text))
        for text in ((PACKAGE / "core" / "env.py").read_text(), page)
    )
    assert read <= documented


def test_no_test_sets_the_clock_of_other_threads() -> None:
    """The server of another test in the same process would sleep until that clock's time."""
    clock_patch = re.compile(r"""setattr\(\s*["']?([\w.]+\.)?time["']?[.,]\s*["']?monotonic""")
    assert clock_patch.search('patch.setattr(hardware.time, "monotonic", clock)')
    tests = [path for path in (ROOT / "tests").rglob("*.py") if path.name != "test_house.py"]
    assert not [path.name for path in tests if clock_patch.search(path.read_text())]


def test_every_source_file_states_its_job() -> None:
    silent = [
        path.relative_to(ROOT).as_posix() for path in SOURCES if not ast.get_docstring(_tree(path))
    ]
    assert not silent


def test_every_package_is_in_the_architecture() -> None:
    folders = [
        path.parent for pattern in ("*", "*/*") for path in PACKAGE.glob(f"{pattern}/__init__.py")
    ]
    packages = {folder.relative_to(PACKAGE).as_posix() for folder in folders}
    section = (ROOT / "ARCHITECTURE.md").read_text().split("## The packages")[1].split("\n## ")[0]
    assert packages | {"native"} == set(re.findall(r"^\| `([a-z_/]+)/`", section, re.MULTILINE))


def test_importing_the_package_imports_no_framework() -> None:
    modules = ", ".join(_modules())
    script = f"import sys, {modules}; print(*sorted(set({FRAMEWORKS}) & set(sys.modules)))"
    loaded = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=False
    )
    assert loaded.returncode == 0, loaded.stderr
    assert not loaded.stdout.split()


def test_make_commands_in_the_readme_exist() -> None:
    targets = set(re.findall(r"^([a-z0-9-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    commands = set(re.findall(r"\bmake ([a-z][a-z0-9-]+)", README))
    assert {"run", "test"} <= commands <= targets


def test_make_explains_every_target() -> None:
    makefile = (ROOT / "Makefile").read_text()
    phony = re.search(r"^\.PHONY: (.*)$", makefile, re.MULTILINE)
    assert phony is not None
    explained = set(re.findall(r"^([a-z0-9-]+):.*## \S", makefile, re.MULTILINE))
    assert explained == set(phony[1].split())


@pytest.mark.parametrize(
    ("file", "prefix"), [("tests/suites.mk", "long"), ("benchmarks/suites.mk", "bench")]
)
def test_every_suite_and_benchmark_is_explained_and_has_its_script(file: str, prefix: str) -> None:
    text = (ROOT / file).read_text()
    targets = re.findall(rf"^{prefix}-([a-z0-9-]+):", text, re.MULTILINE)
    assert targets == re.findall(rf"^{prefix}-([a-z0-9-]+):.*## \S", text, re.MULTILINE)
    modules = re.findall(r"-m (benchmarks\.[\w.]+)", text)
    scripts = re.findall(r"tests/[\w/]+\.py", text)
    scripts += [module.replace(".", "/") + ".py" for module in modules]
    assert scripts
    assert not [script for script in scripts if not (ROOT / script).exists()]


def test_version_is_the_newest_in_the_changelog() -> None:
    newest = re.search(r"^## \[?(\d+\.\d+\.\d+)", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    assert newest is not None
    assert newest[1] == PROJECT["version"]


def test_every_dependency_has_its_reason_in_the_readme() -> None:
    extras = PROJECT["optional-dependencies"]
    requirements = [
        *PROJECT["dependencies"],
        *(requirement for name in extras if name != "dev" for requirement in extras[name]),
    ]
    named = {re.split(r"[<>=!~\[; ]", requirement)[0] for requirement in requirements}
    section = README.split("## What it stands on")[1].split("\n## ")[0]
    assert set(re.findall(r"^\| `([a-z_0-9-]+)`", section, re.MULTILINE)) == named


def test_locked_versions_satisfy_every_requirement() -> None:
    versions_of_run = _locked_versions("run")
    requirements_by_lock = {"run": PROJECT["dependencies"], **PROJECT["optional-dependencies"]}
    for lock, requirements in requirements_by_lock.items():
        versions = versions_of_run | _locked_versions(lock)
        for text in requirements:
            requirement = Requirement(text)
            pinned = versions.get(canonicalize_name(requirement.name), set())
            assert pinned, f"requirements/{lock}.txt has no {requirement.name}: run `make lock`"
            assert all(version in requirement.specifier for version in pinned), text


def test_locks_have_hashes_and_name_no_index() -> None:
    locks = sorted((ROOT / "requirements").glob("*.txt"))
    assert {"build", "run", "dev", "test-oracle"} <= {lock.stem for lock in locks}
    for lock in locks:
        text = lock.read_text()
        assert "://" not in text, lock.name
        entries = re.findall(r"^\S.*\n(?:[ \t].*\n)*", text, re.MULTILINE)
        assert all("--hash=sha256:" in entry for entry in entries), lock.name


def test_the_readme_stays_short() -> None:
    assert len(README.split()) <= 1500


def test_every_page_is_in_the_index() -> None:
    folder = ROOT / "docs"
    pages = {path.relative_to(folder).as_posix() for path in folder.glob("*/*.md")}
    listed = set(re.findall(r"\]\(([a-z-]+/[a-z-]+\.md)\)", (folder / "README.md").read_text()))
    assert listed == pages


def test_links_in_the_documents_have_targets() -> None:
    documents = [*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"), *ROOT.glob("tests/**/*.md")]
    broken = [
        f"{document.relative_to(ROOT)}: {target}"
        for document in documents
        for target in re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", document.read_text())
        if not (document.parent / target).exists()
    ]
    assert not broken


def test_files_that_documents_name_exist() -> None:
    modules = {path.name for folder in FOLDERS for path in (ROOT / folder).rglob("*.py")}
    missing = []
    for document, word in _quoted_words():
        path = word.partition("::")[0].rstrip("/")
        if re.fullmatch(r"\w+\.py", path) and path not in modules:
            missing.append(f"{document}: {word}")
        is_in_package = path.split("/")[0] in PACKAGES and "/" in path
        if not re.fullmatch(r"[\w./*-]+", path) or not (word.startswith(FOLDERS) or is_in_package):
            continue
        folder = PACKAGE if is_in_package else ROOT
        if not any(folder.glob(path)) and not any(folder.glob(f"{path}.py")):
            missing.append(f"{document}: {word}")
    assert not missing, "\n".join(missing)


def test_dotted_names_in_documents_exist() -> None:
    sources = "\n".join(path.read_text() for path in SOURCES)
    missing = [
        f"{document}: {word}"
        for document, word in _quoted_words()
        if re.fullmatch(r"twostroke(\.\w+)+", word)
        and not _is_defined(word)
        and f'"{word}"' not in sources  # such as an attribute of a span
    ]
    assert not missing, "\n".join(missing)


def test_the_check_of_names_finds_names_that_are_gone() -> None:
    assert _is_defined("twostroke.lab.planner.make_plan")
    assert _is_defined("twostroke.lab.planner")
    assert not _is_defined("twostroke.lab.planner.planned_model")
    assert not _is_defined("twostroke.serve.create_app")


@pytest.mark.parametrize("document", ["docs/development/glossary.md", "ARCHITECTURE.md"])
def test_names_in_the_glossary_and_the_architecture_exist(document: str) -> None:
    missing = [word for word in _named_on(ROOT / document) if word not in _identifiers()]
    assert not missing, f"{document}: {', '.join(missing)}"


def test_the_check_of_the_glossary_reads_its_names() -> None:
    glossary = _named_on(ROOT / "docs" / "development" / "glossary.md")
    assert {"WaitingQueue", "wait_s", "UpstreamConnection", "kv_splits"} <= {*glossary}
    assert "Holdings" not in glossary  # an older name
    assert {"PagePool", "RequestReader", "begin_response"} <= {*_named_on(ROOT / "ARCHITECTURE.md")}
    assert "WaitingQueue" in _identifiers()
    assert "cached_grammar" not in _identifiers()


def test_tests_that_the_page_on_security_names_exist() -> None:
    page = (ROOT / "docs" / "operations" / "security.md").read_text()
    named = re.findall(r"`(tests/\S+\.py)::(\w+)`( P)?", page)
    assert len(named) == page.count("tests/") - page.count("tests/mutants/faults.toml") - 1
    faults = tomllib.loads((ROOT / "tests" / "mutants" / "faults.toml").read_text())["fault"]
    planted = tuple(test for fault in faults for test in fault["tests"].split())
    for file, test, is_planted in named:
        assert f"def {test}(" in (ROOT / file).read_text(), f"{file}::{test}"
        has_fault = f"{file}::{test}".startswith(planted)
        assert has_fault or not is_planted, f"no fault is planted for {file}::{test}"


def test_every_decision_is_listed() -> None:
    folder = ROOT / "docs" / "development" / "adr"
    listed = set(re.findall(r"\]\((0[^)]+)\)", (folder / "README.md").read_text()))
    assert listed == {path.name for path in folder.glob("0*.md")}


def test_size_check_measures_functions_of_both_languages() -> None:
    tool = _check_size()
    source = '// a {\nint f(int x) {\n    if (x) {\n        g("}");\n    }\n    return 1;\n}\n'
    assert list(tool.cpp_functions(source)) == [("f", 6)]
    tree = ast.parse(
        'class A:\n    def f(self):\n        """One.\n\n        Two."""\n        g()\n'
    )
    assert list(tool.python_functions(tree)) == [("A.f", 2)]


def test_files_and_functions_over_their_limits_are_reported() -> None:
    tool = _check_size()
    sizes = [("a.py", 800), ("b.py", 801), ("a.py::f", 60), ("a.py::g", 61)]
    reported = [sentence.partition(": ")[0] for sentence in tool.find_oversized(sizes)]
    assert reported == ["b.py", "a.py::g"]


@cache
def _tree(path: Path) -> ast.Module:
    return ast.parse(path.read_text())


@cache
def _names_in(path: Path) -> list[tuple[int, str]]:
    return list(_names_used(_tree(path)))


def _names_used(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """Yield `(line, dotted name)` for every import, name and attribute of a source."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield from ((node.lineno, f"{node.module}.{alias.name}") for alias in node.names)
        elif isinstance(node, ast.Name):
            yield node.lineno, node.id
        elif isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
            yield node.lineno, f"{node.value.id}.{node.attr}"


def _modules() -> Iterator[str]:
    for path in SOURCES:
        parts = path.relative_to(PACKAGE.parent).with_suffix("").parts
        # Importing __main__ would start the command line; others are extras with PyTorch or Ray.
        needing = {
            ("backends", "torch"),
            ("backends", "gpu"),
            ("lab", "compress", "distill"),
            ("lab", "train"),
            ("fleet", "cluster", "ray_cluster"),
        }
        is_extra = any(parts[1 : 1 + len(needed)] == needed for needed in needing)
        if parts[-1] != "__main__" and not is_extra:
            yield ".".join(part for part in parts if part != "__init__")


def _locked_versions(lock: str) -> dict[str, set[str]]:
    """Return the locked versions of each package; some differ between versions of Python."""
    versions: dict[str, set[str]] = {}
    text = (ROOT / "requirements" / f"{lock}.txt").read_text()
    for name, version in re.findall(r"^([\w.-]+)==(\S+)", text, re.MULTILINE):
        versions.setdefault(canonicalize_name(name), set()).add(version)
    return versions


def _check_size() -> ModuleType:
    spec = importlib.util.spec_from_file_location("check_size", ROOT / "tools" / "check_size.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@cache
def _quoted_words() -> list[tuple[str, str]]:
    """Return the words of inline code in the documents, each with the document's path."""
    words = []
    for document in DOCUMENTS:
        text = re.sub(r"^```.*?^```$", "", document.read_text(), flags=re.DOTALL | re.MULTILINE)
        for code in re.findall(r"(?<!`)`([^`\n]+)`(?!`)", text):
            words += [
                (str(document.relative_to(ROOT)), word) for word in re.split(r"[\s(),=]+", code)
            ]
    return words


def _named_on(document: Path) -> list[str]:
    """Return the names of Python code on a page: its inline code, without paths and commands.

    Tables that list older names in their first column have the present names in the second.
    """
    text = re.sub(r"^```.*?^```$", "", document.read_text(), flags=re.DOTALL | re.MULTILINE)
    text = re.sub(r"^\|[^|\n]+\|([^|\n]+)\|$", r"\1", text, flags=re.MULTILINE)
    names = []
    for code in re.findall(r"(?<!`)`([^`\n]+)`(?!`)", text):
        if re.fullmatch(r"[\w.]+(\(\))?", code) and not code.endswith((".py", ".h", ".cpp")):
            names += code.removesuffix("()").split(".")
    return names


@cache
def _identifiers() -> set[str]:
    """Return the names that the package's code defines or uses, and those of its modules."""
    names = {part for path in SOURCES for part in path.relative_to(PACKAGE).with_suffix("").parts}
    for path in SOURCES:
        for node in ast.walk(_tree(path)):
            match node:
                case ast.Name(id=name) | ast.Attribute(attr=name) | ast.arg(arg=name):
                    names.add(name)
                case ast.ClassDef(name=name) | ast.FunctionDef(name=name):
                    names.add(name)
                case ast.AsyncFunctionDef(name=name):
                    names.add(name)
    return names


def _is_defined(dotted: str) -> bool:
    """Return whether a name such as `twostroke.core.env` is a module, or a name in a module."""
    parts = dotted.split(".")
    for count in range(len(parts), 0, -1):
        module = PACKAGE.parent.joinpath(*parts[:count])
        for path in (module / "__init__.py", module.with_suffix(".py")):
            if path.exists():
                names = parts[count : count + 1]
                return not names or re.search(rf"\b{names[0]}\b", path.read_text()) is not None
    return False


# Nouns that messages count, in the plural.
COUNTED_NOUNS = (
    "answers|arrivals|blocks|branches|bytes|cells|channels|characters|columns|cores|days|"
    "devices|dimensions|engines|entries|experts|files|groups|heads|ids|items|layers|levels|"
    "lines|machines|matrices|models|months|names|nodes|numbers|pages|parts|processes|prompts|"
    "ranks|replicas|requests|rows|samples|scores|slices|slots|states|steps|streams|strings|"
    "tables|tensors|tenants|texts|threads|tokens|turns|types|uploads|users|values|variables|"
    "vectors|weights"
)
# A plural after at most two words, such as " prompt tokens"; not a rate, such as " tokens/s".
COUNT_PATTERN = re.compile(rf" (?:(?!of |and )[a-zA-Z-]+ ){{0,2}}(?:{COUNTED_NOUNS})\b(?!/)")
COUNT = re.compile(r"(?!counted_noun)(?:.*\b(?:num_\w+|count|total|limit|length)|len\(.*\))$")


def uncounted_nouns(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """Yield f-strings, with their lines, in which a plural follows a count that may be 1.

    Counts are known by their names, such as `num_tokens` and `len(names)`. Constants, which are in
    capitals, and numbers with decimals are left out.
    """
    for node in ast.walk(tree):
        parts = node.values if isinstance(node, ast.JoinedStr) else []
        for value, after in itertools.pairwise(parts):
            text = after.value if isinstance(after, ast.Constant) else None
            if not isinstance(value, ast.FormattedValue) or not isinstance(text, str):
                continue
            form = ast.unparse(value.format_spec) if value.format_spec else ""
            is_count = "." not in form and "%" not in form and COUNT.match(ast.unparse(value.value))
            if is_count and COUNT_PATTERN.match(text):
                yield value.lineno, ast.unparse(node)


def test_counts_in_messages_agree_with_their_nouns() -> None:
    """A count that may be 1 is written by `counted_noun`: "1 token", not "1 tokens"."""
    faults = [
        f"{path.relative_to(ROOT)}:{line}: {text}"
        for path in SOURCES
        for line, text in uncounted_nouns(_tree(path))
    ]
    assert not faults, "use counted_noun of core/message_text.py"
    counts = ast.parse('f"{self.num_tokens:,} new tokens"; f"{len(names)} names are"')
    assert len([*uncounted_nouns(counts)]) == 2
    others = ast.parse('f"{MAX_TOKENS} tokens"; f"{num_tokens:.1f} tokens"; f"{count} tokens/s"')
    assert not [*uncounted_nouns(others)]
