"""Run a command as two ranks on two hosts: network namespaces of this machine, joined by TCP.

Used by links.py and parallel_rows.py. Rank 0 has this program's standard input and output. Needs
the right to create namespaces.
"""

from __future__ import annotations

import os
import secrets
import socket
import subprocess
import sys

from benchmarks.common.namespaces import two_hosts


def main() -> int:
    """Run the command in the arguments, and return rank 0's exit code."""
    with two_hosts() as hosts:
        with socket.socket() as free:
            free.bind(("", 0))
            port = free.getsockname()[1]
        shared = {
            "WORLD_SIZE": "2",
            "MASTER_ADDR": hosts.addresses[0],
            "MASTER_PORT": str(port),
            "TWOSTROKE_RANK_SECRET": secrets.token_hex(16),
        }
        first, second = (
            {**os.environ, **shared, "RANK": str(rank), "LOCAL_RANK": "0"} for rank in (0, 1)
        )
        command = sys.argv[1:]
        other = subprocess.Popen(
            hosts.command(1, command), env=second, stdin=subprocess.DEVNULL, stdout=sys.stderr
        )
        try:
            return subprocess.run(hosts.command(0, command), env=first, check=False).returncode
        finally:
            other.kill()
            other.wait()


if __name__ == "__main__":
    sys.exit(main())
