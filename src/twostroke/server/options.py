"""The options of a server: model names, request handling, metrics and traces."""

from __future__ import annotations

from typing import Annotated, Final

from twostroke.core.errors import UsageError
from twostroke.core.frozen import Frozen
from twostroke.core.option_schema import Option
from twostroke.core.sampling import MAX_TOKENS
from twostroke.engine.resumption import DEFAULT_ATTEMPTS, DEFAULT_WAIT_S
from twostroke.server.http_options import HttpOptions

MAX_STORED_RESPONSES: Final = 1_000_000
MAX_RESUME_ATTEMPTS: Final = 100
MAX_RESUME_WAIT_S: Final = 86_400.0
MAX_TTL_S: Final = 30 * 86_400.0


class Objective(Frozen):
    """A latency goal: a limit in seconds, for one service tier or for all requests.

    Attributes:
        measure: the latency that is limited, from `observability.objectives.MEASURES`.
        limit_s: the limit in seconds.
        service_tier: the service tier; None for all tiers.
    """

    measure: str
    limit_s: float
    service_tier: str | None = None


class ServeOptions(HttpOptions):
    """The options of `twostroke serve`: which models a server offers, and how.

    Attributes:
        model_names: the names by which clients may request the model, the default first; empty
            for the model's own name.
        keep_alive_s: the interval in seconds at which an idle stream sends a comment, so that
            proxies keep the connection open.
        resume_attempts: how often a request continues after deaths of the engine process.
        resume_wait_s: how many seconds such a request waits for the next engine process.
        splits_reasoning: whether reasoning is separated from the text of answers.
        reasoning_budget: the most tokens of reasoning, for chat requests that set no budget.
        parses_special: whether texts such as `<s>` in raw prompts become special tokens, unless
            a request sets `parse_special`.
        max_stored: how many responses of /v1/responses are stored; 0 stores none.
        max_stored_bytes: the maximum total size of the stored responses.
        coalesces: whether equal requests in flight are computed once.
        answer_cache_bytes: the memory for answers that equal requests get; 0 keeps none.
        answer_cache_ttl_s: seconds for which such answers are kept.
        objectives: latency goals, shown in metrics and on the dashboard.
        otlp_endpoint: the URL to which traces are sent, by OTLP over HTTP; None sends none.
    """

    model_names: Annotated[
        tuple[str, ...],
        Option(
            "--name",
            default="the model's own name",
            help="Name of the model for clients; repeatable.",
        ),
    ] = ()
    drain_notice: Annotated[
        str | None,
        Option(
            "--drain-notice",
            metavar="SOURCE",
            default="none",
            help="Stop as after SIGTERM when this spot machine gets notice of its end: aws, gcp, "
            "azure, a URL, or a FILE that appears then.",
        ),
    ] = None
    keep_alive_s: float = 15.0
    resume_attempts: Annotated[
        int,
        Option(
            "--resume-attempts",
            low=0,
            high=MAX_RESUME_ATTEMPTS,
            help="How often a request continues after the engine that computed it has died; 0: it "
            "fails at once.",
        ),
    ] = DEFAULT_ATTEMPTS
    resume_wait_s: Annotated[
        float,
        Option(
            "--resume-wait",
            low=0,
            high=MAX_RESUME_WAIT_S,
            help="Seconds, at most a day, that such a request waits until an engine runs again.",
        ),
    ] = DEFAULT_WAIT_S
    any_model: Annotated[
        bool,
        Option(
            "--any-model",
            help="Answer requests for every model name with MODEL.",
        ),
    ] = False
    is_strict: Annotated[
        bool,
        Option(
            "--strict",
            help="Refuse request fields that are unknown or have no effect, instead of ignoring "
            "them.",
        ),
    ] = False
    strict_limits: Annotated[
        bool,
        Option(
            "--strict-limits",
            help="Refuse a token limit above what the context holds, instead of lowering it.",
        ),
    ] = False
    llama_metrics: Annotated[
        bool,
        Option(
            "--llama-metrics",
            help="Add llama-server's metrics (llamacpp:...) to /metrics, for its dashboards.",
        ),
    ] = False
    splits_reasoning: Annotated[
        bool,
        Option(
            "--reasoning",
            named_values=(("apart", True), ("inline", False)),
            help="Send a model's reasoning in a field of its own (apart), or leave it in the "
            "answer's text (inline).",
        ),
    ] = True
    reasoning_budget: Annotated[
        int | None,
        Option(
            "--reasoning-budget",
            low=-1,
            high=MAX_TOKENS,
            default="no limit",
            help="The most tokens that a model reasons before an answer, for requests that do not "
            "say; 0: answer at once, -1: no limit.",
        ),
    ] = None
    parses_special: Annotated[
        bool,
        Option(
            "--parse-special/--no-parse-special",
            help="Turn the texts of special tokens, such as <|im_start|>, into these tokens in "
            "prompts without a chat template. Chat messages are never parsed so.",
        ),
    ] = True
    max_stored: Annotated[
        int,
        Option(
            "--keep-responses",
            low=0,
            high=MAX_STORED_RESPONSES,
            help="How many answers of /v1/responses to keep for later requests.",
        ),
    ] = 10_000
    max_stored_bytes: int = 64 * 1024 * 1024
    coalesces: Annotated[
        bool,
        Option(
            "--coalesce/--no-coalesce",
            help="Compute equal requests that are in flight at the same time once, if they have "
            "temperature 0 or a seed.",
        ),
    ] = True
    answer_cache_bytes: Annotated[
        int,
        Option(
            "--answer-cache",
            form="size",
            low=0,
            default="none are kept",
            help="Memory for finished answers, such as 64MB, which equal requests get without "
            "computing if they have temperature 0 or a seed. Tenants do not share answers.",
        ),
    ] = 0
    answer_cache_ttl_s: Annotated[
        float,
        Option(
            "--answer-cache-ttl",
            low=1,
            high=MAX_TTL_S,
            metavar="S",
            help="Seconds for which finished answers are kept.",
        ),
    ] = 3600.0
    objectives: Annotated[
        tuple[Objective, ...],
        Option(
            "--objective",
            section="Observing",
            metavar="[CLASS:]NAME=S",
            help="Latency objective: queue, ttft, tpot or e2e in seconds, for one class of service "
            "or for all; repeatable.",
        ),
    ] = ()
    prompt_doctor: Annotated[
        bool,
        Option(
            "--prompt-doctor",
            section="Observing",
            help="Compare each prompt with earlier prompts of its tenant; /api/prompts and "
            "`doctor prompts URL` show where they part.",
        ),
    ] = False
    otlp_endpoint: Annotated[
        str | None,
        Option(
            "--otlp-endpoint",
            section="Observing",
            metavar="URL",
            default="no traces are sent",
            help="Send traces to this OpenTelemetry collector (OTLP over HTTP); needs the extra "
            "[traces].",
        ),
    ] = None

    def __post_init__(self) -> None:
        """Check that each option is valid, and that model names can be printed.

        Raises:
            UsageError: a value is out of range, an origin or a host name is malformed, all
                origins are allowed without keys, or a model name is empty or not printable.
        """
        for name in self.model_names:
            if not name.strip() or not name.isprintable():
                reason = "must have printable characters, got {value!r}."
                raise UsageError(reason, field="model_names", value=name)
        super().__post_init__()

    def check_dashboard(self) -> None:
        """Check that the server's dashboard is on.

        Raises:
            UnknownPathError: it is off; the response has the status 404.
        """
        from twostroke.server.http.errors import UnknownPathError

        if not self.shows_dashboard:
            raise UnknownPathError(
                "The dashboard is off: start `twostroke serve` with --dashboard."
            )
