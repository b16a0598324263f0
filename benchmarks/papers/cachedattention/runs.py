"""One simulated run of the papers' workload: a case, the figures that are taken from it, and runs that are kept.

Every figure of the serving evaluation is made of the same few runs, so that each is simulated once.
"""

from __future__ import annotations

import time
from array import array
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass, field, fields, replace
from typing import Any

from afterglow.choices import PolicyName
from afterglow.plan.prefix.truncation import SINK_TOKENS
from afterglow.sim.engine_setup import Mode, Setup
from afterglow.sim.machine.catalogue import hardware, model
from afterglow.sim.machine.timing import Roofline
from afterglow.sim.simulator import Outcome, Simulation, summary
from afterglow.sim.workload.sharegpt import ShareGPT, ThinkTime, preset
from afterglow.sim.workload.turns import Conversation, Workload

# The papers' sizes are powers of two: 2.5 MB a token of LLaMA-65B are 2.5 MiB, 2K such tokens are 5 GB, and 10 TB are
# priced as 10,240 GB. Speeds (26 GB/s, 5 GB/s) are vendors' decimal ones.
GB = 2**30
TB = 1024 * GB
PAPER_CONVERSATIONS = 9000
WARM_UP = 10_000  # turns, of the whole workload
DEVICE = "A100-80G"
MODELS = ("LLaMA-2-13B", "LLaMA-65B", "LLaMA-2-70B", "Falcon-40B")
DEVICES = {"LLaMA-2-13B": 2, "LLaMA-65B": 4, "LLaMA-2-70B": 4, "Falcon-40B": 4}

# What the papers do not say, the same for all models and figures. docs/papers.md has how much each matters.
THINK_S = 60.0
PREFILL_EFFICIENCY = 0.59  # LLaMA-65B prefills 2K tokens in 360 ms (ATC §2.4)
DECODE_EFFICIENCY = 0.55  # of the memory's bandwidth
STEP_OVERHEAD_S = 0.002

# In host and on disk a conversation takes the room of a whole window, which is how the papers count capacity (CCpS, ATC
# §4.3.6). The plan stores what there is instead; so it gets as much less disk as contexts are shorter than a window. Where
# there is no disk, host memory keeps its size. These are the rows that it finds a context to have, S_kv, by law and window.
HELD = {
    ("sharegpt-atc", 4096): 2284,
    ("sharegpt-atc", 2048): 1443,
    ("sharegpt-arxiv", 4096): 3084,
    ("sharegpt-arxiv", 2048): 1742,
}


@dataclass(frozen=True, kw_only=True)
class Case:
    """One run. `conversations` fewer than the paper's: storage, warm-up and think time shrink alike, so that as large a
    part of all waits and fits, where the run `shrinks`; but host memory keeps its size, because it has to hold the head of
    the queue, and disk gives way."""

    law: str = "sharegpt-atc"
    model: str = MODELS[0]
    mode: Mode = "reuse"
    policy: PolicyName = "lookahead"
    dram: float = 128 * GB
    disk: float = 10 * TB
    rate: float = 1.0
    think: float = THINK_S
    ttl: float | None = None
    conversations: int = PAPER_CONVERSATIONS
    prefill_efficiency: float = PREFILL_EFFICIENCY
    decode_efficiency: float = DECODE_EFFICIENCY
    overhead: float = STEP_OVERHEAD_S
    whole_windows: bool = True
    shrinks: bool = True
    seed: int = 0

    @property
    def key(self) -> str:
        """What makes it different from the default."""
        default = Case()
        found = [f"{f.name}={getattr(self, f.name)}" for f in fields(self)]
        usual = [f"{f.name}={getattr(default, f.name)}" for f in fields(self)]
        return " ".join(name for name, same in zip(found, usual, strict=True) if name != same) or "default"

    @property
    def scale(self) -> float:
        return self.conversations / PAPER_CONVERSATIONS if self.shrinks else 1.0

    @property
    def room(self) -> float:
        """Of host memory and disk together, the part that rows are kept in; not where there is no disk."""
        window = model(self.model).window
        return HELD[self.law, window] / window if self.whole_windows else 1.0

    @property
    def net_disk(self) -> float:
        """Bytes of disk for rows, so that host memory and disk together have the room that this run needs."""
        return max(0.0, (self.dram + self.disk) * self.scale * self.room - self.dram) if self.disk else 0.0

    def setup(self) -> Setup:
        """The papers' machine: nothing stays on the devices, a prefill keeps decodes waiting, 24 jobs at most, and cached
        rows are loaded, even where computing it anew were faster."""
        shape, device, devices = model(self.model), hardware(DEVICE), DEVICES[self.model]
        timing = Roofline(
            shape,
            device,
            devices,
            prefill_efficiency=self.prefill_efficiency,
            decode_efficiency=self.decode_efficiency,
            overhead=self.overhead,
        )
        return Setup(
            model=shape,
            hardware=device,
            devices=devices,
            dram=int(self.dram),
            disk=int(self.net_disk),
            policy=self.policy,
            mode=self.mode,
            ttl=self.ttl,
            retain=False,
            prefill_chunk=0,
            max_batch=24,
            source="load",
            timing=timing,
        )

    def workload(self) -> Workload:
        """Its conversations; a question takes a quarter of the window at most, a reply half the window."""
        law, window = preset(self.law), model(self.model).window
        source = ShareGPT(
            law,
            conversations=self.conversations,
            rate=self.rate,
            think=ThinkTime(self.think * self.scale),
            seed=self.seed,
            max_prompt=min(law.max_prompt, window // 4),
            max_reply=min(law.max_reply, window // 2),
        )
        return Workload(_cut_by_tokens(source))


def _cut_by_tokens(source: Iterable[Conversation]) -> Iterator[Conversation]:
    """As the papers cut: half of a window's tokens, wherever turns end."""
    for conversation in source:
        turns = (replace(turn, turns=()) for turn in conversation.turns)
        yield Conversation(conversation.name, conversation.start, turns)


Figures = dict[str, Any]


def simulate(case: Case) -> Figures:
    """The figures of a run, the warm-up left out. Rates are parts of one, times in seconds."""
    began = time.process_time()
    outcome = Simulation(
        case.setup(), case.workload(), warm_up=int(WARM_UP * case.conversations / PAPER_CONVERSATIONS)
    ).run()
    return figures(outcome) | {"cpu_seconds": round(time.process_time() - began, 1)}


def figures(outcome: Outcome) -> Figures:
    """`hit_rate`: of all turns that are counted, first turns of conversations among them; `hit_rate_later`: of turns
    with a history; `hit_rate_tokens`: of the tokens of the history. A turn that finds only the first tokens, which stay at each
    truncation, is no hit."""
    found = summary(outcome)
    turns = max(1, outcome.turns)
    hit = [d + h + k > SINK_TOKENS for d, h, k in zip(outcome.device, outcome.host, outcome.disk, strict=True)]
    later = sum(length > 0 for length in outcome.history)
    # A turn whose history lay on disk in part had to wait for the disk.
    late = sum(k > 0 for k in outcome.disk)
    service = [ttft - waited for ttft, waited in zip(outcome.ttft, outcome.waited, strict=True)]
    kept = ("turns", "refused", "prefill_throughput", "prefill_seconds", "decode_seconds", "stalled_seconds")
    return {name: found[name] for name in kept} | {
        "hit_rate": sum(hit) / turns,
        "hit_rate_later": sum(hit) / max(1, later),
        "hit_rate_tokens": found["hit_rate"],
        "first_turns": outcome.first_turns / turns,
        "disk_hits": late / turns,
        "host_hits": (sum(hit) - late) / turns,
        "host_share": 1 - late / max(1, sum(hit)),
        "ttft": sum(service) / turns,
        "ttft_p99": _quantile(service, 0.99),
        "ttft_queued": found["ttft_mean"],
        "mean_queue": found["mean_queue"],
        "device_seconds": found["device_seconds"],
        "simulated_seconds": found["simulated_seconds"],
        "events": found["events"],
        "steps": found["steps"],
    }


def _quantile(values: Sequence[float] | array[float], part: float) -> float:
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(part * len(ordered)))] if ordered else 0.0


@dataclass
class Runs:
    """Runs that are made when they are needed. `kept`: known runs, by `Case.key`; `changed` is told of new ones."""

    jobs: int = 1
    kept: dict[str, Figures] = field(default_factory=dict)
    changed: Callable[[], object] | None = None
    show: Callable[[str], object] = print

    def all(self, cases: Iterable[Case]) -> None:
        """Make those that are missing, several at once if there are several `jobs`."""
        missing = [case for case in dict.fromkeys(cases) if case.key not in self.kept]
        if self.jobs == 1 or len(missing) < 2:
            for case in missing:
                self._keep(case, simulate(case))
            return
        with ProcessPoolExecutor(self.jobs) as pool:
            for case, found in zip(missing, pool.map(simulate, missing), strict=True):
                self._keep(case, found)

    def __getitem__(self, case: Case) -> Figures:
        self.all([case])
        return self.kept[case.key]

    def _keep(self, case: Case, found: Figures) -> None:
        self.kept[case.key] = {"case": asdict(case)} | found
        self.show(
            f"  {case.key}: hits {found['hit_rate']:.1%} ({found['hit_rate_later']:.1%} of later turns), queue "
            f"{found['mean_queue']:.0f}, {found['cpu_seconds']:.0f} s"
        )
        if self.changed is not None:
            self.changed()
