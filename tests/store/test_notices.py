"""Events that each engine acts upon once, and facts that hold until they are withdrawn, over one store."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from afterglow.errors import StoreError
from afterglow.store.shared import notices, records, remote
from afterglow.store.shared.counters import SharedCounters
from afterglow.store.shared.notices import FILE, HOUR_S, Notices
from afterglow.store.shared.objects import Listed
from afterglow.store.shared.records import Records
from afterglow.store.shared.remote import Remote
from tests.store.bucket import Bucket

START = 1_000_000 * HOUR_S + 1800.0


class World:
    """Engines over one store, and their clock."""

    def __init__(self, folder: Path) -> None:
        self.bucket = Bucket()
        self.now = START
        self._folder = folder

    def engine(self, name: str, skew: float = 0.0) -> Notices:
        """Start an engine, or start it again."""
        folder = self._folder / name
        folder.mkdir(exist_ok=True)
        found = Records(Remote(lambda: self.bucket), "digest", SharedCounters())
        return Notices(found, folder, lambda: self.now + skew)


@pytest.fixture
def world(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> World:
    monkeypatch.setattr(remote, "MAX_FAILURES", 1 << 30)
    return World(tmp_path)


def names(engine: Notices) -> list[str]:
    return [event["name"] for event in engine.events()]


def test_an_event_reaches_every_other_engine_once(world: World) -> None:
    a, b, c = (world.engine(name) for name in "abc")
    assert [names(each) for each in (a, b, c)] == [[], [], []]
    a.tell({"name": "one"})
    world.now += 1
    b.tell({"name": "two"})
    assert [names(each) for each in (a, b, c)] == [["two"], ["one"], ["one", "two"]]
    world.now += 3 * HOUR_S
    assert [names(each) for each in (a, b, c)] == [[], [], []]


def test_an_engine_that_starts_for_the_first_time_has_nothing_to_undo(world: World) -> None:
    a = world.engine("a")
    a.tell({"name": "old"})
    b = world.engine("b")
    assert names(b) == []
    a.tell({"name": "new"})
    assert names(b) == ["new"]


@pytest.mark.parametrize("away", [60.0, 5 * HOUR_S, 100 * HOUR_S])
def test_an_engine_that_was_away_catches_up(world: World, away: float) -> None:
    a, b = world.engine("a"), world.engine("b")
    names(a), names(b)
    a.tell({"name": "seen"})
    assert names(b) == ["seen"]
    b.save()
    a.tell({"name": "missed"})
    world.now += away
    a.tell({"name": "also missed"})
    assert names(world.engine("b")) == ["missed", "also missed"]


def test_clocks_that_differ_hide_nothing(world: World) -> None:
    world.now = START + HOUR_S / 2 - 10  # before the end of an hour
    a, early, late = world.engine("a"), world.engine("early", -60), world.engine("late", 60)
    names(a), names(early), names(late)
    for teller in (early, late):
        teller.tell({"name": "x"})
        assert names(a) == ["x"]
    a.tell({"name": "y"})
    assert "y" in names(early)
    assert "y" in names(late)


def test_a_fact_holds_until_it_is_withdrawn_and_the_latest_value_counts(world: World) -> None:
    a, b = world.engine("a"), world.engine("b")
    a.state("prompt", {"text": "one"})
    a.state("pin", {"text": ""})
    assert {key: value["text"] for key, value in b.facts().items()} == {"prompt": "one", "pin": ""}
    world.now += 1
    b.state("prompt", {"text": "two"})
    for each in (a, b, world.engine("c")):
        assert each.facts()["prompt"]["text"] == "two"
    assert len(world.bucket.objects) == 2, "earlier values are gone"
    world.now += 40 * 24 * HOUR_S
    assert a.facts()["prompt"]["text"] == "two"
    a.withdraw("prompt", {"name": "end"})
    b.withdraw("never stated", {"name": "end"})
    assert [*b.facts()] == ["pin"]


def test_what_cannot_be_told_is_told_when_the_store_answers_in_its_order(world: World) -> None:
    a, b = world.engine("a"), world.engine("b")
    names(b)
    world.bucket.down = True
    a.tell({"name": "one"})
    a.state("pin", {"text": ""})
    world.now += 1
    a.withdraw("pin", {"name": "unpin"})
    a.state("prompt", {"text": ""})
    with pytest.raises(StoreError):
        a.do_late()
    world.bucket.down = False
    assert names(b) == []
    while a.waiting:
        a.do_late()
    assert names(b) == ["one", "unpin", "unpin"], "again when the fact is gone"
    assert [*b.facts()] == ["prompt"]


def test_what_fails_alone_holds_nothing_else_up(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    a, b = world.engine("a"), world.engine("b")
    names(b)
    a.state("pin", {"text": ""})

    def denied(path: str) -> None:
        raise PermissionError("denied")

    with monkeypatch.context() as patch:
        patch.setattr(world.bucket, "delete", denied)
        a.withdraw("pin", {"name": "unpin"})
        assert names(b) == ["unpin"]
        world.now += 1
        a.state("pin", {"text": "newer"})  # waits for the change before it
        a.tell({"name": "one"})
        with pytest.raises(StoreError):
            a.do_late()
    assert names(b) == ["one"]
    assert (b.facts()["pin"]["text"], a.waiting) == ("", {"pin"})
    a.do_late()
    assert b.facts()["pin"]["text"] == "newer"
    assert names(b) == ["unpin"], "again: others may have found the fact stated meanwhile"


def test_of_many_changes_that_fail_a_try_meets_few_and_each_has_its_turn(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(notices, "MAX_LATE_FAILURES", 2)
    a, tried = world.engine("a"), list[int]()

    def fails(number: int) -> None:
        tried.append(number)
        raise StoreError("denied")

    for number in range(5):
        assert not a.do(partial(fails, number))
    assert tried == [0, 1, 2, 3, 4], "one that is new tries itself alone"
    tried.clear()
    for _ in range(5):
        with pytest.raises(StoreError, match="denied"):
            a.do_late()
    assert tried == [0, 1, 2, 3, 4, 0, 1, 2, 3, 4]


def test_a_late_change_of_a_fact_leaves_what_others_have_stated_since(world: World) -> None:
    a, b = world.engine("a"), world.engine("b")
    a.state("prompt", {"text": "one"})
    a.state("pin", {"text": "one"})
    world.bucket.down = True
    a.withdraw("prompt", {"name": "end"})
    a.state("pin", {"text": "two"})
    world.bucket.down = False
    world.now += HOUR_S
    b.state("prompt", {"text": "three"})
    b.state("pin", {"text": "three"})
    a.do_late()
    for each in (a, b, world.engine("c")):
        assert {key: value["text"] for key, value in each.facts().items()} == {"prompt": "three", "pin": "three"}


@pytest.mark.parametrize("behind", [0.25 * HOUR_S, 0.9 * HOUR_S])
def test_events_of_an_engine_whose_clock_is_far_behind_are_found_once(world: World, behind: float) -> None:
    a, b = world.engine("a", -behind), world.engine("b")
    b.tell({"name": "before b has looked at all"})
    names(b)
    found = []
    for minute in range(90):
        if minute % 30 == 0:
            a.tell({"name": minute})
        found += names(b)
        world.now += 61
    assert found == [0, 30, 60]


def test_too_much_that_cannot_be_told_is_left_out(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(notices, "MAX_UNTOLD", 2)
    a, b = world.engine("a"), world.engine("b")
    names(b)
    world.bucket.down = True
    for name in ("one", "two", "three"):
        a.tell({"name": name})
    world.bucket.down = False
    a.do_late()
    assert sorted(names(b)) == ["one", "two"]


def test_what_is_told_late_is_found_by_those_who_have_looked_meanwhile(world: World) -> None:
    a, b = world.engine("a"), world.engine("b")
    names(b)
    world.bucket.down = True
    a.tell({"name": "one"})
    world.bucket.down = False
    world.now += HOUR_S
    assert names(b) == []
    a.do_late()
    assert names(b) == ["one"]
    world.now += 1
    assert names(b) == []


def test_an_event_that_could_not_be_acted_upon_comes_again(world: World) -> None:
    a, b = world.engine("a"), world.engine("b")
    names(b)
    a.tell({"name": "one"})
    world.now += 1
    a.tell({"name": "two"})
    for event in b.events():
        if event["name"] == "two":
            break  # the engine has stopped
    b.save()
    assert names(world.engine("b")) == ["two"]


def test_a_fact_survives_that_its_earlier_value_could_not_be_removed_at_once(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    a, b = world.engine("a"), world.engine("b")
    a.state("prompt", {"text": "one"})
    world.now += 1

    def fails(path: str) -> None:
        raise ConnectionRefusedError("down")

    with monkeypatch.context() as patch:
        patch.setattr(world.bucket, "delete", fails)
        a.state("prompt", {"text": "two"})
    a.do_late()
    assert b.facts()["prompt"]["text"] == "two"
    assert len(world.bucket.objects) == 1


def test_facts_are_whole_where_two_threads_read_them(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    a, read = world.engine("a"), Records.load
    a.state("one", {})
    assert [*a.facts()] == ["one"]
    world.engine("b").state("two", {})

    def load(*args: Any) -> Any:
        found = read(*args)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(Records, "load", read)
            patch.setattr(Records, "marks", lambda *args: set())
            assert a.facts() == {}, "another thread, whose listing is an earlier one"
        return found

    monkeypatch.setattr(Records, "load", load)
    assert sorted(a.facts()) == ["one", "two"]


def test_an_event_is_not_lost_where_reading_it_fails(world: World) -> None:
    a, b = world.engine("a"), world.engine("b")
    names(b)
    a.tell({"name": "one"})
    world.bucket.down = True
    with pytest.raises(StoreError):
        names(b)
    world.bucket.down = False
    assert names(b) == ["one"]


def test_damaged_events_and_facts_are_none(world: World) -> None:
    a, b = world.engine("a"), world.engine("b")
    names(b)
    a.tell({"name": "one"})
    a.state("pin", {"text": ""})
    world.bucket.objects = {path: raw[:-3] for path, raw in world.bucket.objects.items()}
    assert names(b) == []
    assert b.facts() == {}
    a.tell({"name": "two"})
    assert names(b) == ["two"]


@pytest.mark.parametrize("text", ["", "[]", '{"until": "x"}', '{"until": 1, "seen": [1]}', '{"seen": {"a": []}}'])
def test_a_damaged_file_of_what_was_seen_is_as_none(world: World, tmp_path: Path, text: str) -> None:
    a, b = world.engine("a"), world.engine("b")
    names(b)
    a.tell({"name": "one"})
    (tmp_path / "b" / FILE).write_text(text)
    again = world.engine("b")
    assert names(again) == []
    a.tell({"name": "two"})
    assert names(again) == ["two"]


def test_however_many_facts_there_are_no_call_reads_or_lists_many(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each call has its deadline, which a store that answers meets."""
    pages, most, call, every = 0, 0, Remote.call, world.bucket.list

    def paged(prefix: str) -> Iterator[list[Listed]]:
        nonlocal pages
        for each in next(every(prefix)):
            pages += 1
            yield [each]

    def counted(*args: Any) -> Any:
        nonlocal most
        before, calls = pages, world.bucket.calls
        found = call(*args)
        most = max(most, pages - before, (world.bucket.calls - calls) // records.BATCH)
        return found

    a, kept = world.engine("a"), Records(Remote(lambda: world.bucket), "digest", SharedCounters())
    for number in range(2 * records.BATCH + 1):
        kept.put(notices.FACTS, "", str(number), {"fact": str(number), "at": number})
    monkeypatch.setattr(world.bucket, "list", paged)
    monkeypatch.setattr(Remote, "call", counted)
    assert len(a.facts()) == 2 * records.BATCH + 1
    assert most == 1
