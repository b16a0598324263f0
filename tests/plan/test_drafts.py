"""Rows on their way to extents, where a job is sent back or host memory ends."""

from __future__ import annotations

from collections.abc import Iterable

from afterglow.plan.batching.drafts import Drafts
from afterglow.plan.batching.job import Job
from afterglow.plan.step import JobSpec, Save, SaveDone
from tests.plan.fake_executor import pack
from tests.plan.tiers_kit import Tiers

TOKENS = list(range(40))


def job_of(rows: int = 40, **more: bool) -> Job:
    prompt = pack(TOKENS[:rows])
    job = Job(JobSpec(1, prompt, 1, **more), seq=1, turn=0, tokens=bytearray(prompt))
    job.state, job.saving, job.target = "prefilling", True, rows
    return job


def compute(drafts: Drafts, job: Job, rows: int) -> list[Save]:
    """Compute a chunk of a prefill, as the composer of steps does."""
    new = max(job.rows, job.covered)
    stop = job.rows + rows
    saves = list(drafts.tee(job, new, stop - new, 0.0)) if stop > new else []
    first = {draft.id: draft.first_row for draft in job.drafts}
    for save in saves:
        assert first[save.draft] + save.draft_row == save.job_row, "a row would be kept under another row's token"
    job.rows = stop
    drafts.commit(job, 0.0)
    return saves


def saved(drafts: Drafts, saves: Iterable[Save]) -> None:
    for save in saves:
        drafts.saved(SaveDone(save.draft, save.draft_row, save.rows, True), 0.0)


def test_a_job_that_was_sent_back_keeps_each_row_under_its_own_token() -> None:
    """Its first rows are saved only when it computes them once more: it does not read (as with log-probabilities of a prompt)."""
    tiers = Tiers(host_slots=32)
    drafts, job = Drafts(tiers.cache), job_of(read=False)
    before = compute(drafts, job, 8)
    drafts.leave(job, 0.0)
    job.rows = job.covered = 0
    again = compute(drafts, job, 4)
    saved(drafts, before)
    for rows in (8, 8, 8, 12):
        again += compute(drafts, job, rows)
    saved(drafts, again)
    assert job.covered == 40
    assert not len(drafts)
    assert tiers.cache.match("", pack(TOKENS)).rows == 40


def test_rows_are_kept_where_host_ends_with_an_extent() -> None:
    """The next extent has no slot: the first one counts nevertheless."""
    tiers = Tiers(host_slots=4)
    drafts, job = Drafts(tiers.cache), job_of(20)
    saves = compute(drafts, job, 20)
    assert sum(save.rows for save in saves) == 16
    assert job.reach == 16
    saved(drafts, saves)
    assert job.covered == 16
    assert tiers.cache.match("", pack(TOKENS)).rows == 16
