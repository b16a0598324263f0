"""What the papers leave open, one at a time, and what a shorter workload changes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace

from benchmarks.papers.cachedattention.closed import COST_DEVICES, SAVINGS, SPEEDUPS, cost_saving
from benchmarks.papers.cachedattention.runs import PAPER_CONVERSATIONS, Case, Figures, Runs
from benchmarks.papers.cachedattention.serving import AT_10T, HITS, LAW, POLICIES, model_cases, recomputing
from benchmarks.papers.cachedattention.table import Paper, Row, row

# With so much of the peak recomputing takes the TTFT that Figures 14 and 25 print together, 0.8 to 1.0 s.
SLOW = 0.09


def sensitivity(base: Case) -> dict[str, Case]:
    """What the papers do not say, one at a time: of LLaMA-13B, and what it does to the rest."""
    found = {"as assumed": base, "rows alone take room on disk": replace(base, whole_windows=False)}
    found |= {f"think {seconds:g} s": replace(base, think=seconds) for seconds in (10.0, 600.0)}
    found |= {f"decode at {part:.0%} of the bandwidth": replace(base, decode_efficiency=part) for part in (0.3, 1.0)}
    found |= {f"prefill at {SLOW:.0%} of the peak": replace(base, prefill_efficiency=SLOW)}
    found |= {"0.1 conversations/s": replace(base, rate=0.1)}
    return found


def units(base: Case) -> dict[str, Case]:
    """What 128 GB and 10 TB may be, in bytes: the assumed powers of two, all decimal, and the price's 10,240 decimal GB."""
    return {
        "sizes in powers of two": base,
        "sizes decimal": replace(base, dram=128 * 10**9, disk=10 * 10**12),
        "10 TB are 10,240 decimal GB": replace(base, dram=128 * 10**9, disk=10_240 * 10**9),
    }


def unit_cases(case: Case) -> list[tuple[str, float, Case]]:
    """Of one reading: name, printed hit rate and run of whatever depends on it."""
    found = [(policy, AT_10T["ATC"][i], replace(case, policy=policy)) for i, policy in enumerate(POLICIES)]
    return [*found, ("LLaMA-65B", HITS["ATC"][1], replace(case, model="LLaMA-65B"))]


def sensitivity_cases(base: Case) -> list[Case]:
    """The units; and of both policies, and recomputed, the rest."""
    cases = [case for reading in units(base).values() for _, _, case in unit_cases(reading)]
    cases += [replace(case, policy=policy) for case in sensitivity(base).values() for policy in ("lookahead", "lru")]
    cases += [recomputing(case) for case in sensitivity(base).values()]
    return cases + [each for case in slow_cases(base) for each in (case, recomputing(case))]


def slow_cases(base: Case) -> list[Case]:
    """The other models, when prefills take the printed TTFT of 13B."""
    return [replace(case, prefill_efficiency=SLOW) for case in model_cases(base)[1:]]


def sensitivity_rows(base: Case, runs: Runs) -> Iterator[Row]:
    for name, case in sensitivity(base).items():
        found = {policy: runs[replace(case, policy=policy)] for policy in ("lookahead", "lru")}
        for policy, figures in found.items():
            later = f"{figures['hit_rate_later']:.1%} of turns with a history"
            note = f"queue {figures['mean_queue']:.0f}, {figures['device_seconds'] / 3600 / case.scale:.2f} h, {later}"
            what = f"{name}, {policy}, hits %"
            yield row("ATC", "sensitivity", what, "", 100 * figures["hit_rate"], note=note)
        again = runs[recomputing(case)]
        gain = again["device_seconds"] / found["lookahead"]["device_seconds"]
        note = f"Figure 16 prints 4.0; TTFT {again['ttft']:.2f} to {found['lookahead']['ttft']:.2f} s"
        yield row("ATC", "sensitivity", f"{name}, device time, x", "", gain, note=note)
        saving = cost_saving(COST_DEVICES[0], gain)
        yield row("ATC", "sensitivity", f"{name}, cost, less %", "", saving, note="Figure 17 prints 70")
    for i, case in enumerate(slow_cases(base), 1):
        gain = runs[recomputing(case)]["device_seconds"] / runs[case]["device_seconds"]
        name = f"prefill at {SLOW:.0%} of the peak, {case.model}"
        yield row("ATC", "sensitivity", f"{name}, device time, x", SPEEDUPS["ATC"][i], gain)
        saving = cost_saving(COST_DEVICES[i], gain)
        yield row("ATC", "sensitivity", f"{name}, cost, less %", SAVINGS["ATC"][i], saving)
    for name, reading in units(base).items():
        for what, printed, case in unit_cases(reading):
            yield row("ATC", "sensitivity", f"{name}, {what}, hits %", printed, 100 * runs[case]["hit_rate"])


def scale_rows(paper: Paper, kept: Mapping[str, Figures], shorter: int) -> Iterator[Row]:
    """What a shorter workload with as much less storage does to hit rates: runs that were made of all conversations, and of
    `shorter` too."""
    for figures in kept.values():
        case = Case(**figures["case"])
        short = kept.get(replace(case, conversations=shorter).key)
        if (
            case.law != LAW[paper]
            or case.conversations != PAPER_CONVERSATIONS
            or short is None
            or case.mode == "recompute"
        ):
            continue
        share = 100 * figures["hit_rate"]
        differences = replace(case, law=Case().law, model=Case().model, policy=Case().policy).key.replace("default", "")
        name = " ".join(filter(None, (case.model, case.policy, differences)))
        note = (
            f"{shorter:,}: {100 * short['hit_rate']:.1f}; queue {figures['mean_queue']:.0f}, {short['mean_queue']:.0f}"
        )
        found = row(paper, "scale", f"{name}, hits %", "", share, note=note)
        yield found | {"conversations": case.conversations, "shorter": float(f"{100 * short['hit_rate']:.4g}")}
