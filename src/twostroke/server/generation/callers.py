"""What a request's sender decides about its job: weight, class, and deadlines."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, TypeVar

from msgspec.structs import replace

from twostroke.core.request import BATCH_SERVICE, SERVICES

if TYPE_CHECKING:
    from twostroke.server.generation.job import EmbeddingJob, Job
    from twostroke.server.http.request_context import ServedRequest
    from twostroke.server.observability.objectives import Goodput

J = TypeVar("J", "Job", "EmbeddingJob")


def sent_by(served: ServedRequest, job: J, goodput: Goodput) -> J:
    """Return a job with the facts of its request.

    Its class's objective for the first token says when it must start. Batches have time.

    Raises:
        ClassError: the key may not have its class.
    """
    caller = replace(job.caller, weight=served.weight, timeout_s=served.timeout_s)
    service, priority = caller.service, caller.priority
    if served.service is not None:
        service, priority = served.service, SERVICES[served.service]
    elif served.key is not None:
        is_named = caller.names_class
        service, priority = served.key.class_of(service, priority, is_named=is_named)
    caller = replace(caller, service=service, priority=priority)
    ttft_s = goodput.limits[service].get("ttft")
    if ttft_s is not None and service != BATCH_SERVICE:
        caller = replace(caller, start_within_s=ttft_s)
    return replace(job, caller=caller)


def begun(job: J, served: ServedRequest) -> J:
    """Return a job that knows how much of its request's timeout is over."""
    spent_s = time.monotonic() - served.began_s
    return replace(job, caller=replace(job.caller, spent_s=spent_s))
