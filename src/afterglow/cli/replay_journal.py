"""`afterglow simulate --replay`."""

from __future__ import annotations

import sys
from pathlib import Path

from afterglow.cli import simulation_report as fig
from afterglow.cli.option_sources import Given
from afterglow.errors import ConfigError
from afterglow.plan.journal.step_digest import step_digest
from afterglow.plan.step import Step
from afterglow.sim.scenario_options import flag
from afterglow.sim.simulator import replay_journal

DIFFERENT = 1
LONGEST = 300  # letters of a step that are printed


def replay(path: Path, given: Given, json: str | None) -> int:
    """Replay a journal, say whether its steps are the engine's, and return the exit code. `given`: the options that
    were given.

    Raises: ConfigError, for a file that cannot be read or is not a journal.
    """
    if strange := sorted(given.typed - {"replay", "json"}):
        what = "a workload" if strange[0] == "workload" else flag(strange[0])
        raise ConfigError(f"{what} means nothing to --replay: the journal has all that the engine was given")
    fig.check_writable(json)
    try:
        with path.open(encoding="utf-8") as lines:
            found = replay_journal(lines)
    except OSError as error:
        raise ConfigError(f"--replay {path} cannot be read: {error.strerror}") from None
    except ValueError as error:  # UnicodeDecodeError is one
        raise ConfigError(f"--replay {path} is no whole journal (serve --journal writes one): {error}") from None
    if not found.steps:
        raise ConfigError(f"--replay {path} has no steps: the engine that wrote it was asked for nothing")
    if json is not None:
        different = None
        if found.different is not None:
            different = {
                "step": found.different.number,
                "recorded": found.recorded,
                "replayed": step_digest(found.different),
            }
        fig.write_json(json, {"journal": str(path), "steps": found.steps, "moves": found.moves, "different": different})
    if found.different is None:
        if json != "-":
            print(f"{path}: {found.steps:,} steps and {found.moves:,} moves, all as the engine recorded them")
        return 0
    print(
        f"{path}: step {found.different.number} differs, after {found.steps - 1:,} that are as the engine recorded them; "
        f"digest {found.recorded} recorded, {step_digest(found.different)} replayed: {_short(found.different)}",
        file=sys.stderr,
    )
    return DIFFERENT


def _short(step: Step) -> str:
    text = ", ".join(f"{name} {value!r}" for name in _TOLD if (value := getattr(step, name)))
    text = text or "nothing to do"
    return text if len(text) <= LONGEST else f"{text[:LONGEST]}..."


_TOLD = ("releases", "frees", "moves", "runs", "wake_at")
