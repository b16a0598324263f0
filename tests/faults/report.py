"""`docs/faults.md`: each injected fault, where it was met, what followed. Written from observations, never by hand."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from pathlib import Path

FILE = Path(__file__).parents[2] / "docs" / "faults.md"
WRITE = os.environ.get("AFTERGLOW_WRITE_DOCS") == "1"
PHASES = ("load", "save", "prefetch", "evict", "start")
SERVER = "server"

Key = tuple[str, str, str]  # fault, phase, how it was injected

FAULTS = (
    "bit flip in keys",
    "bit flip in values",
    "bit flip in the header",
    "bit flip in the catalog",
    "truncated file",
    "extent of another model",
    "extent of another tenant",
    "no space (ENOSPC)",
    "I/O error (EIO)",
    "slow disk",
    "hanging disk",
    "kill -9",
)

TIMED = ("slow disk", "hanging disk")

NOT_PLAYED: dict[tuple[str, str], str] = {
    ("kill -9", "prefetch"): "a prefetch writes nothing that a load does not: it is the same code, see load",
}

NOTES = (
    "Reading takes no space: `ENOSPC` at a load or a prefetch is met where a damaged extent is to be removed.",
    "A start whose folder does not answer at all waits for it, as every program would. What may hang is the sweep of"
    " orphans, which runs in the background.",
    "A program that writes files with right checksums, this extent's id and this model's digest can put anything into it:"
    " a load does not notice, `cache check` does as long as its tokens or its tenant are others.",
)

INTRODUCTION = """# What happens when something breaks

Written by the tests (`AFTERGLOW_WRITE_DOCS=1 pytest tests/faults`), which compare it word for word otherwise, but for
evictions and late disks: there the document tells one of several outcomes that timing allows. Each line was played on the
real scheduler and the real store, with real files and threads: conversations of several turns in tiny tiers, the fault
injected at the system call or into the file, in the phase that the line names and counted there.

In every line (but known gaps, if there are any, at the end), and not repeated there:

- Every request was answered with the tokens that it would have got without any cache. Nothing waited for ever. The budgets held.
- `afterglow cache check` named exactly what a second reader found to be wrong, and what it named, `--repair` mended.
- A restart served right rows.

The phases:

- **load**: a step needs rows that are on disk. **prefetch**: they are fetched before their job's turn comes.
- **save**: new rows are written as soon as they are computed (`write_through`). **evict**: host memory is full, so that
  rows are written to disk, and then the disk is full, so that files are removed.
- **start**: a process opens what another one has left.
"""

_outcomes: dict[Key, str] = {}
_known: set[Key] = set()
_gaps: dict[Key, str] = {}


def expect(lines: Iterable[tuple[Key, str]]) -> None:
    """These lines exist; others in the file are outdated. The second is why one is not as promised: a known gap."""
    for key, gap in lines:
        if gap:
            _gaps[key] = gap
        else:
            _known.add(key)


def missing_or_outdated() -> set[Key]:
    """Lines that the file lacks, or should not have."""
    return documented().keys() ^ (_known | _gaps.keys())


def documented() -> dict[Key, str]:
    found: dict[Key, str] = {}
    for line in FILE.read_text().splitlines() if FILE.exists() else ():
        cells = [part.strip() for part in line.strip("|").split(" | ")]
        if line.startswith("| ") and len(cells) == 4 and cells[0] != "fault":
            found[cells[0], cells[1], cells[2]] = cells[3]
    return found


def happened(key: Key, story: Iterable[str]) -> None:
    """Compare the observed story with the file, or keep it for writing.

    Some things depend on timing: which extent is evicted next, whether it is read before, and which other calls are late
    where a disk is. There the file tells one of the possible stories. Events that must never happen are asserted while
    the story is played.
    """
    text = "; ".join(story)
    _outcomes[key] = text
    if not WRITE and key[1] != "evict" and key[0] not in TIMED:
        written = documented().get(key)
        assert text == written, f"docs/faults.md says {written!r} of {key} (AFTERGLOW_WRITE_DOCS=1 writes it anew)"


def verdict(text: str) -> str:
    """A story in a word or two, for the overview."""
    for needle, word in (
        ("refused", "refused"),
        ("left behind", "whole or absent"),
        ("rebuilt", "rebuilt"),
        ("before it were hits", "miss"),
        ("all rows were computed", "miss"),
        ("says damaged", "found when read"),
        ("are not stored", "not stored"),
    ):
        if needle in text:
            return word
    return "no loss"


def write() -> None:
    """Write the whole file: from this session's observations, and from its former text for lines not played now."""
    lines = {key: text for key, text in {**documented(), **_outcomes}.items() if key in _known}
    out = [INTRODUCTION, "", f"| | {' | '.join(PHASES)} |", f"|---|{'---|' * len(PHASES)}"]
    for fault in FAULTS:
        row = []
        for phase in PHASES:
            words = [verdict(text) for key, text in lines.items() if key[:2] == (fault, phase)]
            row.append(", ".join(dict.fromkeys(words)) or "–")
        out.append(f"| {fault} | {' | '.join(row)} |")
    out += ["", "–: not played, because"]
    out += ["", *(f"- {fault}, {phase}: {why}." for (fault, phase), why in NOT_PLAYED.items())]
    out += ["", "To know:", "", *(f"- {note}" for note in NOTES)]
    out += ["", "## Line by line", *_table(lines, lambda key: key[1] != SERVER)]
    out += ["", "## Through a whole server", "", "`afterglow serve` in a process of its own, over HTTP."]
    out += [*_table(lines, lambda key: key[1] == SERVER), ""]
    if _gaps:
        out += [
            "",
            "## Known gaps",
            "",
            "Played; and not, or not always, as promised. The last column says why.",
            *_table(_gaps, bool),
            "",
        ]
    FILE.write_text("\n".join(out).replace("\n\n\n", "\n\n"))


def _table(lines: dict[Key, str], wanted: Callable[[Key], bool]) -> list[str]:
    order = sorted(
        filter(wanted, lines),
        key=lambda key: (FAULTS.index(key[0]), (*PHASES, SERVER).index(key[1])),
    )
    return ["", "| fault | phase | injected | what happened |", "|---|---|---|---|"] + [
        f"| {' | '.join(key)} | {lines[key]} |" for key in order
    ]
