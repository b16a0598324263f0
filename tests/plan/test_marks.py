"""Breakpoints: extents end at them, and what lies before is evicted last while they live, within the tenant's share."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from afterglow.plan.prefix.extent import Extent
from afterglow.request import Breakpoint
from tests.plan.fake_executor import pack
from tests.plan.lasting_kit import Lasting
from tests.plan.server_kit import words
from tests.plan.tiers_kit import Tiers, stores

# Blocks have four rows; files of extents of one to four blocks have 100 to 400 bytes.


def at(*rows: int, ttl: float = 300.0) -> tuple[Breakpoint, ...]:
    return tuple(Breakpoint(row, ttl) for row in rows)


class Marked(Lasting):
    """A server that is asked for prompts of its own, without replies."""

    def keep(self, tokens: Sequence[int], salt: str = "", *, ttl: float = 300.0, rows: Sequence[int] = ()) -> int:
        """A prompt with breakpoints after so many rows (by default at its end)."""
        return self.ask(tokens, max_tokens=0, salt=salt, breakpoints=at(*(rows or [len(tokens)]), ttl=ttl))

    def flood(self, count: int, salt: str = "", first: int = 10**6) -> None:
        """Prompts of one extent each that no other prompt begins with."""
        for i in range(count):
            self.ask(words(16, first * (i + 1)), max_tokens=0, salt=salt)

    def extents(self, tokens: Sequence[int], salt: str = "") -> list[Extent]:
        return [view.extent for view in self.scheduler.cache.match(salt, pack(list(tokens))).views]


# ------------------------------------------------------------------------------------------------- where extents end


def ends(server: Marked, tokens: Sequence[int]) -> list[int]:
    return [extent.first_row + extent.rows for extent in server.extents(tokens)]


@pytest.mark.parametrize("chunk", [0, 3, 64])
def test_extents_end_at_breakpoints_and_nowhere_else(chunk: int) -> None:
    server = Marked(prefill_chunk=chunk)
    server.keep(words(30), rows=[5, 11, 30])
    assert ends(server, words(30)) == [5, 11, 27, 30], "an extent has at most 16 rows"


def test_rows_that_are_stored_already_are_not_cut() -> None:
    server = Marked()
    server.ask(words(16), max_tokens=0)
    server.keep(words(30), rows=[5, 20])
    assert ends(server, words(30)) == [16, 20, 30]
    assert [extent.mark is not None for extent in server.extents(words(30))] == [True, True, False]


def test_prompts_that_go_on_from_a_breakpoint_share_the_extent_before_it() -> None:
    server = Marked()
    for i in range(3):
        job = server.ask([*words(9), *words(8, 1000 * (i + 1))], breakpoints=at(9))
    assert sum(server.hits(job)) == 9
    assert ends(server, words(9)) == [9]


def test_turns_are_not_merged_over_a_breakpoint() -> None:
    server = Marked(small_rows=256)
    job = server.ask(words(6), max_tokens=4, breakpoints=at(6))
    server.finish()
    assert ends(server, server.text(job)[:9]) == [6, 9]


def test_turns_are_merged_when_the_breakpoint_has_ended() -> None:
    server = Marked(small_rows=256)
    job = server.ask(words(6), max_tokens=2, breakpoints=at(6, ttl=10.0))
    server.now += 20.0
    job = server.ask([*server.text(job), 5], max_tokens=3)
    assert ends(server, server.text(job)[:-1])[-1] == 11
    assert len(server.extents(server.text(job)[:-1])) < 4


def test_a_breakpoint_that_has_moved_on_is_merged_over() -> None:
    server = Marked(small_rows=256)
    job = server.ask(words(6), max_tokens=2, breakpoints=at(6))
    server.ask([*server.text(job), 5, 6], max_tokens=0, breakpoints=at(10))
    server.finish()
    assert ends(server, [*server.text(job), 5, 6]) == [10]
    assert server.extents(words(6))[0].mark is not None


@pytest.mark.parametrize("session", [None, "s"])
@pytest.mark.parametrize("write_policy", ["write_back", "write_through"])
def test_the_turns_of_an_agent_are_merged_up_to_the_breakpoint_that_moves_on(
    write_policy: str, session: str | None
) -> None:
    server = Marked(block=64, device_rows=4000, disk_bytes=10**6, write_policy=write_policy)
    text = words(239, 5000)
    for turn in range(20):
        text += words(41, 10_000 + 1000 * turn)
        job = server.ask(text, 19, session=session, breakpoints=at(239, len(text)))
        text = server.text(job)
    assert ends(server, text) == [239, 460, 700, 940, 1180, len(text) - 19, len(text) - 1], "41 if none were merged"
    assert [extent.mark is not None for extent in server.extents(text)] == [True] * 6 + [False]


def test_conversations_that_others_share_are_not_merged_into_one() -> None:
    server = Marked(block=64, device_rows=4000)
    server.ask(words(40), 0, session="s", breakpoints=at(40))
    server.ask([*words(40), *words(40, 1000)], 0, session="t", breakpoints=at(80))
    assert ends(server, [*words(40), *words(40, 1000)]) == [40, 80]


# -------------------------------------------------------------------------------------------------- what is kept


def test_marked_rows_outlive_unmarked_ones_in_host() -> None:
    for marked in (True, False):
        server = Marked(host_slots=24, retain=False)
        server.keep(words(16)) if marked else server.ask(words(16), max_tokens=0)
        server.flood(20)
        assert server.known(words(16)) == (16 if marked else 0)
    assert server.known(words(16, 20 * 10**6)) == 16, "the last one is there in any case"


@pytest.mark.parametrize("policy", ["lru", "fifo", "lfu", "lookahead"])
@pytest.mark.parametrize("write_policy", ["write_back", "write_through"])
def test_marked_rows_outlive_unmarked_ones_on_disk(policy: str, write_policy: str) -> None:
    for marked in (True, False):
        server = Marked(host_slots=24, disk_bytes=2000, retain=False, policy=policy, write_policy=write_policy)
        server.keep(words(16), ttl=3600.0) if marked else server.ask(words(16), max_tokens=0)
        server.flood(30)
        assert server.known(words(16)) == (16 if marked else 0)
        server.to_disk()
        assert (pack(words(16)) in [record.tokens for record in server.executor.catalog.values()]) == marked


def test_the_head_of_a_marked_prompt_is_kept_with_it() -> None:
    server = Marked(host_slots=40, disk_bytes=3000, retain=False)
    server.ask(words(16), max_tokens=0)
    server.keep(words(40), rows=[40])
    server.flood(30)
    assert server.known(words(40)) == 40


def test_what_lies_behind_the_breakpoint_is_not_kept() -> None:
    server = Marked(host_slots=24, retain=False)
    server.keep(words(32), rows=[16])
    server.flood(20)
    assert server.known(words(32)) == 16


def test_a_mark_ends_after_its_lifetime_and_the_rows_stay_as_others_do() -> None:
    server = Marked(host_slots=24, retain=False)
    server.keep(words(16), ttl=100.0)
    server.now += 101.0
    server.step()
    assert server.known(words(16)) == 16, "nothing is deleted"
    assert server.scheduler.stats().marked_rows == 0
    server.flood(20)
    assert server.known(words(16)) == 0


def test_each_use_refreshes_a_mark_also_of_prompts_without_breakpoints() -> None:
    server = Marked(host_slots=24, retain=False)
    server.keep(words(16), ttl=100.0)
    for _ in range(5):
        server.now += 80.0
        server.ask([*words(16), 7], max_tokens=0)
    server.flood(20)
    assert server.known(words(16)) == 16


def test_the_longer_of_two_lifetimes_holds() -> None:
    server = Marked(host_slots=24, retain=False)
    server.keep(words(16), ttl=3600.0)
    server.keep(words(16), ttl=300.0)
    server.now += 1000.0
    server.flood(20)
    assert server.known(words(16)) == 16


def test_rows_with_an_end_of_their_own_stay_as_long_as_the_mark() -> None:
    server = Marked(retain=False)
    server.ask(words(16), max_tokens=0, ttl=10.0, breakpoints=at(8, ttl=500.0))
    server.sleep(400.0)
    assert server.known(words(16)) == 8
    server.sleep(600.0)
    assert server.known(words(16)) == 0


# ---------------------------------------------------------------------------------------------------- shares


def test_marks_beyond_the_share_of_a_tenant_count_as_none_and_are_counted() -> None:
    server = Marked(host_slots=40, retain=False, tenant_pins=0.3)  # 12 blocks: three extents
    for i in range(5):
        server.keep(words(16, 1000 * i))
    assert server.scheduler.stats().counters.rows_over_share == 2 * 16
    server.flood(20)
    assert [server.known(words(16, 1000 * i)) for i in range(5)] == [0, 0, 16, 16, 16]


def test_marks_of_one_tenant_never_take_the_room_of_others() -> None:
    server = Marked(host_slots=40, disk_bytes=4000, retain=False, tenant_pins=0.25)
    for i in range(40):
        server.keep(words(16, 1000 * i), "greedy", ttl=3600.0)
    for i in range(6):
        server.ask(words(16, 1000 * i), max_tokens=0, salt="other")
    for i in range(40, 42):
        server.keep(words(16, 1000 * i), "greedy", ttl=3600.0)
    assert [server.known(words(16, 1000 * i), "other") for i in range(6)] == [16] * 6
    for i in range(42, 80):
        server.keep(words(16, 1000 * i), "greedy", ttl=3600.0)
        for j in range(2):
            server.ask(words(16, 1000 * j), max_tokens=0, salt="other")
    assert [server.known(words(16, 1000 * j), "other") for j in range(2)] == [16] * 2, (
        "used more lately than most marks"
    )


def test_pins_leave_less_room_for_marks() -> None:
    server = Marked(host_slots=40, retain=False, tenant_pins=0.3)
    server.keep(words(16))
    server.keep(words(16, 1000))
    server.ask(words(32, 2000), max_tokens=0, session="s")
    server.scheduler.pin_session("", "s", True)
    server.step()
    server.flood(20)
    assert (server.known(words(16)), server.known(words(16, 1000))) == (0, 16)


def test_within_its_quota_a_tenant_keeps_marked_rows() -> None:
    server = Marked(disk_bytes=100_000, tenant_quota=1200)
    server.keep(words(16), "a")
    server.flood(10, "a")
    assert server.known(words(16), "a") == 16
    assert server.known(words(16, 10 * 10**6), "a") == 16


def test_a_quota_full_of_marks_still_takes_new_rows() -> None:
    server = Marked(disk_bytes=100_000, tenant_quota=800)
    for i in range(5):
        server.keep(words(16, 1000 * i), "a")
    server.ask(words(16, 9000), max_tokens=0, salt="a")
    assert server.known(words(16, 9000), "a") == 16


def test_a_share_of_nothing_marks_nothing() -> None:
    server = Marked(host_slots=24, retain=False, tenant_pins=0.0)
    server.keep(words(16))
    server.flood(20)
    assert server.known(words(16)) == 0


# ---------------------------------------------------------------------------------------------- restarts, cuts


def test_marks_survive_a_restart() -> None:
    server = Marked(host_slots=24, disk_bytes=2000, retain=False)
    server.keep(words(16), ttl=3600.0)
    server.restart(after=1000.0)
    assert server.scheduler.stats().marked_rows == 16
    server.flood(30)
    assert server.known(words(16)) == 16
    server.restart(after=3000.0)
    assert server.scheduler.stats().marked_rows == 0
    server.flood(30, first=10**7)
    assert server.known(words(16)) == 0
    server.restart()
    assert server.notes["mark"] == {}


def test_unreadable_notes_are_ignored() -> None:
    server = Marked(disk_bytes=2000)
    server.keep(words(16))
    server.restart()
    for text in ("", "[]", "[1]", "{}", '[["x", 1, 2, true]]', '[["x", null]]', "null"):
        server.notes["mark"] = {"000000": text}
        server.scheduler.recall(server.notes)
        server.scheduler.check()


def test_a_smaller_disk_keeps_marked_rows_at_shutdown_and_after() -> None:
    server = Marked(host_slots=200, disk_bytes=1200, retain=False)
    server.keep(words(16), ttl=10_000.0)
    server.flood(10)
    server.restart(disk_bytes=800)
    server.step()
    server.finish()
    assert server.known(words(16)) == 16


def test_breakpoints_of_a_prompt_that_is_cut_go_with_their_tokens() -> None:
    server = Marked(max_model_len=64)
    history = words(76)
    turns = tuple(range(8, 76, 12))
    job = server.submit(history, max_tokens=0, truncation=True, turns=turns, breakpoints=at(8, 40, 76))
    kept = len(server.specs[job].prompt) // 4
    assert kept < 64
    rows = [each.rows for each in server.specs[job].breakpoints]
    assert (rows[0], rows[-1]) == (8, kept)
    server.finish()


# ------------------------------------------------------------------------------------------- tiers by themselves


def test_a_marked_parent_whose_children_went_is_kept_where_there_is_no_disk() -> None:
    tiers = Tiers(host_slots=4)
    top = tiers.add(1, now=1.0)
    tiers.add(2, now=2.0, below=top)
    kept = tiers.add(3, now=0.0)
    tiers.placement.marks.use(tiers.cache.match("", kept.tokens).views, at(4), 0.0)
    tiers.placement.host.evict(3, now=3.0)
    assert (top.dead, kept.dead) == (True, False), (
        "an unmarked parent goes, once its child has gone, before a marked one"
    )


def test_an_unmarked_newcomer_takes_no_marked_file() -> None:
    tiers = Tiers(host_slots=8, disk_bytes=100)
    kept = tiers.on_disk(1)
    tiers.placement.marks.use(tiers.cache.match("", kept.tokens).views, at(4), 0.0)
    new = tiers.add(2, now=5.0)
    assert tiers.placement.disk.store(new, 5.0, "evict") == "never"
    assert not kept.dead
    tiers.placement.marks.use(tiers.cache.match("", new.tokens).views, at(4), 5.0)
    assert tiers.placement.disk.store(new, 5.0, "evict") == "soon"
    assert kept.dead
    assert not stores(tiers.planned())


def test_a_marked_file_goes_before_one_that_a_job_waits_for() -> None:
    tiers = Tiers(host_slots=8, disk_bytes=200, policy="lookahead")
    kept, awaited = tiers.on_disk(1), tiers.on_disk(2)
    tiers.placement.marks.use(tiers.cache.match("", kept.tokens).views, at(4), 0.0)
    awaited.waiting = ((0, 1, 0, 1),)
    tiers.placement.candidates.update(awaited)
    new = tiers.add(3, now=5.0)
    tiers.placement.marks.use(tiers.cache.match("", new.tokens).views, at(4), 5.0)
    assert tiers.placement.disk.store(new, 5.0, "evict") == "soon"
    assert (kept.dead, awaited.dead) == (True, False)


# ---------------------------------------------------------------------------------------------- whatever happens

PROMPTS = st.tuples(
    st.integers(0, 3),  # which conversation
    st.integers(1, 40),  # of how many tokens
    st.lists(st.tuples(st.integers(1, 40), st.sampled_from([5.0, 300.0, 3600.0])), max_size=4),
    st.sampled_from(["a", "b"]),
    st.sampled_from([0.0, 3.0, 400.0]),  # seconds until the next
    st.integers(0, 3),  # tokens of the reply
)


@settings(max_examples=60, deadline=None)
@given(
    prompts=st.lists(PROMPTS, min_size=1, max_size=14),
    host_slots=st.sampled_from([12, 30, 100]),
    disk_bytes=st.sampled_from([0, 1000, 5000]),
    policy=st.sampled_from(["lookahead", "lru"]),
    share=st.sampled_from([None, 0.0, 0.3]),
    quota=st.sampled_from([None, 1500]),
)
def test_rows_are_right_and_budgets_hold_whatever_is_marked(
    prompts: list[tuple[int, int, list[tuple[int, float]], str, float, int]],
    host_slots: int,
    disk_bytes: int,
    policy: str,
    share: float | None,
    quota: int | None,
) -> None:
    # The executor asserts that each gathered row is the right one, `check` that all that is counted adds up, at each step.
    server = Marked(host_slots=host_slots, disk_bytes=disk_bytes, policy=policy, tenant_pins=share, tenant_quota=quota)
    for number, (which, rows, marks, salt, later, reply) in enumerate(prompts):
        found = {min(row, rows): Breakpoint(min(row, rows), ttl) for row, ttl in marks}
        breakpoints = tuple(found[row] for row in sorted(found))
        tokens = [*words(8, 7 * (which // 2)), *words(rows, 500 * (which + 1))][:rows]
        server.ask(tokens, max_tokens=reply, salt=salt, breakpoints=breakpoints)
        server.now += later
        marked = [e for e in server.scheduler.cache.index.extents.values() if e.mark is not None]
        for tenant in ("a", "b"):
            own = [e for e in marked if e.salt == tenant]
            if share is not None:
                host = sum(server.capacity.blocks(e.rows) for e in own if e.kept_in_host)
                assert host <= share * host_slots
                assert sum(e.file_bytes for e in own if e.kept_on_disk) <= share * disk_bytes
        for extent in marked:
            above = extent.above
            assert above is None or above.mark is not None
            assert above is None or above.mark is None or extent.mark is None or above.mark.end >= extent.mark.end
        if number == len(prompts) // 2 and disk_bytes:
            server.restart()
