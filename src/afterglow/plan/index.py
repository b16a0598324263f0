"""The prefix index: per tenant (salt) a radix tree from token ids to extents. It knows no tier and no job.

    root -- (A, 0, 600) -+- (A, 600, 1024) -- (B, 0, 312)      a node is a view (extent, start, stop);
                         +- (C, 0, 100)                        its edge is the tokens of those rows

Splitting a node splits no bytes: both halves view the same extent. The nodes of one extent are therefore a chain, with
other extents hanging off it. Tokens are bytes (uint32, little-endian), compared slice by slice: a Python loop over
tokens, or tuples of them, would cost a hundred times more at 32K tokens.
"""

from __future__ import annotations

import hashlib
from bisect import bisect_left
from collections.abc import Iterator
from itertools import islice
from typing import Literal, NamedTuple, TypeAlias

from afterglow.plan.extent import Extent, View
from afterglow.plan.step import ExtentId
from afterglow.plan.truncation import tenant_of

Outcome = Literal["inserted", "duplicate", "orphan"]


def extent_id(digest: str, salt: str, prefix_tokens: bytes, own_tokens: bytes) -> ExtentId:
    """The name of an extent: all that its bytes depend on, and nothing of how turns were cut before it."""
    before = hashlib.blake2b(prefix_tokens, digest_size=16).digest()
    state = hashlib.blake2b(digest_size=20)
    for part in (digest.encode(), salt.encode(), before, own_tokens):
        state.update(len(part).to_bytes(8, "little"))
        state.update(part)
    return state.hexdigest()


def common_rows(a: bytes | bytearray, a_row: int, b: bytes | bytearray, b_row: int, rows: int) -> int:
    """How many of at most `rows` tokens agree, from row `a_row` of `a` and row `b_row` of `b` on."""
    i, j = 4 * a_row, 4 * b_row
    size = min(4 * rows, len(a) - i, len(b) - j)
    if size <= 0 or a[i : i + 4] != b[j : j + 4]:
        return 0
    if a[i : i + size] == b[j : j + size]:
        return size // 4
    same, differ = 4, size  # the first difference lies in [same, differ)
    while differ - same > 4:
        middle = (same + differ) // 8 * 4
        if a[i + same : i + middle] == b[j + same : j + middle]:
            same = middle
        else:
            differ = middle
    return same // 4


class Node:
    """A view in the tree. The root of a salt has no extent and no rows."""

    # Most nodes have one child, and a cache has millions of them: a dictionary is made for the second only.
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
        """The first token of its edge."""
        assert self.extent is not None
        return self.extent.tokens[4 * self.start : 4 * self.start + 4]

    def child(self, first: bytes) -> Node | None:
        """The child whose edge begins with a token."""
        below = self._below
        if isinstance(below, dict):
            return below.get(first)
        return below if below is not None and below.key() == first else None

    def children(self) -> tuple[Node, ...]:
        """All children, the oldest first."""
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
        """What hangs below another node hangs below this one from now on, and nothing else does."""
        self._below, other._below = other._below, None
        for child in self.children():
            child.parent = self


class Match(NamedTuple):
    """What the index knows of a token string: views in order, `rows` tokens in all."""

    views: tuple[View, ...]
    rows: int


NO_MATCH = Match((), 0)


class Inserted(NamedTuple):
    """How an insertion went, and the extents that hold the rows now (its own among them if it was inserted)."""

    outcome: Outcome
    holders: tuple[Extent, ...]


_Place: TypeAlias = tuple[Node, int]  # a place in the tree: so many rows into the edge of the node


class Index:
    """All matchable extents."""

    def __init__(self) -> None:
        self._roots: dict[str, Node] = {}
        self.extents: dict[ExtentId, Extent] = {}
        self.version = 0  # changes whenever a match may end differently

    def match(self, salt: str, tokens: bytes) -> Match:
        """The longest known prefix of `tokens`; it may end inside an extent."""
        root = self._roots.get(salt)
        if root is None:
            return NO_MATCH
        views: list[View] = []
        _, rows = _descend((root, 0), tokens, 0, views)
        return Match(tuple(views), rows)

    def outdated(self, salt: str, match: Match, following: bytes) -> bool:
        """Would the match be another one by now, if the first token that did not match is `following` (b"": there was
        none)? Much cheaper than to find out which."""
        if not match.views:
            place = self._roots.get(salt), 0
        elif match.views[-1].extent.dead:  # as is whatever hangs below one that is
            return True
        else:
            place = _locate(match.views[-1].extent, match.views[-1].stop)
        node, offset = place
        if node is None or offset < node.stop - node.start:
            return False
        return node.child(following) is not None

    def elsewhere(self, salt: str, tokens: bytes, rows: int, most: int) -> bool:
        """Does another tenant (of the first `most`) have these first `rows` tokens? For counting only: nobody is told."""
        for other, root in islice(self._roots.items(), most):
            child = root.child(tokens[:4]) if tenant_of(other) != tenant_of(salt) else None
            if child is not None and child.extent is not None:
                if common_rows(child.extent.tokens, child.start, tokens, 0, rows) == rows:
                    return True
        return False

    def insert(self, extent: Extent, prefix_tokens: bytes) -> Inserted:
        """Hang an extent below its prefix.

        Rows that are there already stay with whom they are; the extent's node views the rest. It is not inserted
        if there is no rest (`duplicate`), or if the prefix is not there (`orphan`). Sets the extent's parent.
        """
        root = self._roots.get(extent.salt)
        if root is None:
            if prefix_tokens:
                return Inserted("orphan", ())
            root = self._roots[extent.salt] = Node(None, 0, 0, None)
        views: list[View] = []
        place, rows = _descend((root, 0), prefix_tokens, 0, views)
        if 4 * rows < len(prefix_tokens):
            return Inserted("orphan", ())
        extent.parent, extent.parent_rows = (views[-1].extent.id, views[-1].stop) if views else (None, 0)
        return self._hang(extent, place)

    def insert_below(self, extent: Extent, parent: Extent, parent_rows: int) -> Inserted:
        """The same, when the parent is known (from the catalog): no walk from the root, no prefix."""
        return self._hang(extent, _locate(parent, parent_rows))

    def _hang(self, extent: Extent, place: _Place) -> Inserted:
        views: list[View] = []
        (parent, reached), rows = _descend(place, extent.tokens, 0, views)
        holders = tuple(dict.fromkeys(view.extent for view in views)) if views else ()
        stop = extent.rows
        if rows == stop:
            return Inserted("duplicate", holders)
        assert extent.id not in self.extents, "the same extent twice, not on the same path"
        if reached < parent.stop - parent.start:
            _split(parent, reached)
        node = Node(extent, rows, stop, parent)
        parent.adopt(node)
        extent.nodes = (node,)
        self.extents[extent.id] = extent
        self.version += 1
        return Inserted("inserted", (*holders, extent))

    def remove(self, extent: Extent) -> list[Extent]:
        """Take an extent out, and with it everything that can be reached only through it; returns all of them."""
        if not extent.nodes:
            return []
        top = extent.nodes[0]
        parent = top.parent
        assert parent is not None
        parent.disown(top)
        gone: dict[Extent, None] = {}
        for node in _subtree(top):
            assert node.extent is not None
            gone[node.extent] = None
        self.version += 1
        for lost in gone:
            lost.nodes = ()
            del self.extents[lost.id]
        if parent.extent is None:
            if not parent.children():
                del self._roots[extent.salt]
        else:
            _rejoin(parent)
        return list(gone)

    def check(self) -> None:
        """Every node where its parent says, every edge non-empty, every extent a chain of nodes ending at its end."""
        seen: dict[Extent, list[Node]] = {}
        for salt, root in self._roots.items():
            assert root.extent is None
            assert root.children(), "an empty tree"
            for node in _subtree(root):
                for child in node.children():
                    assert child.extent is not None
                    assert child.parent is node
                    assert node.child(child.key()) is child
                    assert 0 <= child.start < child.stop <= child.extent.rows
                    assert child.extent.salt == salt
                    seen.setdefault(child.extent, []).append(child)
        assert {extent.id: extent for extent in seen} == self.extents
        for extent, nodes in seen.items():
            assert tuple(nodes) == extent.nodes, "an extent's nodes in path order"
            assert nodes[-1].stop == extent.rows
            for upper, lower in zip(nodes, nodes[1:], strict=False):
                assert lower.parent is upper
                assert lower.start == upper.stop


def _descend(place: _Place, tokens: bytes, row: int, views: list[View]) -> tuple[_Place, int]:
    """Follow `tokens` from row `row` on, from a place on. Where it ends, and the row of `tokens` reached.

    It compares extent by extent and not node by node: a path may be split at every token, and as long as the tokens
    are the extent's own, so are the nodes.
    """
    node, offset = place
    while True:
        if offset == node.stop - node.start:
            child = node.child(tokens[4 * row : 4 * row + 4])
            if child is None:
                break
            node, offset = child, 0
        extent = node.extent
        assert extent is not None
        start = node.start + offset
        same = common_rows(extent.tokens, start, tokens, row, extent.rows - start)
        if not same:
            break
        row += same
        views.append(View(extent, start, start + same))
        node = _node_at(extent, start + same)
        offset = start + same - node.start
        if offset < node.stop - node.start:
            break
    return (node, offset), row


def _node_at(extent: Extent, rows: int) -> Node:
    """The node in which the first `rows` rows of an extent end; the first, where they end before it."""
    return extent.nodes[bisect_left(extent.nodes, rows, key=lambda node: node.stop)]


def _locate(extent: Extent, rows: int) -> _Place:
    """The place `rows` rows into an extent. Rows before its first node lie in the edges above it."""
    node = extent.nodes[-1]
    if node.start >= rows:
        node = _node_at(extent, rows)
    if node.start < rows:
        return node, rows - node.start
    back = extent.nodes[0].start - rows
    above = extent.nodes[0].parent
    assert above is not None
    while back and back >= above.rows:
        back -= above.rows
        above = above.parent
        assert above is not None
    return above, above.rows - back


def _split(node: Node, rows: int) -> None:
    """Cut a node in two after `rows` rows; the lower half is new and takes the children."""
    assert node.extent is not None
    lower = Node(node.extent, node.start + rows, node.stop, node)
    lower.take_children_of(node)
    node.stop = lower.start
    node.adopt(lower)
    nodes = node.extent.nodes
    place = nodes.index(node) + 1
    node.extent.nodes = (*nodes[:place], lower, *nodes[place:])


def _rejoin(node: Node) -> None:
    """Undo a split for which there is no reason any more."""
    children = node.children()
    if len(children) != 1:
        return
    lower = children[0]
    if lower.extent is not node.extent or node.extent is None:
        return
    node.stop = lower.stop
    node.take_children_of(lower)
    nodes = node.extent.nodes
    place = nodes.index(lower)
    node.extent.nodes = (*nodes[:place], *nodes[place + 1 :])


def _subtree(top: Node) -> Iterator[Node]:
    """`top` and all below it, parents first."""
    stack = [top]
    while stack:
        node = stack.pop()
        yield node
        stack.extend(reversed(node.children()))
