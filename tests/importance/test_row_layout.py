"""Orders, their inverses, running means, and where the rows of a prefix lie."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from afterglow.importance.row_layout import ChunkPlace, ExtentView, RowImportance, RowLayout, RowOrder, normalised
from afterglow.importance.select import SelectionRules, judge, probe_sums, probes_of

importances = st.lists(st.sampled_from([0.0, 0.5, 1.0, 2.0, 7.0]), min_size=1, max_size=40)


@given(importances)
def test_mapping_and_order_are_inverse(values: list[float]) -> None:
    order = RowOrder.by(torch.tensor(values))
    assert order.order.tolist() == sorted(range(len(values)), key=lambda i: (-values[i], i))
    assert order.mapping.tolist() == order.order.argsort().tolist()
    rows = torch.randn(len(values), 2, 3)
    assert torch.equal(rows[order.order][order.mapping], rows)  # s_orig = s_stored[m]
    assert torch.equal(RowOrder.by(torch.ones(len(values))).order, torch.arange(len(values)))


@settings(max_examples=100)
@given(st.lists(importances, min_size=1, max_size=4), st.integers(1, 5), st.data())
def test_a_view_selects_its_rows_through_the_mapping(
    values: list[list[float]], chunk: int, data: st.DataObject
) -> None:
    """Whatever the orders and views: the chunks that are named hold exactly the wanted rows, at the places named."""
    orders = [RowOrder.by(torch.tensor(v)) for v in values]
    views, text = [], []
    for extent, v in enumerate(values):
        start = data.draw(st.integers(0, len(v)))
        stop = data.draw(st.integers(start, len(v)))
        views.append(ExtentView(len(v), start, stop))
        text += [(extent, row) for row in range(start, stop)]
    stored = [torch.arange(len(v))[order.order] for order, v in zip(orders, values, strict=True)]
    places = RowLayout(views, orders, chunk)
    wanted = data.draw(st.lists(st.integers(0, len(text) - 1), unique=True)) if text else []
    rows = torch.tensor(wanted, dtype=torch.int64)
    found = []
    for row in wanted:
        where = places[int(places.number[row])]
        at = int(places.stored[row])
        assert at // chunk == where.chunk
        found.append((where.view, int(stored[where.view][at])))
    assert found == [text[row] for row in wanted]
    assert places.chunks(rows).tolist() == sorted({int(places.number[row]) for row in wanted})
    assert set(places.by_hits(rows)) == set(places.chunks(rows).tolist())
    assert int(places.hits(rows).sum()) == len(wanted)
    assert len(places) == sum(-(-len(v) // chunk) for v in values)


def test_chunks_with_the_most_rows_first_then_in_the_order_of_rows() -> None:
    places = RowLayout([ExtentView(6, 0, 6), ExtentView(4, 1, 3)], chunk=2)
    assert places.by_hits(torch.tensor([7, 0, 6, 1, 5])) == [0, 4, 3, 2]  # extent 1's row 2 is in its chunk 1
    assert places.by_hits(torch.tensor([7, 0, 6, 4, 5])) == [2, 4, 0, 3]
    assert places.by_hits(torch.tensor([7, 0, 6, 4, 5, 1]), 2) == [0, 2]
    assert places.by_hits(torch.empty(0, dtype=torch.int64)) == []
    assert places[4] == ChunkPlace(1, 1)
    with pytest.raises(ValueError, match=r"rows \[2, 5\) are not in an extent of 4"):
        RowLayout([ExtentView(4, 2, 5)])


def test_running_means_count_requests_alike_however_many_tokens_they_have() -> None:
    importance = RowImportance(2, 6)
    short, long = torch.tensor([1.0, 0.0, 0.0, 1.0]), torch.tensor([0.0, 300.0, 0.0, 100.0])
    importance.add(1, 1, normalised(short))
    importance.add(1, 1, normalised(long))
    importance.add(1, 3, torch.tensor([4.0]))
    assert importance.mean[1].tolist() == [0, 1, 1.5, pytest.approx(4 / 3), 1.5, 0]
    assert importance.count[1].tolist() == [0, 2, 2, 3, 2, 0]
    assert not importance.mean[0].any()
    assert normalised(torch.zeros(3)).tolist() == [0, 0, 0]


def test_rows_taken_from_reordered_extents_are_those_of_the_text() -> None:
    """What a loader does with a layer of two extents, the second matched in part: probe keys of whole extents back into the
    order of the text, a selection, its chunks, and its rows in these chunks."""
    generator = torch.Generator().manual_seed(0)
    sizes, views = (130, 90), [ExtentView(130, 0, 130), ExtentView(90, 10, 75)]
    keys = [torch.randn(rows, 4, 8, generator=generator) for rows in sizes]
    orders = [RowOrder.by(torch.rand(rows, generator=generator)) for rows in sizes]
    files = [each[order.order] for order, each in zip(orders, keys, strict=True)]
    text = torch.cat([each[view.start : view.stop] for each, view in zip(keys, views, strict=True)])
    probe = [
        file[order.mapping, :3][view.start : view.stop] for order, file, view in zip(orders, files, views, strict=True)
    ]
    assert torch.equal(torch.cat(probe), text[:, :3])
    q, own = (torch.randn(5, 4, 8, generator=generator) for _ in range(2))
    selection = judge(
        probe_sums(probes_of(4, 4), q, torch.cat(probe), own, scale=0.5), 40, SelectionRules(force="pass")
    ).selection
    assert selection is not None
    places = RowLayout(views, orders)
    read = {
        number: files[places[number].view][64 * places[number].chunk :][:64]
        for number in places.by_hits(selection.rows)
    }
    found = [read[int(places.number[row])][int(places.stored[row]) % 64] for row in selection.rows]
    assert torch.equal(torch.stack(found), text[selection.rows])
