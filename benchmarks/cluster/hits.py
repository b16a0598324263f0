"""Hit shares of a cluster, measured and simulated: the same turns, the same routes, the plan's own code in both.

Turns are asked one after another in the order of the trace, and each has been stored and published before the next. Moves of an engine end
before its next step, here and in the simulator. So what is found depends on sizes and on that order, not on how fast this machine is, and is the
same in every run. Engines that are left alone choose by what has ended: what they find differs from run to run, and is told besides.
"""

from __future__ import annotations

import contextlib
import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import inf
from pathlib import Path
from tempfile import mkdtemp
from typing import Any
from unittest.mock import patch

from afterglow.bench.timed_requests import words
from afterglow.engine.engine import Engine
from afterglow.model.presets import PRESETS
from afterglow.plan.options import Capacity, SchedulerOptions
from afterglow.plan.scheduler import Scheduler
from afterglow.sim.cluster.engines import Cluster, Network
from afterglow.sim.cluster.routers import router
from afterglow.sim.engine_setup import Setup
from afterglow.sim.executor import Machine
from afterglow.sim.machine.catalogue import hardware
from afterglow.sim.machine.shape import ModelShape
from afterglow.sim.scenario_options import RouterName
from afterglow.sim.simulator import summary
from afterglow.sim.workload.turns import Conversation, StreamSegment, TraceTurn, Workload
from benchmarks.cluster.replicas import in_step, replicas, turn

MODEL = "tiny"
LONGEST = 1024
DEVICE = 1280  # rows of each replica
# Rows of each replica's host memory and disk, and of the store for each row of all disks: replicas cut and merge extents each for itself,
# so that the store has many rows twice.
SIZES = {"roomy": (4096, 6144, 2), "tight": (3072, 3072, 1)}
RUNS = 3  # of the engines with a store, left alone
AT_ONCE = inf  # bytes/s
GAP_S = 5.0  # simulated seconds between turns, so that each is over before the next
THINK = 30.0  # turns of others between two of a conversation, in the mean


@dataclass(frozen=True)
class Arm:
    """One way to serve the trace. `shared`: with a store that has room for as much as all disks."""

    name: str
    engines: int
    routing: RouterName
    shared: bool = False


@dataclass(frozen=True)
class Said:
    """A turn: its conversation, the tokens that are new, and those of the reply."""

    talk: int
    index: int
    new: int
    reply: int


def arms(count: int) -> list[Arm]:
    """One engine with the memory of all, and so many engines: routed by session, at random with a shared store, and without one."""
    return [
        Arm("one engine", 1, "conversation"),
        Arm("by session", count, "conversation"),
        Arm("at random, shared", count, "random", shared=True),
        Arm("at random", count, "random"),
    ]


def trace(talks: int, seed: int) -> list[Said]:
    """The turns of conversations, in the order in which they come."""
    rng = random.Random(seed)
    found: list[tuple[float, Said]] = []
    for talk in range(talks):
        at, length = rng.uniform(0, 5.0 * talks), 0
        for index in range(1 + min(7, int(rng.expovariate(1 / 4)))):
            new, reply = int(rng.lognormvariate(4.2, 0.6)) + 8, rng.randrange(8, 24)
            length += new + reply
            if length > LONGEST:
                break
            found.append((at, Said(talk, index, new, reply)))
            at += rng.expovariate(1 / THINK)
    return [said for _, said in sorted(found, key=lambda each: each[0])]


def measured(
    arm: Arm, said: Sequence[Said], count: int, size: str, folder: Path, seed: int, alone: bool = False
) -> tuple[float, Capacity]:
    """The hit share of real engines, and the capacity of one of them. `alone`: their moves end when they end."""
    row, scale = PRESETS[MODEL].kv_bytes_per_token("float32"), count // arm.engines
    host, disk, store = SIZES[size]
    cache: dict[str, Any] = {
        "device_cache": DEVICE * scale * row,
        "host_cache": host * scale * row,
        "disk_cache": disk * scale * row,
        "source": "load",
    }
    if arm.shared:
        cache["shared_cache"] = store * disk * count * row
    rng, route = random.Random(seed), router(arm.routing, seed)
    texts: dict[int, list[int]] = {}
    hits = history = 0
    # Uses of shared extents count every ten minutes; here turns come a hundred times as fast as from people, and each counts.
    with (
        contextlib.nullcontext() if alone else in_step(),
        patch("afterglow.plan.retention.shared_room.REFRESH_S", -1.0),
        replicas(
            arm.engines,
            MODEL,
            Path(mkdtemp(dir=folder)) if arm.shared else None,
            cache,
            threads=1,
            max_model_len=LONGEST + 64,
        ) as engines,
    ):
        for each, told in zip(said, _turns(said), strict=True):
            engine: Engine = engines[route.choose(told, [0] * arm.engines)]
            before = len(texts.get(each.talk, ()))
            new = words(rng, engine, each.new)
            if (
                not each.index
            ):  # by chance two would begin alike: of this model's few tokens, and not of the simulator's 2^32
                new[0] = each.talk
            text = [*texts.get(each.talk, ()), *new]
            done = turn(engine, text, each.reply)
            texts[each.talk] = text + done.tokens
            hits, history = hits + min(before, done.cached.total), history + before
        for engine in engines:
            if (
                not alone
                and (shared := engine.parts.store.shared) is not None
                and (failures := shared.stats().failures)
            ):
                raise RuntimeError(f"the store has failed, so that shares are not those of another run: {failures}")
        return hits / history, engines[0].capacity


class _AsEngines(Setup):
    """Simulated engines with the tiers of real ones."""

    def scheduler(self) -> Scheduler:
        return Scheduler(self.more["capacity"], self.more["options"])

    def machine(self) -> Machine:
        """Moves end before the next step, as those of the engines that are measured do."""
        fast: dict[str, Any] = dict.fromkeys(("host_link", "disk_read", "disk_write", "host_copy"), AT_ONCE)
        return replace(super().machine(), disk_latency=0.0, **fast)


def simulated(arm: Arm, said: Sequence[Said], count: int, size: str, capacity: Capacity, seed: int) -> float:
    """The hit share of simulated engines of that capacity."""
    spec = PRESETS[MODEL]
    shape = ModelShape(
        name=MODEL, layers=spec.layers, hidden=spec.hidden, heads=spec.heads, kv_heads=spec.kv_heads,
        head_dim=spec.head_dim, ffn=spec.ffn, vocab=spec.vocab, window=LONGEST + 64,
    )  # fmt: skip
    options = SchedulerOptions(
        policy="lookahead", prefill_chunk=512, max_model_len=LONGEST + 64, source="load", digest="simulated",
        write_policy="write_through" if arm.shared else "write_back", shared=arm.shared,
    )  # fmt: skip
    row = spec.kv_bytes_per_token("float32")
    setup = _AsEngines(
        model=shape, hardware=hardware("CPU-2"), dtype="float32", device_rows=capacity.device_rows,
        more={"capacity": capacity, "options": options},
    )  # fmt: skip
    _, disk, store = SIZES[size]
    network = Network(AT_ONCE, store * disk * count * row if arm.shared else 0)
    workload = Workload(_conversations(said), pace="open")
    with in_step(), patch("afterglow.plan.retention.shared_room.REFRESH_S", -1.0):  # as where it is measured
        values = summary(Cluster(setup, workload, arm.engines, arm.routing, network, seed).run())
    return float(values["hit_rate"])


def _turns(said: Sequence[Said]) -> list[TraceTurn]:
    """The trace as the simulator has it."""
    lengths: dict[int, int] = {}
    found = []
    for number, each in enumerate(said):
        stream, before = f"talk {each.talk}", lengths.get(each.talk, 0)
        found.append(
            TraceTurn(
                session=stream,
                index=each.index,
                prompt=(StreamSegment(stream, 0, before + each.new),),
                reply=(StreamSegment(stream, before + each.new, each.reply),),
                new_tokens=each.new,
                arrival=GAP_S * number,
                think=0.0,
            )
        )
        lengths[each.talk] = before + each.new + each.reply
    return found


def _conversations(said: Sequence[Said]) -> list[Conversation]:
    found: dict[str, list[TraceTurn]] = {}
    for each in _turns(said):
        found.setdefault(each.session, []).append(each)
    return [Conversation(name, turns[0].arrival or 0.0, turns) for name, turns in found.items()]


def rows(count: int, talks: int, size: str, folder: Path, seed: int) -> list[dict[str, Any]]:
    """One row for each arm."""
    said = trace(talks, seed)
    found = []
    for arm in arms(count):
        real, capacity = measured(arm, said, count, size, folder, seed)
        found.append(
            {
                "what": "hits",
                "memory": size,
                "arm": arm.name,
                "engines": arm.engines,
                "turns": len(said),
                "measured": real,
                "alone": [
                    measured(arm, said, count, size, folder, seed, alone=True)[0]
                    for _ in range(RUNS if arm.shared else 0)
                ],
                "simulated": simulated(arm, said, count, size, capacity, seed),
            }
        )
    return found
