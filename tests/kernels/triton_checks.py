"""Triton's kernels on the CPU, against references: `python -m tests.kernels.triton_checks NAME`, with TRITON_INTERPRET=1.

In processes of their own: the interpreter is chosen when Triton is imported. What is printed are the largest errors, as JSON.
"""

from __future__ import annotations

import itertools
import json
import math
import random
import sys
from collections.abc import Iterator
from unittest import mock

import pytest
import torch
from torch import Tensor

from afterglow.kernels import (
    device_reads,
    triton_attention,
    triton_column_sums,
    triton_experts,
    triton_gather,
    triton_merge,
    triton_passes,
    triton_products,
    triton_rows,
)
from afterglow.kernels.attention import attend, merge
from afterglow.kernels.context_pages import Pages
from afterglow.kernels.decode import Read
from afterglow.kernels.device_blocks import device_matrix
from afterglow.kernels.device_experts import ExpertTables, Matrix, PlainMatrix
from afterglow.kernels.device_products import FLOAT8, Kind, RoundedMatrix, rounded_rows
from afterglow.kernels.packed import BLOCK_FORMATS, dequantize
from afterglow.kernels.paged_parts import CHUNK, PagedPart, PartTables, part_of, row_places
from afterglow.kernels.rope import rotate
from afterglow.kernels.slot_gather import SlotRows, slot_table
from afterglow.kernels.stored_rows import narrowed, stored_width, widened
from tests.kernels.test_packed import random_blocks

CPU = torch.device("cpu")
KINDS = (
    Kind(8, 0, torch.float32),
    Kind(8, 0, torch.float32, coded=True),
    Kind(8, 16, torch.float32),
    Kind(8, 32, torch.float16, torch.int8),
    Kind(4, 32, torch.float16),
    Kind(4, 32, torch.float32, torch.float32),
    Kind(4, 32, torch.float16, torch.int16),
    Kind(4, 32, torch.bfloat16, coded=True),
)
DTYPES = torch.float32, torch.bfloat16, torch.float16
generator = torch.Generator().manual_seed(0)
rng = random.Random(0)  # of sizes, beside those that are chosen
# By what was compared: the error that was nearest to what is allowed, that, and the largest number of the reference.
largest: dict[str, tuple[float, float, float]] = {}


def draw(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(*shape, generator=generator).to(dtype)


def close(
    what: str, dtype: torch.dtype, found: Tensor, wanted: Tensor, atol: float | Tensor, rtol: float = 0.0
) -> None:
    """Compare, and note the error. `dtype`: of the tensors that the kernel was given. `atol`: of each number, or of all."""
    assert found.shape == wanted.shape
    found, wanted = found.double().flatten(), wanted.double().flatten()
    allowed = (atol.flatten() if isinstance(atol, Tensor) else atol) + rtol * wanted.abs().nan_to_num(0.0)
    same = (found == wanted) | (found.isnan() & wanted.isnan())  # infinities, too
    wrong = torch.where(same, 0.0, (found - wanted).abs())
    if not wrong.numel():
        return
    at = (wrong / allowed.clamp_min(1e-300)).argmax()
    assert bool((wrong <= allowed).all()), f"{what}, {dtype}: {float(found[at])} for {float(wanted[at])}"
    name = f"{what} | {str(dtype).removeprefix('torch.')}"
    most = wanted.nan_to_num(0.0, 0.0, 0.0).abs().max()
    now = float(wrong[at]), float(allowed[at]), float(most)
    largest[name] = max(largest.get(name, now), now, key=lambda each: each[0] / max(each[1], 1e-300))


def rounding(dtype: torch.dtype, x: Tensor, weights: Tensor) -> Tensor:
    """Bound the errors of x [rows, inputs] times weights [outputs, inputs]: each product and each sum is rounded to the dtype once, which
    the interpreter does by cutting bfloat16 off. Errors of the products are independent, so that they add up like a random walk, of
    which 4 standard deviations are allowed; sums are in float32."""
    x, weights = x.double(), weights.double()
    walk = (x.square() @ weights.square().T).sqrt()
    eps, sums = torch.finfo(dtype).eps, torch.finfo(torch.float32).eps * x.shape[1] ** 0.5
    return 2 * eps * (x @ weights.T).abs() + 4 * (eps + sums) * walk


def context(layers: int, kv_heads: int, rows: int, head_dim: int, dtype: torch.dtype) -> Pages:
    """Rows in pages whose other rows would show."""
    data = torch.full((layers, 2, kv_heads, (rows // 64 + 1) * 64, head_dim), math.nan, dtype=dtype)
    data[:, :, :, :rows] = draw(layers, 2, kv_heads, rows, head_dim, dtype=dtype)
    return Pages.of(data)


def all_rows(pages: Pages, stop: int) -> Tensor:
    """[layers, 2, kv_heads, rows, head_dim]."""
    layers = (pages.read(layer, pages.first, stop) for layer in range(len(pages.data)))
    return torch.stack([torch.stack(found).transpose(1, 2) for found in layers])


def formula(q: Tensor, reads: list[Read], layer: int, cap: float) -> tuple[Tensor, Tensor]:
    """Attention in float64: each query over all rows that it sees, in one softmax; out 0 and LSE -inf where it sees none."""
    out, lse = torch.zeros(q.shape, dtype=torch.float64), torch.full(q.shape[:2], -math.inf, dtype=torch.float64)
    for row in range(len(q)):
        found = []
        for read in reads:
            if row in read.queries:
                last = read.stop - len(read.queries) + 1 + list(read.queries).index(row) if read.causal else read.stop
                first = max(read.start, last - read.window) if read.window and read.causal else read.start
                found.append(torch.stack(read.pages.read(layer, first, max(first, last))).transpose(1, 2).double())
        if not found or not sum(each.shape[2] for each in found):
            continue
        keys, values = torch.cat(found, 2).repeat_interleave(q.shape[1] // found[0].shape[1], 1)
        scores = (keys @ q[row].double()[:, :, None])[..., 0] * SCALE
        if cap:
            scores = cap * torch.tanh(scores / cap)
        lse[row] = scores.logsumexp(-1)
        out[row] = ((scores - lse[row][:, None]).exp()[:, None] @ values)[:, 0]
    return out, lse


SCALE = 0.2
KEPT = {torch.int8: "rows in 8 bits", torch.float16: "float16", torch.bfloat16: "bfloat16", torch.float32: "float32"}


def check(q: Tensor, reads: list[Read], cap: float = 0.0, before: tuple[Tensor, Tensor] | None = None) -> None:
    """Compare with the formula, in the last layer. `before`: out and LSE of other rows, which are merged with."""
    layer = reads[0].pages.data.shape[0] - 1
    out, lse = torch.full(q.shape, math.nan), torch.full(q.shape[:2], -math.inf)
    expected = formula(q, reads, layer, cap)
    if before is not None:
        out, lse = before[0].clone(), before[1].clone()
        expected = merge((before, (expected[0].float(), expected[1].float())))
    parts = [part for read in reads if (part := read.part()) is not None]
    tables = PartTables.of(parts, q.shape[1] // reads[0].pages.data.shape[2])
    triton_attention.attend_parts(tables, layer, q, SCALE, cap, out, lse)
    read = sorted({row for part in parts for row in part.queries})
    # Inputs are exact in float64; a weight is rounded to bfloat16 before it is multiplied, 2**-9 of values up to about 4.
    rounding = 1e-5 if q.dtype == torch.float32 else 2**-6
    close("attention", q.dtype, out[read], expected[0][read], rounding)
    close("attention, log-sum-exp", q.dtype, lse[read], expected[1][read], 1e-4, 1e-6)


def drawn_read(kv_heads: int, head_dim: int, dtype: torch.dtype, count: int, least: int) -> Read:
    """Some of `count` queries over `least` or more rows of a context of any length."""
    rows = rng.randint(1, CHUNK + 200)
    start = rng.randint(0, rows - least)
    queries = tuple(rng.sample(range(count), rng.randint(1, count)))
    causal = rng.random() < 0.5
    window = rng.randint(1, 100) if causal and rng.random() < 0.5 else 0
    pages = context(2, kv_heads, rows, head_dim, dtype)
    return Read(pages, start, rng.randint(start + least, rows), queries, causal, window)


def attention() -> None:
    """Decoding and shared rows, with guesses, windows and caps; heads and dtypes; rows and queries with strides of their own."""
    for dtype, head_dim, (heads, kv_heads) in (
        (torch.float32, 64, (4, 1)),
        (torch.float32, 80, (2, 2)),
        (torch.bfloat16, 128, (6, 2)),
        (torch.float16, 64, (4, 2)),
        (torch.bfloat16, 16, (8, 1)),
    ):
        q = draw(9, heads + 2, head_dim, dtype=dtype)[:, 1:-1]  # a part of a wider row
        long, short = context(2, kv_heads, CHUNK + 70, head_dim, dtype), context(2, kv_heads, 65, head_dim, dtype)
        reads = [
            Read(long, 0, 128, range(4)),  # shared rows
            Read(short, 0, 0, (0,)),  # no rows
            Read(long, 128, CHUNK + 70, (1,)),
            Read(short, 3, 65, (0,)),
            Read(short, 0, 64, (5, 7, 6), True),  # a row and two guesses
            Read(long, 0, 200, (8,), True, 70),
        ]
        check(q, reads, before=(draw(9, heads, head_dim), draw(9, heads)))
        check(q, reads[2:], cap=4.0)
    for _ in range(8):
        dtype, head_dim, kv_heads = rng.choice(DTYPES), rng.choice((16, 32, 64, 80, 96, 128)), rng.randint(1, 3)
        count, heads = rng.randint(1, 12), kv_heads * rng.randint(1, 5)
        q = draw(count, heads, head_dim, dtype=dtype)
        reads = [drawn_read(kv_heads, head_dim, dtype, count, least) for least in (1, 0, 0, 0)]
        check(q, reads, cap=rng.choice((0.0, 4.0)), before=(draw(*q.shape), draw(count, heads)))
    for dtype in DTYPES:  # heads of fewer dimensions than Triton's products take
        check(draw(3, 4, 8, dtype=dtype), [Read(context(1, 2, 70, 8, dtype), 0, 70, (0, 1, 2), True)])
    # Fewer rows than queries: the first queries see nothing.
    check(draw(3, 2, 16), [Read(context(1, 2, 2, 16, torch.float32), 0, 2, (0, 1, 2), True)])
    # Rows before all windows, which layers with a window leave out, hold anything; some fill a chunk, others a page.
    stop = 2 * CHUNK + 70
    long = context(1, 2, stop, 16, torch.float32)
    for queries in ((0, 1, 2), (1,)):
        long[0].slab.data[:, :, :, : stop + 1 - len(queries) - 80] = math.nan
        check(draw(3, 2, 16), [Read(long, 0, stop, queries, True, 80)])
    # Many queries, in several tasks, over a wide chunk; scores that exp cannot hold.
    wide = context(1, 1, 530, 16, torch.float32)
    check(draw(40, 2, 16), [Read(wide, 0, 530, range(40))])
    wide[0].data[0, 0, :, 3] = 900.0
    check(draw(2, 2, 16), [Read(wide, 0, 100, (0, 1))])


def pages() -> None:
    """Pages in any order, of a pool that other contexts share: the same bits as of rows that follow each other."""
    rows, heads, kv_heads, head_dim = 300, 4, 2, 32
    pool = draw(2, 2, kv_heads, 64 * 16, head_dim)
    places = [11, 2, 7, 0, 5]
    data = torch.cat([pool[:, :, :, 64 * place : 64 * (place + 1)] for place in places], 3)
    q = draw(2, heads, head_dim)
    layer, which, head = pool.stride()[:3]
    paged = PagedPart(pool, [64 * place * head_dim for place in places], 10, rows, (0, 1), (layer, which, head))
    found = []
    for part in (paged, part_of(Pages.of(data), 10, rows, (0, 1))):
        out, lse = torch.zeros(q.shape), torch.full(q.shape[:2], -math.inf)
        triton_attention.attend_parts(PartTables.of([part], heads // kv_heads), 1, q, SCALE, 0.0, out, lse)
        found.append((out, lse))
    assert torch.equal(found[0][0], found[1][0])
    assert torch.equal(found[0][1], found[1][1])


def alone() -> None:
    """A decoded row has the same bits alone, before guesses, and beside other requests."""
    data, q = context(1, 2, 400, 32, torch.float32), draw(5, 8, 32)
    found = []
    for reads in (
        [Read(data, 0, 390, (0,))],
        [Read(data, 0, 393, (0, 1, 2, 3), True)],
        [Read(data, 0, 100, (4,)), Read(data, 0, 390, (0,))],
    ):
        out, lse = torch.zeros(q.shape), torch.full(q.shape[:2], -math.inf)
        tables = PartTables.of([part for read in reads if (part := read.part()) is not None], 4)
        triton_attention.attend_parts(tables, 0, q, SCALE, 0.0, out, lse)
        found.append((out[0], lse[0]))
    for out, lse in found[1:]:
        assert torch.equal(out, found[0][0])
        assert torch.equal(lse, found[0][1])


def drawn_heads() -> list[tuple[int, int]]:
    """head_dim and KV heads."""
    return [(rng.choice((16, 24, 32, 64, 80, 96, 128)), rng.randint(1, 5)) for _ in range(6)]


def rows() -> None:
    """New rows in two contexts: turned wholly, in part or not; heads in no whole number of blocks; queries, keys and values apart."""
    for dtype, head_dim, (heads, kv_heads), rotary in (
        (torch.float32, 64, (3, 1), 64),
        (torch.bfloat16, 80, (9, 9), 32),
        (torch.bfloat16, 128, (2, 2), 0),
        (torch.float16, 16, (10, 2), 16),
        *((rng.choice(DTYPES), d, (kv * rng.randint(1, 5), kv), rng.choice((0, d // 2, d))) for d, kv in drawn_heads()),
    ):
        long, short = draw(2, 2, kv_heads, 70, head_dim, dtype=dtype), draw(2, 2, kv_heads, 9, head_dim, dtype=dtype)
        q = draw(5, heads + 1, head_dim, dtype=dtype)[:, 1:]
        k, v = draw(kv_heads, 5, head_dim, dtype=dtype).transpose(0, 1), draw(5, kv_heads, head_dim, dtype=dtype)
        rotation = (draw(5, rotary), draw(5, rotary)) if rotary else None
        wanted = [long.clone(), short.clone()]
        turned = k.double() if rotation is None else rotate(k.double(), rotation)
        wanted[0][1, 0, :, 63:66], wanted[0][1, 1, :, 63:66] = turned[:3].transpose(0, 1), v[:3].transpose(0, 1)
        wanted[1][1, 0, :, 0:2], wanted[1][1, 1, :, 0:2] = turned[3:].transpose(0, 1), v[3:].transpose(0, 1)
        contexts = Pages.of(long), Pages.of(short)
        found = triton_rows.place(row_places([(contexts[0], 63, 66), (contexts[1], 0, 2)]), 1, q, k, v, rotation)
        # A product and a sum in float32, rounded to the dtype once; numbers up to about 8.
        rounding = 8 * torch.finfo(dtype).eps
        for pages, expected in zip(contexts, wanted, strict=True):
            close("rotate and append, rows", dtype, all_rows(pages, expected.shape[3]), expected, rounding)
        expected_q = q if rotation is None else rotate(q.double(), rotation).to(dtype)
        close("rotate and append, queries", dtype, found, expected_q, rounding)


def gather() -> None:
    """Stored rows of each dtype out of slots in any order: turned wholly, in part or not; the ends of slots and of pages; rows that a
    layer leaves out; and nothing written beside. The context's first page is not held."""
    for stored, dtype, head_dim, kv_heads, rotary in (
        (torch.int8, torch.bfloat16, 80, 3, 32),
        (torch.int8, torch.float32, 64, 1, 64),
        (torch.float16, torch.float32, 16, 5, 16),
        (torch.bfloat16, torch.bfloat16, 128, 2, 0),
        (torch.float32, torch.float16, 64, 2, 48),
        (torch.float32, torch.float32, 24, 2, 24),
        *((rng.choice(tuple(KEPT)), rng.choice(DTYPES), d, kv, rng.choice((0, d // 2, d))) for d, kv in drawn_heads()),
    ):
        shape = 3, 2, 7, 64, kv_heads, stored_width(head_dim, stored)
        arena = narrowed(draw(3 * 2 * 7 * 64, kv_heads, head_dim), stored).view(shape)
        # From row 69 of the context on; rotations begin there.
        pieces = [SlotRows(6, 61, 64, 69), SlotRows(2, 0, 56, 72), SlotRows(2, 56, 64, 128), SlotRows(0, 0, 56, 136)]
        pieces += [SlotRows(0, 56, 64, 192), SlotRows(3, 7, 7, 200), SlotRows(5, 9, 50, 200), SlotRows(1, 0, 1, 241)]
        rotation = (draw(173, rotary), draw(173, rotary)) if rotary else None
        for least in (69, 150, 242):
            pages = Pages.of(torch.full((2, 2, kv_heads, 256, head_dim), 7.0, dtype=dtype))
            wanted = all_rows(pages, 256)
            pages.pop_first()
            for slot, first, stop, to in pieces:
                keys, values = (widened(arena[1, which, slot, first:stop], torch.float32).double() for which in (0, 1))
                if rotation is not None:
                    keys = rotate(keys, (rotation[0][to - 69 :][: len(keys)], rotation[1][to - 69 :][: len(keys)]))
                for which, each in enumerate((keys, values)):
                    left = max(0, least - to)
                    wanted[1, which, :, to + left : max(to + left, to + stop - first)] = each[left:].transpose(0, 1)
            table = slot_table(pieces, pages, pages.data)
            triton_gather.gather(arena[1], pages.data, 1, table, rotation, least, 69)
            found = all_rows(pages, 256)
            # A product and a sum in float32, rounded to the dtype once, which the interpreter cuts off; numbers up to about 16.
            close(f"gather of {KEPT[stored]}", dtype, found, wanted[:, :, :, 64:], 16 * torch.finfo(dtype).eps)
            if rotation is None and stored == dtype:
                assert torch.equal(found, wanted[:, :, :, 64:]), "copied rows have other bits"
    triton_gather.gather(arena[1], pages.data, 1, table[:0], rotation, 0, 69)
    assert torch.equal(all_rows(pages, 256), found)


def far() -> None:
    """Layers so far apart that a place in the third one has more than 31 bits. Memory that is not touched takes none."""
    apart = 2**30
    page = 64 * 16
    base = torch.empty(2 * apart + 2 * page, dtype=torch.int8)
    base = base.as_strided((3, 2, 1, 64, 16), (apart, page, page, 16, 1))
    stored = narrowed(draw(2 * 64, 1, 16), torch.float32).view(2, 1, 64, 1, 16).mul_(8)
    table = torch.tensor([[0, 0, 8, 0, 0]])
    triton_gather.gather(stored, base, 2, table, None, 0, 0)
    for which in (0, 1):
        assert torch.equal(base[2, which, 0, :8], stored[which, 0, :8, 0].to(torch.int8))


def old() -> None:
    """Triton before 3.4, which has no knobs."""
    with mock.patch.object(triton_attention.triton, "knobs", None):
        assert triton_attention.exact(torch.bfloat16) is triton_attention.tl.float32


def merged(out: Tensor, lse: Tensor, part: Tensor, part_lse: Tensor, rows: Tensor | slice) -> tuple[Tensor, Tensor]:
    """Merge in float64."""
    parts = torch.stack((lse[rows].double(), part_lse.double()))
    total = parts.logsumexp(0)
    weights = (parts - total).exp().nan_to_num(0)[..., None]
    outs = torch.stack((out[rows].double(), part.double()))
    outs = torch.where(weights == 0, 0.0, outs)  # what weighs nothing may hold anything
    out, lse = out.double(), lse.double()
    out[rows], lse[rows] = (weights * outs).sum(0), total
    return out, lse


def merges() -> None:
    """Two parts: rows and heads with strides of their own, some rows of many, rows that nothing was seen by."""
    places = torch.tensor([5, 1, 0, 3])
    dtypes = (torch.float32, torch.bfloat16)
    for d, dtype, rows in itertools.product((1, 16, 40, 64, 128), dtypes, (None, places)):
        out, lse = draw(7, 3, 2 * d)[:, :, d:], draw(7, 3) * 5
        part, part_lse = draw(3, 4, d).transpose(0, 1).to(dtype), (draw(3, 4) * 5).t()
        lse[1], out[1] = -torch.inf, torch.nan
        part_lse[1, 0] = part_lse[3, 1] = lse[3, 2] = -torch.inf
        wanted = merged(out, lse, part, part_lse, slice(0, 4) if rows is None else rows)
        triton_merge.merge_onto(out, lse, part, part_lse, rows)
        close("merge of two", dtype, out, wanted[0], 1e-5)
        close("merge of two, log-sum-exp", dtype, lse, wanted[1], 1e-5)
    # Scores that exp cannot hold, and an accumulator that is rounded once.
    out, lse = torch.zeros(2, 1, 16, dtype=torch.bfloat16), torch.tensor([[300.0], [-300.0]])
    triton_merge.merge_onto(out, lse, torch.ones(2, 1, 16), torch.tensor([[300.0], [-500.0]]))
    assert out[0].eq(0.5).all()
    assert out[1].eq(0).all()
    torch.testing.assert_close(lse, torch.tensor([[300.0 + 0.6931472], [-300.0]]))
    # As `merge` uses it, on parts as attention yields them.
    q, keys, values = draw(5, 8, 16), draw(90, 2, 16), draw(90, 2, 16)
    ends = ((0, 0), (0, 1), (1, 64), (64, 90))
    parts = [attend(q, keys[a:b], values[a:b], scale=0.3, causal=False) for a, b in ends]
    out, lse = torch.zeros(5, 8, 16), torch.full((5, 8), -torch.inf)
    for part in parts:
        triton_merge.merge_onto(out, lse, *part)
    for found, wanted in zip((out, lse), merge(parts), strict=True):
        torch.testing.assert_close(found, wanted, atol=1e-5, rtol=0)
    with pytest.raises(ValueError, match="side by side"):
        triton_merge.merge_onto(out.transpose(1, 2), lse, *parts[1])
    with pytest.raises(ValueError, match="float64"):
        triton_merge.merge_onto(out, lse.double(), *parts[1])
    triton_merge.merge_onto(out, lse, parts[1][0][:0], parts[1][1][:0])


def drawn_products() -> Iterator[tuple[torch.dtype, int, bool, bool, int, int, int]]:
    for _ in range(10):
        bits = rng.choice((4, 8))
        grouped = bits == 4 or rng.random() < 0.5
        inputs = 32 * rng.randint(1, 14) if grouped else rng.randint(1, 400)
        floats = not grouped and rng.random() < 0.5
        yield rng.choice(DTYPES), bits, grouped, floats, rng.randint(5, 90), inputs, rng.randint(1, 40)


def products() -> None:
    """8 and 4 bits, and floats of 8, outputs and inputs in no whole number of tiles, rows with strides, a part of a matrix, and no rows."""
    for dtype, bits, grouped, floats, outputs, inputs, count in (
        (torch.float32, 8, False, False, 37, 205, 3),
        (torch.bfloat16, 8, True, False, 64, 288, 1),
        (torch.float16, 4, True, False, 33, 160, 17),
        (torch.float32, 4, True, False, 100, 32, 70),
        (torch.bfloat16, 4, True, False, 5, 416, 16),
        (torch.bfloat16, 4, True, False, 20, 32, 2),
        (torch.float16, 8, False, False, 16, 9, 2),
        (torch.float32, 8, False, True, 37, 205, 3),
        (torch.bfloat16, 8, False, True, 64, 288, 70),
        (torch.float16, 8, False, True, 16, 9, 2),
        *drawn_products(),
    ):
        numbers, scale = rounded_rows(draw(outputs, inputs), bits, grouped, floats)
        whole = RoundedMatrix(numbers, scale, inputs, draw(outputs, dtype=dtype) if bits == 4 else None)
        x = draw(count, inputs + 3, dtype=dtype)[:, 3:]
        for matrix in (whole, whole.rows(2, outputs - 2)):
            weights = matrix.widened(0, matrix.outputs, dtype)
            bias = 0 if matrix.bias is None else matrix.bias.double()
            wanted = x.double() @ weights.double().T + bias
            found = triton_products.multiply(x, matrix)
            allowed = rounding(dtype, x, weights) + 2 * torch.finfo(dtype).eps * wanted.abs()
            close(f"product, {'float8' if floats else f'int{bits}'}", dtype, found, wanted, allowed)
        assert triton_products.multiply(x[:0], whole).shape == (0, outputs)
    codes = torch.arange(256).to(torch.uint8).view(16, 16)
    codes[codes & 127 == 127] = 0  # no numbers
    matrix = RoundedMatrix(codes.view(FLOAT8), torch.ones(16, 1), 16)
    assert torch.equal(triton_products.multiply(torch.eye(16), matrix).T, codes.view(FLOAT8).float()), (
        "all floats of 8 bits"
    )


def blocks() -> None:
    """All formats of files, and checkpoints' groups; few inputs and outputs in no whole number of tiles."""
    for block_format in BLOCK_FORMATS:
        inputs = 512 if BLOCK_FORMATS[block_format].weights == 256 else 224
        for dtype, count in ((torch.float32, 3), (torch.bfloat16, 17)):
            matrix = device_matrix(random_blocks(block_format, 37, inputs), block_format, inputs, CPU)
            x = draw(count, inputs, dtype=dtype)
            weights = dequantize(random_blocks(block_format, 37, inputs), block_format)
            found, wanted = triton_products.multiply(x, matrix), x.double() @ weights.double().T
            close(f"product, {block_format}", dtype, found, wanted, rounding(dtype, x, weights))


def passes() -> None:
    """Sizes that are no power of two, rows with strides; a row of zeros has a norm of zeros."""
    for dtype, size in ((torch.float32, 576), (torch.bfloat16, 1100), (torch.float16, 64)):
        wide, weight = draw(4, 3 * size + 5, dtype=dtype), draw(size, dtype=dtype)
        x, part = wide[:, :size], wide[:, size : 2 * size]
        x[1], part[1] = 0, 0
        total, normed = triton_passes.add_rms_norm(x, part, weight, 1e-5)
        # The interpreter cuts bfloat16 off, where a device rounds.
        unit = 8 * torch.finfo(dtype).eps if dtype == torch.bfloat16 else 0
        close("add and RMS norm, sum", dtype, total, x + part, unit)
        exact = total.double() * (total.double().square().mean(1, keepdim=True) + 1e-5).rsqrt() * weight.double()
        few = 4 * torch.finfo(dtype).eps  # two roundings, one after the other
        close("add and RMS norm", dtype, normed, exact, 1e-6, few)
        gated = triton_passes.gated_silu(wide[:, : 2 * size])
        exact = torch.nn.functional.silu(x.double()) * part.double()
        close("gated SiLU", dtype, gated, exact, 1e-6, few)


def experts() -> None:
    """Sizes that fill no tile and some that do, strided rows, experts that many rows take or none, one expert of a row and all; as they
    are and in each kind, with biases and without, and with clamped gates."""
    check_experts(torch.float32, (5, 72, 40), (4, 2), None, None)
    check_experts(torch.float16, (1, 256, 32), (8, 8), None, None, biased=True)
    check_experts(torch.bfloat16, (3, 130, 17), (3, 1), None, None, clamp=(1.702, 0.5))
    check_experts(torch.float32, (0, 16, 8), (2, 1), None, None)
    for wide, narrow in zip(KINDS, (*KINDS[1:], None), strict=True):
        check_experts(torch.float32, (3, 288, 96), (4, 2), wide, narrow, clamp=(1.702, 0.5), biased=True)
        check_experts(torch.float16, (2, 320, 64), (3, 2), wide, None)


def check_experts(
    dtype: torch.dtype,
    sizes: tuple[int, int, int],
    experts_of: tuple[int, int],
    wide: Kind | None,
    narrow: Kind | None,
    *,
    clamp: tuple[float, float] | None = None,
    biased: bool = False,
) -> None:
    """Compare with float64. `sizes`: rows, hidden, inner; `experts_of`: a layer, a row."""
    (rows, hidden, inner), (count, taken) = sizes, experts_of

    def matrix(kind: Kind | None, outputs: int, inputs: int) -> Matrix:
        bias = draw(outputs, dtype=dtype) if biased else None
        if kind is None:
            return PlainMatrix(draw(outputs, inputs, dtype=dtype) / inputs**0.5, bias)
        return triton_products.drawn(kind, outputs, inputs, generator, CPU).with_bias(bias)

    def exact(matrix: Matrix) -> Matrix:
        plain = isinstance(matrix, PlainMatrix)
        numbers = matrix.numbers if plain else matrix.widened(0, matrix.outputs, dtype)
        return PlainMatrix(numbers.double(), None if matrix.bias is None else matrix.bias.double())

    both = (
        [matrix(wide, 2 * inner, hidden) for _ in range(count)],
        [matrix(narrow, hidden, inner) for _ in range(count)],
    )
    x = draw(rows, hidden + 3, dtype=dtype)[:, :hidden] / (1 if wide is None else hidden**0.5)
    weights = draw(rows, taken, dtype=dtype)
    chosen = draw(rows, count).argsort(-1)[:, :taken]
    found = triton_experts.chosen_experts(x, weights, chosen, ExpertTables(*both, clamp))
    wanted = triton_experts.by_torch(
        x.double(), weights.double(), chosen, *([exact(each) for each in side] for side in both), clamp
    )
    # In units of the largest, to which sums add up that cancel: gates, values, weights and sums are rounded one after the other.
    most = float(wanted.abs().max()) if wanted.numel() else 0.0
    allowed = 4 * torch.finfo(dtype).eps * most
    close("experts, rounded" if wide or narrow else "experts", dtype, found, wanted, allowed)


def column_sums() -> None:
    """Many queries and one, more of either than a tile has, and all rows new; each query's weights add up to 1."""
    for dtype, head_dim, (heads, kv_heads), n, rows in (
        (torch.float32, 64, (4, 2), 40, 150),
        (torch.bfloat16, 80, (2, 1), 1, 70),
        (torch.float16, 128, (2, 2), 65, 65),
        (torch.float32, 16, (1, 1), 3, 3),
    ):
        q = draw(n, heads + 1, head_dim, dtype=dtype)[:, 1:]
        keys = draw(kv_heads, rows, head_dim, dtype=dtype).transpose(0, 1)
        scores = torch.einsum("qhd,khd->hqk", q.double(), keys.double().repeat_interleave(heads // kv_heads, 1)) * SCALE
        scores.masked_fill_(torch.ones(n, rows, dtype=torch.bool).triu(1 + rows - n), -torch.inf)
        lse = scores.logsumexp(-1).t().float()
        found = triton_column_sums.column_sums(q, keys, lse, SCALE)
        close("column sums", dtype, found, scores.softmax(-1).sum((0, 1)), 1e-6, 1e-5)
        assert abs(float(found.sum()) - n * heads) < 1e-3 * n * heads
    assert triton_column_sums.column_sums(q[:0], keys, lse[:0], SCALE).tolist() == [0.0] * 3


def trials() -> None:
    """What the kernels are tried with on a device passes here, and does not where a kernel is wrong."""
    triton_column_sums.trial(CPU, torch.bfloat16, 32, 2, 1)
    for rotary in (0, 16, 32):
        triton_rows.trial(CPU, torch.bfloat16, 32, 3, 2, rotary)
    triton_passes.trial(CPU, torch.bfloat16, 100)
    for kind in KINDS:
        triton_products.trial(CPU, torch.float32, kind)
        triton_experts.trial(CPU, torch.float32, kind, None, False, True, None)
        triton_experts.trial(CPU, torch.float32, None, kind, True, False, (1.702, 7.0))
    triton_experts.trial(CPU, torch.bfloat16, None, None, False, False, None)
    for stored in (torch.int8, torch.float16, torch.bfloat16, torch.float32):
        for rotary in (0, 16, 32):
            triton_gather.trial(CPU, torch.bfloat16, stored, 32, 2, rotary)
    triton_attention.trial(CPU, torch.bfloat16, 16, 4, 2, 0.0)
    launch = triton_attention.merge_parts_onto
    triton_attention.merge_parts_onto = lambda out, lse, outs, *rest: launch(out, lse, outs * 1.1, *rest)  # type: ignore[assignment]
    with pytest.raises(ArithmeticError, match="differs from torch"):
        triton_attention.trial(CPU, torch.bfloat16, 16, 4, 2, 0.0)
    assert not device_reads.possible(CPU, torch.bfloat16, 16, 4, 2, 0.0)


if __name__ == "__main__":
    globals()[sys.argv[1]]()
    print(json.dumps(largest))
