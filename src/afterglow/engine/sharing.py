"""Share rows with other engines: look prompts up before they are queued, take over what is found, publish what is stored.

The engine's thread calls everything here. What was looked up enters the plan as an input (`adopt`), so that a journal replays it.
"""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from functools import partial

from afterglow.engine.inbox import Inbox
from afterglow.errors import StoreError
from afterglow.plan.options import Capacity
from afterglow.plan.prefix.block_keys import BLOCK_ROWS, block_keys, lead_to
from afterglow.plan.prefix.extent import Extent
from afterglow.plan.prefix.index import extent_id
from afterglow.plan.prefix.published import MIN_LOOKUP_ROWS, Published, expiry, listed_under
from afterglow.plan.prefix.salts import is_private
from afterglow.plan.prefix.shared_way import forks
from afterglow.plan.scheduler import Scheduler
from afterglow.plan.step import ExtentId, JobSpec, Load, Move, MoveDone, Store, TransferDone
from afterglow.store.kvstore import KVStore
from afterglow.store.shared.finder import Prompt, SharedExtent

log = logging.getLogger("afterglow.engine")

MAX_KEYS = 64  # extents whose hashes of blocks are kept


class Sharing:
    """Join an engine's plan and the tier that engines share."""

    def __init__(
        self, scheduler: Scheduler, store: KVStore, capacity: Capacity, inbox: Inbox, clock: Callable[[], float]
    ) -> None:
        """`clock`: the plan's, seconds since 1970."""
        assert store.shared is not None
        assert store.far is not None
        self.shared = store.shared
        self._far = store.far
        self._scheduler = scheduler
        self._capacity = capacity
        self._inbox = inbox
        self._now = clock
        self._storing: dict[int, ExtentId] = {}  # by Store
        self._keys: OrderedDict[ExtentId, Sequence[str]] = (
            OrderedDict()
        )  # of the tokens up to the end of what was published last
        self._waiting: dict[int, Callable[[], object]] = {}  # by job: what follows when its prompt has been looked up

    # ------------------------------------------------------------------------------------------- looking up

    def looks_up(self, spec: JobSpec, follows: Callable[[], object]) -> bool:
        """Look a job's prompt up, then call `follows` on the engine's thread. False: there is nothing to look for.

        Prompts that are going to be cut are not looked up: nothing of a cut context is shared.
        """
        rows = len(spec.prompt) // 4
        too_long = rows + spec.max_tokens > self._scheduler.max_model_len
        if not spec.read or spec.selects or spec.aside or spec.discard or too_long:
            return False
        match = self._scheduler.cache.match(spec.salt, spec.prompt)
        if rows - match.rows < MIN_LOOKUP_ROWS:
            return False
        self._waiting[spec.job] = follows

        def found(path: Sequence[SharedExtent]) -> None:
            self._inbox.send(partial(self._found, spec, path))

        self.shared.look_up(Prompt(spec.salt, spec.prompt, match.rows, forks(match)), found)
        return True

    def gives_up(self, job: int) -> bool:
        """Give up a job whose prompt is being looked up. False: it is not."""
        return self._waiting.pop(job, None) is not None

    def wait_no_more(self) -> None:
        """Let all jobs go on whose prompts are being looked up, and take nothing over for them: what is being deleted must not come
        back, and what is deleted next is theirs too.
        """
        while self._waiting:
            self._waiting.pop(next(iter(self._waiting)))()

    def _found(self, spec: JobSpec, path: Sequence[SharedExtent]) -> None:
        follows = self._waiting.pop(spec.job, None)
        if follows is None:  # cancelled meanwhile
            return
        try:
            if path:
                self._take_over(spec, path)
        except Exception as error:  # a miss: what else there is to do goes on
            log.exception("what was found in the shared store could not be taken over")
            self.shared.failed(StoreError(f"taking over: {error}"))
        follows()

    def _take_over(self, spec: JobSpec, path: Sequence[SharedExtent]) -> None:
        now = self._now()
        lives = [each.published.expires - now for each in path if each.published.expires]
        ttl = min([*lives, *([spec.ttl] if spec.ttl is not None else [])], default=None)
        if ttl is not None and ttl <= 0:
            return
        extents = [
            Extent(
                each.published.id, spec.salt, "exact", each.tokens, each.published.first_row,
                self._capacity.file_size(each.published.rows), now, 0,
            )
            for each in path
        ]  # fmt: skip
        taken = {extent.id for extent in self._scheduler.adopt(spec.salt, spec.prompt, extents, ttl, now)}
        self.shared.expect([each for each in path if each.published.id in taken])

    # ---------------------------------------------------------------------------------------- moves of the plan

    def begin(self, moves: Iterable[Move]) -> None:
        """Take note of moves that are about to begin: loads whose rows are in the shared tier, and stores."""
        cache = self._scheduler.cache
        for move in moves:
            if isinstance(move, Load):
                extent = cache.index.extents.get(move.extent)
                if extent is not None and cache.loading.is_far(extent):
                    self._far.expect(extent.record())
            elif isinstance(move, Store):
                self._storing[move.move] = move.record.id

    def ended(self, done: Iterable[TransferDone]) -> None:
        """Publish what has been stored, and delete what has been deleted, once the plan knows of it."""
        deleted, replaced = self._scheduler.cache.placement.take_gone()
        for part, whole in replaced:
            self.shared.replaced(part, whole)
        for each in done:
            stored = self._storing.pop(each.move, None) if isinstance(each, MoveDone) else None
            if stored is not None and isinstance(each, MoveDone) and each.ok:
                self._publish(stored)
        for name in deleted:
            self.shared.delete(name)

    def _publish(self, name: ExtentId) -> None:
        """Publish an extent that can be matched; none of a context that was cut, and none whose name is not its rows' digest."""
        cache = self._scheduler.cache
        extent = cache.index.extents.get(name)
        if extent is None or extent.kind != "exact" or is_private(extent.salt) or not extent.nodes:
            return
        prefix = cache.prefix_of(extent.record())
        if prefix is None or extent_id(cache.digest, extent.salt, prefix, extent.tokens) != name:
            return
        first = len(prefix) // 4 + extent.nodes[0].start
        tokens = prefix + extent.tokens
        published = Published(name, extent.first_row, extent.rows, expiry(extent.record().expires))
        lead = lead_to(published, extent.parent, self._block_keys(extent, tokens))
        key = listed_under(extent.salt, tokens[: 4 * (first + 1)])
        self.shared.publish(published, key, lead, tuple(cache.index.above(extent)))

    def _block_keys(self, extent: Extent, tokens: bytes) -> Sequence[str]:
        """Hash an extent's tokens and those before it, which its parent's are the first of: a long prompt becomes many extents."""
        parents = self._keys.get(extent.parent or "", ())[: extent.first_row // BLOCK_ROWS + 1]
        keys = self._keys[extent.id] = block_keys(extent.salt, tokens, parents)
        if len(self._keys) > MAX_KEYS:
            self._keys.popitem(last=False)
        return keys
