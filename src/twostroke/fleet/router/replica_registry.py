"""The replicas of a router: which are there, how they are, and what is stored where."""

from __future__ import annotations

import asyncio
import itertools
import logging
import secrets
import time
from collections import Counter, OrderedDict
from enum import StrEnum
from typing import TYPE_CHECKING, Final

import numpy as np

from twostroke.core.cancellation import wait_until_set
from twostroke.core.frozen import Frozen
from twostroke.fleet.router.upstream import Address, ConnectionPool
from twostroke.fleet.routing.dispatch import Dispatcher
from twostroke.fleet.routing.policy import mix
from twostroke.fleet.routing.prompt import extent
from twostroke.server.http.errors import GatewayError
from twostroke.server.http.model_names import bare_name, unknown_model

if TYPE_CHECKING:
    from collections.abc import Mapping

    import numpy.typing as npt

    from twostroke.fleet.router.options import RouteOptions
    from twostroke.fleet.router.upstream import UpstreamConnection

_MOST_IDS: Final = 100_000
_ASK_S: Final = 2.5
_CONTEXT_LENGTH: Final = 4096  # where no replica says it
_SHARED: Final = (
    "share cached prompts, turns and stored answers: give the router and its replicas the same "
    "TWOSTROKE_REPLICA_KEY (docs/operations/fleet.md#keys)."
)
_EQUAL: Final = {"version": "version", "numerics": "model file, settings or processor"}
_logger = logging.getLogger("twostroke.router")


class NoReplicaError(GatewayError):
    """No replica can answer the request now."""

    http_status = 503
    code = "no_replica"


class ReplicaState(StrEnum):
    """How a replica is; only a ready one gets requests."""

    NEW = "new"  # not asked yet
    READY = "ready"
    DRAINING = "draining"  # takes no more; what runs goes on
    DOWN = "down"  # does not answer, or says that it cannot
    REFUSED = "refused"  # answers, and does not suit the others


class ReplicaFacts(Frozen):
    """What a replica says of itself; empty where it says nothing.

    `numerics` is what must be equal for equal answers; `epoch` is another after each start;
    `context_length` counts tokens, 0 if it is not known. `keeps_files` is whether it has files and
    batches, None if it does not say it; `takes_any_name` is whether it takes names that it does not
    list.
    """

    models: tuple[str, ...] = ()
    epoch: str = ""
    version: str = ""
    numerics: str = ""
    context_length: int = 0
    keeps_files: bool | None = None
    takes_any_name: bool | None = None
    numerics_by_model: Mapping[str, str] = {}

    def said(self, fact: str, model: str) -> str:
        """Return its version, or the numerics of a model, by the name of the fact."""
        if fact == "numerics" and self.numerics_by_model:
            return self.numerics_by_model.get(model, "")
        found: str = getattr(self, fact)
        return found

    def find(self, model: str) -> str:
        """Return how a model is listed; owner, tag and case do not count. Empty if it is not."""
        if model in self.models:
            return model
        bare = bare_name(model)
        return next((name for name in self.models if bare_name(name) == bare), "")


class Replica:
    """One server.

    Attributes:
        place: its place in the dispatcher.
        reason: why it is not ready, for people.
        num_requests, num_failed, num_errors: sent there; lost there before the first byte, and
            after it.
    """

    def __init__(self, address: Address, place: int) -> None:
        """Begin as a stranger."""
        self.address, self.place = address, place
        self.pool = ConnectionPool(address)
        self.state, self.reason = ReplicaState.NEW, "It was not asked yet."
        self.since_s = time.time()
        self.facts = ReplicaFacts()
        self.is_foreign = False  # not a server of ours
        self.trusts_router = True  # about tenants; of others' servers it is not asked
        self.is_listed = True  # by its user or by DNS
        self.num_requests = self.num_failed = self.num_errors = 0
        self.num_prompt_tokens = self.num_cached_tokens = 0
        self.work_s: float | None = None  # as it says
        self.horizon_s: float | None = None
        self.prefill_per_decode: float | None = None  # prefill engines that it can use
        self.probe: UpstreamConnection | None = None  # on which it is asked
        self.look = asyncio.Event()  # to be asked at once
        self.was_asked = asyncio.Event()

    @property
    def url(self) -> str:
        """Its URL, by which people call it."""
        return self.address.url

    def name_of(self, model: str) -> str:
        """Return the replica's name of a model; that of its first if it does not have it."""
        names = self.facts.models or (model,)
        return self.facts.find(model) or names[0]

    async def is_well(self) -> bool:
        """Ask it at once; return whether it gets requests."""
        self.was_asked.clear()
        self.look.set()
        await wait_until_set(self.was_asked, _ASK_S)
        return self.state is ReplicaState.READY

    def close(self) -> None:
        """Close the connections that no request uses."""
        self.pool.close_idle()
        if self.probe is not None:
            self.probe.close()


class ReplicaRegistry:
    """All replicas. It belongs to the event loop."""

    def __init__(self, options: RouteOptions) -> None:
        """Begin with none."""
        self.options, self.mark = options, secrets.token_hex(8)
        self.replicas: dict[str, Replica] = {}  # by URL
        self.dispatcher = Dispatcher(options.policy, time.monotonic, extent)
        self._places: list[Replica] = []
        self._free: list[int] = []
        self._changed, self._is_over = asyncio.Event(), False
        self._stored: OrderedDict[str, str] = OrderedDict()  # URLs by the id of an answer
        self._masks: dict[str, npt.NDArray[np.bool_] | None] = {}
        self.context_length = _CONTEXT_LENGTH  # the longest of any replica

    def add(self, address: Address) -> Replica:
        """Take in a server, or list it again."""
        known = self.replicas.get(address.url)
        if known is not None:
            known.is_listed = True
            known.look.set()
            return known
        self._masks.clear()
        place = self.dispatcher.join(address.url, self._free.pop() if self._free else None)
        replica = Replica(address, place)
        self.replicas[address.url] = replica
        if place == len(self._places):
            self._places.append(replica)
        else:
            self._places[place] = replica
        return replica

    def drop(self, replica: Replica) -> None:
        """Forget a server that has no requests."""
        self.dispatcher.open(replica.place, is_open=False)
        replica.close()
        del self.replicas[replica.url]
        self._free.append(replica.place)
        self._masks.clear()

    def at(self, place: int) -> Replica:
        """Return the replica at a place of the dispatcher."""
        return self._places[place]

    @property
    def ready(self) -> list[Replica]:
        """The replicas that get requests."""
        return [one for one in self.replicas.values() if one.state is ReplicaState.READY]

    def set(self, replica: Replica, state: ReplicaState, reason: str = "") -> None:
        """Note how a replica is."""
        if state is ReplicaState.READY and not replica.is_listed:
            state, reason = ReplicaState.DRAINING, "It is not listed any more."
        if state is not replica.state or reason != replica.reason:
            is_news = state is not replica.state
            replica.reason = reason
            if is_news:
                replica.since_s = time.time()
                level = logging.INFO if state is ReplicaState.READY else logging.WARNING
                text = f" {reason}" if reason else ""
                _logger.log(level, "Replica %s is %s.%s", replica.url, state.value, text)
        replica.state = state
        if state is ReplicaState.DOWN:
            replica.is_foreign = False  # another server may come back
        self.dispatcher.open(replica.place, is_open=state is ReplicaState.READY)
        if state is ReplicaState.READY:
            self._changed.set()
            self._changed = asyncio.Event()

    def learn(self, replica: Replica, facts: ReplicaFacts) -> None:
        """Note what a replica says of itself; one that was started again holds nothing."""
        if facts.epoch != replica.facts.epoch or (
            not facts.epoch and replica.state is ReplicaState.DOWN
        ):
            self.dispatcher.restart(replica.place)
        named = facts.models, facts.takes_any_name
        if named != (replica.facts.models, replica.facts.takes_any_name):
            self._masks.clear()
        is_same = facts.context_length == replica.facts.context_length
        replica.facts = facts
        if not is_same:
            known = max(one.facts.context_length for one in self.replicas.values())
            self.context_length = known or _CONTEXT_LENGTH

    def note_trust(self, replica: Replica, *, trusts_router: bool) -> None:
        """Note whether a replica believes the router about tenants; warn once if it does not."""
        keys = self.options.api_keys
        trusts_router = trusts_router or keys is None or not keys.have_tenants
        if replica.trusts_router and not trusts_router:
            _logger.warning("Replica %s ignores tenants, which %s", replica.url, _SHARED)
        replica.trusts_router = trusts_router

    @property
    def warning(self) -> str:
        """What is wrong although requests are answered; empty if nothing is."""
        count = sum(not one.trusts_router for one in self.replicas.values())
        where = f"At {count} of {len(self.replicas)} replicas tenants {_SHARED}"
        return where if count else ""

    def stranger(self, replica: Replica, facts: ReplicaFacts) -> str:
        """Return why a replica does not suit those that are ready; empty if it does."""
        if self.options.mixed:
            return ""
        for other in self.ready:
            shared = set(other.facts.models) & set(facts.models) if other is not replica else ()
            for model, (fact, words) in itertools.product(sorted(shared), _EQUAL.items()):
                here, there = facts.said(fact, model), other.facts.said(fact, model)
                if here and there and here != there:
                    return (
                        f"It has another {words} than {other.url} ({here}, not {there}): answers "
                        "would differ (--mixed allows it)."
                    )
        return ""

    def suits(self, model: str) -> npt.NDArray[np.bool_] | None:
        """Return by place which replicas have a model; None if all, or none that is ready.

        Those that list the name as it is written come before those that call it otherwise, and
        these before those that may take any name.

        Raises:
            ModelNotFoundError: no replica has it, or takes any name.
        """
        if model not in self._masks:
            facts = {one.place: one.facts for one in self.replicas.values()}
            having = [place for place, one in facts.items() if model in one.models]
            having = having or [place for place, one in facts.items() if one.find(model)]
            if model and facts and not having and all(one.models for one in facts.values()):
                having = [place for place, one in facts.items() if one.takes_any_name is not False]
                if not having:
                    names = sorted({name for one in facts.values() for name in one.models})
                    raise unknown_model(model, names)
            mask = np.zeros(len(self._places), np.bool_)
            mask[having] = True
            is_split = 0 < len(having) < len(self.replicas)
            if len(self._masks) > 1000:
                self._masks.clear()  # names that clients invent
            self._masks[model] = mask if is_split else None
        return self._masks[model]

    async def wait(self, until_s: float) -> bool:
        """Wait until a replica becomes ready, or until a time of the loop; False if it is over."""
        try:
            async with asyncio.timeout_at(until_s):
                await self._changed.wait()
        except TimeoutError:
            return False
        return not self._is_over

    def give_up(self) -> None:
        """Let nobody wait for a replica any more."""
        self._is_over = True
        self._changed.set()

    def nothing(self, model: str = "") -> NoReplicaError:
        """Return the error where no replica is ready, or none that has a model."""
        if not self.replicas:
            listing, name = self.options.listing, self.options.discover
            where = f"{name} has no address" if listing is None else f"{listing} names none"
            return NoReplicaError(f"No replica is known: {where}.")
        all_ = list(self.replicas.values())
        having = [one for one in all_ if model and one.facts.find(model)] or all_
        which = f" of the model '{model}'" if len(having) < len(all_) else ""
        states = Counter(one.state.value for one in having)
        how = ", ".join(f"{count} {state}" for state, count in sorted(states.items()))
        return NoReplicaError(f"No replica{which} can answer now: of {len(having)}, {how}.")

    def store(self, id_: str, replica: Replica) -> None:
        """Note which replica stores an answer."""
        self._stored[id_] = replica.url
        self._stored.move_to_end(id_)
        if len(self._stored) > _MOST_IDS:
            self._stored.popitem(last=False)

    def storing(self, id_: str) -> Replica | None:
        """Return the replica that stores an answer; None if it is not known."""
        return self.replicas.get(self._stored.get(id_, ""))

    def home(self, affinity: int, *, is_ours: bool) -> Replica | None:
        """Return the replica for a tenant's files: the same one as long as it is there.

        None if no replica keeps files; with `is_ours` it must be one of our servers.

        Raises:
            NoReplicaError: there is no replica, or one that has not said yet what it keeps.
        """
        kept = {True} if is_ours else {True, None}
        having = [one for one in self.replicas.values() if one.facts.keeps_files in kept]
        has_asked = self.replicas and all(one.facts.models for one in self.replicas.values())
        if not having and not has_asked:
            raise self.nothing()
        return max(having, key=lambda one: mix(affinity ^ hash_of(one.url)), default=None)


def hash_of(text: str) -> int:
    """Return 64 bits that follow from a text."""
    found = 0
    for byte in text.encode():
        found = mix(found ^ byte)
    return found
