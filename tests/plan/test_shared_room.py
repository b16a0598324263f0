"""What a server knows of the room in a shared store, and which extents go first."""

from __future__ import annotations

import pytest

from afterglow.plan.retention import shared_room
from afterglow.plan.retention.shared_room import REFRESH_S, LastUses, Rank, SharedRoom


def leaves(room: SharedRoom, ranks: list[Rank], more: int, size: int = 100) -> list[str]:
    found = []
    for name in room.leaving(ranks, more):
        room.removed(size)
        found.append(name)
    return found


def test_a_server_counts_first_then_after_a_sixteenth_and_when_there_is_no_room() -> None:
    room = SharedRoom(1600)
    assert room.counts(1), "it has never counted"
    room.counted(200)
    assert not room.counts(1)
    room.wrote(100)
    assert not room.counts(1)
    room.wrote(1)
    assert room.counts(1)
    room.counted(1600)
    assert room.counts(1)
    assert not room.fits(1)


def test_down_to_nine_tenths_the_least_recently_used_go_first_and_of_a_path_the_last() -> None:
    room = SharedRoom(1000)
    room.counted(900)
    ranks = [Rank(2.0, 0, "b"), Rank(1.0, 0, "head"), Rank(1.0, -64, "tail"), Rank(1.0, -64, "a"), Rank(3.0, 0, "c")]
    assert leaves(room, ranks, 100) == [], "it fits"
    assert leaves(room, ranks, 101) == ["a", "tail"]
    assert room.used == 700


def test_a_use_counts_again_after_ten_minutes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shared_room, "MAX_LISTINGS", 2)
    uses = LastUses[str]()
    uses.note("a", "listing of a", 0.0)
    uses.note("b", "listing of b", 10.0)
    assert list(uses.again(("b", "a", "unknown"), REFRESH_S)) == []
    assert list(uses.again(("b", "a", "unknown"), REFRESH_S + 5.0)) == ["listing of a"]
    assert list(uses.again(("a",), REFRESH_S + 10.0)) == []
    uses.note("c", "listing of c", 0.0)
    assert (uses.forget("a"), uses.forget("b"), uses.forget("c")) == ("listing of a", None, "listing of c")
