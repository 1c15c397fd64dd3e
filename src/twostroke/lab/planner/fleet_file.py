"""Reads the YAML file that describes a fleet; errors name the line and the nearest word."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

import msgspec

from twostroke.core.env import install_command
from twostroke.core.errors import TwostrokeError, UsageError, nearest
from twostroke.core.frozen import Frozen, check_range
from twostroke.core.yaml_file import YamlFile, steps
from twostroke.lab.planner.devices import find_device
from twostroke.lab.planner.question import LEAST_SHARE, Question, usual_budget
from twostroke.model.program.cost import WEIGHTS


def _needs() -> str:
    return f"Fleet files need the packages highspy and pyyaml: run {install_command('plan')}."


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
        stem = path.stem if path.suffix in {".gguf", ".json"} else path.name
        return self.name or (path.parent.name if path.name == "config.json" else stem)

    @property
    def formats(self) -> tuple[str, ...]:
        """The ways to store it."""
        return (self.weights,) if isinstance(self.weights, str) else self.weights

    def question(self, mfu: float, mbu: float, token_budget: int) -> Question:
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
            token_budget=token_budget,
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
        token_budget: as in `Question`.
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
    token_budget: int = usual_budget(is_here=False)
    utilization: float = 0.8
    memory_share: float = 0.9

    def __post_init__(self) -> None:
        """Refuse what is out of range."""
        if not self.models:
            raise UsageError("must name at least one model.", field="models")
        check_range(self, "mfu", "mbu", least=LEAST_SHARE, most=1)
        check_range(self, "utilization", "memory_share", most=1)
        check_range(self, "most_devices", least=1, most=64)
        check_range(self, "token_budget", least=1, most=1 << 27)
        check_range(self, "budget", most=1e12)
        for field, values in (("stock", self.stock), ("prices", self.prices)):
            for name, value in values.items():
                if not 0 < value < 1e9:
                    reason = "must be greater than 0 and less than 1,000,000,000"
                    raise UsageError(f"{reason}, got {value} {name}.", field=field)
        if self.objective == "performance" and not self.stock and self.budget is None:
            raise UsageError("'performance' needs a stock or a budget.", field="objective")
        if self.stock and self.devices:
            raise UsageError("are what may be bought: leave them out, or stock.", field="devices")


def read_fleet(path: Path) -> FleetQuestion:
    """Read the question in a file; raises as `read_fleet_with_lines`."""
    return read_fleet_with_lines(path)[0]


def read_fleet_with_lines(path: Path) -> tuple[FleetQuestion, YamlFile]:
    """Read the question in a file, with lines for later errors: a pipe can be read only once.

    Raises:
        UsageError: it is not YAML, or a value is wrong; with the file's name and line.
        ModelFormatError: it cannot be read.
    """
    file = YamlFile(path, _needs())
    question = file.read(FleetQuestion)
    for index, one in enumerate(question.models):
        try:
            one.question(question.mfu, question.mbu, question.token_budget)
        except UsageError as error:
            raise file.at(["models", index, error.field or ""], str(error)) from None
    for field in ("stock", "devices", "prices"):
        given = getattr(question, field)
        for index, device in enumerate(given):
            try:
                find_device(device)
            except TwostrokeError as error:
                step = index if field == "devices" else device
                raise file.at([field, step], str(error)) from None
    return question, file


def at_line(file: YamlFile, error: TwostrokeError) -> TwostrokeError:
    """Return an error about a field of the file with the field's line; others as they are."""
    if error.field is None:
        return error
    return type(error)(str(file.at(steps(error.field), str(error))))
