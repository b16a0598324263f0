"""BERT's family against transformers, from the same files; and exact attention over batches of whole sequences."""

from __future__ import annotations

import importlib
import json
from pathlib import Path
from typing import Any

import pytest
import torch

from afterglow.errors import ModelError
from afterglow.model.decoder import Decoder, PlainAttend
from afterglow.model.digest import model_digest, numeric_mode
from afterglow.model.encoder import BatchAttend, Encoder, runs
from afterglow.model.encoder_families import ENCODERS, encoder_from_config
from afterglow.model.loader import is_encoder, load_encoder, load_model, read_spec
from afterglow.model.spec import EncoderSpec
from tests.model.families_hf import save_case

LENGTHS = (1, 23, 23, 40)

_SMALL: dict[str, Any] = {
    "vocab_size": 97,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "max_position_embeddings": 64,
    "type_vocab_size": 2,
}
_ROBERTA = _SMALL | {"type_vocab_size": 1, "pad_token_id": 1, "bos_token_id": 0, "eos_token_id": 2}
_DISTIL = {
    "vocab_size": 97,
    "dim": 48,
    "hidden_dim": 80,
    "n_layers": 3,
    "n_heads": 6,
    "max_position_embeddings": 64,
}

# name -> (transformers module, class, config)
CASES: dict[str, tuple[str, str, dict[str, Any]]] = {
    "bert": ("bert", "BertModel", _SMALL),
    "bert-masked-lm": ("bert", "BertForMaskedLM", _SMALL),
    "bert-pretraining": ("bert", "BertForPreTraining", _SMALL),
    "bert-one-head": ("bert", "BertModel", _SMALL | {"num_attention_heads": 1}),
    "bert-one-type": ("bert", "BertModel", _SMALL | {"type_vocab_size": 1}),
    "bert-gelu-new": ("bert", "BertModel", _SMALL | {"hidden_act": "gelu_new"}),
    "bert-relu": ("bert", "BertModel", _SMALL | {"hidden_act": "relu"}),
    "bert-eps": ("bert", "BertModel", _SMALL | {"layer_norm_eps": 0.1}),
    "roberta": ("roberta", "RobertaModel", _ROBERTA),
    "roberta-padding": ("roberta", "RobertaModel", _ROBERTA | {"pad_token_id": 3}),
    "roberta-masked-lm": ("roberta", "RobertaForMaskedLM", _ROBERTA),
    "xlm-roberta": ("xlm_roberta", "XLMRobertaModel", _ROBERTA),
    "distilbert": ("distilbert", "DistilBertModel", _DISTIL),
    "distilbert-sinus": ("distilbert", "DistilBertModel", _DISTIL | {"sinusoidal_pos_embds": True}),
    "distilbert-masked-lm": ("distilbert", "DistilBertForMaskedLM", _DISTIL),
}


def save_encoder(case: str, directory: Path, **options: Any) -> Any:
    """Writes a random model of `case`, and returns its encoder. Its parameters are large: small ones would hide errors."""
    package, name, config = CASES[case]
    modeling = importlib.import_module(f"transformers.models.{package}.modeling_{package}")
    kind = getattr(modeling, name)
    model = kind(kind.config_class(**config)).eval()
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.15)
            if parameter.ndim == 1 and name.endswith("weight"):
                parameter.add_(1.0)
    model.save_pretrained(directory, **options)
    return getattr(model, model.base_model_prefix, model)


def batch(lengths: tuple[int, ...] = LENGTHS) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(5, 97, (sum(lengths),), generator=generator)
    return ids, torch.cat([torch.arange(n) for n in lengths])


def our_states(model: Encoder | Decoder, lengths: tuple[int, ...] = LENGTHS) -> torch.Tensor:
    ids, positions = batch(lengths)
    return model.forward(ids, positions, BatchAttend(model, positions, lengths))


def their_states(model: Any) -> torch.Tensor:
    ids, _ = batch()
    with torch.inference_mode():
        return torch.cat([model(part[None]).last_hidden_state[0] for part in ids.split(list(LENGTHS))])


@pytest.mark.parametrize("case", CASES)
def test_states_equal_those_of_transformers(case: str, tmp_path: Path) -> None:
    theirs = their_states(save_encoder(case, tmp_path))
    ours = our_states(load_encoder(tmp_path))
    assert theirs.std() > 0.1, "states this flat would hide errors"
    torch.testing.assert_close(ours, theirs, atol=1e-5, rtol=0)


def test_every_family_is_compared() -> None:
    modules = {module.replace("_", "-") for module, _, _ in CASES.values()}
    assert modules == set(ENCODERS)


def test_narrow_and_sharded_checkpoints(tmp_path: Path) -> None:
    model = save_encoder("bert", tmp_path / "wide").to(torch.bfloat16)
    model.save_pretrained(tmp_path / "narrow", max_shard_size="40KB")
    assert len(list((tmp_path / "narrow").glob("*.safetensors"))) > 1
    encoder = load_encoder(tmp_path / "narrow")
    assert encoder.dtype == torch.float32
    assert encoder.spec.dtype == "bfloat16"
    torch.testing.assert_close(our_states(encoder), their_states(model.float()), atol=1e-5, rtol=0)


def test_a_batch_changes_nothing(tmp_path: Path) -> None:
    save_encoder("bert", tmp_path)
    encoder = load_encoder(tmp_path)
    ids, positions = batch()
    together = our_states(encoder)
    start = 0
    for length in LENGTHS:
        rows = slice(start, start + length)
        alone = encoder.forward(ids[rows], positions[rows], BatchAttend(encoder, positions[rows], [length]))
        torch.testing.assert_close(alone, together[rows], atol=1e-5, rtol=0)
        start += length


def test_every_token_sees_every_other(tmp_path: Path) -> None:
    save_encoder("bert", tmp_path)
    encoder = load_encoder(tmp_path)
    ids, positions = torch.arange(5, 25), torch.arange(20)
    before = encoder.forward(ids, positions, BatchAttend(encoder, positions, [20]))
    ids[-1] = 90
    after = encoder.forward(ids, positions, BatchAttend(encoder, positions, [20]))
    assert (before - after).abs().amax(-1).min() > 0.01


@pytest.mark.parametrize("case", ["llama", "llama-mqa", "opt", "phi-2", "falcon-new"])
def test_batches_through_decoders_are_causal(case: str, tmp_path: Path) -> None:
    save_case(case, tmp_path)
    decoder = load_model(tmp_path)
    ids, positions = batch()
    plain = decoder.forward(ids, positions, PlainAttend(decoder, positions, LENGTHS))
    torch.testing.assert_close(our_states(decoder), plain, atol=1e-5, rtol=0)


def test_runs_are_neighbours_of_equal_length() -> None:
    assert runs([5, 5, 9, 5]) == [(2, 5), (1, 9), (1, 5)]
    assert runs([]) == []


# --------------------------------------------------------------------------------------------------- refusals


def edit(directory: Path, **changes: object) -> None:
    path = directory / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"position_embedding_type": "relative_key"}, ("relative_key", "absolute")),
        ({"is_decoder": True}, ("is_decoder",)),
        ({"add_cross_attention": True}, ("cross attention",)),
        ({"architectures": ["BertForSequenceClassification"]}, ("BertForSequenceClassification", "BertModel")),
        ({"hidden_act": "mish"}, ("mish", "gelu")),
        ({"num_attention_heads": 7}, ("48", "7 heads")),
        ({"hidden_size": None}, ("hidden_size",)),
        ({"vocab_size": 96}, ("word_embeddings", "(97, 48)", "(96, 48)")),
        ({"max_position_embeddings": 128}, ("position_embeddings", "(64, 48)", "(128, 48)")),
        ({"quantization_config": {"bits": 4}}, ("quantised",)),
    ],
)
def test_what_is_not_honoured_is_named(changes: dict[str, object], words: tuple[str, ...], tmp_path: Path) -> None:
    save_encoder("bert", tmp_path)
    edit(tmp_path, **changes)
    with pytest.raises(ModelError) as caught:
        load_encoder(tmp_path)
    for word in words:
        assert word in str(caught.value)


def test_each_loader_names_the_other(tmp_path: Path) -> None:
    save_encoder("bert", tmp_path / "bert")
    save_case("llama", tmp_path / "llama")
    assert is_encoder(tmp_path / "bert")
    assert not is_encoder(tmp_path / "llama")
    with pytest.raises(ModelError, match=r"encoder \(bert\).*afterglow embed"):
        load_model(tmp_path / "bert")
    with pytest.raises(ModelError, match="llama decoder"):
        load_encoder(tmp_path / "llama")


def test_digests_name_weights_and_shape(tmp_path: Path) -> None:
    save_encoder("bert", tmp_path)
    mode, cache = numeric_mode("float32", "float32"), tmp_path / "hashes.json"
    before = model_digest(tmp_path, mode, cache_file=cache)
    assert before == model_digest(tmp_path, mode, cache_file=cache)
    edit(tmp_path, layer_norm_eps=1e-5)
    assert before != model_digest(tmp_path, mode, cache_file=cache)


def test_the_spec_says_what_the_files_say(tmp_path: Path) -> None:
    model = save_encoder("roberta", tmp_path)
    spec, _ = read_spec(tmp_path)
    assert isinstance(spec, EncoderSpec)
    assert not spec.causal
    assert spec.max_positions == 62  # two rows of the table are for padding
    matrices = [p for name, p in model.named_parameters() if p.ndim == 2 and "pooler" not in name]
    assert spec.num_parameters == sum(p.numel() for p in matrices)


def test_decoders_keep_their_digests(tmp_path: Path) -> None:
    """A field more in every fingerprint would orphan all that was cached before."""
    save_case("llama", tmp_path)
    fields = json.loads(read_spec(tmp_path)[0].fingerprint())
    assert "token_types" not in fields
    assert "causal" not in fields


@pytest.mark.parametrize(
    "damage",
    [{"hidden_size": "x"}, {"num_attention_heads": 0}, {"hidden_act": []}, {"architectures": True}],
    ids=lambda damage: next(iter(damage)),
)
def test_values_of_another_kind_are_one_line(damage: dict[str, Any]) -> None:
    with pytest.raises(ModelError, match=r"a value in config\.json is damaged") as caught:
        encoder_from_config({"model_type": "bert", **_SMALL, **damage})
    assert "\n" not in str(caught.value)
