"""The replicas of a router: their states, their facts, and the ids that each of them stores."""

from __future__ import annotations

import asyncio
import itertools
import logging
import re
import secrets
import time
from collections import Counter, OrderedDict
from enum import StrEnum
from typing import TYPE_CHECKING, Final

import numpy as np

from twostroke.core.cancellation import wait_until_set
from twostroke.core.frozen import Frozen
from twostroke.core.message_text import counted_noun
from twostroke.fleet.router.engine_killers import ComputedContents
from twostroke.fleet.router.model_starts import ModelStarts
from twostroke.fleet.router.overflow_permission import OverflowPermission
from twostroke.fleet.router.upstream import Address, ConnectionPool
from twostroke.fleet.routing.dispatch import Dispatcher
from twostroke.fleet.routing.policy import mix
from twostroke.fleet.routing.prompt import bytes_of_blocks
from twostroke.server.http.errors import GatewayError
from twostroke.server.http.model_names import bare_name, unknown_model

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Mapping

    import numpy.typing as npt

    from twostroke.core.errors import ModelNotFoundError
    from twostroke.fleet.cluster.router_link import ListedModel
    from twostroke.fleet.router.options import RouteOptions
    from twostroke.fleet.router.upstream import UpstreamConnection
    from twostroke.fleet.routing.dispatch import RoutedRequest, RoutingKey

_STORED_ID: Final = re.compile(rb'"id": ?"((?:resp_|chatcmpl-|conv_)[A-Za-z0-9_-]{1,80})"')
_MAX_ID_OFFSET: Final = 4096  # within which the id of a stored answer is searched
_MAX_STORED_IDS: Final = 100_000
_MAX_MODEL_NAMES: Final = 1000  # whose replicas are cached, since clients can invent names
_CHECK_TIMEOUT_S: Final = 2.5
_DEFAULT_CONTEXT_LENGTH: Final = 4096  # if no replica reports one
_TRUST_WARNING: Final = (
    "share cached prompts, turns and stored answers: give the router and its replicas the same "
    "TWOSTROKE_REPLICA_KEY (docs/operations/fleet.md#keys)."
)
# Facts in which the replicas of a model must agree, and their names for people.
_SHARED_FACTS: Final = {"version": "version", "numerics": "model file, settings or processor"}
_logger = logging.getLogger("twostroke.router")


class NoReplicaError(GatewayError):
    """No replica of the router can answer the request now."""

    http_status = 503
    code = "no_replica"


class ReplicaState(StrEnum):
    """The state of a replica; only a ready replica gets requests."""

    NEW = "new"  # not checked yet
    READY = "ready"
    DRAINING = "draining"  # gets no more requests; running ones continue
    DOWN = "down"  # does not answer, or reports that it cannot
    REFUSED = "refused"  # answers, but does not agree with the other replicas


class ReplicaFacts(Frozen):
    """The facts that a replica reports about itself; empty values for facts it does not report.

    Attributes:
        models: the names of the replica's models.
        epoch: a value that changes with each start of the replica or its engine.
        version: the replica's version of Twostroke.
        numerics: a text that names the weights, the backend and its precision; only replicas with
            equal numerics give equal answers.
        context_length: the context length in tokens; 0 if it is not known.
        keeps_files: whether the replica has files and batches; None if it is not known.
        takes_any_name: whether the replica accepts names of models that it does not list.
        coalesces: whether the replica computes equal requests in flight once; None if not known.
        numerics_by_model: the `numerics` of each model, if the replica has several models.
    """

    models: tuple[str, ...] = ()
    epoch: str = ""
    version: str = ""
    numerics: str = ""
    context_length: int = 0
    keeps_files: bool | None = None
    takes_any_name: bool | None = None
    coalesces: bool | None = None
    numerics_by_model: Mapping[str, str] = {}

    def shared_fact(self, name: str, model: str) -> str:
        """Return a fact in which all replicas of a model must agree: `version` or `numerics`.

        `name` is the name of the fact. If the replica reports numerics for each model, returns the
        numerics of `model`.
        """
        if name == "numerics" and self.numerics_by_model:
            return self.numerics_by_model.get(model, "")
        value: str = getattr(self, name)
        return value

    def find_model(self, model: str) -> str:
        """Return the name under which the replica lists a model; empty if it does not list it.

        If no listed name equals `model`, the owner, the tag and upper case are ignored.
        """
        if model in self.models:
            return model
        bare = bare_name(model)
        return next((name for name in self.models if bare_name(name) == bare), "")


class Replica:
    """A server to which the router sends requests.

    Attributes:
        address: the server's URL and its parts.
        index: the replica's index in the dispatcher.
        pool: the connections to the server.
        computed: the contents of the requests that the replica computes for this router.
        state, reason: the replica's state, and why it is not ready, for people.
        since_s: when the state began, in seconds since 1970.
        facts: the server's report about itself.
        is_foreign: whether it is a server other than Twostroke.
        trusts_router: whether it accepts the tenants that the router reports.
        is_listed: whether the options, the file or DNS still name it.
        num_requests: requests sent to it.
        num_lost_before, num_lost_after: requests that it lost before and after the first byte.
        num_prompt_tokens, num_cached_tokens, work_s, horizon_s, prefill_per_decode: the values of
            its last report (`ServerLoad`).
        num_reported: the requests of all clients that run or wait there, by its last report.
        probe: the connection for health checks.
        check_now: an event; setting it starts a health check at once.
        was_checked: an event that is set after each health check.
    """

    def __init__(self, address: Address, index: int) -> None:
        """Create a replica in the state NEW."""
        self.address = address
        self.index = index
        self.pool = ConnectionPool(address)
        self.computed = ComputedContents()
        self.state = ReplicaState.NEW
        self.reason = "It was not checked yet."
        self.since_s = time.time()
        self.facts = ReplicaFacts()
        self.is_foreign = False
        self.trusts_router = True  # not checked for servers other than Twostroke
        self.is_listed = True
        self.num_requests = 0
        self.num_lost_before = 0
        self.num_lost_after = 0
        self.num_prompt_tokens = 0
        self.num_cached_tokens = 0
        self.num_reported = 0
        self.work_s: float | None = None
        self.horizon_s: float | None = None
        self.prefill_per_decode: float | None = None
        self.probe: UpstreamConnection | None = None
        self.check_now = asyncio.Event()
        self.was_checked = asyncio.Event()

    @property
    def url(self) -> str:
        """The replica's URL, which is also its name for people."""
        return self.address.url

    def model_name(self, model: str) -> str:
        """Return the model name for logs and usage records.

        This is the name under which the replica lists the model, or else the name of the replica's
        first model.
        """
        names = self.facts.models or (model,)
        return self.facts.find_model(model) or names[0]

    async def check_is_ready(self) -> bool:
        """Check the replica's health at once; return whether it gets requests."""
        self.was_checked.clear()
        self.check_now.set()
        await wait_until_set(self.was_checked, _CHECK_TIMEOUT_S)
        return self.state is ReplicaState.READY

    def close(self) -> None:
        """Close the connections to the replica that no request uses."""
        self.pool.close_idle()
        if self.probe is not None:
            self.probe.close()


class ReplicaRegistry:
    """All replicas of a router. Call the methods only in the event loop's thread.

    Attributes:
        options: the router's options.
        router_id: a random text by which the router recognizes itself.
        replicas: the replicas by URL.
        dispatcher: chooses replicas for requests.
        starts: the models that may have no replica, and requests that wait for their start.
        overflow_permission: decides which requests must not be sent to an upstream API.
        context_length: the longest context length of any replica, in tokens.
        is_stopping: whether the router stops, so that no request waits for a replica.
        num_continued: responses that another replica continued.
        pause_s, max_pause_s: the sum of the pauses in these responses, and the longest pause.
    """

    def __init__(self, options: RouteOptions) -> None:
        """Create a registry without replicas."""
        self.options = options
        self.router_id = secrets.token_hex(8)
        self.replicas: dict[str, Replica] = {}
        self.dispatcher = Dispatcher(options.policy, time.monotonic, bytes_of_blocks)
        self.starts = ModelStarts(options)
        self.overflow_permission = OverflowPermission(options.api_keys)
        self.context_length = _DEFAULT_CONTEXT_LENGTH
        self._by_index: list[Replica] = []
        self._free_indices: list[int] = []
        self._became_ready = asyncio.Event()
        self.is_stopping = False
        self.num_continued = 0
        self.pause_s = self.max_pause_s = 0.0
        self._url_by_stored_id: OrderedDict[str, str] = OrderedDict()
        self._masks: dict[str, npt.NDArray[np.bool_] | None] = {}  # by name of a model

    def add(self, address: Address) -> Replica:
        """Add a server to the router's replicas, and return the replica.

        A replica that is known already, but was not listed any more, is marked as listed.
        """
        present = self.replicas.get(address.url)
        if present is not None:
            present.is_listed = True
            present.check_now.set()
            return present
        self._masks.clear()
        free_index = self._free_indices.pop() if self._free_indices else None
        index = self.dispatcher.add_replica(address.url, free_index)
        replica = Replica(address, index)
        self.replicas[address.url] = replica
        if index == len(self._by_index):
            self._by_index.append(replica)
        else:
            self._by_index[index] = replica
        return replica

    def remove(self, replica: Replica) -> None:
        """Remove a replica without requests, which is not listed any more, from the router."""
        self.dispatcher.set_open(replica.index, is_open=False)
        replica.close()
        del self.replicas[replica.url]
        self._free_indices.append(replica.index)
        self._masks.clear()

    def by_index(self, index: int) -> Replica:
        """Return the replica with this index in the dispatcher."""
        return self._by_index[index]

    @property
    def ready(self) -> list[Replica]:
        """The replicas that get requests, since their state is READY."""
        return [
            replica for replica in self.replicas.values() if replica.state is ReplicaState.READY
        ]

    def set_state(self, replica: Replica, state: ReplicaState, reason: str = "") -> None:
        """Set a replica's state and log the change; only a ready replica gets requests."""
        if state is ReplicaState.READY and not replica.is_listed:
            state, reason = ReplicaState.DRAINING, "It is not listed any more."
        replica.reason = reason
        if state is not replica.state:
            replica.since_s = time.time()
            if state is ReplicaState.READY:
                facts = replica.facts
                numerics = {name: facts.shared_fact("numerics", name) for name in facts.models}
                self.starts.on_ready(numerics)
            level = logging.INFO if state is ReplicaState.READY else logging.WARNING
            text = f" {reason}" if reason else ""
            _logger.log(level, "Replica %s is %s.%s", replica.url, state.value, text)
        replica.state = state
        if state is ReplicaState.DOWN:
            replica.is_foreign = False  # another server may come back
            replica.num_reported = 0  # its last report must not keep the model's servers running
        self.dispatcher.set_open(replica.index, is_open=state is ReplicaState.READY)
        if state is ReplicaState.READY:
            self._became_ready.set()
            self._became_ready = asyncio.Event()

    def set_facts(self, replica: Replica, facts: ReplicaFacts) -> None:
        """Set the facts that a replica reports about itself.

        If the facts show that the replica was restarted, its prefix cache counts as empty.
        """
        if facts.epoch != replica.facts.epoch or (
            not facts.epoch and replica.state is ReplicaState.DOWN
        ):
            self.dispatcher.reset(replica.index)
        old_facts = replica.facts
        if (facts.models, facts.takes_any_name) != (old_facts.models, old_facts.takes_any_name):
            self._masks.clear()
        replica.facts = facts
        if facts.context_length != old_facts.context_length:
            longest = max(other.facts.context_length for other in self.replicas.values())
            self.context_length = longest or _DEFAULT_CONTEXT_LENGTH

    def set_trust(self, replica: Replica, *, trusts_router: bool) -> None:
        """Set whether a replica accepts the tenants that the router names in its requests.

        Logs a warning if the replica does not accept them.
        """
        keys = self.options.api_keys
        trusts_router = trusts_router or keys is None or not keys.have_tenants
        if replica.trusts_router and not trusts_router:
            _logger.warning("Replica %s ignores tenants, which %s", replica.url, _TRUST_WARNING)
        replica.trusts_router = trusts_router

    @property
    def warning(self) -> str:
        """A sentence about replicas that ignore tenants, for people; empty if there are none."""
        count = sum(not replica.trusts_router for replica in self.replicas.values())
        sentence = (
            f"At {count} of {counted_noun(len(self.replicas), 'replica')} tenants {_TRUST_WARNING}"
        )
        return sentence if count else ""

    def disagreement(self, replica: Replica, facts: ReplicaFacts) -> str:
        """Return why a replica's answers would differ from other ready replicas' answers.

        Only replicas with a common model are compared. Empty if they agree.
        """
        if self.options.mixed:
            return ""
        for other in self.ready:
            if other is replica:
                continue
            models = sorted(set(other.facts.models) & set(facts.models))
            for model, (name, title) in itertools.product(models, _SHARED_FACTS.items()):
                own_value = facts.shared_fact(name, model)
                other_value = other.facts.shared_fact(name, model)
                if own_value and other_value and own_value != other_value:
                    return (
                        f"It has another {title} than {other.url} ({own_value}, not "
                        f"{other_value}): answers would differ (--mixed allows it)."
                    )
        return ""

    def set_startable(self, models: Iterable[ListedModel]) -> None:
        """Set the models that may have no replica, from the list of the fleet's manager."""
        self.starts.follow(models)
        self._masks.clear()

    def check_is_known(self, model: str) -> None:
        """Check that a model may be started, or that any replica, ready or not, may have it.

        Raises:
            ModelNotFoundError: requests for the model must not wait for a replica.
        """
        all_facts = [replica.facts for replica in self.replicas.values()]
        has_replica = any(facts.find_model(model) or facts.takes_any_name for facts in all_facts)
        if not has_replica and self.starts.find_any(model) is None:
            raise self._unknown_model(model)

    def _unknown_model(self, model: str) -> ModelNotFoundError:
        replicas = self.replicas.values()
        names = {name for replica in replicas for name in replica.facts.models}
        return unknown_model(model, sorted(names | set(self.starts.models)))

    def listed_name(self, model: str) -> str:
        """Return the name by which a replica lists a model, for any spelling of the name.

        All spellings of a model give the name of the first replica that has the model. Empty if no
        replica lists it.
        """
        names = (replica.facts.find_model(model) for replica in self.replicas.values())
        return next((name for name in names if name), "")

    def choose(
        self, key: RoutingKey, model: str, excluded: Collection[int]
    ) -> tuple[Replica, RoutedRequest] | None:
        """Choose a ready replica for a request; None if no ready replica suits the request.

        Returns the replica, and the dispatcher's record of the request, for which the caller must
        call `Dispatcher.end` at the request's end. `excluded` are the indices of replicas that have
        failed.

        Raises:
            ModelNotFoundError: no replica has the model or accepts any name.
        """
        routed = self.dispatcher.decide(key, self.having_model(model), excluded)
        return (self._by_index[routed.index], routed) if routed is not None else None

    def having_model(self, model: str) -> npt.NDArray[np.bool_] | None:
        """Return a mask of the replicas that a request for a model may use, shape (replicas,).

        Returns None if all replicas may be used. Replicas that list exactly this name are preferred
        to replicas that list a similar name. If no replica lists the model, the mask has the
        replicas that may accept any name.

        Raises:
            ModelNotFoundError: no replica has the model or accepts any name, and the model has no
                replica that can be started.
        """
        if model not in self._masks:
            facts_by_index = {replica.index: replica.facts for replica in self.replicas.values()}
            having = [index for index, facts in facts_by_index.items() if model in facts.models]
            if not having:
                having = [
                    index for index, facts in facts_by_index.items() if facts.find_model(model)
                ]
            all_list_models = all(facts.models for facts in facts_by_index.values())
            is_startable = bool(model) and self.starts.find(model) is not None
            knows_models = bool(facts_by_index or self.starts.models) and all_list_models
            if model and knows_models and not having and not is_startable:
                having = [
                    index
                    for index, facts in facts_by_index.items()
                    if facts.takes_any_name is not False
                ]
                is_startable = not having and self.starts.find_any(model) is not None
                if not having and not is_startable:
                    raise self._unknown_model(model)
            mask = np.zeros(len(self._by_index), np.bool_)
            mask[having] = True
            is_split = 0 < len(having) < len(self.replicas) or (is_startable and not having)
            if len(self._masks) > _MAX_MODEL_NAMES:
                self._masks.clear()
            self._masks[model] = mask if is_split else None
        return self._masks[model]

    async def wait_for_ready(self, deadline_s: float) -> bool:
        """Wait until a health check finds a replica ready; return False at the deadline.

        `deadline_s` is a time of the event loop's clock. Returns False, too, when the router stops.
        """
        try:
            async with asyncio.timeout_at(deadline_s):
                await self._became_ready.wait()
        except TimeoutError:
            return False
        return not self.is_stopping

    def stop_waiting(self) -> None:
        """End the waiting of all requests for a ready replica, since the router stops."""
        self.is_stopping = True
        self._became_ready.set()

    def no_replica_error(self, model: str = "") -> NoReplicaError:
        """Return the error for a request that no replica can answer now.

        The error says how many replicas are in which state; if replicas list `model`, it counts
        only these replicas.
        """
        if not self.replicas:
            listing, name = self.options.listing, self.options.discover
            reason = f"{name} has no address" if listing is None else f"{listing} names none"
            return NoReplicaError(f"No replica is known: {reason}.")
        replicas = list(self.replicas.values())
        having = [
            replica for replica in replicas if model and replica.facts.find_model(model)
        ] or replicas
        of_model = f" of the model '{model}'" if len(having) < len(replicas) else ""
        counts = Counter(replica.state.value for replica in having)
        states = ", ".join(f"{count} {state}" for state, count in sorted(counts.items()))
        return NoReplicaError(f"No replica{of_model} can answer now: of {len(having)}, {states}.")

    def record_answer(
        self, replica: Replica, data: bytes, routed: RoutedRequest | None, *, is_streamed: bool
    ) -> None:
        """Note the first bytes of a successful answer, when they arrive.

        Remembers which replica stores the answer, if it has an id, and tells the dispatcher the
        time of the first token. `routed` is the dispatcher's record; None if the policy did not
        choose the replica, if no engine computes the answer, or if these bytes precede the first
        token.
        """
        if match := _STORED_ID.search(data, 0, _MAX_ID_OFFSET):
            self.set_stored_at(match[1].decode(), replica)
        if routed is not None:
            self.dispatcher.record_first_token(routed, is_whole_answer=not is_streamed)

    def set_stored_at(self, id_: str, replica: Replica) -> None:
        """Remember which replica stores the response or conversation with this id.

        Later requests that name the id go to this replica.
        """
        self._url_by_stored_id[id_] = replica.url
        self._url_by_stored_id.move_to_end(id_)
        if len(self._url_by_stored_id) > _MAX_STORED_IDS:
            self._url_by_stored_id.popitem(last=False)

    def stored_at(self, id_: str) -> Replica | None:
        """Return the replica that stores the response or conversation with an id.

        Returns None if the router does not know the replica.
        """
        return self.replicas.get(self._url_by_stored_id.get(id_, ""))

    def file_replica(self, affinity: int, *, needs_tenants: bool) -> Replica | None:
        """Return the replica for a tenant's files, the same one as long as no replica changes.

        `affinity` is a hash of the tenant. With `needs_tenants` the replica must separate the files
        of tenants, as Twostroke does. Returns None if no replica keeps files.

        Raises:
            NoReplicaError: there is no replica, or one has not reported yet whether it keeps files.
        """
        accepted = {True} if needs_tenants else {True, None}
        having = [
            replica for replica in self.replicas.values() if replica.facts.keeps_files in accepted
        ]
        have_reported = all(replica.facts.models for replica in self.replicas.values())
        if not having and not (self.replicas and have_reported):
            raise self.no_replica_error()
        return max(having, key=lambda replica: mix(affinity ^ hash_text(replica.url)), default=None)


def hash_text(text: str) -> int:
    """Return a 64-bit hash of a text, such as a replica's URL, that is stable across restarts."""
    value = 0
    for byte in text.encode():
        value = mix(value ^ byte)
    return value
