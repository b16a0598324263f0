#!/usr/bin/env python3
"""Attention maps of other sentences on semantic textual similarity: table 1 and figures 1 and 5 of AttnCache, and the shapes of
large models.

For each task a database is made of 1,000 sentences, and others are embedded with it. Thresholds are chosen on a validation part of
the data, and what they do is reported on a test part: no pair is in two of the three. Hits on sentences that are literally in the
database are reported apart from those on unseen ones. Compared are the full model, SAN,
LazyFormer, AttnCache-f, AttnCache as published, and this program's own, one change at a time: features that keep positions,
the mean of several neighbours' maps, and layers accepted one by one. The hit rate is the share of all layers of all sentences
that computed no queries and keys; where sentences are taken whole, it is the share of the sentences.

Besides, as in table 2: attention or whole layers left out of as large a part of the layers as 4 are of 28, chosen by how little
they change what goes through them, and weights of 8 bits (`--quantization int8` does everything with these).

Data: --data (or AFTERGLOW_DATA), a folder with `sts/sts12.tsv` to `sts15.tsv`, `stsb_train.tsv`, `stsb_dev.tsv` and
`stsb_test.tsv`: lines of score, sentence, sentence. --tasks NAME takes any other NAME.tsv there. --shapes needs none.
"""

from __future__ import annotations

import os

os.environ.setdefault("OMP_WAIT_POLICY", "passive")
os.environ.setdefault("COLUMNS", "140")  # of tables that go into a file

import dataclasses
import json
import math
import statistics
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from afterglow.bench.report import COUNTED, arguments, finish, goal, show
from afterglow.cli.environment import find_embedding_model
from afterglow.config import QuantizationName
from afterglow.errors import ConfigError
from afterglow.memo.attend import AttentionMemo
from afterglow.memo.baselines import (
    DropAttend,
    SharedAttend,
    build_layers,
    layer_similarity,
    lazyformer,
    most_alike,
    recorded_maps,
    redundancy,
    san_sharing,
    without_layers,
)
from afterglow.memo.build import Builder
from afterglow.memo.database import MemoDatabase
from afterglow.memo.settings import MemoOptions
from afterglow.memo.texts import TextEmbedder, load_embedding_model, memo_identity, text_embedder
from afterglow.model.decoder import Attend
from afterglow.model.encoder import BatchAttend, Model
from afterglow.model.linear import int8_levels
from afterglow.text import Tokenizer
from attncache_parts import shapes
from attncache_parts.distances import distances, unique
from attncache_parts.measures import CLOCK, TASKS, Pair, gamma, now, read_pairs, score, split
from attncache_parts.passes import Make, Passes, Watched

Numbers = NDArray[np.float64]
LOSS = 2.0  # points of Spearman x 100 that a method may cost: the paper's
FAR = 6.0  # with so many points lost, lower thresholds are not looked at
LEAST_RATE = 0.30
THRESHOLDS = (0.995, 0.99, 0.98, 0.97, 0.96, 0.95, 0.93, 0.9, 0.87, 0.85)  # figure 5's
RATES = tuple(np.arange(0.05, 1.001, 0.025).round(3).tolist())  # and those at which so many sentences are taken
LAYER_THRESHOLDS = (0.99, 0.98, 0.97, 0.96, 0.95, 0.93, 0.9, 0.85)
LAYERED_THRESHOLDS = (0.7, 0.6, 0.5)  # of AttnCache-f
DROPPED = 4 / 28  # of all layers: table 2 does not say how many
SAMPLE, ROUNDS = 60, 5  # sentences that are timed, and how often
VARIANTS: dict[str, MemoOptions] = {
    "AttnCache": MemoOptions.of_paper(),
    "+ positions": MemoOptions(accept="sentence", neighbours=1),
    "+ neighbours": MemoOptions(accept="sentence"),
    "+ layers (ours)": MemoOptions(),
}


@dataclass(frozen=True, slots=True)
class Part:
    """Sentences of pairs, tokenised, and the scores of the pairs."""

    asked: list[list[int]]
    gold: list[float]


@dataclass(frozen=True, slots=True)
class Task:
    """One data set: what databases are made of, pairs to choose settings by, and pairs to report on."""

    name: str
    model: str
    embedder: TextEmbedder
    known: list[list[int]]
    validation: Part
    test: Part
    narrow: Model | None  # the same with weights of 8 bits


@dataclass(frozen=True, slots=True)
class Judged:
    """What a method did on one part. What there is nothing to count for is not a number."""

    spearman: float
    unseen_spearman: float  # of the pairs of two sentences that are not in the database
    rate: float
    error: float  # mean 1 - cosine to the full model's vectors
    known_rate: float  # the rate among sentences that are literally in the database
    unseen_rate: float  # and among the others


@dataclass(frozen=True, slots=True)
class Found:
    """What a method did at one setting."""

    method: str
    setting: float | None
    validation: Judged
    test: Judged
    make: Make
    model: Model | None = None  # where it is not the task's


class Judge:
    """The full model's vectors of one part, and what others lose against them."""

    def __init__(self, task: Task, part: Part) -> None:
        self.part = part
        self.passes = Passes(task.embedder.embedder, part.asked)
        self.exact = self.passes.run(BatchAttend)
        known = {tuple(ids) for ids in task.known}
        self.known: NDArray[np.bool_] = np.array([tuple(ids) in known for ids in part.asked])
        self._unseen_pairs = ~self.known.reshape(-1, 2).any(1)

    def judged(self, vectors: Tensor, hits: Numbers, rate: float | None = None) -> Judged:
        """`hits` [sentences]: the share of layers that took maps. `rate`: of methods that have no hits."""
        rows = torch.from_numpy(np.repeat(self._unseen_pairs, 2))
        unseen_gold = [gold for gold, unseen in zip(self.part.gold, self._unseen_pairs.tolist(), strict=True) if unseen]
        return Judged(
            score(self.part.gold, vectors),
            score(unseen_gold, vectors[rows]),
            float(hits.mean()) if rate is None else rate,
            float(1 - (vectors * self.exact.vectors).sum(1).mean()),
            float(hits[self.known].mean()) if rate is None and self.known.any() else float("nan"),
            float(hits[~self.known].mean()) if rate is None and not self.known.all() else float("nan"),
        )

    def run(self, make: Make, rate: float | None = None, model: Model | None = None) -> Judged:
        result = self.passes.run(make, model=model)
        return self.judged(result.vectors, result.layers.mean(1), rate)


@dataclass(frozen=True, slots=True)
class Judges:
    """One for each part that is asked."""

    validation: Judge
    test: Judge

    def __iter__(self) -> Iterator[Judge]:
        return iter((self.validation, self.test))


def main() -> int:
    parser = arguments("attncache_sts", __doc__ or "")
    parser.add_argument("--data", type=Path, default=os.environ.get("AFTERGLOW_DATA"), metavar="DIR", help="see above")
    parser.add_argument(
        "--tasks",
        nargs="+",
        default=None,
        help=f"default: {', '.join(TASKS)}; --quick: stsb; or any TASK.tsv of --data",
    )
    parser.add_argument("--model", nargs="+", default=["minilm"], help="minilm, bundled, or model directories")
    parser.add_argument("--build", type=int, default=1000, help="sentences of a database (default 1000)")
    parser.add_argument(
        "--pairs",
        type=int,
        default=250,
        help="pairs of each of the two parts that are asked; 0: all there are (default 250)",
    )
    parser.add_argument(
        "--quantization", choices=("none", "int8"), default="none", help="of the weights (default: none)"
    )
    parser.add_argument("--resume", action="store_true", help="keep what --json FILE has, and do the rest")
    parser.add_argument("--steps", type=int, default=600, help="of a projector's training (default 600)")
    parser.add_argument(
        "--figure", choices=("thresholds", "distances"), help="only the rows of figure 5, or of figure 1"
    )
    parser.add_argument("--shapes", action="store_true", help="only one layer of large models, with random weights")
    parser.add_argument("--plot", type=Path, metavar="DIR", help="draw the figures; needs matplotlib")
    options = parser.parse_args()
    if options.threads:
        torch.set_num_threads(options.threads)
    if options.shapes:
        rows, goals = shapes.measure(quick=options.quick, seed=options.seed)
        finish(options, rows, goals, clock=CLOCK)
        return 0
    if options.data is None:
        parser.error("no data: give --data, or set AFTERGLOW_DATA")
    rows, goals = kept_rows(options), []
    names = options.tasks or (["stsb"] if options.quick else TASKS)
    for name in names:
        read_pairs(Path(options.data), name)  # what is missing is said before anything is measured
    for model in options.model:
        done = {row["task"] for row in rows if row["model"] == model}
        missing = [name for name in names if name not in done]
        embedder, narrow = load(model, options.quantization, both=bool(missing)) if missing else (None, None)
        for name in missing:
            assert embedder is not None
            task = read(options, name, model, embedder, narrow)
            began = now()
            if options.figure == "distances":
                rows += distances(task.model, task.name, task.embedder.embedder, task.known)
            else:
                rows += measure(task, options.steps, options.seed, quick=options.quick)
            print(f"  {now() - began:.0f} s", flush=True)
            if options.json is not None:  # a task takes long: what is known is kept
                finish(options, rows, [], complete=False, **settings_of(options))
        own = [row for row in rows if row["model"] == model]
        show_model(model, own, options.figure)
        if options.figure is None and model == "minilm":
            goals = goals_of(own)
    if options.plot is not None:
        from attncache_parts.plots import draw

        print("drawn:", *draw(options.plot, rows))
    finish(options, rows, goals, clock=CLOCK, **settings_of(options))
    return 0


def settings_of(options: Any) -> dict[str, Any]:
    """What rows depend on, besides the machine."""
    return {name: getattr(options, name) for name in ("build", "pairs", "steps", "quantization", "figure")}


def kept_rows(options: Any) -> list[dict[str, Any]]:
    """Rows of an earlier run, with --resume. Raises ConfigError where it had other settings."""
    if not options.resume or options.json is None or not options.json.is_file():
        return []
    before = json.loads(options.json.read_text())
    wanted = {**settings_of(options), "seed": options.seed}
    if any(before.get(name) != value for name, value in wanted.items()):
        raise ConfigError(
            f"{options.json} was made with other settings than {wanted}; delete it, or leave --resume out"
        )
    rows: list[dict[str, Any]] = before["rows"]
    return rows


def load(model: str, quantization: QuantizationName, *, both: bool) -> tuple[TextEmbedder, Model | None]:
    """The embedder, and its model with weights of 8 bits beside it where they are not its own."""
    if model == "bundled":
        folder = Path(str(files("afterglow") / "assets" / "model"))
    elif model == "minilm":
        folder = find_embedding_model(None)[0]
    else:
        folder = Path(model)
        if not folder.is_dir():
            raise ConfigError(f"{model}: neither minilm, bundled nor a model directory")
    narrow = None
    if both and quantization == "none" and int8_levels():
        narrow = load_embedding_model(folder, dtype="float32", quantization="int8")
    own = load_embedding_model(folder, dtype="float32", quantization=quantization)
    return text_embedder(own, folder, Tokenizer(folder), str(folder)), narrow


def read(options: Any, name: str, model: str, embedder: TextEmbedder, narrow: Model | None) -> Task:
    pairs = min(options.pairs or 60, 60) if options.quick else options.pairs
    build = min(options.build, 300) if options.quick else options.build
    parts = split(Path(options.data), name, build, pairs, options.seed)
    most = embedder.embedder.max_tokens

    def part(pairs: Sequence[Pair]) -> Part:
        return Part([embedder.tokens(text, most) for pair in pairs for text in pair[1:]], [pair[0] for pair in pairs])

    known = [embedder.tokens(text, most) for text in parts.known]
    return Task(name, model, embedder, known, part(parts.validation), part(parts.test), narrow)


def measure(task: Task, steps: int, seed: int, *, quick: bool) -> list[dict[str, Any]]:
    """All methods on one task: a row for each setting, with times where a setting was chosen."""
    judges = Judges(Judge(task, task.validation), Judge(task, task.test))
    found: list[Found] = []

    def judge(
        method: str, setting: float | None, make: Make, rate: float | None = None, model: Model | None = None
    ) -> Found:
        validation, test = (one.run(make, rate, model) for one in judges)
        found.append(Found(method, setting, validation, test, make, model))
        return found[-1]

    full = judge("full", None, BatchAttend, 0.0)
    print(
        f"{task.model}, {task.name}: full model {full.validation.spearman:.2f} on {len(task.validation.gold)} pairs to choose "
        f"by, {full.test.spearman:.2f} on {len(task.test.gold)} to report on",
        flush=True,
    )
    samples = recorded_maps(task.embedder.embedder, task.known[:50])
    layers = task.embedder.embedder.model.spec.layers
    lazy = lazyformer(layers)
    shared = sum(source != layer for layer, source in enumerate(lazy))
    for name, sources in (("SAN", san_sharing(layer_similarity(samples), shared)), ("LazyFormer", lazy)):

        def make(model: Any, positions: Any, lengths: Any, sources: Sequence[int] = sources) -> SharedAttend:
            return SharedAttend(sources, model, positions, lengths)

        judge(name, None, make, shared / layers)
    drop(task, judge)
    with tempfile.TemporaryDirectory() as folder:
        built: dict[str, MemoDatabase] = {}
        for variant, memo_options in VARIANTS.items():
            built[variant] = build(task, Path(folder), memo_options, steps, seed)
            if memo_options.accept == "sentence":
                found += whole(judges, built[variant], variant)
            else:
                for threshold in LAYER_THRESHOLDS:
                    one = judge(variant, threshold, AttentionMemo(built[variant], threshold).attend)
                    if full.validation.spearman - one.validation.spearman > FAR:
                        break
        layered = build_layers(
            task.embedder.embedder, built["AttnCache"].store, unique(task.known), steps=steps // 2, seed=seed
        )
        for threshold in LAYERED_THRESHOLDS:
            layered.threshold = threshold
            judge("AttnCache-f", threshold, layered.attend)
        return rows_of(task, judges, found, layered, quick=quick)


def drop(task: Task, judge: Callable[..., Found]) -> None:
    """Table 2's others: attention left out, layers left out, weights of 8 bits."""
    model = task.embedder.embedder.model
    count = max(1, round(DROPPED * model.spec.layers))
    attention, whole = redundancy(task.embedder.embedder, task.known[:50])

    def make(
        model: Any, positions: Any, lengths: Any, left_out: Sequence[int] = most_alike(attention, count)
    ) -> Attend:
        return DropAttend(left_out, BatchAttend(model, positions, lengths))

    rate = count / model.spec.layers
    judge("AttnDrop", None, make, rate)
    judge("BlockDrop", None, BatchAttend, rate, without_layers(model, most_alike(whole, count)))
    if task.narrow is not None:
        judge("int8", None, BatchAttend, 0.0, task.narrow)


def build(task: Task, folder: Path, options: MemoOptions, steps: int, seed: int) -> MemoDatabase:
    """A database of the task's sentences. One that differs only in what it accepts is the same on disk."""
    about = memo_identity(task.embedder.embedder.model, Path(task.embedder.name), task.embedder.template)
    place = folder / options.projector
    if not place.is_dir():
        # Calibrated for what the last variant does; whole sentences are accepted without.
        held = 100 if options.projector == "positions" else 10
        base = MemoOptions(projector=options.projector, steps=steps, seed=seed, held_out=held)
        made = Builder(task.embedder.embedder, place, base, **about).run(task.known)
        print(f"  built {place.name}: {len(made.store)} sentences", flush=True)
    database = MemoDatabase.open(place, **about)
    database.settings = dataclasses.replace(database.settings, options=options)
    return database


def whole(judges: Judges, database: MemoDatabase, variant: str) -> list[Found]:
    """Sentences taken whole: one pass over each part in which all take maps serves every threshold."""
    taken, similarities = [], []
    for one in judges:
        memo = Watched(AttentionMemo(database, -1e9))
        taken.append(one.passes.run(memo.attend))
        similarity = np.empty(len(one.part.asked))
        similarity[[index for batch in one.passes.batches for index in batch]] = memo.similarity
        similarities.append(similarity)
    to_choose_by = similarities[0][np.isfinite(similarities[0])]
    at_rates = [float(np.quantile(to_choose_by, 1 - rate)) for rate in RATES]
    found = []
    for threshold in (*THRESHOLDS, *at_rates):
        judged = []
        for one, result, similarity in zip(judges, taken, similarities, strict=True):
            hits = (similarity >= threshold) & result.layers.any(1)
            vectors = torch.where(torch.from_numpy(hits)[:, None], result.vectors, one.exact.vectors)
            judged.append(one.judged(vectors, hits.astype(float)))
        validation, test = judged
        found.append(Found(variant, threshold, validation, test, AttentionMemo(database, threshold).attend))
    return found


def choose(found: Sequence[Found]) -> dict[str, Found]:
    """Each method's setting, by the validation part alone: the highest hit rate that costs at most `LOSS` points there
    (AttnCache-f: the nearest to the published hit rate, as it may cost more at any)."""
    chosen: dict[str, Found] = {}
    least = found[0].validation.spearman - LOSS
    for method in dict.fromkeys(f.method for f in found):
        settings = [f for f in found if f.method == method]
        cheap = [f for f in settings if f.validation.spearman >= least]
        if method == "AttnCache-f":
            chosen[method] = min(settings, key=lambda f: abs(f.validation.rate - LEAST_RATE))
        elif cheap:
            chosen[method] = max(cheap, key=lambda f: f.validation.rate)
        else:
            chosen[method] = max(settings, key=lambda f: f.validation.spearman)
    return chosen


def rows_of(task: Task, judges: Judges, found: list[Found], layered: Any, *, quick: bool) -> list[dict[str, Any]]:
    """Rows, the chosen ones timed. What is not said to be of the validation part is of the test part."""
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
        hits = test.passes.run(chosen[name].make).layers.any(1)
        if hits.any():
            some = spread([ids for ids, hit in zip(task.test.asked, hits.tolist(), strict=True) if hit])
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
    """None of what is not a number: JSON has none."""
    return None if math.isnan(value) else round(value, digits)


def spread(sentences: Sequence[list[int]]) -> list[list[int]]:
    """About `SAMPLE` of them, from all over."""
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


def goals_of(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    of = {m["method"]: m for m in means(rows)}
    paper, ours = of["AttnCache"], of["+ layers (ours)"]
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
            "loss of AttnCache-f over LazyFormer's and SAN's lesser",
            of["AttnCache-f"]["loss"] / min(of["SAN"]["loss"], of["LazyFormer"]["loss"]),
            1.0,
            least=False,
            spread=COUNTED,
        ),
    ]


if __name__ == "__main__":
    raise SystemExit(main())
