"""/v1/responses/{id}: reads, streams, cancels and deletes stored responses."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Annotated, Any, Final, Literal

import msgspec
from starlette.responses import Response
from starlette.routing import Route

from twostroke.core.errors import RequestError, TwostrokeError
from twostroke.server.body.explain import MAX_NAME_LENGTH
from twostroke.server.http.responses import to_json
from twostroke.server.protocols.common.listing import ItemList, list_page, read_query
from twostroke.server.protocols.responses.background import FollowingStream, replay_stored
from twostroke.server.protocols.responses.recall import items_of

if TYPE_CHECKING:
    from collections.abc import Callable

    from starlette.requests import Request

    from twostroke.server.generation.response_store import StoredResponse, Tenant
    from twostroke.server.options import ServeOptions
    from twostroke.server.protocols.responses.background import BackgroundRuns

PATH: Final = "/v1/responses/{response_id}"
MAX_NUMBER_LENGTH: Final = 9  # digits


class ResponseNotFoundError(TwostrokeError):
    """The tenant has no stored response with this id."""

    http_status = 404
    code = "response_not_found"


class Deleted(msgspec.Struct, kw_only=True, frozen=True):
    """The response to the deletion of a stored response."""

    id: str
    object: Literal["response"] = "response"
    deleted: Annotated[bool, msgspec.Meta(extra_json_schema={"const": True})] = True


class StoredResponses:
    """The HTTP handlers of `/v1/responses/{id}` and the paths below it."""

    def __init__(
        self,
        tenant_of: Callable[[Request], Tenant],
        runs: BackgroundRuns,
        options: ServeOptions,
    ) -> None:
        """Create the handlers, which serve all tenants.

        Args:
            tenant_of: returns the tenant that sent a request, with its stored responses.
            runs: the responses that are computed in the background.
            options: the options of the server, for streams.
        """
        self._tenant_of = tenant_of
        self._runs = runs
        self._options = options

    def routes(self) -> list[Route]:
        """Return the routes of `/v1/responses/{id}` and the paths below it."""
        items_path = f"{PATH}/input_items"
        cancel_path = f"{PATH}/cancel"
        return [
            Route(PATH, self.response, methods=["GET", "DELETE"], name=PATH),
            Route(items_path, self.input_items, methods=["GET"], name=items_path),
            Route(cancel_path, self.cancel, methods=["POST"], name=cancel_path),
        ]

    async def response(self, request: Request) -> Any:
        """Answer GET or DELETE of a stored response.

        GET returns the response in its present state, or streams its events. DELETE cancels it if
        it still runs, and deletes it.
        """
        stored = self._find(request)
        run = self._runs.find(stored.id)
        if request.method == "DELETE":
            read_query(request, ())
            if run is not None:
                await run.cancel()
                self._runs.forget(stored.id)
            await self._tenant_of(request).forget(stored.id)
            return to_json(Deleted(id=stored.id))
        query = read_query(request, ("include_obfuscation", "starting_after", "stream"))
        after = _starting_after(query)
        if query.get("stream", "false") != "false":
            if run is not None:
                return FollowingStream(run, -1 if after is None else after, self._options)
            return Response(
                replay_stored(stored, after), media_type="text/event-stream; charset=utf-8"
            )
        if stored.is_open and run is not None and run.encoder is not None:
            return to_json(run.encoder.body)
        return Response(stored.answer, media_type="application/json")

    async def input_items(self, request: Request) -> Response:
        """Answer GET of `/v1/responses/{id}/input_items`: return one part of the list."""
        stored = self._find(request)
        query = read_query(request, ("after", "limit", "order"))
        # In a thread, since decoding a long conversation would delay streams.
        return to_json(await asyncio.to_thread(_list_input_items, stored, query))

    async def cancel(self, request: Request) -> Response:
        """Answer POST of `/cancel`: stop a background response if it still runs, and return it."""
        stored = self._find(request)
        if (run := self._runs.find(stored.id)) is not None:
            await run.cancel()
            stored = self._find(request)
        elif b'"background":true' not in stored.answer:
            reason = (
                "is not in the background: only responses that were created with background: true "
                "can be cancelled by their id. To stop another response, close its connection."
            )
            raise RequestError(reason, field="response_id")
        return Response(stored.answer, media_type="application/json")

    def _find(self, request: Request) -> StoredResponse:
        id_ = request.path_params["response_id"]
        response = self._tenant_of(request).find(id_)
        if response is None:
            raise ResponseNotFoundError(f"Response with id '{id_[:MAX_NAME_LENGTH]}' not found.")
        return response


def _starting_after(query: dict[str, str]) -> int | None:
    """Return the query parameter `starting_after`: the number of the last event that a client has.

    Returns None if the client has no event.

    Raises:
        RequestError: the parameter is not the number of an event.
    """
    text = query.get("starting_after")
    if text is None:
        return None
    if not (text.isdecimal() and len(text) <= MAX_NUMBER_LENGTH):
        raise RequestError("must be the number of an event.", field="starting_after")
    return int(text)


def _list_input_items(stored: StoredResponse, query: dict[str, str]) -> ItemList:
    """Return the part of a stored response's input items that a query asks for.

    These are the items of the earlier turns of its conversation, and of its request.
    """
    *earlier_turns, last = stored.conversation()
    items = [item for turn in earlier_turns for item in items_of(turn)]
    items += msgspec.json.decode(last.request_items, type=list[dict[str, Any]])
    return list_page(items, query)
