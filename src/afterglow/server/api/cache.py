"""`/v1/cache`: list, pin and delete the caller's conversations and system prompts; clear the cache."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

from starlette.requests import Request as HttpRequest
from starlette.responses import Response

from afterglow.errors import RequestError, engine_dead
from afterglow.listings import PrefixInfo, SessionInfo
from afterglow.server.api.responses import ask_database
from afterglow.server.blocking import ENGINE, FILES, PROMPTS
from afterglow.server.bodies.json_body import check_session
from afterglow.server.bodies.reader import read_body
from afterglow.server.bodies.text_bodies import PromptBody
from afterglow.server.json_responses import json_response
from afterglow.server.state import State, state_and_record
from afterglow.server.tenants import RequestRecord

if TYPE_CHECKING:
    from afterglow.server.shared_names import SharedNames

T = TypeVar("T")
COUNT_SECONDS = 1.0  # for stored responses to be counted


def _context(http: HttpRequest) -> tuple[State, RequestRecord, str]:
    """Return state, record and salt of a request: the key's salt, with `?cache_salt=` if the client gives one."""
    state, record = state_and_record(http)
    return state, record, state.tenants.salt(record.caller, http.query_params.get("cache_salt"))


async def list_sessions(http: HttpRequest) -> Response:
    """List the caller's conversations in the cache."""
    state, _, salt = _context(http)
    found = await _sessions(state, salt)
    found = await _with_others(state, lambda names: names.sessions(salt, found), found)
    return json_response({"object": "list", "data": [_card(session) for session in found]})


async def delete_session(http: HttpRequest) -> Response:
    """Delete a conversation's KV and replies."""
    state, _, salt = _context(http)
    name = http.path_params["name"]
    _check_alive(state)
    # The texts of replies are kept for longer than rows that were evicted.
    texts = state.kept_replies.delete(salt, name)
    texts += await ask_database(state.engine.conversations.replies.forget, [salt], name)
    here = await ENGINE(state.engine.forget_session, salt, name) or texts > 0
    if not here:
        await _refuse_prompt(state, salt, name)
    if not await _with_others(state, lambda names: names.forget_session(salt, name, here), here):
        raise _unknown(name)
    return json_response({"object": "cache.session", "name": name, "deleted": True})


async def pin_session(http: HttpRequest) -> Response:
    """Keep a conversation in the cache."""
    return await _pin(http, True)


async def unpin_session(http: HttpRequest) -> Response:
    """Let a pinned conversation be evicted again."""
    return await _pin(http, False)


async def _pin(http: HttpRequest, pinned: bool) -> Response:
    state, _, salt = _context(http)
    name = http.path_params["name"]
    _check_alive(state)
    found = await ENGINE(state.engine.pin_session, salt, name, pinned)
    found = await _with_others(state, lambda names: names.pin_session(salt, name, pinned, found), found)
    if not found:
        raise _unknown(name)
    return json_response({"object": "cache.session", "name": name, "pinned": pinned})


async def list_prompts(http: HttpRequest) -> Response:
    """List the system prompts that are registered for the caller's requests."""
    state, _, salt = _context(http)
    _check_alive(state)
    found = await ENGINE(state.system_prompts.listing, salt)
    found = await _with_others(state, lambda names: names.prompts(salt, found), found)
    return json_response({"object": "list", "data": [_prompt_card(prompt) for prompt in found]})


async def put_prompt(http: HttpRequest) -> Response:
    """Register a system prompt, or replace the one of that name. Answers when it is computed and kept."""
    state, _, salt = _context(http)
    body = await read_body(http, PromptBody)
    name = http.path_params["name"]
    check_session(name)
    _check_alive(state)
    state.tokenizer.check_length(body.text, state.window, "text")
    found = await PROMPTS(state.system_prompts.register, salt, name, body.text)
    if state.shared_names is not None:
        await FILES(state.shared_names.registered, salt, name, body.text.strip(), found.tokens)
    return json_response({**_prompt_card(found), "prefilled_tokens": found.tokens - found.cached})


async def delete_prompt(http: HttpRequest) -> Response:
    """Unregister one of the caller's system prompts."""
    state, _, salt = _context(http)
    name = http.path_params["name"]
    _check_alive(state)
    found = await PROMPTS(state.system_prompts.forget, salt, name)
    if not found:
        await _refuse_prompt(state, salt, name)
    found = await _with_others(state, lambda names: names.forget_prompt(salt, name, found), found)
    if not found:
        raise RequestError(f"there is no system prompt {name[:80]!r}", status=404, code="not_found")
    return json_response({"object": "cache.prompt", "name": name, "deleted": True})


async def cache_stats(http: HttpRequest) -> Response:
    """Count the caller's own conversations, tokens, responses and prompts. Admins also get the engine's statistics."""
    state, record, salt = _context(http)
    found = await _sessions(state, salt)
    usage = state.tenants.usage(record.caller)
    prompts = await ENGINE(state.system_prompts.listing, salt)
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
            "cached_tokens": usage.cached.by_tier(state.engine.config.cache.shared is not None),
        },
        "responses": {"count": number, "bytes": size},
        "prompts": {"count": len(prompts), "tokens": sum(prompt.tokens for prompt in prompts)},
    }
    if record.caller.admin:
        said["engine"] = asdict(state.engine.stats())
    return json_response(said)


async def reset_prefix_cache(http: HttpRequest) -> Response:
    """Clear the cache. Admins clear the caches of all tenants; other keys clear everything that was ever stored under
    them. Without keys, a salt is its client's secret, and only the given one is cleared. Tenants' registered prompts
    go too; the operator's prompt stays, and so do responses that `/v1/responses` has stored."""
    state, record, salt = _context(http)
    admin, tenant = record.caller.admin, record.caller.tenant
    whose = {} if admin else {"tenant": tenant} if tenant else {"salt": salt}
    kept, stored = state.tokenizer.replies, state.engine.conversations.replies
    state.kept_replies.forget_turns()
    state.engine.reset_cache(**whose)
    state.system_prompts.reset(**whose)
    if admin:
        kept.clear()
        await ask_database(stored.forget)
    elif tenant:
        kept.clear(lambda each: each.startswith(f"{tenant}/"))
        await ask_database(stored.forget_tenant, tenant)
    else:
        kept.clear(lambda each: each == salt)
        await ask_database(stored.forget, [salt])
    if state.shared_names is not None:
        # The only key of this server clears all that is here; other servers over the store may have other keys.
        theirs = {"tenant": tenant} if state.tenants.only_key else whose
        await FILES(partial(state.shared_names.reset, **theirs))
    return json_response({"status": "ok", "cleared": "all" if admin else "own"})


async def _with_others(state: State, ask: Callable[[SharedNames], T], here: T) -> T:
    """Ask for what all servers over one shared store know; `here` is what this one knows, where it shares nothing."""
    return here if state.shared_names is None else await FILES(ask, state.shared_names)


async def _responses(state: State, record: RequestRecord) -> tuple[int | None, int | None]:
    """Count the caller's stored responses and their bytes; None where the file system is slow to answer."""
    try:
        number, size = await ask_database(state.engine.conversations.count, record.caller.tenant, within=COUNT_SECONDS)
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


async def _refuse_prompt(state: State, salt: str, name: str) -> None:
    """Raise a RequestError where the name is a registered system prompt's."""
    for prompt in await ENGINE(state.system_prompts.listing, salt):
        if prompt.name != name:
            continue
        if prompt.shared:
            message = f"{name!r} is the system prompt of all tenants; start the server without --system-prompt-file"
        else:
            message = (
                f"{name!r} is a registered system prompt; afterglow cache unregister, or"
                f" DELETE /v1/cache/prompts/{name}, lets it go"
            )
        raise RequestError(message, status=409, code="registered_prompt")


def _tiers(sessions: Sequence[SessionInfo | PrefixInfo]) -> dict[str, int]:
    return {tier: sum(getattr(session, tier) for session in sessions) for tier in ("device", "host", "disk")}


def _unknown(name: str) -> RequestError:
    return RequestError(f"there is no conversation {name[:80]!r} in the cache", status=404, code="not_found")
