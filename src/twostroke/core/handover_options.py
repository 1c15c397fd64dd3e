"""Options of engines of which one reads prompts and another one answers."""

from __future__ import annotations

from typing import Final

from twostroke.core.errors import Field, UsageError, nearest
from twostroke.core.frozen import Frozen

ROLES: Final = ("mixed", "prefill", "decode")
DISAGGREGATE: Final = ("auto", "always", "never")
PEER_LINKS: Final = ("auto", "socket", "nixl", "nixl-read", "nixl-write")
DEFAULT_PEER_ADDRESS: Final = "127.0.0.1:7800"


class DisaggregationOptions(Frozen):
    """Whether prompts are read by another engine than the one that answers.

    Attributes:
        role: "mixed" does both; "prefill" also reads prompts for decode engines, which connect to
            `peer_address`; "decode" lets the `prefill_peers` read prompts where `disaggregate` says
            so, and fetches the pages.
        peer_address: HOST:PORT to listen at; port 0 takes a free one.
        prefill_peers: HOST:PORT of each prefill engine.
        disaggregate: "always", "never", or "auto": where it saves time.
        peer_link: how pages travel between engines that share no memory: by their socket, or by
            NIXL, where the decode engine reads or the prefill engine writes. "auto" and "nixl" take
            what is measured to be faster.
    """

    role: str = "mixed"
    peer_address: str | None = None
    prefill_peers: tuple[str, ...] = ()
    disaggregate: str = "auto"
    peer_link: str = "auto"

    def __post_init__(self) -> None:
        """Refuse unknown names, and parts that do not fit together."""
        names = ("role", ROLES), ("disaggregate", DISAGGREGATE), ("peer_link", PEER_LINKS)
        for name, known in names:
            value = getattr(self, name)
            if value not in known:
                hint = nearest(value, known)
                reason = f"must be one of {', '.join(known)}, got '{{value}}'.{hint}"
                raise UsageError(reason, field=name, value=value)
        if self.role == "decode" and not self.prefill_peers:
            reason = "can be decode only with the address of a prefill engine: set {other}."
            raise UsageError(reason, field="role", other=Field("prefill_peers"))
        if self.role != "decode" and self.prefill_peers:
            reason = "needs {other} decode."
            raise UsageError(reason, field="prefill_peers", other=Field("role"))
        if self.role != "decode" and self.disaggregate != "auto":
            raise UsageError("needs {other} decode.", field="disaggregate", other=Field("role"))
        if self.role != "prefill" and self.peer_address is not None:
            raise UsageError("needs {other} prefill.", field="peer_address", other=Field("role"))
        if self.role == "mixed" and self.peer_link != "auto":
            reason = "needs {other} prefill or decode."
            raise UsageError(reason, field="peer_link", other=Field("role"))
        for address in self.prefill_peers:
            parse_address(address, "prefill_peers")
        parse_address(self.own_address, "peer_address")

    @property
    def own_address(self) -> str:
        """Where a prefill engine listens."""
        return self.peer_address or DEFAULT_PEER_ADDRESS


def parse_address(text: str, field: str) -> tuple[str, int]:
    """Return the host and the port of HOST:PORT.

    Raises:
        UsageError: it is something else.
    """
    host, colon, port = text.rpartition(":")
    if not (colon and host and port.isascii() and port.isdigit() and int(port) < 1 << 16):
        raise UsageError("must be HOST:PORT, got {value!r}.", field=field, value=text)
    return host.removeprefix("[").removesuffix("]"), int(port)
