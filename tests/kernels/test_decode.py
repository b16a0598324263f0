"""A step's segments read together: the same as attention over the whole, in whatever way it is split and computed."""

from __future__ import annotations

import itertools
import math
from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from afterglow.kernels import decode
from afterglow.kernels.attention import attend
from afterglow.kernels.built import native
from afterglow.kernels.context_pages import PAGE_ROWS, Pages
from afterglow.kernels.decode import Appends, Read, Reads, rows_at
from tests import doors

LAYERS, SCALE = 2, 0.3
HEADS = [(4, 4), (8, 2), (8, 1), (1, 1), (16, 2)]  # groups of 1, 4 and 8

WAYS = ["torch", *([16, 8] if native() is not None else [])]


@pytest.fixture(params=WAYS, ids=str)
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> int | str:
    """Without the compiled kernels, and with them, at each width of vectors that this processor has."""
    use(request.param, monkeypatch)
    return request.param  # type: ignore[no-any-return]


def use(way: int | str, monkeypatch: pytest.MonkeyPatch) -> None:
    if way == "torch":
        monkeypatch.setattr(decode, "native", lambda: None)
        return
    library = native()
    assert library is not None
    if library.width < int(way):
        pytest.skip(f"this processor has no vectors of {way} floats")
    made = decode._NativeReads.__init__

    def narrowed(self: decode._NativeReads, *args: object) -> None:
        made(self, *args)  # type: ignore[arg-type]
        self._width = int(way)

    monkeypatch.setattr(decode._NativeReads, "__init__", narrowed)


def context(rows: int, kv_heads: int, head_dim: int, generator: torch.Generator, unseen: int = 0) -> Pages:
    """Rows that count among others that would show; NaN in the first `unseen`."""
    data = torch.full((LAYERS, 2, kv_heads, (rows // PAGE_ROWS + 1) * PAGE_ROWS, head_dim), 1e4)
    data[:, :, :, :rows] = torch.randn(LAYERS, 2, kv_heads, rows, head_dim, generator=generator)
    data[:, :, :, :unseen] = torch.nan
    return Pages.of(data)


def whole(q: Tensor, seen: list[list[tuple[Pages, int, int]]], layer: int, cap: float = 0.0) -> tuple[Tensor, Tensor]:
    """The formula in float64: each query over all rows that it sees, in one softmax."""
    out = torch.zeros(q.shape, dtype=torch.float64)
    lse = torch.full(q.shape[:2], -math.inf, dtype=torch.float64)
    for i, pieces in enumerate(seen):
        found = [_rows(pages, layer, start, stop).double() for pages, start, stop in pieces if stop > start]
        if not found:
            continue
        keys, values = torch.cat(found, 2).repeat_interleave(q.shape[1] // found[0].shape[1], 1)
        scores = (keys @ q[i].double()[:, :, None])[..., 0] * SCALE
        if cap:
            scores = cap * torch.tanh(scores / cap)
        lse[i] = scores.logsumexp(-1)
        out[i] = ((scores - lse[i][:, None]).exp()[:, None] @ values)[:, 0]
    return out, lse


def _rows(pages: Pages, layer: int, start: int, stop: int) -> Tensor:
    """[2, kv_heads, rows, head_dim]."""
    return torch.stack(pages.read(layer, start, stop)).transpose(1, 2)


def last_seen(read: Read, query: int) -> int:
    return read.stop - len(read.queries) + 1 + list(read.queries).index(query) if read.causal else read.stop


def first_seen(read: Read, query: int) -> int:
    return max(read.start, last_seen(read, query) - read.window) if read.window else read.start


def check(q: Tensor, reads: list[Read], cap: float = 0.0) -> None:
    out = torch.zeros(q.shape)
    lse = torch.full(q.shape[:2], -torch.inf)
    prepared = Reads(reads, cap=cap)
    seen = [[(r.pages, first_seen(r, i), last_seen(r, i)) for r in reads if i in r.queries] for i in range(len(q))]
    for layer in range(LAYERS):
        out.zero_()
        lse.fill_(-torch.inf)
        prepared.attend(layer, q, SCALE, out, lse)
        exact = whole(q, seen, layer, cap)
        torch.testing.assert_close(out.double(), exact[0], atol=1e-5, rtol=0)
        torch.testing.assert_close(lse.double(), exact[1], atol=1e-5, rtol=1e-6)


LENGTHS = st.one_of(st.sampled_from([0, 1, 2, 15, 16, 17, 63, 64, 65, 128]), st.integers(0, 300))


@settings(deadline=None, max_examples=40)
@given(
    jobs=st.lists(LENGTHS, min_size=1, max_size=9),
    levels=st.lists(st.tuples(LENGTHS, st.integers(0, 2**9 - 1)), max_size=3),
    heads=st.sampled_from(HEADS),
    head_dim=st.sampled_from([16, 64, 80]),
    seed=st.integers(0, 99),
    chosen=st.sampled_from(WAYS),
)
def test_any_split_at_any_levels(
    jobs: list[int],
    levels: list[tuple[int, int]],
    heads: tuple[int, int],
    head_dim: int,
    seed: int,
    chosen: int | str,
) -> None:
    """Rows of its own for each request, and rows that several share; some segments are empty."""
    generator = torch.Generator().manual_seed(seed)
    q = torch.randn(len(jobs), heads[0], head_dim, generator=generator)
    reads = []
    for rows, members in levels:
        queries = [i for i in range(len(jobs)) if members >> i & 1]
        if queries:
            reads.append(Read(context(rows, heads[1], head_dim, generator), 0, rows, queries))
    for i, rows in enumerate(jobs):
        start = min(rows, seed % 7)
        reads.append(Read(context(rows, heads[1], head_dim, generator), start, rows, (i,)))
    with pytest.MonkeyPatch.context() as monkeypatch:
        use(chosen, monkeypatch)
        check(q, reads)


NEW = st.one_of(st.sampled_from([1, 2, 63, 64, 65, 129]), st.integers(1, 200))


@settings(deadline=None, max_examples=40)
@given(
    parts=st.lists(st.tuples(LENGTHS, NEW), min_size=1, max_size=4),
    shared=st.integers(0, 2**4 - 1),
    heads=st.sampled_from(HEADS),
    head_dim=st.sampled_from([16, 64]),
    threads=st.sampled_from([1, 3]),
    chosen=st.sampled_from(WAYS),
)
def test_new_rows_see_none_after_themselves(
    parts: list[tuple[int, int]], shared: int, heads: tuple[int, int], head_dim: int, threads: int, chosen: int | str
) -> None:
    """Prefills: several new rows for each part, after rows of its own, some behind rows that parts share."""
    generator = torch.Generator().manual_seed(len(parts))
    edges = [0, *itertools.accumulate(new for _, new in parts)]
    q = torch.randn(edges[-1], heads[0], head_dim, generator=generator)
    where = [range(a, b) for a, b in pairwise(edges)]
    reads = []
    members = [rows for i, rows in enumerate(where) if shared >> i & 1]
    if members:
        data = context(70, heads[1], head_dim, generator)
        reads.append(Read(data, 0, 70, [row for rows in members for row in rows]))
    for (before, new), rows in zip(parts, where, strict=True):
        start = before // 3
        data = context(before + new, heads[1], head_dim, generator)
        reads.append(Read(data, start, before + new, rows, new > 1))
    number = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        with pytest.MonkeyPatch.context() as monkeypatch:
            use(chosen, monkeypatch)
            check(q, reads)
    finally:
        torch.set_num_threads(number)


@settings(deadline=None, max_examples=40)
@given(
    parts=st.lists(st.tuples(LENGTHS, NEW), min_size=1, max_size=4),
    window=st.one_of(st.sampled_from([1, 2, 63, 64, 65, 128]), st.integers(1, 400)),
    cap=st.sampled_from([0.0, 0.0, 0.8, 30.0]),
    heads=st.sampled_from(HEADS),
    head_dim=st.sampled_from([16, 64]),
    threads=st.sampled_from([1, 3]),
    chosen=st.sampled_from(WAYS),
)
def test_windows_and_caps(
    parts: list[tuple[int, int]],
    window: int,
    cap: float,
    heads: tuple[int, int],
    head_dim: int,
    threads: int,
    chosen: int | str,
) -> None:
    """Rows that no query of a part sees may be anything."""
    generator = torch.Generator().manual_seed(len(parts))
    edges = [0, *itertools.accumulate(new for _, new in parts)]
    q = torch.randn(edges[-1], heads[0], head_dim, generator=generator)
    reads = []
    for (before, new), (a, b) in zip(parts, pairwise(edges), strict=True):
        data = context(before + new, heads[1], head_dim, generator, max(0, before + 1 - window))
        reads.append(Read(data, max(0, before + 1 - window) // 64 * 64, before + new, range(a, b), True, window))
    number = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        with pytest.MonkeyPatch.context() as monkeypatch:
            use(chosen, monkeypatch)
            check(q, reads, cap)
    finally:
        torch.set_num_threads(number)


@pytest.mark.parametrize("heads", HEADS)
def test_a_decoded_row_is_the_same_alone_and_before_guesses_behind_a_window(
    way: int | str, heads: tuple[int, int]
) -> None:
    """To the bit: both reads begin at a multiple of 256."""
    generator = torch.Generator().manual_seed(4)
    data, q = context(1000, heads[1], 16, generator), torch.randn(6, heads[0], 16, generator=generator)
    window, first = (
        300,
        811,
    )  # of the rows of the context, the first query's; its window begins in the last row of a block

    def found(rows: int) -> Tensor:
        out, lse = torch.zeros(q.shape), torch.full(q.shape[:2], -torch.inf)
        start = (first + 1 - window) // 256 * 256
        read = Read(data, start, first + rows, range(rows), True, window)
        Reads([read], cap=5.0).attend(0, q, SCALE, out, lse)
        return out

    assert torch.equal(found(1)[0], found(6)[0])


@pytest.mark.parametrize("threads", [1, 2, 5])
@pytest.mark.parametrize("heads", HEADS)
def test_long_segments_in_chunks(way: int | str, heads: tuple[int, int], threads: int) -> None:
    """Chunks of rows on several threads, tiles of queries, and a remainder of each."""
    generator = torch.Generator().manual_seed(1)
    q = torch.randn(37, heads[0], 64, generator=generator)
    reads = [Read(context(1500, heads[1], 64, generator), 7, 1500, range(1, 37))]
    reads += [Read(context(40 + 9 * i, heads[1], 64, generator), i, 40 + 9 * i, (i,)) for i in range(37)]
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        check(q, reads)
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("threads", [1, 2, 5])
@pytest.mark.parametrize("heads", HEADS)
def test_a_prefill_in_turns_of_its_queries(way: int | str, heads: tuple[int, int], threads: int) -> None:
    """Few KV heads, and more queries than one task takes; earlier rows besides."""
    generator = torch.Generator().manual_seed(2)
    q = torch.randn(150, heads[0], 64, generator=generator)
    reads = [Read(context(150, heads[1], 64, generator), 0, 150, range(150), causal=True)]
    reads += [Read(context(290, heads[1], 64, generator), 3, 290, range(150))]
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        check(q, reads)
    finally:
        torch.set_num_threads(before)


@pytest.mark.skipif(native() is None, reason="nothing has been built for this machine")
@pytest.mark.parametrize("width", [16, 8])
@pytest.mark.parametrize(("heads", "window", "cap"), [((9, 3), 0, 0.0), ((8, 1), 0, 5.0), ((4, 4), 300, 0.0)])
def test_a_row_has_the_same_bits_however_it_is_computed(
    heads: tuple[int, int], window: int, cap: float, width: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Prefilled at once, in chunks, row by row, with guesses; alone or beside others; behind rows that are read by themselves, up to any
    multiple of 64; on any number of threads."""
    use(width, monkeypatch)
    generator = torch.Generator().manual_seed(7)
    rows, number = 700, torch.get_num_threads()
    data, other = context(rows, heads[1], 32, generator), context(300, heads[1], 32, generator)
    q = torch.randn(rows + 3, heads[0], 32, generator=generator)

    def found(
        start: int, stop: int, edges: tuple[int, ...] = (), beside: int = 0, threads: int = 2
    ) -> tuple[Tensor, Tensor]:
        """Attend with rows [start, stop), whose context is read up to each of the edges by itself."""
        own = range(stop - start)
        cuts = [0, *edges]
        reads = [Read(data, a, b, own) for a, b in pairwise(cuts)]
        reads.append(Read(data, cuts[-1], stop, own, len(own) > 1 or window > 0, window))
        reads += [Read(other, 0, 250 + 7 * i, (len(own) + i,)) for i in range(beside)]
        batch = torch.cat((q[start:stop], q[rows : rows + beside]))
        out, lse = torch.zeros(batch.shape), torch.full(batch.shape[:2], -torch.inf)
        torch.set_num_threads(threads)
        try:
            Reads(reads, cap=cap).attend(1, batch, SCALE, out, lse)
        finally:
            torch.set_num_threads(number)
        return out[: len(own)], lse[: len(own)]

    whole = found(0, rows)
    assert whole[0].isfinite().all()
    pieces = [(0, 47), (47, 300), (300, 301), (301, 317), (317, 319), (319, 320), (320, 640), (640, 699), (699, 700)]
    for threads in (1, 2, 5):
        for beside in (0, 3):
            for start, stop in pieces:
                out, lse = found(start, stop, (), beside, threads)
                assert torch.equal(out, whole[0][start:stop]), (start, stop, threads, beside)
                assert torch.equal(lse, whole[1][start:stop])
    for edges in () if window else ((64,), (256,), (64, 128, 192), (192, 576)):
        for start, stop in ((600, 700), (650, 658), (699, 700)):
            assert torch.equal(found(start, stop, edges, 2)[0], whole[0][start:stop]), (start, stop, edges)


def test_what_was_found_before_is_kept(way: int | str) -> None:
    """Queries that are rows of a fused projection, merged into what there is; others are left alone."""
    generator = torch.Generator().manual_seed(2)
    fused = torch.randn(4, 12, 16, generator=generator)
    q = fused[:, :8]
    data = context(50, 2, 16, generator)
    out, lse = torch.zeros(4, 8, 16), torch.full((4, 8), -torch.inf)
    out[1], lse[1] = 3.0, 0.5
    out[3], lse[3] = 7.0, -2.0
    Reads([Read(data, 0, 50, (2, 1))]).attend(0, q, SCALE, out, lse)
    fresh, mass = whole(q, [[], [(data, 0, 50)], [(data, 0, 50)], []], 0)
    weight = torch.sigmoid(mass[1] - 0.5)[:, None]
    torch.testing.assert_close(out[1].double(), fresh[1] * weight + 3.0 * (1 - weight), atol=1e-5, rtol=0)
    torch.testing.assert_close(lse[1].double(), torch.logaddexp(mass[1], torch.tensor(0.5).double()), atol=1e-5, rtol=0)
    torch.testing.assert_close(out[2].double(), fresh[2], atol=1e-5, rtol=0)
    assert (out[3] == 7).all()
    assert (lse[3] == -2).all()
    assert (lse[0] == -torch.inf).all()


def test_scores_far_apart(way: int | str) -> None:
    """Weights that underflow, and scores far beyond what exp can hold."""
    generator = torch.Generator().manual_seed(3)
    q = torch.randn(9, 4, 16, generator=generator) * 300
    reads = [Read(context(200, 4, 16, generator), 0, 200, range(9))]
    reads += [Read(context(30, 4, 16, generator), 0, 30, (i,)) for i in range(9)]
    out, lse = torch.zeros(9, 4, 16), torch.full((9, 4), -torch.inf)
    Reads(reads).attend(0, q, SCALE, out, lse)
    seen = [[(r.pages, r.start, r.stop) for r in reads if i in r.queries] for i in range(9)]
    exact = whole(q, seen, 0)
    assert exact[1].max() > 200
    torch.testing.assert_close(out.double(), exact[0], atol=5e-4, rtol=0)
    torch.testing.assert_close(lse.double(), exact[1], atol=0, rtol=1e-5)


@pytest.mark.parametrize("head_dim", [16, 24])
def test_bfloat16_and_odd_heads_go_the_general_way(head_dim: int) -> None:
    generator = torch.Generator().manual_seed(4)
    dtype = torch.bfloat16 if head_dim == 16 else torch.float32
    data = Pages.of(torch.randn(LAYERS, 2, 2, 40, head_dim, generator=generator).to(dtype))
    q = torch.randn(3, 4, head_dim, generator=generator).to(dtype)
    out, lse = torch.zeros(3, 4, head_dim), torch.full((3, 4), -torch.inf)
    reads = Reads([Read(data, 0, 40, range(3)), Read(data, 5, 9, (1,))])
    assert doors.compiled_reads(reads) is None
    reads.attend(1, q, SCALE, out, lse)
    exact = whole(q, [[(data, 0, 40)], [(data, 0, 40), (data, 5, 9)], [(data, 0, 40)]], 1)
    torch.testing.assert_close(out.double(), exact[0], atol=0.03 if head_dim == 16 else 1e-5, rtol=0)


@pytest.mark.skipif(native() is None, reason="nothing has been built for this machine")
def test_new_rows_are_put_where_they_belong() -> None:
    generator = torch.Generator().manual_seed(5)
    k, v = torch.randn(2, 5, 3, 16, generator=generator).unbind(0)
    expected = [torch.zeros(LAYERS, 2, 3, rows, 16) for rows in (4, 69)]
    contexts = [Pages.of(each) for each in expected]
    rows = [Read(contexts[0], 3, 4, (4,)), Read(contexts[1], 62, 66, range(4))]
    assert Appends.possible(rows)
    assert not Appends.possible([Read(Pages.of(expected[0].bfloat16()), 3, 4, (4,))])
    Appends(rows).write(1, k, v)
    for which, x in enumerate((k, v)):
        expected[0][1, which, :, 3] = x[4]
        expected[1][1, which, :, 62:66] = x[:4].transpose(0, 1)
    for found, wanted in zip(contexts, expected, strict=True):
        for layer in range(LAYERS):
            assert torch.equal(_rows(found, layer, 0, wanted.shape[3]), wanted[layer])


def test_an_accumulator_of_another_dtype_is_refused() -> None:
    if native() is None:
        pytest.skip("nothing has been built for this machine")
    data = Pages.of(torch.zeros(LAYERS, 2, 1, 4, 16))
    with pytest.raises(ValueError, match="bfloat16"):
        Reads([Read(data, 0, 4, (0,))]).attend(
            0, torch.zeros(1, 1, 16), 1.0, torch.zeros(1, 1, 16).bfloat16(), torch.zeros(1, 1)
        )


def test_rows_side_by_side_are_a_slice() -> None:
    device = torch.device("cpu")
    assert rows_at([3, 4, 5], device) == slice(3, 6)
    found = rows_at([3, 5], device)
    assert isinstance(found, Tensor)
    assert found.tolist() == [3, 5]


def test_the_three_ways_agree_with_plain_attention_of_one_job() -> None:
    """What the engine did before: one call for each job over its whole context, causal."""
    generator = torch.Generator().manual_seed(6)
    edges = [0, 64, 65, 200]
    data = context(200, 2, 64, generator)
    q = torch.randn(1, 8, 64, generator=generator)
    plain = attend(q, *data.read(0, 0, 200), scale=SCALE, causal=True)
    for chosen in WAYS:
        with pytest.MonkeyPatch.context() as monkeypatch:
            use(chosen, monkeypatch)
            out, lse = torch.zeros(1, 8, 64), torch.full((1, 8), -torch.inf)
            Reads([Read(data, a, b, (0,)) for a, b in pairwise(edges)]).attend(0, q, SCALE, out, lse)
        torch.testing.assert_close(out, plain[0], atol=1e-5, rtol=0)
        torch.testing.assert_close(lse, plain[1], atol=1e-5, rtol=0)
