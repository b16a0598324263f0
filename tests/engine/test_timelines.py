"""CachedAttention's Figures 6, 7 and 8 as orders of events: a real model of 3 layers, a slow tier of real bytes.

Nothing is timed. A thread that comes to an event that the test holds back stops there until it is let go, so that what must
not depend on it is seen to happen meanwhile, and what must wait for it is seen to come after it.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from afterglow.config import WRITE_BUFFER, CacheConfig, EngineConfig
from afterglow.engine import gather
from afterglow.engine.engine import Engine
from afterglow.plan.tiers.cost import Work
from afterglow.store.extents.throttle import Throttle
from afterglow.store.moving import move_work
from tests import doors
from tests.engine.conftest import LLAMA, VOCAB
from tests.engine.timeline_kit import LAYERS, Scene

Make = Callable[..., Scene]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(3)
    made = AutoModelForCausalLM.from_config(AutoConfig.for_model(**{**LLAMA, "num_hidden_layers": LAYERS}))
    for parameter in made.parameters():
        if parameter.ndim > 1:
            torch.nn.init.normal_(parameter, std=0.3)
    folder = tmp_path_factory.mktemp("three-layers")
    made.save_pretrained(folder)
    return folder


@pytest.fixture
def make(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Make]:
    monkeypatch.setattr(gather, "STALL_SECONDS", 60.0)  # the layer that is held back here comes in time
    scenes: list[Scene] = []

    def begin(**more: Any) -> Scene:
        cache: dict[str, Any] = {
            "device_cache": 4 * 1024**2,
            "host_cache": 4 * 1024**2,
            "disk_cache": 64 * 1024**2,
            "cache_dir": tmp_path,
            "source": "load",
            "policy": "lru",
            "warm_start": False,
        }
        config = EngineConfig(cache=CacheConfig(**{**cache, **more}), max_batch=1)
        throttle = Throttle(read_bytes_per_s=20e6)
        scenes.append(Scene(Engine.load(model, config, throttle=throttle)))
        return scenes[-1]

    yield begin
    for scene in scenes:
        scene.timeline.let_go()
        assert scene.engine.loop.failure is None
        scene.engine.close(flush=False)
        scene.engine.parts.scheduler.check()


def words(seed: int, number: int) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(VOCAB) for _ in range(number)]


def history(scene: Scene, turns: int = 1, rows: int = 100) -> list[int]:
    """A conversation that lies on disk only; nothing of how it came there is in the timeline."""
    text: list[int] = []
    for turn in range(turns):
        text += words(turn, rows)
        text += scene.run(f"turn {turn}", text)
    scene.engine.settle()
    scene.engine.demote("disk")
    return text


# ------------------------------------------------------------------------------------ Figures 6 and 7: loading


def test_without_pre_loading_all_layers_come_before_the_first_is_computed(make: Make) -> None:
    """Figure 6a."""
    scene = make(preload="whole")
    line = scene.timeline
    text = [*history(scene), 1]
    last = ("load", 0, LAYERS - 1)
    line.hold(last)
    scene.submit("B", text)
    line.wait_held(*last)
    assert scene.answers()  # it is not in a step that waits for the layer
    assert ("reaches", "B", 0, 0) not in line
    line.let_go()
    line.wait("ended", "B")
    assert line.ordered(*(("load", 0, layer) for layer in range(LAYERS)), ("reaches", "B", 0, 0))
    assert scene.cached("B").disk == 100
    scene.check("B", text)


@pytest.mark.parametrize("buffered", [0, 1, 2, 3, None])
def test_a_layer_waits_for_its_own_rows_and_a_read_buffer_takes_the_first_ones_earlier(
    make: Make, buffered: int | None
) -> None:
    """Figures 6b (no buffer), 6c (one layer), 7a (too small a buffer: gaps) and 7b (large enough: none).

    None is what a server does by default: what the next job needs is fetched whole while the last one runs.
    """
    scene = make(read_buffer=buffered, policy="lru" if buffered is not None else "lookahead")
    line = scene.timeline
    text = [*history(scene), 1]
    early = LAYERS if buffered is None else buffered
    late = range(early, LAYERS)
    line.hold(("reaches", "A", 2, 0), ("reaches", "A", 5, 0), *(("load", 0, layer) for layer in late))
    scene.submit("A", words(9, 20), max_tokens=8)
    line.wait_held("reaches", "A", 2, 0)
    scene.submit("B", text)  # heard of before the third pass is planned
    line.let_go(("reaches", "A", 2, 0))
    for layer in range(early):
        line.wait("load", 0, layer)  # while A stops at its fifth pass at the latest
    line.wait_held("reaches", "A", 5, 0)
    line.let_go(("reaches", "A", 5, 0))
    for layer in late:
        line.wait("reaches", "B", 0, layer)  # all layers before it have been computed, while this one is loaded
        line.wait_held("load", 0, layer)
        assert ("computed", "B", 0, layer) not in line
        line.let_go(("load", 0, layer))
    line.wait("ended", "B")
    assert line.of("load") == [("load", 0, layer) for layer in range(LAYERS)]
    for layer in range(LAYERS):
        assert line.ordered(("load" if layer < early else "ask", 0, layer), ("ended", "A")) == (layer < early)
        assert line.ordered(("load", 0, layer), ("computed", "B", 0, layer))
    for layer in late:
        assert line.ordered(("reaches", "B", 0, layer), ("load", 0, layer))  # the gaps of Figure 7a
    assert scene.cached("B").total == 100
    scene.check("B", text)


@pytest.mark.parametrize(("form", "buffered"), [("auto", 2), ("paper", 1)])
def test_the_read_buffer_has_the_formulas_size(
    make: Make, monkeypatch: pytest.MonkeyPatch, form: str, buffered: int
) -> None:
    """Three layers that load in 1 s and compute in 0.8 s: 3 - 2 x 0.8 = 1.4 layers by the exact form, 3 - 3 x 0.8 = 0.6 by the
    paper's, in whole layers."""
    scene = make(read_buffer=form)
    line = scene.timeline
    text = [*history(scene), 1]
    known = scene.engine.ask(lambda: scene.engine.parts.scheduler.cache.cost)

    def measure() -> None:  # often enough to be believed; what follows is not to change it
        for move in range(-3, 0):
            known.started(move, 1, now=0.0)
            known.ended(move, 1, 1.0, now=0.0)
            known.passed(Work(rows=1), 0.8)
        monkeypatch.setattr(known, "read", lambda size, far=False: 1.0 if size else 0.0)
        monkeypatch.setattr(known, "compute", lambda rows, start, gathered=0: 0.8)

    scene.engine.ask(measure)
    late = range(buffered, LAYERS)
    line.hold(("reaches", "A", 2, 0), ("reaches", "A", 5, 0), *(("load", 0, layer) for layer in late))
    scene.submit("A", words(9, 20), max_tokens=8)
    line.wait_held("reaches", "A", 2, 0)
    scene.submit("B", text)
    line.let_go(("reaches", "A", 2, 0))
    line.wait("load", 0, buffered - 1)
    line.wait_held("reaches", "A", 5, 0)
    assert ("ask", 0, buffered) not in line, "the load stops there"
    line.let_go()
    line.wait("ended", "B")
    for layer in range(LAYERS):
        assert line.ordered(("load" if layer < buffered else "ask", 0, layer), ("ended", "A")) == (layer < buffered)
    assert scene.engine.stats().plan.read_buffer_layers == buffered
    assert scene.cached("B").total == 100
    scene.check("B", text)


def test_a_layer_of_all_extents_comes_before_the_next_layer_of_any(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    """A conversation of several turns lies in as many files and more, and its layers wait for their own rows all the same."""
    monkeypatch.setattr(move_work, "MIN_READ_BYTES", 1)  # of a model this small a whole extent would be read at once
    scene = make()
    monkeypatch.setattr(
        doors.merging_of(scene.engine.parts.scheduler), "_small", 0
    )  # turns this short would be one extent
    line = scene.timeline
    text = [*history(scene, turns=4, rows=70), 1]
    extents = range(len(line.of("write")))
    assert len(extents) >= 4
    line.hold(*(("load", extent, layer) for extent in extents for layer in range(1, LAYERS)))
    scene.submit("B", text)
    for layer in range(1, LAYERS):
        line.wait("reaches", "B", 0, layer)  # no extent's rows of this layer are there
        line.let_go(*(("load", extent, layer) for extent in extents))
    line.wait("ended", "B")
    assert sorted(line.of("load")) == [("load", extent, layer) for extent in extents for layer in range(LAYERS)]
    assert scene.cached("B").disk == len(text) - 2
    scene.check("B", text)


# --------------------------------------------------------------------------------------------- Figure 8: saving


def test_layers_are_saved_while_later_ones_are_computed_and_blocks_while_decoding(make: Make) -> None:
    """Figure 8b."""
    scene = make()
    line = scene.timeline
    line.hold(("reaches", "A", 0, LAYERS - 1), ("reaches", "A", 20, 0))
    scene.submit("A", words(1, 40), max_tokens=24)
    for layer in range(LAYERS - 1):
        line.wait("saved", layer, 0)  # the last layer has not begun
    line.let_go(("reaches", "A", 0, LAYERS - 1))
    line.wait("saved", LAYERS - 1, 0)
    line.wait("saved block", 0)  # the 21st pass has not begun
    line.let_go(("reaches", "A", 20, 0))
    line.wait("ended", "A")


def test_neither_a_reply_nor_the_next_job_waits_for_saves(make: Make) -> None:
    """Figure 8b, the write buffer: all that A has computed, and B too, is still to be saved when B has ended."""
    scene = make()
    line = scene.timeline
    line.hold(("save", 0, 0))
    prompts = {"A": words(1, 40), "B": words(2, 30)}
    replies = {who: scene.run(who, prompt, 24) for who, prompt in prompts.items()}
    assert line.of("save") == line.of("saved") == line.of("saved block") == []
    line.let_go()
    scene.engine.settle()
    assert line.of("saved") == [("saved", layer, n) for n in range(2) for layer in range(LAYERS)]
    scene.engine.demote("host")
    for who, prompt in prompts.items():
        text = [*prompt, *replies[who], 1]
        scene.run(f"{who}2", text, 4)
        assert scene.cached(f"{who}2").host == len(prompt) + 23
        scene.check(f"{who}2", text)


def test_a_full_write_buffer_makes_computing_wait_and_loses_nothing(make: Make) -> None:
    scene = make()
    line = scene.timeline
    doors.limit_saves(doors.saver_of(scene.engine.parts.store), 1)  # no room beyond the rows that are being copied
    line.hold(("save", 0, 0))
    prompt = words(1, 40)
    scene.submit("A", prompt, 24)
    line.wait_held("save", 0, 0)
    scene.until(lambda: scene.engine.parts.store.stats().save_waits == 1)  # the second layer's rows do not get in
    assert ("computed", "A", 0, 1) not in line
    line.let_go()
    line.wait("ended", "A")
    assert line.ordered(("saved", 0, 0), ("computed", "A", 0, 1))
    scene.engine.settle()
    scene.engine.demote("host")
    text = [*prompt, *(token for output in scene.outputs["A"] for token in output.tokens), 1]
    scene.run("A2", text, 4)
    assert scene.cached("A2").host == 40 + 23
    scene.check("A2", text)


def test_the_write_buffer_has_the_formulas_size(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    """40 rows that 0.9 s are computed for, two layers of three behind the first: at a rate that saves them in 2 s, 1.4 s are left."""
    scene = make(write_buffer="auto")
    store = scene.engine.parts.store
    size = 40 * store.layout.row_bytes * 2 * LAYERS
    assert scene.engine.stats().store.write_buffer_bytes == WRITE_BUFFER
    known = scene.engine.ask(lambda: scene.engine.parts.scheduler.cache.cost)
    monkeypatch.setattr(known, "compute", lambda rows, start, gathered=0: 0.9)
    doors.copied(doors.saver_of(store), size // 2, 1.0)
    scene.run("A", words(1, 40), 4)
    assert scene.engine.stats().store.write_buffer_bytes == pytest.approx(size * 1.4 / 2, abs=2)
    scene.engine.settle()
    scene.engine.demote("host")
    scene.run("A2", [*words(1, 40), 1], 4)
    assert scene.cached("A2").host == 40


def test_the_next_job_does_not_wait_for_the_disk(make: Make) -> None:
    """Write-through: A's rows are still to be written when B has ended."""
    scene = make(write_policy="write_through")
    line = scene.timeline
    line.hold(("write", 0))
    prompts = {"A": words(1, 40), "B": words(2, 30)}
    replies = {who: scene.run(who, prompt, 24) for who, prompt in prompts.items()}
    line.wait_held("write", 0)
    assert ("write", 0) not in line
    line.let_go()
    scene.engine.settle()
    assert line.ordered(("ended", "B"), ("write", 0))
    scene.engine.demote("disk")
    for who, prompt in prompts.items():
        text = [*prompt, *replies[who], 1]
        scene.run(f"{who}2", text, 4)
        assert scene.cached(f"{who}2").disk == len(prompt) + 23
        scene.check(f"{who}2", text)


@pytest.mark.parametrize("who_waits", ["a new request", "a cancellation", "a list of conversations"])
def test_rows_that_do_not_come_stall_only_who_needs_them(
    make: Make, monkeypatch: pytest.MonkeyPatch, who_waits: str
) -> None:
    """An idle engine begins a pass whose rows are still on disk; they stop coming, and others ask for it."""
    monkeypatch.setattr(gather, "STALL_SECONDS", 0.1)
    scene = make()
    line = scene.timeline
    text = [*history(scene), 1]
    line.hold(("load", 0, 1))
    scene.submit("B", text)
    line.wait("reaches", "B", 0, 1)
    line.wait_held("load", 0, 1)
    if who_waits == "a new request":
        assert scene.run("C", words(9, 20), max_tokens=3)
    elif who_waits == "a cancellation":
        scene.engine.cancel("B")
        line.wait("ended", "B")
    assert scene.answers()
    assert ("ended", "B") in line or who_waits != "a cancellation"
    counters = scene.engine.stats().plan.counters
    assert (counters.stalled, counters.failed_loads) == (1, 0)
    line.let_go(("load", 0, 1))
    line.wait("ended", "B")
    if who_waits != "a cancellation":  # it has waited for its rows, and not computed them
        assert scene.cached("B").disk == 100
        scene.check("B", text)


def test_who_waits_alone_waits(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    """No caller waits for the engine: the pass goes on with the next layer as soon as that comes."""
    monkeypatch.setattr(gather, "STALL_SECONDS", 0.1)
    scene = make()
    line = scene.timeline
    text = [*history(scene), 1]
    line.hold(("load", 0, 1))
    scene.submit("B", text)
    line.wait("reaches", "B", 0, 1)
    line.wait_held("load", 0, 1)
    time.sleep(0.5)
    line.let_go(("load", 0, 1))
    line.wait("ended", "B")
    assert scene.cached("B").disk == 100
    assert ("reaches", "B", 1, 0) not in line
