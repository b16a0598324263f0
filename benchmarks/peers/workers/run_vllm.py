"""vLLM as a library: its engine's own steps, all prompts at once. Runs in vLLM's environment."""

from __future__ import annotations

import json
import sys
import time
from functools import partial
from itertools import count
from typing import Any

from benchmarks.peers.workers.protocol import Answer, Generate, serve

_ids = count()


def start() -> tuple[Generate, dict[str, Any]]:
    from vllm import LLM

    options = json.loads(sys.argv[1])
    settings = {
        "dtype": "float32",
        "enforce_eager": not options["compiled"],
        "max_model_len": options["context"],
        "max_num_seqs": 32,
    }
    model = LLM(options["model"], skip_tokenizer_init=True, disable_log_stats=True, **settings)
    return partial(_generate, model), settings


def _generate(model: Any, prompts: list[list[int]], new: int, _: str) -> Answer:
    from vllm import SamplingParams

    params = SamplingParams(max_tokens=new, temperature=0, ignore_eos=True, detokenize=False)
    tokens: list[list[int]] = [[] for _ in prompts]
    stamps: list[list[float]] = [[] for _ in prompts]
    numbers = {}
    engine = model.llm_engine
    for number, prompt in enumerate(prompts):
        name = f"peer-{next(_ids)}"
        numbers[name] = number
        engine.add_request(name, {"prompt_token_ids": prompt}, params)
    while engine.has_unfinished_requests():
        for output in engine.step():
            number = numbers[output.request_id]
            now, all_tokens = time.perf_counter(), list(output.outputs[0].token_ids)
            stamps[number] += [now] * (len(all_tokens) - len(tokens[number]))
            tokens[number] = all_tokens
    return tokens, stamps


if __name__ == "__main__":
    serve(start)
