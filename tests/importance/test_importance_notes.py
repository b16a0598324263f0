"""The importance of rows, written down and read again: all of it, bounded notes, and nothing of what is damaged."""

from __future__ import annotations

import pytest
import torch

from afterglow.importance.importance_notes import CELL_BYTES, NOTE_BYTES, ImportanceNotes, Note, written
from afterglow.importance.row_layout import RowImportance
from afterglow.store.database.notes import VALUE_MOST, cost

LAYERS, ROWS = 30, 1024


def drawn(seed: int = 0, layers: int = LAYERS, rows: int = ROWS) -> RowImportance:
    """The importance of rows after 7 requests."""
    known, draw = RowImportance(layers, rows), torch.Generator().manual_seed(seed)
    for _ in range(7):
        for layer in range(layers):
            known.add(layer, 0, torch.rand(rows, generator=draw).pow(8) * 5)
    return known


def texts(notes: list[Note]) -> dict[str, str]:
    return {key: value for key, value in notes if value is not None}


def erased(notes: list[Note]) -> set[str]:
    return {key for key, value in notes if value is None}


@pytest.mark.parametrize(("layers", "rows"), [(1, 1), (2, 230), (12, 1024), (LAYERS, ROWS), (126, 1024)])
def test_what_was_written_is_read_again(layers: int, rows: int) -> None:
    known = drawn(1, layers, rows)
    notes = dict(written("extent", known))
    # Small enough for a note of the catalog, and not more of them than need be.
    assert all(cost("importance", key, value) <= VALUE_MOST for key, value in notes.items())
    assert len(notes) <= -(-layers // (NOTE_BYTES // (CELL_BYTES * rows)))
    read = ImportanceNotes(layers).recall(notes, {"extent": rows}.get)["extent"]
    assert torch.allclose(read.mean, known.mean, rtol=2**-11, atol=2**-24)
    assert torch.equal(read.count, known.count)
    read.add(0, 0, torch.ones(rows))  # as the eighth request
    assert torch.equal(read.count[0], torch.full((rows,), 8, dtype=torch.int32))


def test_numbers_without_end_stay_numbers() -> None:
    known = RowImportance(1, 2)
    known.mean[0] = torch.tensor([1e6, 1e-30])
    known.count[0] = torch.tensor([1_000, 256])
    read = ImportanceNotes(1).recall(dict(written("extent", known)), {"extent": 2}.get)["extent"]
    assert read.mean.tolist() == [[65504.0, 0.0]]
    assert read.count.tolist() == [[255, 255]]


@pytest.mark.parametrize(
    "harm", ["missing", "cut short", "no base64", "no number", "another layer", "no layer", "other rows", "gone"]
)
def test_what_is_not_whole_is_as_if_it_were_not_there(harm: str) -> None:
    whole = dict(written("extent", drawn(1)))
    rows: dict[str, int] = {} if harm == "gone" else {"extent": ROWS - (harm == "other rows")}
    keys = list(whole)
    assert len(keys) > 1
    harmed = dict(whole)
    if harm == "missing":
        del harmed[keys[1]]
    elif harm == "cut short":
        harmed[keys[1]] = harmed[keys[1]][:-4]
    elif harm == "no base64":
        harmed[keys[1]] = "ä" + harmed[keys[1]][1:]
    elif harm == "no number":
        harmed[keys[1]] = "////" + harmed[keys[1]][4:]
    elif harm == "another layer":
        harmed["extent:x"] = harmed.pop(keys[1])
    elif harm == "no layer":
        harmed["extent:" + 5000 * "9"] = harmed.pop(keys[1])
    notes = ImportanceNotes(LAYERS)
    assert notes.recall(harmed, rows.get) == {}
    assert erased(notes.take({})) == set(harmed)  # it would only take room


def test_each_change_is_written_once_and_what_is_forgotten_is_erased() -> None:
    known = {name: drawn(i, 2, 100) for i, name in enumerate("abc")}
    notes = ImportanceNotes(2)
    for name in "abca":
        notes.changed(name)
    assert list(texts(notes.take(known, 2))) == ["a:0", "b:0"]
    notes.forget("b", 100)
    notes.changed("a")
    last = notes.take(known, None)
    assert list(texts(last)) == ["c:0", "a:0"]
    assert erased(last) == {"b:0"}
    assert notes.take(known) == []
    notes.forget("a", 100)
    notes.changed("a")  # it came again
    again = notes.take(known)
    assert [key for key, _ in again] == ["a:0", "a:0"]
    assert again[-1][1] is not None  # the last one counts
    notes.changed("d")  # of which nothing is known any more
    assert notes.take(known) == []
