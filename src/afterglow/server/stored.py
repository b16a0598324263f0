"""Responses that are kept: reading, listing what they answered, deleting. Only their own tenant finds them."""

from __future__ import annotations

import logging
from typing import Any

from starlette.requests import Request as HttpRequest
from starlette.responses import Response

from afterglow.errors import RequestError, StoreError
from afterglow.server.apart import FILES, FILES_SECONDS
from afterglow.server.items import public
from afterglow.server.state import Record, State
from afterglow.server.wire import to_json
from afterglow.store.conversations import StoredResponse

log = logging.getLogger("afterglow.server")

MAX_PAGE = 100


async def stored(work: Any, *args: Any, within: float = FILES_SECONDS) -> Any:
    """Ask the conversations, outside of the event loop. Errors: RequestError, also after so many seconds."""
    try:
        return await FILES(work, *args, within=within)
    except StoreError as error:
        log.warning("%s", error)
        raise RequestError("stored responses cannot be read just now", status=503, code="unavailable") from None


async def get_response(http: HttpRequest) -> Response:
    if http.query_params.get("stream") in ("true", "1"):
        raise RequestError("a stored response cannot be streamed; leave out stream", param="stream")
    found = await _find(http)
    return Response(to_json(found.body), media_type="application/json")


async def delete_response(http: HttpRequest) -> Response:
    state: State = http.app.state.afterglow
    name = http.path_params["response"]
    if not await stored(state.engine.conversations.delete, name, _tenant(http)):
        raise _not_found(name)
    return Response(
        to_json({"id": name, "object": "response", "deleted": True}),
        media_type="application/json",
    )


async def input_items(http: HttpRequest) -> Response:
    """What a response answered, the turns before it included; the newest first, as in OpenAI's API."""
    found = await _find(http)
    state: State = http.app.state.afterglow
    before = None
    if found.previous is not None:
        before = await stored(state.engine.conversations.chain, found.previous, _tenant(http))
    own = found.items[: len(found.items) - len(found.body["output"])]
    items = [public(item) for item in [*(before or []), *own]]
    query = http.query_params
    order, limit = query.get("order", "desc"), query.get("limit", "20")
    if order not in ("asc", "desc"):
        raise RequestError(f"order must be asc or desc, got {order[:80]!r}", param="order")
    if not limit.isdecimal() or not 1 <= int(limit[:9]) <= MAX_PAGE:
        raise RequestError(f"limit must be between 1 and {MAX_PAGE}, got {limit[:80]!r}", param="limit")
    if order == "desc":
        items.reverse()
    if after := query.get("after"):
        places = [number for number, item in enumerate(items) if item["id"] == after]
        if not places:
            raise RequestError(f"there is no item {after[:80]!r} in this response", param="after")
        items = items[places[0] + 1 :]
    page = items[: int(limit)]
    return Response(
        to_json(
            {
                "object": "list",
                "data": page,
                "first_id": page[0]["id"] if page else None,
                "last_id": page[-1]["id"] if page else None,
                "has_more": len(page) < len(items),
            }
        ),
        media_type="application/json",
    )


async def _find(http: HttpRequest) -> StoredResponse:
    state: State = http.app.state.afterglow
    name = http.path_params["response"]
    found: StoredResponse | None = await stored(state.engine.conversations.get, name, _tenant(http))
    if found is None:
        raise _not_found(name)
    return found


def _tenant(http: HttpRequest) -> str:
    record: Record = http.scope["afterglow.record"]
    return record.caller.tenant


def _not_found(name: str) -> RequestError:
    return RequestError(f"Response with id {name[:80]!r} not found.", status=404, code="not_found")
