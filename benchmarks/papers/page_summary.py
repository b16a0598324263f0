"""What docs/papers.md begins with: how many goals of each paper are met, and in a few words what held and what did not."""

from __future__ import annotations

from collections.abc import Iterable
from statistics import fmean

from benchmarks.papers.page_goals import (
    BEFORE_ONE_CALL,
    BESIDE,
    MEASURED,
    MODELLED,
    ONE_CALL,
    OPERATORS,
    SIMULATED,
    VERDICTS,
    counts,
    goals_of,
    link,
    operator_goals,
    percent,
    read,
    simulated_goals,
    sources,
    tally,
    there,
)
from benchmarks.papers.page_simulated import COUNTS, Found, markdown

Judged = list[tuple[Found, bool]]


def measured(paper: str) -> Judged:
    """List the measured goals of a paper, each with whether it counts."""
    return [
        (goal, counts(goal["name"]) == COUNTS)
        for source in sources(paper)
        for goal in goals_of(source.file, read(source.file))
    ]


def line(paper: str, evidence: str, judged: Judged, where: str) -> tuple[str, ...]:
    """Count a paper's goals by how they came out; `where`: the heading under which those that are missed stand."""
    counted = [goal for goal, of_use in judged if of_use]
    *others, missed = tally(counted).values()
    apart = len(judged) - len(counted)
    shown = f"[{missed}](#{where.lower().replace(' ', '-')}-goals-that-are-not-met)" if missed else ""
    return (paper, evidence, *(str(n) if n else "" for n in others), shown, str(apart) if apart else "")


def counted() -> str:
    """Count the goals of each paper."""
    lines = [line(paper, "measured", measured(paper), paper) for paper in MEASURED]
    for edition in ("ATC", "arXiv"):
        evidence = f"simulated, its {edition} edition"
        lines.append(line("CachedAttention", evidence, simulated_goals(edition), "The simulator"))
    lines += [line(paper, "operators, modelled", operator_goals(paper), "Operators") for paper in MODELLED]
    return markdown(("goals of", "evidence", *VERDICTS, "not counted"), lines)


def files() -> str:
    """List the files of results, with the run and the commit that each is of."""
    lines = []
    for paper in MEASURED:
        for source in sources(paper):
            found = read(source.file)
            run = "quick" if found["quick"] else "full"
            lines.append((paper, source.figure, source.model, link(source.file), run, found["commit"]))
    for source in (one for one in BESIDE if there(one.file)):
        found = read(source.file)
        run = "quick" if found["quick"] else "full"
        lines.append(("none", source.figure, source.model, link(source.file), run, found["commit"]))
    for file, what in ((SIMULATED, "CachedAttention's evaluation"), (OPERATORS, "operators of the other papers")):
        found = read(file)
        lines.append(("The simulator", what, "modelled", link(file), "full", found["commit"]))
    return markdown(("paper", "figures", "model", "file", "run", "commit"), lines)


# ------------------------------------------------------------------------------------------------ in words


def in_short() -> str:
    """Say what held and what did not, two items for each paper."""
    items = (*_cachedattention(), *_relay(), *_spec(), *_attncache(), *_simulator())
    return "".join(f"- {item}\n" for item in items)


def _cost(value: float) -> str:
    return f"{100 * (value - 1):.1f} %"


def _between(values: Iterable[float], form: str) -> str:
    values = list(values)
    return f"{form.format(min(values))} to {form.format(max(values))}"


def _cachedattention() -> tuple[str, str]:
    ratios = {row["text"]: row["ratio"] for row in read("overflow")["rows"] if row["table"] == "perplexity"}
    kept = {text: _cost(of["CA"]["value"]) for text, of in ratios.items()}
    old = _between((of["NKVT"]["value"] for of in ratios.values()), "{:.0f}")
    hits = {row["policy"]: row["hit_rate"] for row in read("placement")["rows"] if row["backlog"]}
    disk = max(g["value"] for g in read("preload")["goals"] if g["name"].startswith("TTFT from disk"))
    rates = max(row["ratio"] for row in read("tier_rates")["rows"])
    saved = [row["decode_ratio"] for row in read("saving")["rows"] if row["saving"] == "on"]
    scale = read("scale")["rows"]
    evicting = scale[-1]["evict_ms"] / scale[0]["evict_ms"]
    held = scale[-1]["bytes_per_extent"] + scale[-1]["token_bytes_per_extent"]
    files = [g["value"] for g in read("disk")["goals"] if "plain loop" in g["name"]]
    return (
        f"**CachedAttention held:** after five overflows of the window the kept cache costs {kept['MT-Bench-101']} of perplexity on dialogues and "
        f"{kept['Shakespeare']} on Shakespeare; rows with old positions cost factors of {old}. Look-ahead hits {percent(hits['lookahead'])} where LRU hits {percent(hits['lru'])}. The "
        f"first token from disk takes at most {disk:.2f} times its bound, and the choice between loading and computing at most {rates:.2f} times the better way.",
        f"**CachedAttention did not:** on WikiText-2 the kept cache costs {kept['WikiText-2']} (1 % wanted). Saving costs {_between((100 * (r - 1) for r in saved), '{:.1f}')} % of decoding "
        f"(3 wanted). Files of extents move at {_between(files, '{:.2f}')} of a plain loop's speed (0.8 wanted). An eviction among a million extents takes {evicting:.1f} times as long as among 10,000 (2 wanted), and an extent with its tokens {held:,.0f} bytes (1,024 wanted).",
    )


def _relay() -> tuple[str, str]:
    rows = [
        row["seconds"]
        for row in read("relay_operator")["rows"]
        if (row["kv_heads"], row["batch"], row["context"], row["prefix"]) == (12, 32, 128, 2048)
    ]
    (operator,) = rows
    batches = [row for name in ("relay_engine", "relay_mmlu") for row in read(name)["rows"] if row["batch"] >= 32]
    fixed = read("relay_fixed")["rows"]
    held = max((row["held"] for row in read("relay_engine")["rows"]), key=lambda held: held["apart"])
    arriving = read("relay_rate")["rows"]
    shared = {row["offered"]: row["seconds_per_token"] for row in arriving if row["way"] == "shared"}
    tokens = [row["seconds_per_token"] / shared[row["offered"]] for row in arriving if row["way"] == "relay"]
    return (
        f"**RelayAttention held:** one layer's attention behind 2,048 shared tokens is {operator['shared'] / operator['relay']:.1f} times as fast as when each request reads them. They are in memory once: "
        f"{held['measured'] / 1e6:,.0f} MB instead of {held['apart'] / 1e6:,.0f}. Where all requests have one length, the server is {_between((row['gain'] for row in fixed), '{:.2f}')} times as fast. "
        f"Where requests arrive at random, with ShareGPT's lengths behind 2,048 tokens, a token takes {_between(tokens, '{:.2f}')} of its time with sharing.",
        f"**RelayAttention did not:** with lengths of ShareGPT and MMLU the server is {_between((row['gain'] for row in batches), '{:.2f}')} times as fast as with a prefix that each request reads; the paper has 1.03 to "
        "2.09 on an A40.",
    )


def _spec() -> tuple[str, str]:
    wide = {g["name"]: g["value"] for g in read("importance_wide")["goals"]}
    name = "wide, slow disk: {}, H2O with LFU over SPEC"
    old = f" (measured before commit {ONE_CALL})" if read("importance_wide")["commit"] in BEFORE_ONE_CALL else ""
    quality = {g["name"]: g["value"] for g in read("importance_quality")["goals"]}
    finding = [g["value"] for g in read("importance_sweep")["goals"] if "identification" in g["name"] and not g["met"]]
    return (
        f"**SPEC held:** with heads of 64 and data larger than the caches TTFT falls to 1/{wide[name.format('TTFT')]:.1f} of what H2O with LFU needs, and waiting for the disk to "
        f"1/{wide[name.format('waiting for I/O')]:.1f}{old}. If decoded tokens select anew, {quality['dialogues, generated: points of recall lost at 50%']:.0f} points of recall are lost at half of the rows.",
        f"**SPEC did not:** in the paper's way, where the prompt alone selects, {quality['dialogues, published: points of recall lost at 50%']:.0f} points of recall are lost at half of the rows, more than by a fixed "
        f"selection (SPI). Next words of texts differ from the full cache's by {quality['dialogues, generated: points of agreement in texts lost at 25%']:.0f} points at a quarter of the rows. Where heads are grouped, "
        f"finding the rows takes up to {percent(max(finding, default=0))} of TTFT (6 wanted), and from a disk of 2 GB/s loading everything is faster.",
    )


def _attncache() -> tuple[str, str]:
    shapes = {g["name"]: g["value"] for g in read("attncache_shapes")["goals"]}
    speed = next(value for name, value in shapes.items() if "hit rate of 0.3 " in name)

    def mean(file: str, method: str, key: str) -> float:
        return fmean(r[key] for r in read(file)["rows"] if r["chosen"] and r["method"] == method)

    small, real, ours = "attncache_sts", "attncache_decoder", "+ layers (ours)"
    gained = f"SmolLM2 takes {percent(mean(real, ours, 'hit_rate'))} of its maps layer by layer, "
    if any("speedup_whole" in row for row in read(real)["rows"]):
        gained = f"Whole passes gain little: SmolLM2's are {mean(real, ours, 'speedup_whole'):.2f} times as fast, "
    return (
        f"**AttnCache held:** at 30 % of hits attention of large layers is {speed:.2f} times as fast. Accepting layers one by one, MiniLM takes {percent(mean(small, ours, 'hit_rate'))} of its maps from the database "
        f"and loses {mean(small, ours, 'loss'):.1f} points.",
        f"**AttnCache did not:** in the paper's way {percent(mean(small, 'AttnCache', 'hit_rate'))} (MiniLM) and {percent(mean(real, 'AttnCache', 'hit_rate'))} (SmolLM2) of sentences hit instead of 30 %. {gained}"
        f"at {mean(real, ours, 'loss'):.1f} points lost.",
    )


def _simulator() -> tuple[str, str]:
    rows = {(r["paper"], r["figure"], r["what"]): r for r in read(SIMULATED)["rows"] if r["figure"] in ("13", "16")}
    hits = [r for (paper, figure, _), r in rows.items() if (paper, figure) == ("ATC", "13") and r["met"] is not None]
    apart = max(abs(r["simulated"] - r["printed"]) for r in hits if not isinstance(r["printed"], str))
    device = rows["ATC", "16", "LLaMA-2-13B, device time, x"]
    turns = next(g for g in read("sim_speed")["goals"] if "turns, s" in g["name"])
    return (
        f"**The simulator held:** hit rates of the four models of the ATC paper (Fig. 13) are within {apart:.0f} points of the printed ones.",
        f"**The simulator did not:** reuse saves a factor of {device['simulated']:.2f} of 13B's device time, where the paper prints {device['printed']:.1f}, so costs do not fall. FIFO and LRU do not "
        f"differ. {turns['value']:.0f} s for CachedAttention's turns, where 60 are wanted.",
    )
