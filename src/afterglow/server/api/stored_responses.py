"""Stored responses: read, list input items, delete. A tenant finds only its own."""

from __future__ import annotations

import logging
from typing import Any

from starlette.requests import Request as HttpRequest
from starlette.responses import Response

from afterglow.errors import RequestError, StoreError
from afterglow.server.access.request_record import RequestRecord
from afterglow.server.blocking import FILES, FILES_SECONDS
from afterglow.server.bodies.response_items import public
from afterglow.server.json import json_response
from afterglow.server.state import State
from afterglow.store.database.conversations import StoredResponse

log = logging.getLogger("afterglow.server")

MAX_PAGE = 100


async def ask_database(work: Any, *args: Any, within: float = FILES_SECONDS) -> Any:
    """Call the database of conversations, outside of the event loop. Raises: RequestError, also after `within`
    seconds."""
    try:
        return await FILES(work, *args, within=within)
    except StoreError as error:
        log.warning("%s", error)
        raise RequestError("stored responses cannot be read just now", status=503, code="unavailable") from None


async def get_response(http: HttpRequest) -> Response:
    """Read a stored response."""
    if http.query_params.get("stream") in ("true", "1"):
        raise RequestError("a stored response cannot be streamed; leave out stream", param="stream")
    found = await _find(http)
    return json_response(found.body)


async def delete_response(http: HttpRequest) -> Response:
    """Delete a stored response."""
    state: State = http.app.state.afterglow
    name = http.path_params["response"]
    if not await ask_database(state.engine.conversations.delete, name, _tenant(http)):
        raise _not_found(name)
    return json_response({"id": name, "object": "response", "deleted": True})


async def input_items(http: HttpRequest) -> Response:
    """List the items that a response answered, earlier turns included; the newest first, as in OpenAI's API."""
    found = await _find(http)
    state: State = http.app.state.afterglow
    before = None
    if found.previous is not None:
        before = await ask_database(state.engine.conversations.chain, found.previous, _tenant(http))
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
    return json_response(
        {
            "object": "list",
            "data": page,
            "first_id": page[0]["id"] if page else None,
            "last_id": page[-1]["id"] if page else None,
            "has_more": len(page) < len(items),
        }
    )


async def _find(http: HttpRequest) -> StoredResponse:
    state: State = http.app.state.afterglow
    name = http.path_params["response"]
    found: StoredResponse | None = await ask_database(state.engine.conversations.get, name, _tenant(http))
    if found is None:
        raise _not_found(name)
    return found


def _tenant(http: HttpRequest) -> str:
    record: RequestRecord = http.scope["afterglow.record"]
    return record.caller.tenant


def _not_found(name: str) -> RequestError:
    return RequestError(f"Response with id {name[:80]!r} not found.", status=404, code="not_found")
