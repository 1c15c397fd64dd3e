"""The options of a router: its address, its replicas, its waiting times."""

from __future__ import annotations

from typing import TYPE_CHECKING

from msgspec import field

from twostroke.core.errors import UsageError, nearest
from twostroke.core.frozen import Frozen, check_range
from twostroke.fleet.routing.policy import POLICIES
from twostroke.server.http.limits import RequestLimits
from twostroke.server.http.origins import check_access, is_loopback

if TYPE_CHECKING:
    from pathlib import Path

    from twostroke.server.auth.keys import ApiKeys


class RouteOptions(Frozen):
    """A router's address and behaviour.

    Attributes:
        host, port: the address; port 0 takes a free one.
        replicas: the URLs of servers.
        discover: a DNS name and a port, whose addresses are further servers.
        listing: a file with the URLs of further servers, read again when it changes.
        policy: a key of `POLICIES`.
        api_keys, cors_origins, allowed_hosts, drain_s, access_log, limits: as a server's.
        replica_key: the key that the router shows to its replicas, also for its clients, and that
            may ask for its state; without it, clients' keys are passed on.
        wait_s: how long a request waits for a replica, if there is none.
        eject_s: how long a replica may be silent before its requests are given up.
        mixed: whether replicas may compute with other numerics than the first one.
        busy_s: the mean wait of replicas from which on more of them are wanted, for autoscalers.
        dashboard: whether to show the state of the fleet; None only if `host` is a loopback
            address.
    """

    host: str = "127.0.0.1"
    port: int = 8080
    replicas: tuple[str, ...] = ()
    discover: str | None = None
    listing: Path | None = None
    policy: str = "prefix"
    api_keys: ApiKeys | None = None
    cors_origins: tuple[str, ...] = ()
    allowed_hosts: tuple[str, ...] = ()
    drain_s: float = 30.0
    access_log: bool = False
    replica_key: str | None = None
    wait_s: float = 5.0
    eject_s: float = 5.0
    mixed: bool = False
    busy_s: float = 1.0
    dashboard: bool | None = None
    limits: RequestLimits = field(default_factory=RequestLimits)

    def __post_init__(self) -> None:
        """Refuse what is out of range.

        Raises:
            UsageError: there are neither replicas nor a name, or an option is wrong.
        """
        if not self.replicas and self.discover is None and self.listing is None:
            raise UsageError(
                "Name servers with --replica URL, --discover NAME:PORT or --replicas-file FILE."
            )
        if self.policy not in POLICIES:
            hint = nearest(self.policy, POLICIES)
            reason = f"must be one of {', '.join(POLICIES)}, got '{{value}}'.{hint}"
            raise UsageError(reason, field="policy", value=self.policy)
        check_range(self, "wait_s", least=0, most=3600)
        check_range(self, "eject_s", least=1, most=3600)
        check_range(self, "busy_s", least=0.001, most=3600)
        check_access(self)

    @property
    def has_keys(self) -> bool:
        """Whether clients need a key now."""
        return self.api_keys is not None and self.api_keys.are_required

    @property
    def shows_dashboard(self) -> bool:
        """Whether the state of the fleet is shown."""
        return is_loopback(self.host) if self.dashboard is None else self.dashboard
