"""The values that pass between the plan and those who carry it out. They do nothing.

One iteration of the engine (and, on the same code, of a simulator):

    step   = scheduler.schedule(now)                    what to move and what to compute
    store.start(step.moves)                             threads begin
    result = runner.run(step)                           one sampled token per job that asked for one
    events = scheduler.commit(step, result, done, now)  what the callers are told

Row i of a job is its i-th token; a block is 64 rows of one extent, [64 b, 64 b + 64), all layers, keys and values; a slot is a block's
place in the host arena.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import inf
from typing import Literal, NamedTuple

from afterglow.request import Breakpoint

ExtentId = str  # hex; see `plan.prefix.index.extent_id`
Kind = Literal["exact", "session", "approx"]
Tier = Literal["device", "host", "disk"]

DEMAND, PREFETCH, SAVE, BACKGROUND = range(4)  # priorities of moves: the lower goes first


@dataclass(frozen=True, slots=True)
class ExtentRecord:
    """A stored extent's facts, all durable in the catalog.

    The extent's rows follow the first `parent_rows` rows of `parent` (None: the start of a conversation). `tokens` is its own rows' token
    ids, 4 bytes each, little-endian. `file_bytes` is its size on disk. `expires`: when no job needs it any more; infinity: no job has
    named an end."""

    id: ExtentId
    parent: ExtentId | None
    parent_rows: int
    salt: str
    kind: Kind
    tokens: bytes
    file_bytes: int
    last_used: float
    hits: int = 0
    expires: float = inf

    @property
    def rows(self) -> int:
        return len(self.tokens) // 4


class Use(NamedTuple):
    """What the catalog is to know of a stored extent that was used."""

    extent: ExtentId
    last_used: float
    hits: int
    expires: float


# ---------------------------------------------------------------------------------------------- moves


class Load(NamedTuple):
    """Disk -> host. Layers complete in order; `KVStore.wait_layer(move, layer)` waits for one.

    `ahead`: how many layers may be read before `KVStore.release(move)` is called, as with a read buffer of that many layers
    (CachedAttention §3.2.1). None: all; 0: none. `most_s`: seconds after which it is given up, unless a job waits for it by then: it
    is asked for to see how fast the tier is. `skip`: blocks at the beginning that layers with a sliding window leave out: no query is
    to see their rows there."""

    move: int
    extent: ExtentId
    rows: int
    slots: tuple[int, ...]
    priority: int = DEMAND
    why: str = "demand"
    ahead: int | None = None
    most_s: float | None = None
    skip: int = 0


class Store(NamedTuple):
    """Host -> disk. The slots stay readable and are not reused before the completion."""

    move: int
    record: ExtentRecord
    slots: tuple[int, ...]
    priority: int = SAVE
    why: str = "evict"


@dataclass(frozen=True, slots=True)
class Drop:
    """Remove an extent from disk: catalog row first, then the file."""

    move: int
    extent: ExtentId
    why: str = "evict"
    priority: int = BACKGROUND


@dataclass(frozen=True, slots=True)
class Copy:
    """Host -> host: parts of extents become an extent of their own.

    Each piece is (slots of a whole extent, first row, stop row). The pieces one after another become rows [0, rows) of the blocks in
    `slots`, in all layers; the rest of the last block is zeroed. No slot is both read and written, and the pieces' slots are full
    before the move is handed out."""

    move: int
    pieces: tuple[tuple[tuple[int, ...], int, int], ...]
    slots: tuple[int, ...]
    rows: int
    priority: int = DEMAND


Move = Load | Store | Drop | Copy


class MoveDone(NamedTuple):
    """A move has ended. `slots_busy`: a timed-out read may still write into the slots; a second `MoveDone` with `slots_busy=False`
    follows when it no longer can. `bytes` and `seconds` feed the measured rates. `why` it failed, in a word: damage, missing,
    no_space, io, timeout, refused (not even tried) or slow (given up after its `most_s`; the bytes are those that had come)."""

    move: int
    ok: bool
    bytes: int = 0
    seconds: float = 0.0
    error: str | None = None
    slots_busy: bool = False
    why: str | None = None


class Lost(NamedTuple):
    """What ends with the process, because it is in host only."""

    extents: int
    rows: int
    bytes: int


class SaveDone(NamedTuple):
    """All layers of rows [first_row, first_row + rows) of a draft are in its host slots (or could not be: `ok`).

    Every row of every `Save` that was handed out is answered exactly once, in any grouping; those of a failed job, of
    a cancelled one and of a step that was never run too (with `ok=False`). Until then the slots stay the draft's.
    """

    draft: int
    first_row: int
    rows: int
    ok: bool = True


TransferDone = MoveDone | SaveDone


# ----------------------------------------------------------------------------------------------- step


class Gather(NamedTuple):
    """Rows [start, stop) of an extent that lie, or are about to lie, in host slots (of the *whole* extent)."""

    extent: ExtentId
    start: int
    stop: int
    slots: tuple[int, ...]
    move: int | None  # the Load that fills the slots; None: they are full


class Selectable(NamedTuple):
    """Rows [start, stop) of an extent of `rows`, from which a job takes important rows: from its host `slots`, or,
    where it has none, in chunks from disk."""

    extent: ExtentId
    rows: int
    start: int
    stop: int
    slots: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Admit:
    """How a job's context comes to the device before its first forward pass.

    Rows [0, device_rows) come from the retained device context `context`: taken over (`take`, the context is gone afterwards, its rows
    beyond `device_rows` forgotten) or shared, with a copy of a page that is not full. With `selectable` (SPEC) none of its prefix
    comes as a whole; the job's own rows begin behind those views. `fellow`: the rows [0, device_rows), whole blocks, are those of a
    job that runs. Of the prefix the first `exact` rows are a registered prompt's: they are always attended to."""

    context: int | None
    take: bool
    device_rows: int
    selectable: tuple[Selectable, ...] = ()
    exact: int = 0
    fellow: int | None = None


class Save(NamedTuple):
    """New rows of a job to be teed, un-rotated, into host slots.

    Rows [job_row, job_row + rows) of the job become rows [draft_row, draft_row + rows) of draft `draft`, whose slots are `slots` so far.
    """

    draft: int
    slots: tuple[int, ...]
    draft_row: int
    job_row: int
    rows: int


class Run(NamedTuple):
    """One job's share of a step: compute `tokens` at rows [start, start + len(tokens)).

    `gathers` bring in, from host and in order, the rows before `start` that are not on the device yet; mostly in a job's first run, but
    where rows are recomputed while those behind them are loaded, also later. `sample`: draw the next token from the last row.
    `capacity`: rows that the job's device segment may hold from now on (already counted against the budget; it never shrinks while
    the job runs). The last `guessed` of `tokens` are guesses of what will be drawn: a token is drawn from the last of the job's own
    rows as well, and from the row of each guess that was right."""

    job: int
    start: int
    tokens: tuple[int, ...]
    sample: bool
    capacity: int
    admit: Admit | None = None
    gathers: tuple[Gather, ...] = ()
    saves: tuple[Save, ...] = ()
    guessed: int = 0

    @property
    def own(self) -> int:
        """Tokens that are the job's, without guesses."""
        return len(self.tokens) - self.guessed


class RowsAhead(NamedTuple):
    """What the next job is going to gather if it joins as things are: rows from `first` on of its context, from full host slots,
    which stay as they are for as long as steps name them. The first `layers` layers may be copied to a buffer on the device before."""

    job: int
    first: int
    gathers: tuple[Gather, ...]
    layers: int

    @property
    def rows(self) -> int:
        return sum(gather.stop - gather.start for gather in self.gathers)

    def ends_with(self, first: int, gathers: tuple[Gather, ...]) -> bool:
        """Tell whether what is gathered from row `first` of a context on is the same, without rows that have come to the device since."""
        left, at = [], self.first
        for gather in self.gathers:
            left.append(gather._replace(start=gather.start + max(0, first - at)))
            at += gather.stop - gather.start
        return self.first <= first and tuple(each for each in left if each.start < each.stop) == gathers


class Share(NamedTuple):
    """Rows [start, stop) are the same for all these jobs. Of nested shares the outer one comes first, and the inner one
    begins where it ends."""

    jobs: tuple[int, ...]
    start: int
    stop: int


@dataclass(frozen=True, slots=True)
class Release:
    """A job has left the device: flush its teed rows, carry out `saves`, then keep its first `rows` rows as retained context `context`, or
    free them (`context` is None). The same job may be admitted anew, even in the same step."""

    job: int
    context: int | None
    rows: int
    saves: tuple[Save, ...] = ()


@dataclass(frozen=True, slots=True)
class Step:
    """Carried out in this order: releases, frees (retained contexts), moves, runs.

    `wake_at`: with nothing to run, when to look again (None: only when something arrives or completes). `repeat`: if nothing arrives or
    completes before, it may be carried out so often before it is committed: all its runs decode, and each time would lead to the same
    step, one row further, with nothing to be released or freed. `shares`: what its jobs have in common. `decodes_on`: the next
    step is expected to be these runs one row further, or some of them: it may be launched before their tokens are known."""

    number: int
    releases: tuple[Release, ...] = ()
    frees: tuple[int, ...] = ()
    moves: tuple[Move, ...] = ()
    urged: tuple[int, ...] = ()  # loads under way that a job waits for now: they go before other moves
    runs: tuple[Run, ...] = ()
    wake_at: float | None = None
    repeat: int = 1
    shares: tuple[Share, ...] = ()
    ahead: RowsAhead | None = None
    decodes_on: bool = False

    @property
    def idle(self) -> bool:
        return not (self.releases or self.frees or self.moves or self.urged or self.runs)


class SelectingPass(NamedTuple):
    """Tell the seconds of a pass that selected, without what it waited for, the bytes that it read from disk, and the seconds that it
    waited for these."""

    seconds: float
    bytes: int
    waited: float


@dataclass(frozen=True, slots=True)
class StepResult:
    """`tokens[job]` for each run with `sample`, the last one that was drawn: before it the first `accepted[job]` guesses of the run were
    (none, where it is not in there). The rows of the others are void: they were not saved, and no `SaveDone` tells of them.
    `failed[job]`: the extent whose layers did not arrive (the job's rows of this step are void). A step of one row each that was
    carried out `repeats` times may instead say in `drawn` what each job has drawn, uint32 little-endian; then no events tell of the
    tokens of jobs that decode on. `exhausted`: jobs whose runs the device had no memory for, the newest ones; their rows of this step
    are void too. `waiting`: jobs that select (SPEC) whose runs have not ended, since what they need is on its way from disk or others
    were not to wait for them: the same runs, but for `admit`, are handed out again, and go on. `late`: those of `failed` whose layers
    are still on their way, and were not waited for any longer because others waited. `selecting`: passes of jobs that select, whose
    runs have ended."""

    tokens: dict[int, int]
    failed: dict[int, ExtentId]
    repeats: int = 1
    drawn: Mapping[int, bytes] = field(default_factory=dict)
    exhausted: Sequence[int] = ()
    waiting: Sequence[int] = ()
    late: Sequence[int] = ()
    accepted: dict[int, int] = field(default_factory=dict)
    selecting: dict[int, SelectingPass] = field(default_factory=dict)


# ------------------------------------------------------------------------------------ jobs in and events out


@dataclass(frozen=True, slots=True)
class JobSpec:
    """A job as the plan sees it. `stop_tokens` end it (they count as generated). `read`/`write`: may it use, and
    leave, cached rows. `salt` is already an identifier (a digest), never the tenant's secret."""

    job: int
    prompt: bytes  # uint32 little-endian token ids
    max_tokens: int
    stop_tokens: frozenset[int] = frozenset()
    salt: str = ""
    read: bool = True
    write: bool = True
    priority: int = 0
    session: str | None = None  # the conversation's name: its turns run one after the other
    ttl: float | None = None  # seconds for which its rows are kept after the last use; None: for ever
    volatile: bool = False  # its rows are not written to disk, unless another job needs them there
    truncation: bool = False  # leave out the oldest turns where the prompt does not fit (see `plan.prefix.truncation`)
    turns: tuple[int, ...] = ()  # prompt rows at which turns end, the first one the system prompt
    discard: tuple[tuple[int, int], ...] = ()  # prompt rows [start, stop) to leave out in any case (with `truncation`)
    scores: tuple[float, ...] = ()  # how important the first rows are, where `Scheduler.outgrown` has asked for it
    tie: int = 0  # of jobs that arrive together, those with equal values are served side by side
    selects: bool = False  # take the cached prefix's important rows where that pays, and leave nothing (SPEC)
    retention: float = 0.0  # the share of these rows; 0: it selects whatever that takes
    renews: bool = False  # and go on taking while it decodes: what it takes from stays where it is
    breakpoints: tuple[Breakpoint, ...] = ()  # where extents end; what lies before is kept longer (`tiers.marks`)
    aside: bool = False  # the engine's own: what it leaves is its conversation's, but no turn of that waits for it
    patient: bool = False  # alone, it is computed in short passes, so that a job that comes need not wait for long
    plain: bool = False  # a token is all that it asks of a row, and its next row can be computed before that is known


@dataclass(frozen=True, slots=True)
class Admitted:
    """A job has run its first step: where its cached prompt tokens were when it was scheduled. Told once per job, and only after the
    loads have come, so that it is true. `dropped` tokens of the prompt were left out; `embedded`: and those that remained are such as
    had seen them, at new positions. `missed` tokens were not in the cache, for the reason `why`; tokens neither cached nor missed
    were cached, but are computed. `shared` came from other engines."""

    job: int
    device: int
    host: int
    disk: int
    dropped: int = 0
    embedded: bool = False
    why: str = "cold"
    missed: int = 0
    shared: int = 0


@dataclass(frozen=True, slots=True)
class Emitted:
    """A job drew a token; `finish` is set with its last one."""

    job: int
    token: int | None
    finish: Literal["stop", "length", "cancelled", "no_memory"] | None


Event = Admitted | Emitted
