"""Figures that need no run of the serving workload: 1, 2, 4, 18-20, and 23 and 24 of the arXiv version.

Passes take what the roofline says (Figures 1, 4), single transfers what the printed bandwidth says. Figures 18-20 use the
ratio of computing to loading that Figure 19 prints the consequences of.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from random import Random
from statistics import fmean

from afterglow.plan.tiers.buffers import read_buffer_layers
from afterglow.sim.engine_setup import Mode, Setup
from afterglow.sim.machine.catalogue import hardware, model
from afterglow.sim.machine.timing import Roofline
from afterglow.sim.simulator import Outcome, Simulation
from afterglow.sim.workload.sharegpt import ShareGPTLaw, preset
from afterglow.sim.workload.turns import Conversation, StreamSegment, TraceTurn, Workload
from benchmarks.papers.cachedattention.read_buffer import stall
from benchmarks.papers.cachedattention.runs import DECODE_EFFICIENCY, DEVICE, PREFILL_EFFICIENCY, STEP_OVERHEAD_S
from benchmarks.papers.cachedattention.table import Paper, Row, holds, row

LAWS: dict[Paper, ShareGPTLaw] = {"ATC": preset("sharegpt-atc"), "arXiv": preset("sharegpt-arxiv")}
PRINTED_LAW: dict[Paper, dict[str, float]] = {
    "ATC": {"several turns %": 73, "longer than 2K %": 47, "longer than 4K %": 30, "turns, mean": 5.75},
    "arXiv": {"several turns %": 78, "longer than 2K %": 84, "longer than 4K %": 69, "turns, mean": 3.51},
}
FIGURE_4_MODEL: dict[Paper, tuple[str, int]] = {"ATC": ("Mistral-7B", 1), "arXiv": ("LLaMA-2-70B", 4)}
LATE_TURN = 38  # the last turns that Figure 4 shows
MANY_TURNS = 20  # up to here there are enough conversations for means to be smooth

LAYERS, BATCH, HISTORY, NEW = 40, 16, 1024, 100  # of Figures 18 to 20: LLaMA-13B on one device
RATIO = 0.6376  # computing over loading, per layer, fitted to Figure 19's two reductions
TOKEN_S = 0.195e-3  # computing one token there, which is what that ratio means
DECODED = 20

LONG_DOCUMENTS = (4096, 8192, 12288, 16384, 20480, 24576, 28672)
TASKS, TASK_NEW, TASK_REPLY = 6, 256, 64
SLIDING_WINDOW = 4096  # of Mistral-7B's first release


def timing(name: str, devices: int, overhead: float = STEP_OVERHEAD_S) -> Roofline:
    """The roofline of all figures."""
    return Roofline(
        model(name),
        hardware(DEVICE),
        devices,
        prefill_efficiency=PREFILL_EFFICIENCY,
        decode_efficiency=DECODE_EFFICIENCY,
        overhead=overhead,
    )


def prefill(roof: Roofline, new: int, history: int = 0, jobs: int = 1) -> float:
    """Seconds of a pass of `jobs` such prompts."""
    return roof.seconds(jobs * new, jobs * new * (history + new / 2), jobs * (history + new), jobs)


def decode(roof: Roofline, context: int, jobs: int = 1) -> float:
    """Seconds of one decode step."""
    return roof.seconds(jobs, jobs * context, jobs * context, jobs)


def figure_1(paper: Paper) -> Iterator[Row]:
    """Prefilling grows with the prompt, decoding does not; and the constants of §2.4."""
    roof = timing("LLaMA-2-70B", 4)
    lengths = (512, 1024, 2048, 4096)
    for length in lengths:
        yield row(paper, "1", f"prefill of {length}, ms", "plotted", 1e3 * prefill(roof, length, jobs=8))
        yield row(paper, "1", f"decode after {length}, ms", "plotted", 1e3 * decode(roof, length, 8))
    yield holds(paper, "1", "prefill, longest first", [prefill(roof, n, jobs=8) for n in reversed(lengths)])
    growth = decode(roof, lengths[-1], 8) / decode(roof, lengths[0], 8)
    yield row(paper, "1", "decode, growth from 512 to 4K, %", 0.0, 100 * (growth - 1), within=20)
    big, device = model("LLaMA-65B"), hardware(DEVICE)
    taken = prefill(timing("LLaMA-65B", 4), 2048)
    size = 2048 * big.kv_bytes_per_token()
    yield row(paper, "§2.4", "LLaMA-65B, 2K prompt, ms", 360, 1e3 * taken, within=5, note="fits the efficiency")
    yield row(paper, "§2.4", "its cache, GB", 5, size / 2**30, within=1)
    yield row(paper, "§2.4", "loading it, ms", 192, 1e3 * 5e9 / device.host_link_bandwidth, within=1)
    yield row(paper, "§2.4", "making it, GB/s", 13.9, 5 / 0.36, within=1)
    yield row(paper, "§2.4", "190 GB filled after, s", 14, 190 / 13.9, within=3)
    yield row(paper, "§2.4", "512 GB filled within 60 s, s", "< 60", 512 / 13.9)


def drawn(law: ShareGPTLaw, conversations: int, seed: int) -> list[list[tuple[int, int]]]:
    """Conversations of a law, as questions and replies."""
    return [law.lengths(Random(f"{seed}-{number} {law.name}")) for number in range(conversations)]


def figure_2(paper: Paper, conversations: int, seed: int) -> Iterator[Row]:
    """What the workload was fitted to."""
    found = drawn(LAWS[paper], conversations, seed)
    sizes = [sum(q + a for q, a in turns) for turns in found]
    simulated = {
        "several turns %": 100 * fmean(len(turns) > 1 for turns in found),
        "longer than 2K %": 100 * fmean(size > 2048 for size in sizes),
        "longer than 4K %": 100 * fmean(size > 4096 for size in sizes),
        "turns, mean": fmean(len(turns) for turns in found),
    }
    for what, printed in PRINTED_LAW[paper].items():
        yield row(paper, "2", what, printed, simulated[what], within=3 if " %" in what else 4, note="fitted")


def figure_4(paper: Paper, conversations: int, seed: int) -> Iterator[Row]:
    """Of a late turn's prompt, and of the time that it takes, almost all is history."""
    name, devices = FIGURE_4_MODEL[paper]
    roof = timing(name, devices)
    sums: dict[int, list[int]] = {}  # turn: how many, tokens of history, of the question
    for turns in drawn(LAWS[paper], conversations, seed):
        said = 0
        for number, (question, reply) in enumerate(turns, 1):
            entry = sums.setdefault(number, [0, 0, 0])
            for i, more in enumerate((1, said, question)):
                entry[i] += more
            said += question + reply
    shares: list[float] = []
    late = max(number for number in sums if number <= LATE_TURN)
    for number in sorted({2, 3, 5, 10, 20, 30, late} & set(sums)):
        count, history, new = sums[number]
        history, new = history // count, max(1, new // count)
        whole, part = prefill(roof, history + new), prefill(roof, new, history)
        share = 100 * (1 - part / whole)
        if number <= MANY_TURNS:
            shares.append(share)
        yield row(paper, "4", f"turn {number}, history of the prompt %", "plotted", 100 * history / (history + new))
        yield row(paper, "4", f"turn {number}, {name}, time that is repeated %", "plotted", share)
        if number == late:
            printed = 99 if paper == "ATC" else 98
            yield row(paper, "4", "late turns, history %", printed, 100 * history / (history + new), within=3)
            yield row(paper, "4", "late turns, time that is repeated %", printed, share, within=3)
    yield holds(paper, "4", "time that is repeated, latest turn first", shares[::-1])


def figure_18(paper: Paper) -> Iterator[Row]:
    """1K tokens of 16 jobs: all computed, or a part loaded; without and with pre-loading, and a read buffer."""
    loading_s = BATCH * model("LLaMA-13B").kv_bytes_per_token() / hardware(DEVICE).host_link_bandwidth  # per token
    whole = BATCH * HISTORY * TOKEN_S
    for old in (500, 600, 700, 800, 900):
        new = 1000 - old
        load, compute = old * loading_s, BATCH * new * TOKEN_S
        apart, layered = load + compute, compute + stall(LAYERS, load / LAYERS, compute / LAYERS, 0)
        buffered = read_buffer_layers(LAYERS, load / LAYERS, compute / LAYERS)
        best = compute + stall(LAYERS, load / LAYERS, compute / LAYERS, buffered)
        for what, value in (("recompute", whole), ("no pre-loading", apart), ("pre-loading", layered)):
            yield row(paper, "18", f"{old}/{new}, {what}, ms", "plotted", 1e3 * value)
        yield holds(paper, "18", f"{old}/{new}: recompute, no pre-loading, pre-loading", [whole, apart, layered])
        needs = "needed" if load > compute else "not needed"
        note = f"{buffered} layers, read buffer {needs}"
        yield row(paper, "18", f"{old}/{new}, read buffer, ms", "plotted", 1e3 * best, note=note)
        if load > compute:
            yield holds(paper, "18", f"{old}/{new}: pre-loading, with a read buffer", [layered, best])


def figure_19() -> dict[int | None, float]:
    """Seconds of 1K tokens of history and 100 new, by layers of read buffer; None: no pre-loading."""
    load = HISTORY * BATCH * model("LLaMA-13B").kv_bytes_per_token() / hardware(DEVICE).host_link_bandwidth / LAYERS
    compute = RATIO * load
    found: dict[int | None, float] = {None: LAYERS * (load + compute)}
    for buffered in (0, 5, 10, 15, 20):
        found[buffered] = LAYERS * compute + stall(LAYERS, load, compute, buffered)
    return found


def figure_19_rows(paper: Paper) -> Iterator[Row]:
    found = figure_19()
    none = found[None]
    printed = {0: 35.0, 15: 61.0}
    for buffered, seconds in found.items():
        if buffered is not None:
            value = printed.get(buffered, "plotted")
            within = 3 if buffered in printed else None
            less = 100 * (1 - seconds / none)
            yield row(paper, "19", f"PL-B{buffered}, less time %", value, less, within=within, note="ratio fitted")
    order = [found[key] for key in (None, 0, 5, 10, 15)]
    yield holds(paper, "19", "more buffer, less time: none, B0, B5, B10, B15", order)


def figure_20(paper: Paper) -> Iterator[Row]:
    """Saving 16 prompts while they are computed and decoded, or after."""
    shape, roof = model("LLaMA-13B"), timing("LLaMA-13B", 1)
    savings: list[float] = []
    for length in (1024, 1229, 1434, 1638):
        computing = BATCH * length * TOKEN_S + DECODED * decode(roof, length, BATCH)
        rows = BATCH * (length + DECODED)
        saving = rows * shape.kv_bytes_per_token() / hardware(DEVICE).host_link_bandwidth
        savings.append(saving)
        less = 100 * saving / (computing + saving)
        yield row(paper, "20", f"{length} tokens, less time %", 14, less, within=4, note="paper: 13 to 15")
    yield holds(paper, "20", "saving, longest prompt first", savings[::-1])


# ------------------------------------------------------------------------------- long documents (arXiv 4.3.6)


class Sliding(Roofline):
    """A decoder that sees no more than the last `SLIDING_WINDOW` tokens."""

    def seconds(self, rows: int, attended: float, context: int, jobs: int, gathered: int = 0) -> float:
        return super().seconds(rows, min(attended, rows * SLIDING_WINDOW), context, jobs, gathered)


def long_setup(mode: Mode, overhead: float) -> Setup:
    """One device, one job at a time, nothing that stays on it."""
    shape, device = model("Mistral-7B"), hardware(DEVICE)
    roof = Sliding(shape, device, 1, decode_efficiency=DECODE_EFFICIENCY, overhead=overhead)
    return Setup(
        model=shape,
        hardware=device,
        mode=mode,
        timing=roof,
        retain=False,
        prefill_chunk=0,
        max_batch=1,
        read_buffer=0,  # the next job is not known
    )


def long_turns(document: int) -> Iterator[TraceTurn]:
    """Tasks about a document, one after the other."""
    said, stream = document, f"document {document}"
    for index in range(TASKS):
        prompt = (StreamSegment(stream, 0, said + TASK_NEW),)
        reply = (StreamSegment(stream, said + TASK_NEW, TASK_REPLY),)
        new = TASK_NEW if index else document + TASK_NEW
        yield TraceTurn(stream, index, prompt, reply, new, think=1.0 if index else 0.0)
        said += TASK_NEW + TASK_REPLY


def long_document(document: int, mode: Mode, overhead: float) -> Outcome:
    """A conversation about it; its first turn is not counted."""
    work = Workload([Conversation(f"document {document}", 0.0, long_turns(document))])
    return Simulation(long_setup(mode, overhead), work, warm_up=1).run()


FITTED_OVERHEAD_S = 0.041  # 2.5 s are 41 % of a task: 56 ms for each of 64 tokens; the roofline gives 15 ms


def figures_23_24() -> Iterator[Row]:
    """TTFT, prefill throughput, device time and output throughput of documents of 4K to 28K."""
    shares: dict[tuple[float, Mode], float] = {}
    modes: tuple[Mode, Mode] = ("recompute", "reuse")
    gains: list[float] = []
    for overhead in (FITTED_OVERHEAD_S, STEP_OVERHEAD_S):
        note = f"{1e3 * overhead:g} ms per step"
        judged = overhead == FITTED_OVERHEAD_S
        for document in LONG_DOCUMENTS:
            again, kept = (long_document(document, mode, overhead) for mode in modes)
            first, then = fmean(again.ttft), fmean(kept.ttft)
            last = document == LONG_DOCUMENTS[-1]
            size = f"{document // 1024}K"
            if judged:
                speed = [outcome.prompt_tokens / outcome.prefilling for outcome in (kept, again)]
                for what, value in (("recompute", first), ("reuse", then)):
                    printed = {("recompute"): 2.5, ("reuse"): 0.12}[what] if last else "plotted"
                    yield row("arXiv", "23", f"{size}, {what}, TTFT s", printed, value, within=40 if last else None)
                yield row("arXiv", "23", f"{size}, prefill x faster", 22.0 if last else "plotted", speed[0] / speed[1])
                less = 100 * (1 - then / first)
                yield row("arXiv", "23", f"{size}, TTFT, less %", 95.0 if last else "plotted", less)
                gains.append(speed[0] / speed[1])
            if last:
                for mode, outcome in zip(modes, (again, kept), strict=True):
                    shares[overhead, mode] = outcome.prefilling / (outcome.prefilling + outcome.decoding)
                    printed = 41.0 if mode == "recompute" else 1.2
                    what = f"{size}, {mode}, prefill of device time %"
                    yield row("arXiv", "24", what, printed, 100 * shares[overhead, mode], note=note)
            busy = [outcome.prefilling + outcome.decoding for outcome in (again, kept)]
            more = 100 * (busy[0] / busy[1] - 1)
            printed = 67.0 if last else "plotted"
            yield row("arXiv", "24", f"{size}, output tokens per s, more %", printed, more, note=note)
            yield holds("arXiv", "24", f"{size}, device time: recompute, reuse", busy, note=note)
    longest, shortest = gains[-1], gains[0]
    yield holds("arXiv", "23", "prefill speedup: longest, shortest document", [longest, shortest])


# -------------------------------------------------------------------------------------------------- what it costs

DEVICE_HOUR, DRAM_GB_HOUR, SSD_GB_HOUR = 5.0, 0.0088, 0.000082
COST_MODELS = ("LLaMA-2-13B", "LLaMA-65B", "LLaMA-2-70B", "Falcon-40B")
COST_DEVICES = (2, 4, 4, 4)
SPEEDUPS: dict[Paper, tuple[float, ...]] = {"ATC": (4.0, 1.9, 3.3, 3.4), "arXiv": (2.7, 1.6, 2.2, 1.7)}
SAVINGS: dict[Paper, tuple[float, ...]] = {"ATC": (70, 43, 66, 68), "arXiv": (56, 31, 49, 35)}
EXACT_SAVINGS: dict[Paper, tuple[float, ...]] = {"ATC": (70.1, 42.2, 66.7, 67.7), "arXiv": (55.7, 31.4, 50.1, 35.4)}
STORAGE: dict[Paper, tuple[float, ...]] = {"ATC": (16.4, 9.0, 9.0, 9.0), "arXiv": (16.4, 8.9, 9.0, 8.9)}


def storage_hour(dram_gb: float = 128, ssd_gb: float = 10240) -> float:
    """Dollars per hour of the papers' host memory and disk."""
    return DRAM_GB_HOUR * dram_gb + SSD_GB_HOUR * ssd_gb


def storage_share(devices: int) -> float:
    """Of what an hour costs, storage; %."""
    return 100 * storage_hour() / (DEVICE_HOUR * devices + storage_hour())


def cost_saving(devices: int, speedup: float) -> float:
    """What reuse saves if it is so much faster; %."""
    return 100 * (1 - (DEVICE_HOUR * devices + storage_hour()) / (DEVICE_HOUR * devices) / speedup)


def figure_17(paper: Paper) -> Iterator[Row]:
    """The arithmetic alone: printed speedups in, printed costs out."""
    for i, name in enumerate(COST_MODELS):
        saving, share = cost_saving(COST_DEVICES[i], SPEEDUPS[paper][i]), storage_share(COST_DEVICES[i])
        note = f"from the printed x{SPEEDUPS[paper][i]}"
        # Speedups are printed with two digits, which is what the savings can be off by.
        yield row(paper, "17", f"{name}, cost, less %", SAVINGS[paper][i], saving, within=1.2, note=note)
        yield row(paper, "17", f"{name}, storage of the cost %", STORAGE[paper][i], share, within=0.11, note="exact")


def without_runs(paper: Paper, conversations: int, seed: int, wanted: Collection[str] = ()) -> dict[str, list[Row]]:
    """These figures of one paper, by number; all, or the `wanted` ones."""
    makers: dict[str, Callable[[], Iterator[Row]]] = {
        "1": lambda: figure_1(paper),
        "2": lambda: figure_2(paper, conversations, seed),
        "4": lambda: figure_4(paper, conversations, seed),
        "17": lambda: figure_17(paper),
        "18": lambda: figure_18(paper),
        "19": lambda: figure_19_rows(paper),
        "20": lambda: figure_20(paper),
    }
    found = {number: list(make()) for number, make in makers.items() if not wanted or number in wanted}
    if paper == "arXiv" and (not wanted or {"23", "24"} & set(wanted)):
        rows = list(figures_23_24())
        found |= {number: [r for r in rows if r["figure"] == number] for number in ("23", "24")}
    return found
