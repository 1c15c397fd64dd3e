"""Reads the YAML file of `--overflow`: APIs that answer requests for the replicas, by rule."""

from __future__ import annotations

import ipaddress
import re
from pathlib import Path
from typing import TYPE_CHECKING, Final, Literal
from urllib.parse import urlsplit

import msgspec
from msgspec.structs import replace

from twostroke.core.errors import UsageError
from twostroke.core.frozen import Frozen, check_number, check_range
from twostroke.core.yaml_file import YamlFile, path_steps
from twostroke.fleet.router.upstream import Address
from twostroke.server.auth.costs import REPLICAS_SIDE
from twostroke.server.http.model_names import bare_name

if TYPE_CHECKING:
    from twostroke.server.auth.usage_header import ReportedUsage

Protocol = Literal["openai", "anthropic"]
Rule = Literal["no_replica", "objective", "unknown_model"]

RULES: Final[tuple[Rule, ...]] = ("no_replica", "objective", "unknown_model")
_NEEDS_YAML: Final = "Overflow files need the package pyyaml: run pip install pyyaml."
_NAME: Final = re.compile(r"[a-z0-9]([a-z0-9.-]{0,48}[a-z0-9])?")
_MAX_PRICE: Final = 1e6
_MAX_TIMEOUT_S: Final = 3600
# Fields that the router must set itself, or must not lose.
_FIXED_FIELDS: Final = frozenset(("model", "messages", "stream", "stream_options"))


class TokenPrices(Frozen, forbid_unknown_fields=True, kw_only=True):
    """Prices of a model's tokens.

    Attributes:
        input, output: prices of a million tokens of prompts and of answers.
        cached: the price of prompt tokens from a cache; None for the price of input.
        cache_write: the price of prompt tokens that are written to a cache; None for the price of
            input.
    """

    input: float
    output: float
    cached: float | None = None
    cache_write: float | None = None

    def check(self, path: str) -> None:
        """Check that no price is out of range.

        `path` is the path of the prices in the YAML file, for errors.

        Raises:
            UsageError: a price is out of range.
        """
        for name in ("input", "output", "cached", "cache_write"):
            price = getattr(self, name)
            if price is not None:
                check_number(f"{path}.{name}", price, low=0, high=_MAX_PRICE)

    def cost(self, used: ReportedUsage) -> float:
        """Return the price of the tokens that a request has used."""
        cached_price = self.input if self.cached is None else self.cached
        write_price = self.input if self.cache_write is None else self.cache_write
        num_cached = min(used.cached_tokens, used.prompt_tokens)
        num_written = min(used.cache_write_tokens, used.prompt_tokens - num_cached)
        num_plain = used.prompt_tokens - num_cached - num_written
        price = num_plain * self.input + num_cached * cached_price + num_written * write_price
        return (price + used.completion_tokens * self.output) / 1e6


class BoughtModel(TokenPrices, forbid_unknown_fields=True, kw_only=True):
    """An upstream's model that may answer requests for a model of the router, with its prices.

    Attributes:
        model: the upstream's name of the model.
    """

    model: str

    def check(self, path: str) -> None:
        """Check the name and the prices; raises UsageError as `TokenPrices.check`."""
        if not self.model.strip():
            raise UsageError("must be the upstream's name of the model.", field=f"{path}.model")
        super().check(path)


class UpstreamSpec(Frozen, forbid_unknown_fields=True, kw_only=True):
    """An upstream: an API that may answer requests in place of replicas.

    Attributes:
        name: the upstream's name in headers, logs and metrics.
        url: the base URL, as the vendor's own client library takes it.
        protocol: the requests that the upstream answers: chat completions ("openai") or messages
            ("anthropic").
        key_file: the file with the API key; a relative path starts at the folder of the YAML file.
        models: by the name that clients send, the upstream's model with its prices.
        when: the rules by which the upstream is used.
        max_cost_per_day: the spending in a day (UTC) after which the upstream is not used any more.
        max_parallel: the maximum number of requests at the same time.
        connect_timeout: seconds until a connection must be open.
        read_timeout: seconds of silence after which an answer is given up.
        ca_file: a file with certificates of authorities, in place of the system's certificates.
        drop: more request fields that the upstream does not know, and that are removed.
        rename: the upstream's names of request fields, by the usual name.
    """

    name: str
    url: str
    protocol: Protocol
    key_file: str
    models: dict[str, BoughtModel]
    when: tuple[Rule, ...]
    max_cost_per_day: float
    max_parallel: int = 64
    connect_timeout: float = 5.0
    read_timeout: float = 300.0
    ca_file: str = ""
    drop: tuple[str, ...] = ()
    rename: dict[str, str] = msgspec.field(default_factory=dict)

    def check(self) -> None:
        """Check all values of the upstream; raises UsageError with the field."""
        if not _NAME.fullmatch(self.name) or self.name == REPLICAS_SIDE:
            reason = "must have small letters, digits, dots and dashes, and not be 'here', got"
            raise UsageError(f"{reason} '{self.name}'.", field="name")
        self.address()
        if not self.models:
            raise UsageError("must name at least one model.", field="models")
        for name, bought in self.models.items():
            bought.check(f"models.{name}")
        if not self.when:
            raise UsageError(f"must have rules of {', '.join(RULES)}.", field="when")
        check_range(self, "max_cost_per_day", high=1e9)
        check_range(self, "max_parallel", low=1, high=100_000)
        check_range(self, "connect_timeout", "read_timeout", high=_MAX_TIMEOUT_S)
        for field, names in (
            ("drop", self.drop),
            ("rename", (*self.rename, *self.rename.values())),
        ):
            for fixed_name in _FIXED_FIELDS.intersection(names):
                raise UsageError(f"must not name '{fixed_name}', which is needed.", field=field)

    def address(self) -> Address:
        """Return the address of the upstream, with the whole path of its URL.

        Raises:
            UsageError: the URL is not valid, or would send the key unencrypted.
        """
        address = Address.of(self.url, "url")
        if not address.is_tls and not _is_loopback(address.host):
            reason = "must begin with https://, since http:// would send the key unencrypted"
            raise UsageError(f"{reason}; only loopback addresses may have http://.", field="url")
        url = self.url if "//" in self.url else f"http://{self.url}"
        return replace(address, path=urlsplit(url).path.rstrip("/"))

    @property
    def target(self) -> bytes:
        """The path of requests to the upstream, which is appended to the path of its URL."""
        if self.protocol == "anthropic":
            return b"/messages" if self.address().path.endswith("/v1") else b"/v1/messages"
        return b"/chat/completions" if self.address().path else b"/v1/chat/completions"

    def find_model(self, name: str) -> BoughtModel | None:
        """Return the upstream's model for a model name of a client; None if the file has none.

        If no name is equal, owner, tag and upper case are ignored.
        """
        if name in self.models or not name:
            return self.models.get(name)
        bare = bare_name(name)
        return next((self.models[each] for each in self.models if bare_name(each) == bare), None)


class ReplicaCosts(Frozen, forbid_unknown_fields=True, kw_only=True):
    """The costs of the replicas: by the hour, or by tokens.

    Attributes:
        price_per_hour: the price of a replica per hour.
        models: prices of a million tokens, by the replicas' name of the model.
    """

    price_per_hour: float | None = None
    models: dict[str, TokenPrices] = msgspec.field(default_factory=dict)

    def check(self) -> None:
        """Check all prices; raises UsageError with the field."""
        check_range(self, "price_per_hour", low=0, high=_MAX_PRICE)
        if self.price_per_hour is not None and self.models:
            reason = "has no effect beside price_per_hour: replicas cost by the hour or by tokens."
            raise UsageError(reason, field="models")
        for name, prices in self.models.items():
            prices.check(f"models.{name}")


class OverflowSpec(Frozen, forbid_unknown_fields=True, kw_only=True):
    """The upstreams of a router, in the order in which they are tried, and the rules for them.

    Attributes:
        upstreams: the upstreams.
        objective: the limit for the time to the first token, in seconds; if the expected time is
            longer, the rule `objective` applies.
        never_for: tenants whose requests are never sent to an upstream.
        currency: the currency of all prices.
        replicas: the costs of the replicas.
    """

    upstreams: tuple[UpstreamSpec, ...]
    objective: float | None = None
    never_for: tuple[str, ...] = ()
    currency: str = "USD"
    replicas: ReplicaCosts = ReplicaCosts()

    def __post_init__(self) -> None:
        """Check that the parts of the file fit together; raises UsageError."""
        if not self.upstreams:
            raise UsageError("must name at least one upstream.", field="upstreams")
        check_range(self, "objective", high=_MAX_TIMEOUT_S)
        names = [upstream.name for upstream in self.upstreams]
        for index, upstream in enumerate(self.upstreams):
            if upstream.name in names[:index]:
                reason = f"is '{upstream.name}' for two upstreams: give one another name."
                raise UsageError(reason, field=f"upstreams[{index}].name")
            if "objective" in upstream.when and self.objective is None:
                reason = (
                    "has the rule 'objective', which needs the field objective of the file: the "
                    "seconds in which the first token should come."
                )
                raise UsageError(reason, field=f"upstreams[{index}].when")


def read_overflow(path: Path) -> OverflowSpec:
    """Return the overflow rules in a YAML file; paths in it are resolved.

    Raises:
        UsageError: the file is not YAML, or a value is wrong; with the file's name and line.
        ModelFormatError: the file cannot be read.
    """
    file = YamlFile(path, _NEEDS_YAML)
    spec = file.read(OverflowSpec)
    parts: list[tuple[list[str | int], UpstreamSpec | ReplicaCosts]] = [
        (["replicas"], spec.replicas)
    ]
    parts += [(["upstreams", index], upstream) for index, upstream in enumerate(spec.upstreams)]
    for position, part in parts:
        try:
            part.check()
        except UsageError as error:
            raise file.error_at([*position, *path_steps(error.field or "")], str(error)) from None
    folder = path.parent
    upstreams = tuple(
        replace(
            upstream,
            key_file=str(folder / Path(upstream.key_file).expanduser()),
            ca_file=str(folder / Path(upstream.ca_file).expanduser()) if upstream.ca_file else "",
        )
        for upstream in spec.upstreams
    )
    return replace(spec, upstreams=upstreams)


def _is_loopback(host: str) -> bool:
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
