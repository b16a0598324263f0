"""From prompts to the engine's requests."""

from __future__ import annotations

import uuid
from collections.abc import Sequence
from dataclasses import replace

from starlette.requests import Request as HttpRequest

from afterglow.request import Breakpoint, Request, SamplingParams
from afterglow.server.access.request_record import RequestRecord
from afterglow.server.bodies.json_body import check_session
from afterglow.server.bodies.reply_bodies import Body


def make_requests(
    http: HttpRequest,
    body: Body,
    prompts: Sequence[tuple[Sequence[int], SamplingParams]],
    salt: str,
    *,
    cut: bool = False,
    turns: tuple[int, ...] = (),
    breakpoints: tuple[Breakpoint, ...] = (),
) -> list[Request]:
    """Make a request for each reply, prompt by prompt. `cut`: prompts may be truncated, at `turns`.

    Raises: RequestError, for a priority that the caller may not have, and for a session's name that is none.
    """
    record: RequestRecord = http.scope["afterglow.record"]
    record.caller.check_priority(body.priority or 0)
    session = body.session_id or _header(http, "x-session-id")
    check_session(session)
    cache_key = body.prompt_cache_key
    if cache_key is not None and salt:
        cache_key = f"{salt}/{cache_key}"  # one tenant's requests must not wait for, or go before, another's
    made: list[Request] = []
    for ids, sampling in prompts:
        prompt = list(ids)
        for number in range(body.replies_per_prompt):
            if sampling.seed is not None and number:
                sampling = replace(sampling, seed=(sampling.seed + 1) % 2**63)
            made.append(
                Request(
                    id=uuid.uuid4().hex,
                    prompt=prompt,
                    sampling=sampling,
                    salt=salt,
                    # A conversation has one turn at a time: of several replies, the first is taken for the next one.
                    session_id=None if made else session,
                    priority=body.priority or 0,
                    cache_key=cache_key,
                    ttl_s=body.ttl_s,
                    volatile=body.volatile,
                    truncation=cut,
                    turns=turns,
                    kv_retention=body.kv_retention,
                    breakpoints=breakpoints,
                )
            )
    return made


def _header(http: HttpRequest, name: str) -> str | None:
    """Read a header that clients write in UTF-8, although HTTP says Latin-1."""
    value = http.headers.get(name)
    try:
        return value.encode("latin-1").decode() if value else None
    except UnicodeError:
        return value
