"""A tenant has at most so many bytes of extents, in whatever tier: its own oldest make room, never another's."""

from __future__ import annotations

import random

import pytest

from afterglow.plan.prefix.salts import tenant_of
from afterglow.plan.step import Step
from tests.plan.lasting_kit import Lasting
from tests.plan.server_kit import words

# Files of extents of one to four blocks (of four rows) have 100 to 400 bytes.


class Limited(Lasting):
    """A server that looks at every tenant's bytes after each step."""

    def __init__(self, quota: int, **more: object) -> None:
        self.most: dict[str, int] = {}
        self.quota = quota
        super().__init__(**{"disk_bytes": 100_000, "tenant_quota": quota, **more})

    def step(self) -> Step:
        step = super().step()
        for tenant, used in self.usage().items():
            self.most[tenant] = max(used, self.most.get(tenant, 0))
            assert used <= self.quota
        return step

    def usage(self) -> dict[str, int]:
        """Bytes of each tenant, counted one by one."""
        found: dict[str, int] = {}
        for extent in self.scheduler.cache.index.extents.values():
            tenant = tenant_of(extent.salt)
            found[tenant] = found.get(tenant, 0) + extent.file_bytes
        return found


def test_a_tenant_never_has_more_than_its_quota() -> None:
    server = Limited(quota=1000)
    for i in range(10):
        server.ask(words(16, 1000 * i), max_tokens=0, salt="a")
    assert server.most == {"a": 800}, "two of four blocks; a third one would be too many"


@pytest.mark.parametrize("host_slots", [16, 100])
@pytest.mark.parametrize("disk_bytes", [0, 2000, 100_000])
@pytest.mark.parametrize("write_policy", ["write_back", "write_through"])
def test_it_holds_in_whatever_tier_rows_are(write_policy: str, disk_bytes: int, host_slots: int) -> None:
    server = Limited(quota=900, host_slots=host_slots, disk_bytes=disk_bytes, write_policy=write_policy)
    for i in range(8):
        job = server.ask(words(20, 1000 * i), max_tokens=9, salt="ab"[i % 2])
        server.ask([*server.text(job), 7], max_tokens=9, salt="ab"[i % 2])
    assert set(server.most) == {"a", "b"}
    assert min(server.most.values()) > 600


def test_it_holds_for_a_running_job() -> None:
    server = Limited(quota=500)
    job = server.ask(words(40), max_tokens=40, salt="a")
    assert server.ends[job] == "length"
    assert server.most["a"] <= 500
    assert server.scheduler.stats().counters.rows_unsaved > 0


def test_other_tenants_are_left_alone() -> None:
    server = Limited(quota=1000)
    server.ask(words(32), max_tokens=0, salt="b")
    for i in range(10):
        server.ask(words(16, 1000 * i), max_tokens=0, salt="a")
    assert server.known(words(32), "b") == 32
    assert sum(server.hits(server.ask([*words(32), 7], salt="b"))) == 32


def test_a_tenant_in_need_of_room_takes_none_of_another_even_if_that_is_older() -> None:
    server = Limited(quota=400)
    server.ask(words(16), max_tokens=0, salt="b")
    server.ask(words(16, 1000), max_tokens=0, salt="a")
    server.ask(words(16, 2000), max_tokens=0, salt="a")
    assert (server.known(words(16), "b"), server.known(words(16, 1000), "a")) == (16, 0)
    assert server.known(words(16, 2000), "a") == 16


def test_its_least_recently_used_goes_first() -> None:
    server = Limited(quota=1200)
    for i in range(3):
        server.ask(words(16, 1000 * i), max_tokens=0, salt="a")
    server.ask([*words(16, 0), 7], max_tokens=0, salt="a", write=False)  # the first is used again
    server.ask(words(16, 3000), max_tokens=0, salt="a")
    assert [server.known(words(16, 1000 * i), "a") for i in range(4)] == [16, 0, 16, 16]


def test_leaves_go_before_what_they_hang_below() -> None:
    server = Limited(quota=1200)
    server.ask(words(16), max_tokens=0, salt="a")
    server.ask([*words(16), *words(16, 1000)], max_tokens=0, salt="a")
    server.ask([*words(16), *words(16, 2000)], max_tokens=0, salt="a")
    server.ask(words(16, 3000), max_tokens=0, salt="a")
    assert server.known([*words(16), *words(16, 1000)], "a") == 16
    assert server.known([*words(16), *words(16, 2000)], "a") == 32
    assert server.known(words(16, 3000), "a") == 16


def test_a_parent_whose_last_child_has_gone_may_go_too() -> None:
    server = Limited(quota=400)
    server.ask(words(4), max_tokens=0, salt="a")
    server.ask(words(16), max_tokens=0, salt="a")  # the child was used last, and is a leaf
    assert server.usage() == {"a": 400}
    server.ask(words(16, 1000), max_tokens=0, salt="a")
    assert (server.known(words(16), "a"), server.known(words(16, 1000), "a")) == (0, 16)
    assert server.scheduler.stats().counters.rows_unsaved == 0


def test_what_a_running_job_goes_through_is_not_taken_from_it() -> None:
    server = Limited(quota=800, prefill_chunk=16)
    first = server.ask(words(16), max_tokens=0, salt="a")
    running = server.submit([*words(16), 7], max_tokens=20, salt="a")
    server.step()
    server.submit(words(32, 1000), max_tokens=0, salt="a")
    server.finish()
    assert server.known(words(16), "a") == 16
    assert server.ends[first] == server.ends[running] == "length"


def test_pinned_conversations_are_not_taken() -> None:
    server = Limited(quota=800)
    server.ask(words(16), max_tokens=0, salt="a", session="s")
    server.scheduler.pin_session("a", "s", True)
    for i in range(1, 5):
        server.ask(words(16, 1000 * i), max_tokens=0, salt="a")
    assert server.known(words(16), "a") == 16
    assert server.known(words(16, 4000), "a") == 16


def test_where_nothing_may_go_new_rows_are_not_kept() -> None:
    server = Limited(quota=400)
    server.ask(words(16), max_tokens=0, salt="a", session="s")
    server.scheduler.pin_session("a", "s", True)
    job = server.ask(words(16, 1000), max_tokens=3, salt="a")
    assert server.ends[job] == "length"
    assert server.known(words(16, 1000), "a") == 0
    assert server.known(words(16), "a") == 16
    assert server.scheduler.stats().counters.rows_unsaved > 0
    other = server.ask(words(16, 1000), max_tokens=0, salt="b")
    assert server.known(server.text(other), "b") == 16


def test_what_is_larger_than_the_quota_is_not_kept_and_costs_nothing() -> None:
    server = Limited(quota=300)
    server.ask(words(8), max_tokens=0, salt="a")
    server.ask(words(16, 1000), max_tokens=0, salt="a")
    assert server.known(words(8), "a") == 8
    assert server.usage() == {"a": 200}


def test_truncated_rows_count_as_their_tenants() -> None:
    server = Limited(quota=1600, max_model_len=64)
    turns = tuple(range(8, 61, 12))
    for i in range(3):
        history = words(68, 1000 * i)
        server.ask(history[:56], salt="a", truncation=True, turns=turns[:4])
        server.ask(history, salt="a", truncation=True, turns=turns)
    assert any("~" in extent.salt for extent in server.scheduler.cache.index.extents.values())
    assert set(server.usage()) == {"a"}


def test_the_device_has_nothing_of_what_was_taken() -> None:
    server = Limited(quota=400)
    server.ask(words(16), max_tokens=0, salt="a")
    server.ask(words(16, 1000), max_tokens=0, salt="a")
    job = server.ask([*words(16), 7], salt="a")
    assert server.hits(job) == (0, 0, 0)


def test_files_of_what_was_taken_are_removed() -> None:
    server = Limited(quota=400, write_policy="write_through")
    for i in range(5):
        server.ask(words(16, 1000 * i), max_tokens=0, salt="a")
    assert len(server.executor.files) == 1
    assert server.scheduler.stats().disk_bytes == 400


def test_what_is_deleted_makes_room() -> None:
    server = Limited(quota=800)
    for i in range(2):
        server.ask(words(16, 1000 * i), max_tokens=0, salt="a", session=f"s{i}")
    server.scheduler.forget_session("a", "s1")
    server.ask(words(16, 2000), max_tokens=0, salt="a")
    assert [server.known(words(16, 1000 * i), "a") for i in range(3)] == [16, 0, 16]


def test_it_holds_after_a_restart() -> None:
    server = Limited(quota=800)
    for i in range(3):
        server.ask(words(16, 1000 * i), max_tokens=0, salt="a")
    server.restart()
    assert server.usage() == {"a": 800}
    server.ask(words(16, 3000), max_tokens=0, salt="a")
    assert [server.known(words(16, 1000 * i), "a") for i in range(4)] == [0, 0, 16, 16]


def test_a_smaller_quota_holds_from_the_first_step_after_a_restart() -> None:
    server = Limited(quota=1200)
    for i in range(3):
        server.ask(words(16, 1000 * i), max_tokens=0, salt="a", session=f"s{i}")
    server.scheduler.pin_session("a", "s0", True)
    server.restart(tenant_quota=800)
    server.quota = 800
    server.step()
    server.finish()
    assert [server.known(words(16, 1000 * i), "a") for i in range(3)] == [16, 0, 16]
    assert server.scheduler.stats().disk_bytes == 800


def test_without_a_disk_tier_there_is_a_quota_too() -> None:
    server = Limited(quota=800, disk_bytes=0)
    for i in range(4):
        server.ask(words(16, 1000 * i), max_tokens=0, salt="a")
    assert server.usage() == {"a": 800}


@pytest.mark.parametrize("seed", range(6))
def test_it_holds_whatever_happens(seed: int) -> None:
    """Random conversations of three tenants, with faults, tiny tiers, deletions and restarts."""
    rng = random.Random(seed)
    server = Limited(
        quota=rng.choice([400, 1100, 1500]), host_slots=rng.choice([12, 40]), disk_bytes=rng.choice([0, 1500, 10_000]),
        write_policy=rng.choice(["write_back", "write_through"]), policy=rng.choice(["lru", "lookahead"]), max_batch=3,
    )  # fmt: skip
    said = {tenant: [words(10, 1000 * i)] for i, tenant in enumerate("abc")}
    for turn in range(40):
        tenant = rng.choice("abc")
        history = rng.choice(said[tenant])
        prompt = [*history[: rng.randint(1, len(history))], *words(rng.randint(1, 30), 10_000 + 100 * turn)][:90]
        server.faults.store, server.faults.load = rng.choice([(0.0, 0.0), (0.6, 0.0), (0.0, 0.6)])
        job = server.submit(prompt, max_tokens=rng.randint(0, 12), salt=tenant, session=rng.choice([None, "s", "t"]))
        for _ in range(rng.randint(0, 6)):
            server.step()
        said[tenant].append([*server.text(job)][:70])
        if rng.random() < 0.1:
            server.scheduler.forget_session(tenant, "s")
        if rng.random() < 0.1:
            server.scheduler.pin_session(tenant, "t", rng.random() < 0.5)
    server.faults.store = server.faults.load = 0.0
    server.finish()
    for tenant in "abc":
        server.scheduler.pin_session(tenant, "t", False)
    server.restart()
    server.finish()
    assert all(used <= server.quota for used in server.usage().values())
