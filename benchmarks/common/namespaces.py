"""Two hosts on one machine: network namespaces, joined by pairs of virtual interfaces."""

from __future__ import annotations

import os
import shutil
import subprocess
import time
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from itertools import count
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

_NETWORK = "10.201"  # and the number of a pair of interfaces
_COUNT = count()


@dataclass(frozen=True, slots=True)
class Hosts:
    """Namespaces, and their addresses by which they know each other."""

    names: tuple[str, str]
    addresses: tuple[str, str] = (f"{_NETWORK}.0.1", f"{_NETWORK}.0.2")

    def interface(self, host: int, pair: int = 0) -> str:
        """Return the name of a host's interface of a pair."""
        return f"{self.names[host]}{pair}"

    def command(self, host: int, command: Sequence[str]) -> list[str]:
        """Return the command that runs `command` on a host."""
        return ["ip", "netns", "exec", self.names[host], *command]

    def cut(self, pair: int = 0) -> None:
        """Break a connection: packets vanish, and nobody is told."""
        _ip("-n", self.names[0], "link", "set", self.interface(0, pair), "down")

    def mend(self, pair: int = 0) -> None:
        """Connect the hosts again."""
        _ip("-n", self.names[0], "link", "set", self.interface(0, pair), "up")


@cache
def obstacle() -> str | None:
    """Return why namespaces cannot be made here, or None."""
    if shutil.which("ip") is None:
        return "needs `ip` (Debian's iproute2)"
    try:
        with two_hosts():
            return None
    except subprocess.CalledProcessError as error:
        return f"needs the right to make network namespaces ({error.stderr.strip()})"


@contextmanager
def two_hosts(num_pairs: int = 1) -> Iterator[Hosts]:
    """Make two hosts with so many pairs of interfaces, and remove them in the end."""
    number = f"ts{os.getpid()}.{next(_COUNT)}"  # a removed namespace lingers for a moment
    names = (f"{number}a", f"{number}b")
    hosts = Hosts(names)
    try:
        for name in names:
            _ip("netns", "add", name)
            _ip("-n", name, "link", "set", "lo", "up")
        for pair in range(num_pairs):
            _join(hosts, pair)
        yield hosts
    finally:
        for name in names:
            subprocess.run(["ip", "netns", "delete", name], check=False, capture_output=True)


def _join(hosts: Hosts, pair: int) -> None:
    ends = [(name, hosts.interface(host, pair)) for host, name in enumerate(hosts.names)]
    (first, first_namespace), (second, other) = ends
    _ip(
        "link",
        "add",
        first_namespace,
        "netns",
        first,
        "type",
        "veth",
        "peer",
        "name",
        other,
        "netns",
        second,
    )
    for host, (name, interface) in enumerate(ends):
        address = f"{_NETWORK}.{pair}.{host + 1}/24"
        _ip("-n", name, "address", "add", address, "dev", interface)
        _ip("-n", name, "link", "set", interface, "up")
    while any("state UP" not in _ip("-n", name, "link", "show", end) for name, end in ends):
        time.sleep(0.02)  # the kernel takes up to a second to say that an interface runs


def _ip(*arguments: str) -> str:
    done = subprocess.run(["ip", *arguments], check=True, capture_output=True, text=True)
    return done.stdout
