"""The two caches of prefix chunks against a reference that looks at everything, and the paper's example."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from afterglow.errors import ConfigError
from afterglow.importance.chunk_cache import CHUNK_POLICIES, MAX_REMEMBERED, ChunkMove, ChunkPlacement, Place
from tests import doors

TOKENS = 4
SIZES = {name: 1 + i % 3 for i, name in enumerate("abcdefghij")}


@dataclass
class Reference:
    """The rules of S15 as sentences: every list is sorted anew, every sum taken over the whole past."""

    budgets: dict[str, int]
    policy: str
    past: list[tuple[str, float, int]] = field(default_factory=list)  # chunk, weight of the request, wanted rows
    place: dict[str, Place] = field(default_factory=dict)
    last: dict[str, int] = field(default_factory=dict)

    def score(self, chunk: str) -> float:
        mine = [(weight, wanted) for name, weight, wanted in self.past if name == chunk]
        asked = sum(weight for weight, _ in mine)
        if self.policy == "lru":
            return self.last[chunk]
        if self.policy == "lfu":
            return asked
        if self.policy == "score":
            return sum(weight * wanted for weight, wanted in mine) / TOKENS
        ratio = mine[0][1] / TOKENS
        for _, wanted in mine[1:]:
            ratio = ratio + 0.2 * (wanted / TOKENS - ratio)
        return asked * ratio

    def free(self, place: str) -> int:
        return self.budgets[place] - sum(SIZES[c] for c, where in self.place.items() if where == place)

    def enter(self, chunk: str, place: Place) -> list[str] | None:
        """The chunks that leave `place` for it, the lowest first; None if it does not get in."""
        members = sorted((self.score(c), self.last[c], c) for c, where in self.place.items() if where == place)
        free, leave = self.free(place), []
        for score, _, name in members:
            if free >= SIZES[chunk]:
                break
            if score >= self.score(chunk):
                return None
            free += SIZES[name]
            leave.append(name)
        if free < SIZES[chunk]:
            return None
        for name in leave:
            self.place[name] = "disk"
        self.place[chunk] = place
        return leave

    def access(self, chunk: str, number: int, wanted: int) -> None:
        was = self.place.get(chunk, "disk")
        self.past.append((chunk, 1.0, wanted))
        self.last[chunk] = number
        if was == "device":
            return
        self.place[chunk] = "disk"
        leave = self.enter(chunk, "device")
        if leave is None:
            self.enter(chunk, "host")
            return
        for name in reversed(leave):
            self.enter(name, "host")

    def age(self) -> None:
        self.past = [(name, weight / 2, wanted) for name, weight, wanted in self.past]


actions = st.lists(
    st.one_of(
        st.tuples(st.sampled_from(sorted(SIZES)), st.integers(0, TOKENS)),
        st.sampled_from(["age", "forget a", "forget b"]),
    ),
    max_size=120,
)


@settings(max_examples=250, deadline=None)
@given(
    device=st.integers(0, 8), host=st.integers(0, 8), policy=st.sampled_from(sorted(CHUNK_POLICIES)), actions=actions
)
def test_the_caches_are_what_the_rules_say(
    device: int, host: int, policy: str, actions: list[tuple[str, int] | str]
) -> None:
    cache: ChunkPlacement[str] = ChunkPlacement(device, host, policy)
    reference = Reference({"device": device, "host": host}, policy)
    copies: dict[str, Place] = {}  # as they are when the moves are carried out
    number = 0
    for action in actions:
        if action == "age":
            cache.age()
            reference.age()
        elif isinstance(action, str):
            chunk = action[-1]
            move = cache.forget(chunk)
            assert (move is None) == (chunk not in copies)
            copies.pop(chunk, None)
            reference.place.pop(chunk, None)
            reference.past = [entry for entry in reference.past if entry[0] != chunk]
        else:
            number += 1
            chunk, wanted = action
            before = copies.pop(chunk, "disk")
            was, moves = cache.access(chunk, SIZES[chunk], TOKENS, wanted)
            reference.access(chunk, number, wanted)
            assert was == before
            if before != "disk" and all(move.chunk != chunk for move in moves):
                copies[chunk] = before
            carry_out(moves, copies, chunk, {"device": device, "host": host})
            assert cache.score(chunk) == pytest.approx(reference.score(chunk))
        cache.check()
        assert copies == {c: where for c, where in reference.place.items() if where != "disk"}
        assert {c: cache.place(c) for c in copies} == copies
        assert sorted(cache.members("device")) == sorted(c for c, where in copies.items() if where == "device")
        assert sorted(cache.members("host")) == sorted(c for c, where in copies.items() if where == "host")


def carry_out(moves: list[ChunkMove[str]], copies: dict[str, Place], asked: str, budgets: dict[str, int]) -> None:
    """One move after the other; none exceeds a budget."""
    for move in moves:
        assert move.size == SIZES[move.chunk]
        assert move.source != move.target
        if move.chunk != asked:
            assert copies.pop(move.chunk) == move.source
        if move.target != "disk":
            copies[move.chunk] = move.target
            if move.target == "host":
                used = sum(SIZES[c] for c, where in copies.items() if where == "host")
                assert used <= budgets["host"]
    assert sum(SIZES[c] for c, where in copies.items() if where == "device") <= budgets["device"]


def test_figure_14() -> None:
    """Two key chunks of two rows, one fits the device. A asks 1.5 times as often, for one row; B for both. By frequency
    15 requests of A and 10 of B send 20 keys over the link, by score 15."""
    sent = {}
    for policy in ("lfu", "score"):
        cache: ChunkPlacement[str] = ChunkPlacement(1, 1, policy)
        wanted = {"A": 1, "B": 2}
        for app in "ABABA":
            cache.access(app, 1, 2, wanted[app])
        warm = cache.rows["host"] + cache.rows["disk"]
        for app in 5 * "ABABA":
            cache.access(app, 1, 2, wanted[app])
        sent[policy] = cache.rows["host"] + cache.rows["disk"] - warm
        assert list(cache.members("device")) == (["A"] if policy == "lfu" else ["B"])
        if policy == "score":
            assert cache.score("A") / cache.score("B") == 0.75  # 1.5 x 50 % against 1 x 100 %
    assert sent == {"lfu": 20, "score": 15}


def test_ties_move_nothing() -> None:
    cache: ChunkPlacement[str] = ChunkPlacement(1, 1)
    assert cache.access("a", 1, 4, 2) == ("disk", [ChunkMove("a", "disk", "device", 1)])
    assert cache.access("b", 1, 4, 2) == ("disk", [ChunkMove("b", "disk", "host", 1)])
    assert cache.access("c", 1, 4, 2) == ("disk", [])
    assert cache.access("c", 1, 4, 1) == (
        "disk",
        [ChunkMove("a", "device", "disk", 1), ChunkMove("c", "disk", "device", 1)],
    )  # a gives way, and does not beat b


def test_several_small_ones_give_way_to_a_large_one_or_none_of_them() -> None:
    cache: ChunkPlacement[str] = ChunkPlacement(4, 2)
    for name, wanted in (("a", 1), ("b", 2), ("c", 3), ("d", 4)):
        cache.access(name, 1, 4, wanted)
    assert cache.access("large", 3, 4, 3) == ("disk", [])  # c is as good
    assert cache.place("a") == "device"
    _, moves = cache.access("large", 3, 4, 1)
    assert moves == [
        ChunkMove("c", "device", "host", 1),  # the best chunk that has to go comes first
        ChunkMove("b", "device", "host", 1),
        ChunkMove("a", "device", "disk", 1),
        ChunkMove("large", "disk", "device", 3),
    ]
    assert cache.access("huge", 5, 4, 4) == ("disk", [])


def test_what_is_forgotten_starts_anew_and_memory_is_bounded() -> None:
    cache: ChunkPlacement[int] = ChunkPlacement(10, 10)
    for request in range(5000):
        cache.access(request % 20, 1, 4, request % 5)
    assert len(cache) == 20
    assert max(len(doors.heap_of(cache.device)), len(doors.heap_of(cache.host))) <= 64 + 2 * 20
    best = next(cache.members("device"))
    assert cache.forget(best) == ChunkMove(best, "device", "disk", 1)
    assert cache.forget(best) is None
    assert cache.score(best) == 0
    assert cache.access(best, 1, 4, 0)[1] == [ChunkMove(best, "disk", "device", 1)]  # there is room


def test_of_chunks_in_neither_cache_the_last_ones_are_remembered() -> None:
    cache: ChunkPlacement[int] = ChunkPlacement(2, 2)
    forgotten: list[int] = []
    cache.forgot = forgotten.append
    for chunk in range(MAX_REMEMBERED + 500):
        cache.access(chunk, 1, 4, 4 if chunk < 4 else 1)
    assert len(cache) == MAX_REMEMBERED + 4
    assert forgotten == list(range(4, 500))  # the caches hold four
    cache.check()


def test_ages_without_end_change_no_order() -> None:
    cache: ChunkPlacement[str] = ChunkPlacement(1, 1)
    for _ in range(1200):
        for name, wanted in (("a", 4), ("b", 2), ("c", 1)):
            cache.access(name, 1, 4, wanted)
        cache.age()
        cache.check()
    assert [cache.place(name) for name in "abc"] == ["device", "host", "disk"]
    assert cache.score("a") == pytest.approx(1)  # 1/2 + 1/4 + ...


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((1, 1, "mru"), "no chunk policy 'mru'; choose one of score, ema, lru, lfu"),
        ((-1, 1), "got -1 for device"),
    ],
)
def test_bad_options(arguments: tuple[int, int, str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        ChunkPlacement(*arguments)
    with pytest.raises(ConfigError, match="beta"):
        ChunkPlacement(1, 1, beta=0)
    with pytest.raises(ValueError, match="5 of 4 rows"):
        ChunkPlacement(1, 1).access("a", 1, 4, 5)
