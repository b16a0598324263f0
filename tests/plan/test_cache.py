"""The cache manager: operations that several parts take part in."""

from __future__ import annotations

from dataclasses import replace
from math import inf

import pytest

from afterglow.plan.cache import Cache
from afterglow.plan.options import SchedulerOptions
from afterglow.plan.prefix.extent import Extent, View
from afterglow.plan.prefix.shared_prefixes import OPERATOR
from afterglow.plan.step import JobSpec, Load, MoveDone
from afterglow.plan.tiers.device import DeviceSegment
from tests.plan.fake_executor import pack
from tests.plan.tiers_kit import BLOCK, Tiers

TOKENS = pack(list(range(100, 100 + 2 * BLOCK)))
SPEC = JobSpec(1, TOKENS, 1)


def computed(tiers: Tiers, tokens: bytes, prefix: bytes = b"", salt: str = "", now: float = 0.0) -> Extent:
    """Put an extent into a cache, as a job does whose rows have been saved."""
    cache = tiers.cache
    extent = cache.new_extent(salt, prefix, tokens, volatile=False, now=now)
    assert cache.within_quota(salt, extent.file_bytes)
    slots = cache.host.take_slots(cache.capacity.blocks(extent.rows), now)
    assert slots is not None
    assert cache.insert(extent, prefix).outcome == "inserted"
    cache.add(extent, slots, now)
    cache.need(extent, now, None, False)
    return extent


def check(cache: Cache) -> None:
    cache.check([])


def test_an_extent_is_named_by_all_that_its_rows_depend_on() -> None:
    cache = Tiers().cache
    names = {
        cache.new_extent(salt, prefix, own, volatile=False, now=0.0).id
        for salt in ("a", "b")
        for prefix in (b"", TOKENS)
        for own in (TOKENS, TOKENS[:4])
    }
    assert len(names) == 8
    first, second = (cache.new_extent("a", TOKENS, TOKENS, volatile=True, now=now) for now in (1.0, 2.0))
    assert first.id == second.id
    assert (first.first_row, first.kind, first.created_at) == (2 * BLOCK, "exact", 1.0)
    assert first.serial < second.serial


def test_rows_are_matched_as_soon_as_they_are_inserted() -> None:
    tiers = Tiers()
    assert tiers.cache.match("", TOKENS).rows == 0
    extent = computed(tiers, TOKENS)
    match = tiers.cache.match("", TOKENS + pack([7]))
    assert (match.rows, [view.extent for view in match.views]) == (2 * BLOCK, [extent])
    assert tiers.cache.match("other", TOKENS).rows == 0
    check(tiers.cache)


def test_a_use_counts_and_is_told_to_the_catalog() -> None:
    tiers = Tiers(disk_bytes=1000)
    extent = tiers.clean(1)
    tiers.cache.touch(extent, 5.0, replace(SPEC, ttl=10.0))
    assert (extent.hits, extent.last_used, extent.expires) == (1, 5.0, inf), "found at a restart without an end"
    (use,) = tiers.cache.disk.take_touched()
    assert (use.extent, use.last_used, use.hits) == (extent.id, 5.0, 1)


def test_a_pinned_extent_stays_and_an_unpinned_one_goes() -> None:
    tiers = Tiers(host_slots=2)
    extent = computed(tiers, TOKENS)
    tiers.cache.pin(extent)
    assert tiers.cache.host.take_slots(2, 1.0) is None
    assert not tiers.cache.relief
    tiers.cache.unpin(extent)
    assert tiers.cache.host.take_slots(2, 1.0) is not None
    assert extent.dead
    assert tiers.cache.match("", TOKENS).rows == 0


def test_a_context_ends_with_the_rows_that_the_index_knows() -> None:
    tiers = Tiers()
    extent = computed(tiers, TOKENS)
    text = TOKENS + pack([1, 2, 3])  # three rows that were not saved
    segment = DeviceSegment()
    assert tiers.cache.device.reserve(segment, 12)
    context = tiers.cache.retain("", text, len(text) // 4, segment)
    assert tiers.cache.device.best(text, tiers.cache.match("", text)) == (context, 2 * BLOCK)
    tiers.cache.trim(context.id)
    assert context.rows == 2 * BLOCK
    tiers.cache.placement.forget(extent, "deleted")
    assert tiers.cache.device.frees == [context.id], "rows without an extent are matched no more"
    tiers.cache.trim(context.id)
    check(tiers.cache)


def test_a_context_without_known_rows_is_freed() -> None:
    tiers = Tiers()
    segment = DeviceSegment()
    assert tiers.cache.device.reserve(segment, 12)
    context = tiers.cache.retain("", TOKENS, 2 * BLOCK, segment)
    tiers.cache.trim(context.id)
    assert tiers.cache.device.contexts == {}
    assert tiers.cache.device.used == 0


def test_a_merged_extent_takes_the_place_of_its_parts_everywhere() -> None:
    tiers = Tiers(host_slots=8)
    first = computed(tiers, TOKENS[: 4 * BLOCK], now=1.0)
    second = computed(tiers, TOKENS[4 * BLOCK :], TOKENS[: 4 * BLOCK], now=2.0)
    cache = tiers.cache
    cache.touch(first, 3.0, SPEC)
    cache.sessions.used("", "talk", cache.match("", TOKENS).views, 4.0)
    cache.sessions.used("", "short", cache.match("", TOKENS[: 4 * (BLOCK + 1)]).views, 3.0)
    segment = DeviceSegment()
    assert cache.device.reserve(segment, 8)
    context = cache.retain("", TOKENS, 8, segment)
    whole = cache.new_extent("", b"", TOKENS, volatile=False, now=5.0)
    slots = cache.host.take_slots(2, 5.0)
    assert slots is not None
    cache.placement.prepare(whole, slots)
    cache.replace([first, second], whole)
    assert [view.extent for view in cache.match("", TOKENS).views] == [whole]
    assert (first.dead, second.dead, whole.dead) == (True, True, False)
    assert (whole.hits, whole.last_used) == (1, 3.0)
    assert list(context.extents) == [whole]
    assert [(each.name, each.rows) for each in cache.sessions.listing("")] == [
        ("talk", 2 * BLOCK),
        ("short", BLOCK + 1),
    ]
    assert (cache.counters.merges, cache.counters.merged_rows) == (1, 2 * BLOCK)
    check(cache)


def test_a_reset_forgets_one_tenants_rows_and_names() -> None:
    tiers = Tiers(host_slots=8)
    mine, yours = computed(tiers, TOKENS, salt="mine"), computed(tiers, TOKENS, salt="yours")
    cache = tiers.cache
    cache.sessions.used("mine", "talk", cache.match("mine", TOKENS).views, 1.0)
    cache.registered.register("mine", "prompt", TOKENS, "", 1.0)
    cache.registered.register(OPERATOR, "system", TOKENS[: 4 * BLOCK], "", 1.0)
    cache.reset("mine")
    assert (mine.dead, yours.dead) == (True, False)
    assert cache.sessions.listing("mine") == []
    assert set(cache.registered.listing()) == {OPERATOR}
    check(cache)


def test_notes_bring_back_names_after_a_restart() -> None:
    tiers = Tiers(disk_bytes=1000)
    extent = tiers.clean(1)
    tiers.cache.sessions.used("", "talk", [View(extent, 0, extent.rows)], 1.0)
    assert tiers.cache.sessions.pin("", "talk", pinned=True)
    records = [extent.record()]
    notes: dict[str, dict[str, str]] = {}
    for kind, key, value in tiers.cache.take_notes(last=True):
        if value is not None:
            notes.setdefault(kind, {})[key] = value
    assert tiers.cache.take_notes() == []
    later = Cache(tiers.capacity, SchedulerOptions(digest="m"))
    assert later.restore(records, 2.0) == []
    later.recall(notes)
    (talk,) = later.sessions.listing("")
    assert (talk.name, talk.rows, talk.pinned) == ("talk", BLOCK, True)
    assert later.prefix_of(records[0]) == b""
    check(later)


def test_a_cache_without_a_disk_takes_no_records() -> None:
    extent = Tiers(disk_bytes=1000).clean(1)
    cache = Tiers().cache
    assert cache.restore([extent.record()], 0.0) == []
    assert cache.index.extents == {}


def test_adopted_extents_are_loaded_as_from_disk() -> None:
    other, tiers = Tiers(), Tiers(disk_bytes=1000)
    path = [computed(other, TOKENS)]
    (taken,) = tiers.cache.adopt("", TOKENS, path, None, 1.0)
    assert (taken.host, taken.disk) == ("absent", "ready")
    assert tiers.cache.loading.load(taken, 1.0)
    (load,) = tiers.cache.moves.take()
    assert isinstance(load, Load)
    tiers.cache.complete(MoveDone(load.move, ok=True), 2.0)
    assert taken.host == "ready"
    assert tiers.cache.adopt("", TOKENS, path, None, 3.0) == [], "its rows are here"
    check(tiers.cache)


def test_tidying_forgets_expired_extents_but_those_that_are_waited_for() -> None:
    tiers = Tiers(host_slots=4)
    old, awaited = computed(tiers, TOKENS), computed(tiers, pack([5] * BLOCK))
    for extent in (old, awaited):
        extent.expires = -inf
        tiers.cache.placement.expire(extent, 10.0)
    tiers.cache.tidy(9.0, dict)
    assert not old.dead
    tiers.cache.tidy(11.0, lambda: {awaited})
    assert (old.dead, awaited.dead) == (True, False)
    check(tiers.cache)


def test_stats_are_a_copy() -> None:
    tiers = Tiers(host_slots=4)
    computed(tiers, TOKENS)
    stats = tiers.cache.stats(running=3)
    assert (stats.extents, stats.host_slots, stats.host_slots_total, stats.running) == (1, 2, 4, 3)
    tiers.cache.counters.loads += 1
    assert stats.counters.loads == 0


@pytest.mark.parametrize("policy", ["write_back", "write_through"])
def test_new_extents_are_written_at_once_where_that_is_asked_for(policy: str) -> None:
    tiers = Tiers(disk_bytes=1000, write_policy=policy)
    extent = computed(tiers, TOKENS)
    assert (extent.disk == "writing") == (policy == "write_through")
