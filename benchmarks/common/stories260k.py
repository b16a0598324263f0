"""The `stories260K` model of llama2.c as a Hugging Face directory and a tokenizer: a model that was trained elsewhere.

Its file is a header of seven int32, then float32 matrices, layer after layer. Two things differ from what the loader
reads: rotary pairs lie side by side there and half a head apart here (rows of q and k are sorted), and its tokenizer
is a list of scored pieces without a `tokenizer.json`.
"""

from __future__ import annotations

import json
import re
import struct
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import save_file
from torch import Tensor

from afterglow.model.presets import llama_config
from afterglow.model.spec import ModelSpec, RopeSpec

BOS = 1


def convert(source: Path, directory: Path) -> None:
    """Write `stories260K.bin` (llama2.c's first format) as a model directory that `load_model` reads."""
    data = source.read_bytes()
    hidden, ffn, layers, heads, kv_heads, vocab, window = struct.unpack_from("7i", data)
    if vocab < 0:
        raise ValueError(f"{source}: a head of its own (negative vocabulary) is not supported")
    numbers = torch.from_numpy(np.frombuffer(data, dtype=np.float32, offset=28).copy())
    size = hidden // heads
    spec = ModelSpec(
        family="llama",
        layers=layers,
        hidden=hidden,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=size,
        ffn=ffn,
        vocab=vocab,
        max_positions=window,
        norm_eps=1e-5,
        rope=RopeSpec(dim=size, base=10000.0),
        tied_embeddings=True,
        bos_id=BOS,
        eos_ids=(BOS, 2),
    )
    tensors = dict(_tensors(spec, numbers))
    directory.mkdir(parents=True, exist_ok=True)
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
    (directory / "config.json").write_text(json.dumps(llama_config(spec), indent=2) + "\n", encoding="utf-8")


def _tensors(spec: ModelSpec, numbers: Tensor) -> Iterator[tuple[str, Tensor]]:
    """Names and tensors in the order of the file; the rotary tables at its end are not read."""
    at = 0

    def take(*shape: int) -> Tensor:
        nonlocal at
        count = int(np.prod(shape))
        at += count
        return numbers[at - count : at].reshape(shape).clone()

    def each(name: str, *shape: int, sort: bool = False) -> Iterator[tuple[str, Tensor]]:
        for layer, matrix in enumerate(take(spec.layers, *shape)):
            if sort:  # (even, odd) pairs of each head to (first half, second half)
                matrix = matrix.reshape(-1, spec.head_dim // 2, 2, spec.hidden).transpose(1, 2).reshape(shape)
            yield f"model.layers.{layer}.{name}.weight", matrix.contiguous()

    width, kv_width = spec.heads * spec.head_dim, spec.kv_heads * spec.head_dim
    yield "model.embed_tokens.weight", take(spec.vocab, spec.hidden)
    yield from each("input_layernorm", spec.hidden)
    yield from each("self_attn.q_proj", width, spec.hidden, sort=True)
    yield from each("self_attn.k_proj", kv_width, spec.hidden, sort=True)
    yield from each("self_attn.v_proj", kv_width, spec.hidden)
    yield from each("self_attn.o_proj", spec.hidden, width)
    yield from each("post_attention_layernorm", spec.hidden)
    yield from each("mlp.gate_proj", spec.ffn, spec.hidden)
    yield from each("mlp.down_proj", spec.hidden, spec.ffn)
    yield from each("mlp.up_proj", spec.ffn, spec.hidden)
    yield "model.norm.weight", take(spec.hidden)


class Pieces:
    """llama2.c's tokenizer: characters (or bytes), then the best-scored neighbours joined until none are left."""

    def __init__(self, path: Path, vocab: int) -> None:
        """`path`: the longest piece's length as int32, then score (float32), length (int32) and text of each."""
        data, at = path.read_bytes(), 4
        self._text: list[bytes] = []
        self._scores: list[float] = []
        for _ in range(vocab):
            score, length = struct.unpack_from("fi", data, at)
            self._text.append(data[at + 8 : at + 8 + length])
            self._scores.append(score)
            at += 8 + length
        self._ids = {text: token for token, text in enumerate(self._text)}
        self._words: dict[str, list[int]] = {}

    def encode(self, text: str) -> list[int]:
        """Ids without BOS. As in SentencePiece a space goes before the text, and no piece goes on after a word."""
        ids: list[int] = []
        for word in re.findall(r" ?[^ ]+| +", " " + text):
            if word not in self._words:
                self._words[word] = self._join(word)
            ids += self._words[word]
        return ids

    def decode(self, ids: list[int]) -> str:
        """Decode ids that follow BOS; the leading space of the first is dropped."""
        raw = b"".join(
            bytes([int(piece[3:5], 16)]) if re.fullmatch(rb"<0x..>", piece) else piece
            for piece in (self._text[token] for token in ids)
        )
        return raw.decode("utf-8", "replace").removeprefix(" ")

    def _join(self, word: str) -> list[int]:
        ids: list[int] = []
        for character in word:
            raw = character.encode()
            ids += [self._ids[raw]] if raw in self._ids else [byte + 3 for byte in raw]
        while len(ids) > 1:
            pairs = [
                (-self._scores[token], i)
                for i in range(len(ids) - 1)
                if (token := self._ids.get(self._text[ids[i]] + self._text[ids[i + 1]])) is not None
            ]
            if not pairs:
                break
            _, i = min(pairs)
            ids[i : i + 2] = [self._ids[self._text[ids[i]] + self._text[ids[i + 1]]]]
        return ids
