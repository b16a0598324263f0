"""RelayAttention in the engine: the same answers, and fewer reads."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from afterglow.config import EngineConfig
from afterglow.engine.cached_attention import RelayAttend, RelayCosts, RelayGroup, depth_of, groups_of
from afterglow.engine.context import DeviceContext
from afterglow.engine.engine import Engine
from afterglow.engine.gather import BatchEntry
from afterglow.engine.kv_shape import KVShape
from afterglow.engine.page_pool import PagePool
from afterglow.errors import ConfigError
from afterglow.kernels import decode
from afterglow.kernels.attention import attend, merge_into
from afterglow.plan.step import Share
from afterglow.request import Output, Request, SamplingParams, TokenLogprob
from tests import doors
from tests.engine.by_hand import logprobs, submit_truncated
from tests.engine.conftest import FAMILIES, VOCAB, Handle, in_turn, submit_at_once

FREE = RelayCosts(rows=((1, 1.0), (32, 1.0)), call=0.0, merged=0.0)
DEAR = RelayCosts(rows=((1, 0.0), (32, 0.0)), call=1.0, merged=1.0)


def prompts(rng: random.Random) -> list[list[int]]:
    """A system prompt that all begin with, two documents below it, and conversations below those; and a stranger."""

    def words(count: int) -> list[int]:
        return [rng.randrange(VOCAB) for _ in range(count)]

    system = words(80)
    documents = [system + words(70), system + words(90)]
    found = [[*documents[i % 2], *words(70 + 7 * i)] for i in range(5)]
    return [*found, found[0] + words(80), words(30), list(system)]


def together(handle: Handle, asked: list[list[int]], tokens: int = 12) -> list[tuple[list[int], list[TokenLogprob]]]:
    """All at once: tokens and log-probabilities of each."""
    out: list[tuple[list[int], list[TokenLogprob]]] = [([], []) for _ in asked]
    ended = [threading.Event() for _ in asked]

    def taker(i: int) -> Callable[[Output], None]:
        def take(output: Output) -> None:
            out[i][0].extend(output.tokens)
            out[i][1].extend(output.logprobs or [])
            if output.finish_reason is not None:
                ended[i].set()

        return take

    sampling = SamplingParams(max_tokens=tokens, temperature=0, logprobs=VOCAB, ignore_eos=True)
    submit_at_once(
        handle.engine,
        [(Request(f"relay-{id(out)}-{i}", prompt, sampling), taker(i)) for i, prompt in enumerate(asked)],
    )
    for event in ended:
        assert event.wait(60)
    return out


def same(a: list[tuple[list[int], list[TokenLogprob]]], b: list[tuple[list[int], list[TokenLogprob]]]) -> None:
    for (tokens, distributions), (others, other_distributions) in zip(a, b, strict=True):
        assert tokens == others
        for one, other in zip(distributions, other_distributions, strict=True):
            left, right = dict(one.top), dict(other.top)
            assert max(abs(left[token] - right[token]) for token in left) < 1e-4


@pytest.mark.parametrize("family", in_turn(FAMILIES))
def test_answers_are_the_same_with_and_without(
    family: str, start: Callable[..., Handle], model_of: Callable[[str], Path]
) -> None:
    asked = prompts(random.Random(3))
    results: list[Any] = []
    for relay in ("off", "on"):
        handle = start(model_of(family), relay=relay, max_batch=8)
        first = together(handle, asked)
        again = [[*prompt, *tokens, 7] for prompt, (tokens, _) in zip(asked, first, strict=True)]
        second = together(handle, again)  # with history on the device, side by side
        results.append((first, second))
        stats = handle.engine.stats()
        if relay == "off":
            assert stats.engine.relay.groups == stats.engine.relay.rows_read == 0
        else:
            assert stats.engine.relay.levels >= 3, "system prompt, document, conversation"
            assert stats.engine.relay.rows_saved > stats.engine.relay.rows_read
    same(results[0][0], results[1][0])
    same(results[0][1], results[1][1])


def test_prefixes_from_the_disk_are_shared_too(
    start: Callable[..., Handle], model_of: Callable[[str], Path], tmp_path: Path
) -> None:
    asked = prompts(random.Random(4))
    plain = together(start(model_of("llama"), relay="off", max_batch=8), asked)
    for _ in range(2):
        handle = start(model_of("llama"), tmp_path, relay="on", max_batch=8)
        same(together(handle, asked), plain)
        handle.engine.close(flush=True)
    assert handle.engine.stats().engine.cached_tokens["disk"] > 0
    assert handle.engine.stats().engine.relay.rows_saved > 0


def test_conversations_that_have_been_truncated_share_what_they_begin_with(
    start: Callable[..., Handle], model_of: Callable[[str], Path]
) -> None:
    """Shared rows keep their positions; rows that survived behind them have moved."""
    rng = random.Random(6)
    system = [rng.randrange(VOCAB) for _ in range(96)]
    texts = [[*system, *(rng.randrange(VOCAB) for _ in range(200))] for _ in range(4)]
    answers: list[list[list[Output]]] = []
    for relay in ("off", "on"):
        handle = start(model_of("llama"), relay=relay, max_batch=8, max_model_len=256)

        def ask(rows: int, engine: Engine = handle.engine) -> list[tuple[list[Output], threading.Event]]:
            turns = tuple(range(96, rows - 1, 40))
            return [submit_truncated(engine, text[:rows], max_tokens=12, turns=turns) for text in texts]

        for rows in (230, 296):  # all together, as `submit_at_once`
            asked = handle.engine.ask(partial(ask, rows))
            for _, ended in asked:
                assert ended.wait(60)
        answers.append([outputs for outputs, _ in asked])
        assert (handle.engine.stats().engine.relay.rows_saved > 0) == (relay == "on")
    for off, on in zip(*answers, strict=True):
        assert off[0].truncation is not None
        assert off[0].truncation.reused
        assert [output.tokens for output in off] == [output.tokens for output in on]
        assert (logprobs(off) - logprobs(on)).abs().max() < 1e-4


def test_tenants_share_no_reads(start: Callable[..., Handle], model_of: Callable[[str], Path]) -> None:
    handle = start(model_of("llama"), relay="on", max_batch=8)
    prompt = [1] * 100
    sampling = SamplingParams(max_tokens=8, temperature=0, ignore_eos=True)
    handle.engine.generate([Request(f"salt-{salt}", prompt, sampling, salt=salt) for salt in "abc"])
    assert handle.engine.stats().engine.relay.groups == 0


def test_what_does_not_pay_is_not_done(start: Callable[..., Handle], model_of: Callable[[str], Path]) -> None:
    asked = prompts(random.Random(5))
    for costs, expected in ((FREE, True), (DEAR, False)):
        handle = start(model_of("llama"), relay="auto", max_batch=8)
        doors.set_relay_costs(handle.engine.parts.runner, costs)
        together(handle, asked)
        assert bool(handle.engine.stats().engine.relay.groups) is expected


def by_hand(
    heads: int, kv_heads: int, lengths: list[int], shares: list[Share], generator: torch.Generator, new: int = 1
) -> tuple[list[BatchEntry], list[RelayGroup]]:
    """Make entries of these lengths, whose last `new` rows are computed in this step; entries that share have the same rows."""
    shape = KVShape(1, kv_heads, 16, torch.float32, torch.device("cpu"))
    entries: list[BatchEntry] = []
    pool = PagePool(shape, 2**30)
    for job, rows in enumerate(lengths):
        context = DeviceContext(shape, pool)
        context.make_room(rows)
        context.write(0, 0, *torch.randn(2, rows, kv_heads, 16, generator=generator))
        for share in shares:
            if job in share.jobs and job != share.jobs[0]:
                context.write(0, 0, *entries[share.jobs[0]].context.read(0, 0, share.stop))
        entries.append(BatchEntry(job, slice(job * new, (job + 1) * new), rows - new, rows, context))
    return entries, groups_of(shares, entries, None)


def attended(
    entries: list[BatchEntry], groups: list[RelayGroup], q: torch.Tensor, window: int = 0, cap: float = 0.0
) -> torch.Tensor:
    unused: Any = None
    attention = cast(Any, SimpleNamespace(scale=0.3, window=window, cap=cap, sinks=None))
    return doors.relay_attention(RelayAttend(entries, None, unused, unused, groups), attention, q)


@pytest.mark.parametrize("built", [True, False])
@pytest.mark.parametrize(("heads", "kv_heads"), [(4, 4), (8, 2), (8, 1)])
@pytest.mark.parametrize("new", [1, 3])
def test_all_levels_are_exact(
    heads: int, kv_heads: int, new: int, built: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A system prompt, two documents, one longer by a single row, no own rows but the new ones: float32 within 1e-5 of attention over
    everything at once, and by the compiled kernels the same bits as without sharing. Shares end with a whole block."""
    if not built:
        monkeypatch.setattr(decode, "native", lambda: None)
    generator = torch.Generator().manual_seed(heads + new)
    shares = [
        Share((0, 1, 2, 3, 4), 0, 130),
        Share((0, 1), 130, 131),
        Share((2, 3, 4), 130, 220),
        Share((3, 4), 220, 330),
    ]
    lengths = [131 + new, 131 + new + 1, 220 + new, 330 + new, 330 + new + 77, new, 40]
    entries, groups = by_hand(heads, kv_heads, lengths, shares, generator, new)
    assert depth_of(groups) == 3
    assert [(group.start, group.stop) for group in groups] == [(0, 128), (128, 192), (192, 320)]
    q = torch.randn(new * len(entries), heads, 16, generator=generator)
    found = attended(entries, groups, q)
    for entry in entries:
        keys, values = entry.context.read(0, 0, entry.stop)
        exact = attend(q[entry.where], keys, values, scale=0.3, causal=True)[0]
        torch.testing.assert_close(found[entry.where], exact, atol=1e-5, rtol=0)
    if decode.native() is not None:
        for entry in entries:
            entry.own_from = 0
        assert torch.equal(attended(entries, [], q), found)


@pytest.mark.parametrize("built", [True, False])
@pytest.mark.parametrize("new", [1, 3, 20])
def test_shared_rows_before_a_window_are_not_read(new: int, built: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two contexts fit into the window and read together, one has outgrown the shared rows in part, and one as a whole."""
    if not built:
        monkeypatch.setattr(decode, "native", lambda: None)
    generator = torch.Generator().manual_seed(3)
    window, lengths = 120, [101 + new, 120, 150 + new, 400 + new]
    entries, groups = by_hand(8, 2, lengths, [Share((0, 1, 2, 3), 0, 100)], generator, new)
    q = torch.randn(new * len(entries), 8, 16, generator=generator)
    expected = []
    for entry in entries:
        keys, values = entry.context.read(0, 0, entry.stop)
        expected.append(attend(q[entry.where], keys, values, scale=0.3, causal=True, window=window, cap=4.0)[0].clone())
        entry.context.write(0, 0, *torch.full((2, max(0, entry.start + 1 - window), 2, 16), torch.nan))
    torch.testing.assert_close(attended(entries, groups, q, window, 4.0), torch.cat(expected), atol=1e-5, rtol=0)


def test_rows_of_a_job_whose_load_failed_are_not_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """The others go on with the copy of an entry that is left."""
    generator = torch.Generator().manual_seed(9)
    entries, groups = by_hand(4, 2, [90, 95, 99], [Share((0, 1, 2), 0, 80)], generator)
    q = torch.randn(3, 4, 16, generator=generator)
    right = attended(entries, groups, q)
    entries[0].failed = "extent"
    entries[0].context.write(0, 0, *torch.full((2, 90, 2, 16), torch.nan))
    found = attended(entries, groups, q)
    torch.testing.assert_close(found[1:], right[1:])
    assert found[0].isfinite().all(), "void, but the forward pass goes on"


@pytest.mark.parametrize(("heads", "kv_heads"), [(4, 4), (8, 2), (8, 1)])
def test_what_is_read_is_what_the_paper_counts(heads: int, kv_heads: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """RelayAttention §3.4, eq. 8 to 10, in elements of one layer: as printed, which counts the keys alone of as many KV heads as
    heads; and with values and grouped heads."""
    b, s, c, d = 6, 128, 17, 16
    counted = {"q": 0, "keys": 0, "values": 0, "out": 0, "merge": 0}

    def counting(q: Any, keys: Any, values: Any, **more: Any) -> Any:
        found = attend(q, keys, values, **more)
        for name, tensor in (("q", q), ("keys", keys), ("values", values), ("out", found[0])):
            counted[name] += tensor.numel()
        return found

    def merging(out: Any, lse: Any, rows: Any, entry: Any) -> None:
        again = int((lse[rows] > -torch.inf).sum())  # the first entry of a query is not merged with anything
        counted["merge"] += 3 * again * d
        merge_into(out, lse, rows, entry)

    monkeypatch.setattr(decode, "native", lambda: None)
    monkeypatch.setattr(decode, "attend", counting)
    monkeypatch.setattr(decode, "merge_into", merging)
    generator = torch.Generator().manual_seed(8)
    entries, groups = by_hand(heads, kv_heads, [s + c] * b, [Share(tuple(range(b)), 0, s)], generator)
    q = torch.randn(b, heads, d, generator=generator)

    attended(entries, [], q)
    for entry in entries:
        assert entry.own_from == s
        entry.own_from = 0
    counted = dict.fromkeys(counted, 0)
    attended(entries, [], q)
    plain, plain_keys = sum(counted.values()), sum(counted[name] for name in ("q", "keys", "out"))
    for entry in entries:
        entry.own_from = s
    counted = dict.fromkeys(counted, 0)
    attended(entries, groups, q)
    relay, relay_keys = sum(counted.values()), sum(counted[name] for name in ("q", "keys", "out", "merge"))

    group = heads // kv_heads
    assert plain == 2 * kv_heads * b * (s + c + group) * d
    assert relay == 2 * kv_heads * d * (s + b * c) + 7 * heads * b * d
    assert plain / relay == pytest.approx((s + c + group) / (s / b + c + 3.5 * group))
    if heads == kv_heads:
        assert plain_keys == heads * b * d * (s + c + 2)
        assert relay_keys == heads * ((b + s + b) * d + (b + b * c + b) * d + 3 * b * d)
        assert plain_keys / relay_keys == pytest.approx((s + c + 2) / (s / b + c + 7))


def test_recording_attention_refuses_to_share_it() -> None:
    """What would be silently off is refused where it was asked for by name."""
    with pytest.raises(ConfigError, match=r"--relay on.*importance.*--relay auto"):
        EngineConfig(relay="on", truncation_policy="importance")
    for relay in ("auto", "off"):
        EngineConfig(relay=relay, truncation_policy="importance")


def test_costs_grow_with_what_is_read() -> None:
    costs = RelayCosts(rows=((1, 1.0), (2, 1.2), (4, 1.5)), call=3.0, merged=0.5)
    assert [costs.reading(n) for n in (1, 1.5, 2, 3, 4)] == pytest.approx([1.0, 1.1, 1.2, 1.35, 1.5])
    assert costs.reading(8) == pytest.approx(2.1), "as the last two say"
    assert costs.gain(10, 2, 2) == pytest.approx(10 * (2 * 1.0 - 1.2) - 3.0 - 2 * 0.5)
    assert costs.gain(10, 2, 4) == pytest.approx(10 * (2 * 1.2 - 1.5) - 3.0 - 4 * 0.5)


def test_costs_are_measured_and_one_job_never_gains(
    start: Callable[..., Handle], model_of: Callable[[str], Path]
) -> None:
    runner: Any = start(model_of("llama"), relay="auto").engine.parts.runner
    threads = torch.get_num_threads()
    costs = RelayCosts.measured(runner.shape, 4)
    assert costs.call > 0
    assert costs.rows
    assert costs.gain(4096, 1, 1) <= 0
    assert torch.get_num_threads() == threads
