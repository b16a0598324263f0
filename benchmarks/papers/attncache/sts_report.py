"""Rows, tables and goals of the STS benchmark."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from typing import Any

from afterglow.bench.report import COUNTED, goal, show
from afterglow.model.encoder import BatchAttend
from benchmarks.papers.attncache.bootstrap import Resamples, error_of
from benchmarks.papers.attncache.judging import LEAST_RATE, LOSS, Found, Judge, Judges, Task, choose
from benchmarks.papers.attncache.measures import gamma
from benchmarks.papers.attncache.passes import Passes

SAMPLE, ROUNDS = 60, 5  # sentences that are timed, and how often
BESIDE = {
    ("+ layers (ours)", "AttnCache"): "hit_rate",
    ("mean maps", "AttnCache"): "spearman",
    ("mean maps, by layers", "+ layers (ours)"): "spearman",
    ("AttnCache-f", "SAN"): "spearman",
    ("AttnCache-f", "LazyFormer"): "spearman",
}
"""Methods that goals compare with another, and in what."""
ERRORS = ("loss", "unseen_loss", "hit_rate", "unseen_hit_rate")  # numbers of rows that have a standard error


def rows_of(
    task: Task, judges: Judges, found: list[Found], *, seed: int, times: bool, quick: bool
) -> list[dict[str, Any]]:
    """Make a row of each setting; with `times` the chosen ones are timed. Numbers are the test part's unless they say that they are the
    validation part's. `..._error` is a standard error over pairs of the test part, of a loss, that of the difference to the full model."""
    full, test = found[0], judges.test
    chosen = choose(found)
    sure = Sureness(test, Resamples(len(test.part.gold), seed), found, chosen)
    timed = time_chosen(task, judges, chosen, rounds=3 if quick else ROUNDS) if times else {}
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
            **sure.errors(f),
            "chosen": chosen[f.method] is f,
            "timed": f.method in timed and chosen[f.method] is f,
            "pairs": len(task.test.gold),
            "validation_pairs": len(task.validation.gold),
            "known_sentences_asked": round(float(test.known.mean()), 4),
        }
        if f.layers is not None:
            row["layer_thresholds"] = [round(float(threshold), 4) for threshold in f.layers]
        rows.append(row | (timed[f.method] if row["timed"] else {}))
    return rows


def time_chosen(task: Task, judges: Judges, chosen: dict[str, Found], *, rounds: int) -> dict[str, dict[str, float]]:
    """Time whole passes with each chosen setting beside the full model, and for some methods those of sentences that hit alone."""
    test = judges.test
    times = Passes(task.embedder.embedder, spread(task.test.asked)).times(
        {name: f.make for name, f in chosen.items()}, rounds, {name: f.model for name, f in chosen.items()}
    )
    found = {}
    for name, of in times.items():
        found[name] = {f"speedup_{key}": round(of[key], 3) for key in ("attention", "whole")}
        found[name]["seconds"] = round(of["seconds"], 4)
    for name in ("AttnCache", "+ layers (ours)", "AttnCache-f"):
        hits = [any(layers) for layers in test.passes.run(chosen[name].make).layers]
        if any(hits):
            some = spread([ids for ids, hit in zip(task.test.asked, hits, strict=True) if hit])
            both = {"full": BatchAttend, name: chosen[name].make}
            alone = Passes(task.embedder.embedder, some).times(both, rounds)[name]
            found[name] |= {f"speedup_{key}_hits": round(alone[key], 3) for key in ("attention", "whole")}
    return found


class Sureness:
    """Standard errors over pairs of what methods did on the test part of one task."""

    def __init__(self, test: Judge, resamples: Resamples, found: list[Found], chosen: dict[str, Found]) -> None:
        self._draws = {id(f): test.draws(f.test, resamples) for f in found}
        self._full, self._chosen = self._draws[id(found[0])], chosen

    def errors(self, f: Found) -> dict[str, Any]:
        """Make the parts of a row. `error_beside` has errors of differences to chosen settings of other methods, in what `BESIDE` says."""
        own = self._draws[id(f)]
        found: dict[str, Any] = {
            "loss_error": rounded(error_of(own["spearman"] - self._full["spearman"]), 3),
            "unseen_loss_error": rounded(error_of(own["unseen_spearman"] - self._full["unseen_spearman"]), 3),
            "hit_rate_error": rounded(error_of(own["hit_rate"]), 4),
            "unseen_hit_rate_error": None
            if math.isnan(f.test.unseen_rate)
            else rounded(error_of(own["unseen_hit_rate"]), 4),
        }
        beside = {
            other: rounded(error_of(own[what] - self._draws[id(self._chosen[other])][what]), 4)
            for (method, other), what in BESIDE.items()
            if method == f.method
        }
        return found | ({"error_beside": beside} if beside else {})


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
        "loss_error",
        "unseen_loss",
        "hit_rate",
        "known_hit_rate",
        "unseen_hit_rate",
        "speedup_attention",
        "speedup_whole",
    )
    picked = [r for r in rows if r["chosen"]]
    show(f"{model}: table 1", wide, [["" if r.get(c) is None else r[c] for c in wide] for r in picked])
    keys = (
        "spearman",
        "loss",
        "loss_error",
        "unseen_loss",
        "hit_rate",
        "unseen_hit_rate",
        "attention",
        "whole",
        "gamma",
    )
    show(
        f"{model}: mean over tasks",
        ("method", *(key.replace("_", " ") for key in keys)),
        [[m["method"], *("" if m[k] is None else round(m[k], 3) for k in keys)] for m in means(rows)],
    )


def means(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Of each method over the tasks; `gamma` of its mean scores and attention speed-up. What a task lacks has no mean."""
    picked = [r for r in rows if r["chosen"]]
    full = statistics.mean(r["spearman"] for r in picked if r["method"] == "full")
    out = []
    for method in dict.fromkeys(r["method"] for r in picked):
        own = [r for r in picked if r["method"] == method]
        keys = ("spearman", "loss", "unseen_loss", "hit_rate", "known_hit_rate", "unseen_hit_rate")
        mean = {key: mean_of(own, key) for key in keys}
        errors = {f"{key}_error": mean_error(own, key) for key in ERRORS}
        attention, whole = (mean_of(own, f"speedup_{key}") for key in ("attention", "whole"))
        value = None
        if attention is not None and abs(attention - 1) > 0.005:
            value = gamma(full / 100, mean["spearman"] / 100, attention)
        out.append({"method": method, **mean, **errors, "attention": attention, "whole": whole, "gamma": value})
    return out


def mean_of(rows: Sequence[dict[str, Any]], key: str) -> Any:
    """Compute the mean over tasks; None where one of them has no such number."""
    values: list[Any] = [row.get(key) for row in rows]
    return None if None in values else statistics.mean(values)


def mean_error(rows: Sequence[dict[str, Any]], key: str) -> float | None:
    """Compute the standard error of a mean over tasks, whose pairs are drawn each for itself; None where one is not known."""
    return pooled([row[f"{key}_error"] for row in rows])


def pooled(each: Sequence[float | None]) -> float | None:
    """Compute the standard error of a mean of independent numbers from theirs; None where one is not known."""
    known = [error for error in each if error is not None]
    return math.hypot(*known) / len(known) if known and len(known) == len(each) else None


def goals_of(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Judge the means over the tasks. `error` is the standard error over the pairs of the test parts, at the settings as they were chosen."""
    of = {m["method"]: m for m in means(rows)}
    paper, ours = of["AttnCache"], of["+ layers (ours)"]
    goals = []
    for name, mean in (("as published", paper), ("ours", ours)):
        unseen = f"hit rate on sentences that are not in the database, {name}"
        goals += [
            _goal(f"hit rate, {name}", mean["hit_rate"], LEAST_RATE, mean["hit_rate_error"], least=True),
            _goal(f"points lost at it, {name}", mean["loss"], LOSS, mean["loss_error"], least=False),
            _goal(unseen, mean["unseen_hit_rate"], LEAST_RATE, mean["unseen_hit_rate_error"], least=True),
        ]
    more = ours["hit_rate"] - paper["hit_rate"]
    error = pooled([row["error_beside"]["AttnCache"] for row in chosen_rows(rows, "+ layers (ours)")])
    goals.append(_goal("hit rate, ours less that as published", more, 0.0, error, least=True))
    for control, looked_up, name in (
        ("mean maps", "AttnCache", ""),
        ("mean maps, by layers", "+ layers (ours)", ", ours"),
    ):
        beyond, error = at_the_same_hits(rows, control, looked_up)
        title = f"points that means of all maps lose, less those of found maps, at the same hits{name}"
        goals.append(_goal(title, beyond, 0.0, error, least=True))
    share, error = loss_beside_shared(rows)
    goals.append(_goal("loss of AttnCache-f over LazyFormer's and SAN's lesser", share, 1.0, error, least=False))
    return goals


def _goal(name: str, value: float, wanted: float, error: float | None, *, least: bool) -> dict[str, Any]:
    return goal(name, value, wanted, least=least, spread=COUNTED) | {"error": error}


def chosen_rows(rows: list[dict[str, Any]], method: str) -> list[dict[str, Any]]:
    """List the rows of a method's chosen settings, one for each task."""
    return [row for row in rows if row["chosen"] and row["method"] == method]


def at_the_same_hits(rows: list[dict[str, Any]], control: str, looked_up: str) -> tuple[float, float | None]:
    """Compute what `control` loses more than `looked_up` at the thresholds that were chosen for that, mean over the tasks, and its error."""
    found = chosen_rows(rows, looked_up)
    same = {(row["task"], row["threshold"]): row for row in rows if row["method"] == control}
    means = [same[row["task"], row["threshold"]] for row in found]
    beyond = statistics.mean(other["loss"] - row["loss"] for other, row in zip(means, found, strict=True))
    return beyond, pooled([row["error_beside"][looked_up] for row in means])


def loss_beside_shared(rows: list[dict[str, Any]]) -> tuple[float, float | None]:
    """Divide AttnCache-f's mean loss by that of SAN or LazyFormer, which of them loses less. The error is of first order, with what the
    two losses of a task have in common."""
    own = chosen_rows(rows, "AttnCache-f")
    shared = {name: chosen_rows(rows, name) for name in ("SAN", "LazyFormer")}
    name = min(shared, key=lambda method: statistics.mean(row["loss"] for row in shared[method]))
    base = statistics.mean(row["loss"] for row in shared[name])
    share = statistics.mean(row["loss"] for row in own) / base
    errors = []
    for row, other in zip(own, shared[name], strict=True):
        known = (row["loss_error"], other["loss_error"], row["error_beside"][name])
        if None in known:
            return share, None
        mine, its, apart = known
        together = (mine**2 + its**2 - apart**2) / 2
        errors.append(mine**2 + (share * its) ** 2 - 2 * share * together)
    return share, math.sqrt(max(0.0, sum(errors))) / len(errors) / abs(base)
