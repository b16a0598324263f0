"""The decode attention operator: Figures 1 and 5 of RelayAttention, on this machine.

One layer's attention of a batch of single queries, each over a shared prefix and a context of its own, in three ways: every
request has a copy of the prefix ("plain"), the prefix is stored once and read by each ("shared"), or is read once for all,
stacked, and merged ("relay"): the engine's own kernels, and relay without the kernels built for this machine ("torch"). `theory` is
the smaller of the paper's count of reads (for keys and values and grouped heads) and the roofline: how fast each way's
bytes can be read at all (measured on as much memory, caches included), and how fast its products can be computed at all (by our own
kernels or torch's). Ways take turns in random order.

    python -m benchmarks.papers.relay.operator [--quick] [--json FILE]
"""

from __future__ import annotations

import functools
import random
import statistics
import sys
import time
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from afterglow.bench.profile import MachineRoof
from afterglow.bench.report import arguments, finish, goal, interleaved, show, spread
from afterglow.kernels.built import native
from afterglow.kernels.context_pages import Pages
from afterglow.kernels.decode import Read, Reads

CPU = torch.device("cpu")
SCALE = 0.125
WAYS = ("plain", "shared", "relay", "torch")


class Batch:
    """Queries, prefix and contexts of `requests` requests; stored as the engine does. `options`: `seed`, `heads`, `kv_heads` and
    `head_dim`."""

    def __init__(
        self,
        options: Any,
        requests: int,
        prefix: int,
        context: int,
        device: torch.device = CPU,
        dtype: torch.dtype = torch.float32,
    ) -> None:
        generator = torch.Generator(device)
        generator.manual_seed(options.seed)
        kv, d = options.kv_heads, options.head_dim

        def draw(*shape: int) -> Tensor:
            return torch.randn(*shape, generator=generator, device=device, dtype=dtype)

        self.q = draw(requests, options.heads, d)
        first, rest = draw(1, 2, kv, prefix, d), [draw(1, 2, kv, context, d) for _ in range(requests)]
        whole = [Pages.of(torch.cat((first, data), 3)) for data in rest]
        shared, own = Pages.of(first), [Pages.of(data) for data in rest]
        private = [Read(pages, 0, context, (i,)) for i, pages in enumerate(own)]
        together = [Read(shared, 0, prefix, range(requests)), *private]
        self._reads = {
            "plain": Reads([Read(pages, 0, prefix + context, (i,)) for i, pages in enumerate(whole)]),
            "shared": Reads([*(Read(shared, 0, prefix, (i,)) for i in range(requests)), *private]),
            "relay": Reads(together),
            "torch": Reads(together, built=False),
        }

    def __call__(self, way: str) -> Tensor:
        """Attention of all, in one of the ways."""
        out = torch.zeros_like(self.q, dtype=torch.float32)
        lse = torch.full(self.q.shape[:2], -torch.inf, device=self.q.device)
        self._reads[way].attend(0, self.q, SCALE, out, lse)
        return out


def main(args: list[str]) -> int:
    parser = arguments("python -m benchmarks.papers.relay.operator", __doc__ or "")
    parser.add_argument("--heads", type=int, default=12, help="query heads (default 12)")
    parser.add_argument(
        "--kv-heads", type=int, default=12, help="key/value heads (default 12; full runs add a third of them)"
    )
    parser.add_argument("--head-dim", type=int, default=64, help="size of a head (default 64)")
    options = parser.parse_args(args)
    if options.threads:
        torch.set_num_threads(options.threads)
    prefixes = [64, 512, 2048] if options.quick else [64, 256, 512, 1024, 2048, 4096, 8192, 16384]
    points = [(32, 128, prefix) for prefix in prefixes]
    if not options.quick:
        points += [(requests, 128, 2048) for requests in (1, 2, 4, 8, 16, 64, 128)]
        points += [(32, context, 2048) for context in (256, 512)]
    of_all = [(options.kv_heads, *point) for point in points]
    if not options.quick and options.kv_heads % 3 == 0:
        of_all += [(options.kv_heads // 3, 32, 128, prefix) for prefix in (512, 2048, 8192)]
    bandwidth, flops = _bandwidth(2**28), max(_flops(), MachineRoof.measured().flops)
    rows = [_point(options, *point, flops) for point in of_all]
    show(
        f"decode attention of one layer, {options.heads} heads of {options.head_dim}, float32, "
        f"{torch.get_num_threads()} threads, {'built kernels' if native() else 'torch only'}, us (medians); "
        f"{bandwidth / 1e9:.1f} GB/s, {flops / 1e9:.0f} GFLOP/s",
        (
            "KV heads",
            "batch",
            "context",
            "prefix",
            *WAYS,
            "plain / relay",
            "counted",
            "roofline",
            "of the smaller",
            "spread",
        ),
        [
            (
                r["kv_heads"],
                r["batch"],
                r["context"],
                r["prefix"],
                *(f"{1e6 * r['seconds'][v]:.0f}" for v in WAYS),
                r["gain"],
                r["counted"],
                r["roofline"],
                f"{100 * r['of_theory']:.0f} %",
                f"{100 * max(r['spread'].values()):.0f} %",
            )
            for r in rows
        ],
    )
    goals = [
        goal(
            f"gain at prefix 2048, batch 32, {r['kv_heads']} KV heads, of theory",
            r["of_theory"],
            0.6,
            least=True,
            spread=max(r["spread"]["plain"], r["spread"]["relay"]),
        )
        for r in rows
        if (r["batch"], r["context"], r["prefix"], r["kv_heads"]) == (32, 128, 2048, options.kv_heads)
    ]
    finish(options, rows, goals, bandwidth=bandwidth, flops=flops, built=native() is not None)
    return 0


def _point(options: Any, kv_heads: int, requests: int, context: int, prefix: int, flops: float) -> dict[str, Any]:
    with torch.inference_mode():
        heads = SimpleNamespace(**{**vars(options), "kv_heads": kv_heads})
        batch = Batch(heads, requests, prefix, context)
        for way in WAYS[1:]:
            torch.testing.assert_close(batch(way), batch("plain"), atol=1e-5, rtol=1e-4)
        variants = {way: functools.partial(_seconds, functools.partial(batch, way)) for way in WAYS}
        samples = interleaved(variants, 5 if options.quick else 15, random.Random(options.seed))
    seconds = {name: statistics.median(found) for name, found in samples.items()}
    group = options.heads // kv_heads
    counted = (prefix + context + group) / (prefix / requests + context + 3.5 * group)
    row = 2 * kv_heads * options.head_dim * 4
    products = requests * (prefix + context) * 4 * options.heads * options.head_dim / flops
    apart, together = ((rows + requests * context) * row for rows in (requests * prefix, prefix))
    roofline = max(apart / _bandwidth(apart), products) / max(together / _bandwidth(together), products)
    theory = min(counted, roofline)
    gain = seconds["plain"] / seconds["relay"]
    return {
        "kv_heads": kv_heads,
        "batch": requests,
        "context": context,
        "prefix": prefix,
        "seconds": seconds,
        "gain": gain,
        "counted": counted,
        "roofline": roofline,
        "theory": theory,
        "of_theory": gain / theory,
        "spread": {name: spread(found) for name, found in samples.items()},
    }


def _seconds(call: Any) -> float:
    began = time.perf_counter()
    call()
    return time.perf_counter() - began


@functools.cache
def _bandwidth(size: int) -> float:
    """Bytes/s of reading so many bytes again and again, from wherever they are then."""
    data = torch.ones(min(size, 2**28) // 4)
    data.sum()
    return data.numel() * 4 / min(_seconds(data.sum) for _ in range(5))


def _flops() -> float:
    """Arithmetic per second of a matrix product of attention's shape."""
    a, b = torch.ones(512, 64), torch.ones(64, 2048)
    call = functools.partial(torch.mm, a, b)
    call()
    return 2 * 512 * 64 * 2048 / min(_seconds(call) for _ in range(20))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
