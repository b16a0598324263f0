"""Which rows which tenant finds: tenants share nothing, truncated rows are no prefix, and nothing that
is only nearly right is taken for exact."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from afterglow.plan.prefix.extent import Extent
from afterglow.plan.prefix.salts import client_salt, is_private
from tests.plan.lasting_kit import Lasting
from tests.plan.server_kit import jobs_of, words

WINDOW = 64
TURNS = (8, 20, 32, 44)  # a system prompt of 8 tokens, turns of 12


def serving(**settings: object) -> Lasting:
    return Lasting(**{"disk_bytes": 100_000, "source": "load", **settings})


def move_to(server: Lasting, where: str) -> None:
    {"device": server.finish, "host": server.to_host, "disk": server.to_disk, "restarted": server.restart}[where]()


def extents(server: Lasting) -> list[Extent]:
    return list(server.scheduler.cache.index.extents.values())


# ------------------------------------------------------------------------------------------------ tenants


@pytest.mark.parametrize("where", ["device", "host", "disk", "restarted"])
def test_the_same_prompt_under_another_salt_finds_nothing_in_any_tier(where: str) -> None:
    server = serving()
    server.ask(words(40), max_tokens=5, salt="a")
    move_to(server, where)
    for salt in ("b", "", "A", "a "):
        job = server.ask(words(40), max_tokens=5, salt=salt)
        assert server.hits(job) == (0, 0, 0)
        assert server.computed(job) == 40 + 4


@pytest.mark.parametrize("where", ["device", "host", "disk", "restarted"])
def test_the_same_prompt_under_the_same_salt_finds_everything(where: str) -> None:
    server = serving()
    for salt in ("a", "b"):
        server.ask(words(40), max_tokens=0, salt=salt)
    move_to(server, where)
    for salt in ("a", "b"):
        assert sum(server.hits(server.ask(words(41), salt=salt))) == 40


def test_a_tenant_of_no_salt_is_a_tenant_like_any_other() -> None:
    server = serving()
    server.ask(words(40), max_tokens=0)
    assert server.hits(server.ask(words(41), salt="a")) == (0, 0, 0)
    assert sum(server.hits(server.ask(words(41)))) == 40


def test_equal_rows_of_two_tenants_are_stored_twice_under_two_names() -> None:
    server = serving(write_policy="write_through")
    for salt in ("a", "b"):
        server.ask(words(16), max_tokens=0, salt=salt)
    assert len({extent.id for extent in extents(server)}) == 2
    assert sorted(record.salt for record in server.executor.catalog.values()) == ["a", "b"]


def test_another_model_finds_nothing() -> None:
    names = []
    for digest in ("m", "n"):
        server = serving(digest=digest)
        server.ask(words(16), max_tokens=0)
        names.append(extents(server)[0].id)
    assert names[0] != names[1]


def test_a_tenant_finds_as_much_as_if_it_were_alone() -> None:
    """And so learns nothing of what the others do, as long as there is room for all."""
    rng = random.Random(7)
    script: list[tuple[str, list[int], int]] = []
    for _ in range(60):
        system = words(10, rng.choice([100, 200]))
        prompt = [*system, *words(rng.randint(1, 20), 1000 * rng.randint(1, 3))]
        script.append((rng.choice("abc"), prompt, rng.randint(0, 6)))
    shared = serving(device_rows=10_000, host_slots=2000)
    found = [(salt, shared.hits(shared.ask(prompt, more, salt=salt))) for salt, prompt, more in script]
    for tenant in "abc":
        alone = serving(device_rows=10_000, host_slots=2000)
        own = [alone.hits(alone.ask(prompt, more, salt=salt)) for salt, prompt, more in script if salt == tenant]
        assert own == [hits for salt, hits in found if salt == tenant]
        assert sum(map(sum, own)) > 100


def test_nobody_waits_for_what_another_tenant_computes() -> None:
    server = serving(block=64, device_rows=4096)
    first = server.submit(words(200), salt="a")
    other = server.submit(words(200), salt="b")
    same = server.submit(words(200), salt="a")
    assert jobs_of(server.step()) == [first, other]
    server.finish()
    assert sum(server.hits(same)) == 199


@pytest.mark.parametrize("where", ["device", "host", "disk", "restarted"])
def test_a_reset_of_one_tenant_leaves_the_others(where: str) -> None:
    server = serving()
    for salt in ("a", "b", ""):
        server.ask(words(40), max_tokens=0, salt=salt, session="s")
    move_to(server, where)
    server.scheduler.reset(server.now, "a")
    server.finish()
    assert {extent.salt for extent in extents(server)} == {"b", ""}
    assert {record.salt for record in server.executor.catalog.values()} <= {"b", ""}
    assert [server.names(salt) for salt in ("a", "b", "")] == [[], ["s"], ["s"]]
    for salt, rows in (("a", 0), ("b", 40), ("", 40)):
        assert sum(server.hits(server.ask(words(41), salt=salt))) == rows


def test_a_reset_of_the_tenant_without_a_salt_is_not_a_reset_of_all() -> None:
    server = serving()
    for salt in ("", "a"):
        server.ask(words(40), max_tokens=0, salt=salt)
    server.scheduler.reset(server.now, "")
    assert (server.known(words(40)), server.known(words(40), "a")) == (0, 40)
    server.scheduler.reset(server.now)
    assert server.known(words(40), "a") == 0


def test_a_reset_takes_truncated_rows_too_and_only_its_own() -> None:
    server = serving(max_model_len=WINDOW)
    for salt in ("a", "b"):
        server.ask(words(56), salt=salt, truncation=True, turns=TURNS)
        server.ask(words(68), salt=salt, truncation=True, turns=(*TURNS, 56))
    server.scheduler.reset(server.now, "a")
    server.finish()
    assert {client_salt(extent.salt) for extent in extents(server)} == {"b"}
    jobs = [server.ask(words(76), salt=salt, truncation=True, turns=(*TURNS, 56, 68)) for salt in ("a", "b")]
    assert server.hits(jobs[0]) == (0, 0, 0)
    assert sum(server.hits(jobs[1])) == 32


def test_a_reset_of_one_tenant_leaves_the_running_jobs_of_others() -> None:
    server = serving()
    job = server.submit(words(40), max_tokens=10, salt="b")
    server.step()
    server.scheduler.reset(server.now, "a")
    server.finish()
    assert server.known(server.text(job), "b") == 49


# ------------------------------------------------------------------------------------------ truncated rows


def cut_server(**settings: object) -> tuple[Lasting, list[int]]:
    """A server that has cut a conversation of tenant "a"; and the tokens that are left, reply included."""
    server = serving(max_model_len=WINDOW, **settings)
    server.ask(words(56), salt="a", truncation=True, turns=TURNS)
    job = server.ask(words(68), max_tokens=4, salt="a", truncation=True, turns=(*TURNS, 56))
    assert server.admitted[job].dropped == 36
    assert server.admitted[job].embedded
    return server, list(server.executor.texts[job].tokens)


@pytest.mark.parametrize("where", ["device", "host", "disk", "restarted"])
@pytest.mark.parametrize("truncation", [False, True])
def test_what_was_left_of_a_cut_prompt_is_nobodys_prefix(truncation: bool, where: str) -> None:
    server, left = cut_server()
    move_to(server, where)
    assert server.known(left, "a") == 8, "the system prompt, which saw nothing else"
    job = server.ask([*left, 7], salt="a", truncation=truncation)
    assert sum(server.hits(job)) == 8
    assert server.admitted[job].dropped == 0


def test_the_same_tokens_left_of_another_conversation_find_nothing() -> None:
    # The dropped rows differ, and the kept rows have seen them.
    server, left = cut_server()
    other = [*words(8), *words(36, 5000), *words(24, 144)]
    job = server.ask(other, max_tokens=4, salt="a", truncation=True, turns=(*TURNS, 56))
    assert server.admitted[job].dropped == 36
    assert server.executor.texts[job].tokens[:32] == left[:32], "token by token the same"
    assert server.specs[job].salt != server.specs[2].salt
    assert sum(server.hits(job)) <= 8


def test_the_same_conversation_of_another_tenant_finds_nothing() -> None:
    server, _ = cut_server()
    job = server.ask(words(76), salt="b", truncation=True, turns=(*TURNS, 56, 68))
    assert server.hits(job) == (0, 0, 0)
    assert not server.admitted[job].embedded


def test_rows_computed_after_a_truncation_are_private_too() -> None:
    server, left = cut_server()
    private = [extent for extent in extents(server) if is_private(extent.salt)]
    assert sum(extent.rows for extent in private) == len(left) - 1
    assert all(client_salt(extent.salt) == "a" for extent in private)


def test_rows_of_an_uncut_conversation_are_everybodys_who_has_the_salt() -> None:
    server = serving(max_model_len=WINDOW)
    server.ask(words(40), max_tokens=0, salt="a", session="s", truncation=True, turns=TURNS)
    assert not any(is_private(extent.salt) for extent in extents(server))
    assert sum(server.hits(server.ask(words(41), salt="a"))) == 40


def test_truncated_rows_stay_apart_after_a_restart() -> None:
    server, _ = cut_server()
    server.restart()
    job = server.ask(words(76), salt="a", truncation=True, turns=(*TURNS, 56, 68))
    assert server.hits(job) == (0, 0, 32)
    assert server.admitted[job].embedded


def test_a_private_extent_never_hangs_in_the_tree_of_its_tenant() -> None:
    server, _ = cut_server()
    by_id = {extent.id: extent for extent in extents(server)}
    for extent in by_id.values():
        assert extent.parent is None or by_id[extent.parent].salt == extent.salt
        assert all(node.parent is not None for node in extent.nodes)


# ------------------------------------------------------------------------------------------ exact rows only


def test_rows_are_exact_unless_they_are_private() -> None:
    server, _ = cut_server()
    kinds = {(extent.kind, is_private(extent.salt)) for extent in extents(server)}
    assert kinds == {("exact", False), ("session", True)}


@pytest.mark.parametrize("kind", ["approx", "session"])
def test_a_file_of_another_kind_is_not_taken_for_exact(kind: str) -> None:
    server = serving()
    server.ask(words(16), max_tokens=0)
    server.flush()
    (record,) = server.executor.catalog.values()
    later = server.make()
    wrong = replace(record, kind=kind)
    assert later.restore([wrong], server.now) == [wrong]
    assert later.stats().extents == 0


@pytest.mark.parametrize("kind", ["approx", "exact"])
def test_nor_a_private_file_for_a_prefix(kind: str) -> None:
    server, _ = cut_server()
    server.flush()
    later = server.make()
    wrong = [replace(record, kind=kind) for record in server.executor.catalog.values() if is_private(record.salt)]
    assert {record.id for record in later.restore(wrong, server.now)} == {record.id for record in wrong}
    assert later.stats().extents == 0


def test_the_rows_of_a_reply_are_their_tenants_too() -> None:
    """A truncated prompt keeps them, and the executor knows whose they are: no client has resent them before."""
    server = serving(max_model_len=WINDOW)
    first = server.ask(words(44), max_tokens=12, salt="a")
    job = server.ask([*server.text(first), *words(12, 1000)], salt="a", truncation=True, turns=(*TURNS, 56))
    assert is_private(server.specs[job].salt)
    assert sum(server.hits(job)) > 8


def test_who_must_not_write_leaves_nothing_for_others() -> None:
    server = serving()
    server.ask(words(40), max_tokens=9, write=False)
    assert server.is_empty()


def test_who_must_not_read_is_given_nothing() -> None:
    server = serving()
    server.ask(words(40), max_tokens=0)
    job = server.ask(words(41), read=False)
    assert (server.hits(job), server.computed(job)) == ((0, 0, 0), 41)
