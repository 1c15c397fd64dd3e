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
from twostroke.core.recorded_trace import ServerSettings
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
from twostroke.server.generation.answer_reuse import create_answer_reuse, reuse_rule
from twostroke.server.generation.checks import AnswerChecks
from twostroke.server.generation.job import (
    check_choices,
    check_texts,
    check_vectors,
    with_sender,
    with_spent_time,
)
from twostroke.server.generation.protocol import SSE, ResponseInfo
from twostroke.server.generation.redraw import AnswerGuard
from twostroke.server.generation.response_store import Journal, ResponseStore, Tenant
from twostroke.server.generation.responses import EventStream, respond_whole
from twostroke.server.generation.running import RunningAnswers, RunningEmbeddings, Submission
from twostroke.server.generation.stream_records import StreamRecorder, StreamReplay
from twostroke.server.http import errors
from twostroke.server.http.fair_queue import Readers
from twostroke.server.http.ignored import IgnoredFields, RemovedLines
from twostroke.server.http.limits import body_of
from twostroke.server.http.logs import AccessLog
from twostroke.server.http.origins import wants_page
from twostroke.server.http.request_context import served_of
from twostroke.server.http.responses import JsonInChunks, to_json, while_connected
from twostroke.server.http.retry_after import RetryAfter, timeout_of, within_timeout
from twostroke.server.http.router_messages import NO_RECORDS, RESUME_HEADER, split_body
from twostroke.server.models.about import VERSION, AboutBody
from twostroke.server.models.endpoints import model_routes
from twostroke.server.models.registry import ModelRegistry
from twostroke.server.observability.health import HealthReports, numerics_of
from twostroke.server.observability.metrics import ServerMetrics
from twostroke.server.observability.prompt_doctor import PromptDoctor, prompt_doctor_route
from twostroke.server.observability.state import DashboardStates
from twostroke.server.observability.trace_recorder import TraceRecorder
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
    from twostroke.engine.resumption import AnswerProgress
    from twostroke.server.generation.job import EmbeddingJob, EncodedJob, Job
    from twostroke.server.generation.protocol import ApiProtocol, EmbeddingProtocol, UtilityEndpoint
    from twostroke.server.generation.responses import Started
    from twostroke.server.generation.running import Open
    from twostroke.server.http.ignored import Ignored
    from twostroke.server.http.request_context import Observer, ServedRequest
    from twostroke.server.models.grammar_compiler import GrammarCompiler
    from twostroke.server.models.registry import ServedModel
    from twostroke.server.openapi.document import Operations
    from twostroke.server.openapi.operation import RouteDescription
    from twostroke.server.options import ServeOptions
    from twostroke.server.storage import Records

    NoteIgnored = Callable[[list[Ignored], ServedRequest], None]

T = TypeVar("T")
AnyJob = TypeVar("AnyJob", "Job", "EmbeddingJob")

STATE_PATH: Final = "/api/state"

_NUM_READER_THREADS = 2  # more would delay the event loop, since Python runs one thread at a time
_LARGE_RESPONSE_BYTES: Final = 1 << 20  # larger responses are sent in chunks
_NUM_QUEUED_BATCH_REQUESTS: Final = 16  # so that a step need not wait for the next batch request


class Api:
    """The HTTP endpoints of a server, for one model or several."""

    def __init__(
        self,
        engine: ServedEngine,
        options: ServeOptions,
        limits: MachineLimits | None,
        records: Records | None = None,
        extensions: Sequence[ExtensionFactory] = (),
    ) -> None:
        """Prepare the endpoints for the model of `engine`, or for all models of a `ModelPool`.

        Args:
            engine: the engine, which the caller closes.
            options: the options of the server.
            limits: the machine's memory bandwidth and peak compute, with which the metrics
                compare the engine's speed; None shows no utilization.
            records: the database and folder that store files, batches, keys and usage; None
                stores none of them.
            extensions: functions that make further endpoints, such as the endpoint for plans.
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
        self._states = DashboardStates(
            self.models, limits, self.metrics.goodput, has_prompt_doctor=options.prompt_doctor
        )
        self._extensions = [make(engine, self.names[0], limits) for make in extensions]
        self._prompt_doctor: PromptDoctor | None = None
        if options.prompt_doctor:
            decode = partial(engine.card.tokenizer.decode, skip_special=False)
            self._prompt_doctor = PromptDoctor(self.metrics.registry, decode)
        self.observers = self._create_observers()
        self.site = Site()
        self.is_draining = False
        self._drained_by_s = math.inf
        self._retry_after = RetryAfter()
        self._open_requests: set[Open] = set()
        self._descriptions: dict[
            bool, bytes
        ] = {}  # the OpenAPI document, by whether a key is needed
        self._checks = AnswerChecks(Verifier(), self.metrics)
        self._readers = Readers(_NUM_READER_THREADS)
        self.health = HealthReports(
            engine,
            self.models.names,
            is_draining=lambda: self.is_draining,
            records=records,
            coalesces=options.coalesces,
        )
        journal = Journal(records) if records is not None else None
        self.response_store = ResponseStore(options.max_stored, options.max_stored_bytes, journal)
        self.answer_reuse = create_answer_reuse(options, self.metrics.registry)
        self._background = BackgroundRuns()
        self.batches = BatchService(
            records, options.limits, max_running=self._num_free_slots, keys=options.api_keys
        )
        usage = UsageBook(self.names[0])
        self.key_refresher = KeyRefresher(records, options.api_keys, usage)
        self.observers += [usage] if records is not None else []
        self._removed_lines = RemovedLines(self.metrics.registry)
        self._ignored = IgnoredFields(
            self.metrics.registry,
            is_strict=options.is_strict,
            effective_names=CACHE_CONTROL_FIELDS if engine.facts.keeps_pages else (),
        )

    def _create_observers(self) -> list[Observer]:
        """Return the observers of finished requests that the options turn on."""
        options = self.options
        observers: list[Observer] = []
        if options.otlp_endpoint is not None:
            observers.append(Traces(exporter(options.otlp_endpoint)))
        if options.record_trace is not None:
            observers.append(TraceRecorder(options.record_trace, self._settings))
        if self._prompt_doctor is not None:
            observers.append(self._prompt_doctor)
        if options.access_log:
            observers.append(AccessLog())  # after the traces, since it logs their ids
        return observers

    def _settings(self) -> ServerSettings:
        """Return the engine's current settings, which a recorded trace notes."""
        config = self.engine.facts.config
        return ServerSettings(config.token_budget, config.max_running)

    def routes(self) -> list[Route]:
        """Return the routes of all HTTP endpoints of the server."""
        gets = {
            "/": self.root,
            **self.health.routes(),
            "/metrics": self.scrape,
            "/openapi.json": self.openapi,
            STATE_PATH: self.state,
        }
        posts = {
            **{path: self._generation(protocol) for path, protocol in GENERATION_PROTOCOLS.items()},
            **{path: self._embedding(protocol) for path, protocol in EMBEDDING_PROTOCOLS.items()},
            **{path: self._utility(endpoint) for path, endpoint in UTILITY_ENDPOINTS.items()},
        }
        return [
            *(Route(path, endpoint, name=path) for path, endpoint in gets.items()),
            Route("/page/{name:path}", self.site.file, include_in_schema=False),
            *(Route(path, post, methods=["POST"], name=path) for path, post in posts.items()),
            *StoredResponses(self._tenant, self._background, self.options).routes(),
            *Conversations(
                self._tenant,
                self.options.limits,
                note=self._ignored.note,
                readers=self._readers,
                with_files=self._with_files,
            ).routes(),
            *stored_chat.routes(
                self._tenant,
                self.options.limits,
                note=self._ignored.note,
                readers=self._readers,
            ),
            *info_routes(self.models, self.options),
            *tokenizer_routes(self.models),
            *self.batches.routes(self._ignored.note, self._readers),
            *(
                route
                for extension in self._extensions
                for route in extension.routes(self.options, self._ignored.note)
            ),
            prompt_doctor_route(self._prompt_doctor, self.engine),
            *model_routes(self.models),
            *ollama_routes(self.models),
        ]

    @property
    def num_running(self) -> int:
        """The number of clients' requests that are running; requests of batches do not count."""
        return sum(running.service_tier != BATCH_SERVICE_TIER for running in self._open_requests)

    def drain(self) -> None:
        """Prepare to stop: refuse new requests, and stop batches.

        Running requests continue. Batches continue at the server's next start.
        """
        self.is_draining = True
        self._drained_by_s = time.monotonic() + self.options.drain_s
        self.batches.drain()
        self.engine.flush()  # static batching must not wait for more requests

    def abort(self) -> None:
        """Cancel all running requests; their clients get an error."""
        for running in list(self._open_requests):
            running.cancel()

    def close(self) -> None:
        """Stop the server's threads and trace exporters, after the last request."""
        self._checks.close()
        self._readers.close()
        for extension in self._extensions:
            extension.close()
        for observer in self.observers:
            observer.close()

    async def root(self, request: Request) -> Response:
        """Answer GET /: browsers get the web UI, programs a JSON description of the server."""
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
        about = AboutBody(
            name="twostroke",
            version=VERSION,
            model=self.names[0],
            endpoints=paths,
            description="/openapi.json",
        )
        return to_json(about, headers={"vary": "accept"})

    async def openapi(self, _request: Request) -> Response:
        """Answer GET /openapi.json with the server's OpenAPI document, which is made only once."""
        has_keys = self.options.has_keys
        if has_keys not in self._descriptions:  # at the first request, since this takes a while
            description = await asyncio.to_thread(self.description)
            self._descriptions[has_keys] = encode_json(description)
        return Response(self._descriptions[has_keys], media_type="application/json")

    def description(self) -> dict[str, Any]:
        """Build the OpenAPI document of this server, as a dictionary."""
        protocols: dict[str, Any] = {
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
            | {path: protocol.request for path, protocol in protocols.items()}
        )
        for extension in self._extensions:
            bodies |= extension.bodies
        return document(self.routes(), bodies, self.facts(), self.operations)

    @property
    def operations(self) -> Operations:
        """The OpenAPI descriptions of all routes, by method and path."""
        operations = dict(OPERATIONS)
        for extension in self._extensions:
            operations |= extension.operations
        return operations

    def facts(self) -> ServerFacts:
        """Return the values that the OpenAPI document quotes, such as model names and limits."""
        limits = self.options.limits
        models = [model for _, model in self.models]
        values: dict[str, Any] = {
            Fact.LAST_ID: max(model.card.cost.program.vocab_size for model in models) - 1,
            Fact.MODEL_NAMES: self.names[:1],
            Fact.PROPOSERS: ("auto", "off", *self.engine.facts.methods, None),
            Fact.EMBEDDING_WIDTH: max(model.card.embedding_width for model in models),
            Fact.MAX_CHOICES: self._max_choices,
            Fact.MAX_INPUTS: limits.max_inputs,
        }
        return ServerFacts(
            version=VERSION,
            has_keys=self.options.has_keys,
            is_strict=self.options.is_strict,
            values=values,
        )

    async def scrape(self, request: Request) -> Response:
        """Answer GET /metrics in Prometheus's or OpenMetrics' text format."""
        body, content_type = await self.metrics.expose(request.headers.get("accept", ""))
        return Response(body, headers={"content-type": content_type})

    async def state(self, request: Request) -> Response:
        """Answer GET /api/state with the dashboard's data and, with `?past`, the last two minutes.

        Raises:
            UnknownPathError: the dashboard is off.
        """
        self.options.check_dashboard()
        query = request.query_params
        state = self._states.of(query.get("model"))
        body = await state.body(self.health.status, has_past="past" in query)
        return Response(body, headers={"cache-control": "no-store"}, media_type="application/json")

    @property
    def _max_choices(self) -> int:
        """The maximum number of answers (`n`) that one request may ask for.

        It is the smaller of the server's own limit and the size of the engine's waiting queue.
        """
        max_waiting = self.engine.facts.config.max_waiting_requests
        return min(self.options.limits.max_choices, max_waiting)

    def _generation(self, protocol: ApiProtocol[Any]) -> Callable[[Request], Any]:
        """Return the HTTP handler of an API protocol that generates text."""
        decoder = BodyDecoder(protocol.request, self.options.limits.max_json_depth)
        prepare = partial(self._prepare_job, protocol, decoder)

        async def generate(request: Request) -> Any:
            """Queue a request in the engine, and return its response, complete or streamed."""
            prepared = await self._read(request, prepare, is_long=protocol.recalls)
            context = served_of(request.scope)
            self.models.note(context, is_empty=isinstance(prepared, Response))
            if isinstance(prepared, Response):
                return prepared
            job, encoded, name, model = prepared
            recorder = _recorder(request, job, protocol)
            replay = recorder.replay if recorder is not None else None
            context.reserve(encoded.max_total_tokens(model.card.context_length))
            info = ResponseInfo(
                id=replay.origin.response_id if replay else protocol.prefix + secrets.token_hex(16),
                created_s=replay.origin.created_s if replay else int(time.time()),
                model=name,
                job=job,
                prompts=encoded.prompts,
                tokenizer=model.card.tokenizer,
                reading=encoded.reading,
                as_llama_server=not context.client_path.startswith("/v1/"),
            )
            encoder = protocol.encoder(info)
            context.model = name
            context.response_id = info.id
            start = partial(self._start, request, info, encoded, model=model, recorder=recorder)
            if job.in_background:
                assert isinstance(encoder, ResponsesEncoder)
                return BackgroundResponse(
                    start,
                    encoder,
                    options=self.options,
                    runs=self._background,
                    is_streamed=job.stream,
                )
            if job.stream:
                return EventStream(start, encoder, self.options, protocol.framing, recorder)
            return await respond_whole(request, await start(), encoder, self._readers)

        return generate

    def _prepare_job(
        self,
        protocol: ApiProtocol[Any],
        decoder: BodyDecoder[Any],
        body: bytes,
        request: Request,
    ) -> tuple[Job, EncodedJob, str, ServedModel] | Response:
        """Decode a request's body, choose its model, and tokenize its prompts.

        Returns the request as a protocol-independent job, the tokenized job, the model's name as
        the client spells it, and the model. Returns a response instead if the request needs no
        generated answer, such as an Ollama request that only loads a model.

        Raises:
            RequestError: a field is wrong, or the model is unknown.
            ContextLengthError: a prompt has more tokens than the context.
        """
        context = served_of(request.scope)
        context.resume_header = self._resume_header(request)
        body, context.stream_records = split_body(body, context.resume_header)
        fields, ignored = decoder.decode(body)
        context.field_names = protocol.field_names(fields)
        self._ignored.note(ignored, context)
        name, model = self.models.choose(fields.model, context, protocol.keep_s(fields))
        if (empty := protocol.empty_response(fields, name)) is not None:
            return to_json(empty)
        try:
            job = protocol.reader_of(context.client_path)(fields, self._tenant(request))
        except errors.MissingFieldError as error:
            raise misspelt_field_error(error, ignored) from None
        self._ignored.note(job.ignored, context)
        check_choices(job, self._max_choices)
        check_background(job, context)
        cuts_limit = not self.options.strict_limits
        job = replace(job, caller=replace(job.caller, cuts_limit=cuts_limit))
        job = _routed(job, context.resume_header)
        job = with_sender(job, context, self.metrics.goodput)
        job = replace(job, params=model.card.sampling.fill(job.params, job.default_params))
        encoded = job.encode(
            model.card,
            splits_reasoning=self.options.splits_reasoning,
            reasoning_budget=self.options.reasoning_budget,
        )
        self._ignored.note(encoded.ignored, context)
        self._removed_lines.note(encoded.removed_lines, context)
        return job, encoded, name, model

    async def _start(
        self,
        request: Request,
        info: ResponseInfo,
        encoded: EncodedJob,
        model: ServedModel,
        recorder: StreamRecorder | None,
    ) -> Started:
        """Compile the grammar of a request's answer format, and queue the request in the engine.

        The `recorder` records the stream for a router, if there is one. Returns the running
        answers, with their event reader and the guard that checks them against schemas.

        Raises:
            RequestError: the format cannot be compiled, or a prompt can never fit.
            OverloadedError: the queue is full.
            EngineStoppedError: the engine has stopped.
        """
        job = info.job
        context = served_of(request.scope)
        with Submission(job.caller.service_tier, self._open_requests, self._retry_after):
            if encoded.params.constraint is not None:
                work = _compile_constraint(model.compiler, encoded, job.caller.tenant)
                async with within_timeout(context):
                    if job.stream or job.in_background:  # a stream notices a disconnect by itself
                        await work
                    else:
                        await while_connected(request.receive, work)
            guard = None
            progress: tuple[AnswerProgress, ...] = ()
            if recorder is not None:
                recorder.begin(info, encoded, numerics_of(model.engine))
                progress = recorder.progress(job.num_choices)
            if encoded.unenforced_keywords:
                encoded.fix_seed()
                guard = AnswerGuard(self._checks, info, encoded, context)
            job = with_spent_time(job, context)
            submit = partial(
                self.answer_reuse.generate,
                model.engine,
                job,
                encoded,
                rule=reuse_rule(request.scope["headers"]),
                progress=progress,
            )
            answers = await RunningAnswers.start(
                model.engine,
                job,
                encoded=encoded,
                metrics=self.metrics,
                running=self._open_requests,
                submit=submit,
                recorder=recorder,
            )
            context.running = answers
            context.answer_source = lambda: answers.source.value
        return answers, info.reader(), guard

    def _embedding(self, protocol: EmbeddingProtocol[Any]) -> Callable[[Request], Any]:
        """Return the HTTP handler of an API protocol that computes embeddings."""
        limits = self.options.limits
        decoder = BodyDecoder(protocol.request, limits.max_json_depth)

        def prepare(
            body: bytes, request: Request
        ) -> tuple[EmbeddingJob, list[list[int]], str, ServedModel] | Response:
            """Decode and tokenize an embedding request; return a response if it has no text."""
            context = served_of(request.scope)
            fields, ignored = decoder.decode(body)
            self._ignored.note(ignored, context)
            name, model = self.models.choose(fields.model, context, protocol.keep_s(fields))
            if (empty := protocol.empty_response(fields, name)) is not None:
                return to_json(empty)
            job = protocol.read(fields, self._tenant(request))
            job = _routed(job, self._resume_header(request))
            job = with_sender(job, context, self.metrics.goodput)
            check_texts(job, limits.max_inputs)
            texts = job.encode(model.card)
            check_vectors(job, texts, model.card, limits.max_vector_values)
            return job, texts, name, model

        async def embed(request: Request) -> Response:
            """Compute the embeddings of a request's texts, and return the response."""
            prepared = await self._read(request, prepare)
            self.models.note(served_of(request.scope), is_empty=isinstance(prepared, Response))
            if isinstance(prepared, Response):
                return prepared
            job, texts, name, model = prepared
            context = served_of(request.scope)
            job = with_spent_time(job, context)
            context.reserve(sum(map(len, texts)))
            with Submission(job.caller.service_tier, self._open_requests, self._retry_after):
                vectors = await RunningEmbeddings.start(
                    model.engine,
                    job,
                    texts=texts,
                    metrics=self.metrics,
                    running=self._open_requests,
                )
            context.running = vectors
            context.model = name
            try:
                is_last = context.service_tier == BATCH_SERVICE_TIER
                work = vectors.encoded_vectors(
                    partial(self._readers.run, context.tenant, is_last=is_last)
                )
                parts = await while_connected(request.receive, work)
            finally:
                vectors.cancel()
            elapsed_s = time.monotonic() - context.began_s

            def body(parts: list[msgspec.Raw]) -> object:
                return protocol.whole_response(name, parts, vectors.num_tokens, elapsed_s)

            if sum(memoryview(part).nbytes for part in parts) <= _LARGE_RESPONSE_BYTES:
                return to_json(body(parts))
            return JsonInChunks(body, parts)

        return embed

    def _utility(self, endpoint: UtilityEndpoint[Any]) -> Callable[[Request], Any]:
        """Return the HTTP handler of an endpoint that the tokenizer answers without the engine."""
        decoder = BodyDecoder(endpoint.request, self.options.limits.max_json_depth)

        def answer(body: bytes, request: Request) -> Response:
            fields, ignored = decoder.decode(body)
            served_of(request.scope).field_names = endpoint.field_names(fields)
            self._ignored.note(ignored, served_of(request.scope))
            _, model = self.models.find(fields.model)
            if endpoint.recalls:
                return to_json(endpoint.answer(fields, model.card, self._tenant(request)))
            return to_json(endpoint.answer(fields, model.card))

        async def respond(request: Request) -> Response:
            return await self._read(request, answer, is_long=endpoint.recalls)

        return respond

    async def _read(
        self, request: Request, work: Callable[[bytes, Request], T], *, is_long: bool = False
    ) -> T:
        """Receive a request's body, and return the result of `work` on it.

        `work` runs in a thread if the body is large or has attached files, or if `is_long` says
        that the work takes long.

        Raises:
            ServerStoppingError: the server is stopping.
            RequestError: the timeout header of the request is not valid.
            DeadlineError: the request's timeout is over.
        """
        if self.is_draining:
            reason = "The server is stopping and takes no new requests."
            raise errors.ServerStoppingError(reason, room_s=self._drained_by_s - time.monotonic())
        context = served_of(request.scope)
        context.timeout_s = timeout_of(request.scope)
        async with within_timeout(context), body_of(request, self.options.limits) as body:
            if has_files(body):
                return await self._readers.run_for(request, self._read_files, work, body, request)
            if not is_long and len(body) <= LARGE_BODY_BYTES:
                return work(body, request)
            return await self._readers.run_for(request, work, body, request)

    def _read_files(self, work: Callable[[bytes, Request], T], body: bytes, request: Request) -> T:
        """Replace attached files in a body by their text, and return the result of `work` on it."""
        return work(self._with_files(body, request), request)

    def _with_files(self, body: bytes, request: Request) -> bytes:
        """Return a request's body with the text of each attached file in place of the file."""
        read_file = self.batches.file_reader(served_of(request.scope).tenant)
        return with_file_texts(body, read_file) if has_files(body) else body

    def _num_free_slots(self) -> int:
        """Return how many batch requests may run in the engine beside the clients' requests.

        A few more than the engine runs at once are allowed, so that its queue never runs empty.
        """
        return self.engine.facts.config.max_running + _NUM_QUEUED_BATCH_REQUESTS - self.num_running

    def _resume_header(self, request: Request) -> str:
        """Return the header by which a router asks for stream records; empty if it is not trusted.

        A server with keys trusts only senders that have a router's key. Records say how much of an
        answer already exists, so a client that may send records could skip the queue.
        """
        is_trusted = served_of(request.scope).is_from_router or not self.options.has_keys
        return request.headers.get(RESUME_HEADER.decode(), "") if is_trusted else ""

    def _tenant(self, request: Request) -> Tenant:
        """Return the tenant that sent a request, according to the request's API key."""
        return Tenant(served_of(request.scope).tenant, self.response_store)


def _routed(job: AnyJob, resume_header: str) -> AnyJob:
    """If a router can send the job to another server, make it fail at once if the engine dies.

    The `resume_header` of a request from a trusted router is not empty. Other jobs, which wait for
    the engine's restart, are returned unchanged.
    """
    if not resume_header:
        return job
    return replace(job, caller=replace(job.caller, continues_elsewhere=True))


def _recorder(request: Request, job: Job, protocol: ApiProtocol[Any]) -> StreamRecorder | None:
    """Return a recorder for a stream if a router asks for records; None otherwise.

    Raises:
        RequestError: the records of the stream's earlier part, in the request, are damaged.
    """
    header = served_of(request.scope).resume_header
    if header in {"", NO_RECORDS.decode()} or not job.stream or job.in_background:
        return None
    replay = StreamReplay.of(served_of(request.scope).stream_records)
    return StreamRecorder(b"\n\n" if protocol.framing is SSE else b"\n", replay)


async def _compile_constraint(compiler: GrammarCompiler, encoded: EncodedJob, tenant: str) -> None:
    """Compile the grammar that constrains a request's answers, if the request has one.

    `encoded.unenforced_keywords` gets the rules of the JSON schema that the grammar cannot enforce.
    """
    if (constraint := encoded.params.constraint) is not None:
        compiled, encoded.unenforced_keywords = await compiler.compile(
            encoded.calls or constraint, tenant
        )
        encoded.params = replace(encoded.params, constraint=compiled)


class Extension(Protocol):
    """Further HTTP endpoints that a package above `server` adds, with OpenAPI descriptions."""

    @property
    def bodies(self) -> Mapping[str, type[msgspec.Struct]]:
        """The struct of the request body of each endpoint that has one, by path."""

    @property
    def operations(self) -> Mapping[tuple[str, str], RouteDescription]:
        """The OpenAPI description of each endpoint of this extension, by method and path."""

    def routes(self, options: ServeOptions, note_ignored: NoteIgnored) -> Sequence[Route]:
        """Return the routes of this extension's endpoints.

        The endpoints call `note_ignored` with the fields of a request that have no effect.
        """

    def close(self) -> None:
        """Stop the extension's threads. The server calls this after the last request."""


# Makes an extension for an engine, its model's name and the machine's limits.
ExtensionFactory: TypeAlias = "Callable[[ServedEngine, str, MachineLimits | None], Extension]"
