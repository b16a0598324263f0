#!/usr/bin/env python3
"""Attention maps of other sentences on semantic textual similarity: table 1 and figures 1 and 5 of AttnCache, and the shapes of
large models.

For each task a database is made of 1,000 sentences, and others are embedded with it. Thresholds are chosen on a validation part of
the data, and what they do is reported on a test part: no pair is in two of the three. Hits on sentences that are literally in the
database are reported apart from those on unseen ones. Compared are the full model, SAN,
LazyFormer, AttnCache-f, AttnCache as published, and this program's own, one change at a time: features that keep positions,
the mean of several neighbours' maps, and layers accepted one by one. AttnCache-f searches in each layer, with a threshold for each: maps
of any layer alone keep the embeddings of 100 sentences of the validation part at the same cosine to the exact ones, its setting.
"mean maps" is a control: where AttnCache hits, each layer takes the mean of all maps of as many tokens instead of the found ones; "mean
maps, by layers" does this where this program's own takes maps. The hit rate is the share of all layers of all sentences
that computed no queries and keys; where sentences are taken whole, it is the share of the sentences.

Errors are over pairs: 1,000 resamples of the test part, the same for all methods, at the settings as they were chosen.

Besides, as in table 2: attention or whole layers left out of as large a part of the layers as 4 are of 28, chosen by how little
they change what goes through them, and weights of 8 and 4 bits (`--quantization int8` does everything with these).

Data: --data (or AFTERGLOW_DATA), a folder with `sts/sts12.tsv` to `sts15.tsv`, `stsb_train.tsv`, `stsb_dev.tsv` and
`stsb_test.tsv`: lines of score, sentence, sentence. --tasks NAME takes any other NAME.tsv there. --shapes needs none.
"""

from __future__ import annotations

import os

os.environ.setdefault("OMP_WAIT_POLICY", "passive")
os.environ.setdefault("COLUMNS", "140")  # of tables that go into a file
import dataclasses
import json
import tempfile
from collections.abc import Callable, Sequence
from functools import partial
from importlib.resources import files
from pathlib import Path
from typing import Any

import numpy as np
import torch

from afterglow.bench.report import arguments, finish
from afterglow.choices import QuantizationName
from afterglow.errors import AfterglowError, ConfigError
from afterglow.library.locate import REAL, find_embedding_model, find_model
from afterglow.memo.build import Builder
from afterglow.memo.database import MemoDatabase
from afterglow.memo.map_attention import AttentionMemo
from afterglow.memo.options import MemoOptions
from afterglow.memo.texts import TextEmbedder, load_embedding_model, memo_identity, text_embedder
from afterglow.model.decoder import Attend
from afterglow.model.encoder import BatchAttend, Model
from afterglow.model.linear import int8_levels
from afterglow.text import Tokenizer
from benchmarks.papers.attncache import shapes
from benchmarks.papers.attncache.baselines import (
    DropAttend,
    MeanMemo,
    SharedAttend,
    build_layers,
    layer_similarity,
    lazyformer,
    mean_maps,
    most_alike,
    recorded_maps,
    redundancy,
    san_sharing,
    without_layers,
)
from benchmarks.papers.attncache.bootstrap import Numbers
from benchmarks.papers.attncache.distances import distances, unique
from benchmarks.papers.attncache.judging import FAR, LEAST_RATE, Found, Judge, Judges, Part, Task, choose
from benchmarks.papers.attncache.layer_thresholds import LayerPromises
from benchmarks.papers.attncache.measures import CLOCK, TASKS, Pair, now, read_pairs, split
from benchmarks.papers.attncache.passes import Make, Watched
from benchmarks.papers.attncache.sts_report import goals_of, rows_of, show_model

THRESHOLDS = (0.995, 0.99, 0.98, 0.97, 0.96, 0.95, 0.93, 0.9, 0.87, 0.85)  # figure 5's
RATES = tuple(np.arange(0.05, 1.001, 0.025).round(3).tolist())  # and those at which so many sentences are taken
ROUNDING = 1e-4  # by which the similarities of one sentence in two batches may differ
LAYER_THRESHOLDS = (0.99, 0.98, 0.97, 0.96, 0.95, 0.93, 0.9, 0.85)
LAYERED_COSINES = (0.9999, 0.9997, 0.999, 0.998, 0.995, 0.99, 0.98, 0.97, 0.96, 0.95, 0.9, 0.85)  # of AttnCache-f
HELD_OUT = 100  # sentences that layers' thresholds are calibrated on, as many as for databases that accept by layers
DROPPED = 4 / 28  # of all layers: table 2 does not say how many
VARIANTS: dict[str, MemoOptions] = {
    "AttnCache": MemoOptions(projector="binned", accept="sentence", neighbours=1),
    "+ positions": MemoOptions(accept="sentence", neighbours=1),
    "+ neighbours": MemoOptions(accept="sentence"),
    "+ layers (ours)": MemoOptions(),
}


def main() -> int:
    parser = arguments("python -m benchmarks.papers.attncache.sts", __doc__ or "")
    parser.add_argument("--data", type=Path, default=os.environ.get("AFTERGLOW_DATA"), metavar="DIR", help="see above")
    parser.add_argument(
        "--tasks",
        nargs="+",
        default=None,
        help=f"default: {', '.join(TASKS)}; --quick: stsb; or any TASK.tsv of --data",
    )
    parser.add_argument("--model", nargs="+", default=["minilm"], help="minilm, smollm2, bundled, or directories")
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
    parser.add_argument(
        "--no-times",
        dest="times",
        action="store_false",
        help="quality alone: the machine may do other things meanwhile",
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
        read_pairs(Path(options.data), name)  # missing files are reported before anything is measured
    for model in options.model:
        done = {row["task"] for row in rows if row["model"] == model}
        missing = [name for name in names if name not in done]
        both = bool(missing) and options.figure != "distances"
        embedder, narrow = load(model, options.quantization, narrow=both) if missing else (None, {})
        for name in missing:
            assert embedder is not None
            task = read(options, name, model, embedder, narrow)
            began = now()
            if options.figure == "distances":
                rows += distances(task.model, task.name, task.embedder.embedder, task.known)
            else:
                rows += measure(task, options.steps, options.seed, times=options.times, quick=options.quick)
            print(f"  {now() - began:.0f} s", flush=True)
            if options.json is not None:  # a task takes long: its rows are kept
                finish(options, rows, [], complete=False, **settings_of(options))
        own = [row for row in rows if row["model"] == model]
        show_model(model, own, options.figure)
        if options.figure is None and options.model in (["minilm"], ["smollm2"]):
            goals = goals_of(own)
    if options.plot is not None:
        from benchmarks.plots.attncache import draw

        print("drawn:", *draw(options.plot, rows))
    finish(options, rows, goals, clock=CLOCK if options.times else None, **settings_of(options))
    return 0


def settings_of(options: Any) -> dict[str, Any]:
    """What rows depend on, besides the machine."""
    kept = {name: getattr(options, name) for name in ("build", "pairs", "steps", "quantization", "figure", "times")}
    # Older files have thresholds of another meaning.
    return kept | {"promise": "of the worst tenth", "thresholds_of_layers": "one each"}


def kept_rows(options: Any) -> list[dict[str, Any]]:
    """Rows of an earlier run, with --resume. Raises: ConfigError where it had other settings."""
    if not options.resume or options.json is None or not options.json.is_file():
        return []
    before = json.loads(options.json.read_text())
    wanted = {**settings_of(options), "seed": options.seed, "quick": options.quick}
    if any(before.get(name) != value for name, value in wanted.items()):
        raise ConfigError(
            f"{options.json} was made with other settings than {wanted}; delete it, or leave --resume out"
        )
    rows: list[dict[str, Any]] = before["rows"]
    return rows


def load(model: str, quantization: QuantizationName, *, narrow: bool) -> tuple[TextEmbedder, dict[str, Model]]:
    """The embedder, and with `narrow` its model with weights of 8 and 4 bits beside it where they are not its own."""
    if model == "bundled":
        folder = Path(str(files("afterglow") / "assets" / "model"))
    elif model == "minilm":
        folder = find_embedding_model(None)[0]
    elif model == "smollm2":
        folder = find_model(REAL)
    else:
        folder = Path(model)
        if not folder.is_dir():
            raise ConfigError(f"{model}: neither minilm, smollm2, bundled nor a model directory")
    kinds: tuple[QuantizationName, ...] = ("int8", "int4") if quantization == "none" and int8_levels() else ()
    others: dict[str, Model] = {}
    for kind in kinds if narrow else ():
        try:
            others[kind] = load_embedding_model(folder, dtype="float32", quantization=kind)
        except AfterglowError as error:
            print(f"{model} is not measured in {kind}: {error}", flush=True)
    own = load_embedding_model(folder, dtype="float32", quantization=quantization)
    return text_embedder(own, folder, Tokenizer(folder), str(folder)), others


def read(options: Any, name: str, model: str, embedder: TextEmbedder, narrow: dict[str, Model]) -> Task:
    pairs = min(options.pairs or 60, 60) if options.quick else options.pairs
    build = min(options.build, 300) if options.quick else options.build
    parts = split(Path(options.data), name, build, pairs, options.seed)
    most = embedder.embedder.max_tokens

    def part(pairs: Sequence[Pair]) -> Part:
        return Part([embedder.tokens(text, most) for pair in pairs for text in pair[1:]], [pair[0] for pair in pairs])

    known = [embedder.tokens(text, most) for text in parts.known]
    return Task(name, model, embedder, known, part(parts.validation), part(parts.test), narrow)


def measure(task: Task, steps: int, seed: int, *, times: bool, quick: bool) -> list[dict[str, Any]]:
    """All methods on one task: a row for each setting, and with `times` those of each that was chosen."""
    judges = Judges(Judge(task, task.validation), Judge(task, task.test))
    found: list[Found] = []

    def judge(
        method: str,
        setting: float | None,
        make: Make,
        rate: float | None = None,
        model: Model | None = None,
        layers: Numbers | None = None,
    ) -> Found:
        validation, test = (one.run(make, rate, model) for one in judges)
        found.append(Found(method, setting, validation, test, make, model, layers))
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
                found += whole(judges, partial(AttentionMemo, built[variant]), variant)
            else:
                for threshold in LAYER_THRESHOLDS:
                    one = judge(variant, threshold, AttentionMemo(built[variant], threshold).attend)
                    if full.validation.spearman - one.validation.spearman > FAR:
                        break
        means = mean_maps(built["AttnCache"].store)
        found += whole(judges, partial(MeanMemo, means, built["AttnCache"]), "mean maps")
        ours = choose(found)["+ layers (ours)"].setting
        assert ours is not None
        judge("mean maps, by layers", ours, MeanMemo(means, built["+ layers (ours)"], ours).attend)
        layered = build_layers(task.embedder.embedder, built["AttnCache"].store, task.known, steps=steps, seed=seed)
        promises = LayerPromises(layered, task.embedder.embedder, held_out(task))
        for cosine in LAYERED_COSINES:
            thresholds = promises.thresholds(cosine)
            one = judge("AttnCache-f", cosine, layered.at(thresholds).attend, layers=thresholds)
            if full.validation.spearman - one.validation.spearman > FAR and one.validation.rate >= LEAST_RATE:
                break
        return rows_of(task, judges, found, seed=seed, times=times, quick=quick)


def held_out(task: Task) -> list[list[int]]:
    """Choose sentences of the validation part, such as are not in the database as long as there are any."""
    known = {tuple(ids) for ids in task.known}
    return sorted(unique(task.validation.asked), key=lambda ids: tuple(ids) in known)[:HELD_OUT]


def drop(task: Task, judge: Callable[..., Found]) -> None:
    """Table 2's others: attention left out, layers left out, weights of 8 and 4 bits."""
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
    for name, narrow in task.narrow.items():
        judge(name, None, BatchAttend, 0.0, narrow)


def build(task: Task, folder: Path, options: MemoOptions, steps: int, seed: int) -> MemoDatabase:
    """A database of the task's sentences. One that differs only in what it accepts is the same on disk."""
    about = memo_identity(task.embedder.embedder.model, Path(task.embedder.name), task.embedder.template)
    place = folder / options.projector
    if not place.is_dir():
        # Calibrated for what the last variant does; whole sentences are accepted without.
        held = 100 if options.projector == "positions" else 10
        base = MemoOptions(projector=options.projector, steps=steps, seed=seed, held_out=held)
        made = Builder(
            task.embedder.embedder,
            place,
            base,
            model_digest=about["model_digest"],
            quantisation=about["quantisation"],
            template=about["template"],
        ).run(task.known)
        print(f"  built {place.name}: {len(made.store)} sentences", flush=True)
    database = MemoDatabase.open(place, **about)
    database.settings = dataclasses.replace(database.settings, options=options)
    return database


def whole(judges: Judges, memo_at: Callable[[float], AttentionMemo], variant: str) -> list[Found]:
    """Sentences taken whole: one pass over each part in which all take maps serves every threshold."""
    taken, similarities = [], []
    for one in judges:
        memo = Watched(memo_at(-1e9))
        taken.append(one.passes.run(memo.attend))
        similarity = np.empty(len(one.part.asked))
        similarity[[index for batch in one.passes.batches for index in batch]] = memo.similarity
        similarities.append(similarity)
    to_choose_by = similarities[0][np.isfinite(similarities[0])]
    at_rates = [float(np.quantile(to_choose_by, 1 - rate)) - ROUNDING for rate in RATES]
    found = []
    for threshold in (*THRESHOLDS, *at_rates):
        judged = []
        for one, result, similarity in zip(judges, taken, similarities, strict=True):
            hits = (similarity >= threshold) & result.layers.any(1)
            vectors = torch.where(torch.from_numpy(hits)[:, None], result.vectors, one.exact.vectors)
            judged.append(one.judged(vectors, hits.astype(float)))
        validation, test = judged
        found.append(Found(variant, threshold, validation, test, memo_at(threshold).attend))
    return found


if __name__ == "__main__":
    raise SystemExit(main())
