"""Decides by rules which requests an upstream API answers in place of a replica.

A request is sent to an upstream only if a rule of the upstream applies:

- `unknown_model`: no replica lists its model, but the upstream's map has it.
- `no_replica`: no replica is ready for it, or all have refused or lost it.
- `objective`: its first token is expected later than the objective.

Upstreams are tried in the order of the file, each at most once for a request. If no upstream
answers, the request is sent to a replica or waits for one, as without `--overflow`. After the first
byte of an answer was sent to the client, no other upstream or replica is tried.
"""

from __future__ import annotations

import logging
import math
import re
import time
from typing import TYPE_CHECKING, Any, Final

from twostroke.core.errors import ModelNotFoundError, RequestError, UsageError
from twostroke.fleet.router.api_exchange import ApiExchange
from twostroke.fleet.router.api_request import PROTOCOLS, fields_of, local_field_of
from twostroke.fleet.router.cost_book import CostBook
from twostroke.fleet.router.model_starts import model_rows
from twostroke.fleet.router.overflow_file import read_overflow
from twostroke.fleet.router.paths import COMPUTED_PATHS
from twostroke.fleet.router.proxied_request import header_tokens
from twostroke.fleet.router.upstream_state import Upstream, UpstreamError
from twostroke.server.auth.costs import NANOS, REPLICAS_SIDE
from twostroke.server.auth.limits import RateLimitError
from twostroke.server.auth.usage_header import ReportedUsage
from twostroke.server.http.errors import GatewayError
from twostroke.server.http.model_names import bare_name

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence
    from collections.abc import Set as AbstractSet
    from pathlib import Path

    from msgspec import Raw
    from starlette.types import Scope

    from twostroke.core.errors import TwostrokeError
    from twostroke.fleet.router.cost_book import Sums
    from twostroke.fleet.router.overflow_file import BoughtModel, Rule
    from twostroke.fleet.router.proxied_request import ProxiedRequest
    from twostroke.fleet.router.replica_registry import ReplicaRegistry
    from twostroke.fleet.shared_records.records import SharedRecords
    from twostroke.server.auth.keys import ApiKeys
    from twostroke.server.storage import Records

_VIA_HEADER: Final = b"via"
_ROUTER_VIA: Final = re.compile(rb"1\.1 twostroke-[0-9a-f]{16}")  # with the id of a router
_LIMIT_FIELDS: Final = ("max_tokens", "max_completion_tokens")  # of answers, that APIs know
_PATIENT_TIER: Final = "flex"  # the service tier whose requests wait, however long that takes
_logger = logging.getLogger("twostroke.router")


class NoUpstreamError(GatewayError):
    """No replica has the model, and the upstreams that have it cannot be used now."""

    http_status = 503
    code = "no_upstream"


class NotAtUpstreamError(RequestError):
    """Only upstreams have the requested model, and they cannot answer this kind of request."""

    code = "not_at_upstream"


class OverflowLoopError(GatewayError):
    """The request has already passed this router, as an upstream of itself."""

    http_status = 508
    code = "overflow_loop"


class Overflow:
    """The upstreams of a router, and the rules by which they are used.

    Attributes:
        costs: the tokens and costs of replicas and upstreams.
        upstreams: the upstreams, in the order in which they are tried.
    """

    def __init__(
        self,
        path: Path,
        fleet: ReplicaRegistry,
        records: Records | None,
        shared_records: SharedRecords | None = None,
    ) -> None:
        """Read the rules in the file `path`, and the keys of the upstreams.

        The costs of each day are stored in the database `records`, or in `shared_records`, the
        store of several routers; with neither, they are lost when the router stops.

        Raises:
            UsageError: the file, or the file of a key, is wrong, or the file names tenants and
                the router has no API keys, by which it would know them.
            ModelFormatError: the file cannot be read.
        """
        self._spec = read_overflow(path)
        self._fleet = fleet
        self._permission = fleet.overflow_permission
        self._permission.never_for = frozenset(self._spec.never_for)
        _check_tenants(self._spec.never_for, fleet.options.api_keys, path)
        self.costs = CostBook(self._spec, fleet, records, shared_records=shared_records)
        self.upstreams = [Upstream(spec, self.costs) for spec in self._spec.upstreams]
        self._created_s = int(time.time())
        self._via = b"1.1 twostroke-" + fleet.router_id.encode()

    @property
    def currency(self) -> str:
        """The currency of all prices."""
        return self._spec.currency

    @property
    def can_replace_replicas(self) -> bool:
        """Whether a usable upstream may answer while no replica is ready."""
        return any(
            "no_replica" in upstream.spec.when and upstream.state[0] == "ready"
            for upstream in self.upstreams
        )

    async def start(self) -> None:
        """Start to read and write costs regularly."""
        await self.costs.start()

    async def stop(self) -> None:
        """Write the last costs, and close idle connections."""
        await self.costs.stop()
        for upstream in self.upstreams:
            upstream.close()

    def rows(
        self, scope: Scope, listed_names: Iterable[str], *, is_anthropic: bool
    ) -> list[dict[str, Any]]:
        """Return the entries of `GET /v1/models` for models that only upstreams have.

        `listed_names` are the models of replicas. The list is empty for a client whose requests may
        not be sent to upstreams.
        """
        if self._permission.is_denied(scope):
            return []
        bare_names = {bare_name(name) for name in listed_names}
        owners = {
            name: upstream.name
            for upstream in reversed(self.upstreams)
            if "unknown_model" in upstream.spec.when
            for name in upstream.spec.models
            if bare_name(name) not in bare_names
        }
        return model_rows(owners, self._created_s, is_anthropic=is_anthropic)

    async def answer(self, request: ProxiedRequest, failed: AbstractSet[int]) -> bool:
        """Let an upstream answer a request, if a rule says so; return whether it has answered.

        `failed` are the indices of replicas that have lost or refused the request.

        Raises:
            NoUpstreamError: only upstreams have the model, and none can answer now.
            RateLimitError: only upstreams have the model, and all are busy.
            RequestError: only upstreams have the model, and an upstream has refused the request.
            LostAnswerError: the upstream has broken off its answer.
            ClientGoneError: the client has disconnected.
            OverflowLoopError: the request has already passed this router.
            NotAtUpstreamError: only upstreams have the model, but the request may not be sent to an
                upstream.
        """
        if self._is_denied(request):
            return False
        if not _may_leave(request):
            self._check_may_stay(request)
            return False
        rule, expected_s = self._rule(request, failed)
        if rule is None:
            return False
        self._check_loop(request)
        upstreams = list(self._having_model(request, rule))
        assert isinstance(request.body, bytes)
        fields = fields_of(request.body, request.scope["path"]) if upstreams else None
        if fields is None:
            self._check_may_stay(request)
            return False
        error: UpstreamError | None = None
        for upstream, bought in upstreams:
            is_slower = upstream.first_token_s > expected_s
            if is_slower or upstream.wait_s(bought) > 0:
                continue
            if self._is_denied(request):  # since an earlier upstream has taken its time
                return False
            request.tried_upstreams.add(upstream.name)
            error = await self._try(request, fields, upstream, bought, rule)
            if error is None:
                return True
        if rule == "unknown_model" and not self._takes_any_name(request.model):
            raise _unavailable(error, upstreams)
        return False

    def _is_denied(self, request: ProxiedRequest) -> bool:
        """Return whether a request may not be sent to upstreams, by its key's current state."""
        self._permission.refresh_owner(request.context)
        return self._permission.is_denied(request.scope)

    async def _try(
        self,
        request: ProxiedRequest,
        fields: dict[str, Raw],
        upstream: Upstream,
        bought: BoughtModel,
        rule: Rule,
    ) -> UpstreamError | None:
        """Let an upstream answer a request; return None, or the error if it has not answered.

        Raises:
            LostAnswerError: the upstream has broken off its answer.
            ClientGoneError: the client has disconnected.
        """
        max_cost = _max_cost(request, bought, self._fleet.context_length)
        via = b", ".join([*_routers_passed(request), self._via])
        exchange = ApiExchange(request, upstream, bought, via)
        try:
            if not await upstream.begin(max_cost):
                return UpstreamError("Other routers use the rest of max_cost_per_day.", "busy")
            await exchange.run(fields)
        except UpstreamError as error:
            upstream.record_failure(error, bought)
            request.log.upstream = ""
            request.log.num_tries += 1
            return error
        finally:
            if request.connection is not None:
                request.connection.release()
                request.connection = None
            upstream.end(max_cost)
            is_charged = exchange.is_charged or exchange.may_be_computed
            if is_charged and request.meter is not None:
                used = request.meter.used or ReportedUsage()
                self.costs.add_bought(
                    upstream.name,
                    bought.model,
                    used,
                    bought.cost(used),
                    is_estimated=request.meter.is_estimated,
                )
        upstream.record_answer(rule, bought)
        return None

    def _rule(self, request: ProxiedRequest, failed: AbstractSet[int]) -> tuple[Rule | None, float]:
        """Return the rule that applies to a request; None if a replica should answer it.

        Also returns the seconds after which the first token of a replica is expected; infinity if
        they were not computed, because another rule applies or there is no objective.
        """
        fleet, model = self._fleet, request.model
        is_taken = self._is_taken_here(model)
        is_unlisted = is_taken and self._is_unlisted(model)
        if not is_taken or (is_unlisted and any(self._having_model(request, "unknown_model"))):
            return "unknown_model", math.inf
        has_model = fleet.having_model(model)
        candidates = [
            replica
            for replica in fleet.ready
            if replica.index not in failed and (has_model is None or has_model[replica.index])
        ]
        if not candidates:
            return "no_replica", math.inf
        objective_s, prompt = self._spec.objective, request.log.prompt
        if objective_s is None or prompt is None or prompt.service_tier == _PATIENT_TIER:
            return None, math.inf
        expected_s = fleet.dispatcher.expected_first_token_s(request.key, has_model, failed)
        return "objective" if expected_s > objective_s else None, expected_s

    def _is_taken_here(self, model: str) -> bool:
        """Return whether a replica may answer requests for a model.

        True if a replica lists the model, or accepts unknown names.
        """
        try:
            self._fleet.having_model(model)
        except ModelNotFoundError:
            return False
        return True

    def _takes_any_name(self, model: str) -> bool:
        """Return whether a replica may answer requests for a model that no replica lists."""
        replicas = self._fleet.replicas.values()
        return self._fleet.starts.find_any(model) is not None or any(
            replica.facts.models and replica.facts.takes_any_name is not False
            for replica in replicas
        )

    def _is_unlisted(self, model: str) -> bool:
        """Return whether replicas have listed their models, and none of them lists this model.

        Replicas that were never reached do not matter: if they have the model, they are not ready.
        """
        fleet = self._fleet
        have_listed = any(replica.facts.models for replica in fleet.replicas.values())
        is_listed = bool(fleet.listed_name(model)) or fleet.starts.find(model) is not None
        return bool(model) and have_listed and not is_listed

    def _having_model(
        self, request: ProxiedRequest, rule: Rule
    ) -> Iterator[tuple[Upstream, BoughtModel]]:
        """Yield each upstream that a rule allows for a request, and its model.

        Upstreams to which the request was already sent are left out.
        """
        protocol = PROTOCOLS[request.scope["path"]]
        for upstream in self.upstreams:
            spec = upstream.spec
            is_new = upstream.name not in request.tried_upstreams
            if is_new and rule in spec.when and spec.protocol == protocol:
                bought = spec.find_model(request.model)
                if bought is not None:
                    yield upstream, bought

    def _check_may_stay(self, request: ProxiedRequest) -> None:
        """Refuse a request that no upstream can answer, if only upstreams have its model.

        Does nothing if a replica could have the model.

        Raises:
            NotAtUpstreamError: only upstreams have the model; the error says why they cannot answer
                this request.
        """
        model, path = request.model, request.scope["path"]
        paths = self._paths_of(model)
        is_computed = path in COMPUTED_PATHS and not request.has_begun
        if not paths or not is_computed or self._is_taken_here(model):
            return
        if path not in paths:
            reason = f"The model '{model}' is at an API, which answers {' and '.join(paths)} only."
            raise NotAtUpstreamError(reason)
        assert isinstance(request.body, bytes)
        field = local_field_of(request.body, path)
        if field == "messages":
            reason = (
                f"has reasoning that a server here has signed, which the API that has the model "
                f"'{model}' refuses: leave out the thinking blocks of earlier answers."
            )
            raise NotAtUpstreamError(reason, field=field)
        if field:
            reason = f"cannot be sent to the API that has the model '{model}': leave it out."
            raise NotAtUpstreamError(reason, field=field)
        if not request.may_overflow:
            reason = "has no file or answer that a server here stores: send its text in the request"
            raise NotAtUpstreamError(f"The API that has the model '{model}' {reason}.")

    def _paths_of(self, model: str) -> list[str]:
        """Return the API paths on which upstreams answer for a model that no replica has."""
        protocols = {
            upstream.spec.protocol
            for upstream in self.upstreams
            if "unknown_model" in upstream.spec.when and upstream.spec.find_model(model) is not None
        }
        return [path for path, protocol in PROTOCOLS.items() if protocol in protocols]

    def _check_loop(self, request: ProxiedRequest) -> None:
        """Raise OverflowLoopError if a request has already passed this router."""
        if self._via in _routers_passed(request):
            reason = "The request has already passed this router, which is an upstream of itself."
            raise OverflowLoopError(reason)

    def state(self) -> dict[str, Any]:
        """Return the state of the upstreams and the costs of this day, for `GET /api/state`."""
        costs, spec = self.costs, self._spec
        day = costs.day
        return {
            "day": day,
            "currency": spec.currency,
            "objective_s": spec.objective,
            "here": _sums(costs.today[REPLICAS_SIDE], has_cost=costs.knows_cost_here)
            | {
                "price_per_hour": spec.replicas.price_per_hour,
                "cost_elsewhere": costs.bought_cost,
            },
            "upstreams": [self._upstream_state(upstream) for upstream in self.upstreams],
        }

    def _upstream_state(self, upstream: Upstream) -> dict[str, Any]:
        state, reason = upstream.state
        spec = upstream.spec
        return {
            "name": upstream.name,
            "url": spec.address().url,
            "protocol": spec.protocol,
            "when": spec.when,
            "models": {name: bought.model for name, bought in spec.models.items()},
            "state": state,
            "reason": reason,
            "running": upstream.num_running,
            "first_token_s": upstream.first_token_s or None,
            "max_cost_per_day": spec.max_cost_per_day,
            "answered": dict(upstream.num_requests),
            "failed": dict(upstream.num_failures),
        } | _sums(self.costs.today[upstream.name], has_cost=True)


def _sums(sums: Sums, *, has_cost: bool) -> dict[str, Any]:
    return {
        "requests": sums.requests,
        "input_tokens": sums.input,
        "cached_tokens": sums.cached,
        "output_tokens": sums.output,
        "cost": sums.cost if has_cost else None,
        "cost_per_million": sums.cost_per_million if has_cost else None,
        "estimated_requests": sums.estimated_requests,
        "estimated_cost": sums.estimated_nanos / NANOS if has_cost else None,
    }


def _check_tenants(tenants: Sequence[str], keys: ApiKeys | None, path: Path) -> None:
    """Check that the router has API keys, by which it knows tenants, and warn of unknown tenants.

    `tenants` are the names in the field `never_for` of the overflow file `path`.

    Raises:
        UsageError: the file names tenants, and the router has no API keys.
    """
    if not tenants:
        return
    if keys is None:
        raise UsageError(
            f"{path}: never_for names tenants, which a router knows only by their API keys: start "
            f"it with --api-keys, --records or --store."
        )
    for tenant in tenants:
        if not keys.has_tenant(tenant):
            reason = "%s: no API key belongs to the tenant '%s' of never_for. Is the name right?"
            _logger.warning(reason, path, tenant)


def _routers_passed(request: ProxiedRequest) -> list[bytes]:
    """Return the Twostroke routers that a request has passed, from its header `via`.

    Other proxies in the header are left out, so that the vendors of APIs do not see their names.
    """
    vias = [value for name, value in request.scope["headers"] if name == _VIA_HEADER]
    return [via for value in vias for via in header_tokens(value) if _ROUTER_VIA.fullmatch(via)]


def _may_leave(request: ProxiedRequest) -> bool:
    """Return whether any rule can apply to a request.

    It must be a chat whose response has not begun, which is allowed to leave (`may_overflow`), and
    which no replica must answer because of data that it stores.
    """
    return (
        request.scope["path"] in PROTOCOLS
        and bool(request.content)
        and not request.has_begun
        and request.may_overflow
        and request.only_replica is None
    )


def _max_cost(request: ProxiedRequest, bought: BoughtModel, context_length: int) -> float:
    """Return the maximum cost of a request in the currency's unit, from its estimated tokens.

    Without a limit in the request, an answer of `context_length` tokens is assumed.
    """
    prompt = request.log.prompt
    if prompt is None or request.meter is None:
        return 0.0
    longest = max(context_length, *(prompt.limits.get(name, 0) for name in _LIMIT_FIELDS))
    num_output = prompt.max_answer_tokens(request.scope["path"], longest, is_foreign=True)
    num_written = prompt.num_tokens if (bought.cache_write or 0.0) > bought.input else 0
    return bought.cost(
        ReportedUsage(
            prompt.num_tokens, completion_tokens=num_output, cache_write_tokens=num_written
        )
    )


def _unavailable(
    error: UpstreamError | None, upstreams: list[tuple[Upstream, BoughtModel]]
) -> TwostrokeError:
    """Return the error for a request whose model only upstreams have, if all of them fail."""
    if error is not None and error.request_error is not None:
        return error.request_error
    wait_s = max(1.0, min(upstream.wait_s(bought) for upstream, bought in upstreams))
    reason = "No server here has this model, and the API that has it cannot be used now."
    if any(upstream.is_busy for upstream, _ in upstreams):
        return RateLimitError(f"{reason} Try again later.", wait_s=wait_s)
    return NoUpstreamError(reason, wait_s=wait_s)
