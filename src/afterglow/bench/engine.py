"""Prefill and decode speed against transformers: same weights, same prompts, same threads, taking turns."""

from __future__ import annotations

import random
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from afterglow.bench.report import arguments, finish, goal, interleaved, show, spread
from afterglow.bench.timed_requests import greedy, running, words
from afterglow.config import CacheConfig, EngineConfig
from afterglow.engine.engine import Engine
from afterglow.errors import ConfigError
from afterglow.model.presets import PRESETS, save_hf

PREFILL, DECODE_PROMPT, DECODED = 1024, 256, 64


def main(args: Sequence[str]) -> int:
    """`afterglow bench engine`."""
    parser = arguments("afterglow bench engine", __doc__ or "")
    parser.add_argument("--model", default="bench-100m", choices=sorted(PRESETS), help="preset (default bench-100m)")
    options = parser.parse_args(args)
    repeats = 3 if options.quick else 5
    with tempfile.TemporaryDirectory(prefix="afterglow-bench-") as folder:
        save_hf(options.model, Path(folder), seed=options.seed)
        config = EngineConfig(
            cache=CacheConfig(disk_cache=0), max_model_len=4096, threads=options.threads, speculate="off"
        )  # replies of random weights go round in circles, which guesses would follow
        with running(folder, config) as engine:
            rng = random.Random(options.seed)
            ours, theirs = _Ours(engine), _Transformers(Path(folder))
            _agree(ours, theirs, words(rng, engine, 64))
            long = words(rng, engine, PREFILL)
            one, *eight = (words(rng, engine, DECODE_PROMPT) for _ in range(9))
            found = _measure(ours, theirs, long, one, eight, repeats)
    rows = [
        {"name": name, "tokens_per_s": round(statistics.median(s), 2), "spread": round(spread(s), 4)}
        for name, s in found.items()
    ]
    show(
        f"{options.model}, float32, tokens/s (median of {repeats})",
        ("", "tokens/s", "spread"),
        [(r["name"], r["tokens_per_s"], f"{100 * float(str(r['spread'])):.0f} %") for r in rows],
    )
    finish(options, rows, _goals(found), model=options.model)
    return 0


def _goals(found: dict[str, list[float]]) -> list[dict[str, Any]]:
    mid = {name: statistics.median(s) for name, s in found.items()}
    noise = {name: spread(s) for name, s in found.items()}

    def ratio(name: str, ours: str, theirs: str, wanted: float) -> dict[str, Any]:
        apart = max(noise[ours], noise[theirs])
        return goal(name, mid[ours] / mid[theirs], wanted, least=True, spread=apart)

    return [
        ratio("prefill / generate", "prefill", "prefill, generate", 1.0),
        ratio("decode, batch 1 / generate", "decode, batch 1", "decode, batch 1, generate", 1.2),
        ratio("batch 8 / continuous batching", "batch 8", "batch 8, continuous batching", 3.0),
    ]


class _Ours:
    """Afterglow as a library, with reuse off."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    def run(self, prompts: list[list[int]], new: int) -> tuple[float, list[list[int]]]:
        requests = [greedy(p, new, reuse=False) for p in prompts]
        began = time.perf_counter()
        done = self._engine.generate(requests)
        return time.perf_counter() - began, [list(d.tokens) for d in done]


class _Transformers:
    """`generate` and `generate_batch` of the same checkpoint."""

    def __init__(self, folder: Path) -> None:
        try:
            from transformers import GenerationConfig, LlamaForCausalLM
        except ImportError:
            raise ConfigError("this benchmark compares with transformers: pip install transformers") from None
        import torch

        self._torch = torch
        model: Any = LlamaForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="sdpa")
        self._model = model.eval()
        self._config: Any = GenerationConfig

    def run(self, prompts: list[list[int]], new: int) -> tuple[float, list[list[int]]]:
        ids = self._torch.tensor(prompts)
        began = time.perf_counter()
        with self._torch.inference_mode():
            out = self._model.generate(
                ids,
                attention_mask=self._torch.ones_like(ids),
                max_new_tokens=new,
                min_new_tokens=new,
                do_sample=False,
                pad_token_id=0,
            )
        return time.perf_counter() - began, out[:, ids.shape[1] :].tolist()

    def run_batched(self, prompts: list[list[int]], new: int) -> tuple[float, list[list[int]]]:
        config = self._config(max_new_tokens=new, do_sample=False, eos_token_id=-1, pad_token_id=0)
        began = time.perf_counter()
        out = self._model.generate_batch(prompts, generation_config=config, progress_bar=False)
        seconds = time.perf_counter() - began
        return seconds, [list(o.generated_tokens) for o in out.values()]


def _agree(ours: _Ours, theirs: _Transformers, prompt: list[int]) -> None:
    """Same weights must mean same first tokens; otherwise no timing below means anything."""
    a, b = ours.run([prompt], 4)[1], theirs.run([prompt], 4)[1]
    if a != b:
        raise RuntimeError(f"the two engines disagree: {a} and {b}")


def _measure(
    ours: _Ours, theirs: _Transformers, long: list[int], one: list[int], eight: list[list[int]], repeats: int
) -> dict[str, list[float]]:
    Run = Callable[[list[list[int]], int], tuple[float, list[list[int]]]]

    def prefill(run: Run) -> float:
        return PREFILL / run([long], 1)[0]

    def decode(run: Run, prompts: list[list[int]]) -> float:
        """Tokens/s after the first token: the difference of a long and a one-token reply."""
        begun = run(prompts, 1)[0]
        return DECODED * len(prompts) / max(run(prompts, DECODED + 1)[0] - begun, 1e-9)

    def whole(run: Run) -> float:
        """Generated tokens/s of eight requests, prefill included."""
        return 8 * (DECODED + 1) / run(eight, DECODED + 1)[0]

    return interleaved(
        {
            "prefill": lambda: prefill(ours.run),
            "prefill, generate": lambda: prefill(theirs.run),
            "decode, batch 1": lambda: decode(ours.run, [one]),
            "decode, batch 1, generate": lambda: decode(theirs.run, [one]),
            "decode, batch 8": lambda: decode(ours.run, eight),
            "decode, batch 8, generate (padded batch)": lambda: decode(theirs.run, eight),
            "batch 8": lambda: whole(ours.run),
            "batch 8, generate (padded batch)": lambda: whole(theirs.run),
            "batch 8, continuous batching": lambda: whole(theirs.run_batched),
        },
        repeats,
    )
