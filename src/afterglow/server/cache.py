"""`/v1/cache`: the caller's own conversations and system prompts in the cache, and clearing it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from starlette.requests import Request as HttpRequest
from starlette.responses import Response

from afterglow.errors import RequestError
from afterglow.request import PrefixInfo, SessionInfo
from afterglow.server.apart import ENGINE, PROMPTS
from afterglow.server.bodies import read_body
from afterglow.server.errors import engine_dead
from afterglow.server.schema import PromptBody, check_session
from afterglow.server.state import Record, State
from afterglow.server.stored import stored
from afterglow.server.wire import json_response

COUNT_SECONDS = 1.0  # for stored responses to be counted


def _context(http: HttpRequest) -> tuple[State, Record, str]:
    """With the salt that the request is about: the key's, and `?cache_salt=` where the client uses some."""
    state: State = http.app.state.afterglow
    record: Record = http.scope["afterglow.record"]
    return state, record, state.tenants.salt(record.caller, http.query_params.get("cache_salt"))


async def list_sessions(http: HttpRequest) -> Response:
    state, _, salt = _context(http)
    found = await _sessions(state, salt)
    return json_response({"object": "list", "data": [_card(session) for session in found]})


async def delete_session(http: HttpRequest) -> Response:
    state, _, salt = _context(http)
    name = http.path_params["name"]
    _check_alive(state)
    if not await ENGINE(state.engine.forget_session, salt, name):
        for prompt in await ENGINE(state.prompts.listing, salt):
            if prompt.name == name:
                raise _is_prompt(prompt)
        raise _unknown(name)
    await stored(state.engine.conversations.forget_replies, [salt], name)
    return json_response({"object": "cache.session", "name": name, "deleted": True})


async def pin_session(http: HttpRequest) -> Response:
    return await _pin(http, True)


async def unpin_session(http: HttpRequest) -> Response:
    return await _pin(http, False)


async def _pin(http: HttpRequest, pinned: bool) -> Response:
    state, _, salt = _context(http)
    name = http.path_params["name"]
    _check_alive(state)
    if not await ENGINE(state.engine.pin_session, salt, name, pinned):
        raise _unknown(name)
    return json_response({"object": "cache.session", "name": name, "pinned": pinned})


async def list_prompts(http: HttpRequest) -> Response:
    """The system prompts that are registered for the caller's requests."""
    state, _, salt = _context(http)
    _check_alive(state)
    found = await ENGINE(state.prompts.listing, salt)
    return json_response({"object": "list", "data": [_prompt_card(prompt) for prompt in found]})


async def put_prompt(http: HttpRequest) -> Response:
    """Register a system prompt, or another one of its name. Answers when it is computed and kept."""
    state, _, salt = _context(http)
    body = await read_body(http, PromptBody)
    name = http.path_params["name"]
    check_session(name)
    _check_alive(state)
    state.tokenizer.check_length(body.text, state.engine.max_model_len, "text")
    found = await PROMPTS(state.prompts.register, salt, name, body.text)
    return json_response({**_prompt_card(found), "prefilled_tokens": found.tokens - found.cached})


async def delete_prompt(http: HttpRequest) -> Response:
    state, _, salt = _context(http)
    name = http.path_params["name"]
    _check_alive(state)
    if not await PROMPTS(state.prompts.forget, salt, name):
        for prompt in await ENGINE(state.prompts.listing, salt):
            if prompt.name == name:
                raise _is_prompt(prompt)
        raise RequestError(f"there is no system prompt {name[:80]!r}", status=404, code="not_found")
    return json_response({"object": "cache.prompt", "name": name, "deleted": True})


async def cache_stats(http: HttpRequest) -> Response:
    """The caller's own numbers; whoever is in charge of all tenants also gets the engine's."""
    state, record, salt = _context(http)
    found = await _sessions(state, salt)
    usage = state.tenants.usage(record.caller)
    prompts = await ENGINE(state.prompts.listing, salt)
    number, size = await _responses(state, record)
    said: dict[str, Any] = {
        "object": "cache.stats",
        "sessions": {
            "count": len(found),
            "pinned": sum(session.pinned for session in found),
            "tokens": sum(session.tokens for session in found),
            "cached_tokens": _tiers(found),
        },
        "since_start": {
            "requests": usage.requests,
            "prompt_tokens": usage.prompt_tokens,
            "generated_tokens": usage.generated_tokens,
            "cached_tokens": {"device": usage.device, "host": usage.host, "disk": usage.disk},
        },
        "responses": {"count": number, "bytes": size},
        "prompts": {"count": len(prompts), "tokens": sum(prompt.tokens for prompt in prompts)},
    }
    if record.caller.admin:
        said["engine"] = asdict(state.engine.stats())
    return json_response(said)


async def reset_prefix_cache(http: HttpRequest) -> Response:
    """Forget what is cached: everybody's for whoever is in charge of that, for others all that was stored under their key,
    whenever that was. Without keys a salt is a secret of its client's, and only the named one goes. The prompts that tenants
    have registered go too, the operator's stays, and so do responses that were stored to be gone on from."""
    state, record, salt = _context(http)
    tenant, conversations = record.caller.tenant, state.engine.conversations
    if record.caller.admin:
        state.engine.reset_cache()
        state.tokenizer.replies.clear()
        state.prompts.reset()
        await stored(conversations.forget_replies)
        return json_response({"status": "ok", "cleared": "all"})
    if tenant:
        state.engine.reset_cache(tenant=tenant)
        state.tokenizer.replies.clear(lambda salt: salt.startswith(f"{tenant}/"))
        state.prompts.reset(tenant=tenant)
        await stored(conversations.forget_tenants_replies, tenant)
    else:
        state.engine.reset_cache(salt)
        state.tokenizer.replies.clear(lambda other: other == salt)
        state.prompts.reset(salt)
        await stored(conversations.forget_replies, [salt])
    return json_response({"status": "ok", "cleared": "own"})


async def _responses(state: State, record: Record) -> tuple[int | None, int | None]:
    """How many responses of the caller are stored, and their bytes; None where the file system does not say so soon."""
    try:
        number, size = await stored(state.engine.conversations.count, record.caller.tenant, within=COUNT_SECONDS)
    except RequestError:
        return None, None
    return number, size


async def _sessions(state: State, salt: str) -> list[SessionInfo]:
    _check_alive(state)
    return await ENGINE(state.engine.sessions, salt)


def _check_alive(state: State) -> None:
    if not state.engine.healthy:
        raise engine_dead()


def _card(session: SessionInfo) -> dict[str, Any]:
    return {
        "object": "cache.session",
        "name": session.name,
        "tokens": session.tokens,
        "cached_tokens": _tiers([session]),
        "last_used": session.last_used,
        "expires": session.expires,
        "pinned": session.pinned,
    }


def _prompt_card(prompt: PrefixInfo) -> dict[str, Any]:
    return {
        "object": "cache.prompt",
        "name": prompt.name,
        "tokens": prompt.tokens,
        "cached_tokens": _tiers([prompt]),
        "shared": prompt.shared,
        "pinned": True,
    }


def _is_prompt(prompt: PrefixInfo) -> RequestError:
    if prompt.shared:
        message = f"{prompt.name!r} is the system prompt of all tenants; start the server without --system-prompt-file"
    else:
        message = (
            f"{prompt.name!r} is a registered system prompt; afterglow cache unregister, or"
            f" DELETE /v1/cache/prompts/{prompt.name}, lets it go"
        )
    return RequestError(message, status=409, code="registered_prompt")


def _tiers(sessions: Sequence[SessionInfo | PrefixInfo]) -> dict[str, int]:
    return {tier: sum(getattr(session, tier) for session in sessions) for tier in ("device", "host", "disk")}


def _unknown(name: str) -> RequestError:
    return RequestError(f"there is no conversation {name[:80]!r} in the cache", status=404, code="not_found")
