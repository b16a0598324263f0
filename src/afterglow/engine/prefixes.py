"""Prefixes that are registered: computed when they are, not when somebody first asks (RelayAttention §3.2, spec R1)."""

from __future__ import annotations

import logging
import queue
import time
import uuid
from collections.abc import Sequence
from typing import TYPE_CHECKING

from afterglow.engine.requests import check, salt_id, token_bytes
from afterglow.errors import RequestError, StoreError
from afterglow.plan.prefixes import OPERATOR
from afterglow.plan.registered import PrefixState
from afterglow.request import Output, PrefixInfo, Request, SamplingParams

if TYPE_CHECKING:
    from afterglow.engine.engine import Engine

log = logging.getLogger("afterglow.engine")

KEEP_SECONDS = 30.0  # how long to wait until what was computed is kept
POLL_SECONDS = 0.01


def register(engine: Engine, name: str, tokens: Sequence[int], salt: str | None, about: str) -> PrefixInfo:
    """See `Engine.register_prefix`."""
    plan, owner = engine._scheduler, owner_of(salt)
    request = Request(f"prefix-{uuid.uuid4().hex}", list(tokens), SamplingParams(max_tokens=0), salt=salt or "")
    check(request, plan, engine.vocab_size, engine.max_model_len)
    if not engine.config.cache.reuse:
        raise RequestError("nothing is kept with --no-reuse, so no prefix can be registered", param="text")

    def work() -> RequestError | None:
        try:
            plan.register_prefix(owner, name, token_bytes(tokens), about, engine._now())
        except RequestError as error:  # not the engine's fault, which would end it
            return error
        return None

    before = {state.name for state in engine._ask(plan.prefixes).get(owner, ())}
    if (error := engine._ask(work)) is not None:
        raise error
    try:
        cached = _compute(engine, request, owner)
        deadline = time.monotonic() + KEEP_SECONDS
        while not _kept(found := _state(engine, owner, name), len(tokens), on_disk=engine.capacity.disk_bytes > 0):
            if time.monotonic() > deadline:
                if found.host >= len(tokens):
                    log.warning("a registered prefix is in host memory only: it could not be written to disk")
                    break
                raise RequestError("the prefix was computed and could not be kept: is the host cache full?", status=503)
            time.sleep(POLL_SECONDS)
    except RequestError:
        if name not in before:  # of one that was there, what is missing is computed by whoever needs it
            forget(engine, name, salt)
        raise
    engine._ask(engine._remember)
    _write(engine)
    return _info(found, cached)


def forget(engine: Engine, name: str, salt: str | None) -> bool:
    """See `Engine.forget_prefix`."""

    def work() -> bool:
        there = engine._scheduler.forget_prefix(owner_of(salt), name)
        engine._remember()
        return there

    found = engine._ask(work)
    _write(engine)
    return found


def _write(engine: Engine) -> None:
    """Now, and not within seconds: what was answered outlives the process, however it ends."""
    try:
        engine._store.write_notes()
    except StoreError as error:
        log.warning("it is not known yet whether a registered prefix will be known after a restart: %s", error)


def listing(engine: Engine) -> dict[str, list[PrefixInfo]]:
    """See `Engine.all_prefixes`."""
    found = engine._ask(engine._scheduler.prefixes)
    return {owner: [_info(state) for state in states] for owner, states in found.items()}


def owner_of(salt: str | None) -> str:
    """The salt of the plan under which a prefix's rows lie."""
    return OPERATOR if salt is None else salt_id(salt)


def _compute(engine: Engine, request: Request, owner: str) -> int:
    """Run a prompt to its end; how much of it was there already."""
    outputs: queue.SimpleQueue[Output] = queue.SimpleQueue()
    engine._submit(request, outputs.put, owner)
    while True:
        try:
            last = outputs.get(timeout=0.5)
        except queue.Empty:
            if engine.healthy:
                continue
            raise RequestError("the engine has stopped", status=503, code="unavailable") from None
        if last.finish_reason == "length":
            return last.cached.total
        if last.finish_reason is not None:
            raise RequestError(last.error or "the prefix was not computed", status=503)


def _state(engine: Engine, owner: str, name: str) -> PrefixState:
    found = [state for state in engine._ask(engine._scheduler.prefixes).get(owner, ()) if state.name == name]
    if not found:
        raise RequestError(f"the prefix {name!r} was deleted meanwhile", status=409)
    return found[0]


def _kept(state: PrefixState, rows: int, *, on_disk: bool) -> bool:
    return state.kept and state.host >= rows and (not on_disk or state.disk >= rows)


def _info(state: PrefixState, cached: int = 0) -> PrefixInfo:
    return PrefixInfo(state.name, state.rows, state.device, state.host, state.disk, state.shared, cached, state.about)
