"""Reads YAML files as structs; errors name the line and the nearest known name."""

from __future__ import annotations

import copy
import math
import re
from functools import reduce
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar

import msgspec

from twostroke.core.errors import UsageError, nearest
from twostroke.core.files import read_small_file
from twostroke.core.frozen import Frozen
from twostroke.core.mismatch import find_mismatch, join_path

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path

    from twostroke.core.mismatch import Mismatch

    Steps = Sequence[str | int]  # the names and indices from the root of the file to a value

T = TypeVar("T", bound=Frozen)

_STEP = re.compile(r"[^.\[\]]+")
_TYPE_TEXTS = {
    "str": "a text", "int": "a number", "float": "a fraction", "bool": "yes or no",
    "list": "a list", "dict": "fields (name: value)", "null": "nothing",
}  # fmt: skip
_EXPECTED_TYPE_TEXTS = _TYPE_TEXTS | {
    "int": "a whole number such as 2048",
    "float": "a number such as 2.5 or 1e3",
}
_INT, _FLOAT = "tag:yaml.org,2002:int", "tag:yaml.org,2002:float"
# Numbers as YAML 1.2 has them: PyYAML takes 1e3 for a text, 010 for 8 and 1:30 for 90.
_NUMBER_PATTERNS = {
    _INT: re.compile(r"[-+]?(0|[1-9][0-9]*)$"),
    _FLOAT: re.compile(
        r"[-+]?(\.[0-9]+|[0-9]+\.[0-9]*|[1-9][0-9]*(?=[eE]))([eE][-+]?[0-9]+)?$"
        r"|[-+]?\.(inf|Inf|INF)$|\.(nan|NaN|NAN)$"
    ),
}


class YamlFile:
    """A parsed YAML file that remembers the line of each value, for errors."""

    def __init__(self, path: Path, needs: str) -> None:
        """Parse the YAML file at `path`.

        `needs` is the text of the error if PyYAML is not installed.

        Raises:
            UsageError: the file is not YAML, or PyYAML is missing.
            ModelFormatError: the file cannot be read.
        """
        self._name, data = path.name, read_small_file(path)
        try:
            import yaml
        except ImportError:
            raise UsageError(needs) from None
        try:
            loader = _loader(yaml)(data.decode())
            self._root = loader.get_single_node()
            self._values = loader.construct_document(self._root) if self._root else None
        except UnicodeDecodeError:
            raise UsageError(f"{path.name} is not UTF-8 text.") from None
        except (yaml.YAMLError, ValueError, RecursionError) as error:  # such as 5,000 digits
            mark = getattr(error, "problem_mark", None)
            line = f", line {mark.line + 1}" if mark else ""
            problem = str(getattr(error, "problem", None) or error)
            raise UsageError(f"{path.name}{line}: this is not YAML: {problem}.") from None

    def read(self, kind: type[T]) -> T:
        """Return the file's values as a struct of the class `kind`.

        Raises:
            UsageError: a value is wrong, or a field is unknown.
        """
        try:
            result = msgspec.convert(self._values, kind)
        except UsageError as error:  # of __post_init__
            raise self.error_at(path_steps(error.field or ""), str(error)) from None
        except msgspec.ValidationError as error:
            mismatch = find_mismatch(kind, self._values)
            if mismatch is None:
                raise UsageError(f"{self._name}: {error}.") from None
            raise self._explained(mismatch, *self._locate(kind, mismatch.path)) from None
        for steps, number in _fractions(self._values):
            if not math.isfinite(number):  # 1e999 becomes inf
                path = reduce(join_path, map(_step_text, steps), "")
                raise self.error_at(steps, f"{path} must be a finite number, got {number}.")
        return result

    def error_at(self, path: Steps, text: str) -> UsageError:
        """Return an error about the value at `path` that names the file and the line.

        `path` has the names and indices that lead to the value, from the root of the file. If there
        is no such value, the line is the nearest parent's.
        """
        node, line = self._root, 1 if self._root is None else self._root.start_mark.line + 1
        for step in path:
            children = node.value if node is not None and node.id != "scalar" else []
            if isinstance(step, int):
                node = mark = children[step] if step < len(children) else None
                if isinstance(node, tuple):  # an entry of a mapping, whose name the path leaves out
                    break
            else:
                pairs = [child for child in children if isinstance(child, tuple)]
                mark, node = next((pair for pair in pairs if pair[0].value == step), (None, None))
            if mark is None:
                break
            line = mark.start_mark.line + 1
        return UsageError(f"{self._name}, line {line}: {text}")

    def _locate(self, kind: type[Any], path: str) -> tuple[str, Steps]:
        """Return the path of a mismatch with the names of mapping entries filled in, and its steps.

        `find_mismatch` writes `[...]` in place of such a name. The wrong entry is found by testing
        each entry of the mapping alone.
        """
        beginning, *parts = path.split("[...]")
        text, steps = beginning, path_steps(beginning)
        for part in parts:
            values = copy.deepcopy(self._values)
            mapping = reduce(lambda value, step: value[step], steps, values)
            entries = dict(mapping)
            for name, value in entries.items():
                mapping.clear()
                mapping[name] = value
                if find_mismatch(kind, values) is not None:
                    break
            text = join_path(text, str(name)) + part
            steps += [name, *path_steps(part)]
        return text, steps

    def _explained(self, mismatch: Mismatch, path: str, steps: Steps) -> UsageError:
        """Return the error about a value that does not fit its type, with the line of the value.

        `path` is the value's path as text, and `steps` are the names and indices in it.
        """
        where = f" ({path})" if path else ""
        actual = mismatch.actual
        match mismatch.problem:
            case "missing":
                reason = f"{path} is missing."
            case "unknown":
                hint = nearest(str(actual), mismatch.expected)
                fields = ", ".join(mismatch.expected)
                reason = f"there is no field '{actual}'.{hint} Fields: {fields}."
            case "word":
                hint = nearest(str(actual), mismatch.expected)
                words = ", ".join(mismatch.expected)
                reason = f"{path} must be one of {words}, got '{actual}'.{hint}"
            case "type":
                types = [_EXPECTED_TYPE_TEXTS[name] for name in mismatch.expected if name != "null"]
                kind = "float" if isinstance(actual, float) else str(actual)
                expected = " or ".join(types) or "nothing"
                reason = f"must be {expected}, got {_TYPE_TEXTS.get(kind, kind)}{where}."
            case _:
                reason = f"must {mismatch.limits}, got {actual}{where}."
        return self.error_at(steps, reason)


def _fractions(value: Any, steps: Steps = ()) -> Iterator[tuple[Steps, float]]:
    """Yield each number with a fraction inside a file's values, with the steps to it."""
    if isinstance(value, float):
        yield steps, value
    elif isinstance(value, dict | list):
        pairs = value.items() if isinstance(value, dict) else enumerate(value)
        for step, inner in pairs:
            yield from _fractions(inner, (*steps, step))


def _step_text(step: str | int) -> str:
    return f"[{step}]" if isinstance(step, int) else step


def path_steps(path: str) -> list[str | int]:
    """Return the names and indices in a path: `models[2].weights` is "models", 2, "weights"."""
    return [int(word) if word.isdecimal() else word for word in _STEP.findall(path)]


def _loader(yaml: Any) -> Any:
    class Loader(yaml.SafeLoader):  # type: ignore[misc]
        """A YAML loader with the numbers of YAML 1.2.

        Numbers without a fraction become integers. A name that occurs twice in a mapping is an
        error.
        """

        yaml_implicit_resolvers: ClassVar[dict[Any, Any]] = {
            first: [resolver for resolver in resolvers if resolver[0] not in _NUMBER_PATTERNS]
            for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
        }

        def compose_mapping_node(self, anchor: str | None) -> Any:
            node, names = super().compose_mapping_node(anchor), set[str]()
            for key, _ in node.value:
                if key.id == "scalar" and key.value in names:
                    problem = f"'{key.value}' stands there twice"
                    raise yaml.composer.ComposerError(None, None, problem, key.start_mark)
                names.add(str(key.value))
            return node

        def construct_yaml_float(self, node: Any) -> int | float:
            value: float = super().construct_yaml_float(node)
            return int(value) if value.is_integer() else value

    for tag, pattern in _NUMBER_PATTERNS.items():
        Loader.add_implicit_resolver(tag, pattern, list("-+.0123456789"))
    Loader.add_constructor(_FLOAT, Loader.construct_yaml_float)
    return Loader
