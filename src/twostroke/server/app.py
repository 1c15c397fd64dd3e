"""The HTTP endpoints of a server: a body becomes a job in the engine, the result a response."""

from __future__ import annotations

import asyncio
import math
import secrets
import time
from functools import partial
from typing import TYPE_CHECKING, Any, Final, Protocol, TypeAlias, TypeVar

from msgspec.structs import replace
from starlette.responses import Response
from starlette.routing import Route

from twostroke.core.json_io import encode_json
from twostroke.core.request import BATCH_SERVICE_TIER
from twostroke.engine.structured_output.schema.verify import Verifier
from twostroke.server.auth.key_refresher import KeyRefresher
from twostroke.server.auth.usage import UsageBook
from twostroke.server.batch import messages, uploads
from twostroke.server.batch import openai as openai_batches
from twostroke.server.batch.service import BatchService
from twostroke.server.body.attached_files import has_files, with_file_texts
from twostroke.server.body.decode import LARGE_BODY_BYTES, BodyDecoder, misspelt_field_error
from twostroke.server.body.field import Fact
from twostroke.server.generation.checks import AnswerChecks
from twostroke.server.generation.job import (
    check_choices,
    check_texts,
    check_vectors,
    with_sender,
    with_spent_time,
)
from twostroke.server.generation.protocol import ResponseInfo
from twostroke.server.generation.redraw import AnswerGuard
from twostroke.server.generation.response_store import Journal, ResponseStore, Tenant
from twostroke.server.generation.responses import EventStream, respond_whole
from twostroke.server.generation.running import Accepting, Answers, Vectors
from twostroke.server.http import errors
from twostroke.server.http.fair_queue import Readers
from twostroke.server.http.ignored import IgnoredFields
from twostroke.server.http.limits import body_of
from twostroke.server.http.logs import AccessLog
from twostroke.server.http.origins import wants_page
from twostroke.server.http.request_context import served_of
from twostroke.server.http.responses import JsonInChunks, to_json, while_connected
from twostroke.server.http.retry_after import RetryAfter, in_time, timeout_of
from twostroke.server.models.about import VERSION, AboutBody
from twostroke.server.models.endpoints import model_routes
from twostroke.server.models.registry import ModelRegistry
from twostroke.server.observability.health import HealthReports
from twostroke.server.observability.metrics import ServerMetrics
from twostroke.server.observability.state import DashboardStates
from twostroke.server.observability.traces import Traces, exporter
from twostroke.server.openapi.document import ServerFacts, document
from twostroke.server.openapi.operations import OPERATIONS
from twostroke.server.protocols.common.fields import CACHE_CONTROL_FIELDS
from twostroke.server.protocols.llama_server.info import info_routes
from twostroke.server.protocols.ollama.models import ollama_routes
from twostroke.server.protocols.openai import stored_chat
from twostroke.server.protocols.openai.tokens import tokenizer_routes
from twostroke.server.protocols.responses import conversation_routes as conversations
from twostroke.server.protocols.responses.background import (
    BackgroundResponse,
    BackgroundRuns,
    check_background,
)
from twostroke.server.protocols.responses.conversation_routes import Conversations
from twostroke.server.protocols.responses.reply import ResponsesEncoder
from twostroke.server.protocols.responses.routes import StoredResponses
from twostroke.server.routes import EMBEDDING_PROTOCOLS, GENERATION_PROTOCOLS, UTILITY_ENDPOINTS
from twostroke.server.web_ui.site import Site

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    import msgspec
    from starlette.requests import Request

    from twostroke.backends.machine_limits import MachineLimits
    from twostroke.engine.process.served import ServedEngine
    from twostroke.server.generation.job import EmbeddingJob, Encoded, Job
    from twostroke.server.generation.protocol import ApiProtocol, EmbeddingProtocol, UtilityEndpoint
    from twostroke.server.generation.responses import Started
    from twostroke.server.generation.running import Open
    from twostroke.server.http.ignored import Ignored
    from twostroke.server.http.request_context import Observer, ServedRequest
    from twostroke.server.models.grammar_compiler import Compiler
    from twostroke.server.models.registry import ServedModel
    from twostroke.server.openapi.document import Operations
    from twostroke.server.openapi.operation import RouteDescription
    from twostroke.server.options import ServeOptions
    from twostroke.server.storage import Records

    NoteIgnored = Callable[[list[Ignored], ServedRequest], None]

T = TypeVar("T")

STATE_PATH: Final = "/api/state"

# Python runs one thread at a time: more would only delay the event loop.
_NUM_READERS = 2
_LARGE_RESPONSE_BYTES: Final = 1 << 20  # sent in chunks
_WAITING_LINES: Final = 16  # of batches, so that a step need not wait for the next


class Api:
    """Answers requests with the model of an engine, or those of a roster."""

    def __init__(
        self,
        engine: ServedEngine,
        options: ServeOptions,
        limits: MachineLimits | None,
        records: Records | None = None,
        extensions: Sequence[ExtensionFactory] = (),
    ) -> None:
        """Serve `engine`'s model, or all models if it is a `Roster`.

        `limits` are the machine's, for the metrics of utilization. `records` keep files,
        batches, keys and usage; None keeps none. `extensions` add paths.
        """
        self.engine = engine
        self.options = options
        self.models = ModelRegistry(engine, options)
        self.metrics = ServerMetrics(
            self.models,
            limits,
            options.objectives,
            has_llama_metrics=options.llama_metrics,
        )
        self.names = self.models.names.served_names
        self._states = DashboardStates(self.models, limits, self.metrics.goodput)
        self._extensions = [make(engine, self.names[0], limits) for make in extensions]
        self.observers: list[Observer] = []
        if options.otlp_endpoint is not None:
            self.observers.append(Traces(exporter(options.otlp_endpoint)))
        if options.access_log:
            self.observers.append(AccessLog())  # after the traces, whose ids it logs
        self.site = Site()
        self.is_draining = False
        self._drained_by_s = math.inf
        self._returns = RetryAfter()
        self._open: set[Open] = set()
        self._descriptions: dict[bool, bytes] = {}  # by whether a key is needed
        self._checks = AnswerChecks(Verifier(), self.metrics)
        self._readers = Readers(_NUM_READERS)
        self.vitals = HealthReports(engine, self.models.names, lambda: self.is_draining, records)
        journal = Journal(records) if records is not None else None
        self.answers = ResponseStore(options.max_stored, options.max_stored_bytes, journal)
        self._background = BackgroundRuns()
        self.keeping = BatchService(records, options.limits, self._room, options.api_keys)
        usage = UsageBook(self.names[0])
        self.upkeep = KeyRefresher(records, options.api_keys, usage)
        self.observers += [usage] if records is not None else []
        self._ignored = IgnoredFields(
            self.metrics.registry,
            is_strict=options.is_strict,
            effective_names=CACHE_CONTROL_FIELDS if engine.facts.keeps_pages else (),
        )

    def routes(self) -> list[Route]:
        """Return all routes."""
        gets = {
            "/": self.root,
            **self.vitals.routes(),
            "/metrics": self.scrape,
            "/openapi.json": self.openapi,
            STATE_PATH: self.state,
        }
        posts = {
            **{path: self._generation(dialect) for path, dialect in GENERATION_PROTOCOLS.items()},
            **{path: self._embedding(dialect) for path, dialect in EMBEDDING_PROTOCOLS.items()},
            **{path: self._inquiry(inquiry) for path, inquiry in UTILITY_ENDPOINTS.items()},
        }
        return [
            *(Route(path, endpoint, name=path) for path, endpoint in gets.items()),
            Route("/page/{name:path}", self.site.file, include_in_schema=False),
            *(Route(path, post, methods=["POST"], name=path) for path, post in posts.items()),
            *StoredResponses(self._tenant, self._background, self.options).routes(),
            *Conversations(
                self._tenant,
                self.options.limits,
                self._ignored.note,
                self._readers,
                self._with_files,
            ).routes(),
            *stored_chat.routes(
                self._tenant, self.options.limits, self._ignored.note, self._readers
            ),
            *info_routes(self.models, self.options),
            *tokenizer_routes(self.models),
            *self.keeping.routes(self._ignored.note, self._readers),
            *(
                route
                for extension in self._extensions
                for route in extension.routes(self.options, self._ignored.note)
            ),
            *model_routes(self.models),
            *ollama_routes(self.models),
        ]

    @property
    def num_running(self) -> int:
        """The number of clients' requests whose answers are not complete."""
        return sum(running.service != BATCH_SERVICE_TIER for running in self._open)

    def drain(self) -> None:
        """Take no new requests, and stop the lines of batches, which the next server runs."""
        self.is_draining, self._drained_by_s = True, time.monotonic() + self.options.drain_s
        self.keeping.drain()
        self.engine.flush()  # so that batching does not wait for more requests

    def abort(self) -> None:
        """Cut off all running answers; their clients get an error."""
        for running in list(self._open):
            running.cancel()

    def close(self) -> None:
        """Free threads and exporters, after the last request."""
        self._checks.close()
        self._readers.close()
        for extension in self._extensions:
            extension.close()
        for observer in self.observers:
            observer.close()

    async def root(self, request: Request) -> Response:
        """Answer a browser with the page, and a program with a description as JSON."""
        if wants_page(request):
            return self.site.respond(request)
        paths = [
            "/v1/models",
            *GENERATION_PROTOCOLS,
            *EMBEDDING_PROTOCOLS,
            *UTILITY_ENDPOINTS,
            "/health",
            "/metrics",
        ]
        about = AboutBody("twostroke", VERSION, self.names[0], paths, "/openapi.json")
        return to_json(about, headers={"vary": "accept"})

    async def openapi(self, _request: Request) -> Response:
        """Return the OpenAPI document."""
        has_keys = self.options.has_keys
        if has_keys not in self._descriptions:  # made at the first request, since it takes a while
            self._descriptions[has_keys] = encode_json(await asyncio.to_thread(self.description))
        return Response(self._descriptions[has_keys], media_type="application/json")

    def description(self) -> dict[str, Any]:
        """Return the OpenAPI document of this server."""
        all_kinds: dict[str, Any] = {
            **GENERATION_PROTOCOLS,
            **EMBEDDING_PROTOCOLS,
            **UTILITY_ENDPOINTS,
        }
        bodies = (
            stored_chat.BODIES
            | conversations.BODIES
            | openai_batches.BODIES
            | uploads.BODIES
            | messages.BODIES
            | {path: one.request for path, one in all_kinds.items()}
        )
        for extension in self._extensions:
            bodies |= extension.bodies
        return document(self.routes(), bodies, self.facts(), self.operations)

    @property
    def operations(self) -> Operations:
        """The descriptions of all routes, by method and path."""
        operations = dict(OPERATIONS)
        for extension in self._extensions:
            operations |= extension.operations
        return operations

    def facts(self) -> ServerFacts:
        """Return the facts of this server for its description."""
        limits = self.options.limits
        last = max(one.card.cost.program.vocab_size for _, one in self.models) - 1
        values: dict[str, Any] = {
            Fact.LAST_ID: last,
            Fact.MODEL_NAMES: self.names[:1],
            Fact.PROPOSERS: ("auto", "off", *self.engine.facts.methods, None),
            Fact.EMBEDDING_WIDTH: max(one.card.embedding_width for _, one in self.models),
            Fact.MAX_CHOICES: self._max_choices,
            Fact.MAX_INPUTS: limits.max_inputs,
        }
        has_keys, is_strict = self.options.has_keys, self.options.is_strict
        return ServerFacts(VERSION, has_keys, is_strict, values)

    async def scrape(self, request: Request) -> Response:
        """Return the metrics."""
        body, content_type = await self.metrics.expose(request.headers.get("accept", ""))
        return Response(body, headers={"content-type": content_type})

    async def state(self, request: Request) -> Response:
        """Return the dashboard's state, its past with `?past`; UnknownPathError if it is off."""
        self.options.check_dashboard()
        asked = request.query_params
        state = self._states.of(asked.get("model"))
        body = await state.body(self.vitals.status, has_past="past" in asked)
        return Response(body, headers={"cache-control": "no-store"}, media_type="application/json")

    @property
    def _max_choices(self) -> int:
        """The most answers of one request: as many as the queue takes, within the limits."""
        queue = self.engine.facts.config.max_waiting_requests
        return min(self.options.limits.max_choices, queue)

    def _generation(self, dialect: ApiProtocol[Any]) -> Callable[[Request], Any]:
        limits = self.options.limits
        decoder = BodyDecoder(dialect.request, limits.max_json_depth)

        def prepare(
            body: bytes, request: Request
        ) -> tuple[Job, Encoded, str, ServedModel] | Response:
            served = served_of(request.scope)
            asked, ignored = decoder.decode(body)
            served.field_names = dialect.names(asked)
            self._ignored.note(ignored, served)
            name, model = self.models.choose(asked.model, served, dialect.keep_s(asked))
            if (empty := dialect.empty(asked, name)) is not None:
                return to_json(empty)
            try:
                job = dialect.reader_of(served.path)(asked, self._tenant(request))
            except errors.MissingFieldError as error:
                raise misspelt_field_error(error, ignored) from None
            self._ignored.note(job.ignored, served)
            check_choices(job, self._max_choices)
            check_background(job, served)
            cuts_limit = not self.options.strict_limits
            job = replace(job, caller=replace(job.caller, cuts_limit=cuts_limit))
            job = with_sender(job, served, self.metrics.goodput)
            job = replace(job, params=model.card.sampling.fill(job.params, job.default_params))
            encoded = job.encode(model.card, splits_reasoning=self.options.splits_reasoning)
            self._ignored.note(encoded.ignored, served)
            return job, encoded, name, model

        async def generate(request: Request) -> Any:
            found = await self._read(request, prepare, is_long=dialect.recalls)
            self.models.note(served_of(request.scope), is_empty=isinstance(found, Response))
            if isinstance(found, Response):
                return found
            (job, encoded, name, model), served = found, served_of(request.scope)
            served.reserve(encoded.max_total_tokens(model.card.context_length))
            reply = ResponseInfo(
                id=dialect.prefix + secrets.token_hex(16),
                created_s=int(time.time()),
                model=name,
                job=job,
                prompts=encoded.prompts,
                tokenizer=model.card.tokenizer,
                reading=encoded.reading,
                as_llama_server=not served.path.startswith("/v1/"),
            )
            encoder = dialect.encoder(reply)
            served.model, served.response_id = name, reply.id
            start = partial(self._start, request, reply, encoded, model)
            if job.in_background:
                assert isinstance(encoder, ResponsesEncoder)
                return BackgroundResponse(
                    start, encoder, self.options, self._background, is_streamed=job.stream
                )
            if job.stream:
                return EventStream(start, encoder, self.options, dialect.framing)
            return await respond_whole(request, await start(), encoder, self._readers)

        return generate

    async def _start(
        self, request: Request, reply: ResponseInfo, encoded: Encoded, model: ServedModel
    ) -> Started:
        """Queue a job once its constraint is compiled.

        Raises what `Compiler.compile` and `Answers.start` do.
        """
        job, served = reply.job, served_of(request.scope)
        with Accepting(job.caller.service, self._open, self._returns):
            if encoded.params.constraint is not None:
                work = _compile_constraint(model.compiler, encoded, job.caller.tenant)
                async with in_time(served):  # a stream sees by itself that its client leaves
                    stays = job.stream or job.in_background
                    await (work if stays else while_connected(request.receive, work))
            guard = None
            if encoded.gaps:
                encoded.fix_seed()
                guard = AnswerGuard(self._checks, reply, encoded, served)
            args = model.engine, with_spent_time(job, served), encoded, self.metrics, self._open
            served.running = answers = await Answers.start(*args)
        return answers, reply.reader(), guard

    def _embedding(self, dialect: EmbeddingProtocol[Any]) -> Callable[[Request], Any]:
        limits = self.options.limits
        decoder = BodyDecoder(dialect.request, limits.max_json_depth)

        def prepare(
            body: bytes, request: Request
        ) -> tuple[EmbeddingJob, list[list[int]], str, ServedModel] | Response:
            served = served_of(request.scope)
            asked, ignored = decoder.decode(body)
            self._ignored.note(ignored, served)
            name, model = self.models.choose(asked.model, served, dialect.keep_s(asked))
            if (empty := dialect.empty(asked, name)) is not None:
                return to_json(empty)
            job = dialect.read(asked, self._tenant(request))
            job = with_sender(job, served, self.metrics.goodput)
            check_texts(job, limits.max_inputs)
            texts = job.encode(model.card)
            check_vectors(job, texts, model.card, limits.max_vector_values)
            return job, texts, name, model

        async def embed(request: Request) -> Response:
            found = await self._read(request, prepare)
            self.models.note(served_of(request.scope), is_empty=isinstance(found, Response))
            if isinstance(found, Response):
                return found
            (job, texts, name, model), served = found, served_of(request.scope)
            job = with_spent_time(job, served)
            served.reserve(sum(map(len, texts)))
            with Accepting(job.caller.service, self._open, self._returns):
                vectors = await Vectors.start(model.engine, job, texts, self.metrics, self._open)
            served.running, served.model = vectors, name
            try:
                is_last = served.service == BATCH_SERVICE_TIER
                work = vectors.encoded_vectors(
                    partial(self._readers.run, served.tenant, is_last=is_last)
                )
                parts = await while_connected(request.receive, work)
            finally:
                vectors.cancel()
            elapsed_s = time.monotonic() - served.began_s

            def body(parts: list[msgspec.Raw]) -> object:
                return dialect.whole_response(name, parts, vectors.num_tokens, elapsed_s)

            if sum(memoryview(part).nbytes for part in parts) <= _LARGE_RESPONSE_BYTES:
                return to_json(body(parts))
            return JsonInChunks(body, parts)

        return embed

    def _inquiry(self, inquiry: UtilityEndpoint[Any]) -> Callable[[Request], Any]:
        decoder = BodyDecoder(inquiry.request, self.options.limits.max_json_depth)

        def answer(body: bytes, request: Request) -> Response:
            asked, ignored = decoder.decode(body)
            served_of(request.scope).field_names = inquiry.names(asked)
            self._ignored.note(ignored, served_of(request.scope))
            _, model = self.models.find(asked.model)
            sender = (self._tenant(request),) if inquiry.recalls else ()
            return to_json(inquiry.answer(asked, model.card, *sender))

        async def respond(request: Request) -> Response:
            return await self._read(request, answer, is_long=inquiry.recalls)

        return respond

    async def _read(
        self, request: Request, work: Callable[[bytes, Request], T], *, is_long: bool = False
    ) -> T:
        """Return `work` of the body, in a thread if the body or the work (`is_long`) is long.

        Raises:
            ServerStoppingError: the server drains.
            RequestError: its header with a timeout is wrong.
            DeadlineError: its timeout is over.
        """
        if self.is_draining:
            reason = "The server is stopping and takes no new requests."
            raise errors.ServerStoppingError(reason, room_s=self._drained_by_s - time.monotonic())
        served = served_of(request.scope)
        served.timeout_s = timeout_of(request.scope)
        async with in_time(served), body_of(request, self.options.limits) as body:
            if has_files(body):
                return await self._readers.run_for(request, self._read_files, work, body, request)
            if not is_long and len(body) <= LARGE_BODY_BYTES:
                return work(body, request)
            return await self._readers.run_for(request, work, body, request)

    def _read_files(self, work: Callable[[bytes, Request], T], body: bytes, request: Request) -> T:
        """Return the result of `work` on a body in which text parts replace attached files."""
        return work(self._with_files(body, request), request)

    def _with_files(self, body: bytes, request: Request) -> bytes:
        read_file = self.keeping.file_reader(served_of(request.scope).tenant)
        return with_file_texts(body, read_file) if has_files(body) else body

    def _room(self) -> int:
        """How many lines of batches may be in the engine: all that clients leave, and some wait."""
        return self.engine.facts.config.max_running + _WAITING_LINES - self.num_running

    def _tenant(self, request: Request) -> Tenant:
        """Return the sender of a request, which the key check has noted."""
        return Tenant(served_of(request.scope).tenant, self.answers)


async def _compile_constraint(compiler: Compiler, encoded: Encoded, tenant: str) -> None:
    """Compile the constraint of a job, and note the gaps of its grammar."""
    if (constraint := encoded.params.constraint) is not None:
        compiled, encoded.gaps = await compiler.compile(encoded.calls or constraint, tenant)
        encoded.params = replace(encoded.params, constraint=compiled)


class Extension(Protocol):
    """Routes with their descriptions for the OpenAPI document."""

    @property
    def bodies(self) -> Mapping[str, type[msgspec.Struct]]:
        """The structs of request bodies, by path."""

    @property
    def operations(self) -> Mapping[tuple[str, str], RouteDescription]:
        """The descriptions, by method and path."""

    def routes(self, options: ServeOptions, note_ignored: NoteIgnored) -> Sequence[Route]:
        """Return the routes; `note_ignored` takes the fields of a request without effect."""

    def close(self) -> None:
        """Free threads, after the last request."""


# Makes an extension for an engine, the name of its model and the limits of the machine.
ExtensionFactory: TypeAlias = "Callable[[ServedEngine, str, MachineLimits | None], Extension]"
