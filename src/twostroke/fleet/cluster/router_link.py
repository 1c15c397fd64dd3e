"""The manager's access to the router: a file that lists the replicas, and the router's state."""

from __future__ import annotations

import http.client
import json
from typing import TYPE_CHECKING, Any, Final

from twostroke.core import env
from twostroke.core.files import write_text
from twostroke.fleet.cluster.manager import RouterView

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

    from twostroke.fleet.cluster.spec import RouterSpec

_TIMEOUT_S: Final = 2.0
# The address to connect to, for addresses that stand for all interfaces.
_LOOPBACK: Final = {"0.0.0.0": "127.0.0.1", "::": "::1"}  # noqa: S104 - not bound here


class RouterLink:
    """The manager's access to a router on this machine; implements `RouterControl`.

    Attributes:
        listing: the file that lists the replicas, for `twostroke route --replicas-file`.
    """

    def __init__(self, fleet: str, spec: RouterSpec, key: str) -> None:
        """List the replicas in a file of the cache folder.

        An existing file of an earlier manager stays until `set_replicas` is called.

        Args:
            fleet: the name of the fleet.
            spec: the router's spec.
            key: the secret with which the manager asks the router for its state.
        """
        folder = env.cache_dir() / "fleet"
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        self.listing: Path = folder / f"{fleet}.replicas"
        self._host = _LOOPBACK.get(spec.host, spec.host)
        self._port = spec.port
        self._key = key
        self._written_text: str | None = None
        if not self.listing.exists():
            self.set_replicas({})

    def set_replicas(self, replicas: Mapping[str, Sequence[str]]) -> None:
        """Write the URLs of all replicas to the file that the router reads."""
        urls = sorted({url for model_urls in replicas.values() for url in model_urls})
        text = "".join(f"{url}\n" for url in urls)
        if text != self._written_text:
            write_text(self.listing, text)
            self._written_text = text

    def views(self) -> Mapping[str, RouterView]:
        """Return the load of each model that the router sees; empty while it does not answer."""
        state = self._state()
        replicas = state.get("replicas", ())
        running = {replica["url"]: replica["running"] for replica in replicas}
        prefill_per_decode = {
            replica["url"]: replica.get("prefill_per_decode") for replica in replicas
        }
        return {
            model: RouterView(num_wanted, running, prefill_per_decode)
            for model, num_wanted in state.get("wanted_by_model", {}).items()
        }

    def close(self) -> None:
        """Remove the file that lists the replicas."""
        self.listing.unlink(missing_ok=True)

    def _state(self) -> dict[str, Any]:
        """Return the router's `/api/state` as an object; empty if the router does not answer."""
        connection = http.client.HTTPConnection(self._host, self._port, timeout=_TIMEOUT_S)
        try:
            headers = {"authorization": f"Bearer {self._key}"}
            connection.request("GET", "/api/state", headers=headers)
            response = connection.getresponse()
            is_ok = response.status == http.client.OK
            state = json.loads(response.read()) if is_ok else {}
        except (OSError, http.client.HTTPException, ValueError):
            return {}
        finally:
            connection.close()
        return state if isinstance(state, dict) else {}
