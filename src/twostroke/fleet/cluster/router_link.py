"""How a fleet's manager and its router communicate: listed replicas and models, and the load."""

from __future__ import annotations

import http.client
import json
from typing import TYPE_CHECKING, Any, Final, Protocol

import msgspec

from twostroke.core import env
from twostroke.core.errors import UsageError
from twostroke.core.files import read_regular_file, write_text
from twostroke.core.frozen import Frozen

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

    from twostroke.fleet.cluster.spec import RouterSpec

_TIMEOUT_S: Final = 2.0
# The address to connect to, for addresses that stand for all interfaces.
_LOOPBACK: Final = {"0.0.0.0": "127.0.0.1", "::": "::1"}  # noqa: S104 - not bound here


class ListedModel(Frozen, forbid_unknown_fields=True, kw_only=True):
    """A model that may have no replica until requests wait for it and a replica is started.

    Attributes:
        name: the model's name for clients.
        takes_any_name: whether requests with an unknown name are for this model.
        failure: why its replicas do not start, if they have failed again and again; else empty.
    """

    name: str
    takes_any_name: bool = False
    failure: str = ""


_decoder: Final = msgspec.json.Decoder(tuple[ListedModel, ...])


class RouterView(Frozen):
    """The load of a model that the router sees.

    Attributes:
        num_wanted: the number of replicas that the present work needs.
        running: requests of each replica, by URL.
        num_requests: requests sent to replicas so far.
        prefill_per_decode: the number of prefill replicas that a decode replica can keep busy, by
            URL of the decode replica; None if it is not known.
    """

    num_wanted: int
    running: Mapping[str, int]
    num_requests: int = 0
    prefill_per_decode: Mapping[str, float | None] = {}


class RouterControl(Protocol):
    """The manager's access to the fleet's router."""

    def set_replicas(self, replicas: Mapping[str, Sequence[str]]) -> None:
        """Tell the router the URLs of all replicas, by model."""

    def set_startable(self, models: Sequence[ListedModel]) -> None:
        """Tell the router which models may have no replica, and whether their replicas start."""

    def views(self) -> Mapping[str, RouterView]:
        """Return the load of each model that the router sees; empty while it does not answer."""


class RouterLink:
    """The manager's access to a router on this machine; implements `RouterControl`.

    Attributes:
        listing: the file that lists the replicas, for `twostroke route --replicas-file`.
        model_listing: the file that lists the models that may have no replica, for `--models-file`.
    """

    def __init__(self, fleet: str, spec: RouterSpec, key: str) -> None:
        """Prepare to list the replicas and the models in files of the cache folder.

        A list of replicas that an earlier manager has written stays until `set_replicas` is called.

        Args:
            fleet: the name of the fleet.
            spec: the router's spec.
            key: the secret with which the manager asks the router for its state.
        """
        folder = env.cache_dir() / "fleet"
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        self.listing: Path = folder / f"{fleet}.replicas"
        self.model_listing: Path = folder / f"{fleet}.models"
        self._host = _LOOPBACK.get(spec.host, spec.host)
        self._port = spec.port
        self._key = key
        self._written_text: str | None = None
        self._written_models: Sequence[ListedModel] | None = None
        if not self.model_listing.exists():
            self.set_startable(())
        if not self.listing.exists():
            self.set_replicas({})

    @property
    def router_files(self) -> tuple[str, ...]:
        """The options of `twostroke route` that name the files."""
        listings = ("--replicas-file", str(self.listing))
        return (*listings, "--models-file", str(self.model_listing))

    def set_replicas(self, replicas: Mapping[str, Sequence[str]]) -> None:
        """Write the URLs of all replicas to the file that the router reads."""
        urls = sorted({url for model_urls in replicas.values() for url in model_urls})
        text = "".join(f"{url}\n" for url in urls)
        if text != self._written_text:
            write_text(self.listing, text)
            self._written_text = text

    def set_startable(self, models: Sequence[ListedModel]) -> None:
        """Write the models that may have no replica to the file that the router reads."""
        if models != self._written_models:
            write_listed_models(self.model_listing, models)
            self._written_models = models

    def views(self) -> Mapping[str, RouterView]:
        """Return the load of each model that the router sees; empty while it does not answer."""
        state = self._state()
        replicas = state.get("replicas", ())
        prefill_per_decode = {
            replica["url"]: replica.get("prefill_per_decode") for replica in replicas
        }
        return {
            model: RouterView(
                num_wanted=num_wanted,
                running={
                    each["url"]: each["running"] for each in replicas if model in each["models"]
                },
                num_requests=sum(each["requests"] for each in replicas if model in each["models"]),
                prefill_per_decode=prefill_per_decode,
            )
            for model, num_wanted in state.get("wanted_by_model", {}).items()
        }

    def close(self) -> None:
        """Remove the files that list the replicas and the models."""
        self.listing.unlink(missing_ok=True)
        self.model_listing.unlink(missing_ok=True)

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


def write_listed_models(path: Path, models: Sequence[ListedModel]) -> None:
    """Write a file that lists `models`, in place of the file at `path`."""
    write_text(path, msgspec.json.encode(models).decode() + "\n")


def read_listed_models(path: Path) -> tuple[ListedModel, ...]:
    """Return the models that the file at `path` lists.

    Raises:
        UsageError: the file cannot be read, or is not a JSON list of models.
    """
    try:
        models = _decoder.decode(read_regular_file(path))
    except OSError as error:
        reason = error.strerror or str(error)
        raise UsageError(f"The models in {path} cannot be read: {reason}.") from None
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise UsageError(f"The models in {path} cannot be read: {error}.") from None
    if "" in {model.name for model in models}:
        raise UsageError(f"The models in {path} cannot be read: a name is empty.")
    return models
