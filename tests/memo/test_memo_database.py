"""Maps in use: exact with a sentence's own, never with another model's, length's or template's; builds that are killed."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import json
import os
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path
from unittest import mock

import numpy as np
import pytest
import torch
from benchmarks.papers.attncache.baselines import (
    DropAttend,
    SharedAttend,
    build_layers,
    lazyformer,
    most_alike,
    redundancy,
    san,
    san_sharing,
    without_layers,
)

from afterglow.errors import ConfigError, DamageError
from afterglow.kernels import stored_maps
from afterglow.memo import build as build_module
from afterglow.memo import map_attention
from afterglow.memo.database import Fetched, MemoDatabase, vectors_file
from afterglow.memo.map_attention import AttentionMemo, MapsAttend, RecordingAttend, apply_maps
from afterglow.memo.maps import HEADER_BYTES, MAPS, RECORDS, MapStore, token_key
from afterglow.memo.memo_settings import SETTINGS
from afterglow.memo.options import MemoOptions
from afterglow.memo.packing import pack, unpack
from afterglow.memo.sequence_embedder import Embedder
from afterglow.model.decoder import Attention, Decoder
from afterglow.model.encoder import BatchAttend
from afterglow.model.linear import int8_levels
from tests import doors
from tests.memo.kit import EXACT, build, builder, embedder, sentences

KINDS = ["decoder", "encoder"]


def with_memo(plain: Embedder, database: MemoDatabase, threshold: float) -> Embedder:
    return Embedder(plain.model, plain.pooling, memo=AttentionMemo(database, threshold), max_tokens=plain.max_tokens)


@pytest.mark.parametrize("kind", KINDS)
def test_recorded_maps_are_those_of_exact_attention(kind: str) -> None:
    plain = embedder(kind)
    ids = torch.tensor([i for s in sentences(3, lengths=(6,)) for i in s])
    positions = torch.arange(6).repeat(3)
    recording = RecordingAttend(plain.model, positions, [6] * 3)
    found = plain.model.forward(ids, positions, recording)
    exact = plain.model.forward(ids, positions, BatchAttend(plain.model, positions, [6] * 3))
    torch.testing.assert_close(found, exact, atol=1e-5, rtol=1e-5)
    maps = torch.stack(recording.sentences())
    assert maps.shape == (3, plain.model.spec.layers, plain.model.spec.heads, 6, 6)
    torch.testing.assert_close(maps.sum(-1), torch.ones(maps.shape[:-1]))
    assert (maps.triu(1).abs().max() == 0) == plain.model.spec.causal


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("accept", ["sentence", "layers"])
@pytest.mark.parametrize("projector", ["positions", "binned", "public"])
def test_a_sentences_own_maps_give_the_full_models_output(
    kind: str, accept: str, projector: str, tmp_path: Path
) -> None:
    plain, texts = embedder(kind), sentences(24)
    options = dataclasses.replace(EXACT, accept=accept, projector=projector, neighbours=3)  # type: ignore[arg-type]
    database = build(plain, tmp_path, texts, options)
    asked = [*texts[:10], *sentences(6, seed=9)]
    result = with_memo(plain, database, 0.999).embed(asked)
    assert result.hits == (True,) * 10 + (False,) * 6
    torch.testing.assert_close(result.vectors, plain.embed(asked).vectors, atol=1e-5, rtol=1e-5)


@pytest.mark.skipif(not int8_levels(), reason="no int8 here")
@pytest.mark.parametrize("kind", KINDS)
def test_own_maps_with_weights_in_8_bits(kind: str, tmp_path: Path) -> None:
    """The values' part of the rounded weights is what the whole matrix yields; another rounding would show."""
    plain, texts = embedder(kind, quantization="int8"), sentences(12)
    exact, full = plain.embed(texts), embedder(kind).embed(texts)
    found = with_memo(plain, build(plain, tmp_path, texts), 0.999).embed(texts)
    assert found.memo_hits == len(texts)
    near, apart = (found.vectors - exact.vectors).abs().max(), (exact.vectors - full.vectors).abs().max()
    assert near < apart / 4
    assert near < 2e-3


def test_half_precision_has_its_own_tolerance(tmp_path: Path) -> None:
    plain, texts = embedder("decoder"), sentences(12)
    database = build(plain, tmp_path, texts, dataclasses.replace(EXACT, dtype="float16"))
    result = with_memo(plain, database, 0.999).embed(texts)
    assert all(result.hits)
    torch.testing.assert_close(result.vectors, plain.embed(texts).vectors, atol=2e-3, rtol=0)


@pytest.mark.parametrize("kind", KINDS)
def test_hits_compute_neither_queries_nor_keys(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plain, texts = embedder(kind), sentences(12)
    memo = with_memo(plain, build(plain, tmp_path, texts), 0.999)
    rows: list[int] = []
    project = Attention.project
    monkeypatch.setattr(Attention, "project", lambda self, x: rows.append(len(x)) or project(self, x))
    memo.embed(texts)
    assert rows == []
    other = sentences(2, seed=5)
    memo.embed([*texts, *other])
    assert rows == [sum(map(len, other))] * plain.model.spec.layers


def test_value_alone_costs_its_part_of_the_weights() -> None:
    for kind in KINDS:
        attention = embedder(kind).model.layers[0].attention
        x = torch.randn(7, doors.fused_projection(attention).inputs)
        torch.testing.assert_close(attention.value(x), attention.project(x)[2])
        assert doors.value_projection(attention) is not None
        assert doors.value_projection(attention).outputs == attention.kv_heads * attention.head_dim


@pytest.fixture(params=["built", "torch"])
def _way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Maps are applied by the compiled kernel, where there is one, or by torch."""
    if request.param == "torch":
        monkeypatch.setattr(stored_maps, "native", lambda: None)


@pytest.mark.usefixtures("_way")
@pytest.mark.parametrize("few", [0, 1 << 30])
@pytest.mark.parametrize("kind", KINDS)
def test_hits_among_misses_leave_each_other_alone(
    kind: str, few: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every second sentence of each length has its own maps, in one layer or in both."""
    monkeypatch.setattr(map_attention, "FEW", few)
    model = embedder(kind).model
    lengths = [4, 4, 4, 7, 7, 9]
    positions = torch.cat([torch.arange(n) for n in lengths])
    ids = torch.arange(5, 5 + sum(lengths))
    recording = RecordingAttend(model, positions, lengths)
    exact = model.forward(ids, positions, recording)
    packed = [Fetched.own(pack(torch.stack(run, 1).numpy(), causal=model.spec.causal)) for run in recording.maps]
    layers = np.array([[True, True], [False, False], [False, True], [True, False], [False, False], [True, True]])
    attend = MapsAttend(model, positions, lengths)
    attend.use(packed, layers)
    torch.testing.assert_close(model.forward(ids, positions, attend), exact, atol=1e-5, rtol=1e-5)
    assert attend.hits == [True, False, True, True, False, True]


def test_maps_of_other_sentences_are_really_used(tmp_path: Path) -> None:
    """By hand: with another sentence's maps the embedding is what `MapsAttend` computes with those maps."""
    plain, texts = embedder("encoder"), sentences(30, lengths=(7,))
    database = build(plain, tmp_path, texts)
    asked = sentences(1, seed=4, lengths=(7,))
    result = with_memo(plain, database, -100.0).embed(asked)
    assert result.hits == (True,)
    exact = plain.embed(asked).vectors
    assert float((result.vectors - exact).abs().max()) > 1e-3
    positions = torch.arange(7)
    recording = RecordingAttend(plain.model, positions, [7])
    plain.model.forward(torch.tensor(asked[0]), positions, recording)
    found = database.find(recording.inputs[0][None], -100.0)
    attend = MapsAttend(plain.model, positions, [7])
    attend.use([database.fetch(found)], found.layers)
    states = plain.model.forward(torch.tensor(asked[0]), positions, attend)
    torch.testing.assert_close(result.vectors, plain.pooling(states, [(1, 7)]))


def test_neighbours_are_averaged(tmp_path: Path) -> None:
    plain, texts = embedder("encoder"), sentences(30, lengths=(7,))
    database = build(plain, tmp_path, texts, dataclasses.replace(EXACT, neighbours=2))
    x = torch.randn(1, 7, plain.dimensions)
    found = database.find(x, -100.0)
    assert found.numbers.shape == (1, 2)
    first, second = (torch.from_numpy(database.store.read(int(n)).copy()) for n in found.numbers[0])
    near, far = (float(w) for w in found.weights[0])
    assert near >= far > 0
    packed = database.fetch(found).layer(1, np.array([0]))
    mean = near * first[1] + far * second[1]
    torch.testing.assert_close(packed[0], mean, atol=1e-6, rtol=0)


@pytest.mark.usefixtures("_way")
def test_each_sentence_has_its_own_neighbours_and_weights(tmp_path: Path) -> None:
    """Three sentences; the last two take maps, in the last layer."""
    plain, texts = embedder("encoder"), sentences(30, lengths=(7,))
    database = build(plain, tmp_path, texts, dataclasses.replace(EXACT, neighbours=2))
    x = torch.randn(3, 7, plain.dimensions)
    found = database.find(x, -100.0)
    assert len({*map(tuple, found.weights.tolist())}) == 3
    found.layers[:] = [[False, False], [False, True], [False, True]]
    attend = MapsAttend(plain.model, torch.arange(7).repeat(3), [7] * 3)
    attend.use([database.fetch(found)], found.layers)
    attention = plain.model.layers[1].attention
    out = attend(1, attention, x.flatten(0, 1)).view(3, 7, -1)
    for n in (1, 2):
        parts = [torch.from_numpy(database.store.read(int(number))[1].copy()) for number in found.numbers[n]]
        mean = sum(float(weight) * part for weight, part in zip(found.weights[n], parts, strict=True))
        assert isinstance(mean, torch.Tensor)
        wanted = apply_maps(unpack(mean[None], 7, causal=False), attention.value(x[n])[None])
        torch.testing.assert_close(out[n], wanted, atol=1e-5, rtol=1e-5)


def test_maps_of_another_shape_are_refused(tmp_path: Path) -> None:
    """A damaged header under which records are as long as before."""
    plain, texts = embedder("encoder"), sentences(12)
    build(plain, tmp_path, texts).close()
    header = (tmp_path / MAPS).read_bytes()[:HEADER_BYTES]
    assert b'"layers": 2, "heads": 4' in header
    with (tmp_path / MAPS).open("r+b") as file:
        file.write(header.replace(b'"layers": 2, "heads": 4', b'"layers": 1, "heads": 8'))
    database = builder(plain, tmp_path).open()
    with pytest.raises(DamageError, match="header is damaged; build the database anew"):
        with_memo(plain, database, 0.999).embed(texts)


def test_other_lengths_are_misses(tmp_path: Path) -> None:
    plain, texts = embedder("encoder"), sentences(20, lengths=(5, 8))
    memo = with_memo(plain, build(plain, tmp_path, texts), -100.0)
    assert memo.embed([*sentences(1, lengths=(6,)), texts[0]]).hits == (False, True)


def test_another_models_maps_are_never_used(tmp_path: Path) -> None:
    plain = embedder("decoder")
    build(plain, tmp_path, sentences(12))
    about = {"model_digest": "d" * 64, "quantisation": "float32", "template": "{text}"}
    MemoDatabase.open(tmp_path, **about).close()
    for name, value, message in (
        ("model_digest", "e" * 64, "model dddddddddddd, and this is model eeeeeeeeeeee"),
        ("quantisation", "int8", "quantisation 'float32', and this is quantisation 'int8'"),
        ("template", "Say: {text}", "template '{text}', and this is template 'Say: {text}'"),
    ):
        with pytest.raises(ConfigError, match=message):
            MemoDatabase.open(tmp_path, **{**about, name: value})
    with pytest.raises(ConfigError, match="holds no finished database"):
        MemoDatabase.open(tmp_path / "none", **about)


def test_a_damaged_record_is_a_miss_and_is_reported(tmp_path: Path) -> None:
    plain, texts = embedder("decoder"), sentences(12)
    build(plain, tmp_path, texts).close()
    store = MapStore.open(tmp_path)
    number = store.keys().index(token_key(texts[3]))
    at = int(doors.map_entries(store)["offset"][number]) + 50
    store.close()
    with (tmp_path / MAPS).open("r+b") as file:
        file.seek(at)
        file.write(b"\xff\xff")
    database = builder(plain, tmp_path).open()
    result = with_memo(plain, database, 0.999).embed(texts)
    assert [index for index, hit in enumerate(result.hits) if not hit] == [3]
    torch.testing.assert_close(result.vectors, plain.embed(texts).vectors, atol=1e-5, rtol=1e-5)
    assert database.stats["damaged"] == 1
    assert f"record {number} is damaged" in database.notes[-1]


@pytest.mark.parametrize("number", [3, 11])
def test_a_damaged_entry_is_a_miss(tmp_path: Path, number: int) -> None:
    plain, texts = embedder("decoder"), sentences(12)
    build(plain, tmp_path, texts).close()
    raw = bytearray((tmp_path / RECORDS).read_bytes())
    raw[number * 40 + 1] ^= 1
    (tmp_path / RECORDS).write_bytes(raw)
    result = with_memo(plain, builder(plain, tmp_path).open(), 0.999).embed(texts)
    assert [index for index, hit in enumerate(result.hits) if not hit] == [number]


def test_known_sentences_change_no_file(tmp_path: Path) -> None:
    """A process that is killed while it writes the vectors would damage them."""
    plain, texts = embedder("decoder"), sentences(12)
    build(plain, tmp_path, texts).close()
    before = {path: path.stat().st_mtime_ns for path in tmp_path.iterdir() if path.name != RECORDS}
    assert builder(plain, tmp_path).add(texts) == 0
    assert {path: path.stat().st_mtime_ns for path in tmp_path.iterdir() if path.name != RECORDS} == before


@pytest.mark.parametrize("number", [3, 11])
def test_sentences_are_added_beside_a_damaged_entry(tmp_path: Path, number: int) -> None:
    plain, texts, more = embedder("decoder"), sentences(12), sentences(5, seed=2, lengths=(5, 11))
    build(plain, tmp_path, texts).close()
    raw = bytearray((tmp_path / RECORDS).read_bytes())
    raw[number * 40 + 1] ^= 1
    (tmp_path / RECORDS).write_bytes(raw)
    adder = builder(plain, tmp_path)
    assert adder.add(more) == 5
    result = with_memo(plain, adder.open(), 0.999).embed([*texts, *more])
    assert [index for index, hit in enumerate(result.hits) if not hit] == [number]


def test_a_database_without_a_word_on_pooling_is_read(tmp_path: Path) -> None:
    plain = embedder("encoder")
    build(plain, tmp_path, sentences(12)).close()
    about = json.loads((tmp_path / SETTINGS).read_text())
    assert about.pop("pooling") == plain.pooling.mode
    (tmp_path / SETTINGS).write_text(json.dumps(about))
    assert builder(plain, tmp_path).open().settings.pooling == ""


def test_damaged_vectors_are_refused(tmp_path: Path) -> None:
    plain = embedder("decoder")
    count = len(build(plain, tmp_path, sentences(12)).store)
    path = vectors_file(tmp_path, count)
    raw = bytearray(path.read_bytes())
    raw[-1] ^= 1
    path.write_bytes(raw)
    with pytest.raises(DamageError, match="build the database anew"):
        builder(plain, tmp_path).open()


def test_a_byte_budget_holds(tmp_path: Path) -> None:
    plain, texts = embedder("encoder"), sentences(60)
    options = dataclasses.replace(EXACT, max_bytes=30_000)
    made = builder(plain, tmp_path, options)
    database = made.run(texts)
    used = sum((tmp_path / name).stat().st_size for name in (MAPS, RECORDS))
    assert 30_000 - 4 * 81 * 8 - 200 < used <= 30_000
    assert 2 < len(database.store) < 60
    assert made.skipped == 60 - len(database.store)
    for adder in (builder(plain, tmp_path, options), builder(plain, tmp_path)):  # also one that is told of no budget
        assert adder.add(sentences(5, seed=3)) == 0
        assert adder.skipped == 5
    assert adder.add(sentences(5, seed=3), max_bytes=100_000) == 5
    assert adder.add(sentences(5, seed=4)) == 0, "another budget is for one time"


def test_of_two_that_add_at_once_none_loses_what_the_other_has_added(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One process has looked at the store, and another begins, before the first has the lock."""
    plain = embedder("encoder")
    build(plain, tmp_path, sentences(20)).close()
    first, second = builder(plain, tmp_path), builder(plain, tmp_path)
    added = []
    look = second.open

    def another() -> MemoDatabase:
        found = look()
        with contextlib.suppress(ConfigError):  # the other process writes
            added.append(first.add(sentences(7, seed=2)))
        return found

    monkeypatch.setattr(second, "open", another)
    added.append(second.add(sentences(5, seed=3)))
    database = first.open()
    assert len(database.store) == database.settings.records == 20 + sum(added)


def test_added_sentences_are_found_and_flagged(tmp_path: Path) -> None:
    plain, texts, more = embedder("encoder"), sentences(20), sentences(7, seed=2, lengths=(5, 11))
    build(plain, tmp_path, texts).close()
    adder = builder(plain, tmp_path)
    assert adder.add([*more, *texts[:3]]) == 7
    assert adder.add(more) == 0
    database = adder.open()
    assert database.store.later.tolist() == [False] * 20 + [True] * 7
    assert any("7 of 27 sentences were added after the projector's training" in note for note in database.notes)
    result = with_memo(plain, database, 0.999).embed([*texts, *more])
    assert all(result.hits)
    torch.testing.assert_close(result.vectors, plain.embed([*texts, *more]).vectors, atol=1e-5, rtol=1e-5)


def test_a_finished_database_is_not_overwritten(tmp_path: Path) -> None:
    plain = embedder("encoder")
    build(plain, tmp_path, sentences(12))
    with pytest.raises(ConfigError, match="holds a finished database"):
        build(plain, tmp_path, sentences(12))


def test_the_curve_falls_with_the_threshold(tmp_path: Path) -> None:
    options = MemoOptions(held_out=12, dtype="float32", steps=20)
    database = build(embedder("encoder"), tmp_path, sentences(150, lengths=(5, 6)), options)
    rates = [row["layer_rate"] for row in database.settings.curve]
    assert rates == sorted(rates)
    assert all(0 <= row["error"] <= 1 and row["hit_rate"] >= row["layer_rate"] for row in database.settings.curve)


@pytest.mark.parametrize("kind", KINDS)
def test_a_database_is_calibrated_on_texts_of_another_source(kind: str, tmp_path: Path) -> None:
    """Its curve is what those texts show when they are embedded with the finished database; none of them is stored."""
    plain, own, others = embedder(kind), sentences(60, lengths=(5, 6)), sentences(25, seed=9, lengths=(5, 6, 47))
    options = MemoOptions(dtype="float32", steps=20)
    database = builder(plain, tmp_path, options).run(own, [*others, *own[:5], others[0]])
    assert database.settings.calibrated_on == 25
    assert database.settings.records == 60
    assert all(with_memo(plain, database, 0.999).embed(own).hits)
    exact = plain.embed(others).vectors
    for row in database.settings.curve:
        result = with_memo(plain, database, row["threshold"]).embed(others)
        assert row["hit_rate"] == pytest.approx(np.mean(result.hits))
        found = (1 - (result.vectors * exact).sum(1))[torch.tensor(result.hits, dtype=torch.bool)]
        assert row["error"] == pytest.approx(max(float(found.sum()), 0) / 25, abs=1e-5)
    held_out = build(plain, tmp_path / "held out", own, options)
    assert held_out.settings.calibrated_on == 0
    assert held_out.settings.curve != database.settings.curve
    assert MemoDatabase.open(tmp_path, model_digest="d" * 64, quantisation="float32", template="{text}").settings == (
        database.settings
    )


def test_stored_texts_are_no_other_source(tmp_path: Path) -> None:
    texts = sentences(20)
    with pytest.raises(ConfigError, match="all texts to calibrate on are too long, or among the texts of the database"):
        builder(embedder("encoder"), tmp_path).run(texts, texts[:3])


KILLED = """
    import itertools, sys
    from pathlib import Path
    import torch
    torch.set_num_threads(1)
    from tests.memo.kit import builder, embedder, sentences
    from afterglow.memo import build
    build.FLUSH, build.BATCH_TOKENS = 4, 16
    record, numbers = build.record, itertools.count(1)
    def stopping(embedder, batch):
        print("batch", flush=True)
        if next(numbers) == 15:
            sys.stdin.read()  # until it is killed, however late that comes
        return record(embedder, batch)
    build.record = stopping
    builder(embedder("decoder"), Path(sys.argv[1])).run(sentences(60))
"""


def test_a_killed_build_goes_on_where_it_was(tmp_path: Path) -> None:
    """kill -9 in the midst of collecting; the resumed build computes only missing maps, and yields the same."""
    plain, texts = embedder("decoder"), sentences(60)
    killed, whole = tmp_path / "killed", tmp_path / "whole"
    root = Path(__file__).parents[2]
    process = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(KILLED), str(killed)],
        cwd=root,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    assert process.stdin is not None
    assert process.stdout is not None
    for _ in range(15):
        assert process.stdout.readline() == "batch\n"
    process.send_signal(signal.SIGKILL)
    process.wait()
    process.stdin.close()
    process.stdout.close()
    with pytest.raises(ConfigError, match="holds no finished database"):
        builder(plain, killed).open()
    kept = len(MapStore.open(killed))
    assert 8 <= kept < 60
    began: list[int] = []
    made = builder(plain, killed)
    doors.watch_records(made, lambda missing: began.append(len(missing)))
    resumed = made.run(texts)
    assert began[0] == 60 - kept
    expected = build(plain, whole, texts)
    assert resumed.store.keys() == expected.store.keys()
    for number in range(60):
        np.testing.assert_allclose(resumed.store.read(number), expected.store.read(number), atol=1e-6)
    result = with_memo(plain, resumed, 0.999).embed(texts)
    assert all(result.hits)
    torch.testing.assert_close(result.vectors, plain.embed(texts).vectors, atol=1e-5, rtol=1e-5)


def test_a_damaged_record_of_an_unfinished_build_is_computed_anew(tmp_path: Path) -> None:
    plain, texts = embedder("decoder"), sentences(20)
    made = builder(plain, tmp_path)
    store = MapStore.create(tmp_path, doors.memo_identity(made))
    doors.collect_maps(made, store, texts[:12])
    store.close()
    with (tmp_path / MAPS).open("r+b") as file:
        file.seek(HEADER_BYTES + 5)
        file.write(b"\xff")
    database = made.run(texts)
    assert list(database.store.check()) == []
    assert len(database.store) == 20


def test_a_build_that_goes_on_with_another_projector_reads_the_texts_anew(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What was kept for the first one's training is of no use to it."""
    plain, texts = embedder("decoder"), sentences(20)
    with monkeypatch.context() as patched:
        patched.setattr(build_module, "train", mock.Mock(side_effect=KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            builder(plain, tmp_path, dataclasses.replace(EXACT, projector="positions")).run(texts)
    database = builder(plain, tmp_path, dataclasses.replace(EXACT, projector="binned")).run(texts)
    assert all(with_memo(plain, database, 0.999).embed(texts).hits)
    assert not list(tmp_path.glob("inputs*"))


def test_an_unfinished_build_of_other_texts_is_refused(tmp_path: Path) -> None:
    plain = embedder("decoder")
    made = builder(plain, tmp_path)
    store = MapStore.create(tmp_path, doors.memo_identity(made))
    doors.collect_maps(made, store, sentences(5))
    store.close()
    with pytest.raises(ConfigError, match="unfinished build of other texts"):
        made.run(sentences(9, seed=3))
    with pytest.raises(ConfigError, match="and this is model"):
        builder(plain, tmp_path, digest="e" * 64).run(sentences(5))


# ------------------------------------------------------------------------------------------- compared methods


@pytest.mark.parametrize("kind", KINDS)
def test_layers_that_share_with_themselves_are_exact(kind: str) -> None:
    model = embedder(kind).model
    ids, positions, lengths = torch.arange(5, 18), torch.cat((torch.arange(6), torch.arange(7))), [6, 7]
    exact = model.forward(ids, positions, BatchAttend(model, positions, lengths))
    own = model.forward(ids, positions, SharedAttend([0, 1], model, positions, lengths))
    torch.testing.assert_close(own, exact)
    shared = model.forward(ids, positions, SharedAttend([0, 0], model, positions, lengths))
    recording = RecordingAttend(model, positions, lengths)
    model.forward(ids, positions, recording)
    assert float((shared - exact).abs().max()) > 1e-4
    # By hand: the second layer with the first layer's maps.
    attend = MapsAttend(model, positions, lengths)
    given = [
        Fetched.own(pack(torch.stack([run[0], run[0]], 1).numpy(), causal=model.spec.causal)) for run in recording.maps
    ]
    attend.use(given, np.array([[False, True]] * 2))
    torch.testing.assert_close(model.forward(ids, positions, attend), shared, atol=1e-5, rtol=1e-5)


def test_blocks_of_layers() -> None:
    assert lazyformer(6) == [0, 0, 2, 2, 4, 4]
    assert lazyformer(5) == [0, 0, 2, 2, 4]
    similarity = torch.tensor([[1.0, 0.9, 0.5, 0.2], [0.9, 1, 0.6, 0.3], [0.5, 0.6, 1, 0.8], [0.2, 0.3, 0.8, 1]])
    assert san(similarity, 0.85) == [0, 0, 2, 3]
    assert san(similarity, 0.8) == [0, 0, 2, 2]
    assert san_sharing(similarity, 2) == [0, 0, 2, 2]
    assert san_sharing(similarity, 0) == [0, 1, 2, 3]


def test_search_in_each_layer_finds_the_sentence_itself(tmp_path: Path) -> None:
    plain, texts = embedder("encoder"), sentences(20)
    database = build(plain, tmp_path, texts)
    memo = build_layers(plain, database.store, texts, steps=20).at(np.full(plain.model.spec.layers, 0.999))
    asked = [*texts[:5], *sentences(2, seed=8)]
    found = Embedder(plain.model, plain.pooling, memo=memo, max_tokens=48).embed(asked)
    assert found.hits[:5] == (True,) * 5
    torch.testing.assert_close(found.vectors, plain.embed(asked).vectors, atol=1e-4, rtol=1e-4)


def test_time_is_not_spent_on_searching_twice(tmp_path: Path) -> None:
    """One search for all layers of a pass."""
    plain, texts = embedder("encoder"), sentences(12, lengths=(5,))
    database = build(plain, tmp_path, texts)
    calls: list[float] = []
    find = database.find
    database.find = lambda inputs, threshold: calls.append(time.monotonic()) or find(inputs, threshold)  # type: ignore[method-assign,func-returns-value]
    with_memo(plain, database, 0.9).embed(texts)
    assert len(calls) == 1


@pytest.mark.parametrize("kind", KINDS)
def test_what_is_left_out_is_what_changes_least(kind: str) -> None:
    """By hand: what goes into each layer and what comes out, from passes through the first layers alone."""
    plain = embedder(kind)
    model, texts = plain.model, sentences(3)
    attention, whole = redundancy(plain, texts)
    cut, states = without_layers(model, [1]), []
    for which in (without_layers(model, [0, 1]), cut, model):
        if isinstance(which, Decoder):
            which = copy.copy(which)
            doors.leave_out_last_norm(which)
        states.append(
            torch.cat(
                [
                    which.forward(torch.tensor(t), p := torch.arange(len(t)), BatchAttend(which, p, [len(t)]))
                    for t in texts
                ]
            )
        )
    for layer in (0, 1):
        wanted = torch.nn.functional.cosine_similarity(states[layer], states[layer + 1], dim=-1).mean()
        assert whole[layer] == pytest.approx(float(wanted), abs=1e-5)
    assert attention != whole
    assert all(-1 <= value <= 1 for value in attention)
    assert most_alike([0.5, 0.9, 0.7, 0.9], 2) == [1, 3]
    assert most_alike([0.5, 0.9, 0.7], 0) == []


@pytest.mark.parametrize("kind", KINDS)
def test_dropped_attention_and_layers(kind: str) -> None:
    model = embedder(kind).model
    ids, positions, lengths = torch.arange(5, 11), torch.arange(6), [6]
    exact = model.forward(ids, positions, BatchAttend(model, positions, lengths))
    none = model.forward(ids, positions, DropAttend([], BatchAttend(model, positions, lengths)))
    torch.testing.assert_close(none, exact)
    dropped = model.forward(ids, positions, DropAttend([1], BatchAttend(model, positions, lengths)))
    assert float((dropped - exact).abs().max()) > 1e-3
    # A token without attention depends on no other: where all attention is dropped, order is nothing but the positions.
    alone = model.forward(ids[:1], positions[:1], DropAttend([0, 1], BatchAttend(model, positions[:1], [1])))
    among = model.forward(ids, positions, DropAttend([0, 1], BatchAttend(model, positions, lengths)))
    torch.testing.assert_close(among[:1], alone)
    assert len(without_layers(model, [0]).layers) == len(model.layers) - 1
    kept = without_layers(model, [])
    torch.testing.assert_close(kept.forward(ids, positions, BatchAttend(kept, positions, lengths)), exact)
