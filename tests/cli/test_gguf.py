"""GGUF files on the command line: they run as they are, and mistakes end with one line and exit code 2."""

from __future__ import annotations

from pathlib import Path

import pytest
from benchmarks.peers.random_gguf import write_random
from gguf import GGUFWriter

from afterglow.model.spec import ModelSpec, RopeSpec
from tests.cli.kit import SMALL, afterglow, inside

SPEC = ModelSpec(
    family="llama",
    layers=1,
    hidden=64,
    heads=2,
    kv_heads=1,
    head_dim=32,
    ffn=64,
    vocab=300,
    max_positions=256,
    rope=RopeSpec(dim=32, base=10000.0),
    bos_id=1,
    eos_ids=(2,),
)


@pytest.fixture
def model(tmp_path: Path) -> Path:
    path = tmp_path / "little.Q4_0.gguf"
    write_random(path, SPEC, "Q4_0")
    return path


def test_a_file_generates_and_its_cache_has_its_name(model: Path, tmp_path: Path) -> None:
    cache = str(tmp_path / "cache")
    done = afterglow("generate", str(model), "--prompt", "t270 t280", "--max-tokens", "3", *SMALL, "--cache-dir", cache)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip()
    listed = inside("cache", "ls", "--cache-dir", cache)
    assert "little.Q4_0" in listed.stdout


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("cut.gguf", "which is truncated; download it again"),
        ("foreign.gguf", "no GGUF file"),
        ("absent.gguf", "no such GGUF file"),
        ("part-00002-of-00002.gguf", "is part 2 of 2; name the first, part-00001-of-00002.gguf"),
        ("part-00001-of-00003.gguf", "part-00002-of-00003.gguf is missing"),
        ("bert.gguf", "GGUF architecture 'bert' is not supported"),
        ("words.gguf", "tokenizer kind 'words'"),
    ],
)
@pytest.mark.parametrize("command", ["generate", "serve"])
def test_files_that_cannot_be_used(command: str, name: str, says: str, model: Path, tmp_path: Path) -> None:
    path = tmp_path / name
    if name == "cut.gguf":
        path.write_bytes(model.read_bytes()[:-1000])
    elif name == "foreign.gguf":
        path.write_bytes(b"PK\3\4" + bytes(100))
    elif name.startswith("part"):
        path.write_bytes(model.read_bytes())
    elif name == "words.gguf":
        path.write_bytes(model.read_bytes().replace(b"ggml.model\x08\0\0\0\5\0\0\0\0\0\0\0llama", _named("words")))
    elif name == "bert.gguf":
        _write_bert(path)
    more = ["--prompt", "x"] if command == "generate" else ["--port", "0"]
    done = inside(command, str(path), *more, "--disk-cache", "0")
    assert done.returncode == 2
    assert says in done.stderr
    assert done.stderr.count("\n") == 1


def _named(kind: str) -> bytes:
    return b"ggml.model\x08\0\0\0" + len(kind).to_bytes(8, "little") + kind.encode()


def _write_bert(path: Path) -> None:
    writer = GGUFWriter(path, "bert")
    writer.add_tokenizer_model("llama")
    writer.add_token_list(["<unk>", "<s>", "</s>"])
    writer.add_token_scores([0.0, 0.0, 0.0])
    writer.add_token_types([2, 3, 3])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
