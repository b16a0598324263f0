"""The engine: submit requests of token ids, receive tokens.

An engine joins the plan, the store and the model. It knows token ids only: text, HTTP and chat templates are above it.
"""

from __future__ import annotations

import contextlib
import functools
import os
import threading
from collections.abc import Callable, Generator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Literal, TypeVar

import torch

from afterglow.choices import KVSource, Preload, ReadBuffer
from afterglow.config import EngineConfig, check_read_buffer
from afterglow.engine import selftest
from afterglow.engine.hardware import choose_device
from afterglow.engine.inbox import OutputQueue
from afterglow.engine.kv_format import Progress
from afterglow.engine.loop import EngineLoop
from afterglow.engine.make_shared_ids import shared_ids
from afterglow.engine.registrar import PrefixRegistrar
from afterglow.engine.requests import (
    LiveRequest,
    Sink,
    can_be_computed,
    check,
    discarding,
    owner_of,
    salt_id,
    token_bytes,
)
from afterglow.engine.setup import EngineParts, build
from afterglow.engine.stats import EngineStats, Tiers
from afterglow.errors import RequestError
from afterglow.listings import PrefixInfo, SessionInfo
from afterglow.memory.pages import give_back
from afterglow.plan.prefix.ranges import Rows
from afterglow.plan.prefix.salts import earlier_name, everything_of
from afterglow.request import Completion, Output, Request, Truncation, completion_of
from afterglow.store.extents.throttle import Throttle

T = TypeVar("T")

CLOSE_SECONDS = 10.0  # how long closing waits for calls of the store to return
_open: set[Engine] = set()  # closed when the program ends


@functools.cache
def _close_at_exit() -> None:
    """See to it that engines that are still open are closed when the program ends. Not by `atexit`, whose turn comes when the threads
    that write to disk take no work any more; the standard library has no public name for this."""

    def close() -> None:
        for engine in list(_open):
            engine.close()

    os.register_at_fork(after_in_child=_open.clear)  # a child process has none of the threads
    threading._register_atexit(close)  # type: ignore[attr-defined]


class Engine:
    """Run requests on one model. `Engine.load` makes an engine, `start` begins, `close` ends it.

    All methods may be called from any thread. `parts` is for tests and benchmarks: the engine's thread owns the plan.
    """

    def __init__(self, parts: EngineParts) -> None:
        self.parts = parts
        self.config = parts.config
        self.model_name = parts.model_name
        self.model_dir = parts.model_dir
        self.max_model_len = parts.limits.max_model_len
        self.vocab_size = parts.limits.vocab_size
        self.eos_token_ids = parts.decoder.spec.eos_ids
        self.capacity = parts.capacity
        self.grammars = parts.grammars  # of requests with one; the owner of the tokenizer hands it over
        self.decoder = parts.decoder  # may be used beside the engine: a forward pass changes nothing in it
        self.conversations = parts.conversations  # responses that clients go on from by id
        self.loop = EngineLoop(parts)
        self._inbox = parts.inbox
        self._registrar = PrefixRegistrar(parts, self.loop.submit, self.loop.notes)
        self._closed = False
        self.shared_ids = shared_ids(parts, self.loop, lambda owner, name: self._registrar.forget_of(owner, name))

    @classmethod
    def load(
        cls,
        model: str | Path,
        config: EngineConfig | None = None,
        progress: Progress | None = None,
        throttle: Throttle | None = None,
        name: str | None = None,
    ) -> Engine:
        """Read a Hugging Face model directory (or a preset, such as `bench-100m`) and open the model's cache.

        `progress` is called with the thing that is read, and the parts done and in all: (name, done, total). `throttle` slows the disk tier down, for
        benchmarks. `name` names the model and its folder in the cache directory; default: the directory's name.
        Raises: ModelError, ConfigError.
        """
        config = config or EngineConfig()
        if config.device == "auto":
            found = str(choose_device("auto"))
            fit = found == "cpu" or selftest.works(lambda trial: cls.load(selftest.MODEL, trial), found)
            config = replace(config, device=found if fit else "cpu")
        return cls(build(model, config, progress, throttle, name))

    @property
    def healthy(self) -> bool:
        """Tell whether the engine runs: it was started, and has neither been closed nor failed."""
        return self._inbox.is_open

    def start(self) -> None:
        """Start the engine's thread. An engine that is still open when the program ends is closed then: a thread in the middle of a
        step would abort the program."""
        _close_at_exit()
        _open.add(self)
        self.loop.start()

    def close(self, flush: bool = True) -> None:
        """Cancel all requests, write dirty KV to disk (`flush`), stop the thread, and release the cache directory."""
        if self._closed:
            return
        self._closed = True
        _open.discard(self)
        self.loop.stop(flush)
        if self.decoder.device.type == "cuda":
            # Rows that are read ahead may still come, and host memory is unlocked once nothing refers to it.
            with contextlib.suppress(RuntimeError):
                torch.cuda.synchronize(self.decoder.device)
        self.parts.store.close(CLOSE_SECONDS if self.loop.disk_answers else 1.0)
        self._free_host_cache()
        self.conversations.close()
        if self.parts.kv_events is not None:
            self.parts.kv_events.close()
        if self.parts.journal is not None:
            with contextlib.suppress(OSError):  # a full disk has ended it before
                self.parts.journal.close()

    def _free_host_cache(self) -> None:
        """Let the system have the host cache at once: objects that refer to it wait for the cyclic garbage collector."""
        store = self.parts.store
        if self.parts.decoder.device.type == "cpu" and not store.stats().hung:
            give_back(store.arena.view.ctypes.data, store.arena.view.nbytes)

    # ------------------------------------------------------------------------------------------------- requests

    def submit(self, request: Request, sink: Sink) -> None:
        """Queue a request. The engine's thread calls `sink` with each output; the last one has a `finish_reason`.

        Raises: RequestError, for a request that is too long or has a token outside the vocabulary, where the queue is full,
        and when the engine has stopped.
        """
        self.loop.submit(request, sink, salt_id(request.salt))

    def expect(self, prompts: Sequence[Request], after: str | None = None) -> None:
        """Compute the rows of prompts while the engine is idle, so that a request whose prompt begins with one of them finds
        them cached. The prompts are those that one next turn may have; their sampling and priority have no effect. What can
        never be answered is left out. `after`: the id of the request that they follow; where its conversation was deleted before
        it ended, nothing is computed."""
        able = [each for each in prompts if each.reuse and can_be_computed(each, self.parts.limits)]
        if able and self.config.cache.reuse and self.healthy:
            self._inbox.send(lambda: self.loop.expect(able, after))

    def cancel(self, request_id: str) -> None:
        """End a request now; its last output has the reason `cancelled`. Unknown ids are ignored."""
        self.loop.cancel(request_id)

    def outputs(self, requests: Sequence[Request]) -> Generator[tuple[float, Output]]:
        """Run requests and yield their outputs as they come, each with the seconds since the first was submitted.

        The engine must have been started; it takes in all requests before its next step. Requests that have not ended when the iterator
        is closed are cancelled.
        Raises: RequestError.
        """
        outputs = OutputQueue(self._inbox)
        unfinished: set[str] = set()
        try:
            self._submit_all(requests, outputs, unfinished)
            while unfinished:
                at, output = outputs.get()
                if output.finish_reason is not None:
                    unfinished.discard(output.request_id)
                yield at, output
        finally:
            for request_id in unfinished:
                self.cancel(request_id)

    def _submit_all(self, requests: Sequence[Request], sink: Sink, submitted: set[str]) -> None:
        """Queue requests together, up to the first that is refused, and add their ids to `submitted`."""
        prepared: list[LiveRequest] = []
        try:
            for request in requests:
                prepared.append(self.loop.prepare(request, sink, salt_id(request.salt)))
                submitted.add(request.id)
        finally:
            self.loop.accept(prepared)

    def generate(self, requests: Sequence[Request]) -> list[Completion]:
        """Run requests to the end and return their replies, in order. The engine must have been started.

        Raises: RequestError.
        """
        gathered: dict[str, list[Output]] = {r.id: [] for r in requests}
        first: dict[str, float] = {}
        for at, output in self.outputs(requests):
            first.setdefault(output.request_id, at)
            gathered[output.request_id].append(output)
        return [completion_of(gathered[r.id], first[r.id]) for r in requests]

    def stats(self) -> EngineStats:
        """Return counters and levels as of the last step. Waits neither for the engine's thread nor for a file system."""
        parts, found = self.parts, self.loop.published
        size = parts.sizes
        return replace(
            found,
            engine=replace(found.engine, damaged_responses=self.conversations.damaged),
            tiers=Tiers.of(found.plan, parts.capacity, size.device_row_bytes, size.host_block_bytes, size.kv_dtype),
            pool=parts.runner.contexts.levels(),
            store=parts.store.stats(),
            shared=parts.store.shared.stats() if parts.store.shared is not None else None,
        )

    # ---------------------------------------------------------------------------------------------- cached KV

    def reset_cache(self, salt: str | None = None, *, tenant: str | None = None) -> None:
        """Forget every cached row that no running request needs, in all tiers.

        Forgets the rows of one salt, of all salts of a tenant (see `Request.salt`), or by default all rows. Names of
        conversations, truncations and registered prefixes go too, except for the operator's prefixes.
        """
        whose = salt_id(salt) if salt is not None else None
        if tenant is not None:
            whose = everything_of(tenant)
            earlier = earlier_name(f"{tenant}/")
            self._inbox.send(lambda: self.loop.reset(earlier))
        self._inbox.send(lambda: self.loop.reset(whose))

    def discard(
        self,
        context: Sequence[int],
        dropped: Sequence[int] | Sequence[Rows],
        *,
        system_rows: int,
        salt: str = "",
        session_id: str | None = None,
    ) -> Truncation:
        """Leave tokens out of a conversation from now on, and keep the KV of all others (CachedAttention §3.4, token
        discarding lists of compression methods).

        `context`: all tokens so far, including tokens that were left out before. `dropped`: the tokens to leave out, as
        indices (ascending) or as ranges [start, stop). `system_rows`: tokens of the system prompt, which stay; with 0 they
        may be left out too.

        The KV that remains is copied in host memory under another salt, so that no other conversation can match
        it. Turns that begin with the same context and have `truncation` set go on from it, at new positions, also after a
        restart. Waits for the copy, and computes one token: the last.

        Raises: RequestError, for a list that is empty, not ascending, outside of the context, in the system prompt, or that
        leaves nothing; for a conversation that is not cached (404); for models with learned positions.
        """
        plan = self.parts.scheduler
        request = discarding(context, dropped, system_rows, salt, session_id)
        check(request, self.parts.limits)
        if not self._inbox.ask(lambda: plan.knows(salt_id(salt), token_bytes(context))):
            raise RequestError(
                "nothing of this conversation is cached, so there is nothing to keep of it",
                status=404,
                code="conversation_not_found",
            )
        (done,) = self.generate([request])
        assert done.truncation is not None
        return done.truncation

    def sessions(self, salt: str) -> list[SessionInfo]:
        """List a tenant's named conversations, the last used first."""
        found = self._inbox.ask(lambda: self.parts.scheduler.cache.sessions.listing(salt_id(salt)))
        return [SessionInfo(s.name, s.rows, s.device, s.host, s.disk, s.used, s.expires, s.pinned) for s in found]

    def pin_session(self, salt: str, name: str, pinned: bool) -> bool:
        """Keep a conversation in some tier whatever happens, or no longer. Returns False if there is none of that name.

        Raises: RequestError, where the tenant has pinned as much as it may.
        """
        return self._inbox.ask(lambda: self.parts.scheduler.pin_session(salt_id(salt), name, pinned))

    def forget_session(self, salt: str, name: str) -> bool:
        """Remove a conversation, and rows that only it has used, from all tiers. Returns False if there is none of that
        name."""
        return self._inbox.ask(lambda: self.loop.forget_session(salt_id(salt), name))

    def register_prefix(
        self, name: str, tokens: Sequence[int], *, salt: str | None = "", about: str = ""
    ) -> PrefixInfo:
        """Compute a prefix now, or load it, and keep it from now on.

        The prefix stays in host, on disk and, where there is room beside the longest context, on the device. All requests
        under this salt whose prompts begin with it find it. With `salt` None the prefix is the operator's: requests of all
        tenants find it, and share nothing else by that. A prefix is known again after a restart, with its `about`, a text of
        the caller's. It replaces another prefix of the same name. Waits until it is kept.

        Raises: RequestError, where the prefix is longer than the context or than half of a tier's budget.
        """
        return self._registrar.register(name, tokens, salt, about)

    def forget_prefix(self, name: str, *, salt: str | None = "") -> bool:
        """Keep a registered prefix no longer than other rows. Returns False if there is none of that name."""
        return self._registrar.forget(name, salt)

    def prefixes(self, salt: str | None = "") -> list[PrefixInfo]:
        """List the prefixes that are registered under a salt; None: the operator's."""
        return self.all_prefixes().get(owner_of(salt), [])

    def all_prefixes(self) -> dict[str, list[PrefixInfo]]:
        """List all registered prefixes, by the plan's salt (see `engine.requests.owner_of`)."""
        return self._registrar.listing()

    # ------------------------------------------------------------------------------------ for benchmarks and tests

    def ask(self, question: Callable[[], T]) -> T:
        """Run `question` on the engine's thread, which owns the plan, and return its result."""
        return self._inbox.ask(question)

    def settle(self) -> None:
        """Wait until nothing runs and every save and transfer has ended."""
        self._inbox.ask(self.loop.settle)

    def baseline(
        self, *, preload: Preload = "layerwise", read_buffer: ReadBuffer = None, source: KVSource = "load"
    ) -> None:
        """Go on as one of CachedAttention's baselines: without pre-loading, with a read buffer of `read_buffer` layers, or
        with only one way to cached rows.

        Raises: ConfigError.
        """
        check_read_buffer(read_buffer, preload)
        self._inbox.ask(lambda: self.parts.scheduler.baseline(preload, read_buffer, source))

    def demote(self, tier: Literal["host", "disk"]) -> None:
        """Push all idle KV down to `tier`, so that no faster tier has it."""

        def work() -> None:
            plan = self.parts.scheduler
            plan.drop_contexts()
            if tier == "disk":
                self.loop.flush()
                plan.drop_clean_host()
            self.loop.settle()

        self._inbox.ask(work)
