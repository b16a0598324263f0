"""The shared tier in the plan: rows of other engines have a rate of their own, and names say what a reader has to know."""

from __future__ import annotations

from math import inf

import pytest

from afterglow.plan.prefix.block_keys import Lead, block_keys, lead_to
from afterglow.plan.prefix.published import Published, expiry, listed_under
from tests.plan.fake_executor import Text, pack
from tests.plan.server_kit import Server, words
from tests.plan.test_load_or_recompute import HISTORY, taught
from tests.plan.tiers_kit import make_extent

OTHERS = words(HISTORY, 77_000)  # what another engine has computed: four extents of sixteen rows


def with_theirs(seconds: float) -> Server:
    """A server with a fast disk that has learned that a fetch takes so many seconds, and takes another engine's rows over."""
    server = taught(load_seconds=0.01)
    cost, size = server.scheduler.cache.cost, make_extent(OTHERS[:16], []).file_bytes
    for number in range(8):
        cost.started(100_000 + number, size, server.now, far=True)
        cost.ended(100_000 + number, size, seconds, server.now)
    take_over_theirs(server)
    return server


def take_over_theirs(server: Server) -> None:
    """Adopt the other engine's rows, which the executor brings from wherever they are."""
    rows = Text("", OTHERS).rows
    path = [make_extent(OTHERS[at : at + 16], OTHERS[:at]) for at in range(0, HISTORY, 16)]
    for extent in path:
        server.executor.files[extent.id] = rows[extent.first_row :][:16]
        server.executor.catalog[extent.id] = extent.record()
    assert len(server.scheduler.adopt("", pack(OTHERS), path, None, server.now)) == 4


def test_a_fast_shared_tier_is_used_and_told_of() -> None:
    server = with_theirs(seconds=0.01)
    job = server.ask([*OTHERS, 7])
    told = server.admitted[job]
    assert (told.device, told.host, told.disk, told.shared) == (0, 0, 0, HISTORY)
    server.scheduler.drop_contexts()
    server.scheduler.drop_clean_host()
    job = server.ask([*OTHERS, 8])
    assert (server.admitted[job].disk, server.admitted[job].shared) == (HISTORY, 0), (
        "the first load has left a file here"
    )


def test_a_slow_shared_tier_is_not_waited_for_though_the_disk_is_fast() -> None:
    server = with_theirs(seconds=100.0)
    before = len(server.loads())
    job = server.ask([*OTHERS, 7])
    assert server.admitted[job].shared == 0
    assert server.computed(job) == HISTORY + 1
    assert len(server.loads()) == before
    own = server.ask([*words(HISTORY, 9000), 7])
    assert server.admitted[own].disk == HISTORY, "loads from the own disk are predicted by its own rate"


def test_before_its_rate_is_known_the_shared_tier_is_asked() -> None:
    server = taught(load_seconds=0.01)
    take_over_theirs(server)
    assert not server.scheduler.cache.cost.far_known
    job = server.ask([*OTHERS, 7])
    assert server.admitted[job].shared == HISTORY
    assert server.scheduler.cache.cost.far_known


@pytest.mark.parametrize("drops", [False, True])
def test_rows_that_are_computed_although_a_slow_shared_tier_has_them_are_kept_here(drops: bool) -> None:
    """Else each prompt that others have computed too would be computed again and again."""
    server = with_theirs(seconds=100.0)
    own = server.ask([*words(HISTORY, 9000), 7])
    assert server.admitted[own].disk == HISTORY
    assert server.computed(server.ask([*OTHERS, 7])) == HISTORY + 1
    server.scheduler.drop_contexts()
    if drops:
        server.scheduler.flush(server.now)
        server.finish()
        server.scheduler.drop_clean_host()
    told = server.admitted[server.ask([*OTHERS, 8])]
    assert told.disk + told.host == HISTORY
    assert told.shared == 0
    server.nothing_left_behind()


@pytest.mark.parametrize("why", ["refused", "io", "timeout"])
@pytest.mark.parametrize("session", [None, "a name"])
def test_rows_of_a_shared_tier_that_fails_are_computed_once_and_kept_here(why: str, session: str | None) -> None:
    server = taught(load_seconds=0.01)
    take_over_theirs(server)
    server.faults.load, server.faults.busy, server.faults.why = 1.0, 0.0, why
    job = server.ask([*OTHERS, 7], session=session)
    assert server.admitted[job].shared == 0
    server.scheduler.drop_contexts()
    assert server.admitted[server.ask([*OTHERS, 8], session=session)].host == HISTORY
    server.nothing_left_behind()


def test_a_shared_tier_that_was_slow_is_asked_again_though_the_disk_was_never_read() -> None:
    server = Server(disk_bytes=100_000)
    server.row_seconds = 0.1
    for number in range(4):
        server.ask(words(10 + 9 * number, 1000 * (number + 1)))
    cost, size = server.scheduler.cache.cost, make_extent(OTHERS[:16], []).file_bytes
    for number in range(8):
        cost.started(100_000 + number, size, server.now, far=True)
        cost.ended(100_000 + number, size, 100.0, server.now)
    assert cost.far_known
    assert not cost.known
    server.now += 3600
    take_over_theirs(server)
    server.faults.seconds = 0.01
    assert server.admitted[server.ask([*OTHERS, 7])].shared == 0
    assert [load.why for load in server.loads()] == ["probe"]


def test_names_say_all_that_a_reader_has_to_know() -> None:
    for published in (Published("ab" * 20, 0, 1), Published("0c" * 20, 31_000, 1024, 1_800_000_000)):
        assert Published.parse(str(published)) == published
    assert Published("ab" * 20, 64, 100).end == 164
    assert Published("ab" * 20, 0, 1, 50).lives(49.5)
    assert not Published("ab" * 20, 0, 1, 50).lives(50.0)
    assert Published("ab" * 20, 0, 1).lives(inf)
    assert (expiry(inf), expiry(12.2), expiry(-5.0)) == (0, 13, 1)


@pytest.mark.parametrize(
    "name", ["", "x", "ab-1-2-3", f"{'ab' * 20}-1-0-0", f"{'AB' * 20}-1-2-0", f"{'ab' * 20}-1-2-3-4"]
)
def test_other_objects_are_no_names(name: str) -> None:
    assert Published.parse(name) is None


def test_tenants_and_beginnings_are_listed_apart() -> None:
    tokens = pack([1, 2, 3])
    assert len({listed_under(salt, tokens[:at]) for salt in ("", "a", "a.b") for at in (4, 8, 12)}) == 9
    assert listed_under("a", b"b") != listed_under("ab", b"")


def test_blocks_are_hashes_of_all_before_them_and_of_the_tenant() -> None:
    tokens = pack(words(300, 5))
    keys = block_keys("a", tokens)
    assert len(keys) == len(set(keys)) == 5
    assert block_keys("a", tokens[: 4 * 200]) == keys[:4]
    for known in range(6):
        assert block_keys("a", tokens, keys[:known]) == keys
    assert not set(block_keys("b", tokens)) & set(keys)
    changed = bytearray(tokens)
    changed[4 * 64] ^= 1
    assert block_keys("a", bytes(changed))[:2] == keys[:2]
    assert not set(block_keys("a", bytes(changed))[2:]) & set(keys)


@pytest.mark.parametrize(
    ("first", "end", "blocks"),
    [(0, 64, [1]), (0, 63, [0]), (63, 64, [1]), (64, 127, [1]), (64, 129, [2]), (100, 300, [2, 3, 4]), (130, 190, [2])],
)
def test_an_extent_is_found_under_the_blocks_that_end_in_it(first: int, end: int, blocks: list[int]) -> None:
    tokens = pack(words(300, 5))
    keys = block_keys("a", tokens)
    for parent in (None, "12" * 20):
        lead = lead_to(Published("ab" * 20, first, end - first), parent, block_keys("a", tokens[: 4 * end]))
        assert lead == Lead(parent, [keys[each] for each in blocks])
        assert Lead.parse(str(lead)) == lead


@pytest.mark.parametrize(
    "text", ["", "-", "- ", "- 12", f"{'12' * 20}", f"- {'1G' * 16}", f"- {'12' * 16} ", f"-\n{'12' * 16}"]
)
def test_what_is_no_lead_is_none(text: str) -> None:
    assert Lead.parse(text) is None
