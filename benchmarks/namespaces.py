"""Two hosts on one machine: network namespaces, joined by a pair of virtual interfaces."""

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

_NETWORK = "10.201.77"
_COUNT = count()


@dataclass(frozen=True, slots=True)
class Hosts:
    """Namespaces, their interfaces and their addresses."""

    names: tuple[str, str]
    interfaces: tuple[str, str]
    addresses: tuple[str, str] = (f"{_NETWORK}.1", f"{_NETWORK}.2")

    def command(self, host: int, command: Sequence[str]) -> list[str]:
        """Return the command that runs `command` on a host."""
        return ["ip", "netns", "exec", self.names[host], *command]

    def cut(self) -> None:
        """Break the connection: packets vanish, and nobody is told."""
        _ip("-n", self.names[0], "link", "set", self.interfaces[0], "down")

    def mend(self) -> None:
        """Connect the hosts again."""
        _ip("-n", self.names[0], "link", "set", self.interfaces[0], "up")


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
def two_hosts() -> Iterator[Hosts]:
    """Make two hosts, and remove them in the end."""
    number = f"ts{os.getpid()}.{next(_COUNT)}"  # a removed namespace lingers for a moment
    names = (f"{number}a", f"{number}b")
    hosts = Hosts(names, names)
    try:
        for name in names:
            _ip("netns", "add", name)
        _ip("link", "add", names[0], "netns", names[0], "type", "veth",
            "peer", "name", names[1], "netns", names[1])  # fmt: skip
        for name, address in zip(names, hosts.addresses, strict=True):
            _ip("-n", name, "address", "add", f"{address}/24", "dev", name)
            _ip("-n", name, "link", "set", name, "up")
            _ip("-n", name, "link", "set", "lo", "up")
        while any("state UP" not in _ip("-n", name, "link", "show", name) for name in names):
            time.sleep(0.02)  # the kernel takes up to a second to say that an interface runs
        yield hosts
    finally:
        for name in names:
            subprocess.run(["ip", "netns", "delete", name], check=False, capture_output=True)


def _ip(*arguments: str) -> str:
    done = subprocess.run(["ip", *arguments], check=True, capture_output=True, text=True)
    return done.stdout
