"""Radix trees: nodes are views of extents, edges the tokens of those rows. It knows no tenants.

Splitting a node splits no bytes: both halves view the same extent. The nodes of one extent are therefore a chain, with
other extents hanging off it. Tokens are bytes (uint32, little-endian), compared slice by slice: a Python loop over
tokens, or tuples of them, would cost a hundred times more at 32K tokens.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator
from typing import TypeAlias

from afterglow.plan.extent import Extent, View


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


class Root(Node):
    """The root of the tree of this name."""

    __slots__ = ("tree",)

    def __init__(self, tree: str) -> None:
        super().__init__(None, 0, 0, None)
        self.tree = tree


Place: TypeAlias = tuple[Node, int]  # a place in the tree: so many rows into the edge of the node


def descend(place: Place, tokens: bytes, row: int, views: list[View]) -> tuple[Place, int]:
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
        node = node_at(extent, start + same)
        offset = start + same - node.start
        if offset < node.stop - node.start:
            break
    return (node, offset), row


def node_at(extent: Extent, rows: int) -> Node:
    """The node in which the first `rows` rows of an extent end; the first, where they end before it."""
    return extent.nodes[bisect_left(extent.nodes, rows, key=lambda node: node.stop)]


def locate(extent: Extent, rows: int) -> Place:
    """The place `rows` rows into an extent. Rows before its first node lie in the edges above it."""
    node = extent.nodes[-1]
    if node.start >= rows:
        node = node_at(extent, rows)
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


def split(node: Node, rows: int) -> None:
    """Cut a node in two after `rows` rows; the lower half is new and takes the children."""
    assert node.extent is not None
    lower = Node(node.extent, node.start + rows, node.stop, node)
    lower.take_children_of(node)
    node.stop = lower.start
    node.adopt(lower)
    nodes = node.extent.nodes
    place = nodes.index(node) + 1
    node.extent.nodes = (*nodes[:place], lower, *nodes[place:])


def rejoin(node: Node) -> None:
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


def subtree(top: Node) -> Iterator[Node]:
    """`top` and all below it, parents first."""
    stack = [top]
    while stack:
        node = stack.pop()
        yield node
        stack.extend(reversed(node.children()))
