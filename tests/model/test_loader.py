"""Model directories that are whole, and all the ways in which they are not."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from afterglow.errors import ModelError
from afterglow.model.checkpoint import INDEX
from afterglow.model.decoder import PlainAttend
from afterglow.model.digest import model_digest, numeric_mode
from afterglow.model.loader import compute_dtype, load_model, read_spec
from afterglow.model.presets import PRESETS, random_model, save_hf
from tests.model.families_hf import save_case

MODE = numeric_mode("float32", "float32")


@pytest.fixture
def tiny(tmp_path: Path) -> Path:
    save_hf("tiny", tmp_path / "tiny")
    return tmp_path / "tiny"


def refused(directory: Path, *words: str) -> None:
    with pytest.raises(ModelError) as caught:
        load_model(directory)
    message = str(caught.value)
    assert "\n" not in message
    for word in words:
        assert word in message


def edit(directory: Path, **changes: object) -> None:
    path = directory / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def test_no_directory(tmp_path: Path) -> None:
    refused(tmp_path / "nowhere", "nowhere", "no such model directory", "bench-100m")


def test_no_config(tiny: Path) -> None:
    (tiny / "config.json").unlink()
    refused(tiny, "config.json")


@pytest.mark.parametrize("text", ["", "{", "[]", "\xff"])
def test_config_that_is_no_json_object(tiny: Path, text: str) -> None:
    (tiny / "config.json").write_text(text, encoding="latin-1")
    refused(tiny, "config.json", "JSON")


def test_no_weights(tiny: Path) -> None:
    (tiny / "model.safetensors").unlink()
    refused(tiny, "no model.safetensors")


def test_pickled_weights_only(tiny: Path) -> None:
    (tiny / "model.safetensors").rename(tiny / "pytorch_model.bin")
    refused(tiny, "pytorch_model.bin", "pickle", "save_pretrained")


@pytest.mark.parametrize("keep", [0, 5, 100, -1])
def test_truncated_weights(tiny: Path, keep: int) -> None:
    path = tiny / "model.safetensors"
    data = path.read_bytes()
    path.write_bytes(data[:keep] if keep >= 0 else data[:-1000])
    refused(tiny, "model.safetensors", "damaged or incomplete")


def test_missing_tensor(tiny: Path) -> None:
    tensors = load_file(tiny / "model.safetensors")
    del tensors["model.layers.1.mlp.up_proj.weight"]
    save_file(tensors, tiny / "model.safetensors")
    refused(tiny, "lack model.layers.1.mlp.up_proj.weight")


def test_wrong_shape(tiny: Path) -> None:
    edit(tiny, vocab_size=513)
    refused(tiny, "embed_tokens", "(512, 64)", "(513, 64)")


def test_quantised_tensors(tiny: Path) -> None:
    tensors = load_file(tiny / "model.safetensors")
    tensors["model.layers.0.self_attn.q_proj.weight"] = torch.zeros(64, 64, dtype=torch.int8)
    save_file(tensors, tiny / "model.safetensors")
    refused(tiny, "q_proj", "I8", "float16")


def test_missing_shard_and_bad_index(tiny: Path) -> None:
    (tiny / "model.safetensors").unlink()
    (tiny / INDEX).write_text(json.dumps({"weight_map": {"a": "model-00001-of-00002.safetensors"}}))
    refused(tiny, "model-00001-of-00002.safetensors", "missing")
    (tiny / INDEX).write_text(json.dumps({"weight_map": {"a": "../../secret.safetensors"}}))
    refused(tiny, INDEX, "file names")
    (tiny / INDEX).write_text(json.dumps({}))
    refused(tiny, INDEX)


def test_weights_that_can_be_read_in_two_ways_are_refused(tiny: Path) -> None:
    """Transformers takes the single file, and adapters where there is a package for them."""
    (tiny / INDEX).write_text(json.dumps({"weight_map": {"a": "model-00001-of-00002.safetensors"}}))
    refused(tiny, "there are both model.safetensors and", INDEX)
    (tiny / INDEX).write_text(json.dumps({"weight_map": {"a": "model.safetensors"}}))
    load_model(tiny)
    (tiny / "adapter_config.json").write_text("{}")
    refused(tiny, "adapters (adapter_config.json) are not supported")


def test_a_dtype_that_is_none_is_named() -> None:
    assert compute_dtype("auto", "auto", torch.device("cpu")) == torch.float32
    with pytest.raises(ModelError, match=r"dtype 'auto', which is none of .*; choose one with --dtype"):
        compute_dtype("auto", "auto", torch.device("cuda", 0))


def test_float16_arithmetic_on_cpu(tiny: Path) -> None:
    with pytest.raises(ModelError, match="float16 is not possible on CPU"):
        load_model(tiny, dtype="float16")


def test_too_long_a_context_is_refused_before_the_weights(tiny: Path) -> None:
    (tiny / "model.safetensors").unlink()
    with pytest.raises(ModelError, match="2048 positions"):
        load_model(tiny, max_model_len=4096)


def test_names_without_the_outer_module(tiny: Path) -> None:
    whole = load_model(tiny)
    tensors = load_file(tiny / "model.safetensors")
    save_file({name.removeprefix("model."): t for name, t in tensors.items()}, tiny / "model.safetensors")
    ids = torch.arange(9)
    first, second = (d.forward(ids, ids, PlainAttend(d, ids, [9])) for d in (whole, load_model(tiny)))
    assert torch.equal(first, second)


def test_the_files_say_which_dtype_the_checkpoint_has(tiny: Path) -> None:
    edit(tiny, dtype="float16", torch_dtype="float16")
    assert load_model(tiny).spec.dtype == "float32"


def test_end_of_sequence_ids_of_the_generation_config_are_added(tiny: Path) -> None:
    (tiny / "generation_config.json").write_text(json.dumps({"eos_token_id": [2, 7]}))
    assert load_model(tiny).spec.eos_ids == (2, 7)


@pytest.mark.parametrize("ids", [[[2]], {"a": 1}, "</s>", [None], 2.5, True])
def test_end_of_sequence_ids_that_are_no_numbers_are_refused(tiny: Path, ids: object) -> None:
    (tiny / "generation_config.json").write_text(json.dumps({"eos_token_id": ids}))
    with pytest.raises(ModelError, match=r"eos_token_id in generation_config\.json") as caught:
        read_spec(tiny)
    assert "\n" not in str(caught.value)


def test_json_that_nests_too_deeply_is_refused(tiny: Path) -> None:
    (tiny / "config.json").write_text('{"a": ' + "[" * 100_000 + "]" * 100_000 + "}")
    with pytest.raises(ModelError, match=r"config\.json: cannot be read as JSON"):
        read_spec(tiny)


def test_progress_is_monotonic_and_ends_at_the_total(tiny: Path) -> None:
    calls: list[tuple[int, int]] = []
    load_model(tiny, progress=lambda done, total: calls.append((done, total)))
    done = [d for d, _ in calls]
    assert done == sorted(done)
    assert len(done) > 10
    assert calls[-1] == ((tiny / "model.safetensors").stat().st_size,) * 2


def test_a_loaded_model_survives_its_files(tiny: Path) -> None:
    """Tensors that stay must be copies: a view of a mapped file changes when the file does."""
    decoder = load_model(tiny)
    ids = torch.arange(9)
    before = decoder.forward(ids, ids, PlainAttend(decoder, ids, [9]))
    with (tiny / "model.safetensors").open("r+b") as file:
        file.seek(4096)
        file.write(b"\xff" * 200_000)
    assert torch.equal(decoder.forward(ids, ids, PlainAttend(decoder, ids, [9])), before)


def test_presets_are_reproducible_and_readable_by_transformers(tiny: Path) -> None:
    from transformers.models.llama.modeling_llama import LlamaForCausalLM

    ids = torch.arange(3, 40)
    positions = torch.arange(37)
    models = [random_model(PRESETS["tiny"], 0), load_model("tiny"), load_model(tiny)]
    logits = [m.logits(m.forward(ids, positions, PlainAttend(m, positions, [37]))) for m in models]
    assert torch.equal(logits[0], logits[1])
    assert torch.equal(logits[0], logits[2])
    with torch.inference_mode():
        theirs = LlamaForCausalLM.from_pretrained(tiny)(ids[None]).logits[0]
    torch.testing.assert_close(logits[0], theirs, atol=1e-4, rtol=0)
    other = random_model(PRESETS["tiny"], 1)
    hidden = other.forward(ids, positions, PlainAttend(other, positions, [37]))
    assert not torch.allclose(other.logits(hidden), logits[0], atol=1e-2), "another seed is another model"


def test_the_bench_preset_has_about_100_million_weights() -> None:
    assert 90e6 < PRESETS["bench-100m"].num_parameters < 140e6


def test_the_digest_names_what_keys_and_values_depend_on(tiny: Path, tmp_path: Path) -> None:
    cache = tmp_path / "cache" / "hashes.json"

    def digest(mode: str = MODE) -> str:
        return model_digest(tiny, mode, cache_file=cache)

    first = digest()
    assert len(first) == 64
    assert digest() == first
    assert digest(numeric_mode("float32", "bfloat16")) != first
    edit(tiny, rope_theta=20000.0)
    assert digest() != first
    edit(tiny, rope_theta=10000.0, bos_token_id=9, transformers_version="9")
    assert digest() == first, "nothing that changes keys and values has changed"
    path = tiny / "model.safetensors"
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    assert digest() != first


def test_a_moved_or_unreadable_hash_cache_changes_nothing(tiny: Path, tmp_path: Path) -> None:
    cache = tmp_path / "hashes.json"
    first = model_digest(tiny, MODE, cache_file=cache)
    remembered = json.loads(cache.read_text())
    assert len(remembered) == 1
    for damage in ("{", "[]", json.dumps(dict.fromkeys(remembered, 3))):
        cache.write_text(damage)
        assert model_digest(tiny, MODE, cache_file=cache) == first
    assert json.loads(cache.read_text()) == remembered
    assert model_digest(tiny, MODE, cache_file=Path("/proc/nowhere/hashes.json")) == first


def test_the_hash_cache_is_used(tiny: Path, tmp_path: Path) -> None:
    cache = tmp_path / "hashes.json"
    first = model_digest(tiny, MODE, cache_file=cache)
    cache.write_text(json.dumps(dict.fromkeys(json.loads(cache.read_text()), "0" * 64)))
    assert model_digest(tiny, MODE, cache_file=cache) != first


def test_digests_of_presets_and_seeds_differ() -> None:
    digests = {model_digest(name, MODE, seed=seed) for name in PRESETS for seed in (0, 1)}
    assert len(digests) == 2 * len(PRESETS)


def test_sharding_reads_the_same(tmp_path: Path) -> None:
    save_case("falcon-new", tmp_path / "one")
    save_case("falcon-new", tmp_path / "many", max_shard_size="20KB")
    ids = torch.arange(9)
    models = [load_model(tmp_path / name) for name in ("one", "many")]
    first, second = (d.forward(ids, ids, PlainAttend(d, ids, [9])) for d in models)
    assert torch.equal(first, second)
