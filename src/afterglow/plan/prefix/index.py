"""The prefix index: per tenant (salt) a radix tree from token ids to extents, and one more below each registered prefix
(see `prefixes`). It knows no tier and no job.

    root -- (A, 0, 600) -+- (A, 600, 1024) -- (B, 0, 312)      a node is a view (extent, start, stop);
                         +- (C, 0, 100)                        its edge: the tokens of its rows

Approximate rows (SPEC) hang below the exact rows that they go on from, where only a search for their salt finds them.

Nodes are views of extents, edges their tokens. Splitting a node splits no bytes: both halves view the same extent. The nodes of
one extent are therefore a chain, with other extents hanging off it. Tokens are bytes (uint32, little-endian), compared slice by
slice: a Python loop over tokens, or tuples, would cost a hundred times more at 32K tokens.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from itertools import islice
from typing import Literal, NamedTuple

from afterglow.plan.prefix.extent import Extent, Node, Root, View
from afterglow.plan.prefix.salts import client_salt, is_approximate
from afterglow.plan.prefix.shared_prefixes import OPERATOR, SharedPrefixes, may_read, prefix_digest, salt_of, tree_below
from afterglow.plan.prefix.tree import Place, common_rows, descend, locate, rejoin, split, subtree
from afterglow.plan.step import ExtentId

Outcome = Literal["inserted", "duplicate", "orphan", "elsewhere"]


def extent_id(digest: str, salt: str, prefix_tokens: bytes, own_tokens: bytes) -> ExtentId:
    """Name an extent by all that its bytes depend on, and nothing of how turns were cut before it."""
    before = hashlib.blake2b(prefix_tokens, digest_size=16).digest()
    state = hashlib.blake2b(digest_size=20)
    for part in (digest.encode(), salt.encode(), before, own_tokens):
        state.update(len(part).to_bytes(8, "little"))
        state.update(part)
    return state.hexdigest()


class Match(NamedTuple):
    """What the index knows of a token string: views in order, `rows` tokens in all."""

    views: tuple[View, ...]
    rows: int


NO_MATCH = Match((), 0)


class Inserted(NamedTuple):
    """How an insertion went, and the extents that hold the rows now (its own among them if it was inserted)."""

    outcome: Outcome
    holders: tuple[Extent, ...]


class Index:
    """All matchable extents."""

    def __init__(self) -> None:
        self._roots: dict[str, Root] = {}  # by the name of the tree: a salt, see also `tree_below`
        self.prefixes = SharedPrefixes()
        self._digests: dict[
            tuple[ExtentId, int], str
        ] = {}  # of the tokens up to a row of an extent with a prefix in it
        self.extents: dict[ExtentId, Extent] = {}
        self.version = 0  # changes whenever a match may end differently
        self._serial = 0

    def next_serial(self) -> int:
        """Number a new extent."""
        self._serial += 1
        return self._serial

    def match(self, salt: str, tokens: bytes) -> Match:
        """Find the longest known prefix of `tokens`; it may end inside an extent."""
        views: list[View] = []
        rows = self._walk(salt, tokens, views)
        return Match(tuple(views), rows) if views else NO_MATCH

    def _walk(self, salt: str, tokens: bytes, views: list[View]) -> int:
        """Count the known rows of `tokens`, and append their views; from a registered prefix on, if they begin with one."""
        if is_approximate(salt):
            return self._walk_aside(salt, tokens, views)
        tree, row = self._enter(salt, tokens, views)
        root = self._roots.get(tree) if tree is not None else None
        if root is not None:
            _, row = descend((root, 0), tokens, row, views)
        return row

    def _walk_aside(self, salt: str, tokens: bytes, views: list[View]) -> int:
        """Do the same with approximate rows of this salt, wherever they go on from the exact ones: the way that leads farthest."""
        exact: list[View] = []
        most, found, row = self._walk(client_salt(salt), tokens, exact), exact, 0
        for at, view in enumerate(exact):
            for node in view.extent.nodes:
                if view.start < node.stop <= view.stop:
                    fork = row + node.stop - view.start
                    child = node.child(salt.encode() + tokens[4 * fork : 4 * fork + 4])
                    if child is not None:
                        way = [*exact[:at], View(view.extent, view.start, node.stop)]
                        _, stop = descend((child, 0), tokens, fork, way)
                        if stop > most:
                            most, found = stop, way
            row += view.stop - view.start
        views += found
        return most

    def _enter(self, salt: str, tokens: bytes, views: list[View]) -> tuple[str | None, int]:
        """Find the tree in which a salt's own rows of these tokens lie, and the rows before it; None, if they are missing."""
        prefix = self.prefixes.before(salt, tokens)
        if prefix is None:
            return salt, 0
        row = self._walk(prefix.salt, prefix.tokens, views)
        return (tree_below(salt, prefix.digest) if row == prefix.rows else None), row

    def outdated(self, salt: str, match: Match, following: bytes) -> bool:
        """Would the match be another one by now, if the first token that did not match is `following` (b"": there was
        none)? Much cheaper than to find out which."""
        if self.prefixes and (not match.views or match.views[-1].extent.salt != salt):
            return True  # perhaps: it goes on in one of several trees
        if not match.views:
            place: tuple[Node | None, int] = (self._roots.get(salt), 0)
        elif match.views[-1].extent.dead:  # as is whatever hangs below one that is
            return True
        else:
            place = locate(match.views[-1].extent, match.views[-1].stop)
        node, offset = place
        if node is None or offset < node.stop - node.start:
            return False
        return node.child(following) is not None

    def elsewhere(self, salt: str, tokens: bytes, rows: int, most: int) -> bool:
        """Does another tenant (one of the first `most`) have these first `rows` tokens? For counting only: no client is told."""
        for other, root in islice(self._roots.items(), most):
            if salt_of(other) != other or other == OPERATOR:
                continue
            child = root.child(tokens[:4]) if client_salt(other) != client_salt(salt) else None
            if child is not None and child.extent is not None:
                if common_rows(child.extent.tokens, child.start, tokens, 0, rows) == rows:
                    return True
        return False

    def insert(self, extent: Extent, prefix_tokens: bytes) -> Inserted:
        """Hang an extent below its prefix.

        Rows that are there already stay with whom they are; the extent's node views the rest. It is not inserted
        if there is no rest (`duplicate`), if the prefix is not there (`orphan`), or if an extent of its name is in
        another tree, since before a prefix was registered or until then (`elsewhere`). Sets the extent's parent.
        """
        if is_approximate(extent.salt):
            before = self.match(extent.salt, prefix_tokens)
            if not before.rows or 4 * before.rows < len(prefix_tokens):
                return Inserted("orphan", ())
            last = before.views[-1]
            extent.parent, extent.parent_rows = last.extent.id, last.stop
            return self._hang(extent, locate(last.extent, last.stop))
        views: list[View] = []
        tree: str | None = extent.salt
        rows = 0
        if self.prefixes and (shared := self.prefixes.before(extent.salt, prefix_tokens + extent.tokens)) is not None:
            if len(prefix_tokens) < len(shared.tokens):  # of such rows none are looked for under this salt
                return Inserted("orphan", ())
            tree, rows = self._enter(extent.salt, shared.tokens, views)
        root = self._roots.get(tree) if tree is not None else None
        if root is None:
            if tree is None or 4 * rows < len(prefix_tokens):
                return Inserted("orphan", ())
            root = self._roots[tree] = Root(tree)
        place, rows = descend((root, 0), prefix_tokens, rows, views)
        if 4 * rows < len(prefix_tokens):
            return Inserted("orphan", ())
        extent.parent, extent.parent_rows = (views[-1].extent.id, views[-1].stop) if views else (None, 0)
        return self._hang(extent, place)

    def insert_below(self, extent: Extent, parent: Extent, parent_rows: int) -> Inserted:
        """Insert an extent whose parent is known (from the catalog): no walk from the root, no prefix. Below rows of another
        salt it is taken for granted that they are a prefix that was registered."""
        if extent.salt != parent.salt and not may_read(extent.salt, parent.salt):
            return Inserted("orphan", ())
        if extent.salt == parent.salt or is_approximate(extent.salt):
            return self._hang(extent, locate(parent, parent_rows))
        tree = tree_below(extent.salt, self._digest(parent, parent_rows))
        root = self._roots.get(tree)
        if root is None:
            root = self._roots[tree] = Root(tree)
        return self._hang(extent, (root, 0))

    def _digest(self, extent: Extent, rows: int) -> str:
        """Return the digest of all tokens up to a row of an extent."""
        place = (extent.id, rows)
        if place not in self._digests:
            self._digests[place] = prefix_digest(self.before(extent) + extent.tokens[: 4 * rows])
        return self._digests[place]

    def above(self, extent: Extent) -> Iterator[ExtentId]:
        """Yield the extents that lead to one of the index, along the parents that it came with, the nearest first."""
        while extent.parent is not None and extent.parent in self.extents:
            extent = self.extents[extent.parent]
            yield extent.id

    def before(self, extent: Extent) -> bytes:
        """Return all tokens before an extent of the index, along the parents that it came with."""
        parts: list[bytes] = []
        while extent.parent is not None and extent.parent in self.extents:
            extent, rows = self.extents[extent.parent], extent.parent_rows
            parts.append(extent.tokens[: 4 * rows])
        return b"".join(reversed(parts))

    def reach(self, extent: Extent) -> int:
        """Return the row up to which prompts match the path through an extent of the index by now. That is less than its end where
        prompts with more of that path begin with a registered prefix, whose rows lie elsewhere, and 0 below one that was forgotten."""
        nodes: list[Node] = [extent.nodes[-1]]
        while (above := nodes[-1].parent) is not None:
            nodes.append(above)
        root = nodes.pop()
        assert isinstance(root, Root)
        salt, _, digest = root.tree.partition("|")
        prefixes = [each for each in self.prefixes.of(salt) if salt == OPERATOR or each.salt != salt]
        head = next((each.tokens for each in prefixes if each.digest == digest), b"")
        if digest and not head:
            return 0
        path, longest = bytearray(head), max((len(each.tokens) for each in prefixes), default=0)
        while nodes and len(path) < longest:
            node = nodes.pop()
            assert node.extent is not None
            path += node.extent.tokens[4 * node.start : 4 * node.stop]
        if salt == OPERATOR:
            return max((common_rows(path, 0, each.tokens, 0, each.rows) for each in prefixes), default=0)
        longer = (each.rows for each in prefixes if len(each.tokens) > len(head) and path.startswith(each.tokens))
        return min(longer, default=extent.first_row + extent.rows + 1) - 1

    def _hang(self, extent: Extent, place: Place) -> Inserted:
        views: list[View] = []
        aside = extent.salt.encode() if is_approximate(extent.salt) else b""
        (parent, reached), rows = descend(place, extent.tokens, 0, views, aside)
        holders = tuple(dict.fromkeys(view.extent for view in views)) if views else ()
        stop = extent.rows
        if rows == stop:
            return Inserted("duplicate", holders)
        if extent.id in self.extents:
            return Inserted("elsewhere", ())
        if reached < parent.stop - parent.start:
            split(parent, reached)
        node = Node(extent, rows, stop, parent)
        parent.adopt(node)
        extent.nodes = (node,)
        self.extents[extent.id] = extent
        self.version += 1
        return Inserted("inserted", (*holders, extent))

    def replace(self, parts: Sequence[Extent], whole: Extent) -> None:
        """Put an extent with the rows of several in their place. Each part hangs at the end of the part before it, with
        nothing beside it; the children of the last part become children of the new extent."""
        top, last = parts[0].nodes[0], parts[-1].nodes[0]
        parent = top.parent
        assert parent is not None
        parent.disown(top)
        node = Node(whole, 0, whole.rows, parent)
        node.take_children_of(last)
        parent.adopt(node)
        begins = {part.id: part.first_row - whole.first_row for part in parts}
        for below in subtree(node):
            extent = below.extent
            if extent is not None and extent.parent in begins:
                extent.parent, extent.parent_rows = whole.id, extent.parent_rows + begins[extent.parent]
        for part in parts:
            part.nodes = ()
            del self.extents[part.id]
        whole.nodes = (node,)
        self.extents[whole.id] = whole
        self.version += 1

    def remove(self, extent: Extent) -> list[Extent]:
        """Take an extent out, together with all extents that can be reached only through it; returns them all."""
        if not extent.nodes:
            return []
        top = extent.nodes[0]
        parent = top.parent
        assert parent is not None
        parent.disown(top)
        gone: dict[Extent, None] = {}
        for node in subtree(top):
            assert node.extent is not None
            gone[node.extent] = None
        self.version += 1
        for lost in gone:
            lost.nodes = ()
            del self.extents[lost.id]
        if parent.extent is None:
            if not parent.children():
                assert isinstance(parent, Root)
                del self._roots[parent.tree]
        else:
            rejoin(parent)
        return list(gone)

    def check(self) -> None:
        """Every node where its parent says, every edge non-empty, every extent a chain of nodes ending at its end."""
        seen: dict[Extent, list[Node]] = {}
        for tree, root in self._roots.items():
            salt = salt_of(tree)
            assert root.extent is None
            assert root.tree == tree
            assert root.children(), "an empty tree"
            for node in subtree(root):
                for child in node.children():
                    assert child.extent is not None
                    assert child.parent is node
                    assert node.child(child.key()) is child
                    assert 0 <= child.start < child.stop <= child.extent.rows
                    apart = child.extent.kind == "approx" and may_read(child.extent.salt, salt)
                    assert child.extent.salt == salt or apart
                    seen.setdefault(child.extent, []).append(child)
        assert {extent.id: extent for extent in seen} == self.extents
        for extent, nodes in seen.items():
            assert tuple(nodes) == extent.nodes, "an extent's nodes in path order"
            assert nodes[-1].stop == extent.rows
            for upper, lower in zip(nodes, nodes[1:], strict=False):
                assert lower.parent is upper
                assert lower.start == upper.stop
