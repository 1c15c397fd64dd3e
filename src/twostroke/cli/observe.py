"""Options that say what operators see of a server: logs, objectives, traces, the dashboard."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from twostroke.cli.help import OneOf
from twostroke.cli.options import add_options

if TYPE_CHECKING:
    from twostroke.cli.options import F

LOG_FORMATS: Final = ("text", "json")
LOG_LEVELS: Final = ("debug", "info", "warning", "error")


def observe_options(function: F) -> F:
    """Add the options that `observing` reads, and those of the log."""
    return add_options(
        function,
        "Observing",
        (
            ("--dashboard/--no-dashboard",),
            {
                "default": None,
                "help": "Show the state of the server at /api/state, and the page drawn from it "
                "[default: only on a loopback host].",
            },
        ),
        (
            ("--objective", "objectives"),
            {
                "multiple": True,
                "metavar": "[CLASS:]NAME=S",
                "help": "What answers are held against: queue, ttft, tpot or e2e in seconds, for "
                "one class of service or all; repeatable.",
            },
        ),
        (
            ("--log-format",),
            {"type": OneOf(LOG_FORMATS), "default": "text", "help": "Lines of the log."},
        ),
        (
            ("--log-level",),
            {"type": OneOf(LOG_LEVELS), "default": "info", "help": "The least that is logged."},
        ),
        (
            ("--access-log/--no-access-log",),
            {"default": True, "help": "Log a line for each request."},
        ),
        (
            ("--otlp-endpoint",),
            {
                "metavar": "URL",
                "help": "Send traces to this OpenTelemetry collector, by OTLP over HTTP; needs "
                "twostroke[traces].",
            },
        ),
    )


def observing(given: dict[str, Any]) -> dict[str, Any]:
    """Take the options out of `given` and return the fields of `ServeOptions` that they are.

    Raises:
        UsageError: an objective is none, or traces cannot be sent.
    """
    from twostroke.serve.observe.objectives import limits_of, parse_objective
    from twostroke.serve.observe.traces import check_endpoint

    objectives = tuple(parse_objective(text) for text in given.pop("objectives"))
    limits_of(objectives)  # known now rather than once the weights are loaded
    endpoint = given.pop("otlp_endpoint")
    if endpoint is not None:
        check_endpoint(endpoint)
    return {
        "dashboard": given.pop("dashboard"),
        "objectives": objectives,
        "access_log": given.pop("access_log"),
        "otlp_endpoint": endpoint,
    }
