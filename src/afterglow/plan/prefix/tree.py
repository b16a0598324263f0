"""Walk in the trees of the prefix index: follow tokens, find places, cut nodes and join them again."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator
from typing import TypeAlias

from afterglow.plan.prefix.extent import Extent, Node, View


def common_rows(a: bytes | bytearray, a_row: int, b: bytes | bytearray, b_row: int, rows: int) -> int:
    """Count how many of at most `rows` tokens agree, from row `a_row` of `a` and row `b_row` of `b` on."""
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


Place: TypeAlias = tuple[Node, int]  # a place in the tree: so many rows into the edge of the node


def descend(place: Place, tokens: bytes, row: int, views: list[View], aside: bytes = b"") -> tuple[Place, int]:
    """Follow `tokens` from row `row` on, from a place on. Where it ends, and the row of `tokens` reached. `aside`: a salt of approximate
    rows, which are followed where exact rows end.

    It compares extent by extent and not node by node: a path may be split at every token, and as long as the tokens
    are the extent's own, so are the nodes.
    """
    node, offset = place
    while True:
        if offset == node.stop - node.start:
            child = node.child(tokens[4 * row : 4 * row + 4])
            if child is None and aside:
                child = node.child(aside + tokens[4 * row : 4 * row + 4])
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
    """Find the node in which the first `rows` rows of an extent end; the first node, where they end before it."""
    return extent.nodes[bisect_left(extent.nodes, rows, key=lambda node: node.stop)]


def locate(extent: Extent, rows: int) -> Place:
    """Find the place `rows` rows into an extent. Rows before its first node lie in the edges above it."""
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
    """Yield `top` and all nodes below it, parents first."""
    stack = [top]
    while stack:
        node = stack.pop()
        yield node
        stack.extend(reversed(node.children()))
