"""The machine's own limit of decoding: each token reads every matrix once, so memory bandwidth over their bytes."""

from __future__ import annotations

import time
from pathlib import Path

import torch

from afterglow.gguf_file import open_gguf

WORDS = 2**28  # of four bytes: a gibibyte, many times any cache


def bandwidth(threads: int, repeats: int = 5, words: int = WORDS) -> float:
    """Bytes per second that so many threads read, at best, when they do no more than add what they read."""
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        numbers, best = torch.ones(words), float("inf")
        for _ in range(repeats):
            began = time.perf_counter()
            numbers.sum()
            best = min(best, time.perf_counter() - began)
    finally:
        torch.set_num_threads(before)
    return numbers.nbytes / best


def bytes_per_token(path: Path) -> int:
    """Bytes of a GGUF file's tensors that one decoded token reads: all, the embedding table only where it is the head too."""
    sizes = {name: tensor.blocks.nbytes for name, tensor in open_gguf(path).tensors.items()}
    table = sizes["token_embd.weight"] if "output.weight" in sizes else 0
    return sum(sizes.values()) - table
