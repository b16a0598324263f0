"""The engine as its callers see it: batching, cancelling, limits, log-probabilities, closing."""

from __future__ import annotations

import queue
import random
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from afterglow.engine import hardware, registrar
from afterglow.engine import loop as loop_module
from afterglow.engine.engine import Engine
from afterglow.engine.requests import salt_id
from afterglow.errors import ConfigError, ModelError, RequestError
from afterglow.request import Output, Request, SamplingParams
from tests.engine.conftest import VOCAB, Handle, submit_at_once
from tests.engine.test_exact_reuse import same
from tests.waiting import wait_for

Start = Callable[..., Handle]
Models = Callable[[str], Path]


def prompt(seed: int, n: int) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(VOCAB) for _ in range(n)]


def greedy(n: int, **more: object) -> SamplingParams:
    return SamplingParams(max_tokens=n, temperature=0, logprobs=VOCAB, ignore_eos=True, **more)  # type: ignore[arg-type]


@pytest.mark.parametrize("chunk", [0, 32, 512])
def test_a_batch_answers_as_each_alone(start: Start, model_of: Models, chunk: int) -> None:
    handle = start(model_of("llama"), prefill_chunk=chunk, max_batch=5)
    requests = [Request(f"r{i}", prompt(i, 20 + 37 * i), greedy(5 + 3 * i)) for i in range(9)]
    together = handle.engine.generate(requests)
    for request, answer in zip(requests, together, strict=True):
        same(answer, handle.ask(list(request.prompt), reuse=False, max_tokens=request.sampling.max_tokens))


def test_requests_that_share_a_prefix_and_arrive_together(start: Start, model_of: Models) -> None:
    """Ten copies of a long prefix: it is prefilled once, the others wait for it and reuse it."""
    handle = start(model_of("llama"))
    shared = prompt(1, 256)
    requests = [Request(f"r{i}", shared + prompt(100 + i, 10), greedy(4)) for i in range(10)]
    answers = handle.engine.generate(requests)
    for request, answer in zip(requests, answers, strict=True):
        same(answer, handle.ask(list(request.prompt), reuse=False))
    assert sum(a.cached.total for a in answers) >= 9 * 256


@pytest.mark.parametrize("reply", [5, 40, 70])
def test_the_next_turn_may_follow_at_once(start: Start, model_of: Models, reply: int) -> None:
    """The last token is told before its rows are saved; a request that goes on at once still finds all rows."""
    handle = start(model_of("llama"))
    text, known = prompt(3, 30), 0
    for _ in range(4):
        answer = handle.ask(text, max_tokens=reply)
        assert answer.cached.total == known
        known = len(text) + reply - 1  # the last token of a reply has no KV yet
        text = [*text, *answer.tokens, 1, 2]


def test_salts_never_share(start: Start, model_of: Models) -> None:
    handle = start(model_of("llama"))
    text = prompt(2, 200)
    for salt, cached in (("a", 0), ("b", 0), ("a", 199), ("", 0)):
        (answer,) = handle.engine.generate([Request("r" + salt + str(cached), text, greedy(2), salt=salt)])
        assert answer.cached.total == cached
        handle.engine.settle()


def collect(handle: Handle, request: Request) -> queue.SimpleQueue[Output]:
    inbox: queue.SimpleQueue[Output] = queue.SimpleQueue()
    handle.engine.submit(request, inbox.put)
    return inbox


def test_cancel_frees_everything(start: Start, model_of: Models) -> None:
    handle = start(model_of("llama"), max_batch=2)
    boxes: list[queue.SimpleQueue[Output]] = [queue.SimpleQueue() for _ in range(4)]
    cancelled = threading.Event()

    def first(output: Output) -> None:
        boxes[0].put(output)
        cancelled.wait(60)  # the engine's thread goes no further before all are cancelled

    sinks = [first, *(box.put for box in boxes[1:])]
    submit_at_once(
        handle.engine, [(Request(f"r{i}", prompt(i, 100), greedy(400)), sink) for i, sink in enumerate(sinks)]
    )
    boxes[0].get(timeout=30)
    for i in range(4):
        handle.engine.cancel(f"r{i}")
    cancelled.set()
    for box in boxes:
        output = box.get(timeout=10)
        while output.finish_reason is None:
            output = box.get(timeout=10)
        assert output.finish_reason == "cancelled"
    handle.engine.settle()
    stats = handle.engine.stats()
    assert (stats.plan.running, stats.plan.waiting, stats.plan.loading) == (0, 0, 0)
    assert stats.engine.finished["cancelled"] == 4
    handle.engine.cancel("r0")  # again, and unknown: nothing happens
    handle.engine.cancel("never")
    same(handle.ask(prompt(0, 100)), handle.ask(prompt(0, 100), reuse=False))


def test_queue_limit(start: Start, model_of: Models) -> None:
    handle = start(model_of("llama"), max_batch=1, max_queue=2)
    with pytest.raises(RequestError) as error:
        for i in range(50):
            collect(handle, Request(f"r{i}", prompt(i, 300), greedy(100)))
    assert error.value.status == 429


def test_what_is_refused_takes_no_place_in_the_queue(start: Start, model_of: Models) -> None:
    handle = start(model_of("llama"), max_batch=1, max_queue=2)
    for i in range(5):
        for name, odd in (("share", {"kv_retention": 0.5}), ("key", {"cache_key": "\ud800"})):
            with pytest.raises(RequestError) as error:
                handle.engine.submit(Request(f"{name}{i}", prompt(i, 20), greedy(1), **odd), lambda output: None)
            assert error.value.status == 400
    assert handle.ask(prompt(0, 20)).finish_reason == "length"


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="this system has no disk that is always full")
def test_a_full_disk_ends_the_journal_and_not_the_engine(
    start: Start, model_of: Models, caplog: pytest.LogCaptureFixture
) -> None:
    handle = start(model_of("llama"), journal=Path("/dev/full"))
    for i in range(40):
        assert handle.ask(prompt(i, 200)).finish_reason == "length"
    handle.engine.close()
    assert sum("--journal /dev/full ends here: No space left" in each for each in caplog.messages) == 1


def test_a_prefix_that_is_only_on_disk_can_be_registered(
    start: Start, model_of: Models, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(registrar, "KEEP_SECONDS", 3.0)
    handle = start(model_of("llama"), tmp_path / "cache", source="recompute")  # so that it is not loaded
    handle.ask(prompt(0, 200))
    handle.engine.settle()
    handle.engine.demote("disk")
    found = handle.engine.register_prefix("system", prompt(0, 200), salt=None)
    assert (found.tokens, found.disk) == (200, 200)


def test_an_engine_that_cannot_start_gives_its_folder_back(start: Start, model_of: Models, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="--journal"):
        start(model_of("llama"), tmp_path / "cache", journal=tmp_path / "none" / "journal")
    assert start(model_of("llama"), tmp_path / "cache").ask(prompt(0, 20)).finish_reason == "length"


def test_limits_are_said_before_any_work(start: Start, model_of: Models) -> None:
    handle = start(model_of("llama"), max_model_len=128)
    for bad, words in (
        (Request("a", prompt(0, 128), greedy(1)), "context length is 128 tokens"),
        (Request("b", [VOCAB], greedy(1)), "outside the vocabulary"),
        (Request("c", [-1], greedy(1)), "outside the vocabulary"),
        (Request("d", [], greedy(1)), "empty"),
    ):
        with pytest.raises(RequestError, match=words):
            handle.engine.submit(bad, lambda output: None)
    assert handle.ask(prompt(0, 127)).finish_reason == "length"
    assert handle.engine.stats().engine.finished["length"] == 1


def test_generation_ends_at_the_context_limit(start: Start, model_of: Models) -> None:
    handle = start(model_of("llama"), max_model_len=96)
    answer = handle.ask(prompt(0, 90), max_tokens=50)
    assert answer.finish_reason == "length"
    assert len(answer.tokens) == 6


def test_stop_tokens_end_the_reply(start: Start, model_of: Models) -> None:
    handle = start(model_of("llama"))
    free = handle.ask(prompt(5, 30), max_tokens=30)
    wanted = free.tokens[7]
    first = free.tokens.index(wanted)
    stopped = handle.ask(prompt(5, 30), max_tokens=30, stop_token_ids=(wanted,))
    assert stopped.finish_reason == "stop"
    assert stopped.tokens == free.tokens[: first + 1]


def test_prompt_logprobs_over_chunks_equal_whole(start: Start, model_of: Models) -> None:
    text = prompt(9, 200)
    whole = start(model_of("llama"), prefill_chunk=0).ask(text, prompt_logprobs=5)
    handle = start(model_of("llama"), prefill_chunk=16)
    blocker = collect(handle, Request("decode", prompt(8, 20), greedy(300)))  # something decodes: small chunks
    blocker.get(timeout=10)
    pieces = handle.ask(text, prompt_logprobs=5)
    assert len(whole.prompt_logprobs) == len(pieces.prompt_logprobs) == len(text)
    assert whole.prompt_logprobs[0] is None
    for token, x, y in zip(text[1:], whole.prompt_logprobs[1:], pieces.prompt_logprobs[1:], strict=True):
        assert x is not None
        assert y is not None
        assert x.token == y.token == token
        assert x.logprob == pytest.approx(y.logprob, abs=1e-4)


def test_tiny_tiers_change_nothing_but_speed(start: Start, model_of: Models, tmp_path: Path) -> None:
    """Device, host and disk of a few blocks: evictions, preemptions, unsaved rows, and the same answers."""
    handle = start(
        model_of("llama"),
        tmp_path,
        device_cache=512 * 1024,
        host_cache=512 * 1024,
        disk_cache=1 << 20,
        max_batch=6,
    )
    rng = random.Random(1)
    histories = [prompt(i, 60) for i in range(8)]
    for turn in range(4):
        requests = []
        for i, history in enumerate(histories):
            history += [rng.randrange(VOCAB) for _ in range(30)]
            requests.append(Request(f"r{turn}-{i}", list(history), greedy(12)))
        answers = handle.engine.generate(requests)
        for history, answer in zip(histories, answers, strict=True):
            same(answer, handle.ask(history, reuse=False, max_tokens=12))
            history += answer.tokens
        stats = handle.engine.stats()
        assert stats.tiers.host.used <= stats.tiers.host.capacity
        assert stats.tiers.device.used <= stats.tiers.device.capacity
        assert stats.tiers.disk.used <= stats.tiers.disk.capacity
    on_disk = sum(f.stat().st_size for f in tmp_path.rglob("*.safetensors"))
    assert on_disk <= 1 << 20


def test_reset_cache(start: Start, model_of: Models, tmp_path: Path) -> None:
    handle = start(model_of("llama"), tmp_path, write_policy="write_through")
    handle.ask(prompt(0, 200))
    handle.engine.settle()
    handle.engine.reset_cache()
    handle.engine.settle()
    assert handle.ask(prompt(0, 200)).cached.total == 0


def test_many_threads_submit(start: Start, model_of: Models) -> None:
    handle = start(model_of("llama"))
    expected = handle.ask(prompt(3, 50), reuse=False).tokens
    wrong: list[object] = []

    def work(n: int) -> None:
        for i in range(5):
            (answer,) = handle.engine.generate([Request(f"{n}-{i}", prompt(3, 50), greedy(4))])
            if answer.tokens != expected:
                wrong.append(answer)

    threads = [threading.Thread(target=work, args=(n,)) for n in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert wrong == []


def test_requests_that_are_asked_together_are_one_batch(
    start: Start, model_of: Models, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However slow the thread is that asks."""
    handle = start(model_of("llama"), max_batch=4, prefill_chunk=0)
    loop, runner = handle.engine.loop, handle.engine.parts.runner
    prepare, run = loop.prepare, runner.run
    sizes: list[int] = []
    monkeypatch.setattr(loop, "prepare", lambda *asked: (time.sleep(0.2), prepare(*asked))[1])
    monkeypatch.setattr(runner, "run", lambda step: (sizes.append(len(step.runs)), run(step))[1])
    handle.engine.generate([Request(f"r{i}", prompt(i, 30), greedy(5)) for i in range(4)])
    assert sizes[0] == 4


def test_of_requests_that_are_asked_together_none_runs_on_when_one_is_refused(start: Start, model_of: Models) -> None:
    handle = start(model_of("llama"))
    asked = [Request("a", prompt(1, 30), greedy(400)), Request("b", [10**9], greedy(1)), Request("c", [1], greedy(1))]
    with pytest.raises(RequestError, match="vocabulary"):
        handle.engine.generate(asked)
    handle.engine.settle()
    assert handle.engine.stats().engine.finished["cancelled"] == 1
    assert handle.engine.generate([Request("a", prompt(1, 30), greedy(2))])[0].finish_reason == "length"


def test_close_while_running_answers_every_request(start: Start, model_of: Models, tmp_path: Path) -> None:
    handle = start(model_of("llama"), tmp_path)
    box: queue.SimpleQueue[Output] = queue.SimpleQueue()

    def take(output: Output) -> None:
        box.put(output)
        if output.finish_reason is None:  # it goes no further before it is closed, however late that is
            wait_for(handle.engine.parts.inbox.pressed, 60)

    handle.engine.submit(Request("long", prompt(0, 100), greedy(400)), take)
    box.get(timeout=30)
    handle.engine.close()
    output = box.get(timeout=10)
    while output.finish_reason is None:
        output = box.get(timeout=10)
    assert output.finish_reason == "cancelled"
    with pytest.raises(RequestError) as error:
        handle.engine.submit(Request("late", [1, 2], greedy(1)), lambda output: None)
    assert error.value.status == 503
    assert start(model_of("llama"), tmp_path).ask(prompt(0, 100)).cached.disk >= 99


def test_a_request_that_comes_while_the_engine_closes_is_refused(
    start: Start, model_of: Models, tmp_path: Path
) -> None:
    """It was prepared before, while its grammar was compiled."""
    handle = start(model_of("llama"), tmp_path)
    loop, box, told = handle.engine.loop, queue.SimpleQueue[Output](), queue.SimpleQueue[Output]()
    late = loop.prepare(Request("late", prompt(1, 100), greedy(400)), told.put, salt_id(""))

    def take(output: Output) -> None:
        box.put(output)
        if output.finish_reason is None:
            wait_for(handle.engine.parts.inbox.pressed, 60)
        else:
            loop.accept([late])

    handle.engine.submit(Request("long", prompt(0, 100), greedy(400)), take)
    box.get(timeout=30)
    handle.engine.close()
    output = told.get(timeout=10)
    assert output.finish_reason == "error"
    assert "shutting down" in (output.error or "")


def test_closing_waits_as_long_as_the_disk_may_take(
    start: Start, model_of: Models, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two thirds of that before the flush, and two thirds after it."""
    monkeypatch.setattr(loop_module, "DRAIN_SECONDS", 3.0)
    monkeypatch.setattr(loop_module, "STEP_SECONDS", 0.0)
    handle = start(model_of("llama"), tmp_path)
    handle.ask(prompt(0, 100))
    real, settled = handle.engine.loop.settle, list[bool]()

    def settle() -> bool:
        began = time.monotonic()
        found = real()
        wait_for(lambda: time.monotonic() - began > 2.0, 10)
        settled.append(found)
        return found

    monkeypatch.setattr(handle.engine.loop, "settle", settle)
    handle.engine.close()
    assert settled == [True, True]
    assert start(model_of("llama"), tmp_path).ask(prompt(0, 100)).cached.disk >= 99


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere memory may be given back later")
def test_a_closed_engine_holds_no_host_memory(start: Start, model_of: Models, tmp_path: Path) -> None:
    handle = start(model_of("llama"), tmp_path)
    handle.ask(prompt(0, 100))
    handle.engine.settle()
    held = handle.engine.parts.store.arena.view
    assert held.any()
    handle.engine.close()
    assert not held.any()  # the system gives zeros for pages that it has taken


def test_impossible_settings(model_of: Models, tmp_path: Path) -> None:
    from afterglow.config import CacheConfig, EngineConfig

    def load(model: Path | None = None, cache: dict[str, object] | None = None, **engine: object) -> None:
        settings = EngineConfig(cache=CacheConfig(disk_cache=0, **(cache or {})), **engine)  # type: ignore[arg-type]
        Engine.load(model or model_of("llama"), settings)

    with pytest.raises(ConfigError, match="--device-cache"):
        load(cache={"device_cache": 1000})
    with pytest.raises(ModelError, match="--max-model-len 9999"):
        load(max_model_len=9999)
    with pytest.raises(ConfigError, match="--disk-cache 1 B has no room"):
        Engine.load(model_of("llama"), EngineConfig(cache=CacheConfig(disk_cache=1, cache_dir=tmp_path)))
    with pytest.raises(ConfigError, match="--device must be"):
        load(device="tpu")
    with pytest.raises(ModelError):
        load(model=tmp_path / "nothing")
    with pytest.raises(ModelError, match="float16"):
        load(dtype="float16")


def test_more_threads_than_cores_are_told(caplog: pytest.LogCaptureFixture) -> None:
    before = torch.get_num_threads()
    try:
        hardware.use_threads(hardware.cores() + 1)
        hardware.use_threads(1)
    finally:
        torch.set_num_threads(before)
    (said,) = [record.getMessage() for record in caplog.records]
    assert said.startswith(f"--threads {hardware.cores() + 1} is more than the {hardware.cores()} cores")
