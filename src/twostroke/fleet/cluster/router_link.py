"""The router as its manager sees it: a file that says which replicas there are, and its state."""

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

_ANSWER_S: Final = 2.0
_EVERYWHERE: Final = {"0.0.0.0": "127.0.0.1", "::": "::1"}  # noqa: S104 - not bound here


class RouterLink:
    """A `Router` on this machine."""

    def __init__(self, fleet: str, spec: RouterSpec, key: str) -> None:
        """Write to a file of the cache folder; it has the replicas of an earlier manager."""
        folder = env.cache_dir() / "fleet"
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        self.listing: Path = folder / f"{fleet}.replicas"
        self._host = _EVERYWHERE.get(spec.host, spec.host)
        self._port, self._key = spec.port, key
        self._told: str | None = None
        if not self.listing.exists():
            self.tell({})

    def tell(self, replicas: Mapping[str, Sequence[str]]) -> None:
        """Write the URLs of all replicas."""
        urls = sorted({url for found in replicas.values() for url in found})
        text = "".join(f"{url}\n" for url in urls)
        if text != self._told:
            write_text(self.listing, text)
            self._told = text

    def look(self) -> Mapping[str, RouterView]:
        """Return what the router knows, by model; nothing while it does not answer."""
        state = self._state()
        replicas, wanted = state.get("replicas", ()), state.get("wanted_by_model", {})
        running = {one["url"]: one["running"] for one in replicas}
        readers = {one["url"]: one.get("prefill_per_decode") for one in replicas}
        return {model: RouterView(count, running, readers) for model, count in wanted.items()}

    def close(self) -> None:
        """Remove the file."""
        self.listing.unlink(missing_ok=True)

    def _state(self) -> dict[str, Any]:
        connection = http.client.HTTPConnection(self._host, self._port, timeout=_ANSWER_S)
        try:
            headers = {"authorization": f"Bearer {self._key}"}
            connection.request("GET", "/api/state", headers=headers)
            answer = connection.getresponse()
            found = json.loads(answer.read()) if answer.status == http.client.OK else {}
        except (OSError, http.client.HTTPException, ValueError):
            return {}
        finally:
            connection.close()
        return found if isinstance(found, dict) else {}
