"""The options of a server: model names, request handling, metrics and traces."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Final

from twostroke.core.errors import UsageError
from twostroke.core.frozen import Frozen
from twostroke.core.option_schema import Option
from twostroke.core.sampling import MAX_TOKENS
from twostroke.server.http_options import HttpOptions

MAX_STORED_RESPONSES: Final = 1_000_000


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
        splits_reasoning: whether reasoning is separated from the text of answers.
        reasoning_budget: the most tokens of reasoning, for chat requests that set no budget.
        parses_special: whether texts such as `<s>` in raw prompts become special tokens, unless
            a request sets `parse_special`.
        max_stored: how many responses of /v1/responses are stored; 0 stores none.
        max_stored_bytes: the maximum total size of the stored responses.
        objectives: latency goals, shown in metrics and on the dashboard.
        record_trace: the file to which a trace of the requests is recorded; None records none.
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
    keep_alive_s: float = 15.0
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
    record_trace: Annotated[
        Path | None,
        Option(
            "--record-trace",
            section="Observing",
            form="path",
            metavar="FILE",
            default="none is recorded",
            help="Append times, token counts and shared beginnings of requests to FILE, without "
            "any text; `simulate --trace FILE` replays them.",
        ),
    ] = None
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
