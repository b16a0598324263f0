"""Goes through the journal of a storm that failed, and checks the plan after each of its inputs:

    python -m tests.faults.replay JOURNAL

The plan is a function of its inputs, so what went wrong in it goes wrong here too, at the same input, without threads, files
and chance. What went wrong elsewhere does not.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from afterglow.plan.journal.replaying import replay as replay_journal
from afterglow.plan.journal.step_digest import step_digest
from afterglow.plan.scheduler import Scheduler


def replay(lines: Sequence[str]) -> int:
    """How many steps were played. Raises what the plan or its check raised; the notes say at which line."""
    at, before, steps = 0, "", 0

    def numbered() -> Iterator[str]:
        nonlocal at
        for line in lines:
            at += 1
            yield line

    def look(plan: Scheduler) -> None:
        nonlocal before
        plan.check()
        before = f"{plan.stats()}"

    try:
        for step, recorded in replay_journal(numbered(), look):
            steps += 1
            assert not recorded or step_digest(step) == recorded, "not what the plan did: is it other code?"
    except Exception as error:
        error.add_note(f"line {at} of {len(lines)}: {lines[at - 1][:400]}")
        error.add_note(f"the plan before: {before}")
        raise
    return steps


if __name__ == "__main__":
    print(f"nothing goes wrong in {replay(Path(sys.argv[1]).read_text().splitlines())} steps of the plan")
