"""A tiny BERT of random weights as a directory, with everything that a published one has."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors.torch import save_file

from afterglow.model.encoder_families import ENCODERS, encoder_from_config
from afterglow.model.presets import RandomSource
from afterglow.model.weights import WeightAssembler

WORDS = [
    "the",
    "a",
    "cat",
    "dog",
    "sat",
    "on",
    "mat",
    "red",
    "blue",
    "kite",
    "mill",
    "river",
    "is",
    "near",
    "old",
    "word",
    "and",
    "ran",
    "in",
    "rain",
]
PIECES = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *WORDS, *"abcdefghijklmnopqrstuvwxyz,.!?", *map("##{}".format, "abcdefghijklmnopqrstuvwxyz")]  # fmt: skip
CONFIG = {
    "model_type": "bert",
    "architectures": ["BertModel"],
    "vocab_size": len(dict.fromkeys(PIECES)),
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 64,
    "type_vocab_size": 2,
}
POOLING = {"word_embedding_dimension": 32, "pooling_mode_cls_token": False, "pooling_mode_mean_tokens": True}


class Large(RandomSource):
    """Weights that are not close to zero: vectors of different texts shall differ."""

    def get(self, name: str, shape: tuple[int, ...]) -> torch.Tensor:
        tensor = super().get(name, shape)
        return tensor if len(shape) == 1 else tensor * 8


def tiny_encoder(folder: Path, *, modules: bool = True, max_tokens: int | None = 48) -> Path:
    """Writes it, and returns `folder`. `modules`: with the files of sentence-transformers."""
    folder.mkdir(parents=True, exist_ok=True)
    spec, names = encoder_from_config(CONFIG)
    assert spec.family in ENCODERS
    source = Large(0)
    source.taken = {}
    drawn: dict[str, torch.Tensor] = {}

    class Keeping:
        def get(self, name: str, shape: tuple[int, ...]) -> torch.Tensor:
            drawn[name] = source.get(name, shape).contiguous()
            return drawn[name]

        def packed(self, name: str, shape: tuple[int, int]) -> None:
            return None

    WeightAssembler(spec, names, Keeping(), torch.float32, torch.device("cpu")).encoder()
    save_file(drawn, folder / "model.safetensors", metadata={"format": "pt"})
    write(folder / "config.json", CONFIG)
    (folder / "vocab.txt").write_text("\n".join(dict.fromkeys(PIECES)) + "\n", "utf-8")
    write(folder / "tokenizer_config.json", {"do_lower_case": True, "tokenizer_class": "BertTokenizer"})
    if modules:
        kinds = (("", "Transformer"), ("1_Pooling", "Pooling"), ("2_Normalize", "Normalize"))
        steps = [{"path": path, "type": f"sentence_transformers.models.{kind}"} for path, kind in kinds]
        write(folder / "modules.json", steps)
        (folder / "1_Pooling").mkdir(exist_ok=True)
        write(folder / "1_Pooling/config.json", POOLING)
        if max_tokens is not None:
            write(folder / "sentence_bert_config.json", {"max_seq_length": max_tokens})
    return folder


def write(path: Path, value: object) -> None:
    path.write_text(json.dumps(value), "utf-8")
