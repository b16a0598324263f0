"""Rows of earlier jobs that a job finds, and contexts that are kept on the device."""

from __future__ import annotations

from afterglow.plan.step import Release
from tests.plan.server_kit import Server, jobs_of, words

# ------------------------------------------------------------------------------------- whose rows


def test_salts_never_share() -> None:
    server = Server()
    mine = server.ask(words(30), salt="mine")
    yours = server.ask(words(30), salt="yours")
    assert server.hits(yours) == (0, 0, 0)
    assert server.computed(yours) == 30
    first = server.ask(words(30))
    assert server.hits(first) == (0, 0, 0)
    assert sum(server.hits(server.ask(server.text(mine), salt="mine"))) == 30


def test_salts_do_not_wait_for_each_other() -> None:
    server = Server()
    jobs = [server.submit(words(30), salt=salt) for salt in ("mine", "yours")]
    assert jobs_of(server.step()) == jobs
    server.finish()


def test_a_job_that_does_not_write_leaves_nothing() -> None:
    server = Server()
    server.ask(words(30), max_tokens=5, write=False)
    stats = server.scheduler.stats()
    assert (stats.extents, stats.contexts, stats.host_slots, stats.device_rows) == (0, 0, 0, 0)
    assert not any(run.saves for step in server.steps for run in step.runs)
    server.ask(words(30))
    assert server.hits(server.ask(words(30), write=False)) == (29, 0, 0), "but it reads"


def test_a_job_that_does_not_read_computes_everything() -> None:
    server = Server()
    server.ask(words(30))
    job = server.ask(words(30), read=False)
    assert server.hits(job) == (0, 0, 0)
    assert server.computed(job) == 30


def test_an_edited_prompt_matches_up_to_the_edit() -> None:
    server = Server()
    server.ask(words(30))
    edited = words(30)
    edited[17] = 5
    assert sum(server.hits(server.ask(edited))) == 17


def test_extents_do_not_depend_on_how_the_turns_before_were_cut() -> None:
    prefix, end = words(32), words(10, 1000)
    names = []
    for cut in (8, 16):
        server = Server(disk_bytes=10_000)
        server.ask(prefix[:cut], max_tokens=0)
        server.ask(prefix, max_tokens=0)
        server.ask([*prefix, *end], max_tokens=0)
        server.restart()
        names.append({record.id for record in server.executor.catalog.values()})
    assert len(names[0] & names[1]) == 1


# ------------------------------------------------------------------------------------- on the device


def test_a_conversation_goes_on_in_the_context_that_it_has_left() -> None:
    server = Server()
    first = server.ask(words(20), max_tokens=5)
    second = server.ask([*server.text(first), 7])
    admit = server.runs(second)[0].admit
    assert admit is not None
    assert (admit.take, admit.device_rows, server.runs(second)[0].gathers) == (True, 24, ())
    assert server.hits(second) == (24, 0, 0)


def test_a_branch_copies_a_long_context() -> None:
    server = Server()
    first = server.ask(words(100))
    branch = server.ask([*words(20), 7])  # less than half
    admit = server.runs(branch)[0].admit
    assert admit is not None
    assert (admit.take, admit.device_rows) == (False, 20)
    follow = server.ask([*server.text(first), 7])
    assert server.hits(follow)[0] == 100, "the long one is still there"


def test_where_there_is_no_room_for_a_copy_the_context_is_taken_over() -> None:
    server = Server(device_rows=108)
    server.ask(words(100))
    branch = server.ask([*words(20), 7])
    admit = server.runs(branch)[0].admit
    assert admit is not None
    assert (admit.take, admit.device_rows) == (True, 20)


def test_rows_that_could_not_be_saved_are_not_kept_on_the_device() -> None:
    # Nothing that the index does not know can be matched.
    server = Server(host_slots=0)
    job = server.ask(words(20), max_tokens=5)
    assert [release for step in server.steps for release in step.releases] == [Release(job, None, 0)]
    assert server.scheduler.stats().device_rows == 0
    assert server.scheduler.stats().counters.rows_unsaved == 24


def test_a_row_that_could_not_be_saved_ends_the_saving_of_its_job() -> None:
    # What follows a gap could never be matched.
    server = Server()
    job = server.submit(words(20), max_tokens=12)
    server.step()
    server.step()
    server.faults.save = 1.0
    server.step()
    server.faults.save = 0.0
    server.finish()
    assert [bool(run.saves) for run in server.runs(job)] == [True] * 3 + [False] * 9
    assert server.hits(server.ask(server.text(job))) == (20, 0, 0)


def test_two_branches_in_one_step_use_the_same_context() -> None:
    server = Server()
    server.ask(words(100))
    branches = [server.submit([*words(20), i], max_tokens=2) for i in (1, 2)]
    step = server.step()
    assert jobs_of(step) == branches
    assert [run.admit and (run.admit.take, run.admit.device_rows) for run in step.runs] == [(False, 20), (False, 20)]
    server.finish()


def test_a_context_being_copied_outlives_a_reset_until_the_step_is_done() -> None:
    server = Server()
    server.ask(words(100))
    server.submit([*words(20), 7], max_tokens=2)
    step, result = server.open()
    assert step.runs[0].admit is not None
    server.scheduler.reset(server.now)
    server.scheduler.check()
    assert server.scheduler.stats().contexts == 1
    server.close(step, result)
    assert server.scheduler.stats().contexts == 0
    assert server.step().frees == (step.runs[0].admit.context,)
    server.finish()


def test_contexts_give_way_the_least_recently_used_first() -> None:
    server = Server(device_rows=92)  # segments of 32 rows
    old, young = server.ask(words(30)), server.ask(words(30, 1000))
    server.ask(words(30, 2000))
    assert server.hits(server.ask([*server.text(young), 1])) == (30, 0, 0)
    assert server.hits(server.ask([*server.text(old), 1])) == (0, 30, 0)
