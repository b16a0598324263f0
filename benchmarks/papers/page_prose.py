"""Sentences of docs/papers.md that hold figures, made from the files of results."""

from __future__ import annotations

from collections.abc import Mapping

from benchmarks.papers.page_goals import BEFORE_ONE_CALL, ONE_CALL, link, percent, read, there
from benchmarks.papers.page_simulated import Found

Rows = Mapping[tuple[str, str], Found]


def times() -> str:
    """Say what Fig. 18 to 21 of CachedAttention are on the engine."""
    preload = read("preload")
    reduced = {row["variant"]: row["reduction"] for row in preload["rows"]}
    exact = max(int(variant.removeprefix("PL-B")) for variant in reduced if variant.startswith("PL-B"))
    disk = ", ".join(f"{one['disk'] / one['bound']:.2f}" for one in preload["real_disk"])
    saved = ", ".join(f"{row['decode_ratio']:.3f}" for row in read("saving")["rows"] if row["saving"] == "on")
    hits = {row["policy"]: percent(row["hit_rate"]) for row in read("placement")["rows"] if row["backlog"]}
    return (
        f"- Pre-loading (Fig. 18, 19): from a disk that is slowed to the paper's ratio of loading to computing, loading layer by layer takes {percent(reduced['PL-B0'])} less time to the first token than "
        f"loading before computing, and with a read buffer of all {exact} layers {percent(reduced[f'PL-B{exact}'])} less. The ratio was fitted to the 35 and 61 % that the paper has. From the disk as it is, TTFT is {disk} times the bound: the longer of "
        "loading and computing, and one layer of the other (1,024 and 2,048 tokens of 100 M, then of 1.1 B).\n"
        f"- Saving while computing (Fig. 20): a decoded token takes {saved} times as long as without saving (prompts of 1,024, 1,280 and 1,600 tokens). The paper compares with saving afterwards (13 to 15 % less time for all): {on_gpu()}\n"
        f"- Placement (Fig. 21), with a backlog: look-ahead finds {hits['lookahead']} of the history cached, LRU {hits['lru']}, FIFO {hits['fifo']} and LFU {hits['lfu']}. The paper has 39.9, 12.9 and 9.5 % (look-ahead, LRU, FIFO) with 2 TB of disk. Without a backlog "
        "look-ahead and LRU do not differ.\n"
    )


def on_gpu() -> str:
    """Say what saving while computing takes less than saving afterwards on a GPU."""
    rows = read("gpu/saving")["rows"]
    less = ", ".join(f"{100 * row['less_than_awaited']:.0f}" for row in rows)
    return f"on a GPU ([gpu.md](gpu.md), commit {read('gpu/saving')['commit']}) it is {less} % less; on this machine it was not measured."


def together() -> str:
    """Say why fewer requests than 32 decode together."""
    if all("gain_spread" in row for row in read("relay_engine")["rows"]):
        return "Requests end at different times, and none follow the last ones, so fewer than 32 decode together."
    # Files without it are of the client that waited for the oldest. The mean is of a count: a token a step for each.
    return (
        "With ShareGPT's lengths the client of this measurement sent the next requests only when its oldest one had ended, so about 9 decoded together in the mean, not 32 "
        "(counted from the lengths)."
    )


def relay() -> str:
    """Say what relay gains, and against what."""
    operator = {
        row["kv_heads"]: row["seconds"]
        for row in read("relay_operator")["rows"]
        if (row["batch"], row["context"], row["prefix"]) == (32, 128, 2048)
    }
    shared, relayed, plain = (1e3 * operator[12][way] for way in ("shared", "relay", "plain"))
    batch = [row for row in read("relay_engine")["rows"] if row["batch"] == 32]
    cached = [f"{row['rate']['relay'] / row['rate']['recompute']:.1f}" for row in batch]
    largest = max(batch, key=lambda row: float(row["held"]["apart"]))["held"]
    return (
        f"Alone, one layer's attention with 12 KV heads (32 requests behind 2,048 tokens) takes {relayed:.1f} ms with relay, {shared:.1f} where each request reads the shared prefix, and "
        f"{plain:.1f} where each has a copy: {shared / relayed:.1f} and {plain / relayed:.1f} times as fast. With the 4 KV heads of the served model it is "
        f"{operator[4]['shared'] / operator[4]['relay']:.1f} times as fast as sharing. The whole server gains less. {together()} Prefills take time as well. "
        f"What remains is the cached prefix itself. Beside recomputing it for each request the server with relay is {', '.join(cached)} times as fast behind 64, 512 and 2,048 tokens (the paper: 1.06, 1.83 and "
        f"4.36 on an A40), and holds {largest['measured'] / 1e6:,.0f} MB instead of {largest['apart'] / 1e6:,.0f}.\n"
    )


def spec_io() -> str:
    """Say what SPEC's steps gain with wide and with narrow heads."""
    goals = {g["name"]: g["value"] for file in ("importance_io", "importance_wide") for g in read(file)["goals"]}
    rows = {
        (row["run"], row["variant"]): row for file in ("importance_io", "importance_wide") for row in read(file)["rows"]
    }
    wide, llama, opt, fast = "wide, slow disk", "llama, slow disk", "opt, slow disk", "llama, the disk as it is"
    h2o, waits = "TTFT, H2O with LFU over SPEC", "waiting for I/O, H2O with LFU over SPEC"
    found, mapped = "identification, share of TTFT", "mapping, share of TTFT"
    score, guess = "+ITF +RO +SC: TTFT over the step before", "+ITF +RO +SC +SP: TTFT over the step before"
    full, every = "+ITF +RO +SC +SP", "load everything, LRU"

    def of(run: str, goal: str) -> float:
        return float(goals[f"{run}: {goal}"])

    def range_of(goal: str, form: str, scale: float = 1.0, less: float = 0.0) -> str:
        low, high = sorted(scale * (of(run, goal) - less) for run in (llama, opt))
        shown = dict.fromkeys((form.format(low), form.format(high)))
        return " to ".join(shown)

    return (
        f"With heads of 64 and small caches every step helps. TTFT falls to 1/{of(wide, h2o):.1f} of what H2O with LFU needs (the paper: 1/1.2 to 1/2.8), and to "
        f"1/{of(wide, 'TTFT, loading everything over SPEC'):.2f} of loading everything; waiting for the disk falls to 1/{of(wide, waits):.1f} (1/1.5 to 1/3.8). Finding the rows takes {percent(of(wide, found), 1)} of TTFT (6 % wanted), "
        f"mapping {percent(of(wide, mapped), 1)} (2 % wanted). Guesses save {percent(1 - of(wide, guess), 1)} of TTFT.\n\n"
        f"With heads of 16 and large, warm caches TTFT falls to 1/{of(llama, h2o):.1f} and 1/{of(opt, h2o):.1f}, and waiting to 1/{of(llama, waits):.1f} and 1/{of(opt, waits):.1f}. There the last two steps cost more than they save: caches by "
        f"score {range_of(score, '{:.0f}', 100, 1)} %, guesses {range_of(guess, '{:.0f}', 100, 1)} %. Finding the rows takes {range_of(found, '{:.0f}', 100)} % of TTFT: one call for each layer and request, whatever the width of the heads.\n\n"
        f"On this machine's own disk (2 GB/s and more) SPEC's TTFT is {rows[fast, full]['ttft_ms']:.0f} ms and H2O's with LFU {rows[fast, 'H2O, LFU']['ttft_ms']:.0f}, but loading everything takes {rows[fast, every]['ttft_ms']:.0f} ms. SPEC is for "
        "prefixes that take longer to read than to compute over.\n"
    )


def before_one_call() -> str:
    """Say which figures are older than chunks by one call, and what was measured of that."""
    files = ("importance_io", "importance_wide", "importance_sweep")
    old = [f"{link(file)} (commit {read(file)['commit']})" for file in files if read(file)["commit"] in BEFORE_ONE_CALL]
    if not old:
        return f"All times of SPEC below are of chunks that are read by one call (since commit {ONE_CALL}).\n"
    return (
        f"**These figures are older than a change of what they measure:** {', '.join(old)}. Since commit {ONE_CALL} all chunks that a layer asks for are read by one call of the compiled kernels, and wanted chunks "
        "overtake guesses. The tables below, and what is said about them, are of before. Afterwards these things were measured, by scratch programs on a quiet machine ([the log](log.md)): with a quarter of the rows of four "
        "prefixes, without caches, passes wait 17 to 19 ms instead of 28 to 30, in chunks of 16 rows 26 to 28 instead of 70 to 77; the whole takes 134 to 140 ms instead of 150 to 164, and guesses lengthen it no more. With the "
        "models and caches of `importance_io`, on the disk as it is, +RO +SC waits 3.2 and 4.4 ms instead of 3.7 and 6.1, which is within what repeats differ by; on a disk of 60 MB/s guesses hide 7 % of the waiting instead of none. So all "
        "shares of waiting in these tables, and the loss by guesses with heads of 16, have to be measured again. Nor did the requests that count have recordings of their own then: a quarter to a third of "
        "them had the importance of a request in the warm-up. With heads of 64 that made a TTFT of 1/1.9 of H2O with LFU's out of 1/1.7.\n"
    )


def spec_sweep(found: Found) -> str:
    """Say what SPEC gains over H2O with LFU, beside what the paper prints."""
    gains = {
        (r["shape"], r["tokens"], r["mb_per_s"], r["chunk"]): r["arms"]["h2o"]["ttft_ms"] / r["arms"]["spec"]["ttft_ms"]
        for r in found["rows"]
    }
    chunks = [
        gain for (shape, tokens, rate, _), gain in gains.items() if (shape, tokens, rate) == ("heads64", 8192, 500)
    ]
    return (
        f"H2O with LFU takes {min(gains.values()):.1f} to {max(gains.values()):.1f} times as long as SPEC to the first token at these points; in the paper 1.2 to 2.8 (Fig. 16), and 1.2 to 2.0 for 65 to 400 GB of data "
        f"(Fig. 24). For chunks of 16 to 256 rows it is {min(chunks):.1f} to {max(chunks):.1f}; in the paper 2.2 to 2.4 (Fig. 23).\n"
    )


def spec_quality() -> str:
    """Say what attending to a part of the rows costs the bundled model."""
    goals = {g["name"]: g["value"] for g in read("importance_quality")["goals"]}

    def lost(text: str, protocol: str, what: str) -> str:
        return f"{0.0 + goals[f'{text}, {protocol}: points of {what}']:.1f}"

    recall, replies, texts = "recall lost at 50%", "agreement in replies lost at 25%", "agreement in texts lost at 25%"
    right = "right next tokens in texts lost at 25%"
    points = [
        (protocol, lost("dialogues", protocol, recall), lost("dialogues", protocol, replies))
        for protocol in ("scored", "generated", "published")
    ]
    shown = "; ".join(f"`{protocol}` {a} and {b}" for protocol, a, b in points)
    return (
        f"The bundled model loses these points of recall at 50 % of the rows, and of agreement in replies at 25 %: {shown}. Next tokens of running text agree with the full cache's in fewer places at 25 %: "
        f"{lost('dialogues', 'generated', texts)} points (`generated`) and {lost('dialogues', 'published', texts)} (`published`), on stories {lost('stories', 'generated', texts)} and {lost('stories', 'published', texts)}. "
        f"Nearly as many of them are right: {lost('dialogues', 'generated', right)} and {lost('dialogues', 'published', right)} points fewer.\n"
    )


def attncache() -> str:
    """Say what MiniLM's table does not show."""
    if not there("attncache_sts"):
        return "Not measured yet.\n"
    found = read("attncache_sts")
    rows = [row for row in found["rows"] if row["chosen"] and row["method"] == "+ layers (ours)"]
    low, high = min(row["hit_rate"] for row in rows), max(row["hit_rate"] for row in rows)
    known = [row["known_sentences_asked"] for row in found["rows"] if row["chosen"] and row["method"] == "full"]
    old = (
        ""
        if "promise" in found
        else " MiniLM's rows are older than the promise about all layers together, which is described below."
    )
    narrow = "" if any(row["method"] == "int4" for row in found["rows"]) else " MiniLM was not measured with 4 bits."
    controls = (
        "" if any(row["method"] == "mean maps" for row in found["rows"]) else " It has no control with mean maps."
    )
    return (
        f"Layers accepted one by one (`+ layers`, the default) hit {percent(low)} to {percent(high)} on each of MiniLM's tasks. Of the sentences that are asked, {percent(min(known), 1)} to {percent(max(known), 1)} are literally in the "
        f"database and always hit; the columns *unseen* leave them out.{narrow}{controls}{old}\n"
    )
