"""vLLM with the same shape on the same machine, where it is installed."""

from __future__ import annotations

import importlib.util
import json
import random
import statistics
import tempfile
from pathlib import Path
from typing import Any

from benchmarks.gpu.decode import MODEL, decode_row
from benchmarks.gpu.models import config_of, shape_of
from benchmarks.gpu.setting import Ceilings, Found, Setting, seconds, table

ABSENT = "vLLM is not installed beside: nothing to compare with"


def beside(setting: Setting, ceilings: Ceilings) -> Found:
    """Time its decode steps as `decode` does Afterglow's: from the time of whole replies, of two lengths."""
    if importlib.util.find_spec("vllm") is None:
        return Found([], [], ABSENT)
    from vllm import LLM, SamplingParams

    shape, rng = shape_of(MODEL, setting), random.Random(setting.seed)
    batches, context, reply = (1, 8, 32, 128), 1024, 96
    rows = []
    with tempfile.TemporaryDirectory(prefix="afterglow-bench-") as folder:
        (Path(folder) / "config.json").write_text(json.dumps(config_of(shape)))
        options: dict[str, Any] = {"load_format": "dummy", "skip_tokenizer_init": True, "max_model_len": 2048}
        engine = LLM(folder, dtype="bfloat16", max_num_seqs=batches[-1], disable_log_stats=True, **options)

        def ask(batch: int, tokens: int) -> float:
            params = SamplingParams(max_tokens=tokens, temperature=0, ignore_eos=True, detokenize=False)
            prompts = [{"prompt_token_ids": each} for each in known[:batch]]
            return seconds(lambda: engine.generate(prompts, params, use_tqdm=False))

        known = [[rng.randrange(3, shape.vocab) for _ in range(context)] for _ in range(batches[-1])]
        for batch in batches:
            ask(batch, 2)  # prompts are cached from here on
            steps = [(ask(batch, reply) - ask(batch, reply // 2)) / (reply - reply // 2) for _ in range(3)]
            rows.append(decode_row(shape, batch, context + 3 * reply // 4, statistics.median(steps), ceilings))
    table(f"vLLM, decoding, {shape.name}, contexts of {context} tokens and more", rows)
    return Found(rows, [])
