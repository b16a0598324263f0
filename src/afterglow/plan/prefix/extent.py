"""An extent as the plan sees it: what it is made of, where it lies, who needs it. It knows no policy and no tree.

One object is shared by the index (which owns `nodes`), the placement (whose parts own the tiers' states and `pins`),
the device (which owns `contexts`) and the jobs (which count themselves in `ref_count`). Each writes its own fields only.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import inf
from types import MappingProxyType
from typing import Any, Final, Literal, NamedTuple

from afterglow.plan.step import ExtentId, ExtentRecord, Kind

Key = tuple[int, int, int, int]  # a job's place in the queue; see `Job.key`
NONE: Final[Mapping[Any, None]] = MappingProxyType({})  # of the million extents that a cache may have, few have any
HostState = Literal["absent", "loading", "partial", "ready"]  # partial: rows are lacking; the file has them
DiskState = Literal["absent", "writing", "ready"]


@dataclass(slots=True)
class ExtentMark:
    """Says that an extent is to be kept before unmarked ones, for `ttl` seconds after its last use. `border`: a breakpoint is at
    its end. In a tier a mark counts only within its tenant's share (see `tiers.marks`)."""

    used: float
    ttl: float
    border: bool
    in_host: bool = field(default=False, compare=False)  # does it count there?
    on_disk: bool = field(default=False, compare=False)

    @property
    def end(self) -> float:
        return self.used + self.ttl


@dataclass(eq=False, slots=True)
class Extent:
    """An immutable run of tokens and the mutable facts about it.

    `first_row` is the number of tokens before it. `serial` numbers extents in the order in which this process met
    them: the last word in every comparison, so that nothing depends on addresses. A `dead` extent can be matched no
    more; it lingers until its bytes are read and written no more.
    """

    id: ExtentId
    salt: str
    kind: Kind
    tokens: bytes
    first_row: int
    file_bytes: int
    created_at: float
    serial: int
    parent: ExtentId | None = None
    parent_rows: int = 0
    last_used: float = 0.0
    hits: int = 0

    nodes: tuple[Node, ...] = ()  # in path order; nearly always one

    slots: tuple[int, ...] = ()
    host: HostState = "absent"
    disk: DiskState = "absent"
    lacks: int = 0  # rows at its beginning that its copy in host, or the Load under way, lacks in layers with a window
    load: int | None = None  # the Load under way
    store: int | None = None  # the Store under way
    evicting: bool = False  # its slots are free as soon as the Store is done
    pins: int = 0  # jobs that gather from it, or are about to
    read_ahead: bool = False  # is one of its pins that of a job whose turn has not come?
    dead: bool = False

    waiting: Sequence[Key] = ()  # of the queued jobs whose path goes through it, sorted
    prefetched: bool = False  # brought to host for a job that has not come yet
    left_host: float | None = None  # when it was last evicted from host

    expires: float = -inf  # when no job needs it any more; each use puts that off
    volatile: bool = False  # all who have used it want it in memory only: it is not written to disk
    in_expiry_heap: bool = False  # will it be looked at when it may have expired?
    sessions: Mapping[Session, None] = field(
        default_factory=lambda: NONE
    )  # conversations with a name that have used it
    pin_count: int = 0  # pinned conversations that have used it: it does not leave the last tier

    mark: ExtentMark | None = None  # while it lives

    ref_count: int = 0  # jobs whose context goes through it; it must stay matchable
    contexts: Mapping[int, None] = field(default_factory=lambda: NONE)  # retained device contexts that contain its rows

    @property
    def rows(self) -> int:
        return len(self.tokens) // 4

    @property
    def in_host(self) -> bool:
        """Do its slots hold rows that may be gathered: all of them, or those that its `lacks` leaves?"""
        return self.host in ("ready", "partial")

    @property
    def is_read(self) -> bool:
        """Is it pinned, but for a job that may as well find it gone when its turn comes?"""
        return self.pins > self.read_ahead

    @property
    def rank(self) -> Key | None:
        """Return the place in the queue of the first job that waits for it."""
        return self.waiting[0] if self.waiting else None

    @property
    def kept_in_host(self) -> bool:
        """Does a mark keep it in host?"""
        return self.mark is not None and self.mark.in_host

    @property
    def kept_on_disk(self) -> bool:
        """Does a mark keep it on disk?"""
        return self.mark is not None and self.mark.on_disk

    @property
    def has_children(self) -> bool:
        """Can anything be matched only through it?"""
        return any(child.extent is not self for node in self.nodes for child in node.children())

    @property
    def above(self) -> Extent | None:
        """Return the extent that it is matched through."""
        node = self.nodes[0].parent
        return node.extent if node is not None else None

    def record(self) -> ExtentRecord:
        """Return the catalog's record of the extent."""
        return ExtentRecord(
            self.id, self.parent, self.parent_rows, self.salt, self.kind, self.tokens, self.file_bytes,
            self.last_used, self.hits, self.expires if self.expires > -inf else inf,
        )  # fmt: skip


def with_key(keys: Mapping[Any, None], key: object) -> Mapping[Any, None]:
    """Add a key; in the same dictionary if there is one."""
    if not isinstance(keys, dict):
        return {key: None}
    keys[key] = None
    return keys


def without_key(keys: Mapping[Any, None], key: object) -> Mapping[Any, None]:
    """Remove a key, which has to be there."""
    assert isinstance(keys, dict)
    del keys[key]
    return keys or NONE


class View(NamedTuple):
    """Rows [start, stop) of an extent."""

    extent: Extent
    start: int
    stop: int

    def forks(self) -> bool:
        """Do prompts go on from its last row in several ways?"""
        return any(node.stop == self.stop and len(node.children()) > 1 for node in self.extent.nodes)

    def shows(self, first: int) -> bool:
        """Has the copy in host, or the one that comes, what is seen if windows show the extent's rows from `first` on?"""
        return first >= self.stop or max(first, self.start) >= self.extent.lacks


class Node:
    """A view in the tree. The root of a salt has no extent and no rows."""

    # Most nodes have one child, and a cache has millions of nodes: a dictionary is made for the second only.
    __slots__ = ("_below", "extent", "parent", "start", "stop")

    def __init__(self, extent: Extent | None, start: int, stop: int, parent: Node | None) -> None:
        self.extent = extent
        self.start = start
        self.stop = stop
        self.parent = parent
        self._below: Node | dict[bytes, Node] | None = None

    @property
    def rows(self) -> int:
        return self.stop - self.start

    def key(self) -> bytes:
        """Return the first token of its edge, after their salt where approximate rows go on from exact ones."""
        extent, above = self.extent, self.parent.extent if self.parent is not None else None
        assert extent is not None
        first = extent.tokens[4 * self.start : 4 * self.start + 4]
        goes_apart = extent.kind == "approx" and above is not None and above.kind == "exact"
        return extent.salt.encode() + first if goes_apart else first

    def child(self, first: bytes) -> Node | None:
        """Return the child whose edge begins with a token."""
        below = self._below
        if isinstance(below, dict):
            return below.get(first)
        return below if below is not None and below.key() == first else None

    def children(self) -> tuple[Node, ...]:
        """Return all children, the oldest first."""
        below = self._below
        if isinstance(below, dict):
            return tuple(below.values())
        return () if below is None else (below,)

    def adopt(self, child: Node) -> None:
        """Hang a node below this one."""
        below, child.parent = self._below, self
        if below is None:
            self._below = child
        elif isinstance(below, dict):
            below[child.key()] = child
        else:
            self._below = {below.key(): below, child.key(): child}

    def disown(self, child: Node) -> None:
        """Take a child away."""
        if isinstance(self._below, dict):
            del self._below[child.key()]
            if len(self._below) == 1:
                (self._below,) = self._below.values()
        else:
            assert self._below is child
            self._below = None

    def take_children_of(self, other: Node) -> None:
        """Replace the children by those of another node, which has none then."""
        self._below, other._below = other._below, None
        for child in self.children():
            child.parent = self


class Root(Node):
    """The root of the tree of this name."""

    __slots__ = ("tree",)

    def __init__(self, tree: str) -> None:
        super().__init__(None, 0, 0, None)
        self.tree = tree


@dataclass(eq=False, slots=True)
class Session:
    """One conversation. `extents`: all that its turns have used and that are still there, with the row before which they ended."""

    tenant: str
    name: str
    used: float
    pinned: bool = False
    extents: dict[Extent, int] = field(default_factory=dict)
    kept: dict[Extent, None] = field(default_factory=dict)  # those that are pinned for it
