"""Figures of the serving workload: 13 to 17, 21, 22, and (ATC / arXiv) 23 / 25, 24 / 26, 25.

Hit rates are of all turns after the warm-up, as the papers count in Figures 13, 21, 22 and 24: with 10,000 of 52,000 turns
left out, a tenth of the others are first turns of conversations, and nothing can hit there, which is the 90 % that models
with room for everything reach. Figure 23 (arXiv: 25) leaves them out, by its own words.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from functools import partial

from afterglow.choices import PolicyName
from afterglow.sim.machine.catalogue import model
from benchmarks.papers.cachedattention.closed import COST_DEVICES, EXACT_SAVINGS, SAVINGS, SPEEDUPS, cost_saving
from benchmarks.papers.cachedattention.runs import GB, MODELS, PAPER_CONVERSATIONS, TB, THINK_S, Case, Runs
from benchmarks.papers.cachedattention.table import Paper, Row, holds, row

LAW: dict[Paper, str] = {"ATC": "sharegpt-atc", "arXiv": "sharegpt-arxiv"}
HITS: dict[Paper, tuple[float, ...]] = {"ATC": (86, 71, 89, 90), "arXiv": (76, 56, 87, 89)}
TTFT_LESS: dict[Paper, tuple[float, ...]] = {"ATC": (85, 61, 87, 86), "arXiv": (84, 50, 88, 88)}
PREFILL: dict[Paper, tuple[float, ...]] = {"ATC": (6.8, 2.6, 7.8, 7.2), "arXiv": (6.3, 2.0, 8.1, 8.2)}
OVERFLOW_LOSS: dict[Paper, tuple[float, ...]] = {"ATC": (17.6, 41.5, 18.1, 18.4), "arXiv": (52, 56, 57, 48)}
WITH_DRAM: dict[Paper, tuple[float, ...]] = {"ATC": (3.4, 1.7, 7.7, 19.1), "arXiv": (1.9, 0.9, 4.4, 11.2)}
POLICIES: tuple[PolicyName, ...] = ("lookahead", "lru", "fifo")
AT_10T: dict[Paper, tuple[float, ...]] = {"ATC": (86, 58, 48), "arXiv": (76, 31, 48)}
AT_2T: dict[Paper, tuple[float, ...]] = {"ATC": (39.9, 12.9, 9.5), "arXiv": (26.8, 4.4, 9.3)}
HOST_SHARE: dict[Paper, float] = {"ATC": 99.6, "arXiv": 99.9}
HOST_HITS: dict[tuple[Paper, int], tuple[float, float]] = {  # of LRU and FIFO
    ("ATC", 10): (0.6, 0.5),
    ("ATC", 2): (0.5, 0.5),
    ("arXiv", 10): (0.4, 0.8),
    ("arXiv", 2): (0.2, 0.4),
}
POINTS, POLICY_POINTS = 5, 6  # of the goals
RATIOS = {0.05: None, 0.1: 51.0, 0.25: 98.0, 0.5: None}  # RCC / CCpUT: hits of later turns, %
TTL_S = 3600.0
LIGHT = 0.25  # conversations per second
CAPACITY_THINK_S = 180.0  # the printed hits lie between those of this and of THINK_S
RATES = (0.5, 1.0, 2.0)
BY_RATE = {  # sessions per second: hits %, TTFT s, K tokens/s of prefilling, hours of device time; only the ends are printed
    0.5: (82.0, 0.122, 858.0, 6.25),
    2.0: (77.0, 0.154, 681.0, 7.01),
}
HBM_CACHE = 10 * GB
EVALUATED = 42_000  # turns after the warm-up (ATC §4.2)


def paper_case(paper: Paper, base: Case) -> Case:
    """The base with the workload of a paper."""
    return replace(base, law=LAW[paper])


def model_cases(base: Case) -> list[Case]:
    return [replace(base, model=name) for name in MODELS]


def recomputing(case: Case) -> Case:
    return replace(case, mode="recompute")


def _less(before: float, after: float) -> float:
    """By how much it is less; %."""
    return 100 * (1 - after / before) if before else 0.0


def figure_13(paper: Paper, base: Case, runs: Runs) -> Iterator[Row]:
    cases = model_cases(base)
    for case, printed in zip(cases, HITS[paper], strict=True):
        found = runs[case]
        note = f"{found['hit_rate_later']:.1%} of turns with a history, {found['hit_rate_tokens']:.1%} of its tokens"
        yield row(paper, "13", f"{case.model}, hits %", printed, 100 * found["hit_rate"], within=POINTS, note=note)
    least = min(cases, key=lambda case: float(runs[case]["hit_rate"]))
    yield row(paper, "13", "LLaMA-65B has the fewest hits", "yes", 0.0) | {
        "simulated": "yes" if least.model == "LLaMA-65B" else least.model,
        "met": least.model == "LLaMA-65B",
    }


def figure_14(paper: Paper, base: Case, runs: Runs) -> Iterator[Row]:
    for case, printed in zip(model_cases(base), TTFT_LESS[paper], strict=True):
        reuse, again = runs[case], runs[recomputing(case)]
        note = f"{1e3 * again['ttft']:.0f} to {1e3 * reuse['ttft']:.0f} ms, from when a turn leaves the queue"
        yield row(paper, "14", f"{case.model}, TTFT, less %", printed, _less(again["ttft"], reuse["ttft"]), note=note)
        yield holds(paper, "14", f"{case.model}, TTFT: recompute, reuse", [again["ttft"], reuse["ttft"]])


def figure_15(paper: Paper, base: Case, runs: Runs) -> Iterator[Row]:
    for case, printed in zip(model_cases(base), PREFILL[paper], strict=True):
        speeds = [runs[each]["prefill_throughput"] for each in (case, recomputing(case))]
        note = f"{speeds[1]:,.0f} to {speeds[0]:,.0f} tokens/s"
        yield row(paper, "15", f"{case.model}, prefill, x", printed, speeds[0] / speeds[1], note=note)
        yield holds(paper, "15", f"{case.model}, prefill: reuse, recompute", speeds)


def figure_16(paper: Paper, base: Case, runs: Runs) -> Iterator[Row]:
    """All of the devices' time, as the text has it ("end-to-end GPU time to finish all inference jobs", and that decoding
    gets shorter too); and what the same runs make of the other reading, prefilling alone."""
    for case, printed in zip(model_cases(base), SPEEDUPS[paper], strict=True):
        busy = [runs[each]["device_seconds"] for each in (recomputing(case), case)]
        hours = [seconds / 3600 / case.scale for seconds in busy]
        note = f"{hours[0]:.2f} to {hours[1]:.2f} h"
        yield row(paper, "16", f"{case.model}, device time, x", printed, busy[0] / busy[1], note=note)
        yield holds(paper, "16", f"{case.model}, device time: recompute, reuse", busy)
        note = f"the other reading; Figure 15 prints x{PREFILL[paper][MODELS.index(case.model)]:g} of throughput"
        yield row(paper, "16", f"{case.model}, prefills alone, x", printed, prefill_gain(case, runs), note=note)
    if paper == "ATC":
        most = gain_of_printed_ttft()
        note = f"at most, by Figures 14 and 25: {EVALUATED:,} turns, each prefilled alone"
        yield row(
            paper, "16", "LLaMA-2-13B, from the printed TTFT, device time, x", SPEEDUPS[paper][0], most, note=note
        )


def prefill_gain(case: Case, runs: Runs) -> float:
    """How much less time prefilling takes with reuse."""
    return float(runs[recomputing(case)]["prefill_seconds"] / runs[case]["prefill_seconds"])


def gain_of_printed_ttft() -> float:
    """What the printed times to the first token leave of Figure 16's gain of 13B, if each is device time of its turn alone
    and nothing else differs: hours with recomputing over hours with reuse, midway between the printed rates."""
    ttft = (BY_RATE[0.5][1] + BY_RATE[2.0][1]) / 2
    hours = (BY_RATE[0.5][3] + BY_RATE[2.0][3]) / 2
    longer = ttft / (1 - TTFT_LESS["ATC"][0] / 100) - ttft
    return 1 + EVALUATED * longer / 3600 / hours


def figure_17(paper: Paper, base: Case, runs: Runs) -> Iterator[Row]:
    """What the simulated device times cost; the exact arithmetic of the printed ones is in `closed.figure_17`."""
    for i, case in enumerate(model_cases(base)):
        gain = runs[recomputing(case)]["device_seconds"] / runs[case]["device_seconds"]
        saving = cost_saving(COST_DEVICES[i], gain)
        note = f"simulated x{gain:.2f}; exact for the printed one: {EXACT_SAVINGS[paper][i]} %"
        what = f"{case.model}, simulated cost, less %"
        yield row(paper, "17", what, SAVINGS[paper][i], saving, note=note) | {"met": saving > 0}
        other = cost_saving(COST_DEVICES[i], prefill_gain(case, runs))
        what = f"{case.model}, of prefills alone, simulated cost, less %"
        yield row(paper, "17", what, SAVINGS[paper][i], other, note="the other reading of Figure 16")


def figure_21(paper: Paper, base: Case, runs: Runs) -> Iterator[Row]:
    for disk, printed in ((10 * TB, AT_10T[paper]), (2 * TB, AT_2T[paper])):
        size = f"128G/{disk // TB}T"
        found = [runs[replace(base, disk=disk, policy=policy)] for policy in POLICIES]
        for policy, value, figures in zip(POLICIES, printed, found, strict=True):
            within = POLICY_POINTS if disk == 10 * TB else None
            hours = figures["device_seconds"] / 3600 / base.scale
            note = f"mean queue {figures['mean_queue']:.0f}, {hours:.2f} h of device time"
            what = f"{size} {policy}, hits %"
            yield row(paper, "21", what, value, 100 * figures["hit_rate"], within=within, note=note)
            if policy == "lookahead":
                share = 100 * figures["host_share"]
                hosted = row(paper, "21", f"{size} {policy}, hits in host %", HOST_SHARE[paper], share)
                yield hosted | {"met": share > 99 if disk == 10 * TB else None}
            else:
                few = HOST_HITS[paper, disk // TB][POLICIES.index(policy) - 1]
                yield row(paper, "21", f"{size} {policy}, host hits %", few, 100 * figures["host_hits"])
        for other in (1, 2):
            rates = [found[0]["hit_rate"], found[other]["hit_rate"]]
            yield holds(paper, "21", f"{size} hits: lookahead, {POLICIES[other]}", rates)
            busy = [found[other]["device_seconds"], found[0]["device_seconds"]]
            yield holds(paper, "21", f"{size} device time: {POLICIES[other]}, lookahead", busy)


def figure_22(paper: Paper, base: Case, runs: Runs) -> Iterator[Row]:
    losses: dict[str, float] = {}
    for case, printed in zip(model_cases(base), OVERFLOW_LOSS[paper], strict=True):
        kept, lost = runs[case], runs[replace(case, mode="overflow")]
        losses[case.model] = 100 * (kept["hit_rate"] - lost["hit_rate"])
        note = f"{kept['hit_rate']:.1%} to {lost['hit_rate']:.1%}"
        yield row(paper, "22", f"{case.model}, hits lost %", printed, losses[case.model], note=note)
        yield holds(paper, "22", f"{case.model}, hits: CA, OF", [kept["hit_rate"], lost["hit_rate"]])
        yield holds(paper, "22", f"{case.model}, device time: OF, CA", [lost["device_seconds"], kept["device_seconds"]])


def ccput(case: Case) -> float:
    """CCpUT in bytes: DSpUT, taken as the conversations that begin in an hour, times a whole window's keys and values."""
    shape = model(case.model)
    return case.rate * TTL_S * shape.window * shape.kv_bytes_per_token()


def capacity_cases(base: Case) -> dict[tuple[float, float], Case]:
    """By think time and ratio of RCC to CCpUT, in host and on disk together. Conversations come so slowly that none waits,
    because the figure is about conversations, and not about a queue."""
    found = {}
    for think, ratios in ((CAPACITY_THINK_S, RATIOS), (THINK_S, (0.1, 0.25))):
        light = replace(base, rate=LIGHT, think=think, ttl=TTL_S, shrinks=False)
        for ratio in ratios:
            room = ratio * ccput(light)
            dram = min(light.dram, room / 2)
            found[think, ratio] = replace(light, dram=dram, disk=room - dram)
    return found


def figure_capacity(paper: Paper, number: str, base: Case, runs: Runs) -> Iterator[Row]:
    rates: dict[tuple[float, float], float] = {}
    for (think, ratio), case in capacity_cases(base).items():
        found = runs[case]
        rates[think, ratio] = found["hit_rate_later"]
        note = f"{ratio * ccput(case) / TB:.2f} TB; {found['prefill_throughput']:,.0f} tokens/s of prefill"
        what = f"RCC/CCpUT {ratio:g}, think {think:g} s, hits of later turns %"
        yield row(paper, number, what, RATIOS[ratio] or "plotted", 100 * rates[think, ratio], note=note)
    order = [rates[CAPACITY_THINK_S, ratio] for ratio in (0.25, 0.1, 0.05)]
    yield holds(paper, number, "hits at 0.25, 0.1, 0.05 of CCpUT", order)
    peak = rates[CAPACITY_THINK_S, 0.5]
    yield row(paper, number, "peak of hits of later turns %", 100.0, 100 * peak, within=POINTS)


def figure_mediums(paper: Paper, number: str, base: Case, runs: Runs) -> Iterator[Row]:
    for case, with_dram, full in zip(model_cases(base), WITH_DRAM[paper], HITS[paper], strict=True):
        found = [runs[each] for each in map(partial(_whole, runs), medium_cases(case))]
        values = [100 * figures["hit_rate"] for figures in found]
        counted = [{"conversations": figures["case"]["conversations"]} for figures in found]
        note = "" if case.scale == 1 else "host memory does not shrink with the workload: take all conversations"
        yield row(paper, number, f"{case.model}, HBM, hits %", 0.0, values[0], within=1.5, note=note) | counted[0]
        yield row(paper, number, f"{case.model}, and DRAM, hits %", with_dram, values[1], note=note) | counted[1]
        yield row(paper, number, f"{case.model}, and SSD, hits %", full, values[2], within=POINTS)
        yield holds(paper, number, f"{case.model}, hits: SSD, DRAM, HBM", values[::-1])
        busy = [figures["device_seconds"] / figures["turns"] for figures in found]
        yield holds(paper, number, f"{case.model}, device time of a turn: HBM, SSD", [busy[0], busy[2]])


def _whole(runs: Runs, case: Case) -> Case:
    """The same of all conversations, where that has been run and disk is left out: then its size in host counts."""
    whole = replace(case, conversations=PAPER_CONVERSATIONS)
    return whole if not case.disk and whole.key in runs.kept else case


def medium_cases(case: Case) -> list[Case]:
    """A cache on the device alone, least recently used first, with host memory, and with disk. Where the rows lie matters
    little for hits: the device's 10 GB are counted as host memory, so that rows of running turns are not
    counted as cache."""
    return [
        replace(case, dram=HBM_CACHE, disk=0.0, policy="lru"),
        replace(case, dram=case.dram + HBM_CACHE, disk=0.0),
        case,
    ]


def figure_25(paper: Paper, base: Case, runs: Runs) -> Iterator[Row]:
    found = [runs[replace(base, rate=rate)] for rate in RATES]
    for rate, figures in zip(RATES, found, strict=True):
        printed = BY_RATE.get(rate, ("plotted",) * 4)
        hours = figures["device_seconds"] / 3600 / base.scale
        note = f"mean queue {figures['mean_queue']:.0f}; {figures['hit_rate_later']:.1%} of turns with a history"
        yield row(paper, "25", f"{rate:g}/s, hits %", printed[0], 100 * figures["hit_rate"], note=note)
        yield row(paper, "25", f"{rate:g}/s, TTFT s", printed[1], figures["ttft"], note="one job a pass")
        speed = figures["prefill_throughput"] / 1e3
        yield row(paper, "25", f"{rate:g}/s, prefill K tokens/s", printed[2], speed, note="one job a pass")
        yield row(paper, "25", f"{rate:g}/s, device time h", printed[3], hours)
    ends = found[0], found[-1]
    yield holds(paper, "25", "hits of later turns: 0.5/s, 2/s", [figures["hit_rate_later"] for figures in ends])
    yield holds(paper, "25", "TTFT: 2/s, 0.5/s", [figures["ttft"] for figures in ends[::-1]])
    yield holds(paper, "25", "prefill: 0.5/s, 2/s", [figures["prefill_throughput"] for figures in ends])
    yield holds(paper, "25", "device time: 2/s, 0.5/s", [figures["device_seconds"] for figures in ends[::-1]])


Maker = Callable[[Paper, Case, Runs], Iterable[Row]]


def numbered(paper: Paper) -> dict[str, Maker]:
    """The figures that take runs, by the numbers that this paper gives them; the most telling ones first."""
    capacity, mediums = ("23", "24") if paper == "ATC" else ("25", "26")
    found: dict[str, Maker] = {
        "13": figure_13,
        "21": figure_21,
        "14": figure_14,
        "15": figure_15,
        "16": figure_16,
        "17": figure_17,
        "22": figure_22,
        capacity: lambda p, base, runs: figure_capacity(p, capacity, base, runs),
        mediums: lambda p, base, runs: figure_mediums(p, mediums, base, runs),
    }
    return found | ({"25": figure_25} if paper == "ATC" else {})


def cases_of(paper: Paper, number: str, base: Case) -> list[Case]:
    """The runs that a figure is made of, so that several can be made at once."""
    every = model_cases(base)
    if number in ("13",):
        return every
    if number in ("14", "15", "16", "17"):
        return [each for case in every for each in (case, recomputing(case))]
    if number == "21":
        return [replace(base, disk=disk, policy=policy) for disk in (10 * TB, 2 * TB) for policy in POLICIES]
    if number == "22":
        return [each for case in every for each in (case, replace(case, mode="overflow"))]
    if (paper, number) in (("ATC", "23"), ("arXiv", "25")):
        return list(capacity_cases(base).values())
    if (paper, number) in (("ATC", "24"), ("arXiv", "26")):
        return [each for case in every for each in medium_cases(case)]
    return [replace(base, rate=rate) for rate in RATES]
