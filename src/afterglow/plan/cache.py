"""The cache manager: cached rows, their places, and their lifetimes, behind one door.

    match / registered_prefix                 which rows of some tokens are known
    new_extent / insert / add / replace       rows that have just been computed, copied or merged
    pin / unpin / touch / mark / need / avoid use by jobs
    retain / trim                             contexts that finished jobs leave on the device
    restore / adopt / recall / take_notes     over restarts, and from other engines
    tidy / complete / reset / forget_session  housekeeping, moves that ended, and deletion

Ask a part directly for what concerns it alone: `index`, `device`, `host`, `disk`, `loading`, `cost`, `sessions`,
`registered`. It knows no job, no queue and no step.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Mapping, Sequence
from dataclasses import replace
from math import inf

from afterglow.plan.options import Capacity, SchedulerOptions
from afterglow.plan.prefix.extent import Extent, View
from afterglow.plan.prefix.index import Index, Inserted, Match, extent_id
from afterglow.plan.prefix.salts import approximate, covers, is_private, kind_of
from afterglow.plan.prefix.shared_prefixes import SharedPrefix
from afterglow.plan.prefix.tree import common_rows
from afterglow.plan.prefix.truncation import Cut, Epochs, Rules, cut, outgrown
from afterglow.plan.retention.registered import Registered
from afterglow.plan.retention.restore import adopt, prefix_of, restore
from afterglow.plan.retention.sessions import Sessions
from afterglow.plan.stats import Counters, Stats
from afterglow.plan.step import ExtentRecord, JobSpec, MoveDone
from afterglow.plan.tiers.device import WHOLE, Context, Device, DeviceSegment, Lack
from afterglow.plan.tiers.placement import Placement
from afterglow.request import Breakpoint, ContextWindow


class Cache:
    """One engine's cached rows in all tiers."""

    def __init__(self, capacity: Capacity, options: SchedulerOptions) -> None:
        self.capacity = capacity
        self.counters = Counters()
        self.index = Index()
        self.device = Device(capacity, self.counters, options)
        self.placement = Placement(capacity, options, self.index, self.device, self.counters)
        self.host = self.placement.host
        self.disk = self.placement.disk
        self.loading = self.placement.loading
        self.moves = self.placement.moves
        self.cost = self.placement.cost
        self.ghosts = self.placement.ghosts
        self.sessions = Sessions(self.index, self.placement)
        self.registered = Registered(capacity, self.index, self.placement, self.device, options.tenant_quota)
        self.rules = Rules(ContextWindow(self.device.longest), options.truncation_ratio, options.truncation_policy)
        self.relative_positions = options.relative_positions
        self.write_through = options.write_policy == "write_through" and capacity.disk_bytes > 0
        self._epochs = Epochs()
        self.digest = options.digest
        self._keep_approximate = options.keep_approximate
        self._ttl = options.ttl
        self._warm_start = options.warm_start
        self._restored = False  # since the last step
        self._adopted = False
        self._restored_at = 0.0

    # ----------------------------------------------------------------------------------------- looking up

    def match(self, salt: str, tokens: bytes) -> Match:
        """Find the longest cached prefix of `tokens`; it may end inside an extent."""
        return self.index.match(salt, tokens)

    def registered_prefix(self, salt: str, tokens: bytes | bytearray) -> SharedPrefix | None:
        """Find the longest registered prefix of `tokens` whose rows lie under another salt."""
        return self.index.prefixes.before(salt, tokens)

    def current(self, salt: str, tokens: bytes) -> tuple[str, bytes]:
        """Return the salt and the tokens under which the rows of a context lie now: others, if it has been cut."""
        epoch = self._epochs.peek(salt, tokens)
        return (salt, tokens) if epoch is None else (epoch.salt, epoch.compact(tokens))

    def selecting_salt(self, spec: JobSpec) -> str:
        """Return the salt whose rows a job may select from: with those that others have computed over a selection, where these are
        kept. Behind a truncation they are not."""
        kept = self._keep_approximate and spec.selects and not is_private(spec.salt)
        return approximate(spec.salt) if kept else spec.salt

    def outgrown(self, spec: JobSpec) -> tuple[str, bytes] | None:
        """Return the context (salt, tokens) whose rows' scores are needed to cut this job's prompt, if any are."""
        if not spec.truncation:
            return None
        return outgrown(self._epochs, self.rules, spec.salt, spec.prompt, spec.max_tokens, self.relative_positions)

    def truncate(self, spec: JobSpec) -> tuple[JobSpec, Cut | None]:
        """Cut a job's prompt where it does not fit, except for registered prefixes. Returns the job as it is to run."""
        if not spec.truncation:
            return spec, None
        turns = self.registered.kept(spec.salt, spec.prompt, spec.turns)
        found = cut(
            self._epochs, self.rules, spec.salt, spec.prompt, spec.max_tokens, turns, self.relative_positions,
            spec.discard, spec.scores,
        )  # fmt: skip
        if found is None:
            return replace(spec, turns=turns), None
        breakpoints = _moved(spec.breakpoints, spec.prompt, found.prompt)
        prompt, salt = found.prompt, found.salt
        return replace(spec, turns=turns, prompt=prompt, salt=salt, scores=(), breakpoints=breakpoints), found

    # ------------------------------------------------------------------------------------------- new extents

    def new_extent(self, salt: str, prefix: bytes, own: bytes, volatile: bool, now: float) -> Extent:
        """Make an extent of the tokens `own` after the tokens `prefix`. It is not in the index yet."""
        return Extent(
            extent_id(self.digest, salt, prefix, own),
            salt,
            kind_of(salt),
            own,
            len(prefix) // 4,
            self.capacity.file_size(len(own) // 4),
            created_at=now,
            serial=self.index.next_serial(),
            last_used=now,
            volatile=volatile,
        )

    def insert(self, extent: Extent, prefix: bytes) -> Inserted:
        """Put an extent below its prefix in the index."""
        return self.placement.insert(extent, prefix)

    def add(self, extent: Extent, slots: tuple[int, ...], now: float) -> None:
        """Put an extent that was inserted into the host slots that hold its rows."""
        self.placement.add(extent, slots, self.write_through, now)

    def within_quota(self, salt: str, size: int) -> bool:
        """Make room for `size` more bytes within the tenant's quota. False: there is none."""
        return self.placement.quota.make_room(salt, size)

    def replace(self, parts: Sequence[Extent], whole: Extent) -> None:
        """Put a merged extent, which `prepare` has made known, in the place of its parts."""
        expires, mark = parts[-1].expires, parts[-1].mark
        whole.hits = max(part.hits for part in parts)
        whole.last_used = max(part.last_used for part in parts)
        self.device.replace(parts, whole)
        self.placement.replace(parts, whole)
        self.sessions.replace(parts, whole)
        whole.expires = -inf  # it was noted for the file only
        self.placement.expire(whole, expires)
        self.placement.marks.replace(mark, whole)
        self.counters.merges += 1
        self.counters.merged_rows += whole.rows

    # --------------------------------------------------------------------------------------------------- use

    def pin(self, extent: Extent) -> None:
        """Keep an extent's bytes where they are: a job or a copy is about to read them."""
        self.placement.pin(extent)

    def unpin(self, extent: Extent) -> None:
        """Undo one `pin`."""
        self.placement.unpin(extent)

    def touch(self, extent: Extent, now: float, spec: JobSpec) -> None:
        """Count a use of an extent by a job, which decides how long the extent is kept."""
        self.placement.touch(extent, now, spec.ttl, spec.volatile)

    def mark(self, path: Sequence[View], breakpoints: Sequence[Breakpoint], now: float) -> None:
        """Take note that a prompt with these breakpoints begins with a path: see `Marks.use`."""
        self.placement.marks.use(path, breakpoints, now)

    def need(self, extent: Extent, now: float, ttl: float | None, volatile: bool) -> None:
        """Keep an extent for `ttl` more seconds (None: for ever)."""
        self.placement.need(extent, now, ttl, volatile)

    @property
    def relief(self) -> bool:
        """Are there moves under way that will free host slots?"""
        return self.placement.relief

    # --------------------------------------------------------------------------------------- device contexts

    def retain(self, salt: str, tokens: bytes, rows: int, segment: DeviceSegment, lacks: Lack = WHOLE) -> Context:
        """Keep a running job's segment as a context, with rows of the extents that its tokens match."""
        context = self.device.retain(salt, tokens, rows, segment, lacks)
        self.device.contain(context, tuple(view.extent for view in self.index.match(salt, tokens).views))
        if self.index.prefixes and SharedPrefix(salt, tokens) in self.index.prefixes:
            self.device.hold(context)
        return context

    def trim(self, number: int) -> None:
        """Cut a context to the rows that the index knows, after a job's last rows were saved; free an empty one."""
        context = self.device.contexts.get(number)
        if context is not None:
            self.device.shorten(context, self.index.match(context.salt, context.tokens[: 4 * context.rows]).rows)
            if not context.rows:
                self.device.free(context)

    def drop_contexts(self) -> None:
        """Free every context that no step is copying from."""
        for context in list(self.device.contexts.values()):
            self.device.free(context)

    # ----------------------------------------------------------------------------------------- housekeeping

    def tidy(self, now: float, awaited: Callable[[], Container[Extent]]) -> None:
        """Before a step: keep budgets, pin registered rows that have come, and forget expired extents, except for
        those that queued jobs wait for (`awaited`)."""
        restored, self._restored = self._restored, False
        adopted, self._adopted = self._adopted, False
        self.placement.marks.sweep(now)
        if restored or adopted:
            self.placement.shrink()  # not before pins are known again
        self.disk.keep_budget(now)
        self.registered.refresh(now)
        self.placement.expiry.sweep(now, awaited)
        self.sessions.bury()
        if restored and self._warm_start:
            self.placement.warm_start.choose()

    def complete(self, done: MoveDone, now: float) -> None:
        """Take in a move that has ended."""
        self.placement.complete(done, now)

    def reset(self, whose: str | None) -> None:
        """Forget all rows that no job uses, and what tenants have registered or named (see `salts.covers`)."""
        self.registered.forget_all(whose)
        for context in list(self.device.contexts.values()):
            if covers(whose, context.salt) and not context.registered:
                self.device.free(context)
        self.sessions.forget_all(whose)
        self.placement.forget_all(whose)
        self._epochs.forget_all(whose)

    # --------------------------------------------------------------------------------------------- restarts

    def restore(self, records: Sequence[ExtentRecord], now: float) -> list[ExtentRecord]:
        """Take over the catalog's records, in any order. Returns those of no use, to be deleted."""
        if not self.capacity.disk_bytes:
            return []
        self._restored, self._restored_at = True, now
        return restore(records, self.index, self.placement, now, self._ttl)

    def adopt(self, salt: str, tokens: bytes, path: Sequence[Extent], ttl: float | None, now: float) -> list[Extent]:
        """Take over the extents of `path`, another engine's for `tokens`, whose rows are missing here, as if they were on
        disk. Returns the extents made."""
        taken = adopt(salt, tokens, path, self.index, self.placement, now, ttl)
        self._adopted = self._adopted or bool(taken)
        return taken

    def prefix_of(self, record: ExtentRecord) -> bytes | None:
        """Return the tokens before an extent's own; None, if its parent is gone."""
        return prefix_of(record, self.index)

    def take_notes(self, last: bool = False) -> list[tuple[str, str, str | None]]:
        """Return (kind, key, value) of all that a restart needs besides extents and that has changed since the last call;
        value None: delete the note. `last`: the plan ends."""
        epochs = [("epoch", key, value) for key, value in self._epochs.take_notes()]
        ghosts = [("ghost", key, value) for key, value in self.ghosts.take_notes()] if last else []
        marks = [("mark", key, value) for key, value in self.placement.marks.take_notes()] if last else []
        notes = ghosts + marks + epochs + [("session", key, value) for key, value in self.sessions.take_notes()]
        return notes + [("prefix", key, value) for key, value in self.registered.take_notes(len(notes))]

    def recall(self, notes: Mapping[str, dict[str, str]]) -> None:
        """Take over the notes of before a restart: key to value, by kind. After `restore`."""
        self._epochs.recall(notes.get("epoch", {}))
        self.registered.recall(notes.get("prefix", {}))  # conversations are pinned as far as that leaves room
        self.sessions.recall(notes.get("session", {}))
        self.ghosts.recall(notes.get("ghost", {}))
        self.placement.marks.recall(notes.get("mark", {}), self.index.extents, self._restored_at)

    # ------------------------------------------------------------------------------------------ looking on

    def stats(self, **jobs: int) -> Stats:
        """Numbers for metrics, together with those of the `jobs`. Changes nothing."""
        return Stats(
            **jobs,
            read_rate=self.cost.read_rate,
            fetch_rate=self.cost.fetch_rate,
            prefill_rate=self.cost.prefill_rate,
            read_buffer_layers=self.placement.loading.buffer_layers,
            read_buffer_bytes=self.placement.loading.buffer_bytes,
            sessions=len(self.sessions),
            prefixes=len(self.registered),
            prefix_rows=self.registered.rows,
            marked_rows=self.placement.marks.rows,
            extents=len(self.index.extents),
            contexts=len(self.device.contexts),
            device_rows=self.device.used,
            device_rows_total=self.device.budget,
            host_slots=self.host.pool.total - self.host.pool.free,
            host_slots_total=self.host.pool.total,
            disk_bytes=self.disk.used,
            disk_bytes_total=self.capacity.disk_bytes,
            disk_over_bytes=self.disk.over,
            counters=replace(self.counters),
        )

    def check(self, other_slots: list[int]) -> None:
        """Assert all that must hold between calls. `other_slots`: those that drafts and copies hold."""
        self.index.check()
        self.placement.check(other_slots, self._restored or self._adopted)


def _moved(breakpoints: Sequence[Breakpoint], prompt: bytes, rest: bytes) -> tuple[Breakpoint, ...]:
    """Move the breakpoints of a prompt that was cut to where their tokens are now. Those within what was cut are left out."""
    first = common_rows(prompt, 0, rest, 0, len(rest) // 4)
    dropped = (len(prompt) - len(rest)) // 4
    found = {}
    for each in breakpoints:
        rows = each.rows - dropped
        if each.rows <= first:
            found[each.rows] = each
        elif rows > 0 and prompt[4 * each.rows :] == rest[4 * rows :]:
            found[rows] = Breakpoint(rows, each.ttl_s)
    return tuple(found[rows] for rows in sorted(found))
