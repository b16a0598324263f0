"""Register prefixes: compute them at once, not when a request first begins with them (RelayAttention §3.2)."""

from __future__ import annotations

import contextlib
import logging
import time
import uuid
from collections.abc import Callable, Sequence

from afterglow.engine.durable_notes import WRITE_SECONDS, DurableNotes
from afterglow.engine.inbox import OutputQueue
from afterglow.engine.requests import check, owner_of, token_bytes
from afterglow.engine.setup import EngineParts
from afterglow.errors import RequestError
from afterglow.listings import PrefixInfo
from afterglow.plan.retention.registered import PrefixState
from afterglow.request import Output, Request, SamplingParams

log = logging.getLogger("afterglow.engine")

KEEP_SECONDS = 30.0  # how long to wait until computed rows are kept in host
LOAD_SECONDS = 2.0  # how long to wait until rows that are on disk come to host
POLL_SECONDS = 0.01


class PrefixRegistrar:
    """Register, list and forget prefixes, from callers' threads."""

    def __init__(
        self,
        parts: EngineParts,
        submit: Callable[[Request, Callable[[Output], None], str], None],
        notes: DurableNotes,
    ) -> None:
        """`submit` queues a request under a salt of the plan's."""
        self._parts = parts
        self._inbox = parts.inbox
        self._submit = submit
        self._notes = notes

    def register(self, name: str, tokens: Sequence[int], salt: str | None, about: str) -> PrefixInfo:
        """Compute or load a prefix, and keep it. See `Engine.register_prefix`."""
        parts, plan, owner = self._parts, self._parts.scheduler, owner_of(salt)
        # With --importance a request reads some of the rows that are on disk and computes the others: here all must come.
        request = Request(
            f"prefix-{uuid.uuid4().hex}",
            list(tokens),
            SamplingParams(max_tokens=0),
            salt=salt or "",
            kv_retention=1.0,
        )
        check(request, parts.limits)
        if not parts.config.cache.reuse:
            raise RequestError("nothing is kept with --no-reuse, so no prefix can be registered", param="text")
        before = self._find(owner, name)
        self._inbox.ask(lambda: plan.register_prefix(owner, name, token_bytes(tokens), about, parts.clock()))
        try:
            cached = self._compute(request, owner)
            found = self._wait_kept(owner, name, len(tokens))
            # The operator's prefixes are registered anew at each start: that they can be computed is enough.
            if parts.capacity.disk_bytes and not self._is_stored(found) and salt is not None:
                raise RequestError(
                    f"the prefix {name!r} is not registered: it could not be written to disk, which is full or fails; make"
                    " room in the cache directory and try again",
                    status=507,
                    code="insufficient_storage",
                )
        except RequestError:
            with contextlib.suppress(RequestError):  # the engine has stopped: the registration ends with it
                self._undo(owner, name, before, token_bytes(tokens))
            raise
        return _info(found, cached)

    def forget(self, name: str, salt: str | None) -> bool:
        """Forget a prefix. Returns False if there is none of that name."""
        return self.forget_of(owner_of(salt), name)

    def forget_of(self, owner: str, name: str) -> bool:
        """Forget a prefix by its owner (see `owner_of`). Returns False if there is none of that name."""

        def work() -> bool:
            there = self._parts.scheduler.forget_prefix(owner, name)
            self._notes.remember()
            return there

        found = self._inbox.ask(work)
        self._notes.write()
        return found

    def listing(self) -> dict[str, list[PrefixInfo]]:
        """List all prefixes, by the plan's salt (see `owner_of`)."""
        found = self._inbox.ask(lambda: self._parts.scheduler.cache.registered.listing())
        return {owner: [_info(state) for state in states] for owner, states in found.items()}

    def _find(self, owner: str, name: str) -> PrefixState | None:
        states = self._inbox.ask(lambda: self._parts.scheduler.cache.registered.listing()).get(owner, ())
        return next((state for state in states if state.name == name), None)

    def _compute(self, request: Request, owner: str) -> int:
        """Run a prompt to its end. Returns the number of cached tokens."""
        outputs = OutputQueue(self._inbox)
        self._submit(request, outputs, owner)
        while True:
            _, last = outputs.get()
            if last.finish_reason == "length":
                return last.cached.total
            if last.finish_reason is not None:
                raise RequestError(last.error or "the prefix was not computed", status=503)

    def _wait_kept(self, owner: str, name: str, rows: int) -> PrefixState:
        """Wait until all rows are kept in host, and on disk unless the disk refuses them or takes long. Rows that were on
        disk before, and were not loaded, are loaded when they are needed.

        Raises: RequestError.
        """
        began = time.monotonic()
        on_disk = self._parts.capacity.disk_bytes
        while True:
            found = self._find(owner, name)
            if found is None:
                raise RequestError(f"the prefix {name!r} was deleted meanwhile", status=409)
            waited = time.monotonic() - began
            stored = found.disk >= rows and waited > LOAD_SECONDS
            if found.kept and (found.host >= rows or stored):
                if not on_disk or found.disk >= rows or not found.writing or waited > WRITE_SECONDS:
                    return found
            elif waited > KEEP_SECONDS:
                if found.kept:  # some rows are in host, the others on disk
                    return found
                raise RequestError("the prefix was computed and could not be kept: is the host cache full?", status=503)
            time.sleep(POLL_SECONDS)

    def _is_stored(self, found: PrefixState) -> bool:
        """Tell whether the prefix will be known after a restart, as far as that can be said now.

        The note about the prefix is written now: a registration that was confirmed outlives the process, however that ends.
        """
        if found.disk < found.rows:
            if not found.writing:
                log.warning(
                    "the registered prefix %r is in host memory only: it could not be written to disk", found.name
                )
                return False
            log.warning("the registered prefix %r is still being written: the disk is slow", found.name)
        self._inbox.ask(self._notes.remember)
        return self._notes.write()

    def _undo(self, owner: str, name: str, before: PrefixState | None, tokens: bytes) -> None:
        """Remove a registration that was refused, and restore the one that had the name before."""
        if before is not None and before.tokens in (b"", tokens):
            return  # the same prefix was there: missing rows are computed when they are needed

        def work() -> None:
            self._parts.scheduler.forget_prefix(owner, name)
            if before is not None:
                with contextlib.suppress(RequestError):
                    self._parts.scheduler.register_prefix(owner, name, before.tokens, before.about, self._parts.clock())

        self._inbox.ask(work)


def _info(state: PrefixState, cached: int = 0) -> PrefixInfo:
    return PrefixInfo(state.name, state.rows, state.device, state.host, state.disk, state.shared, cached, state.about)
