"""Which conversations stay in host memory: Figure 21 of CachedAttention, small, on the real engine.

More conversations than the tiers hold take turns, first with a backlog (every conversation has its next turn in the queue),
then one request at a time. Look-ahead placement against LRU, FIFO and LFU: the share of all turns' history that was
cached, and where. As in the paper, computing a turn takes longer than reading its history, so that what is prefetched is there in time;
with the bundled model of 2.6 M parameters, whose turns take a few milliseconds, it is not always. The journals of the runs are kept, for
the simulator.

    python -m benchmarks.papers.cachedattention.placement [--quick] [--json FILE] [--journals FOLDER]
"""

from __future__ import annotations

import random
import sys
from pathlib import Path
from typing import Any

from afterglow.bench.report import arguments, finish, goal, show, spread
from afterglow.bench.timed_requests import Turn, ask, asked, words
from afterglow.engine.engine import Engine
from benchmarks.common.engines import engine_of

MODEL = "bench-56m"
POLICIES = ("lookahead", "lru", "fifo", "lfu")
TURN, REPLY = 60, 4  # tokens
TURNS = 5
HOST_CONVERSATIONS, DISK_CONVERSATIONS = 6, 18


def main(args: list[str]) -> int:
    parser = arguments("python -m benchmarks.papers.cachedattention.placement", __doc__ or "")
    parser.add_argument("--journals", type=Path, metavar="FOLDER", help="keep the journals of the runs there")
    options = parser.parse_args(args)
    conversations = 36 if options.quick else 60
    if options.journals is not None:
        options.journals.mkdir(parents=True, exist_ok=True)
    rows = [_run(policy, backlog, conversations, options) for backlog in (True, False) for policy in POLICIES]
    show(
        f"{conversations} conversations of {TURNS} turns, room for {HOST_CONVERSATIONS} in host and {DISK_CONVERSATIONS}"
        " on disk: share of history that was cached",
        ("", "policy", "cached", "from host", "from disk", "mean queue", "prefetches: useful", "late", "wasted"),
        [
            (
                "backlog" if r["backlog"] else "one at a time",
                r["policy"],
                f"{100 * r['hit_rate']:.1f} %",
                f"{100 * r['host_share']:.1f} %",
                f"{100 * (1 - r['host_share']):.1f} %",
                f"{r['mean_queue']:.0f}",
                r["prefetches_useful"],
                r["prefetches_late"],
                r["prefetches_wasted"],
            )
            for r in rows
        ],
    )
    again = {backlog: _run("lookahead", backlog, conversations, options) for backlog in (True, False)}
    by = {(r["backlog"], r["policy"]): r for r in rows}
    points = {b: 100 * abs(again[b]["hit_rate"] - by[b, "lookahead"]["hit_rate"]) for b in again}
    rows += [each | {"policy": "lookahead, again"} for each in again.values()]
    goals = [
        goal(
            f"backlog: hit rate, look-ahead - {other}, points",
            100 * (by[True, "lookahead"]["hit_rate"] - by[True, other]["hit_rate"]),
            1,
            least=True,
            spread=points[True],  # the goal is one point
        )
        for other in ("lru", "fifo")
    ]
    share, other = by[True, "lookahead"]["host_share"], again[True]["host_share"]
    goals.append(goal("backlog: look-ahead's hits from host", share, 0.99, least=True, spread=spread([share, other])))
    apart = 100 * abs(by[False, "lookahead"]["hit_rate"] - by[False, "lru"]["hit_rate"])
    goals.append(goal("one at a time: look-ahead and LRU apart, points", apart, 1, least=False, spread=points[False]))
    finish(options, rows, goals)
    return 0


def _run(policy: str, backlog: bool, conversations: int, options: Any) -> dict[str, Any]:
    rng = random.Random(options.seed)
    longest = TURNS * (TURN + REPLY)
    name = f"{policy}-{'backlog' if backlog else 'single'}.jsonl"
    journal = options.journals / name if options.journals is not None else None
    cache = {"policy": policy, "source": "load", "device_cache": _room(2 * longest), "disk_cache": 1}
    with engine_of(MODEL, threads=options.threads, cache={**cache, "disk_cache": 0}) as probe:
        block = probe.stats().tiers.host.capacity // probe.capacity.host_slots
        size = probe.capacity.file_size(longest)
    blocks = -(-longest // 64) + 1  # short turns are merged: of a conversation one block is not full
    cache["host_cache"] = HOST_CONVERSATIONS * blocks * block
    cache["disk_cache"] = DISK_CONVERSATIONS * size + 2**23
    with engine_of(MODEL, threads=options.threads, cache=cache, max_batch=2, journal=journal) as engine:
        return {"policy": policy, "backlog": backlog, **_talk(engine, rng, conversations, backlog)}


def _room(rows: int) -> int:
    """Bytes of a device cache for so many rows."""
    with engine_of(MODEL, cache={"disk_cache": 0}) as engine:
        stats = engine.stats()
        return max(rows, 256) * stats.tiers.device.capacity // engine.capacity.device_rows


def _talk(engine: Engine, rng: random.Random, conversations: int, backlog: bool) -> dict[str, Any]:
    """All turns of all conversations; with a backlog each asks again as soon as it is answered."""
    texts = [words(rng, engine, TURN) for _ in range(conversations)]
    history = host = disk = device = 0
    queues: list[int] = []

    def count(turn: Turn, number: int, round_: int) -> None:
        nonlocal history, host, disk, device
        if round_ > 0:
            history += len(texts[number]) - TURN - 1  # the last token of a reply has no KV yet
            host += turn.cached.host
            disk += turn.cached.disk
            device += turn.cached.device
        texts[number] += turn.tokens + words(rng, engine, TURN)

    if backlog:
        waiting = [ask(engine, text, REPLY) for text in texts]
        for round_ in range(TURNS):
            later: list[Turn] = []
            for number, turn in enumerate(waiting):
                turn.ended.wait()
                plan = engine.stats().plan
                queues.append(plan.waiting + plan.loading)
                count(turn, number, round_)
                if round_ + 1 < TURNS:
                    later.append(ask(engine, texts[number], REPLY))
            waiting = later
    else:
        order = [number for number in range(conversations) for _ in range(TURNS)]
        rng.shuffle(order)
        rounds = [0] * conversations
        for number in order:
            count(asked(engine, texts[number], REPLY), number, rounds[number])
            rounds[number] += 1
            engine.settle()
    counters = engine.stats().plan.counters
    cached = device + host + disk
    return {
        "hit_rate": round(cached / history, 4),
        "host_share": round((host + device) / cached, 4) if cached else 0.0,
        "mean_queue": round(sum(queues) / len(queues), 1) if queues else 0.0,
        "prefetches_useful": counters.prefetches_useful,
        "prefetches_late": counters.prefetches_late,
        "prefetches_wasted": counters.prefetches_wasted,
    }


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
