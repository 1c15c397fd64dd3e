"""Reads the YAML file of a fleet; errors name the line, and the nearest known word."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

import msgspec

from twostroke.core.env import install_command
from twostroke.core.errors import TwostrokeError, UsageError, nearest
from twostroke.core.frozen import Frozen, check_range
from twostroke.core.yaml_file import YamlFile, path_steps
from twostroke.lab.planner.devices import find_device
from twostroke.lab.planner.question import MIN_EFFICIENCY, Question, default_token_budget
from twostroke.model.program.cost import WEIGHTS


def _missing_packages() -> str:
    return f"Fleet files need the packages highspy and pyyaml: run {install_command('plan')}."


class FleetModel(Frozen, forbid_unknown_fields=True, kw_only=True):
    """A model that a fleet must serve: its load and its latency objectives.

    Attributes:
        model: a name or path, as in `load_planned_model`.
        requests_per_s: its load.
        name: its name in answers; empty for the name of the model.
        weights: weight formats (keys of `WEIGHTS`); each replica uses one format. Empty for the
            format of the model's file.
        prompt, output, cached, kv_format: as in `Question`.
        ttft, tpot: objectives in milliseconds.
        value: value of a request, if not all requests can be served.
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
        """The name of the model in the fleet's plan."""
        path = Path(self.model)
        stem = path.stem if path.suffix in {".gguf", ".json"} else path.name
        return self.name or (path.parent.name if path.name == "config.json" else stem)

    @property
    def formats(self) -> tuple[str, ...]:
        """The weight formats that replicas may use; empty for the format of the model's file."""
        return (self.weights,) if isinstance(self.weights, str) else self.weights

    def question(self, mfu: float, mbu: float, token_budget: int) -> Question:
        """Return the planning question for one replica of the model on one device.

        Raises:
            UsageError: a value is wrong.
        """
        check_range(self, "requests_per_s", "value", high=1e12)
        check_range(self, "ttft", "tpot", high=1e9)
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
    """The models and loads of a fleet, and the devices that it may have.

    Attributes:
        models: the models that the fleet serves.
        objective: "cost" serves all load at the lowest price; "performance" serves the most
            valuable load that devices and budget allow.
        stock: number of available devices of each kind; empty if devices are bought.
        devices: kinds that may be bought; empty for all kinds of the table with a price.
        prices: $ per hour by device, which replace the prices of the table.
        budget: most $ per hour for all devices.
        most_devices: largest number of devices that divide one model.
        mfu, mbu: shares of the peak arithmetic and bandwidth that the engine reaches.
        token_budget: as in `Question`.
        utilization: share of its time for which a replica has work; the rest absorbs bursts.
        memory_share: share of a device's memory for weights, keys and values.
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
    token_budget: int = default_token_budget(is_here=False)
    utilization: float = 0.8
    memory_share: float = 0.9

    def __post_init__(self) -> None:
        """Raise UsageError, with the field, if a number of the question is out of range."""
        if not self.models:
            raise UsageError("must name at least one model.", field="models")
        check_range(self, "mfu", "mbu", low=MIN_EFFICIENCY, high=1)
        check_range(self, "utilization", "memory_share", high=1)
        check_range(self, "most_devices", low=1, high=64)
        check_range(self, "token_budget", low=1, high=1 << 27)
        check_range(self, "budget", high=1e12)
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
    """Return the fleet question in a YAML file.

    Raises:
        UsageError, ModelFormatError: as `read_fleet_with_lines`.
    """
    return read_fleet_with_lines(path)[0]


def read_fleet_with_lines(path: Path) -> tuple[FleetQuestion, YamlFile]:
    """Return the fleet question in a YAML file, and the file's lines for later errors.

    The file is read once, since it may be a pipe.

    Raises:
        UsageError: the file is not YAML, or a value is wrong; the message names file and line.
        ModelFormatError: the file cannot be read.
    """
    file = YamlFile(path, _missing_packages())
    question = file.read(FleetQuestion)
    for index, model in enumerate(question.models):
        try:
            model.question(question.mfu, question.mbu, question.token_budget)
        except UsageError as error:
            raise file.error_at(["models", index, error.field or ""], str(error)) from None
    for field in ("stock", "devices", "prices"):
        names = getattr(question, field)
        for index, device in enumerate(names):
            try:
                find_device(device)
            except TwostrokeError as error:
                step = index if field == "devices" else device
                raise file.error_at([field, step], str(error)) from None
    return question, file


def at_line(file: YamlFile, error: TwostrokeError) -> TwostrokeError:
    """Return `error` with the line number of its field in the fleet's file in its message.

    An error that is about no field is returned unchanged.
    """
    if error.field is None:
        return error
    return type(error)(str(file.error_at(path_steps(error.field), str(error))))
