"""Tokenizers of `toys.py` as GGUF files, which hold a vocabulary and no weights."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import gguf

from tests.text import toys

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, BYTE = 1, 2, 3, 4, 6


def byte_level(path: Path, pre: str = "gpt-2", *, vocab_size: int = 400, **values: Any) -> Path:
    """Write `toys.byte_level`; `values` are further metadata, names without `tokenizer.ggml.`; None leaves one out."""
    folder = toys.byte_level(path.with_suffix(""), vocab_size=vocab_size)
    state = json.loads((folder / "tokenizer.json").read_text())
    tokens = sorted(state["model"]["vocab"], key=state["model"]["vocab"].__getitem__)
    types = [CONTROL if token.startswith("<|") else NORMAL for token in tokens]
    merges = [" ".join(pair) for pair in state["model"]["merges"]]
    ids = {"eos_token_id": tokens.index("<|im_end|>"), "padding_token_id": tokens.index("<|endoftext|>")}
    found = {"tokens": tokens, "token_type": types, "merges": merges, "pre": pre, **ids, **values}
    return write(path, "gpt2", found, toys.CHATML)


def sentencepiece(path: Path, **values: Any) -> Path:
    """Write `toys.metaspace` as a SentencePiece model: scores instead of merges, and bytes."""
    folder = toys.metaspace(path.with_suffix(""))
    state = json.loads((folder / "tokenizer.json").read_text())
    vocab = state["model"]["vocab"]
    tokens = sorted(vocab, key=vocab.__getitem__)
    made = {"".join(pair): -float(rank) for rank, pair in enumerate(state["model"]["merges"])}
    kinds = {"<unk>": UNKNOWN, "<s>": CONTROL, "</s>": CONTROL}
    types = [kinds.get(token, BYTE if token.startswith("<0x") else NORMAL) for token in tokens]
    scores = [made.get(token, -1e6) for token in tokens]
    ids = {"bos_token_id": tokens.index("<s>"), "eos_token_id": tokens.index("</s>"), "unknown_token_id": 0}
    found = {"tokens": tokens, "token_type": types, "scores": scores, **ids, **values}
    return write(path, "llama", found, toys.INST)


def write(path: Path, kind: str, values: dict[str, Any], template: str | list[dict[str, str]] | None) -> Path:
    """Write a GGUF file with a tokenizer: `values` by names without `tokenizer.ggml.`, and `sampling`, by names without
    `general.sampling.`."""
    writer = gguf.GGUFWriter(path, "llama")
    for name in ("context_length", "embedding_length", "block_count", "feed_forward_length", "head_count"):
        getattr(writer, f"add_{name}")(64)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_tokenizer_model(kind)
    for name, value in values.items():
        key = f"tokenizer.ggml.{name}"
        if name == "sampling":
            for setting, number in value.items():
                add = writer.add_float32 if isinstance(number, float) else writer.add_uint32
                add(f"general.sampling.{setting}", number)
        elif isinstance(value, list):
            writer.add_array(key, value)
        elif isinstance(value, bool):
            writer.add_bool(key, value)
        elif isinstance(value, int):
            writer.add_uint32(key, value)
        elif value is not None:
            writer.add_string(key, value)
    if template is not None:
        writer.add_chat_template(template)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def reference(path: Path) -> Any:
    """Read a file as `transformers` does: as the tokenizer with which a model of the same file comes."""
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name)
