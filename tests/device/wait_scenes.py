"""What is waited for where the next thing to launch depends on numbers: scenes for `play.py`. The models have two layers."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

from afterglow.model.presets import PRESETS, save_hf
from tests.device.scenes import ask, draw, load
from tests.device.watching import StepCounts, watch
from tests.engine.conftest import FAMILIES, write_model

PREFIX = 200  # rows that requests select from


def waited(steps: Iterable[StepCounts]) -> list[list[Any]]:
    """Return of each step its requests, its rows, and how often each function waited."""
    waits = "synchronisations"
    return [
        [step.runs, step.rows, {line: count for (what, line), count in step.lines.items() if what == waits}]
        for step in steps
    ]


def experts(device: str, folder: Path) -> Any:
    """A mixture of experts by torch's operators: prompts, and replies of one request and of three."""
    model = write_model({**FAMILIES["mixtral"], "vocab_size": 256}, folder / "model")
    engine = load(device, folder / "cache", model, relay="off", speculate="off", max_batch=4)
    ask(engine, [draw(1, 20)], tokens=3, logprobs=None)  # what is tried is tried now
    watch.steps.clear()
    for batch in (1, 3):
        ask(engine, [draw(10 * batch + i, 20) for i in range(batch)], tokens=4, logprobs=None)
    engine.close()
    return waited(watch.steps)


def guesses(device: str, folder: Path) -> Any:
    """Replies to prompts that repeat themselves: steps that verify guesses."""
    engine = load(device, folder, relay="off", speculate="on", max_batch=1)
    ask(engine, [draw(1, 6) * 8], tokens=2, logprobs=None)
    watch.steps.clear()
    ask(engine, [draw(2, 5) * 8], tokens=24, logprobs=None)
    engine.close()
    return waited(watch.steps)


def selecting(device: str, folder: Path) -> Any:
    """Requests that select rows of a prefix in host memory, on disk, and in chunks that the device keeps; they renew the selection. Of a
    model whose heads are all probes, and of one with others."""
    found = []
    model = folder.parent / f"{folder.name}-model"
    save_hf(replace(PRESETS["tiny"], kv_heads=4), model)
    prefix = draw(4, PREFIX)
    for name, which in (("probes", "tiny"), ("others", model)):
        engine = load(device, folder / name, which, importance=0.3, importance_renew=2, importance_exact="never")
        ask(engine, [prefix], tokens=1)
        for number, tier in enumerate(("host", "disk", "disk")):
            engine.settle()
            engine.demote(tier)
            watch.steps.clear()
            ask(engine, [[*prefix, *draw(50 + number, 6)]], logprobs=None)
            found += waited(watch.steps)
        engine.close()
    return found


def scores(device: str, folder: Path) -> Any:
    """Two conversations, and their next turns, which are truncated by importance."""
    engine = load(device, folder, max_model_len=256, truncation_policy="importance", max_batch=2)
    prompts = [draw(3, 180), draw(4, 180)]
    found = []
    for turn in range(2):
        watch.steps.clear()
        said = ask(engine, prompts, tokens=4, logprobs=None, truncation=True)
        found += waited(watch.steps)
        prompts = [[*prompt, *reply[0], *draw(30 + turn, 90)] for prompt, reply in zip(prompts, said, strict=True)]
    engine.close()
    return found
