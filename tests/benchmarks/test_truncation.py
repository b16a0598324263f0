"""The truncation benchmark measures what it says: which keys, which positions, which tokens each variant has."""

from __future__ import annotations

import dataclasses
import json
import math
import os
import re
from importlib.resources import files
from pathlib import Path

import pytest
import torch
from benchmarks.common import stories260k
from benchmarks.common.model_texts import knows_markers
from benchmarks.common.paired import Paired, mean_and_error
from benchmarks.papers.cachedattention import truncation
from benchmarks.papers.cachedattention.overflow import choices, dialogues, perplexity
from benchmarks.papers.cachedattention.overflow.context import VARIANTS, Context, Session, chosen, truncate
from torch import Tensor

from afterglow.model.decoder import Attention, Decoder, PlainAttend
from afterglow.model.loader import load_model
from afterglow.model.names import Names
from afterglow.model.presets import PRESETS, RandomSource, random_model
from afterglow.model.weights import WeightAssembler

HEAD, WINDOW, PIECE = [1], 64, 8


class Strong(RandomSource):
    """Random weights large enough that attention moves the hidden states."""

    def get(self, name: str, shape: tuple[int, ...]) -> Tensor:
        return super().get(name, shape) * (8.0 if len(shape) == 2 else 1.0)


@pytest.fixture(scope="module")
def decoder() -> Decoder:
    return WeightAssembler(PRESETS["tiny"], Names(), Strong(3), torch.float32, torch.device("cpu")).decoder()


def tokens(count: int, seed: int = 0) -> list[int]:
    return torch.randint(3, 512, (count,), generator=torch.Generator().manual_seed(seed)).tolist()


def plain(decoder: Decoder, ids: list[int]) -> Tensor:
    positions = torch.arange(len(ids))
    return decoder.forward(torch.tensor(ids), positions, PlainAttend(decoder, positions, [len(ids)]))


def overflowed(decoder: Decoder, ids: list[int]) -> Session:
    session = Session(decoder, HEAD, WINDOW)
    for at in range(0, len(ids), PIECE):
        session.add(ids[at : at + PIECE])
    return session


def test_after_an_overflow_only_layer_0_is_the_same(decoder: Decoder) -> None:
    session = overflowed(decoder, tokens(WINDOW))  # with the head one token too many
    assert session.overflows == 1
    ca, tt, nkvt, none, sinks, important = (session.contexts[name] for name in VARIANTS)
    # The last piece came after the truncation; what it computed depends on the variant.
    kept = len(tt) - PIECE
    assert len(ca) == kept + PIECE == len(nkvt) == 1 + WINDOW - WINDOW // 2
    torch.testing.assert_close(ca.keys[0], tt.keys[0])
    torch.testing.assert_close(ca.values[0], tt.values[0])
    assert (ca.keys[1][1:kept] - tt.keys[1][1:kept]).abs().amax() > 0.01
    assert torch.equal(ca.keys[1][:kept], nkvt.keys[1][:kept])
    assert torch.equal(ca.positions, torch.arange(len(ca)))
    assert torch.equal(tt.positions, ca.positions)
    assert torch.equal(nkvt.positions[:kept], torch.tensor([0, *range(1 + WINDOW // 2, 1 + WINDOW - PIECE)]))
    assert torch.equal(nkvt.positions[kept:], ca.positions[kept:])
    assert len(none) == len(HEAD) + PIECE
    assert len(sinks) == len(important) == len(ca)
    assert torch.equal(sinks.keys[1][4:kept], ca.keys[1][4:kept]), "but for the sinks the same as CA"
    assert not torch.equal(sinks.keys[1][1:4], ca.keys[1][1:4])


def test_importance_keeps_what_was_attended_to(decoder: Decoder) -> None:
    ids = tokens(WINDOW - 1)
    session = Session(decoder, HEAD, WINDOW, variants=("CA", "importance"))
    for at in range(0, len(ids), PIECE):
        session.add(ids[at : at + PIECE])
    scores = session._shared.scores
    assert scores is not None
    spec = decoder.spec
    assert float(scores.sum()) == pytest.approx(WINDOW * spec.layers * spec.heads, rel=1e-4), "each row's weights"
    positions = torch.arange(WINDOW)
    by_formula = Weighing(decoder, WINDOW)
    decoder.forward(torch.tensor([*HEAD, *ids]), positions, by_formula)
    torch.testing.assert_close(scores, by_formula.sums, atol=1e-3, rtol=1e-4)
    shared = session._shared.fork(scored=True)
    left = chosen(shared, "importance", 32, head=1)
    assert left.tolist()[:4] == [0, 1, 2, 3]
    assert left.tolist()[-16:] == list(range(WINDOW - 16, WINDOW))
    middle = left[4:-16]
    assert len(middle) == 12
    gone = [row for row in range(4, WINDOW - 16) if row not in middle.tolist()]
    assert float(scores[gone].max()) <= float(scores[middle].min())
    session.add(tokens(PIECE, seed=1))
    assert session.overflows == 1
    assert session.contexts["CA"].scores is None
    assert len(session.contexts["importance"]) == len(session.contexts["CA"])


def test_nothing_dropped_is_the_plain_forward(decoder: Decoder) -> None:
    ids, more = tokens(40), tokens(9, seed=1)
    wanted = decoder.logits(plain(decoder, [*ids, *more])[40:])
    start = Context(decoder)
    start.extend(ids[:17])
    start.extend(ids[17:])
    for variant in ("CA", "TT", "NKVT"):
        context = start.fork()
        truncate(context, variant, ids, torch.arange(40), head=1)
        torch.testing.assert_close(decoder.logits(context.extend(more)), wanted, atol=1e-4, rtol=1e-4)


def test_token_truncation_is_the_plain_forward_of_what_survives_and_the_others_are_not(decoder: Decoder) -> None:
    ids, more = tokens(WINDOW - 1), tokens(PIECE, seed=1)
    session = Session(decoder, HEAD, WINDOW)
    for at in range(0, len(ids), PIECE):
        assert session.add(ids[at : at + PIECE]) == {}
    losses = session.add(more)
    rows = plain(decoder, [*HEAD, *ids[WINDOW // 2 :], *more])[-PIECE:-1]
    wanted = torch.nn.functional.cross_entropy(decoder.logits(rows), torch.tensor(more[1:]), reduction="none")
    torch.testing.assert_close(losses["TT"], wanted, atol=1e-4, rtol=1e-4)
    apart = {name: float((values - wanted).abs().amax()) for name, values in losses.items()}
    assert apart["CA"] > 1e-3
    assert apart["NKVT"] > 1e-3
    assert not torch.allclose(losses["CA"], losses["NKVT"], atol=1e-3)


class Forgetful:
    """Causal attention by the formula, at the original positions; rows from `since` on do not see the first `gone`."""

    def __init__(self, decoder: Decoder, count: int, gone: int, since: int) -> None:
        rows = torch.arange(count)
        self._rotation = decoder.rotation(rows)
        self._seen = (rows[:, None] >= rows) & ~((rows[:, None] >= since) & (rows < gone))

    def weigh(self, weights: Tensor) -> None:
        """Attention weights of one layer, [heads, queries, rows]."""

    def __call__(self, layer: int, attention: Attention, x: Tensor) -> Tensor:
        q, k, v = attention.project(x)
        q, k = attention.rotate(q, self._rotation), attention.rotate(k, self._rotation)
        k, v = (t.repeat_interleave(attention.heads // attention.kv_heads, 1) for t in (k, v))
        scores = torch.einsum("qhd,khd->hqk", q, k) * attention.scale
        weights = scores.masked_fill(~self._seen, -torch.inf).softmax(-1)
        self.weigh(weights)
        return torch.einsum("hqk,khd->qhd", weights, v).flatten(1)


class Weighing(Forgetful):
    """The same, nothing forgotten; sums up each row's column of the weights over layers and heads."""

    def __init__(self, decoder: Decoder, count: int) -> None:
        super().__init__(decoder, count, 0, count)
        self.sums = torch.zeros(count)

    def weigh(self, weights: Tensor) -> None:
        self.sums += weights.sum((0, 1))


def test_ca_is_attention_that_stops_seeing_what_was_dropped(decoder: Decoder) -> None:
    # Without a head all distances stay, so moving to positions 0.. changes nothing: rotations are relative.
    ids, gone, since = tokens(60), 32, 50
    wanted = decoder.forward(torch.tensor(ids), torch.arange(60), Forgetful(decoder, 60, gone, since))
    context = Context(decoder)
    context.extend(ids[:since])
    truncate(context, "CA", ids[gone:since], torch.arange(gone, since), head=0)
    found = decoder.logits(context.extend(ids[since:]))
    torch.testing.assert_close(found, decoder.logits(wanted[since:]), atol=1e-4, rtol=1e-4)


def test_branches_see_the_context_and_themselves_alone(decoder: Decoder) -> None:
    context = Context(decoder)
    context.extend(tokens(20))
    parts = [tokens(5, seed=1), tokens(1, seed=2), tokens(7, seed=3)]
    found = torch.split(context.branches(parts), [5, 1, 7])
    assert len(context) == 20
    for part, hidden in zip(parts, found, strict=True):
        torch.testing.assert_close(hidden, context.fork().extend(part), atol=1e-4, rtol=1e-4)


def test_what_is_dropped(decoder: Decoder) -> None:
    session = Session(decoder, [1, 2], 32, whole_turns=True, variants=("CA",))
    for size in (6, 6, 6, 6):
        session.add(tokens(size))
    assert session.first_after(6) == 2  # 2 + 24 + 6 just fit
    assert session.first_after(7) == 2 + 18  # 16 tokens go, and the rest of the third turn
    assert session.first_after(30) == 2 + 24
    with pytest.raises(ValueError, match="does not fit a window of 32"):
        session.first_after(31)
    session.add(tokens(4), tokens(5))
    assert session.first == 20
    session.add(tokens(3))
    counted = session.prefill
    assert (counted.turns, counted.new) == (2, 7)  # the reply is decoded
    as_new = dict.fromkeys(("CA", "NKVT", "none", "sinks_and_recent", "importance"), 7)
    assert counted.by_variant() == as_new | {"TT": 7 + 8 + 17, "OF": 7 + 8}


def test_learned_positions_are_refused() -> None:
    spec = dataclasses.replace(PRESETS["tiny"], positions="learned", rope=None)
    with pytest.raises(ValueError, match="learned positions"):
        Context(random_model(spec))


def test_errors_of_differences_are_clustered() -> None:
    mean, error = mean_and_error([torch.tensor([1.0, 1.0]), torch.tensor([0.0, 0.0])])
    assert mean == 0.5
    assert error == pytest.approx(math.sqrt(2 * 2) / 4)  # sums of deviations 1 and -1, twice their square
    pairs = Paired()
    pairs.add({"CA": torch.tensor([1.0, 0.0]), "TT": torch.tensor([1.0, 1.0])}, 0)
    pairs.add({"CA": torch.tensor([1.0, 1.0]), "TT": torch.tensor([1.0, 1.0])}, 1)
    pairs.add({"CA": torch.empty(0), "TT": torch.empty(0)}, 2)
    row = pairs.accuracy()
    assert (row["questions"], row["sessions"]) == (4, 2)
    assert row["points"]["CA"] == {"value": -25.0, "error": 25.0}
    assert pairs.perplexity()["ratio"]["CA"]["value"] == pytest.approx(math.exp(-0.25), abs=1e-4)


def test_streams_of_a_text_are_spaced() -> None:
    text = "".join(f"line {n:04d}\n" for n in range(1000))
    parts = perplexity.spaced(text, lambda piece: [ord(c) for c in piece], 4, 100)
    assert ["".join(map(chr, part))[:10] for part in parts] == [
        "line 0000\n",
        "line 0251\n",
        "line 0501\n",
        "line 0751\n",
    ]
    with pytest.raises(ValueError, match="too short"):
        perplexity.spaced("short", lambda piece: [1] * len(piece), 2, 100)


def test_dialogues_of_the_bundled_model() -> None:
    directory = Path(str(files("afterglow") / "assets" / "model"))
    assert knows_markers(directory)
    sentences = ["Return the value of the object.", "This is a list of names."]
    found = dialogues.run(
        load_model(directory), directory, sentences, window=384, facts=12, sessions=2, overflows=2, seed=1
    )
    replies = found.replies.perplexity()
    assert replies["ratio"]["CA"]["value"] == pytest.approx(1, abs=0.02)
    assert replies["ratio"]["NKVT"]["value"] > 1.2
    kept, dropped = found.kept[0].accuracy(), found.dropped.accuracy()
    assert kept["questions"] >= 4
    assert kept["accuracy"]["TT"]["value"] > 60
    assert dropped["questions"] >= 4
    assert dropped["accuracy"]["TT"]["value"] < 40


def test_questions_of_all_kinds(decoder: Decoder, tmp_path: Path) -> None:
    record = "Memorize. " + "".join(f"{choices.OPENING}the {name}. \n ASSISTANT: Yes. \n " for name in ("sea", "sky"))
    rows = [
        {"goal": "How?", "sol1": "So.", "sol2": "Not so.", "label": 1},
        {"question": "What?", "choices": ["a", "b", "c"], "answer": 2},
        {"prompt": record, "topics": ["The sea", "The sky"]},
    ]
    path = tmp_path / "questions.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    questions = choices.read(path)
    assert [question.answer for question in questions] == [1, 2, 0]
    assert questions[0].choices == (" So.", " Not so.")
    assert questions[2].choices == (" the sea", " the sky")
    assert len(questions[2].record) == 3
    found = choices.answers(
        decoder, lambda text: list(text.encode()), HEAD, tokens(900), questions, window=400, shared=2
    )
    assert found.right.accuracy()["questions"] == 3
    assert found.chance == pytest.approx((1 / 2 + 1 / 3 + 1 / 2) / 3)
    assert found.same.accuracy()["accuracy"]["TT"]["value"] == 100


def test_without_data_it_says_what_it_skips(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("AFTERGLOW_DATA", raising=False)
    path = tmp_path / "found.json"
    assert truncation.main(["--quick", "--tasks", "wikitext2,piqa", "--json", str(path)]) == 0
    found = json.loads(path.read_text())
    assert found["rows"] == found["goals"] == []
    assert "AFTERGLOW_DATA" in found["skipped"][0]
    (tmp_path / "data").mkdir()
    arguments = ["--tasks", "wikitext2,tinystories,piqa", "--data", str(tmp_path / "data"), "--json", str(path)]
    assert truncation.main(arguments) == 0
    assert len(json.loads(path.read_text())["skipped"]) == 3


def test_stories260k_writes_its_golden_text(tmp_path: Path) -> None:
    source = Path(os.environ.get("AFTERGLOW_DATA", "")) / "stories260k"
    if not (source / "stories260K.bin").is_file():
        pytest.skip("no AFTERGLOW_DATA with stories260k")
    stories260k.convert(source / "stories260K.bin", tmp_path)
    decoder = load_model(tmp_path)
    pieces = stories260k.Pieces(source / "tok512.bin", decoder.spec.vocab)
    golden = re.search(r"Once upon.*?(?=\n```)", (source / "README_stories260K.md").read_text(), re.DOTALL)
    assert golden is not None
    context, ids = Context(decoder), [stories260k.BOS]
    while len(ids) < 257:
        hidden = context.extend(ids[-1:])
        ids.append(int(decoder.logits(hidden[-1:]).argmax()))
    assert pieces.decode(ids[1:]) == golden[0].strip()
    assert pieces.encode(golden[0].strip()) == ids[1:]
