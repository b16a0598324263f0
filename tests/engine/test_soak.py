"""Thousands of turns on tiny tiers, with aborts, deletions, pins, expiry and truncation: nothing grows, nothing is wrong.

Answers of prompts that were cut are compared with a computation by hand, from the turn on where the conversation was cut:
how many rows were kept then, and were there since, the engine tells. Where some were lost and computed again (they have not
seen the same then), or a job was sent back, nothing is known of the rows, until the conversation begins anew.
"""

from __future__ import annotations

import ctypes
import gc
import os
import random
import re
import threading
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import count
from multiprocessing import get_context
from pathlib import Path

import pytest
from benchmarks.engine.soak import more_threads

from afterglow.engine.engine import Engine
from afterglow.errors import RequestError
from afterglow.model.decoder import Decoder
from afterglow.model.loader import load_model
from afterglow.request import ContextWindow, Output, Request, SamplingParams
from tests.engine.by_hand import Cut, behind
from tests.engine.conftest import VOCAB, Handle, starting

IDS = count()
WINDOW = 256
SYSTEM = 12
CONVERSATIONS = 24
TENANTS = ("", "a", "b")


@dataclass(frozen=True)
class Unknown:
    """A conversation was cut, and from outside it is unknown which tokens its rows have seen."""

    text: list[int]
    dropped: int


class Talk:
    """Conversations that never end, driven from one thread."""

    def __init__(self, engine: Engine, decoder: Decoder, seed: int) -> None:
        self.engine = engine
        self.decoder = decoder
        self.rng = random.Random(seed)
        self.texts = [[self.rng.randrange(VOCAB) for _ in range(SYSTEM)] for _ in range(CONVERSATIONS)]
        self.turns = 0
        self.compared = 0
        self.cuts: list[list[Cut | Unknown]] = [[] for _ in range(CONVERSATIONS)]
        self.compared_cut = 0
        self.often = 1.0  # the share of comparable answers that are compared
        self.telling = 0  # compared answers that recomputing the rest would not give
        self.loading = False  # whatever is cached, whatever that takes
        self.aborted = 0
        self.reused = 0
        self.marks: list[
            tuple[Counter[str], int, int]
        ] = []  # threads, open files, bytes of memory: ten times on the way

    def round(self, at_once: int) -> None:
        """Turns of several conversations at the same time; some are given up in the middle."""
        chosen = self.rng.sample(range(CONVERSATIONS), at_once)
        before = self._disturbances()
        runs = [self._ask(number) for number in chosen]
        for request, _, ended in runs:
            if self.rng.random() < 0.1:
                self.engine.cancel(request.id)
            assert ended.wait(60), "a turn hangs"
        sure = self._disturbances() == before
        for number, (request, outputs, _) in zip(chosen, runs, strict=True):
            self.turns += 1
            self._went(number, request, outputs, sure)

    def _disturbances(self) -> tuple[int, ...]:
        """How often jobs were sent back, and cached rows were computed again. While all that can be loaded is, those are the
        last ones, which the engine tells."""
        found = self.engine.ask(lambda: self.engine.parts.scheduler.stats().counters)
        return found.preemptions, found.failed_loads, 0 if self.loading else found.recomputed

    def _ask(self, number: int) -> tuple[Request, list[Output], threading.Event]:
        rng = self.rng
        text = self.texts[number]
        if rng.random() < 0.1:
            del text[rng.randrange(SYSTEM, len(text) + 1) :]  # the user edits earlier text
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
            turns=(SYSTEM,),
        )
        self.engine.submit(request, take)
        return request, outputs, ended

    def _went(self, number: int, request: Request, outputs: list[Output], sure: bool) -> None:
        tokens = [token for output in outputs for token in output.tokens]
        assert outputs[-1].finish_reason in ("length", "cancelled"), outputs[-1].error
        self.aborted += outputs[-1].finish_reason == "cancelled"
        self.reused += outputs[-1].cached.total
        cut = any(output.truncation is not None for output in outputs)
        self._went_cut(number, request, outputs, tokens, sure)
        fits = len(request.prompt) + len(tokens) < WINDOW and not cut
        if self.rng.random() < 0.05 and fits:
            sampling = SamplingParams(max_tokens=max(1, len(tokens)), temperature=0, ignore_eos=True)
            (again,) = self.engine.generate([Request(f"soak-{next(IDS)}", request.prompt, sampling, reuse=False)])
            assert list(again.tokens[: len(tokens)]) == tokens, "not what recomputing gives"
            self.compared += 1
        self.texts[number] += tokens
        if len(self.texts[number]) > 4 * WINDOW:
            self.texts[number] = self.texts[number][:SYSTEM]

    def _went_cut(self, number: int, request: Request, outputs: list[Output], tokens: list[int], sure: bool) -> None:
        """Follow a conversation that was cut, and compare some answers."""
        text, cuts = list(request.prompt), self.cuts[number]
        cuts[:] = [cut for cut in cuts if text[: len(cut.text)] == list(cut.text)]
        before = cuts[-1] if cuts else None
        told = next((output.truncation for output in outputs if output.truncation is not None), None)
        gone = before.dropped if before is not None else 0
        found = outputs[0].cached.total
        if told is None:
            if not ContextWindow(WINDOW).fits(
                len(text) - gone, request.sampling.max_tokens
            ):  # it was given up early, but was cut
                cuts.append(Unknown(text, len(text) - WINDOW // 2))
            elif before is not None:
                cuts[-1] = Unknown(before.text, before.dropped)
            return
        if told.dropped != gone:
            assert told.dropped == len(text) - WINDOW // 2
            known = sure and (not isinstance(before, Unknown) or not found)
            cut: Cut | Unknown = Unknown(text, told.dropped)
            if known:
                cut = Cut(text, SYSTEM, told.dropped, found, before if found and isinstance(before, Cut) else None)
            cuts.append(cut)
        elif isinstance(before, Cut) and (not sure or found < before.kept):
            cuts[-1] = Unknown(before.text, before.dropped)
        cut = cuts[-1]
        if isinstance(cut, Cut) and tokens and self.rng.random() < self.often:
            self._compare(cut, text, tokens)

    def _compare(self, cut: Cut, prompt: list[int], tokens: list[int]) -> None:
        expected = behind(self.decoder, cut, prompt, tokens)
        given = expected[range(len(tokens)), tokens]
        assert (given > expected.max(-1).values - 1e-3).all(), f"not what by hand is right: {given}, {expected.max(-1)}"
        plain = behind(self.decoder, replace(cut, kept=0, before=None), prompt, tokens)
        self.telling += bool((plain[range(len(tokens)), tokens] < plain.max(-1).values - 1e-3).any())
        self.compared_cut += 1

    def manage(self) -> None:
        """What operators do."""
        name, salt = f"talk-{self.rng.randrange(CONVERSATIONS)}", self.rng.choice(TENANTS)
        what = self.rng.random()
        if what < 0.4:
            self.engine.forget_session(salt, name)
        elif what < 0.7:
            with suppress(RequestError):  # a tenant may not pin more than its share
                self.engine.pin_session(salt, name, self.rng.random() < 0.3)
        elif what < 0.75:
            self.engine.reset_cache(salt)
            for number in range(TENANTS.index(salt), CONVERSATIONS, len(TENANTS)):
                self.cuts[number].clear()
        else:
            self.engine.sessions(salt)

    def check_budgets(self, folder: Path, disk_budget: int) -> None:
        stats = self.engine.stats()
        assert stats.tiers.device.used <= stats.tiers.device.capacity
        assert stats.tiers.host.used <= stats.tiers.host.capacity
        assert stats.tiers.disk.used <= disk_budget
        on_disk = 0
        for path in folder.rglob("*.safetensors"):
            try:
                on_disk += path.stat().st_size
            except FileNotFoundError:
                continue
        assert on_disk <= disk_budget


def threads() -> Counter[str]:
    """Count the threads of each name."""
    return Counter(re.sub(r"\d+", "", thread.name) for thread in threading.enumerate())


def open_files() -> int:
    return len(os.listdir("/proc/self/fd")) if os.path.isdir("/proc/self/fd") else 0


def resident() -> int:
    """Count the bytes of memory in use, without those that the allocator keeps for later, where it can be asked to give them back."""
    with suppress(AttributeError, OSError):
        ctypes.CDLL(None).malloc_trim(0)
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
    decoder = load_model(model, dtype="float32", device="cpu", max_model_len=None)
    talk = Talk(handle.engine, decoder, seed=5)
    talk.often = 1.0 if turns < 1000 else 0.3
    marks = talk.marks
    switch = 0
    while talk.turns < turns:
        if talk.turns >= switch:  # cached rows are computed again half the time: from outside it is unknown which
            talk.loading, switch = not talk.loading, switch + 100
            handle.engine.baseline(source="load" if talk.loading else "auto")
        talk.round(talk.rng.randint(1, 10))
        if talk.rng.random() < 0.2:
            talk.manage()
        if talk.rng.random() < 0.05:
            talk.check_budgets(folder, budget)
        if len(marks) < 10 * talk.turns // turns:
            handle.engine.settle()
            handle.engine.ask(handle.engine.parts.scheduler.check)
            gc.collect()
            marks.append((threads(), open_files(), resident()))
    counted, files, memory = zip(*marks, strict=True)
    assert more_threads(counted) <= 1, counted
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
    assert talk.compared_cut > 0


def soak_alone(model: Path, folder: Path, turns: int) -> tuple[int, int, int]:
    """Return how many answers were compared, how many of them behind a cut, and how many tell a wrong cut from a right one."""
    with starting() as start:
        talk = soak(start, model, folder, turns)
    return talk.compared, talk.compared_cut, talk.telling


@pytest.mark.long
@pytest.mark.timeout(7200)
def test_twenty_thousand_turns(model_of: Callable[[str], Path], tmp_path: Path) -> None:
    """In a process of its own: the gaps that other tests have left in memory fill slowly, which looks like a leak."""
    with ProcessPoolExecutor(1, get_context("spawn")) as pool:
        compared, cut, telling = pool.submit(soak_alone, model_of("llama"), tmp_path, 20_000).result()
    assert compared > 300
    assert (cut > 100, telling > 10) == (True, True), (cut, telling)
