"""The options of a server: its address, its waiting times, its limits."""

from __future__ import annotations

from typing import TYPE_CHECKING

from msgspec import field

from twostroke.core.errors import UsageError
from twostroke.core.frozen import Frozen
from twostroke.server.http.errors import UnknownPathError
from twostroke.server.http.limits import RequestLimits
from twostroke.server.http.origins import check_access, is_loopback

if TYPE_CHECKING:
    from twostroke.server.auth.keys import ApiKeys


class Objective(Frozen):
    """A limit in seconds on a latency, for one class of service or, if None, for all.

    `measure` is one of `observe.objectives.MEASURES`.
    """

    measure: str
    limit_s: float
    service: str | None = None


class ServeOptions(Frozen):
    """A server's address and behaviour.

    Attributes:
        host, port: the address; port 0 takes a free one.
        api_keys: the valid keys and their tenants; None never needs a key.
        model_names: the names by which clients may ask for the model, the default first; empty for
            the model's own name.
        cors_origins: the web origins whose pages may use the server; "*", with keys, allows all.
        allowed_hosts: names by which clients may reach the server, besides its address.
        keep_alive_s: a silent stream sends a comment this often, so that proxies keep it open.
        drain_s: how long a stopping server lets running requests finish.
        dashboard: whether to show the dashboard's page and state; None shows them only if `host`
            is a loopback address.
        any_model: whether every name of a model stands for the one that is served.
        is_strict: whether fields that have no effect are refused, and not ignored.
        llama_metrics: whether `/metrics` has llama-server's names of counts, too.
        strict_limits: whether limits of tokens above what fits are refused, and not cut.
        splits_reasoning: whether reasoning is separated from the answers or left in them.
        parses_special: whether the texts of special tokens in raw prompts become these tokens,
            unless a request says otherwise.
        max_stored: how many answers of /v1/responses are stored; 0 stores none.
        max_stored_bytes: the size of all stored answers.
        objectives: goals for latency, in metrics and on the dashboard.
        access_log: whether to log a line for each request, to the logger `twostroke.access`.
        otlp_endpoint: where to send traces, by OTLP over HTTP; None sends none. Needs the extra
            `[traces]`.
        limits: limits for one client.
    """

    host: str = "127.0.0.1"
    port: int = 8000
    api_keys: ApiKeys | None = None
    model_names: tuple[str, ...] = ()
    cors_origins: tuple[str, ...] = ()
    allowed_hosts: tuple[str, ...] = ()
    keep_alive_s: float = 15.0
    drain_s: float = 30.0
    dashboard: bool | None = None
    any_model: bool = False
    is_strict: bool = False
    strict_limits: bool = False
    llama_metrics: bool = False
    splits_reasoning: bool = True
    parses_special: bool = True
    max_stored: int = 10_000
    max_stored_bytes: int = 64 * 1024 * 1024
    objectives: tuple[Objective, ...] = ()
    access_log: bool = False
    otlp_endpoint: str | None = None
    limits: RequestLimits = field(default_factory=RequestLimits)

    def __post_init__(self) -> None:
        """Check the names, the origins and `drain_s`.

        Raises:
            UsageError: a name is empty or not printable, an origin or a host is malformed, all
                origins are allowed without keys, or `drain_s` is over a day.
        """
        for name in self.model_names:
            if not name.strip() or not name.isprintable():
                reason = "must have printable characters, got {value!r}."
                raise UsageError(reason, field="model_names", value=name)
        check_access(self)

    @property
    def has_keys(self) -> bool:
        """Whether clients need a key now."""
        return self.api_keys is not None and self.api_keys.are_required

    @property
    def is_private(self) -> bool:
        """Whether only programs of this machine reach the server."""
        return is_loopback(self.host)

    @property
    def shows_dashboard(self) -> bool:
        """Whether the dashboard is shown."""
        return self.is_private if self.dashboard is None else self.dashboard

    def check_dashboard(self) -> None:
        """Raise UnknownPathError if the dashboard is off."""
        if not self.shows_dashboard:
            raise UnknownPathError(
                "The dashboard is off: start `twostroke serve` with --dashboard."
            )
