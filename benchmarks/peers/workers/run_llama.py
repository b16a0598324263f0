"""llama.cpp through its C interface: `llama_decode` over one batch of all sequences. Runs in llama.cpp's environment.

Modes: "" answers prompts with nothing kept; "continue" goes on from the tokens that the one sequence holds; "save FILE" writes that
sequence (llama.cpp's own state file), "restore FILE" reads it and goes on.
"""

from __future__ import annotations

import ctypes
import json
import sys
import time
from typing import Any

import llama_cpp as ll
import numpy as np

from benchmarks.peers.workers.protocol import Answer, Generate, serve

BATCH = 2048  # llama.cpp's own default for prompt tokens in one call
FLASH = {
    None: ll.LLAMA_FLASH_ATTN_TYPE_AUTO,
    True: ll.LLAMA_FLASH_ATTN_TYPE_ENABLED,
    False: ll.LLAMA_FLASH_ATTN_TYPE_DISABLED,
}

Row = tuple[int, int, int, bool]
"""Token, position, sequence, whether its logits are wanted."""


class Runner:
    """A model and a context. `options`: model, context, sequences, threads, kv ("float32", or llama.cpp's default), and of
    its flags flash, repack, mmap and ubatch where they are not the default."""

    def __init__(self, options: dict[str, Any]) -> None:
        began = time.perf_counter()
        ll.llama_backend_init()
        self.model = ll.llama_model_load_from_file(options["model"].encode(), _model_params(options))
        if not self.model:
            raise RuntimeError(f"llama.cpp cannot load {options['model']}")
        params = _context_params(options)
        self.context = ll.llama_init_from_model(self.model, params)
        if not self.context:
            raise RuntimeError("llama.cpp cannot make a context")
        self.memory = ll.llama_get_memory(self.context)
        self.vocab = ll.llama_vocab_n_tokens(ll.llama_model_get_vocab(self.model))
        self.batch = ll.llama_batch_init(BATCH, 0, 1)
        self.held: list[int] = []  # tokens of sequence 0 whose rows are in memory
        self.settings: dict[str, Any] = {
            "kv": options["kv"],
            "n_batch": BATCH,
            "n_ubatch": params.n_ubatch,
            "threads": params.n_threads,
            "load_s": time.perf_counter() - began,
            **{name: options[name] for name in ("flash", "repack", "mmap") if name in options},
        }

    def generate(self, prompts: list[list[int]], new: int, mode: str) -> Answer:
        what, _, path = mode.partition(" ")
        if what == "save":
            self._save(path)
            return [], []
        if what == "restore":
            self._restore(path)
        kept = self._kept(prompts[0]) if what in ("continue", "restore") else 0
        if kept:
            ll.llama_memory_seq_rm(self.memory, 0, kept, -1)
        else:
            ll.llama_memory_clear(self.memory, True)
        tokens: list[list[int]] = [[] for _ in prompts]
        stamps: list[list[float]] = [[] for _ in prompts]
        rows = [
            (token, place, number, place == len(prompt) - 1)
            for number, prompt in enumerate(prompts)
            for place, token in enumerate(prompt)
            if place >= kept
        ]
        for begin in range(0, len(rows), BATCH):
            self._decode(rows[begin : begin + BATCH], tokens, stamps)
        for step in range(new - 1):
            rows = [(tokens[n][-1], len(prompt) + step, n, True) for n, prompt in enumerate(prompts)]
            self._decode(rows, tokens, stamps)
        self.held = [*prompts[0], *tokens[0][:-1]]
        return tokens, stamps

    def logits(self, rows: list[Row]) -> np.ndarray:
        """Compute one batch from an empty memory: float32 [wanted rows, vocab]."""
        ll.llama_memory_clear(self.memory, True)
        self._run(rows)
        return np.stack([self._logits_of(i) for i, row in enumerate(rows) if row[3]])

    def _decode(self, rows: list[Row], tokens: list[list[int]], stamps: list[list[float]]) -> None:
        self._run(rows)
        for i, (_, _, number, wanted) in enumerate(rows):
            if wanted:
                tokens[number].append(int(self._logits_of(i).argmax()))
                stamps[number].append(time.perf_counter())

    def _run(self, rows: list[Row]) -> None:
        batch = self.batch
        batch.n_tokens = len(rows)
        for i, (token, place, number, wanted) in enumerate(rows):
            batch.token[i], batch.pos[i], batch.n_seq_id[i], batch.logits[i] = token, place, 1, wanted
            batch.seq_id[i][0] = number
        if status := ll.llama_decode(self.context, batch):
            raise RuntimeError(f"llama_decode answers {status}")

    def _logits_of(self, row: int) -> np.ndarray:
        logits = ctypes.cast(ll.llama_get_logits_ith(self.context, row), ctypes.POINTER(ctypes.c_float))
        return np.ctypeslib.as_array(logits, (self.vocab,))

    def _kept(self, prompt: list[int]) -> int:
        """Tokens that the prompt begins with and that are in memory; its last one is computed again, for its logits."""
        most = min(len(self.held), len(prompt) - 1)
        return next((i for i in range(most) if self.held[i] != prompt[i]), most)

    def _save(self, path: str) -> None:
        ids = (ll.llama_token * len(self.held))(*self.held)
        if not ll.llama_state_seq_save_file(self.context, path.encode(), 0, ids, len(self.held)):
            raise RuntimeError(f"llama.cpp cannot write its state to {path}")

    def _restore(self, path: str) -> None:
        room = ll.llama_n_ctx(self.context)
        ids, count = (ll.llama_token * room)(), ctypes.c_size_t(0)
        if not ll.llama_state_seq_load_file(self.context, path.encode(), 0, ids, room, ctypes.byref(count)):
            raise RuntimeError(f"llama.cpp cannot read its state from {path}")
        self.held = list(ids[: count.value])


def _model_params(options: dict[str, Any]) -> Any:
    params = ll.llama_model_default_params()
    params.use_extra_bufts = options.get("repack", params.use_extra_bufts)
    if not options.get("mmap", True):
        params.load_mode = ll.LLAMA_LOAD_MODE_NONE
    return params


def _context_params(options: dict[str, Any]) -> Any:
    params = ll.llama_context_default_params()
    params.n_ctx, params.n_seq_max, params.n_batch = options["context"], options["sequences"], BATCH
    params.n_ubatch = options.get("ubatch", params.n_ubatch)
    params.n_threads = params.n_threads_batch = options["threads"]
    params.kv_unified = True
    params.flash_attn_type = FLASH[options.get("flash")]
    if options["kv"] == "float32":
        params.type_k = params.type_v = ll.GGML_TYPE_F32
    return params


def start() -> tuple[Generate, dict[str, Any]]:
    runner = Runner(json.loads(sys.argv[1]))
    return runner.generate, runner.settings


if __name__ == "__main__":
    serve(start)
