"""An extent as the plan sees it: what it is made of, where it lies, who needs it. It knows no policy and no tree.

One object is shared by the index (which owns `nodes`), the placement (whose parts own the tiers' states and `pins`),
the device (which owns `contexts`) and the jobs (which count themselves in `users`). Each writes its own fields only.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import inf
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Final, Literal, NamedTuple

from afterglow.plan.step import ExtentId, ExtentRecord, Kind

if TYPE_CHECKING:
    from afterglow.plan.sessions import Session
    from afterglow.plan.tree import Node

Key = tuple[int, int, int, int]  # a job's place in the queue; see `Job.key`
NONE: Final[Mapping[Any, None]] = MappingProxyType({})  # of the million extents that a cache may have, few have any
HostState = Literal["absent", "loading", "ready"]
DiskState = Literal["absent", "writing", "ready"]


@dataclass(frozen=True, slots=True)
class Capacity:
    """What there is to place things in.

    `device_rows`: rows of all device segments together. `host_slots`: blocks of the host arena. `disk_bytes`: budget
    of the disk tier, 0 switches it off. `file_bytes[b - 1]`: size of the file of an extent of `b` blocks (a table and
    not a function, so that a journal can hold it). `layers`: of the model; an extent's are loaded one after the other.
    `readers`: how many extents are loaded at a time.
    """

    device_rows: int
    host_slots: int
    disk_bytes: int = 0
    file_bytes: tuple[int, ...] = ()
    max_extent_rows: int = 1024
    block_rows: int = 64
    layers: int = 1
    readers: int = 1

    def __post_init__(self) -> None:
        if self.max_extent_rows % self.block_rows:
            raise ValueError(f"an extent of {self.max_extent_rows} rows is not whole blocks of {self.block_rows}")
        if self.disk_bytes and len(self.file_bytes) != self.max_extent_rows // self.block_rows:
            raise ValueError(f"file_bytes needs {self.max_extent_rows // self.block_rows} sizes, one per block count")

    def blocks(self, rows: int) -> int:
        """Blocks that `rows` rows take."""
        return -(-rows // self.block_rows)

    def round_up(self, rows: int) -> int:
        """`rows`, in whole blocks."""
        return self.blocks(rows) * self.block_rows

    def file_size(self, rows: int) -> int:
        """Bytes of the file of an extent of `rows` rows (0 where there is no disk tier)."""
        return self.file_bytes[self.blocks(rows) - 1] if self.file_bytes else 0


@dataclass(eq=False, slots=True)
class Extent:
    """An immutable run of tokens and the mutable facts about it.

    `first_row` is the number of tokens before it. `serial` numbers extents in the order in which this process met
    them: the last word in every comparison, so that nothing depends on addresses. A `dead` extent can be matched no
    more; it lingers until nobody reads or writes its bytes.
    """

    id: ExtentId
    salt: str
    kind: Kind
    tokens: bytes
    first_row: int
    file_bytes: int
    born: float
    serial: int
    parent: ExtentId | None = None
    parent_rows: int = 0
    last_used: float = 0.0
    hits: int = 0

    nodes: tuple[Node, ...] = ()  # in path order; nearly always one

    slots: tuple[int, ...] = ()
    host: HostState = "absent"
    disk: DiskState = "absent"
    load: int | None = None  # the Load under way
    store: int | None = None  # the Store under way
    evicting: bool = False  # its slots are free as soon as the Store is done
    pins: int = 0  # jobs that gather from it, or are about to
    dead: bool = False

    waiting: Sequence[Key] = ()  # of the queued jobs whose path goes through it, sorted
    prefetched: bool = False  # brought to host for a job that has not come yet
    left_host: float | None = None  # when it was last evicted from host

    expires: float = -inf  # when nobody needs it any more; whoever uses it puts that off
    volatile: bool = False  # all who have used it want it in memory only: it is not written to disk
    timed: bool = False  # will it be looked at when it may have expired?
    sessions: Mapping[Session, None] = field(
        default_factory=lambda: NONE
    )  # conversations with a name that have used it
    kept: int = 0  # those of them that are pinned: it does not leave the last tier

    users: int = 0  # jobs whose context goes through it; it must stay matchable
    contexts: Mapping[int, None] = field(
        default_factory=lambda: NONE
    )  # retained device contexts that contain rows of it

    @property
    def rows(self) -> int:
        return len(self.tokens) // 4

    @property
    def rank(self) -> Key | None:
        """The place in the queue of the first job that waits for it."""
        return self.waiting[0] if self.waiting else None

    @property
    def has_children(self) -> bool:
        """Can anything be matched only through it?"""
        return any(child.extent is not self for node in self.nodes for child in node.children())

    @property
    def above(self) -> Extent | None:
        """What it is matched through."""
        node = self.nodes[0].parent
        return node.extent if node is not None else None

    def record(self) -> ExtentRecord:
        """What the catalog keeps of it."""
        return ExtentRecord(
            self.id, self.parent, self.parent_rows, self.salt, self.kind, self.tokens, self.file_bytes,
            self.last_used, self.hits, self.expires if self.expires > -inf else inf,
        )  # fmt: skip


def with_key(keys: Mapping[Any, None], key: object) -> Mapping[Any, None]:
    """The keys and one more, in the same dictionary if there is one."""
    if not isinstance(keys, dict):
        return {key: None}
    keys[key] = None
    return keys


def without_key(keys: Mapping[Any, None], key: object) -> Mapping[Any, None]:
    """The keys but one, which has to be there."""
    assert isinstance(keys, dict)
    del keys[key]
    return keys or NONE


class View(NamedTuple):
    """Rows [start, stop) of an extent."""

    extent: Extent
    start: int
    stop: int
