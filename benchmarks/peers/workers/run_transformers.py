"""transformers: `generate` with a padded batch (mode "generate"), or continuous batching (mode "continuous N": N at a time)."""

from __future__ import annotations

import json
import sys
import time
from typing import Any

import torch
from transformers import ContinuousBatchingConfig, GenerationConfig, LlamaForCausalLM

from benchmarks.peers.workers.protocol import Answer, Generate, serve

# Left alone it takes nearly all memory, as on a GPU, and masks as wide as that: room for the requests made here.
PAGE, PAGES, STEP_TOKENS = 256, 64, 1024


class _Stamps:
    """What `generate` calls a streamer: it gets the prompt, and then each step's tokens."""

    def __init__(self) -> None:
        self.moments: list[float] = []

    def put(self, _: torch.Tensor) -> None:
        self.moments.append(time.perf_counter())

    def end(self) -> None:
        pass


class _Runner:
    def __init__(self, options: dict[str, Any]) -> None:
        torch.set_num_threads(options["threads"])
        model: Any = LlamaForCausalLM.from_pretrained(options["model"], dtype=torch.float32, attn_implementation="sdpa")
        self.model = model.eval()
        self.manager: Any = None

    def generate(self, prompts: list[list[int]], new: int, mode: str) -> Answer:
        if mode.startswith("continuous"):
            return self._continuous(prompts, new, int(mode.split()[1]))
        if self.manager is not None:
            self._end_batching()
        ids, stamps = torch.tensor(prompts), _Stamps()
        with torch.inference_mode():
            out = self.model.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                max_new_tokens=new,
                min_new_tokens=new,
                do_sample=False,
                pad_token_id=0,
                streamer=stamps,
            )
        return out[:, ids.shape[1] :].tolist(), [stamps.moments[1:]] * len(prompts)

    def _continuous(self, prompts: list[list[int]], new: int, most: int) -> Answer:
        if self.manager is None:
            config_type: Any = GenerationConfig  # untyped
            config = config_type(max_new_tokens=new, do_sample=False, eos_token_id=-1, pad_token_id=0)
            self.manager = self.model.init_continuous_batching(
                generation_config=config,
                continuous_batching_config=ContinuousBatchingConfig(
                    page_size=PAGE, num_blocks=PAGES, max_batch_tokens=STEP_TOKENS
                ),
            )
            self.manager.start()
        tokens: list[list[int]] = [[] for _ in prompts]
        stamps: list[list[float]] = [[] for _ in prompts]
        numbers: dict[str, int] = {}
        waiting = list(range(len(prompts)))
        running = 0
        while waiting or running:
            while waiting and running < most:
                number = waiting.pop(0)
                name = self.manager.add_request(
                    prompts[number], max_new_tokens=new, streaming=True, record_timestamps=True, eos_token_id=-1
                )
                numbers[name] = number
                running += 1
            result = self.manager.get_result(timeout=60)
            if result is None:
                raise RuntimeError("continuous batching has said nothing for a minute")
            if result.error:
                raise RuntimeError(result.error)
            number, now = numbers[result.request_id], time.perf_counter()
            fresh = list(result.generated_tokens)[len(tokens[number]) :]
            tokens[number] += fresh
            stamps[number] += [now] * len(fresh)
            running -= result.is_finished()
        return tokens, stamps

    def _end_batching(self) -> None:
        self.manager.stop(block=True)
        self.manager = None


def start() -> tuple[Generate, dict[str, Any]]:
    options = json.loads(sys.argv[1])
    batching = {"page_size": PAGE, "num_blocks": PAGES, "max_batch_tokens": STEP_TOKENS}
    settings = {"attention": "sdpa", "threads": torch.get_num_threads(), "continuous batching": batching}
    return _Runner(options).generate, settings


if __name__ == "__main__":
    serve(start)
