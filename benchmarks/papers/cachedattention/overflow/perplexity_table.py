"""Table 1 through the engine: the perplexity of conversations that outgrow their window, in all arms."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence

from afterglow.bench.report import show
from benchmarks.papers.cachedattention.overflow import streams, summary
from benchmarks.papers.cachedattention.overflow.arms import ARMS
from benchmarks.papers.cachedattention.overflow.asking import Asked, go_on
from benchmarks.papers.cachedattention.overflow.parts_file import Form

PARTS, QUICK_PARTS = 8, 2
DIALOGUES, BARE = "MT-Bench-101", "WikiText-2, without a head"
TEXTS = {
    "WikiText-2": "wikitext2/wiki.test.raw",
    DIALOGUES: "mt_bench_101/mtbench101.jsonl",
    "Shakespeare": "tinystories/tinyshakespeare.txt",
    BARE: "wikitext2/wiki.test.raw",
}


def sizes(quick: bool) -> dict[str, int]:
    """Return nothing: parts have one size, so a full run goes on from a quick one."""
    return {}


def is_short(rows: Sequence[summary.Row]) -> bool:
    """Tell whether some text is missing, or has fewer parts than a full run."""
    return len(rows) < len(TEXTS) or any(row["parts"] < PARTS for row in rows)


FORM = Form(lambda parts: summary.rows(parts, list(ARMS)), summary.goals, is_short)


def works(asked: Asked, only: Sequence[str], parts: int | None, quick: bool) -> Iterator[Callable[[], None]]:
    """Yield parts in the order in which a run that ends early has something of everything."""
    for name in only:
        if not (asked.data / TEXTS[name]).is_file():
            print(f"{name}: not in {asked.data}")
    there = [name for name in only if (asked.data / TEXTS[name]).is_file()]
    for part in range(parts or (QUICK_PARTS if quick else PARTS)):
        for name in there:
            yield lambda name=name, part=part: _measure(asked, name, part)  # type: ignore[misc]


def _measure(asked: Asked, name: str, part: int) -> None:
    """Measure the arms that have not done a part yet, each with a cache of its own."""
    make = streams.of_dialogues if name == DIALOGUES else streams.of_text
    head = tuple(asked.encode(streams.SYSTEM)) if name == DIALOGUES else () if name == BARE else asked.bos
    turns = make(asked.data / TEXTS[name], asked.encode, asked.rig.window, asked.overflows)[part]
    first, rest = streams.begun(turns, len(head), asked.rig.window)
    for arm in [arm for arm in ARMS if not asked.file.has(name, arm, part)]:
        began = time.monotonic()
        asked.rig.engine.reset_cache()
        talk = ARMS[arm](asked.rig, head, f"{arm} {name} {part}")
        talk.begin(first)
        go_on(talk, rest, asked.overflows)
        talk.end()
        found = [talk.losses[overflow] for overflow in range(1, asked.overflows + 1)]
        seconds = round(time.monotonic() - began, 1)
        asked.file.add(
            {
                "table": summary.PERPLEXITY,
                "text": name,
                "arm": arm,
                "part": part,
                "seconds": seconds,
                "losses": [round(sum(each), 3) for each in found],
                "tokens": [len(each) for each in found],
                "prefilled": talk.prefilled,
            }
        )
        print(f"{name}, part {part}, {arm}: {seconds} s", flush=True)


def print_rows(rows: Sequence[summary.Row]) -> None:
    """Print both views of the table."""
    arms = list(ARMS)
    others = [arm for arm in arms if arm != summary.AGAINST]
    show(
        "table 1: perplexity",
        ("text", "parts", "tokens", *arms, *(f"{arm} / TT" for arm in others)),
        [
            (
                row["text"],
                row["parts"],
                row["tokens"],
                *(f"{row['perplexity'][arm]:.2f}" for arm in arms),
                *(summary.pair(row["ratio"][arm], 4) for arm in others),
            )
            for row in rows
        ],
    )
    overflows = max((len(row["by_overflow"]["CA"]) for row in rows), default=0)
    show(
        "perplexity of CA / TT, overflow by overflow",
        ("text", *(str(n + 1) for n in range(overflows))),
        [(row["text"], *(summary.pair(each, 4) for each in row["by_overflow"]["CA"])) for row in rows],
    )
