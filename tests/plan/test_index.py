"""The prefix index against a model that knows one thing: who holds the row after each token string."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from afterglow.plan.prefix.extent import Extent
from afterglow.plan.prefix.index import Index, extent_id
from afterglow.plan.prefix.salts import approximate
from afterglow.plan.prefix.tree import common_rows
from tests.plan.fake_executor import pack
from tests.plan.tiers_kit import make_extent

Path = tuple[int, ...]
TOKENS = st.lists(st.integers(0, 2), max_size=9)  # few different ones: almost everything has something in common
SALTS = st.sampled_from(["", "a"])


class IndexMachine(RuleBasedStateMachine):
    """Random insertions and removals, in the index and in the model."""

    def __init__(self) -> None:
        super().__init__()
        self.index = Index()
        self.holders: dict[tuple[str, Path], Extent] = {}  # of the last row of that path
        self.paths: dict[Extent, Path] = {}
        self.serial = 0

    # ------------------------------------------------------------------------------------------ the model

    def matched(self, salt: str, tokens: list[int]) -> list[tuple[Extent, int]]:
        """(holder, its row) of each row of the longest known prefix, found one token after the other."""
        rows: list[tuple[Extent, int]] = []
        for end in range(1, len(tokens) + 1):
            holder = self.holders.get((salt, tuple(tokens[:end])))
            if holder is None:
                break
            rows.append((holder, end - 1 - holder.first_row))
        return rows

    def below(self, extent: Extent) -> list[Extent]:
        """The extent, and the extents with rows behind one of its rows."""
        own = {path for (salt, path), holder in self.holders.items() if holder is extent and salt == extent.salt}
        return [
            other
            for other, path in self.paths.items()
            if other.salt == extent.salt and any(path[: len(top)] == top for top in own)
        ]

    def take_in(self, extent: Extent, prefix: list[int], tokens: list[int]) -> None:
        path = (*prefix, *tokens)
        for end in range(len(prefix) + 1, len(path) + 1):
            self.holders.setdefault((extent.salt, path[:end]), extent)
        self.paths[extent] = path

    # ------------------------------------------------------------------------------------------ the rules

    def insert_at(self, salt: str, prefix: list[int], tokens: list[int], parent: tuple[Extent, int] | None) -> None:
        self.serial += 1
        extent = make_extent(tokens, prefix, serial=self.serial, salt=salt)
        before = self.matched(salt, prefix)
        known = self.matched(salt, prefix + tokens)
        if parent is None:
            outcome, holders = self.index.insert(extent, pack(prefix))
        else:
            outcome, holders = self.index.insert_below(extent, *parent)
        if len(before) < len(prefix):
            assert outcome == "orphan"
            assert holders == ()
            return
        theirs = list(dict.fromkeys(holder for holder, _ in known[len(prefix) :]))
        if len(known) == len(prefix) + len(tokens):
            assert outcome == "duplicate"
            assert list(holders) == theirs
            return
        assert outcome == "inserted"
        assert list(holders) == [*theirs, extent]
        if parent is None:
            last = before[-1] if before else None
            assert (extent.parent, extent.parent_rows) == ((last[0].id, last[1] + 1) if last else (None, 0))
        self.take_in(extent, prefix, tokens)

    @rule(salt=SALTS, tokens=TOKENS.filter(bool), cut=st.integers(0, 9))
    def insert(self, salt: str, tokens: list[int], cut: int) -> None:
        cut = min(cut, len(tokens) - 1)
        self.insert_at(salt, tokens[:cut], tokens[cut:], None)

    @rule(salt=SALTS, tokens=TOKENS, more=TOKENS.filter(bool))
    def insert_after_a_match(self, salt: str, tokens: list[int], more: list[int]) -> None:
        prefix = tokens[: len(self.matched(salt, tokens))]
        self.insert_at(salt, prefix, more, None)

    @rule(data=st.data(), tokens=TOKENS.filter(bool))
    def insert_below(self, data: st.DataObject, tokens: list[int]) -> None:
        if self.paths:
            parent = data.draw(st.sampled_from(list(self.paths)))
            rows = data.draw(st.integers(1, parent.rows))
            self.insert_at(parent.salt, list(self.paths[parent][: parent.first_row + rows]), tokens, (parent, rows))

    @rule(data=st.data())
    def remove(self, data: st.DataObject) -> None:
        if self.paths:
            extent = data.draw(st.sampled_from(list(self.paths)))
            gone = self.below(extent)
            assert sorted(lost.serial for lost in self.index.remove(extent)) == sorted(lost.serial for lost in gone)
            assert self.index.remove(extent) == []
            for lost in gone:
                del self.paths[lost]
            self.holders = {key: holder for key, holder in self.holders.items() if holder in self.paths}

    @rule(salt=SALTS, tokens=TOKENS)
    def match(self, salt: str, tokens: list[int]) -> None:
        self.compare(salt, tokens)

    def compare(self, salt: str, tokens: list[int]) -> None:
        views, rows = self.index.match(salt, pack(tokens))
        assert [(view.extent, row) for view in views for row in range(view.start, view.stop)] == self.matched(
            salt, tokens
        )
        assert rows == sum(view.stop - view.start for view in views)
        assert len({view.extent for view in views}) == len(views), "one view per extent, however it is split"

    @invariant()
    def every_path_is_matched(self) -> None:
        self.index.check()
        assert sorted(self.index.extents) == sorted(extent.id for extent in self.paths)
        for extent, path in self.paths.items():
            self.compare(extent.salt, [*path, 0])
            assert extent.has_children == (len(self.below(extent)) > 1)


IndexMachine.TestCase.settings = settings(max_examples=60, stateful_step_count=25, deadline=None)
test_the_index_is_what_the_model_says = IndexMachine.TestCase


@settings(max_examples=300, deadline=None)
@given(a=TOKENS, b=TOKENS, a_row=st.integers(0, 10), b_row=st.integers(0, 10), rows=st.integers(0, 10))
def test_common_rows_counts_as_a_loop_would(a: list[int], b: list[int], a_row: int, b_row: int, rows: int) -> None:
    same = 0
    for one, other in list(zip(a[a_row:], b[b_row:], strict=False))[:rows]:
        if one != other:
            break
        same += 1
    assert common_rows(pack(a), a_row, pack(b), b_row, rows) == same
    assert common_rows(bytearray(pack(a)), a_row, bytearray(pack(b)), b_row, rows) == same


@given(same=st.integers(0, 300), more=st.integers(0, 300), byte=st.integers(0, 3))
def test_common_rows_counts_whole_tokens(same: int, more: int, byte: int) -> None:
    # Tokens that differ in any one of their four bytes differ, whatever the halving looks at.
    a = pack([7] * (same + 1 + more))
    b = bytearray(a)
    b[4 * same + byte] ^= 1
    assert common_rows(a, 0, b, 0, len(a)) == same


# -------------------------------------------------------------------------------------------------- examples


def test_one_common_token_is_enough() -> None:
    index = Index()
    first, second = make_extent([1, 2, 3]), make_extent([1, 7])
    index.insert(first, b"")
    assert index.insert(second, b"") == ("inserted", (first, second))
    assert index.match("", pack([1, 7, 9])).views == ((first, 0, 1), (second, 1, 2))
    index.check()


def test_a_split_splits_no_extent() -> None:
    index = Index()
    first = make_extent([1, 2, 3, 4])
    index.insert(first, b"")
    branch = make_extent([9], [1, 2])
    index.insert(branch, pack([1, 2]))
    assert (branch.parent, branch.parent_rows) == (first.id, 2)
    assert [(node.start, node.stop) for node in first.nodes] == [(0, 2), (2, 4)]
    assert index.match("", pack([1, 2, 3, 4])).views == ((first, 0, 4),)
    assert index.match("", pack([1, 2, 9])).views == ((first, 0, 2), (branch, 0, 1))
    assert first.has_children
    # When the branch is gone, so is the reason for the split.
    index.remove(branch)
    assert [(node.start, node.stop) for node in first.nodes] == [(0, 4)]
    assert not first.has_children


def test_rows_that_are_there_are_not_inserted_again() -> None:
    index = Index()
    whole = make_extent([1, 2, 3, 4])
    index.insert(whole, b"")
    assert index.insert(make_extent([2, 3], [1]), pack([1])) == ("duplicate", (whole,))
    assert list(index.extents) == [whole.id]


def test_without_its_prefix_an_extent_is_an_orphan() -> None:
    index = Index()
    assert index.insert(make_extent([3], [1, 2]), pack([1, 2])).outcome == "orphan"
    index.insert(make_extent([1]), b"")
    assert index.insert(make_extent([3], [1, 2]), pack([1, 2])).outcome == "orphan"
    assert len(index.extents) == 1


def test_a_removed_extent_takes_along_what_hangs_below_it() -> None:
    index = Index()
    top, middle, side = make_extent([1, 2]), make_extent([3], [1, 2]), make_extent([8], [1])
    end = make_extent([4], [1, 2, 3])
    for extent, prefix in ((top, []), (middle, [1, 2]), (side, [1]), (end, [1, 2, 3])):
        index.insert(extent, pack(prefix))
    assert index.remove(middle) == [middle, end]
    assert index.match("", pack([1, 8])).rows == 2
    assert set(index.remove(top)) == {top, side}
    assert index.match("", pack([1])).rows == 0


def test_salts_are_separate_trees() -> None:
    index = Index()
    mine, yours = make_extent([1, 2], salt="mine"), make_extent([1, 2, 3], salt="yours")
    index.insert(mine, b"")
    index.insert(yours, b"")
    assert index.match("mine", pack([1, 2, 3])).views == ((mine, 0, 2),)
    assert index.match("", pack([1, 2, 3])).rows == 0
    index.remove(mine)
    assert index.match("yours", pack([1, 2, 3])).rows == 3


@given(prefix=TOKENS, own=TOKENS, cut=st.integers(0, 9))
def test_an_id_does_not_depend_on_how_the_turns_before_were_cut(prefix: list[int], own: list[int], cut: int) -> None:
    whole, pieces = Index(), Index()
    cut = min(cut, len(prefix))
    if prefix:
        whole.insert(make_extent(prefix), b"")
    for start, stop in ((0, cut), (cut, len(prefix))):
        if start < stop:
            pieces.insert(make_extent(prefix[start:stop], prefix[:start]), pack(prefix[:start]))
    last = [9, *own]
    for index in (whole, pieces):
        assert index.insert(make_extent(last, prefix), pack(prefix)).outcome == "inserted"
    assert set(whole.extents) & set(pieces.extents) >= {make_extent(last, prefix).id}


def test_an_id_depends_on_all_that_the_bytes_depend_on() -> None:
    names = [
        extent_id("m", "s", pack([1]), pack([2, 3])),
        extent_id("n", "s", pack([1]), pack([2, 3])),  # another model
        extent_id("m", "t", pack([1]), pack([2, 3])),  # another tenant
        extent_id("m", "s", pack([0]), pack([2, 3])),  # other tokens before
        extent_id("m", "s", pack([1]), pack([2, 4])),  # other tokens
        extent_id("m", "s", pack([1, 2]), pack([3])),  # other rows of the same text
        extent_id("ms", "", pack([1]), pack([2, 3])),  # the same letters, otherwise divided
    ]
    assert len(set(names)) == len(names)


CLIENTS = ["", "a"]
OPERATIONS = st.lists(
    st.tuples(
        st.sampled_from(["exact", "approx", "remove"]), st.sampled_from(CLIENTS), TOKENS.filter(bool), st.integers(0, 9)
    ),
    max_size=30,
)


@settings(max_examples=300, deadline=None)
@given(operations=OPERATIONS, asked=st.lists(TOKENS, min_size=4, max_size=4))
def test_approximate_rows_lie_behind_exact_ones_and_are_found_by_their_salt_alone(
    operations: list[tuple[str, str, list[int], int]], asked: list[list[int]]
) -> None:
    """Against an index without them."""
    index, plain = Index(), Index()
    twins: dict[Extent, Extent] = {}  # of exact extents
    for serial, (what, client, tokens, cut) in enumerate(operations):
        salt = approximate(client) if what == "approx" else client
        if what == "remove":
            there = [*index.extents.values()]
            if there:
                chosen = there[cut % len(there)]
                if chosen in twins:
                    plain.remove(twins[chosen])
                index.remove(chosen)
            continue
        known = index.match(salt, pack(tokens)).rows
        begin = min(cut, len(tokens) - 1) if cut % 2 else min(known, len(tokens) - 1)  # mostly where something is known
        extent = make_extent(tokens[begin:], tokens[:begin], serial=serial, salt=salt)
        outcome, holders = index.insert(extent, pack(tokens[:begin]))
        if what == "exact":
            twin = make_extent(tokens[begin:], tokens[:begin], serial=serial, salt=salt)
            assert plain.insert(twin, pack(tokens[:begin])).outcome == outcome
            if outcome == "inserted":
                twins[extent] = twin
        elif outcome == "inserted":
            assert holders[-1] is extent
            assert index.match(salt, pack(tokens)).rows == len(tokens)
        elif outcome == "duplicate":
            assert known == len(tokens)
        else:
            assert outcome == "orphan"
            assert begin == 0 or known < begin
        index.check()
    plain.check()
    for tokens in [*asked, *(tokens for _, _, tokens, _ in operations)]:
        for client in CLIENTS:
            exact, wide = (index.match(salt, pack(tokens)) for salt in (client, approximate(client)))
            without = plain.match(client, pack(tokens))
            assert exact.rows == without.rows
            assert [view.extent for view in without.views] == [twins[view.extent] for view in exact.views]
            assert wide.rows >= exact.rows
            found = b"".join(view.extent.tokens[4 * view.start : 4 * view.stop] for view in wide.views)
            assert found == pack(tokens)[: 4 * wide.rows]
            kinds = [view.extent.kind for view in wide.views]
            assert kinds == sorted(kinds, key=["exact", "approx"].index), "exact rows come first"
            assert {view.extent.salt for view in wide.views} <= {client, approximate(client)}
