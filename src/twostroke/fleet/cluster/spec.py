"""The description of a fleet, as it is written in a YAML file."""

from __future__ import annotations

import re
from hashlib import sha256
from pathlib import Path
from typing import Final

import msgspec
from msgspec.structs import replace

from twostroke.core.env import install_command
from twostroke.core.errors import UsageError, nearest
from twostroke.core.frozen import Frozen, check_number, check_range
from twostroke.core.yaml_file import YamlFile, path_steps

Options = dict[str, str | int | float | bool | list[str]]

_LAST_PORT: Final = 65535
HOST: Final = "{host}"  # is replaced by the address of the replica's machine
PREFILL_PEERS: Final = "{prefill-peers}"  # by a file of that machine, which lists prefill engines
_FILE: Final = re.compile(r"(-\d{5}-of-\d{5})?\.(gguf|safetensors)$")
_NAME: Final = re.compile(r"[a-z0-9]([a-z0-9.-]{0,48}[a-z0-9])?")


class ReplicaPool(Frozen, forbid_unknown_fields=True, kw_only=True):
    """Replicas of one model in a fleet: ordinary servers with the same options.

    Attributes:
        model: a path, hf:owner/repo or a name, as for `twostroke serve`.
        name: the model's name for clients; by default the last part of `model`, without a
            file's suffix.
        replicas: the number of replicas, if it is fixed.
        min_replicas, max_replicas: bounds of the number of replicas; between them, the number
            depends on the work that waits in the router. With a minimum of 0 the pool has no
            replica while the model is not used.
        scale_down_after: seconds for which fewer replicas must be enough before a replica is
            drained.
        cpus: cores that a replica reserves; also its threads, unless `options` has others.
        memory: GB of memory that a replica reserves.
        resources: Ray's custom resources that a replica reserves, such as `{rack1: 1}`.
        prefill: the name of the pool whose replicas prefill prompts for this pool.
        peer_port: the port at which the first replica of a prefill pool listens for decode
            engines; the other replicas take the next ports.
        options: options of `twostroke serve`, without the dashes.
    """

    model: str
    name: str = ""
    replicas: int | None = None
    min_replicas: int = 1
    max_replicas: int = 1
    scale_down_after: float = 60.0
    cpus: float = 1.0
    memory: float = 0.0
    resources: dict[str, float] = msgspec.field(default_factory=dict)
    prefill: str = ""
    peer_port: int = 7800
    options: Options = msgspec.field(default_factory=dict)

    def check(self) -> None:
        """Check the ranges of all values of the pool; raises UsageError."""
        check_range(self, "peer_port", low=1, high=_LAST_PORT)
        if self.replicas is not None:
            check_range(self, "replicas", low=1, high=10_000)
            if (self.min_replicas, self.max_replicas) != (1, 1):
                raise UsageError("excludes min_replicas and max_replicas.", field="replicas")
        check_range(self, "min_replicas", low=0, high=10_000)
        check_range(self, "max_replicas", low=max(1, self.min_replicas), high=10_000)
        if not self.min_replicas and not self.name and "models" in self.options:
            reason = "must be at least 1 for servers of several models, or give them one name."
            raise UsageError(reason, field="min_replicas")
        check_range(self, "cpus", high=1e4)
        check_range(self, "memory", "scale_down_after", low=0, high=1e6)
        for name, amount in self.resources.items():
            check_number(f"resources.{name}", amount, low=0, high=1e12)
        for field in ("model", "name"):
            if getattr(self, field).startswith("-"):
                raise UsageError("must not begin with a dash.", field=field)
        if not self.model.strip() or not self.label:
            raise UsageError("must be a path, hf:owner/repo or a name.", field="model")

    @property
    def label(self) -> str:
        """The model's name for clients, which also names the pool."""
        return self.name or _FILE.sub("", Path(self.model.removeprefix("hf:")).name)

    @property
    def bounds(self) -> tuple[int, int]:
        """The minimum and maximum number of replicas of the pool."""
        fixed = self.replicas
        return (fixed, fixed) if fixed is not None else (self.min_replicas, self.max_replicas)

    @property
    def version(self) -> str:
        """A hash of the pool's fields that cannot change while a replica runs."""
        facts = (
            self.model,
            self.name,
            self.cpus,
            self.memory,
            self.resources,
            self.peer_port,
            self.options,
        )
        return sha256(msgspec.json.encode(facts, order="deterministic")).hexdigest()[:8]

    def as_prefill(self, number: int = 0) -> ReplicaPool:
        """Return the pool with a prefill engine's options, for the replica number `number`."""
        address = f"{HOST}:{self.peer_port + number}"
        return replace(self, options={**self.options, "role": "prefill", "peer-address": address})

    def as_decode(self) -> ReplicaPool:
        """Return the pool with the options of decode engines."""
        options = {**self.options, "role": "decode", "prefill-peers-file": PREFILL_PEERS}
        return replace(self, options=options)

    @property
    def arguments(self) -> tuple[str, ...]:
        """The command line of a replica after `twostroke`, without the address."""
        options: Options = {"threads": max(1, int(self.cpus)), **self.options}
        if self.name or "models" not in options:
            options["name"] = self.label  # by which the router counts its work
        return ("serve", self.model, *flags(options))


class RouterSpec(Frozen, forbid_unknown_fields=True, kw_only=True):
    """The address of a fleet's router, and its options of `twostroke route`."""

    host: str = "127.0.0.1"
    port: int = 8000
    options: Options = msgspec.field(default_factory=dict)

    def check(self) -> None:
        """Check the ranges of the router's values; raises UsageError."""
        check_range(self, "port", low=1, high=_LAST_PORT)

    @property
    def arguments(self) -> tuple[str, ...]:
        """The command line of the router after `twostroke`, without the address."""
        return ("route", *flags(self.options))

    @property
    def address(self) -> tuple[str, int]:
        """The host and the port on which the router listens."""
        return self.host, self.port


class FleetSpec(Frozen, forbid_unknown_fields=True, kw_only=True):
    """A fleet: a router, and the pools of replicas to which it forwards requests."""

    models: tuple[ReplicaPool, ...]
    name: str = "twostroke"
    router: RouterSpec = RouterSpec()

    def __post_init__(self) -> None:
        """Check that the fleet's pools fit together; raises UsageError."""
        if not self.models:
            raise UsageError("must name at least one model.", field="models")
        if not _NAME.fullmatch(self.name):
            reason = f"must have small letters, digits, dots and dashes, got '{self.name}'."
            raise UsageError(reason, field="name")
        labels = [pool.label for pool in self.models]
        for index, label in enumerate(labels):
            if label in labels[:index]:
                reason = f"is '{label}' for two models: give one another name."
                raise UsageError(reason, field=f"models[{index}].name")
        for index, pool in enumerate(self.models):
            if pool.prefill:
                self._check_prefill(pool, f"models[{index}].prefill")
        self._check_ports()
        self._check_waiting()

    def _check_waiting(self) -> None:
        """Check that requests may wait for pools that may have no replica; raises UsageError."""
        start_wait_s = self.router.options.get("start-wait")
        for index, pool in enumerate(self.models):
            if pool.bounds[0] == 0 and str(start_wait_s) in {"0", "0.0"}:
                reason = "needs a router that waits: remove start-wait from its options."
                raise UsageError(reason, field=f"models[{index}].min_replicas")

    @property
    def prefill_labels(self) -> set[str]:
        """The labels of prefill pools, to whose replicas the router sends no requests."""
        return {pool.prefill for pool in self.models if pool.prefill}

    def _check_ports(self) -> None:
        """Check that prefill pools do not use each other's ports; raises UsageError."""
        label_by_port: dict[int, str] = {}
        for index, pool in enumerate(self.models):
            if pool.label not in self.prefill_labels:
                continue
            last = pool.peer_port + pool.bounds[1]  # one more than replicas, for updates
            if last > _LAST_PORT:
                reason = f"needs the ports from {pool.peer_port} to {last}, and {_LAST_PORT} is "
                raise UsageError(reason + "the last one.", field=f"models[{index}].peer_port")
            for port in range(pool.peer_port, last + 1):
                if port in label_by_port:
                    reason = (
                        f"needs the ports from {pool.peer_port} to {last}, but "
                        f"{label_by_port[port]} has {port}: give one another peer_port."
                    )
                    raise UsageError(reason, field=f"models[{index}].peer_port")
                label_by_port[port] = pool.label

    def _check_prefill(self, pool: ReplicaPool, field: str) -> None:
        """Check the prefill pool that another pool uses; raises UsageError."""
        others = {other.label: other for other in self.models if other is not pool}
        other = others.get(pool.prefill)
        if other is None:
            hint = nearest(pool.prefill, others)
            raise UsageError(f"names no other model's pool: '{pool.prefill}'.{hint}", field=field)
        if other.prefill or other.model != pool.model:
            reason = f"must name a pool of the same model, without prefill: {pool.prefill} is not."
            raise UsageError(reason, field=field)


def read_spec(path: Path) -> tuple[FleetSpec, YamlFile]:
    """Read a fleet's spec from a YAML file.

    Returns the spec, and the file, which gives later errors their line numbers.

    Raises:
        UsageError: the file is not YAML, or a value is wrong; with the file's name and line.
        ModelFormatError: the file cannot be read.
    """
    package_hint = f"Fleets need the packages ray and pyyaml: run {install_command('cluster')}."
    file = YamlFile(path, package_hint)
    spec = file.read(FleetSpec)
    parts: list[tuple[list[str | int], ReplicaPool | RouterSpec]] = [(["router"], spec.router)]
    parts += [(["models", index], pool) for index, pool in enumerate(spec.models)]
    for position, part in parts:
        try:
            part.check()
        except UsageError as error:
            raise file.error_at([*position, *path_steps(error.field or "")], str(error)) from None
    return spec, file


def flags(options: Options) -> tuple[str, ...]:
    """Return options of a fleet's YAML file as command-line arguments.

    An option with the value `false` is left out; an option with a list is repeated for each value.
    """
    words: list[str] = []
    for name, option in options.items():
        for value in option if isinstance(option, list) else [option]:
            if value is not False:
                words += [f"--{name}"] if value is True else [f"--{name}", str(value)]
    return tuple(words)
