"""Models that may have no replica: requests for them wait while the first replica starts.

The router does not start replicas. It reports how many replicas are wanted, in `/api/state` for the
manager of a fleet and in `/metrics` for other autoscalers, and makes requests wait meanwhile:

- A request waits at most `--start-wait` seconds, and at most `--start-queue` requests wait. When
  the queue is full, the tenant with the most waiting requests gives up its newest request to a
  tenant with fewer.
- A request that may not wait is refused with 503. Its `Retry-After` is the expected rest of the
  start, by the time that the last start took.
- When the manager reports that replicas of the model fail again and again, all waiting requests are
  refused with the reason.
- A request whose replica drains waits for the next start in the same way.
"""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections import Counter
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Final

from twostroke.core.message_text import counted_noun
from twostroke.fleet.router.paths import COMPUTED_PATHS
from twostroke.server.http.errors import ClientGoneError, GatewayError
from twostroke.server.http.model_names import bare_name

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping

    from twostroke.fleet.cluster.router_link import ListedModel
    from twostroke.fleet.router.options import RouteOptions

_MAX_START_S: Final = 3600.0  # a replica that is ready later was started for other reasons
USED_S: Final = 5.0  # for which a model counts as used after its last request
START_OUTCOMES: Final = ("served", "refused", "left")
_DEFAULT_START_S: Final = 10.0  # `Retry-After` before a start was measured, or if one takes longer
_FAILURE_RETRY_S: Final = 30.0  # `Retry-After` while replicas fail to start
# Paths of Ollama's clients that show a model or fetch it; they do not start one.
_PASSIVE_PATHS: Final = frozenset(("/api/show", "/api/pull"))
_STARTING_PATHS: Final = frozenset(COMPUTED_PATHS) - _PASSIVE_PATHS
_logger = logging.getLogger("twostroke.router")


class ModelStartingError(GatewayError):
    """A request may not wait, or not any longer, until a replica of its model has started."""

    http_status = 503
    code = "model_starting"


class ModelNotStartedError(GatewayError):
    """The replicas of the request's model end again and again while they start."""

    http_status = 503
    code = "model_not_started"


class StartableModel:
    """A model that may have no replica until requests wait for it and a replica is started.

    Attributes:
        name: the model's name for clients.
        takes_any_name: whether requests with an unknown name are for this model.
        is_removed: whether the fleet's manager does not list the model any more.
        failure: why the model's replicas do not start; empty if they start.
        start_s: how long the last start took, from the first waiting request to the first ready
            replica; None before a start was measured.
        waiting: the requests that wait, oldest first.
        num_waited: requests that have waited, by outcome in `START_OUTCOMES`.
    """

    def __init__(self, name: str) -> None:
        """Create a model that was not used yet."""
        self.name = name
        self.takes_any_name = self.is_removed = False
        self.failure = ""
        self.start_s: float | None = None
        self.waiting: list[WaitingRequest] = []
        self.num_waited: Counter[str] = Counter()
        self._began_s: float | None = None  # of the present start
        self._used_s = -math.inf
        self._numerics = ""

    def is_used(self, within_s: float = USED_S) -> bool:
        """Return whether a request waits for the model, or has arrived within `within_s`."""
        return bool(self.waiting) or time.monotonic() - self._used_s < within_s

    def note_request(self) -> None:
        """Note that a request for the model has arrived."""
        if not self.is_used():
            self._began_s = None  # without waiting requests, a start may have been given up
        self._used_s = time.monotonic()

    def begin_start(self) -> None:
        """Note when a request first needed a replica; the start time is measured from then on."""
        if self._began_s is None:
            self._began_s = time.monotonic()

    def expected_s(self) -> float | None:
        """Return the seconds until the first replica should be ready; None if not known."""
        if self.start_s is None:
            return None
        elapsed_s = 0.0 if self._began_s is None else time.monotonic() - self._began_s
        return self.start_s - elapsed_s if elapsed_s < self.start_s else None

    def add(self, waiting: WaitingRequest) -> None:
        """Add a waiting request."""
        self.begin_start()
        self.waiting.append(waiting)

    def remove(self, waiting: WaitingRequest, outcome: str) -> None:
        """Remove a request that does not wait any more; `outcome` is a key of `num_waited`."""
        self.waiting.remove(waiting)
        self.num_waited[outcome] += 1
        self._used_s = time.monotonic()

    def on_ready(self, numerics: str) -> None:
        """Measure the start time, because a replica of the model has become ready.

        `numerics` names the replica's weights and arithmetic (see `ReplicaFacts`). Logs a warning
        if it differs from the last replica's: the replica then has another model under the same
        name, other settings or another processor.
        """
        began_s, self._began_s = self._began_s, None
        if began_s is not None and self.is_used(_MAX_START_S):
            self.start_s = time.monotonic() - began_s
            requests = counted_noun(len(self.waiting), "request")
            text = "The first replica of %s is ready after %.1f s; %s had waited."
            _logger.info(text, self.name, self.start_s, requests)
        if numerics and self._numerics and numerics != self._numerics:
            text = (
                "The model %s has come back with another model file, settings or processor: "
                "answers differ from earlier ones, and earlier streams cannot continue."
            )
            _logger.warning(text, self.name)
        self._numerics = numerics or self._numerics


class WaitingRequest:
    """A request that waits for the first replica of its model.

    Attributes:
        tenant: the tenant's name; empty without tenants.
        num_units: the length of the prompt in bytes.
        is_displaced: whether the request must leave the queue in favour of another tenant.
    """

    __slots__ = ("is_displaced", "num_units", "tenant")

    def __init__(self, tenant: str, num_units: int) -> None:
        """Create a request that may stay in the queue."""
        self.tenant = tenant
        self.num_units = num_units
        self.is_displaced = False


def model_rows(
    owners: Mapping[str, str], created_s: int, *, is_anthropic: bool
) -> list[dict[str, Any]]:
    """Return entries of `GET /v1/models` for models that no replica lists.

    `owners` maps the models' names to their owners, which only OpenAI's form has. `created_s` is
    the Unix time that all entries report as the model's creation.
    """
    if is_anthropic:
        created = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(created_s))
        facts: dict[str, Any] = {"type": "model", "created_at": created}
        return [{"id": name, "display_name": name, **facts} for name in owners]
    facts = {"object": "model", "created": created_s}
    return [{"id": name, **facts, "owned_by": owner} for name, owner in owners.items()]


class ModelStarts:
    """The models that may have no replica, and the requests that wait for their first one.

    Call the methods only in the event loop's thread.

    Attributes:
        models: the models by name.
    """

    def __init__(self, options: RouteOptions) -> None:
        """Start with the models that the options name; `follow` adds the models of a fleet."""
        self.models = {name: StartableModel(name) for name in options.startable_models}
        self._fixed_names = frozenset(self.models)
        self._options = options
        self._created_s = int(time.time())

    def follow(self, listed_models: Iterable[ListedModel]) -> None:
        """Update the models, and the reasons why some do not start, from the manager's list."""
        names = set(self._fixed_names)
        for listed in listed_models:
            names.add(listed.name)
            model = self.models.setdefault(listed.name, StartableModel(listed.name))
            model.takes_any_name = listed.takes_any_name
            if listed.failure and not model.failure:
                _logger.warning("The model %s does not start: %s", listed.name, listed.failure)
            model.failure = listed.failure
        for name in set(self.models) - names:
            self.models.pop(name).is_removed = True  # requests that wait for it are refused

    def find(self, name: str) -> StartableModel | None:
        """Return the startable model that a client's name means; None if there is no such model.

        An empty name means the first model. An owner, a tag and upper case are ignored.
        """
        if not self.models:
            return None
        if not name:
            return next(iter(self.models.values()))
        if name in self.models:
            return self.models[name]
        bare = bare_name(name)
        return next((each for each in self.models.values() if bare_name(each.name) == bare), None)

    def find_any(self, name: str) -> StartableModel | None:
        """Return the model that a client's name means, or else a model that takes any name."""
        model = self.find(name)
        return model or next((each for each in self.models.values() if each.takes_any_name), None)

    @property
    def num_waiting(self) -> int:
        """The number of requests that wait for the first replica of a model."""
        return sum(len(model.waiting) for model in self.models.values())

    def model_for(self, method: str, path: str, name: str) -> StartableModel | None:
        """Return the model for whose start a request may wait; None if it may not wait.

        Only requests that use a model may wait. A request for a list of models, for example, does
        not start a replica.
        """
        if not self.models or method != "POST" or path not in _STARTING_PATHS:
            return None
        return self.find_any(name)

    def note_request(self, method: str, path: str, name: str) -> None:
        """Note a request, so that a replica of its model is wanted, even if an upstream answers."""
        model = self.model_for(method, path, name)
        if model is not None:
            model.note_request()

    def on_ready(self, numerics_by_model: Mapping[str, str]) -> None:
        """Measure the start time of each model of a replica that has become ready.

        `numerics_by_model` are the numerics that the replica reports, by the names of its models.
        """
        models = {name: self.find(name) for name in numerics_by_model if name}
        for name, model in models.items():
            if model is not None:
                model.on_ready(numerics_by_model[name])
        waited = [each.name for each in self.models.values() if each.waiting]
        if waited and not any(models.values()):
            text = "A replica serves %s, but requests wait for %s: is its name right?"
            _logger.warning(text, ", ".join(models), ", ".join(waited))

    def rows(self, excluded: Iterable[str], *, is_anthropic: bool) -> list[dict[str, Any]]:
        """Return the entries of `GET /v1/models` for the models that are not in `excluded`."""
        owners = {name: "twostroke" for name in self.models if name not in set(excluded)}
        return model_rows(owners, self._created_s, is_anthropic=is_anthropic)

    def check_start(self, model: StartableModel, max_wait_s: float = math.inf) -> None:
        """Check that the start of a model may succeed, and takes less than `max_wait_s` from now.

        Raises:
            ModelNotStartedError: the model's replicas fail again and again.
            ModelStartingError: the start takes longer.
        """
        if model.failure:
            raise ModelNotStartedError(
                f"The model '{model.name}' does not start: its server ends again and again. The "
                "log of the router and `twostroke fleet status` say why.",
                wait_s=_FAILURE_RETRY_S,
            )
        expected_s = model.expected_s() or 0.0
        if expected_s >= max_wait_s:
            wait_s = self._options.start_wait_s
            raise starting_error(model, f"starts, and requests wait at most {wait_s:g} s")

    @contextmanager
    def hold_place(self, waiting: WaitingRequest, model: StartableModel) -> Iterator[None]:
        """Hold a place in the queue of requests that wait for the start of a model.

        The request leaves the queue at the end of the `with` block, and counts as served if the
        block raised nothing.

        Raises:
            ModelStartingError: the queue is full.
        """
        self._make_room(waiting, model)
        model.add(waiting)
        outcome = "refused"
        try:
            yield
            outcome = "served"
        except (ClientGoneError, asyncio.CancelledError):
            outcome = "left"
            raise
        finally:
            model.remove(waiting, outcome)

    def _make_room(self, newcomer: WaitingRequest, model: StartableModel) -> None:
        """If the queue is full, displace a request of the tenant with the most waiting requests.

        Raises:
            ModelStartingError: no tenant has more waiting requests than the tenant of `newcomer`
                would have.
        """
        keeping = [
            waiting
            for each in self.models.values()
            for waiting in each.waiting
            if not waiting.is_displaced
        ]
        if len(keeping) < self._options.start_queue:
            return
        counts = Counter(waiting.tenant for waiting in keeping)
        tenant, count = counts.most_common(1)[0] if counts else ("", 0)
        if count <= counts[newcomer.tenant] + 1:
            raise self.full_error(model)
        newest = next(waiting for waiting in reversed(keeping) if waiting.tenant == tenant)
        newest.is_displaced = True

    def full_error(self, model: StartableModel) -> ModelStartingError:
        """Return the error for a request that finds the queue full, or must leave the queue."""
        count = counted_noun(self._options.start_queue, "request")
        return starting_error(model, f"starts, and {count} wait already (--start-queue)")


def starting_error(model: StartableModel, predicate: str) -> ModelStartingError:
    """Return the error for a request that may not wait until its model has started.

    `predicate` is the rest of the sentence after the model's name. The error also has the expected
    seconds until the model has started.
    """
    expected_s = model.expected_s()
    return ModelStartingError(
        f"The model '{model.name}' {predicate}: send the request again later.",
        wait_s=_DEFAULT_START_S if expected_s is None else expected_s,
    )
