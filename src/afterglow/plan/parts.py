"""All parts of the plan put together, and what may be asked of what is cached, jobs and steps aside."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Literal

from afterglow.plan.admission import Admission, Source
from afterglow.plan.batch import Batch
from afterglow.plan.compaction import Compaction
from afterglow.plan.cost import Cost
from afterglow.plan.device import Device
from afterglow.plan.drafts import Drafts
from afterglow.plan.extent import Capacity, Extent
from afterglow.plan.filling import Filling
from afterglow.plan.ghosts import Ghosts
from afterglow.plan.index import Index
from afterglow.plan.jobs import JobQueue
from afterglow.plan.lookahead import LookAhead
from afterglow.plan.merging import SMALL, Merging
from afterglow.plan.placement import Placement
from afterglow.plan.policy import POLICIES
from afterglow.plan.registered import PrefixState, Registered
from afterglow.plan.restore import adopt, prefix_of, restore
from afterglow.plan.results import Results
from afterglow.plan.roster import Roster
from afterglow.plan.salts import covers
from afterglow.plan.sessions import Sessions, SessionState
from afterglow.plan.stats import Counters
from afterglow.plan.step import ExtentRecord, Use
from afterglow.plan.truncation import Epochs, Rules, TruncationPolicy

WritePolicy = Literal["write_back", "write_through", "write_through_selective"]
Preload = Literal["layerwise", "whole"]  # may a job join while its layers are on their way?


class Parts:
    """One engine's parts."""

    def __init__(
        self,
        capacity: Capacity,
        *,
        policy: str = "lru",
        write_policy: WritePolicy = "write_back",
        prefill_chunk: int = 256,
        max_batch: int = 24,
        max_model_len: int = 2**31,
        digest: str = "",
        source: Source = "auto",
        preload: Preload = "layerwise",
        read_buffer: int | None = None,
        relative_positions: bool = True,
        truncation_ratio: float = 0.5,
        truncation_policy: TruncationPolicy = "oldest",
        tenant_quota: int | None = None,
        tenant_pins: float | None = None,
        warm_start: bool = False,
        ttl: float | None = None,
        retain: bool = True,
        relay: bool = False,
        small_rows: int = SMALL,
    ) -> None:
        """`retain`: do contexts of jobs that have ended stay on the device while there is room? `relay`: say what the jobs
        of a step have in common. `ttl`: of what a restart finds on disk and nobody has named an end of (jobs bring theirs).
        `small_rows`: extents with fewer rows are merged at the ends of conversations; 0: none."""
        self.capacity = capacity
        self.max_model_len = max_model_len
        self._counters = counters = Counters()
        self._index = index = Index()
        self._device = device = Device(capacity, counters)
        self._cost = cost = Cost(capacity.layers, capacity.readers)
        self._epochs = Epochs()
        self.relative = relative_positions
        longest = device.longest = min(max_model_len, device.budget)
        self.rules = Rules(longest, truncation_ratio, truncation_policy)
        self._write_through = write_policy == "write_through" and capacity.disk_bytes > 0
        selective = write_policy == "write_through_selective" and capacity.disk_bytes > 0
        row = POLICIES[policy]
        self._ghosts = ghosts = Ghosts()
        self._placement = placement = Placement(
            capacity, row, index, device, counters, cost, ghosts, selective, tenant_quota, tenant_pins
        )
        placement.read_buffer = read_buffer
        self._sessions = Sessions(index, placement)
        self._registered = Registered(capacity, index, placement, device, tenant_quota)
        self._drafts = drafts = Drafts(capacity, index, placement, device, counters, digest, self._write_through)
        self._merging = merging = Merging(
            capacity, index, placement, device, self._sessions, counters, digest, self._write_through, small_rows
        )
        self._batch = batch = Batch(capacity, index, device, drafts, self._sessions, merging)
        self._compaction = compaction = Compaction(capacity, index, placement, digest, drafts.next_serial)
        self._admission = admission = Admission(
            capacity, index, placement, device, counters, cost, compaction, ghosts, batch.promising, source,
            preload == "whole",
        )  # fmt: skip
        self._queue = queue = JobQueue()
        self._ahead = LookAhead(capacity, index, placement, queue, row.looks_ahead, longest)
        self._roster = roster = Roster(queue, batch, self._ahead, admission, counters, max_model_len, retain)
        self._jobs = roster.jobs
        self._filling = Filling(
            roster, queue, batch, device, drafts, admission, compaction, counters, cost, prefill_chunk, max_batch,
            preload == "layerwise",
        )  # fmt: skip
        self._results = Results(roster, batch, drafts, admission, index, placement, counters, cost)
        self._max_batch = max_batch
        self._warm_start = warm_start
        self._ttl = ttl
        self._relay = relay
        self._restored = False  # since the last step

    # ------------------------------------------------------------------------------------- what is cached

    def restore(self, records: Sequence[ExtentRecord], now: float) -> list[ExtentRecord]:
        """Take over what the catalog says is on disk, in any order. Returns those of no use, to be deleted."""
        if not self.capacity.disk_bytes:
            return []
        self._restored = True
        return restore(records, self._index, self._placement, self._drafts, now, self._ttl)

    def adopt(self, salt: str, tokens: bytes, path: Sequence[Extent], ttl: float | None, now: float) -> list[Extent]:
        """Take over those of `path`, another engine's extents of `tokens`, whose rows are not there, as if they were on
        the disk; at any time. Returns its own."""
        taken = adopt(salt, tokens, path, self._index, self._placement, self._drafts, now, ttl)
        if taken:
            self._restored = True
            self._roster.version += 1
        return taken

    def prefix_of(self, record: ExtentRecord) -> bytes | None:
        """The tokens before an extent of its own; None, if what it hangs below is gone."""
        return prefix_of(record, self._index)

    def reset(self, now: float, whose: str | None = None) -> None:
        """Forget every cached row that nobody is using, in all tiers, and the prefixes that tenants have registered: of one
        salt, of one tenant (see `salts.covers`) or of all; the moves come with the next step. The operator's prefixes
        stay."""
        self._registered.forget_all(whose)
        for context in list(self._device.contexts.values()):
            if covers(whose, context.salt) and not context.held:
                self._device.free(context)
        self._batch.forget_tails(whose)
        self._merging.cancel()
        self._sessions.forget_all(whose)
        self._placement.forget_all(whose)
        self._epochs.forget_all(whose)
        self._roster.version += 1

    def baseline(self, preload: Preload, read_buffer: int | None, source: Source) -> None:
        """Change how jobs come to their rows, between jobs (A21)."""
        self._admission.source = source
        self._admission.whole, self._filling.layerwise = preload == "whole", preload == "layerwise"
        self._placement.read_buffer = read_buffer
        self._roster.version += 1

    def drop_contexts(self) -> None:
        """Free every retained device context that no step is copying from; the next step says so."""
        for context in list(self._device.contexts.values()):
            self._device.free(context)
        self._roster.version += 1

    def take_notes(self, last: bool = False) -> list[tuple[str, str, str | None]]:
        """(kind, key, value) of what is to be remembered over restarts besides extents; None: no more. `last`: the plan
        ends."""
        epochs = [("epoch", key, value) for key, value in self._epochs.take_notes()]
        ghosts = [("ghost", key, value) for key, value in self._ghosts.take_notes()] if last else []
        notes = ghosts + epochs + [("session", key, value) for key, value in self._sessions.take_notes()]
        return notes + [("prefix", key, value) for key, value in self._registered.take_notes(len(notes))]

    def recall(self, notes: Mapping[str, dict[str, str]]) -> None:
        """Take over what `take_notes` has said before a restart: key to value, by kind. After `restore`."""
        self._epochs.recall(notes.get("epoch", {}))
        self._registered.recall(notes.get("prefix", {}))  # conversations are pinned as far as that leaves room
        self._sessions.recall(notes.get("session", {}))
        self._ghosts.recall(notes.get("ghost", {}))

    def sessions(self, tenant: str) -> list[SessionState]:
        """One tenant's conversations that have a name, the last used first."""
        return self._sessions.listing(tenant)

    def pin_session(self, tenant: str, name: str, pinned: bool) -> bool:
        """Keep a conversation in some tier whatever happens, or no longer. False: there is none of that name."""
        return self._sessions.pin(tenant, name, pinned)

    def forget_session(self, tenant: str, name: str) -> bool:
        """Remove a conversation and what only it has used from all tiers; what its turns still use, when they end.
        False: there is none of that name."""
        self._merging.cancel()
        if not self._sessions.forget(tenant, name):
            return False
        self._batch.disown(tenant, name, self._jobs.values())
        self._roster.version += 1
        return True

    def register_prefix(self, salt: str, name: str, tokens: bytes, about: str, now: float) -> None:
        """Keep the rows of these tokens from now on, as soon as some job has computed them, for all jobs of a tenant
        whose prompts begin so; under salt `OPERATOR` of all tenants. `about`: to be remembered with them.

        Errors: RequestError, where they are too many.
        """
        self._registered.register(salt, name, tokens, about, now)
        self._roster.version += 1

    def forget_prefix(self, salt: str, name: str) -> bool:
        """Keep a registered prefix no longer than anything else. False: there is none of that name."""
        self._roster.version += 1
        return self._registered.forget(salt, name)

    def prefixes(self) -> dict[str, list[PrefixState]]:
        """What is registered, by salt."""
        return self._registered.listing()

    def take_touched(self) -> list[Use]:
        """The extents on disk that were used since the last call, for the catalog."""
        return self._placement.take_touched()
