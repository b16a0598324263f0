"""onnxruntime-genai: its generator, greedy, one padded batch. Runs in onnxruntime's environment."""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime_genai as og

from benchmarks.peers.workers.protocol import Answer, Generate, serve


class _Runner:
    def __init__(self, options: dict[str, Any]) -> None:
        config = og.Config(options["model"])
        config.overlay(
            json.dumps({"model": {"decoder": {"session_options": {"intra_op_num_threads": options["threads"]}}}})
        )
        self.model = og.Model(config)
        self.eos = json.loads((Path(options["model"]) / "genai_config.json").read_text())["model"]["eos_token_id"]

    def generate(self, prompts: list[list[int]], new: int, mode: str) -> Answer:
        length = len(prompts[0])
        params = og.GeneratorParams(self.model)
        params.set_search_options(
            batch_size=len(prompts), max_length=length + new, min_length=length + new, do_sample=False
        )
        generator = og.Generator(self.model, params)
        stamps: list[float] = []
        generator.append_tokens(np.asarray(prompts, dtype=np.int32))
        for _ in range(new):
            generator.generate_next_token()
            stamps.append(time.perf_counter())
        tokens = [[int(t) for t in generator.get_sequence(i)[length:]] for i in range(len(prompts))]
        return tokens, [stamps] * len(prompts)


def start() -> tuple[Generate, dict[str, Any]]:
    options = json.loads(sys.argv[1])
    return _Runner(options).generate, {"threads": options["threads"]}


if __name__ == "__main__":
    serve(start)
