"""The decode attention operator: Figures 1 and 5 of RelayAttention, on this machine.

One layer's attention of a batch of single queries, each over a shared prefix and a context of its own, in three ways: every
request has a copy of the prefix ("plain"), the prefix is stored once and read by each ("shared"), or is read once for all,
stacked, and merged ("relay": the engine's own kernels). `theory` is the smaller of the paper's count of reads (spec R5, for
keys and values and grouped heads) and what this machine's arithmetic allows for stacked queries.

    python benchmarks/relay_operator.py [--quick] [--json FILE]
"""

from __future__ import annotations

import functools
import statistics
import sys
import time
from typing import Any

import torch
from torch import Tensor

from afterglow.bench.report import arguments, finish, goal, interleaved, show, spread
from afterglow.kernels.attention import attend, merge

SCALE = 0.125


class Batch:
    """Queries, prefixes and contexts of `requests` requests; heads first, as the engine has them."""

    def __init__(self, options: Any, requests: int, prefix: int, context: int) -> None:
        generator = torch.Generator().manual_seed(options.seed)
        kv, d = options.kv_heads, options.head_dim
        self.q = torch.randn(requests, options.heads, d, generator=generator)
        self.prefix = self._rows(generator, kv, prefix, d)
        self.contexts = [self._rows(generator, kv, context, d) for _ in range(requests)]
        self.copies = [
            tuple(
                torch.cat((p.transpose(0, 1), c.transpose(0, 1)), 1).transpose(0, 1)
                for p, c in zip(self.prefix, own, strict=True)
            )
            for own in self.contexts
        ]

    @staticmethod
    def _rows(generator: torch.Generator, kv: int, rows: int, d: int) -> tuple[Tensor, Tensor]:
        keys, values = (torch.randn(kv, rows, d, generator=generator).transpose(0, 1) for _ in range(2))
        return keys, values

    def plain(self) -> Tensor:
        """Each request over its own copy of everything."""
        out = torch.empty_like(self.q)
        for i, (keys, values) in enumerate(self.copies):
            out[i : i + 1] = attend(self.q[i : i + 1], keys, values, scale=SCALE, causal=True)[0]
        return out

    def shared(self) -> Tensor:
        """The prefix stored once, and read by each request."""
        out = torch.empty_like(self.q)
        for i, (keys, values) in enumerate(self.contexts):
            q = self.q[i : i + 1]
            own = attend(q, keys, values, scale=SCALE, causal=True)
            out[i : i + 1] = merge((own, attend(q, *self.prefix, scale=SCALE, causal=False)))[0]
        return out

    def relay(self) -> Tensor:
        """The prefix read once, all queries stacked."""
        out = torch.empty_like(self.q)
        lse = torch.empty(self.q.shape[:2], dtype=torch.float32)
        for i, (keys, values) in enumerate(self.contexts):
            out[i : i + 1], lse[i : i + 1] = attend(self.q[i : i + 1], keys, values, scale=SCALE, causal=True)
        together = attend(self.q, *self.prefix, scale=SCALE, causal=False)
        return merge(((out, lse), together))[0]


def main(args: list[str]) -> int:
    parser = arguments("relay_operator", __doc__ or "")
    parser.add_argument("--heads", type=int, default=12, help="query heads (default 12)")
    parser.add_argument("--kv-heads", type=int, default=12, help="key/value heads (default 12)")
    parser.add_argument("--head-dim", type=int, default=64, help="size of a head (default 64)")
    options = parser.parse_args(args)
    if options.threads:
        torch.set_num_threads(options.threads)
    prefixes = [64, 512, 2048] if options.quick else [64, 256, 512, 1024, 2048, 4096, 8192, 16384]
    points = [(32, 128, prefix) for prefix in prefixes]
    if not options.quick:
        points += [(requests, 128, 2048) for requests in (1, 2, 4, 8, 16, 64, 128)]
        points += [(32, context, 2048) for context in (256, 512)]
    bandwidth, flops = _bandwidth(), _flops()
    rows = [_point(options, *point, bandwidth, flops) for point in points]
    show(
        f"decode attention of one layer, {options.heads} heads ({options.kv_heads} KV) of {options.head_dim}, float32, "
        f"{torch.get_num_threads()} threads, us (medians); {bandwidth / 1e9:.1f} GB/s, {flops / 1e9:.0f} GFLOP/s",
        ("batch", "context", "prefix", "plain", "shared", "relay", "plain / relay", "theory", "of theory", "spread"),
        [
            (
                r["batch"],
                r["context"],
                r["prefix"],
                *(f"{1e6 * r['seconds'][v]:.0f}" for v in ("plain", "shared", "relay")),
                r["gain"],
                r["theory"],
                f"{100 * r['of_theory']:.0f} %",
                f"{100 * max(r['spread'].values()):.0f} %",
            )
            for r in rows
        ],
    )
    wanted = next(r for r in rows if (r["batch"], r["context"], r["prefix"]) == (32, 128, 2048))
    goals = [
        goal(
            "gain at prefix 2048, batch 32, of theory",
            wanted["of_theory"],
            0.6,
            least=True,
            tolerance=max(wanted["spread"].values()),
        )
    ]
    finish(options.json, options.seed, rows, goals, bandwidth=bandwidth, flops=flops)
    return 0


def _point(options: Any, requests: int, context: int, prefix: int, bandwidth: float, flops: float) -> dict[str, Any]:
    with torch.inference_mode():
        batch = Batch(options, requests, prefix, context)
        torch.testing.assert_close(batch.relay(), batch.plain(), atol=1e-5, rtol=1e-4)
        variants = {name: functools.partial(_seconds, getattr(batch, name)) for name in ("plain", "shared", "relay")}
        samples = interleaved(variants, 5 if options.quick else 15)
    seconds = {name: statistics.median(found) for name, found in samples.items()}
    group = options.heads // options.kv_heads
    counted = (prefix + context + group) / (prefix / requests + context + 3.5 * group)  # spec R5
    row = 2 * options.kv_heads * options.head_dim * 4
    product = 4 * options.heads * options.head_dim
    reading = (prefix + requests * context) * row / bandwidth
    computing = requests * (prefix + context) * product / flops
    plain = requests * (prefix + context) * max(row / bandwidth, product / flops)
    theory = min(counted, plain / max(reading, computing))
    gain = seconds["plain"] / seconds["relay"]
    return {
        "batch": requests,
        "context": context,
        "prefix": prefix,
        "seconds": seconds,
        "gain": gain,
        "counted": counted,
        "theory": theory,
        "of_theory": gain / theory,
        "spread": {name: spread(found) for name, found in samples.items()},
    }


def _seconds(call: Any) -> float:
    began = time.perf_counter()
    call()
    return time.perf_counter() - began


def _bandwidth() -> float:
    """Bytes/s of reading memory that no cache holds."""
    data = torch.ones(2**26)
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
