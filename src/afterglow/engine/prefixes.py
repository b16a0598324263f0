"""Prefixes that are registered: computed when they are, not when somebody first asks (RelayAttention §3.2, spec R1)."""

from __future__ import annotations

import contextlib
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
from afterglow.store.files import kind_of

if TYPE_CHECKING:
    from afterglow.engine.engine import Engine

log = logging.getLogger("afterglow.engine")

KEEP_SECONDS = 30.0  # how long to wait until what was computed is kept in host
WRITE_SECONDS = 0.8  # and on disk: a disk that refuses says so by then, and for a slow one nobody waits
POLL_SECONDS = 0.01


def register(engine: Engine, name: str, tokens: Sequence[int], salt: str | None, about: str) -> PrefixInfo:
    """See `Engine.register_prefix`."""
    plan, owner = engine._scheduler, owner_of(salt)
    sampling = SamplingParams(max_tokens=0)
    # All of its rows shall come: with --importance a request would read some of those that are on disk, and compute the others.
    request = Request(f"prefix-{uuid.uuid4().hex}", list(tokens), sampling, salt=salt or "", kv_retention=1.0)
    check(request, plan, engine.vocab_size, engine.max_model_len)
    if not engine.config.cache.reuse:
        raise RequestError("nothing is kept with --no-reuse, so no prefix can be registered", param="text")

    def work() -> RequestError | None:
        try:
            plan.register_prefix(owner, name, token_bytes(tokens), about, engine._now())
        except RequestError as error:  # not the engine's fault, which would end it
            return error
        return None

    before = next((state for state in engine._ask(plan.prefixes).get(owner, ()) if state.name == name), None)
    if (error := engine._ask(work)) is not None:
        raise error
    try:
        cached = _compute(engine, request, owner)
        found = _wait_kept(engine, owner, name, len(tokens))
        # What the operator registers is registered anew at each start: that it can be computed is enough.
        if engine.capacity.disk_bytes and not _stored(engine, found) and salt is not None:
            raise RequestError(
                f"the prefix {name!r} is not registered: it could not be written to disk, which is full or fails; make room "
                "in the cache directory and try again",
                status=507,
                code="insufficient_storage",
            )
    except RequestError:
        with contextlib.suppress(RequestError):  # the engine has stopped: what is registered ends with it
            _undo(engine, owner, name, before, token_bytes(tokens))
        raise
    return _info(found, cached)


def _wait_kept(engine: Engine, owner: str, name: str, rows: int) -> PrefixState:
    """The prefix when all of its rows are kept in host, and on disk unless that is refused or takes long."""
    began = time.monotonic()
    while True:
        found = _state(engine, owner, name)
        waited = time.monotonic() - began
        if found.kept and found.host >= rows:
            if not engine.capacity.disk_bytes or found.disk >= rows or not found.writing or waited > WRITE_SECONDS:
                return found
        elif waited > KEEP_SECONDS:
            raise RequestError("the prefix was computed and could not be kept: is the host cache full?", status=503)
        time.sleep(POLL_SECONDS)


def _stored(engine: Engine, found: PrefixState) -> bool:
    """Will it be known after a restart, as far as can be told? The note about it is written now, and not within seconds:
    what was answered outlives the process, however it ends."""
    if found.disk < found.rows:
        if not found.writing:
            log.warning("the registered prefix %r is in host memory only: it could not be written to disk", found.name)
            return False
        log.warning("the registered prefix %r is still being written: the disk is slow", found.name)
    engine._ask(engine._remember)
    return _write(engine)


def _undo(engine: Engine, owner: str, name: str, before: PrefixState | None, tokens: bytes) -> None:
    """Leave of a registration that was refused no trace; what was registered under its name is registered again."""
    if before is not None and before.tokens in (b"", tokens):
        return  # of one that was there, what is missing is computed when it is needed

    def work() -> None:
        engine._scheduler.forget_prefix(owner, name)
        if before is not None:
            with contextlib.suppress(RequestError):
                engine._scheduler.register_prefix(owner, name, before.tokens, before.about, engine._now())

    engine._ask(work)


def forget(engine: Engine, name: str, salt: str | None) -> bool:
    """See `Engine.forget_prefix`."""

    def work() -> bool:
        there = engine._scheduler.forget_prefix(owner_of(salt), name)
        engine._remember()
        return there

    found = engine._ask(work)
    _write(engine)
    return found


def _write(engine: Engine) -> bool:
    """Write the notes. False: that was refused; a disk that does not answer in time may yet do it."""
    try:
        engine._store.write_notes(WRITE_SECONDS)
    except StoreError as error:
        log.warning("it is not known yet whether a registered prefix will be known after a restart: %s", error)
        return kind_of(error) == "timeout"
    return True


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


def _info(state: PrefixState, cached: int = 0) -> PrefixInfo:
    return PrefixInfo(state.name, state.rows, state.device, state.host, state.disk, state.shared, cached, state.about)
