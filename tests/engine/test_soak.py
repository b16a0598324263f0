"""Thousands of turns on tiny tiers, with aborts, deletions, pins, expiry and truncation: nothing grows, nothing is wrong."""

from __future__ import annotations

import gc
import os
import random
import threading
from collections.abc import Callable
from itertools import count
from pathlib import Path

import pytest

from afterglow.engine.engine import Engine
from afterglow.request import Output, Request, SamplingParams
from tests.engine.conftest import VOCAB, Handle

IDS = count()
WINDOW = 256
CONVERSATIONS = 24
TENANTS = ("", "a", "b")


class Talk:
    """Conversations that never end, driven from one thread."""

    def __init__(self, engine: Engine, seed: int) -> None:
        self.engine = engine
        self.rng = random.Random(seed)
        self.texts = [[self.rng.randrange(VOCAB) for _ in range(12)] for _ in range(CONVERSATIONS)]
        self.turns = 0
        self.compared = 0
        self.aborted = 0
        self.reused = 0

    def round(self, at_once: int) -> None:
        """Turns of several conversations at the same time; some are given up in the middle."""
        chosen = self.rng.sample(range(CONVERSATIONS), at_once)
        runs = [self._ask(number) for number in chosen]
        for number, (request, outputs, ended) in zip(chosen, runs, strict=True):
            if self.rng.random() < 0.1:
                self.engine.cancel(request.id)
            assert ended.wait(60), "a turn hangs"
            self.turns += 1
            self._went(number, request, outputs)

    def _ask(self, number: int) -> tuple[Request, list[Output], threading.Event]:
        rng = self.rng
        text = self.texts[number]
        if rng.random() < 0.1:
            del text[rng.randrange(12, len(text) + 1) :]  # somebody edits what was said
        text += [rng.randrange(VOCAB) for _ in range(rng.randint(1, 30))]
        sampling = SamplingParams(max_tokens=rng.randint(1, 12), temperature=0, ignore_eos=True)
        outputs: list[Output] = []
        ended = threading.Event()

        def take(output: Output) -> None:
            outputs.append(output)
            if output.finish_reason is not None:
                ended.set()

        request = Request(
            f"soak-{next(IDS)}",
            list(text),
            sampling,
            salt=TENANTS[number % 3],
            session_id=f"talk-{number}",
            ttl_s=rng.choice([None, None, 0.05]),
            truncation=True,
            turns=(12,),
        )
        self.engine.submit(request, take)
        return request, outputs, ended

    def _went(self, number: int, request: Request, outputs: list[Output]) -> None:
        tokens = [token for output in outputs for token in output.tokens]
        assert outputs[-1].finish_reason in ("length", "cancelled"), outputs[-1].error
        self.aborted += outputs[-1].finish_reason == "cancelled"
        self.reused += outputs[-1].cached.total
        cut = any(output.truncation is not None for output in outputs)
        fits = len(request.prompt) + len(tokens) < WINDOW and not cut
        if self.rng.random() < 0.05 and fits:
            sampling = SamplingParams(max_tokens=max(1, len(tokens)), temperature=0, ignore_eos=True)
            (again,) = self.engine.generate([Request(f"soak-{next(IDS)}", request.prompt, sampling, reuse=False)])
            assert list(again.tokens[: len(tokens)]) == tokens, "not what recomputing gives"
            self.compared += 1
        self.texts[number] += tokens
        if len(self.texts[number]) > 4 * WINDOW:
            self.texts[number] = self.texts[number][:12]

    def manage(self) -> None:
        """What operators do."""
        name, salt = f"talk-{self.rng.randrange(CONVERSATIONS)}", self.rng.choice(TENANTS)
        what = self.rng.random()
        if what < 0.4:
            self.engine.forget_session(salt, name)
        elif what < 0.7:
            self.engine.pin_session(salt, name, self.rng.random() < 0.3)
        elif what < 0.75:
            self.engine.reset_cache(salt)
        else:
            self.engine.sessions(salt)

    def check_budgets(self, folder: Path, disk_budget: int) -> None:
        stats = self.engine.stats()
        assert stats.device_used_bytes <= stats.device_capacity_bytes
        assert stats.host_used_bytes <= stats.host_capacity_bytes
        assert stats.disk_used_bytes <= disk_budget
        on_disk = 0
        for path in folder.rglob("*.safetensors"):
            try:
                on_disk += path.stat().st_size
            except FileNotFoundError:
                continue
        assert on_disk <= disk_budget


def open_files() -> int:
    return len(os.listdir("/proc/self/fd")) if os.path.isdir("/proc/self/fd") else 0


def resident() -> int:
    try:
        with open("/proc/self/statm") as f:
            return int(f.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except OSError:
        return 0


def soak(start: Callable[..., Handle], model: Path, folder: Path, turns: int) -> Talk:
    budget = 1024**2 * 6
    handle = start(
        model,
        folder,
        max_model_len=WINDOW,
        device_cache=1024 * 600,
        host_cache=1024 * 900,
        disk_cache=budget,
        max_batch=6,
        prefill_chunk=64,
        source="auto",
        tenant_quota=1024**2 * 3,
    )
    talk = Talk(handle.engine, seed=5)
    marks: list[tuple[int, int, int]] = []
    while talk.turns < turns:
        talk.round(talk.rng.randint(1, 10))
        if talk.rng.random() < 0.2:
            talk.manage()
        if talk.rng.random() < 0.05:
            talk.check_budgets(folder, budget)
        if len(marks) < 10 * talk.turns // turns:
            handle.engine.settle()
            handle.engine._on_thread(handle.engine._scheduler.check)
            gc.collect()
            marks.append((threading.active_count(), open_files(), resident()))
    threads, files, memory = zip(*marks, strict=True)
    assert max(threads[2:]) <= max(threads[:2]) + 1  # the one that checks sums comes and goes
    assert max(files[2:]) <= max(files[:2]) + 2
    assert talk.aborted > 0
    assert talk.reused > 0
    if turns >= 10_000:
        assert memory[-1] <= memory[2] + 32 * 1024**2, f"memory grows: {memory}"
    return talk


@pytest.mark.timeout(300)
def test_a_few_hundred_turns(start: Callable[..., Handle], model_of: Callable[[str], Path], tmp_path: Path) -> None:
    talk = soak(start, model_of("llama"), tmp_path, turns=400)
    assert talk.compared > 3


@pytest.mark.long
@pytest.mark.timeout(7200)
def test_twenty_thousand_turns(start: Callable[..., Handle], model_of: Callable[[str], Path], tmp_path: Path) -> None:
    talk = soak(start, model_of("llama"), tmp_path, turns=20_000)
    assert talk.compared > 300
