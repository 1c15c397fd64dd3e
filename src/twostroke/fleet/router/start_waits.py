"""Makes a request wait for the first replica of its model, if the model may have no replica."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Final

from twostroke.fleet.router.model_starts import WaitingRequest, starting_error
from twostroke.server.http.errors import ClientGoneError, ServerStoppingError

if TYPE_CHECKING:
    from collections.abc import Callable

    from twostroke.fleet.router.model_starts import StartableModel
    from twostroke.fleet.router.proxied_request import ProxiedRequest
    from twostroke.fleet.router.replica_registry import ReplicaRegistry

_POLL_S: Final = 0.5  # after which a waiting request looks whether it may still wait


async def wait_for_start(
    fleet: ReplicaRegistry,
    request: ProxiedRequest,
    model: StartableModel,
    is_up: Callable[[], bool],
) -> bool:
    """Wait until a replica of the model may answer a request.

    If a replica is ready, but has refused the request, the request waits at most for the option
    `wait_s`, as for any model. If the replica refused it because it drains, a health check finds
    this within that time, and the request then waits for a new replica.

    Args:
        fleet: the replicas.
        request: the request.
        model: its model.
        is_up: returns whether a replica of the model is ready.

    Returns:
        True if the caller should choose a replica again; False if the request has waited long
        enough for a replica that refuses it.

    Raises:
        ModelNotFoundError: the model was removed from the models that may have no replica.
        ModelStartingError: the request may not wait, or not any longer.
        ModelNotStartedError: the model's replicas fail again and again.
        ClientGoneError: the client has disconnected.
        ServerStoppingError: the router stops.
    """
    options, clock = fleet.options, asyncio.get_running_loop().time
    if not request.give_up_s:
        wait_s = options.resume_wait_s if request.has_begun else options.wait_s
        request.give_up_s = clock() + wait_s
    while is_up():
        if clock() >= request.give_up_s:
            return False
        _check_may_wait(fleet, request)
        if await fleet.wait_for_ready(min(request.give_up_s, clock() + _POLL_S)):
            return True
    request.give_up_s = 0.0
    if not request.start_give_up_s:
        request.start_give_up_s = clock() + options.start_wait_s
    model.begin_start()
    fleet.starts.check_start(model, request.start_give_up_s - clock())
    waiting = WaitingRequest(request.context.tenant, request.key.num_units)
    with fleet.starts.hold_place(waiting, model):
        while not is_up():
            _check_may_wait(fleet, request)
            if model.is_removed:
                if request.model:
                    fleet.check_is_known(request.model)
                return True
            if waiting.is_displaced:
                raise fleet.starts.full_error(model)
            if clock() >= request.start_give_up_s:
                raise starting_error(model, "has not started in time")
            fleet.starts.check_start(model)
            await fleet.wait_for_ready(min(request.start_give_up_s, clock() + _POLL_S))
    return True


def _check_may_wait(fleet: ReplicaRegistry, request: ProxiedRequest) -> None:
    if request.has_left:
        raise ClientGoneError("The client left before its request was sent.")
    if fleet.is_stopping:
        raise ServerStoppingError("The router is stopping.")
