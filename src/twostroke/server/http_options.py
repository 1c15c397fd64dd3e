"""The options that a server and a router share: their address and their clients."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, ClassVar, Final

from msgspec import field

from twostroke.core.option_schema import Option, OptionStruct, check

if TYPE_CHECKING:
    from twostroke.server.auth.keys import ApiKeys  # noqa: TC004 - slow imports
    from twostroke.server.http.limits import RequestLimits  # noqa: TC004

PORT: Final = Option("--port", low=0, high=65535, help="TCP port to listen at; 0 takes a free one.")
_MAX_DRAIN_S: Final = 86_400


def _default_limits() -> RequestLimits:
    from twostroke.server.http.limits import RequestLimits  # slow: imports the HTTP framework

    return RequestLimits()


class HttpOptions(OptionStruct):
    """The options that a server and a router share: address, API keys, origins and limits.

    Attributes:
        api_keys: the valid API keys and their tenants; None needs no key.
        record_trace: the file to which a trace of the requests is recorded; None records no trace.
        limits: limits for the size and number of one client's requests.
    """

    SECTION: ClassVar[str] = "Options"

    host: Annotated[str, Option("--host", help="Address to listen at.")] = "127.0.0.1"
    port: Annotated[int, PORT] = 8000
    api_keys: Annotated[
        ApiKeys | None,
        Option(
            "--api-keys",
            form="path",
            metavar="FILE",
            default="no key is needed",
            help="Require an API key. Each line of FILE is KEY or TENANT KEY; the key in "
            "TWOSTROKE_API_KEY is accepted as well.",
        ),
    ] = None
    cors_origins: Annotated[
        tuple[str, ...],
        Option(
            "--cors-origin",
            metavar="ORIGIN",
            help="Let web pages of this origin, such as https://app.example, use the server; "
            "repeatable. '*' allows all origins, if keys are required.",
        ),
    ] = ()
    allowed_hosts: Annotated[
        tuple[str, ...],
        Option(
            "--allowed-host",
            metavar="NAME",
            help="Answer to this host name as well, such as the name of a proxy; repeatable. If "
            "keys are required, every name is answered unless this option is given.",
        ),
    ] = ()
    drain_s: Annotated[
        float,
        Option(
            "--drain",
            low=0,
            high=_MAX_DRAIN_S,
            help="Seconds, at most a day, that running answers may take when the server stops.",
        ),
    ] = 30.0
    dashboard: Annotated[
        bool | None,
        Option(
            "--dashboard/--no-dashboard",
            section="Observing",
            default="only if --host is a loopback address",
            help="Serve the dashboard and /api/state; `serve` also serves plans at /api/plan.",
        ),
    ] = None
    access_log: Annotated[
        bool,
        Option(
            "--access-log/--no-access-log",
            section="Observing",
            help="Log a line for each request, to the logger twostroke.access.",
        ),
    ] = False
    record_trace: Annotated[
        Path | None,
        Option(
            "--record-trace",
            section="Observing",
            form="path",
            metavar="FILE",
            default="none is recorded",
            help="Append times, token counts and shared beginnings of requests to FILE, without "
            "any text; `simulate --trace FILE` replays them.",
        ),
    ] = None
    limits: RequestLimits = field(default_factory=_default_limits)

    def __post_init__(self) -> None:
        """Check that each option, each allowed origin and each allowed host name is valid.

        Raises:
            UsageError: a value is out of range, an origin or a host name is malformed, or all
                origins are allowed without keys.
        """
        from twostroke.server.http.origins import check_access

        check(self)
        check_access(self)

    @property
    def has_keys(self) -> bool:
        """Whether clients need an API key at present.

        Operators may create the first key while the server runs.
        """
        return self.api_keys is not None and self.api_keys.are_required

    @property
    def is_private(self) -> bool:
        """Whether the server listens at a loopback address, so only this machine reaches it."""
        from twostroke.server.http.origins import is_loopback

        return is_loopback(self.host)

    @property
    def shows_dashboard(self) -> bool:
        """Whether the server serves the dashboard.

        Without the option `--dashboard`, it does so only at loopback addresses.
        """
        return self.is_private if self.dashboard is None else self.dashboard
