"""Afterglow as a library: `Engine.submit`, all prompts at once. The cache is on, as always; the prompts are new ones.

Options: model, cache (a folder), threads; where they are not the default quantization, speculate and disk (bytes of the disk tier). The mode "save" closes
the engine, which writes what it holds to disk; other modes change nothing, since an engine finds what it holds by itself.
"""

from __future__ import annotations

import json
import sys
import threading
import time
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any

from afterglow.config import CacheConfig, EngineConfig
from afterglow.engine.engine import Engine
from afterglow.request import Output, Request, SamplingParams
from benchmarks.peers.workers.protocol import Answer, Generate, serve

_ids = count()


def start() -> tuple[Generate, dict[str, Any]]:
    options = json.loads(sys.argv[1])
    more = {name: options[name] for name in ("quantization", "max_model_len", "speculate") if options.get(name)}
    budgets = {"disk_cache": 0, "warm_start": False} | options.get("budgets", {})
    cache = CacheConfig(cache_dir=Path(options["cache"]), **budgets)
    began = time.perf_counter()
    engine = Engine.load(options["model"], EngineConfig(cache=cache, threads=options["threads"], max_batch=32, **more))
    engine.start()
    took = time.perf_counter() - began
    settings = {"threads": options["threads"], **budgets, "max_batch": 32, **more, "load_s": took}
    return partial(_generate, engine), settings


def _generate(engine: Engine, prompts: list[list[int]], new: int, mode: str) -> Answer:
    if mode.startswith("save"):
        engine.close(flush=True)
        return [], []
    tokens: list[list[int]] = [[] for _ in prompts]
    stamps: list[list[float]] = [[] for _ in prompts]
    ended = [threading.Event() for _ in prompts]
    errors: list[str] = []

    def take(number: int, output: Output) -> None:
        now = time.perf_counter()
        tokens[number] += output.tokens
        stamps[number] += [now] * len(output.tokens)
        if output.error is not None:
            errors.append(str(output.error))
        if output.finish_reason is not None or output.error is not None:
            ended[number].set()

    sampling = SamplingParams(max_tokens=new, temperature=0, ignore_eos=True)
    for number, prompt in enumerate(prompts):
        engine.submit(Request(f"peer-{next(_ids)}", prompt, sampling), partial(take, number))
    for event in ended:
        event.wait()
    if errors:
        raise RuntimeError(errors[0])
    return tokens, stamps


if __name__ == "__main__":
    serve(start)
