"""Shows each tenant where its prompts begin to differ from earlier prompts, at `/api/prompts`.

A prompt parts from an earlier prompt at its first token that differs. The prefix cache cannot have
the tokens after this parting.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import TYPE_CHECKING, Final

import msgspec
from msgspec import structs
from prometheus_client import Counter
from starlette.routing import Route

from twostroke.core.prompt_partings import Parting, PartingFinder, PartingStatistics
from twostroke.server.http.errors import UnknownPathError
from twostroke.server.http.request_context import served_of
from twostroke.server.http.responses import to_json
from twostroke.server.observability.trace_recorder import RecordedWork

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from prometheus_client import CollectorRegistry
    from starlette.requests import Request
    from starlette.responses import Response

    from twostroke.engine.process.served import ServedEngine
    from twostroke.server.http.request_context import ServedRequest

PATH: Final = "/api/prompts"
_MAX_TENANTS: Final = 1000  # the tenant that was silent for the longest time is forgotten
_MAX_PARTINGS: Final = 200  # of a tenant
_SHOWN_TOKENS: Final = 16  # before and after a parting


class PartingRow(msgspec.Struct, frozen=True):
    """Statistics of a tenant's prompts that first differ from an earlier prompt at one position.

    Attributes:
        position: the number of tokens that the prompts share with an earlier prompt.
        num_prompts: how many prompts differ from this position on.
        num_after: the tokens of these prompts after the position, which the prefix cache cannot
            have.
        num_repeated: an estimate of how many of the tokens in `num_after` earlier prompts have,
            too. They could be in the prefix cache if the tokens that differ stood after them.
        before, after: the text before and after the position, in the newest of these prompts; null
            unless the query has `show_text`.
    """

    position: int
    num_prompts: int
    num_after: int
    num_repeated: int
    before: str | None = None
    after: str | None = None


class PromptsBody(msgspec.Struct, frozen=True):
    """The response of `/api/prompts`: where the tenant's prompts differ from earlier prompts.

    Attributes:
        num_prompts, num_tokens: all prompts of the tenant since the server's start.
        partings: the positions at which prompts first differ; the most repeated tokens come first.
        s_per_token: mean seconds of prefill for each prompt token that was computed; null before
            the first computed token.
    """

    num_prompts: int
    num_tokens: int
    partings: list[PartingRow]
    s_per_token: float | None = None


class _Example(PartingStatistics):
    """Statistics of a parting, with the tokens around it in the newest prompt that parted there."""

    def __init__(self, position: int) -> None:
        super().__init__(position)
        self.before: Sequence[int] = ()
        self.after: Sequence[int] = ()


class _TenantPartings:
    """The partings of one tenant, by a key that is equal for prompts that part at the same point.

    The partings of the newest prompts are at the end.
    """

    def __init__(self) -> None:
        self.num_prompts = self.num_tokens = 0
        self.partings: OrderedDict[int, _Example] = OrderedDict()

    def add(self, prompt: Sequence[int], parting: Parting | None) -> None:
        """Count a prompt and its parting; None if the prompt does not part from earlier prompts."""
        self.num_prompts += 1
        self.num_tokens += len(prompt)
        if parting is None:
            return
        example = self.partings.pop(parting.key, None) or _Example(parting.position)
        self.partings[parting.key] = example
        example.add(parting)
        position = parting.position
        example.before = prompt[max(0, position - _SHOWN_TOKENS) : position]
        example.after = prompt[position : position + _SHOWN_TOKENS]
        if len(self.partings) > _MAX_PARTINGS:
            self.partings.popitem(last=False)


class PromptDoctor:
    """Observes the prompts of all tenants; only the tenant itself can see text of its prompts."""

    def __init__(self, registry: CollectorRegistry, decode: Callable[[Sequence[int]], str]) -> None:
        """Start with no prompts; `decode` converts token ids to text."""
        self._decode = decode
        self._finder = PartingFinder()
        self._tenants: OrderedDict[str, _TenantPartings] = OrderedDict()
        self._repeated = Counter(
            "twostroke_prompt_repeated_tokens",
            "Prompt tokens that earlier prompts have, but only after tokens that differ.",
            registry=registry,
        )
        self._partings = Counter(
            "twostroke_prompt_partings",
            "Prompts that part from an earlier prompt of their tenant.",
            registry=registry,
        )

    def observe(self, served_request: ServedRequest) -> None:
        """Compare the prompts of a request that has ended with its tenant's earlier prompts."""
        work = served_request.running
        if not isinstance(work, RecordedWork):
            return
        tenant = self._tenants.pop(served_request.tenant, None) or _TenantPartings()
        self._tenants[served_request.tenant] = tenant
        if len(self._tenants) > _MAX_TENANTS:
            self._tenants.popitem(last=False)
        for prompt in work.prompts:
            parting = self._finder.add(served_request.tenant, prompt)
            tenant.add(prompt, parting)
            if parting is not None:
                self._partings.inc()
                self._repeated.inc(parting.num_repeated)

    def close(self) -> None:
        """Do nothing, because nothing is stored."""

    def report(self, tenant_name: str, *, shows_text: bool) -> PromptsBody:
        """Return the partings of a tenant's prompts; the most repeated tokens come first."""
        tenant = self._tenants.get(tenant_name) or _TenantPartings()
        rows = [self._row(example, shows_text=shows_text) for example in tenant.partings.values()]
        rows.sort(key=lambda row: (-row.num_repeated, row.position))
        return PromptsBody(tenant.num_prompts, tenant.num_tokens, rows)

    def _row(self, example: _Example, *, shows_text: bool) -> PartingRow:
        return PartingRow(
            example.position,
            example.num_prompts,
            example.num_after,
            example.num_repeated,
            before=self._decode(example.before) if shows_text else None,
            after=self._decode(example.after) if shows_text else None,
        )


def prompt_doctor_route(doctor: PromptDoctor | None, engine: ServedEngine) -> Route:
    """Return the route of `/api/prompts`, which answers 404 if `doctor` is None.

    `engine`, the engine of the default model, reports how long prefill takes.
    """

    async def answer(request: Request) -> Response:
        if doctor is None:
            raise UnknownPathError(
                "Prompts are not compared: start `twostroke serve` with --prompt-doctor."
            )
        tenant = served_of(request.scope).tenant
        body = doctor.report(tenant, shows_text="show_text" in request.query_params)
        prefill = (await engine.read([])).snapshot.phases.prefill
        s_per_token = prefill.time_s / prefill.rows if prefill.rows else None
        body = structs.replace(body, s_per_token=s_per_token)
        return to_json(body, headers={"cache-control": "no-store"})

    return Route(PATH, answer, name=PATH)
