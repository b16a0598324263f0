"""A job, its drafts and its stages: facts only, which the rest of this folder changes."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum
from typing import Literal, NamedTuple

from afterglow.errors import RequestError
from afterglow.plan.options import UNLIMITED
from afterglow.plan.prefix.extent import Extent, Key
from afterglow.plan.prefix.ghosts import Reason
from afterglow.plan.prefix.index import NO_MATCH, Match
from afterglow.plan.prefix.salts import approximate, client_salt
from afterglow.plan.prefix.truncation import Origin
from afterglow.plan.step import Gather, JobSpec
from afterglow.plan.tiers.device import WHOLE, DeviceSegment, Lack
from afterglow.request import ContextWindow

State = Literal["waiting", "loading", "prefilling", "decoding", "gone"]


class Wait(Enum):
    """What a job in the queue waits for."""

    PREFIX = "another job computes its next tokens"
    SLOTS = "host slots are being freed for its loads"
    SAVES = "host slots are being freed for its new rows"
    LOADS = "its extents are on their way from disk"
    DEVICE = "there is no room on the device"
    TURN = "there is no room in the step"


@dataclass(eq=False, slots=True)
class Draft:
    """Rows of one job that are being teed to host slots, and that become an extent when sealed and saved.

    `planned` rows have been planned; the first `rows` were committed (a failed step's never are). `teed` counts all rows
    that were ever planned, `answered` those whose `SaveDone` came: the slots stay the draft's until both agree.
    """

    id: int
    job: Job
    salt: str
    first_row: int
    slots: tuple[int, ...] = ()
    room: int = 0  # rows that these slots, and one extent, can hold
    planned: int = 0
    rows: int = 0
    teed: int = 0
    answered: int = 0
    bad_from: int | None = None  # the first row that could not be saved
    sealed: bool = False
    dead: bool = False

    @property
    def stop(self) -> int:
        return self.first_row + self.rows

    @property
    def bad(self) -> bool:
        """Could some committed row not be saved?"""
        return self.bad_from is not None and self.bad_from < self.rows

    @property
    def full(self) -> bool:
        """Does another row need another slot, or another draft?"""
        return self.planned >= self.room and not self.sealed

    @property
    def complete(self) -> bool:
        """Will it not change any more?"""
        return self.sealed and self.planned == self.rows and self.answered >= self.teed


class Stage(NamedTuple):
    """A part of a prefill: rows to gather, then rows [start, stop) to compute (`stop` None: to the end).

    Most jobs have one. Where loading takes longer than recomputing, the head of the rows on disk is computed in stages
    of its own while the tail is loaded.
    """

    gathers: tuple[Gather, ...]
    start: int
    stop: int | None

    @property
    def loads(self) -> list[int]:
        """Loads that some of its rows may still be waiting for."""
        return [gather.move for gather in self.gathers if gather.move is not None]


@dataclass(eq=False, slots=True)
class Job:
    """One request. `tokens` are its prompt and what it has generated; row i is token i's.

    `end`: tokens with which it ends, if not before. `target`: tokens to be prefilled in this stay on the device. `rows`:
    rows committed on the device. `covered`: rows that it found in the index or has put there.
    """

    spec: JobSpec
    seq: int
    turn: int  # the step in which it arrived
    tokens: bytearray
    state: State = "waiting"
    end: int = 0
    target: int = 0
    rows: int = 0
    covered: int = 0
    segment: DeviceSegment = field(default_factory=DeviceSegment)  # its room on the device
    lacks: Lack = WHOLE
    generated: int = 0
    saving: bool = False
    cancelled: bool = False
    disowned: bool = False  # its conversation was deleted meanwhile
    admitted: bool = False  # its caller has been told
    hits: tuple[int, int, int, int] = (0, 0, 0, 0)  # in device, host, disk and the shared tier
    pins: list[Extent] = field(default_factory=list)
    uses: dict[Extent, None] = field(default_factory=dict)  # extents that its context goes through
    drafts: list[Draft] = field(default_factory=list)  # not yet resolved, in row order
    context: int | None = None  # what it has left on the device
    stages: list[Stage] = field(default_factory=list)  # of its prefill that have not begun
    stop: int | None = None  # where the stage ends that has
    loads: dict[Extent, bool] = field(
        default_factory=dict
    )  # extents it has waited for, and whether from the shared tier
    cut: int | None = None  # match no further: host slots could not be had
    rounds: int = 0  # evictions waited for
    patient: bool = False  # its rows were late: it joins when all are there
    tried: int = -1  # the scheduler's version when it was last tried, and the outcome
    verdict: Wait | None = None
    again_at: float = 0.0  # when that may be another one although nothing has happened
    lessons: int = 0  # from how many passes what computing takes had been learned then
    blocked_since: float | None = None  # when it began to wait for slots for its new rows
    waited: bool = False  # for another job's prefill
    dropped: int = 0  # tokens of the caller's prompt that were left out
    head: int = UNLIMITED  # rows before the first token that was left out: its client's other prompts may have them too
    origin: Origin | None = None  # where the rest's rows may be, before they have been copied
    grown: int = 0  # rows up to its last breakpoint, when they have just been stored
    copies: list[int] = field(default_factory=list)  # moves that do so
    missed: tuple[Reason, int] = ("cold", 0)  # why its match ended where it did, and the rows after that
    carried: int = 0  # copied rows that were on disk
    lingering: bool = False  # its last run has not ended: it is handed out again
    approximate: bool = False  # its rows were computed over a selection: no other job may use them
    on_disk: tuple[int, ...] = ()  # the sizes of the extents that it selects from there
    path: tuple[Extent, ...] = ()  # what it was last seen to wait for; for looking ahead only
    match: Match = NO_MATCH  # and where that ended
    whole: int = -1  # the count of rows that had left host when all its rows were there, or on their way
    owner: tuple[str, str] | None = field(init=False)  # the conversation that it belongs to
    conversation: tuple[str, str] | None = field(init=False)  # the same, if its turns are to run one after the other

    def __post_init__(self) -> None:
        session = self.spec.session
        self.owner = (client_salt(self.spec.salt), session) if session is not None else None
        self.conversation = None if self.spec.aside else self.owner

    @property
    def salt(self) -> str:
        """Return the salt under which the rows lie that it computes."""
        return approximate(self.spec.salt) if self.approximate else self.spec.salt

    @property
    def length(self) -> int:
        return len(self.tokens) // 4

    @property
    def capacity(self) -> int:
        """Rows that may be on the device."""
        return self.segment.capacity

    def most_of(self, other: Job) -> int:
        """Return how many of another job's first rows it may take for its own where the tokens are equal; none of a job that selects."""
        if other.approximate:
            return 0
        if self.spec.salt == other.spec.salt:
            return UNLIMITED
        return min(self.head, other.head) if client_salt(self.spec.salt) == client_salt(other.spec.salt) else 0

    @property
    def remaining(self) -> int:
        """Tokens it may still generate."""
        return self.spec.max_tokens - self.generated

    @property
    def running(self) -> bool:
        return self.state in ("prefilling", "decoding")

    @property
    def has_seat(self) -> bool:
        """Is a place in the batch kept for it, while its rows come? Not while they are late."""
        return self.state == "loading" and not self.patient

    @property
    def key(self) -> Key:
        """Its place in the queue: priority, then order of arrival, which a job keeps when it is sent back. Jobs that
        arrived together and have equal hints go side by side."""
        return (self.spec.priority, self.turn, self.spec.tie, self.seq)

    @property
    def reach(self) -> int:
        """Rows that are in the index, or will be unless a draft fails."""
        row = self.covered
        for draft in self.drafts:
            if draft.rows and (draft.first_row != row or draft.dead or draft.bad):
                break
            row += draft.rows
        return row

    @property
    def promised(self) -> int:
        """Count the rows that it will have put into the index when its prefill and its saves have ended."""
        if self.state == "prefilling" and self.saving:
            return self.target
        kept = (draft for draft in self.drafts if draft.rows and draft.sealed and not (draft.dead or draft.bad))
        return max((draft.stop for draft in kept), default=0)


def refuse_impossible(spec: JobSpec, window: ContextWindow, device_rows: int) -> None:
    """Raise `RequestError` for a job that could never run."""
    rows = len(spec.prompt) // 4
    first = min(1, spec.max_tokens)  # room for an answer, if there is to be one
    if rows == 0 or len(spec.prompt) % 4:
        raise RequestError("the prompt is empty", param="prompt")
    window.refuse(rows, spec.max_tokens)
    if rows + first > device_rows:
        raise RequestError(
            f"the prompt has {rows} tokens; the device cache holds {device_rows}: enlarge --device-cache",
            param="prompt",
            code="context_length_exceeded",
        )
