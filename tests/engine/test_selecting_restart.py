"""What requests have found important survives a restart: averages, orders, selections and the bytes they read."""

from __future__ import annotations

import contextlib
import sqlite3
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import torch

from afterglow.importance.row_layout import RowImportance
from afterglow.importance.speculation import Prior
from afterglow.plan.step import PREFETCH
from afterglow.store.extents.chunks import ExtentChunks
from afterglow.store.extents.layout import PROBES
from afterglow.store.moving.reading import Reading
from tests import doors
from tests.engine.conftest import Handle
from tests.engine.test_selecting import NEW, ask, draw, loader_of, reorder
from tests.engine.test_selecting_bytes import Scene

Start = Callable[..., Handle]
Models = Callable[[str], Path]

ROWS = 300


def known_of(handle: Handle) -> dict[str, RowImportance]:
    return handle.engine.ask(lambda: dict(loader_of(handle).importance))


def orders(handle: Handle) -> dict[str, list[list[int]]]:
    """By extent, the chunk of each row in each layer of its file."""
    disk = doors.tier_of(handle.engine.parts.store)
    found: dict[str, list[list[int]]] = {}
    for extent in disk.extents():
        order = torch.tensor(disk.head(extent).sidecar.order.tolist())
        found[extent] = (order.argsort(-1) // 64).tolist()
    return found


def scene(start: Start, model: Path, folder: Path, prior: Prior = "none") -> Scene:
    return Scene(start, model, folder, prior, "no")


def test_the_same_selection_with_the_same_bytes(
    start: Start, model_of: Models, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, prefix = model_of("phi"), draw(1, ROWS)
    first = scene(start, model, tmp_path)
    first.put(prefix)
    prompts = [[*prefix, *draw(i, NEW)] for i in range(4)]
    for prompt in prompts:
        first.ask(prompt, 0.1, monkeypatch)
    assert reorder(first.handle) == 1
    before = [first.ask(prompt, 0.1, monkeypatch).bytes for prompt in prompts]
    selected = [[selection.rows for selection in each.selections] for each in first.selections[-4:]]
    known, places = known_of(first.handle), orders(first.handle)
    first.handle.engine.close()

    again = scene(start, model, tmp_path)
    assert orders(again.handle) == places
    found = known_of(again.handle)
    assert found.keys() == known.keys()
    for extent, each in known.items():
        assert torch.allclose(found[extent].mean, each.mean, rtol=2**-11, atol=2**-24)
        assert torch.equal(found[extent].count, each.count)
        assert each.count.max() == 8
    after = [again.ask(prompt, 0.1, monkeypatch).bytes for prompt in prompts]
    assert after == before  # the first one reads the file's head, too: behind the rewriting, and behind the restart
    for one, other in zip(selected, again.selections[-4:], strict=True):
        assert all(torch.equal(a, b.rows) for a, b in zip(one, other.selections, strict=True))


@pytest.mark.parametrize("restart", [False, True])
def test_one_request_does_not_undo_the_order_of_many(
    start: Start, model_of: Models, tmp_path: Path, restart: bool
) -> None:
    """An order goes by the average over all requests; after a restart, too, one more changes it little."""
    model, prefix = model_of("phi"), draw(1, ROWS)
    many = scene(start, model, tmp_path)
    many.put(prefix)
    for _ in range(20):
        ask(many.handle, [*prefix, *draw("usual", NEW)], 0.1)
    assert reorder(many.handle) == 1
    (before,) = orders(many.handle).values()
    if restart:
        many.handle.engine.close()
        many = scene(start, model, tmp_path)
    ask(many.handle, [*prefix, *draw("odd", NEW)], 0.1)
    reorder(many.handle)
    (after,) = orders(many.handle).values()
    moved = [sum(a != b for a, b in zip(one, other, strict=True)) for one, other in zip(before, after, strict=True)]
    assert max(moved) < 0.2 * ROWS


def test_the_first_layer_is_guessed_from_before_the_restart(start: Start, model_of: Models, tmp_path: Path) -> None:
    model, prefix = model_of("phi"), draw(1, ROWS)
    first = scene(start, model, tmp_path, "prior")
    first.put(prefix)
    ask(first.handle, [*prefix, *draw(1, NEW)], 0.1)
    first.handle.engine.close()
    again = scene(start, model, tmp_path, "prior")
    loader = again.loader
    loader.bandwidth, loader.budget.seconds = 1e9, 1.0
    guessed: list[int] = []
    read = loader.read

    def recorded(asked: Sequence[ExtentChunks], priority: int) -> Reading:
        reads = [read for each in asked for read in each.reads]
        guessed.extend(each.layer for each in reads if priority == PREFETCH and each.kv != PROBES)
        return read(asked, priority)

    loader.read = recorded  # type: ignore[method-assign]
    ask(again.handle, [*prefix, *draw(2, NEW)], 0.1)
    assert set(guessed) == {0, 1}


@pytest.mark.parametrize("how", ["reset", "session"])
def test_what_is_deleted_is_not_written_down_either(start: Start, model_of: Models, tmp_path: Path, how: str) -> None:
    model, prefix = model_of("phi"), draw(1, ROWS)
    first = scene(start, model, tmp_path)
    ask(first.handle, prefix, 1.0, session_id="s")
    first.handle.engine.settle()
    first.handle.engine.demote("disk")
    ask(first.handle, [*prefix, *draw(1, NEW)], 0.1)
    first.handle.engine.close()
    again = scene(start, model, tmp_path)
    assert known_of(again.handle)
    if how == "session":
        assert again.handle.engine.forget_session("", "s")
    else:
        again.handle.engine.reset_cache()
    again.handle.engine.settle()
    again.handle.engine.close()
    last = scene(start, model, tmp_path)
    assert not known_of(last.handle)
    last.handle.engine.close()
    (catalog,) = tmp_path.glob("*/catalog.sqlite")
    with contextlib.closing(sqlite3.connect(catalog)) as db:
        assert db.execute("SELECT COUNT(*) FROM notes WHERE CAST(kind AS TEXT) = 'importance'").fetchone() == (0,)
