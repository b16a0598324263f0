"""The soak of the tests, recorded: 20,000 turns (quick: 400) on tiny tiers, with aborts, deletions, pins, expiry and truncation.

What it checks is `tests/engine/test_soak.py`, which ends the run where anything is wrong; here, how many answers were compared with a
computation by hand, and whether memory, threads and open files grew.

    python -m benchmarks.engine.soak [--quick] [--turns N] [--json FILE]
"""

from __future__ import annotations

import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import Any

from afterglow.bench.report import COUNTED, arguments, finish, goal, show

TURNS, QUICK_TURNS = 20_000, 400
GROWS_FROM = 10_000  # turns: before, memory has not settled
MOST_GROWTH = 32 * 2**20

Row = dict[str, Any]


def main(args: list[str]) -> int:
    parser = arguments("python -m benchmarks.engine.soak", __doc__ or "")
    parser.add_argument("--turns", type=int, help=f"default {TURNS:,}; quick: {QUICK_TURNS}")
    options = parser.parse_args(args)
    turns = options.turns or (QUICK_TURNS if options.quick else TURNS)
    with (
        tempfile.TemporaryDirectory(prefix="afterglow-bench-") as folder,
        ProcessPoolExecutor(1, get_context("spawn")) as pool,
    ):  # a process of its own: its memory is that of the run
        row = pool.submit(soaked, Path(folder), turns).result()
    show("the soak", ("", ""), [(name, str(value)) for name, value in row.items()])
    finish(options, [row], goals(row))
    return 0


def soaked(folder: Path, turns: int) -> Row:
    """Run the tests' soak. Raises: AssertionError, where an answer is wrong or something grows."""
    from tests.engine.conftest import FAMILIES, starting, write_model
    from tests.engine.test_soak import soak

    model = write_model(FAMILIES["llama"], folder / "model")
    began = time.monotonic()
    with starting() as start:
        talk = soak(start, model, folder, turns)
    threads, files, memory = zip(*talk.marks, strict=True)
    return {
        "turns": talk.turns,
        "seconds": round(time.monotonic() - began, 1),
        "compared": talk.compared,
        "compared_cut": talk.compared_cut,
        "telling": talk.telling,
        "aborted": talk.aborted,
        "reused_rows": talk.reused,
        "threads": [dict(each) for each in threads],
        "files": list(files),
        "memory_bytes": list(memory),
    }


def more_threads(marks: Sequence[Counter[str]]) -> int:
    """Compute by how many threads the name that grows most has grown since the first two marks. One that starts late, or comes and goes,
    is one of its name; leaked ones share theirs."""
    names = set().union(*marks)
    return max(max(each[name] for each in marks[2:]) - max(each[name] for each in marks[:2]) for name in names)


def goals(row: Row) -> list[Row]:
    """As the test has them; a run too short for one of them is not judged by it."""

    threads, files = more_threads([Counter(each) for each in row["threads"]]), row["files"]
    opened = max(files[2:]) - max(files[:2])
    found = [
        goal("threads of one name more than at the beginning", threads, 1, least=False, spread=COUNTED),
        goal("open files more than at the beginning", opened, 2, least=False, spread=COUNTED),
    ]
    if row["turns"] >= GROWS_FROM:
        memory = row["memory_bytes"][-1] - row["memory_bytes"][2]
        found += [
            goal("bytes of memory that it grows by", memory, MOST_GROWTH, least=False, spread=COUNTED),
            goal("answers compared with a computation by hand", row["compared"], 301, least=True, spread=COUNTED),
            goal("of them behind a cut", row["compared_cut"], 101, least=True, spread=COUNTED),
            goal("of them that a wrong cut would change", row["telling"], 11, least=True, spread=COUNTED),
        ]
    return found


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
