"""Rows, tables and goals of the STS benchmark."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from typing import Any

from afterglow.bench.report import COUNTED, goal, show
from afterglow.model.encoder import BatchAttend
from benchmarks.papers.attncache.judging import LEAST_RATE, LOSS, Found, Judges, Task, choose
from benchmarks.papers.attncache.measures import gamma
from benchmarks.papers.attncache.passes import Passes

SAMPLE, ROUNDS = 60, 5  # sentences that are timed, and how often


def rows_of(task: Task, judges: Judges, found: list[Found], layered: Any, *, quick: bool) -> list[dict[str, Any]]:
    """Rows, the chosen ones timed. Numbers are the test part's unless they say that they are the validation part's."""
    full = found[0]
    chosen = choose(found)
    test = judges.test
    rounds = 3 if quick else ROUNDS
    layered.threshold = chosen["AttnCache-f"].setting
    times = Passes(task.embedder.embedder, spread(task.test.asked)).times(
        {name: f.make for name, f in chosen.items()}, rounds, {name: f.model for name, f in chosen.items()}
    )
    hit_only: dict[str, dict[str, float]] = {}
    for name in ("AttnCache", "+ layers (ours)", "AttnCache-f"):
        hits = [any(layers) for layers in test.passes.run(chosen[name].make).layers]
        if any(hits):
            some = spread([ids for ids, hit in zip(task.test.asked, hits, strict=True) if hit])
            both = {"full": BatchAttend, name: chosen[name].make}
            hit_only[name] = Passes(task.embedder.embedder, some).times(both, rounds)[name]
    rows = []
    for f in found:
        row: dict[str, Any] = {
            "model": task.model,
            "weights": "float32" if task.embedder.embedder.model.quantization == "none" else "int8",
            "task": task.name,
            "method": f.method,
            "threshold": f.setting,
            "validation_loss": round(full.validation.spearman - f.validation.spearman, 3),
            "validation_hit_rate": round(f.validation.rate, 4),
            "spearman": round(f.test.spearman, 3),
            "loss": round(full.test.spearman - f.test.spearman, 3),
            "unseen_loss": rounded(full.test.unseen_spearman - f.test.unseen_spearman, 3),
            "hit_rate": round(f.test.rate, 4),
            "known_hit_rate": rounded(f.test.known_rate, 4),
            "unseen_hit_rate": rounded(f.test.unseen_rate, 4),
            "error": round(f.test.error, 5),
            "chosen": chosen[f.method] is f,
            "pairs": len(task.test.gold),
            "validation_pairs": len(task.validation.gold),
            "known_sentences_asked": round(float(test.known.mean()), 4),
        }
        if chosen[f.method] is f:
            row |= {f"speedup_{name}": round(value, 3) for name, value in times[f.method].items() if name != "seconds"}
            row["seconds"] = round(times[f.method]["seconds"], 4)
            if f.method in hit_only:
                row |= {f"speedup_{key}_hits": round(hit_only[f.method][key], 3) for key in ("attention", "whole")}
        rows.append(row)
    return rows


def rounded(value: float, digits: int) -> float | None:
    """Round a number; None for NaN, which JSON does not have."""
    return None if math.isnan(value) else round(value, digits)


def spread(sentences: Sequence[list[int]]) -> list[list[int]]:
    """Choose about `SAMPLE` sentences, spread over all."""
    return list(sentences[:: max(1, len(sentences) // SAMPLE)])[:SAMPLE]


def show_model(model: str, rows: list[dict[str, Any]], figure: str | None) -> None:
    if figure == "distances":
        columns = ("task", "of", "p5", "p25", "p50", "p75", "p95")
        show(
            f"{model}: total variation between maps of two sentences", columns, [[r[c] for c in columns] for r in rows]
        )
        return
    if figure == "thresholds":
        columns = ("task", "method", "threshold", "hit_rate", "spearman", "loss", "error")
        picked = [r for r in rows if r["threshold"] is not None]
        show(f"{model}: figure 5", columns, [[r[c] for c in columns] for r in picked])
        return
    wide = (
        "task",
        "method",
        "threshold",
        "validation_loss",
        "loss",
        "unseen_loss",
        "hit_rate",
        "known_hit_rate",
        "unseen_hit_rate",
        "speedup_attention",
        "speedup_whole",
    )
    picked = [r for r in rows if r["chosen"]]
    show(f"{model}: table 1", wide, [["" if r.get(c) is None else r[c] for c in wide] for r in picked])
    keys = ("spearman", "loss", "unseen_loss", "hit_rate", "unseen_hit_rate", "attention", "whole", "gamma")
    show(
        f"{model}: mean over tasks",
        ("method", *(key.replace("_", " ") for key in keys)),
        [[m["method"], *("" if m[k] is None else round(m[k], 3) for k in keys)] for m in means(rows)],
    )


def means(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Of each method over the tasks; `gamma` of its mean scores and attention speed-up."""
    picked = [r for r in rows if r["chosen"]]
    full = statistics.mean(r["spearman"] for r in picked if r["method"] == "full")
    out = []
    for method in dict.fromkeys(r["method"] for r in picked):
        own = [r for r in picked if r["method"] == method]
        mean = {key: statistics.mean(r[key] for r in own) for key in ("spearman", "loss", "hit_rate")}
        rates = {
            key: None if any(r[key] is None for r in own) else statistics.mean(r[key] for r in own)
            for key in ("unseen_loss", "known_hit_rate", "unseen_hit_rate")
        }
        attention, whole = (statistics.mean(r[f"speedup_{key}"] for r in own) for key in ("attention", "whole"))
        value = gamma(full / 100, mean["spearman"] / 100, attention) if abs(attention - 1) > 0.005 else float("nan")
        out.append({"method": method, **mean, **rates, "attention": attention, "whole": whole, "gamma": value})
    return out


def at_the_same_hits(rows: list[dict[str, Any]]) -> tuple[float, float]:
    """Compute mean losses over the tasks at AttnCache's chosen thresholds: its own, and with means of all maps instead of found ones."""
    chosen = [row for row in rows if row["chosen"] and row["method"] == "AttnCache"]
    means = {(row["task"], row["threshold"]): row["loss"] for row in rows if row["method"] == "mean maps"}
    return (
        statistics.mean(row["loss"] for row in chosen),
        statistics.mean(means[row["task"], row["threshold"]] for row in chosen),
    )


def goals_of(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    of = {m["method"]: m for m in means(rows)}
    paper, ours = of["AttnCache"], of["+ layers (ours)"]
    same, not_looked_up = at_the_same_hits(rows)
    goals = []
    for name, mean in (("as published", paper), ("ours", ours)):
        goals += [
            goal(f"hit rate, {name}", mean["hit_rate"], LEAST_RATE, least=True, spread=COUNTED),
            goal(f"points lost at it, {name}", mean["loss"], LOSS, least=False, spread=COUNTED),
            goal(
                f"hit rate on sentences that are not in the database, {name}",
                mean["unseen_hit_rate"],
                LEAST_RATE,
                least=True,
                spread=COUNTED,
            ),
        ]
    return [
        *goals,
        goal(
            "hit rate, ours less that as published",
            ours["hit_rate"] - paper["hit_rate"],
            0.0,
            least=True,
            spread=COUNTED,
        ),
        goal(
            "points that means of all maps lose, less those of found maps, at the same hits",
            not_looked_up - same,
            0.0,
            least=True,
            spread=COUNTED,
        ),
        goal(
            "loss of AttnCache-f over LazyFormer's and SAN's lesser",
            of["AttnCache-f"]["loss"] / min(of["SAN"]["loss"], of["LazyFormer"]["loss"]),
            1.0,
            least=False,
            spread=COUNTED,
        ),
    ]
