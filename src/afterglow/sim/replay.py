"""An engine's journal through the plan, as the simulator drives it: the same steps, or it is not the same policy."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from afterglow.plan.journal.replaying import replay_repeated
from afterglow.plan.journal.step_digest import step_digest
from afterglow.plan.step import Step

REPEATS = 4096  # uneventful steps that are advanced together, at most


@dataclass(slots=True)
class Replayed:
    """What a journal led to. `different`: the first step that was not the engine's, whose digest was `recorded`; None:
    all were."""

    steps: int = 0
    moves: int = 0
    different: Step | None = None
    recorded: str = ""


def replay_journal(lines: Iterable[str], limit: int = REPEATS) -> Replayed:
    """Replay a journal (`--journal`) with as many decode steps at once as the simulator would take, and compare every
    step, repeated ones expanded, with what the engine has recorded. Raises: ValueError, which names the line or the step."""
    found = Replayed()
    steps = replay_repeated(lines, limit)
    while True:
        try:
            step, recorded = next(steps)
        except StopIteration:
            return found
        except (KeyError, TypeError, AttributeError, LookupError, AssertionError, OverflowError) as error:
            # A line that is JSON, but not what an engine writes; the plan does not check its inputs twice.
            raise ValueError(
                f"after {found.steps} steps the journal has a line that no engine wrote "
                f"({type(error).__name__}: {error})"
            ) from error
        found.steps += 1
        found.moves += len(step.moves)
        if step_digest(step) != recorded:
            found.different, found.recorded = step, recorded
            return found
