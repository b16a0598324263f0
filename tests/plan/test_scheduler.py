"""What a step consists of: pieces of prompts beside decodes, who comes first, who must wait, who is sent back."""

from __future__ import annotations

import pytest

from afterglow.errors import RequestError
from afterglow.plan.batching.compose import IDLE_PREFILL, PATIENT_PREFILL
from afterglow.plan.step import Emitted, JobSpec, Release, Step
from tests.plan.server_kit import Server, jobs_of, words

# ------------------------------------------------------------------------------------------ prompts in pieces


def rows_of(step: Step, jobs: list[int]) -> int:
    return sum(len(run.tokens) for run in step.runs if run.job in jobs)


def test_a_decode_waits_for_at_most_prefill_chunk_prompt_tokens_a_step() -> None:
    server = Server(prefill_chunk=16)
    decoding = server.submit(words(5), max_tokens=60)
    server.step()
    others = [server.submit(words(100, first)) for first in (1000, 2000, 3000)]
    pieces = []
    while not all(job in server.ends for job in others):
        step = server.step()
        assert decoding in jobs_of(step), "it decodes in every step"
        pieces.append(rows_of(step, others))
    assert pieces == [16] * 18 + [12]
    server.finish()


def test_without_chunks_a_prefill_keeps_the_decodes_waiting() -> None:
    server = Server(prefill_chunk=0)
    decoding = server.submit(words(5), max_tokens=10)
    server.step()
    other = server.submit(words(100, 1000), max_tokens=3)
    assert jobs_of(server.step()) == [other]
    assert len(server.runs(other)[0].tokens) == 100
    assert jobs_of(server.step()) == [decoding, other]
    server.finish()


def test_an_idle_engine_prefills_in_large_pieces() -> None:
    server = Server(device_rows=4000, host_slots=1000, prefill_chunk=16)
    job = server.ask(words(IDLE_PREFILL + 100))
    assert [len(run.tokens) for run in server.runs(job)] == [IDLE_PREFILL, 100]
    assert [run.sample for run in server.runs(job)] == [False, True]


def test_the_budget_of_a_step_is_shared_in_order() -> None:
    server = Server(prefill_chunk=16)
    server.submit(words(5), max_tokens=20)
    server.step()
    first, second = server.submit(words(20, 1000)), server.submit(words(20, 2000))
    pieces = [[(run.job, len(run.tokens)) for run in server.step().runs if run.job != 1] for _ in range(3)]
    assert pieces == [[(first, 16)], [(first, 4), (second, 12)], [(second, 8)]]
    server.finish()


def test_the_last_prompt_token_is_always_computed() -> None:
    # There is no other way to the logits of the first new token.
    server = Server()
    prompt = words(20)
    server.ask(prompt)
    again = server.ask(prompt)
    assert [(run.start, run.tokens) for run in server.runs(again)] == [(19, (prompt[19],))]
    assert sum(server.hits(again)) == 19


def test_the_last_generated_token_has_no_row_until_it_is_fed() -> None:
    server = Server()
    first = server.ask(words(10), max_tokens=6)
    assert server.computed(first) == 10 + 6 - 1
    more = server.ask([*server.text(first), 7], max_tokens=1)
    assert sum(server.hits(more)) == 10 + 6 - 1
    assert [(run.start, run.tokens) for run in server.runs(more)] == [(15, (server.made[first][-1], 7))]


# ------------------------------------------------------------------------------------------------- how jobs end


def test_a_stop_token_ends_a_job_and_counts_as_generated() -> None:
    server = Server()
    probe = server.ask(words(5), max_tokens=8)
    stop = server.made[probe][3]
    job = server.ask(words(5), max_tokens=8, stop_tokens=frozenset([stop]))
    assert server.ends[job] == "stop"
    assert server.made[job][-1] == stop
    assert server.made[job] == server.made[probe][: len(server.made[job])]


def test_no_token_is_drawn_for_a_job_that_wants_none() -> None:
    server = Server()
    server.submit(words(5), max_tokens=0)
    step, result = server.open()
    assert not step.runs[0].sample
    assert server.close(step, result)[-1] == Emitted(1, None, "length")
    assert sum(server.hits(server.ask(words(6)))) == 5, "but all its rows were computed, and kept"


def test_a_job_ends_at_the_longest_context_of_the_model() -> None:
    server = Server(max_model_len=12)
    job = server.ask(words(10), max_tokens=100)
    assert (len(server.made[job]), server.ends[job]) == (2, "length")


def test_a_job_that_has_the_whole_device_and_needs_more_ends() -> None:
    server = Server(device_rows=16)
    job = server.submit(words(10), max_tokens=100)
    while job not in server.ends:
        server.step()
    # 16 rows are full; the 17th token was drawn from the last row.
    assert (len(server.text(job)), server.ends[job]) == (17, "length")


@pytest.mark.parametrize("max_tokens", [0, 1])
def test_impossible_jobs_are_refused_with_the_numbers(max_tokens: int) -> None:
    server = Server(device_rows=50, max_model_len=100)
    with pytest.raises(RequestError, match="the prompt is empty"):
        server.submit([])
    with pytest.raises(RequestError, match="context length is 100 tokens, but the prompt has 120 tokens"):
        server.submit(words(120), max_tokens)
    # 50 rows are 12 whole blocks of 4.
    with pytest.raises(RequestError, match="has 60 tokens; the device cache holds 48: enlarge --device-cache"):
        server.submit(words(60), max_tokens)
    with pytest.raises(RequestError) as refusal:
        server.submit(words(49 - max_tokens), max_tokens)
    assert (refusal.value.param, refusal.value.code, refusal.value.status) == ("prompt", "context_length_exceeded", 400)
    assert server.scheduler.unfinished == 0
    assert server.scheduler.stats().counters.submitted == 0
    server.ask(words(48 - max_tokens), max_tokens)


def test_a_job_number_is_used_once() -> None:
    server = Server()
    server.submit(words(5))
    with pytest.raises(ValueError, match="job 1 exists"):
        server.scheduler.submit(JobSpec(1, server.specs[1].prompt, 1), 0.0)


def test_steps_are_committed_in_order() -> None:
    server = Server()
    server.submit(words(5))
    step, result = server.open()
    with pytest.raises(AssertionError, match="has not been committed"):
        server.scheduler.schedule(server.now)
    with pytest.raises(AssertionError, match="not the step that was handed out"):
        server.scheduler.commit(Step(99), result, [], server.now)
    server.close(step, result)


# --------------------------------------------------------------------------------------------- who comes first


def order(server: Server) -> list[int]:
    """Jobs in the order in which they came to the device."""
    return list(dict.fromkeys(job for step in server.steps for job in jobs_of(step)))


def test_first_come_first_served_when_the_device_is_full() -> None:
    server = Server(device_rows=64)
    running = server.submit(words(40), max_tokens=10)
    server.step()
    large = server.submit(words(30, 1000))
    small = server.submit(words(3, 2000))  # there would be room for it
    server.step()
    assert jobs_of(server.steps[-1]) == [running]
    server.finish()
    assert order(server) == [running, large, small]


def test_priority_goes_before_arrival() -> None:
    server = Server(max_batch=1)
    running = server.submit(words(5), max_tokens=3)
    server.step()
    late, later, urgent = (server.submit(words(5, 1000 * i), priority=-(i == 3)) for i in (1, 2, 3))
    server.finish()
    assert order(server) == [running, urgent, late, later]


@pytest.mark.parametrize("max_batch", [1, 2, 3])
@pytest.mark.parametrize("prefill_chunk", [0, 8])
def test_no_more_than_max_batch_jobs_are_on_the_device(max_batch: int, prefill_chunk: int) -> None:
    server = Server(max_batch=max_batch, prefill_chunk=prefill_chunk)
    for i in range(6):
        server.submit(words(10, 1000 * i), max_tokens=4 + i)
    most = 0
    while server.scheduler.unfinished:
        server.step()
        most = max(most, len(server.executor.segments))
        assert server.scheduler.stats().running <= max_batch
    assert most == max_batch
    server.finish()


def test_when_room_runs_out_the_youngest_is_sent_back_and_ends_right() -> None:
    server = Server(device_rows=48)
    old = server.submit(words(12), max_tokens=30)
    young = server.submit(words(12, 1000), max_tokens=30)
    server.finish()
    assert server.scheduler.stats().counters.preemptions == 1
    assert server.ends == {old: "length", young: "length"}
    gone = [i for i, step in enumerate(server.steps) if Release(young, None, 0) in step.releases]
    assert len(gone) == 1
    (back,) = [i for i, step in enumerate(server.steps) for run in step.runs if run.job == young and run.admit][1:]
    (done,) = [i for i, step in enumerate(server.steps) for release in step.releases if release.job == old]
    assert gone[0] < done <= back, "it comes back when the old one has finished"
    assert server.computed(young) == 12 + 30 - 1, "computed rows had been saved: nothing is computed twice"


def test_who_was_sent_back_is_first_in_the_queue() -> None:
    server = Server(device_rows=48)
    old = server.submit(words(12), max_tokens=30)
    young = server.submit(words(12, 1000), max_tokens=30)
    while not server.scheduler.stats().counters.preemptions:
        server.step()
    late = server.submit(words(3, 2000))
    while late not in server.ends:
        server.step()
    starts = [run.job for step in server.steps for run in step.runs if run.admit is not None]
    assert starts == [old, young, young, late]
    server.finish()


def test_hits_are_told_once_even_of_a_job_that_comes_twice() -> None:
    server = Server(device_rows=48)
    server.submit(words(12), max_tokens=30)
    young = server.submit(words(12, 1000), max_tokens=30)
    server.finish()  # asserts that nothing is told twice
    assert server.hits(young) == (0, 0, 0)
    counters = server.scheduler.stats().counters
    assert (counters.query_tokens, counters.hit_device, counters.hit_host) == (24, 0, 0)


# ---------------------------------------------------------------------------------------------- whole-cache wishes


def test_a_reset_forgets_what_nobody_uses_and_nothing_that_is_in_use() -> None:
    server = Server(disk_bytes=10_000, write_policy="write_through")
    idle = server.ask(words(20, 1000), max_tokens=4)
    running = server.submit(words(20), max_tokens=20)
    for _ in range(3):
        server.step()
    server.scheduler.reset(server.now)
    server.scheduler.check()
    assert server.scheduler.stats().contexts == 0
    server.finish()
    assert server.hits(server.ask(server.text(idle))) == (0, 0, 0)
    assert sum(server.hits(server.ask(server.text(running)))) == 20 + 20 - 1
    server.nothing_left_behind()


@pytest.mark.parametrize("released", [False, True])
def test_a_reset_forgets_a_conversation_whose_last_rows_are_still_being_saved(released: bool) -> None:
    # The job has ended, so no job uses its prompt any more, although it still waits for its tail.
    server = Server()
    job = server.submit(words(20), max_tokens=6)
    server.step()
    server.step()
    assert server.scheduler.stats().extents == 2
    server.faults.lazy_saves = 1.0
    while job not in server.ends:
        server.step()
    server.withheld = []
    if released:
        server.step()
    server.scheduler.reset(server.now)
    assert server.scheduler.stats().extents == 0
    server.deliver()
    server.finish()
    assert server.hits(server.ask(server.text(job))) == (0, 0, 0)


def test_contexts_can_be_dropped_without_forgetting_a_row() -> None:
    server = Server()
    first = server.ask(words(20), max_tokens=4)
    server.scheduler.drop_contexts()
    step = server.step()
    assert len(step.frees) == 1
    assert server.scheduler.stats().device_rows == 0
    assert server.hits(server.ask(server.text(first))) == (0, 23, 0)


def test_write_through_stores_at_once() -> None:
    server = Server(disk_bytes=10_000, write_policy="write_through")
    job = server.ask(words(20), max_tokens=9)
    stored = b"".join(record.tokens for record in server.executor.catalog.values())
    assert len(stored) // 4 == len(server.text(job)) - 1
    assert server.scheduler.stats().counters.stores == 4  # of 16, 4 and 8 rows, and of the last two together
    assert sorted(record.rows for record in server.executor.catalog.values()) == [12, 16]


def test_write_back_stores_only_what_is_evicted_or_flushed() -> None:
    server = Server(disk_bytes=10_000, host_slots=10, write_policy="write_back")
    server.ask(words(20), max_tokens=9)
    server.finish()
    assert server.executor.files == {}
    server.ask(words(20, 1000), max_tokens=9)
    assert 0 < len(server.executor.files) < server.scheduler.stats().extents, "some had to make room"
    server.scheduler.flush(server.now)
    server.finish()
    assert server.scheduler.flushed
    assert len(server.executor.files) == server.scheduler.stats().extents


def test_a_flush_has_ended_only_when_all_is_written() -> None:
    server = Server(disk_bytes=10_000)
    server.faults.delay = 3
    server.ask(words(20), max_tokens=9)
    server.scheduler.flush(server.now)
    assert not server.scheduler.flushed
    extents = server.scheduler.stats().extents
    while len(server.executor.files) < extents:
        assert not server.scheduler.flushed
        server.step()
    server.step()
    assert server.scheduler.flushed


def test_what_is_computed_ahead_is_computed_in_short_passes_without_chunks_too() -> None:
    """A request that comes meanwhile waits for one pass at most."""
    server = Server(device_rows=4000, host_slots=1000, prefill_chunk=0)
    job = server.ask(words(1200), max_tokens=0, aside=True, patient=True)
    assert max(len(run.tokens) for run in server.runs(job)) == PATIENT_PREFILL
    other = server.ask(words(1200, 5000), max_tokens=0)
    assert [len(run.tokens) for run in server.runs(other)] == [1200]
