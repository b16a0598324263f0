"""llama.cpp through its C interface: `llama_decode` over one batch of all sequences. Runs in llama.cpp's environment."""

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


class _Runner:
    def __init__(self, options: dict[str, Any]) -> None:
        ll.llama_backend_init()
        self.model = ll.llama_model_load_from_file(options["model"].encode(), ll.llama_model_default_params())
        if not self.model:
            raise RuntimeError(f"llama.cpp cannot load {options['model']}")
        params = ll.llama_context_default_params()
        params.n_ctx, params.n_seq_max, params.n_batch = options["context"], options["sequences"], BATCH
        params.n_threads = params.n_threads_batch = options["threads"]
        params.kv_unified = True
        if options["kv"] == "float32":
            params.type_k = params.type_v = ll.GGML_TYPE_F32
        self.context = ll.llama_init_from_model(self.model, params)
        if not self.context:
            raise RuntimeError("llama.cpp cannot make a context")
        self.vocab = ll.llama_vocab_n_tokens(ll.llama_model_get_vocab(self.model))
        self.batch = ll.llama_batch_init(BATCH, 0, 1)
        self.settings = {
            "kv": options["kv"],
            "n_batch": BATCH,
            "n_ubatch": params.n_ubatch,
            "threads": params.n_threads,
        }

    def generate(self, prompts: list[list[int]], new: int, _: str) -> Answer:
        ll.llama_memory_clear(ll.llama_get_memory(self.context), True)
        tokens: list[list[int]] = [[] for _ in prompts]
        stamps: list[list[float]] = [[] for _ in prompts]
        # (token, position, sequence, whether its logits are wanted), as many in a call as a batch holds
        rows = [
            (token, place, number, place == len(prompt) - 1)
            for number, prompt in enumerate(prompts)
            for place, token in enumerate(prompt)
        ]
        for begin in range(0, len(rows), BATCH):
            self._decode(rows[begin : begin + BATCH], tokens, stamps)
        for step in range(new - 1):
            rows = [(tokens[n][-1], len(prompt) + step, n, True) for n, prompt in enumerate(prompts)]
            self._decode(rows, tokens, stamps)
        return tokens, stamps

    def _decode(
        self, rows: list[tuple[int, int, int, bool]], tokens: list[list[int]], stamps: list[list[float]]
    ) -> None:
        batch = self.batch
        batch.n_tokens = len(rows)
        for i, (token, place, number, wanted) in enumerate(rows):
            batch.token[i], batch.pos[i], batch.n_seq_id[i], batch.logits[i] = token, place, 1, wanted
            batch.seq_id[i][0] = number
        if status := ll.llama_decode(self.context, batch):
            raise RuntimeError(f"llama_decode answers {status}")
        for i, (_, _, number, wanted) in enumerate(rows):
            if wanted:
                logits = ctypes.cast(ll.llama_get_logits_ith(self.context, i), ctypes.POINTER(ctypes.c_float))
                tokens[number].append(int(np.ctypeslib.as_array(logits, (self.vocab,)).argmax()))
                stamps[number].append(time.perf_counter())


def start() -> tuple[Generate, dict[str, Any]]:
    runner = _Runner(json.loads(sys.argv[1]))
    return runner.generate, runner.settings


if __name__ == "__main__":
    serve(start)
