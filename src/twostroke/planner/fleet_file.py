"""Reads the YAML file that describes a fleet; errors name the line and the nearest word."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any, ClassVar, Literal

import msgspec

from twostroke.core.errors import TwostrokeError, UsageError, nearest
from twostroke.core.files import read_small_file
from twostroke.core.frozen import Frozen
from twostroke.core.ranges import check_range
from twostroke.planner.devices import find_device
from twostroke.planner.question import Question
from twostroke.program.storage import WEIGHTS

_UNKNOWN = re.compile(r"unknown field `(?P<field>.*?)`")
_WHERE = re.compile(r" - at `\$(?P<path>.*?)`$")
_STEP = re.compile(r"[^.\[\]]+")
_TYPES = re.compile(r"Expected `(?P<wanted>int|float)(?: \| null)?`, got `(?P<got>\w+)`")
_KINDS = {"str": "text", "float": "fraction", "bool": "yes or no", "array": "list"}
_INT, _FLOAT = "tag:yaml.org,2002:int", "tag:yaml.org,2002:float"
# Numbers as YAML 1.2 has them: PyYAML takes 1e3 for a text, 010 for 8 and 1:30 for 90.
_NUMBERS = {
    _INT: re.compile(r"[-+]?(0|[1-9][0-9]*)$"),
    _FLOAT: re.compile(
        r"[-+]?(\.[0-9]+|[0-9]+\.[0-9]*|[1-9][0-9]*(?=[eE]))([eE][-+]?[0-9]+)?$"
        r"|[-+]?\.(inf|Inf|INF)$|\.(nan|NaN|NAN)$"
    ),
}


class FleetModel(Frozen, forbid_unknown_fields=True, kw_only=True):
    """A model, its load and its objectives.

    Attributes:
        model: as for `planned_model`.
        requests_per_s: its load.
        name: how answers call it, if not as the model.
        weights: ways to store it (`WEIGHTS`), of which one is chosen for each replica; none for
            that of its file.
        prompt, output, cached, kv_format: as in `Question`.
        ttft, tpot: objectives in milliseconds.
        value: how much a request counts, if not all can be served.
    """

    model: str
    requests_per_s: float
    name: str = ""
    weights: str | tuple[str, ...] = ()
    prompt: int = 1024
    output: int = 256
    cached: float = 0.0
    kv_format: str = "f16"
    ttft: float | None = None
    tpot: float | None = None
    value: float = 1.0

    @property
    def label(self) -> str:
        """Its name in answers."""
        path = Path(self.model)
        return self.name or (path.parent.name if path.name == "config.json" else path.stem)

    @property
    def formats(self) -> tuple[str, ...]:
        """The ways to store it."""
        return (self.weights,) if isinstance(self.weights, str) else self.weights

    def question(self, mfu: float, mbu: float) -> Question:
        """Return the question of one replica on one device; UsageError if a value is wrong."""
        check_range(self, "requests_per_s", "value", most=1e12)
        check_range(self, "ttft", "tpot", most=1e9)
        for word in self.formats:
            if word not in WEIGHTS:
                words = f"must be among {', '.join(WEIGHTS)}, got '{word}'.{nearest(word, WEIGHTS)}"
                raise UsageError(words, field="weights")
        ttft_s, tpot_s = (None if ms is None else ms / 1e3 for ms in (self.ttft, self.tpot))
        return Question(
            prompt=self.prompt,
            output=self.output,
            cached=self.cached,
            kv_format=self.kv_format,
            ttft_s=ttft_s,
            tpot_s=tpot_s,
            mfu=mfu,
            mbu=mbu,
        )


class FleetQuestion(Frozen, forbid_unknown_fields=True, kw_only=True):
    """What a fleet must do, and what it may be made of.

    Attributes:
        models: what it runs.
        objective: "cost" carries all load for the least money; "performance" serves as much as
            devices and budget allow.
        stock: how many devices of each kind are there; without it devices are bought.
        devices: kinds that may be bought; none for all of the table that have a price.
        prices: $ an hour of a device, where that of the table does not hold.
        budget: $ an hour for all devices.
        most_devices: that divide one model.
        mfu, mbu: shares of arithmetic and bandwidth that the engine reaches.
        utilization: the share of its time for which a replica has work; the rest absorbs bursts.
        memory_share: of a device, for weights, keys and values.
    """

    models: tuple[FleetModel, ...]
    objective: Literal["cost", "performance"] = "cost"
    stock: dict[str, int] = msgspec.field(default_factory=dict)
    devices: tuple[str, ...] = ()
    prices: dict[str, float] = msgspec.field(default_factory=dict)
    budget: float | None = None
    most_devices: int = 8
    mfu: float = 1.0
    mbu: float = 1.0
    utilization: float = 0.8
    memory_share: float = 0.9

    def __post_init__(self) -> None:
        """Refuse what is out of range."""
        if not self.models:
            raise UsageError("must name at least one model.", field="models")
        check_range(self, "mfu", "mbu", "utilization", "memory_share", most=1)
        check_range(self, "most_devices", least=1, most=64)
        check_range(self, "budget", most=1e12)
        for field, values in (("stock", self.stock), ("prices", self.prices)):
            for name, value in values.items():
                if not 0 < value < 1e9:
                    raise UsageError(f"must be greater than 0, got {value} {name}.", field=field)
        if self.objective == "performance" and not self.stock and self.budget is None:
            raise UsageError("'performance' needs a stock or a budget.", field="objective")
        if self.stock and self.devices:
            raise UsageError("are what may be bought: leave them out, or stock.", field="devices")


def read_fleet(path: Path) -> FleetQuestion:
    """Return what a file asks.

    Raises:
        UsageError: it is not YAML, or a value is wrong; with the file's name and line.
        ModelFormatError: it cannot be read.
    """
    root, values = _parsed(path)
    return _Reading(path.name, root).question(values)


def at_line(path: Path, error: TwostrokeError) -> TwostrokeError:
    """Return an error about a field of the file with the field's line; others as they are."""
    if error.field is None:
        return error
    root, _ = _parsed(path)
    found = _Reading(path.name, root).at(_steps(error.field), str(error))
    return type(error)(str(found))


def _parsed(path: Path) -> tuple[Any, Any]:
    """Return the root node of a file and its values."""
    try:
        import yaml
    except ImportError:
        reason = "Fleet files need the packages highspy and pyyaml: run "
        raise UsageError(f"{reason}pip install 'twostroke[plan]'.") from None

    class Loader(yaml.SafeLoader):  # type: ignore[misc]
        """Reads numbers as YAML 1.2 has them; whole ones become integers."""

        yaml_implicit_resolvers: ClassVar[dict[Any, Any]] = {
            first: [one for one in found if one[0] not in _NUMBERS]
            for first, found in yaml.SafeLoader.yaml_implicit_resolvers.items()
        }

        def construct_yaml_float(self, node: Any) -> int | float:
            value: float = super().construct_yaml_float(node)
            return int(value) if value.is_integer() else value

    for tag, pattern in _NUMBERS.items():
        Loader.add_implicit_resolver(tag, pattern, list("-+.0123456789"))
    Loader.add_constructor(_FLOAT, Loader.construct_yaml_float)
    try:
        loader = Loader(read_small_file(path).decode())
        root = loader.get_single_node()
        return root, loader.construct_document(root) if root else None
    except UnicodeDecodeError:
        raise UsageError(f"{path.name} is not UTF-8 text.") from None
    except (yaml.YAMLError, ValueError) as error:  # ValueError: an integer of thousands of digits
        mark = getattr(error, "problem_mark", None)
        line = f", line {mark.line + 1}" if mark else ""
        problem = str(getattr(error, "problem", None) or error)
        raise UsageError(f"{path.name}{line}: this is not YAML: {problem}.") from None


def _steps(path: str) -> list[str | int]:
    return [int(one) if one.isdecimal() else one for one in _STEP.findall(path)]


class _Reading:
    """Turns values into a question; errors name the line of the YAML node at fault."""

    def __init__(self, name: str, root: Any) -> None:
        self._name, self._root = name, root

    def question(self, values: Any) -> FleetQuestion:
        """Return the question."""
        try:
            question = msgspec.convert(values, FleetQuestion)
        except UsageError as error:  # of __post_init__
            raise self.at([error.field or ""], str(error)) from None
        except msgspec.ValidationError as error:
            raise self._explained(str(error)) from None
        for index, one in enumerate(question.models):
            try:
                one.question(question.mfu, question.mbu)
            except UsageError as error:
                raise self.at(["models", index, error.field or ""], str(error)) from None
        for field in ("stock", "devices", "prices"):
            given = getattr(question, field)
            for index, device in enumerate(given):
                try:
                    find_device(device)
                except TwostrokeError as error:
                    step = index if field == "devices" else device
                    raise self.at([field, step], str(error)) from None
        return question

    def _explained(self, message: str) -> UsageError:
        """Return msgspec's message with the line of the value, and the nearest field."""
        found = _WHERE.search(message)
        path = found["path"] if found else ""
        steps = _steps(path)
        if unknown := _UNKNOWN.search(message):
            owner: type[Frozen] = FleetModel if steps else FleetQuestion
            field, known = unknown["field"], owner.__struct_fields__
            hint = f"there is no field '{field}'.{nearest(field, known)}"
            return self.at([*steps, field], f"{hint} Fields: {', '.join(known)}.")
        text = _WHERE.sub("", message)
        where = f" ({path.lstrip('.')})" if path else ""
        if types := _TYPES.match(text):
            is_whole = types["wanted"] == "int"
            kind = "whole number such as 2048" if is_whole else "number such as 2.5 or 1e3"
            text = f"must be a {kind}, got a {_KINDS.get(types['got'], types['got'])}"
        return self.at(steps, f"{text[0].lower()}{text[1:]}{where}.")

    def at(self, path: list[str | int], text: str) -> UsageError:
        """Return an error with the line of the node at `path`, or of its nearest parent."""
        node, line = self._root, 1 if self._root is None else self._root.start_mark.line + 1
        for step in path:
            children = node.value if node is not None and node.id != "scalar" else []
            if isinstance(step, int):
                node = mark = children[step] if step < len(children) else None
            else:
                pairs = [one for one in children if isinstance(one, tuple)]
                mark, node = next((one for one in pairs if one[0].value == step), (None, None))
            if mark is None:
                break
            line = mark.start_mark.line + 1
        return UsageError(f"{self._name}, line {line}: {text}")
