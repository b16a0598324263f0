"""Where each millisecond goes: of a decode step, of a prefill, and of a turn whose history is reused, against the bound.

The engine's own functions are timed on its thread, each without what it calls in turn that has a row of its own. The bound
is what the step must read, by the bandwidth that this machine reaches when it reads, and what it must compute, by the speed
of its matrix product; each the larger of the two.
"""

from __future__ import annotations

import contextlib
import functools
import random
import statistics
import tempfile
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from afterglow.bench.report import arguments, finish, show, spread
from afterglow.bench.timed_requests import greedy, running, words
from afterglow.config import CacheConfig, EngineConfig
from afterglow.engine import token_outputs
from afterglow.engine.cached_attention import CachedAttend, RelayAttend
from afterglow.engine.engine import Engine
from afterglow.engine.gather import Gatherer
from afterglow.engine.loop import EngineLoop
from afterglow.engine.runner import TorchRunner
from afterglow.engine.tee import Tee
from afterglow.kernels import decode
from afterglow.kernels.block import Block
from afterglow.model.decoder import Attention, Decoder, Norm
from afterglow.model.experts import Mlp
from afterglow.model.keeping import Keeping
from afterglow.model.linear import BytePanelLinear, Int8Linear, PackedLinear, PanelLinear, PlainLinear
from afterglow.model.presets import PRESETS
from afterglow.plan.scheduler import Scheduler

REST = "the rest: Python, batch tensors, hand-over"
PARTS: list[tuple[Any, str, str]] = [
    (PlainLinear, "__call__", "weights' products"),
    (PackedLinear, "__call__", "weights' products"),
    (PanelLinear, "__call__", "weights' products"),
    (BytePanelLinear, "__call__", "weights' products"),
    (Int8Linear, "__call__", "weights' products"),
    (Block, "__call__", "after attention: products, norms, activations"),
    (CachedAttend, "_attention", "attention"),
    (decode.Reads, "attend", "attention"),
    (CachedAttend, "_append", "new rows into contexts"),
    (decode.Appends, "write", "new rows into contexts"),
    (Norm, "__call__", "norms"),
    (Mlp, "__call__", "activations"),
    (Attention, "rotate_both", "rotary embedding"),
    (Tee, "layer", "rows handed to the saver"),
    (Gatherer, "begin", "cached rows: waiting, rotating, copying"),
    (Gatherer, "layer", "cached rows: waiting, rotating, copying"),
    (Gatherer, "end", "cached rows: waiting, rotating, copying"),
    (token_outputs, "sample", "sampling"),
    (Scheduler, "schedule", "planning"),
    (Scheduler, "commit", "planning"),
    (Scheduler, "complete", "planning"),
    (Decoder, "forward", "residuals, embeddings"),
    (TorchRunner, "run", REST),
    (EngineLoop, "_execute", REST),
]
READ_BYTES = 256 << 20


@dataclass
class Stopwatch:
    """Seconds by label, on one thread."""

    seconds: dict[str, float] = field(default_factory=lambda: defaultdict(float))
    running: bool = False
    _stack: list[float] = field(default_factory=list)  # seconds of nested calls, by depth

    def timed(self, label: str, call: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(call)
        def measured(*args: Any, **kwargs: Any) -> Any:
            if not self.running or threading.current_thread() is threading.main_thread():
                return call(*args, **kwargs)
            self._stack.append(0.0)
            began = time.perf_counter()
            try:
                return call(*args, **kwargs)
            finally:
                took = time.perf_counter() - began
                self.seconds[label] += took - self._stack.pop()
                if self._stack:
                    self._stack[-1] += took

        return measured

    @contextlib.contextmanager
    def in_place(self) -> Iterator[None]:
        """While this lasts, the engine's functions are timed. Steps take their layers one by one, since nothing of a step in one call
        could be told apart."""
        before = [(owner, name, getattr(owner, name)) for owner, name, _ in PARTS]
        before.append((RelayAttend, "go_through", RelayAttend.go_through))
        RelayAttend.go_through = CachedAttend.go_through  # type: ignore[method-assign]
        for owner, name, label in PARTS:
            setattr(owner, name, self.timed(label, getattr(owner, name)))
        try:
            yield
        finally:
            for owner, name, call in before:
                setattr(owner, name, call)


@dataclass(frozen=True)
class MachineRoof:
    """What this machine reaches: bytes per second of reading, operations per second of the model's own products."""

    bandwidth: float
    flops: float

    @classmethod
    def measured(cls) -> MachineRoof:
        data, x = torch.ones(READ_BYTES // 4), torch.ones(512, 2048)
        kept = Keeping(torch.float32, torch.device("cpu"))
        large, matrix = kept(data.view(-1, 2048), None), kept(torch.ones(2048, 2048), None)
        reading = min(_seconds(call) for _ in range(7) for call in (data.sum, lambda: large(x[:1])))
        product = min(_seconds(lambda: matrix(x)) for _ in range(7))
        return cls(READ_BYTES / reading, 2 * 512 * 2048 * 2048 / product)

    def better(self, other: MachineRoof) -> MachineRoof:
        """What it reached at any time: others may share its memory."""
        return MachineRoof(max(self.bandwidth, other.bandwidth), max(self.flops, other.flops))

    def bound(self, read: float, computed: float) -> float:
        """Milliseconds."""
        return max(read / self.bandwidth, computed / self.flops) * 1e3


def _seconds(call: Callable[[], object]) -> float:
    began = time.perf_counter()
    call()
    return time.perf_counter() - began


def main(args: Sequence[str]) -> int:
    """`afterglow bench profile`."""
    parser = arguments("afterglow bench profile", __doc__ or "")
    parser.add_argument("--model", default="bench-100m", choices=sorted(PRESETS), help="preset (default bench-100m)")
    parser.add_argument("--quantization", default="none", choices=("none", "int8"), help="of the weights")
    options = parser.parse_args(args)
    repeats = 5 if options.quick else 15
    window = min(4096, PRESETS[options.model].max_positions)
    watch = Stopwatch()
    with tempfile.TemporaryDirectory(prefix="afterglow-bench-") as folder, watch.in_place():
        config = EngineConfig(
            cache=CacheConfig(cache_dir=Path(folder), source="load", warm_start=False),
            max_model_len=window,
            threads=options.threads,
            quantization=options.quantization,
            speculate="off",
        )
        with running(options.model, config) as engine:
            profile = Profile(engine, watch, random.Random(options.seed), PRESETS[options.model], options.quantization)
            rows = [
                profile.decode(1, min(1024, window // 2), repeats),
                profile.decode(8, min(256, window // 8), repeats),
                profile.prefill(min(1024, window // 2), repeats),
                profile.reused(min(2048, window - 128), 64, repeats),
            ]
        profile.machine = profile.machine.better(MachineRoof.measured())
    for row in rows:
        row["bound_ms"] = round(profile.machine.bound(row.pop("read"), row.pop("operations")), 4)
        show(
            f"{row['name']}, {options.model}, ms (median of {repeats}, spread {100 * row['spread']:.0f} %)",
            ("", "ms", "share"),
            [(name, ms, f"{100 * ms / row['ms']:.0f} %") for name, ms in row["parts"].items()]
            + [
                ("all", row["ms"], ""),
                (f"bound: {row['bound_of']}", row["bound_ms"], f"{100 * row['bound_ms'] / row['ms']:.0f} %"),
            ],
        )
    finish(options, rows, [], model=options.model, machine=vars(profile.machine))
    return 0


class Profile:
    """The measurements, on one engine."""

    def __init__(self, engine: Engine, watch: Stopwatch, rng: random.Random, spec: Any, quantization: str) -> None:
        self._engine, self._watch, self._rng, self._spec = engine, watch, rng, spec
        self.machine = MachineRoof.measured()
        per_layer = (
            spec.hidden * (spec.heads + 2 * spec.kv_heads) * spec.head_dim + spec.heads * spec.head_dim * spec.hidden
        )
        per_layer += (3 if spec.gated_mlp else 2) * spec.hidden * spec.ffn
        self._layers, self._head = per_layer * spec.layers, spec.hidden * spec.vocab
        self._weight_bytes = 1 if quantization == "int8" else 4
        self._row_bytes = spec.layers * 2 * spec.kv_heads * spec.head_dim * 4

    def decode(self, batch: int, prompt: int, repeats: int) -> dict[str, Any]:
        """A step of decoding: the difference of 33 and of 1 generated tokens, per token."""
        steps = 32
        found = []
        for _ in range(repeats + 1):
            short, long = (
                self._ask([words(self._rng, self._engine, prompt) for _ in range(batch)], n) for n in (1, steps + 1)
            )
            found.append({k: (long[k] - short[k]) / steps for k in long})
        read = (self._layers + self._head) * self._weight_bytes + batch * (prompt + steps / 2) * self._row_bytes
        return self._row(
            f"decode step, batch {batch} behind {prompt} tokens", found, read, 0, "weights and KV read once"
        )

    def prefill(self, prompt: int, repeats: int) -> dict[str, Any]:
        """Measure the prefill of a prompt that is not cached."""
        found = [self._ask([words(self._rng, self._engine, prompt)], 1) for _ in range(repeats + 1)]
        return self._row(f"prefill of {prompt} tokens", found, 0, self._operations(prompt, prompt / 2), "operations")

    def reused(self, history: int, new: int, repeats: int) -> dict[str, Any]:
        """A turn whose history lies in host memory."""
        past, found = words(self._rng, self._engine, history + 1), []
        for _ in range(repeats + 1):
            self._ask([past], 1, reuse=True)
            self._engine.settle()
            self._engine.demote("host")
            found.append(self._ask([past + words(self._rng, self._engine, new - 1)], 1, reuse=True))
            self._engine.settle()
        name = f"turn of {new} tokens, {history} of history in host memory"
        read = (self._layers + self._head) * self._weight_bytes + 3 * history * self._row_bytes
        operations = self._operations(new, history + new / 2)
        return self._row(name, found, read, operations, "operations; or weights read, history copied and read")

    def _operations(self, tokens: int, seen: float) -> float:
        attention: float = 4 * self._spec.layers * self._spec.heads * self._spec.head_dim * tokens * seen
        return float(2 * self._layers * tokens + 2 * self._head + attention)

    def _ask(self, prompts: list[list[int]], new: int, reuse: bool = False) -> dict[str, float]:
        """Milliseconds by label, and those of steps as a whole."""
        requests = [greedy(p, new, reuse=reuse) for p in prompts]
        self._watch.seconds.clear()
        self._watch.running = True
        self._engine.generate(requests)
        self._engine.settle()
        self._watch.running = False
        return {label: self._watch.seconds[label] * 1e3 for _, _, label in PARTS}

    def _row(
        self, name: str, found: list[dict[str, float]], read: float, operations: float, bound_of: str
    ) -> dict[str, Any]:
        kept = found[1:]  # the first one warms memory and caches
        totals = [sum(ms.values()) for ms in kept]
        parts = {label: statistics.median(ms[label] for ms in kept) for label in kept[0]}
        parts = {label: round(ms, 4) for label, ms in sorted(parts.items(), key=lambda p: -p[1]) if ms >= 0.001}
        return {
            "name": name,
            "ms": round(statistics.median(totals), 4),
            "spread": round(spread(totals), 4),
            "parts": parts,
            "read": read,
            "operations": operations,
            "bound_of": bound_of,
        }
