"""The operator models: goldens of the closed forms, the signs and orders of the papers' figures, what must be monotonic."""

from __future__ import annotations

import json
from dataclasses import replace
from math import inf
from random import Random

import pytest
from benchmarks.papers.attncache.measures import gamma
from benchmarks.papers.attncache.modelled import hit_rate_for
from benchmarks.papers.relay.modelled import mmlu_seconds
from hypothesis import given
from hypothesis import strategies as st

from afterglow.errors import ConfigError
from afterglow.sim.machine.catalogue import hardware, model
from afterglow.sim.operators.operator_tables import OPERATORS, OperatorOptions, run
from afterglow.sim.operators.operator_tables import memo as memo
from afterglow.sim.operators.relay import (
    MODES,
    Heads,
    Mode,
    Roof,
    attention_bytes,
    attention_seconds,
    printed_speedup,
    speedup,
)
from afterglow.sim.operators.serving import (
    SHAREGPT,
    Lengths,
    ServingModel,
    ServingRequest,
    requests,
    serve,
    sustained,
)

A40, A100 = hardware("A40"), hardware("A100-80G")
LLAMA_30B, LLAMA_7B = model("LLaMA-30B"), model("LLaMA-2-7B")
HEADS, ROOF = Heads.of(LLAMA_30B), Roof.of(A40)

lengths = st.integers(1, 20_000)
batches = st.integers(1, 512)

# ---------------------------------------------------------------------------------------------------- relay


@pytest.mark.parametrize(("system", "printed"), [(64, 1.42), (256, 2.70), (1024, 6.91), (2048, 10.94)])
def test_printed_speedups(system: int, printed: float) -> None:
    """RelayAttention Figure 5, theory."""
    assert round(printed_speedup(32, 128, system), 2) == printed


def test_speedup_with_keys_and_values_counted() -> None:
    assert round(speedup(32, 128, 2048), 2) == 11.14


@given(batches, lengths, lengths)
def test_printed_speedup_helps_where_it_should(batch: int, context: int, system: int) -> None:
    """p > 1 if and only if s (1 - 1/b) > 5; a single request never gains."""
    assert (printed_speedup(batch, context, system) > 1) == (system * (batch - 1) > 5 * batch)


@given(batches, lengths, lengths, st.sampled_from([1, 4, 8]))
def test_bytes_of_the_roofline_are_those_of_the_formula(batch: int, context: int, system: int, group: int) -> None:
    heads = Heads(32, 32 // group, 128)
    plain, relay = (attention_bytes(mode, heads, batch, context, system) for mode in ("plain", "relay"))
    assert plain / relay == pytest.approx(speedup(batch, context, system, group))


@given(batches, lengths, lengths, lengths, st.sampled_from(MODES))
def test_attention_takes_longer_with_more(batch: int, context: int, system: int, more: int, mode: Mode) -> None:
    def seconds(b: int, c: int, s: int) -> float:
        return attention_seconds(mode, HEADS, ROOF, b, c, s)

    least = seconds(batch, context, system)
    assert least < seconds(batch, context + more, system)
    assert least < seconds(batch, context, system + more)
    assert least < seconds(batch + more, context, system)


@given(batches, lengths, lengths)
def test_sharing_a_prefix_does_not_change_what_is_read(batch: int, context: int, system: int) -> None:
    plain, shared = (attention_seconds(mode, HEADS, ROOF, batch, context, system) for mode in ("plain", "shared"))
    assert plain == shared


def gain(batch: int, context: int, system: int) -> float:
    return attention_seconds("plain", HEADS, ROOF, batch, context, system) / attention_seconds(
        "relay", HEADS, ROOF, batch, context, system
    )


def test_figure_1_and_5() -> None:
    """Each point within a tenth, the gain grows with the system prompt and stays below the counted one."""
    paper = {64: (270.5, 191.0), 512: (820, 226), 2048: (2746, 287), 16384: (20917, 868)}
    for system, (plain, relay) in paper.items():
        assert attention_seconds("plain", HEADS, ROOF, 32, 128, system) * 1e6 == pytest.approx(plain, rel=0.1)
        assert attention_seconds("relay", HEADS, ROOF, 32, 128, system) * 1e6 == pytest.approx(relay, rel=0.1)
        assert gain(32, 128, system) < speedup(32, 128, system)
    gains = [gain(32, 128, system) for system in sorted(paper)]
    assert gains == sorted(gains)


def test_where_relay_does_not_help() -> None:
    """RelayAttention 5: one request is slower with it, long contexts of their own make the gain fade."""
    assert gain(1, 128, 2048) < 1
    assert gain(32, 128, 2048) > gain(32, 256, 2048) > gain(32, 4096, 2048) > 1


def test_large_batches_compute_for_longer_than_they_read() -> None:
    """The device's printed peak is reached at a batch of about 54 (696 GB/s, 37.4 TFLOP/s), not within its matrix units."""
    matrix = Roof.of(A40, peak="matrix")

    def system_part(roof: Roof, batch: int) -> float:
        return attention_seconds("relay", HEADS, roof, batch, 128, 8192) - attention_seconds(
            "relay", HEADS, roof, batch, 128, 1
        )

    assert system_part(ROOF, 32) == pytest.approx(system_part(matrix, 32))
    assert system_part(ROOF, 128) > 2 * system_part(matrix, 128)


# ------------------------------------------------------------------------------------------- relay, a server

SMALL = st.lists(
    st.builds(ServingRequest, st.integers(1, 600), st.integers(1, 300), st.just(0.0)), min_size=1, max_size=40
)  # all at once


def server(mode: Mode, system: int = 512, **other: object) -> ServingModel:
    return replace(ServingModel(model=LLAMA_7B, hardware=A40, mode=mode, system=system), **other)  # type: ignore[arg-type]


def stepped(one: ServingModel, work: list[ServingRequest]) -> float:
    """Seconds, pass by pass and step by step, where there is room for all."""
    waiting, running, seconds = list(work), list[tuple[int, int]](), 0.0
    while waiting or running:
        if waiting:
            taken = [waiting.pop(0)]
            while waiting and sum(one.kept(r.prompt) for r in [*taken, waiting[0]]) <= one.max_prefill:
                taken.append(waiting.pop(0))
            seconds += one.prefill_seconds([r.prompt for r in taken])
            running += [(r.prompt + 1, r.reply - 1) for r in taken]
        else:
            seconds += one.step_seconds(len(running), sum(own for own, _ in running))
            running = [(own + 1, left - 1) for own, left in running]
        running = [(own, left) for own, left in running if left]
    return seconds


@given(SMALL, st.sampled_from(MODES), st.sampled_from([0, 64, 512]))
def test_steps_added_up_take_what_they_take_one_by_one(work: list[ServingRequest], mode: Mode, system: int) -> None:
    one = ServingModel(model=LLAMA_7B, hardware=A100, mode=mode, system=system)
    found = serve(one, work)
    assert found.preempted == 0
    assert found.seconds == pytest.approx(stepped(one, work), rel=1e-9)
    assert (found.requests, found.tokens) == (len(work), sum(r.reply for r in work))


def test_short_room_makes_the_youngest_start_over() -> None:
    work = [ServingRequest(100, 900) for _ in range(40)]
    small, large = server("relay"), server("relay")
    object.__setattr__(small, "room", 20_000)
    tight, wide = serve(small, work), serve(large, work)
    assert tight.preempted > 0 == wide.preempted
    assert tight.seconds > wide.seconds
    assert tight.tokens == wide.tokens == 40 * 900


def test_a_request_that_does_not_fit_is_refused() -> None:
    with pytest.raises(ConfigError, match="cannot be served"):
        serve(server("plain"), [ServingRequest(200_000, 1)])


@pytest.mark.parametrize(
    ("name", "device", "devices"),
    [("LLaMA-2-7B", "A40", 1), ("LLaMA-2-7B", "A100-80G", 1), ("LLaMA-30B", "A100-80G", 2), ("Mistral-7B", "A40", 1)],
)
def test_figure_6_and_table_4_in_order(name: str, device: str, devices: int) -> None:
    """Relay before sharing before none at every length; none loses most with length, relay next to nothing."""
    work = requests(300, *SHAREGPT)
    found = {
        (mode, system): serve(
            ServingModel(model=model(name), hardware=hardware(device), devices=devices, mode=mode, system=system), work
        ).requests_per_s
        for mode in MODES
        for system in (64, 512, 2048)
    }
    for system in (64, 512, 2048):
        assert found["plain", system] < found["shared", system] < found["relay", system]
    for mode in MODES:
        assert found[mode, 64] > found[mode, 512] > found[mode, 2048]
    assert found["relay", 2048] > 0.9 * found["relay", 64]
    assert found["plain", 2048] < 0.5 * found["plain", 64]


def test_table_3_in_order() -> None:
    """More examples cost a server without sharing most; relay, hardly anything (A100: 1308, 432 and 316 s with five)."""
    one, five = ({mode: mmlu_seconds(LLAMA_7B, A100, mode, shots) for mode in MODES} for shots in (1, 5))
    assert one["plain"] > one["shared"] > one["relay"]
    assert five["plain"] > five["shared"] > five["relay"]
    assert five["plain"] / five["relay"] > one["plain"] / one["relay"] > 1.5
    assert five["relay"] < 1.1 * one["relay"]


def test_figure_7_in_order() -> None:
    """At half a second per token relay bears at least 2.2 times what sharing does, which bears more than none."""
    rates = {mode: sustained(server(mode, 2048), SHAREGPT, count=400) for mode in MODES}
    assert rates["plain"] < rates["shared"]
    assert rates["relay"] > 2.2 * rates["shared"]


@given(st.floats(0.5, 4), st.floats(1.1, 4))
def test_more_requests_per_second_wait_longer(rate: float, factor: float) -> None:
    slow, fast = (
        serve(server("shared", 2048), requests(150, *SHAREGPT, rate=r)).normalised for r in (rate, rate * factor)
    )
    assert slow <= fast * 1.02  # a later request may share a pass


@given(st.integers(0, 2**32))
def test_lengths_keep_their_bounds_and_seeds_repeat(seed: int) -> None:
    work = requests(50, *SHAREGPT, seed=seed, rate=2.0)
    assert work == requests(50, *SHAREGPT, seed=seed, rate=2.0)
    assert all(4 <= r.prompt <= 1024 and 4 <= r.reply <= 2013 and r.prompt + r.reply <= 2048 for r in work)
    assert [r.arrival for r in work] == sorted(r.arrival for r in work)
    assert Lengths(7, 7).draw(Random(seed)) == 7


def test_means_of_lengths() -> None:
    """Near the 250 and 230 tokens of published ShareGPT lengths."""
    work = requests(5000, *SHAREGPT, rate=inf)
    assert sum(r.prompt for r in work) / 5000 == pytest.approx(240, rel=0.1)
    assert sum(r.reply for r in work) / 5000 == pytest.approx(235, rel=0.1)


# ----------------------------------------------------------------------------------------------------- memo

TABLE_1 = {  # full; SAN, LazyFormer, AttnCache-f, AttnCache: mean score, speedup, gamma
    "LLaMA-2-7B": (68.60, ((30.34, 1.45, 0.85), (34.48, 1.39, 0.87), (50.39, 1.14, 1.30), (67.75, 1.19, 0.04))),
    "Llama-3-8B": (71.88, ((46.81, 1.49, 0.51), (46.49, 1.42, 0.60), (50.46, 1.16, 1.34), (69.63, 1.21, 0.11))),
    "Mistral-7B": (72.13, ((46.39, 1.44, 0.58), (45.67, 1.38, 0.70), (50.63, 1.15, 1.43), (70.31, 1.20, 0.09))),
}


@pytest.mark.parametrize("name", TABLE_1)
def test_degradation_as_printed(name: str) -> None:
    """Gamma takes the scores as fractions."""
    full, methods = TABLE_1[name]
    for score, speed, printed in methods:
        assert gamma(full / 100, score / 100, speed) == pytest.approx(printed, abs=0.0101)


@pytest.mark.parametrize("name", TABLE_1)
def test_table_1(name: str) -> None:
    """LazyFormer, with maps for half of the layers at no cost, before AttnCache, with a hit rate of 30 % and a search."""
    shape = model(name)
    times = memo.layer_times(shape, memo.XEONS, memo.SENTENCE)
    search = memo.projection_seconds(shape, memo.XEONS, memo.SENTENCE)
    lazy = memo.speedup(times, shape.layers, 0.5)
    cached = memo.speedup(times, shape.layers, memo.HIT_RATE, search)
    _, (_, lazy_paper, _, cached_paper) = TABLE_1[name]
    assert lazy == pytest.approx(lazy_paper[1], rel=0.05)
    assert cached == pytest.approx(cached_paper[1], rel=0.05)
    assert 1 < memo.end_to_end(shape, memo.XEONS, memo.SENTENCE, memo.HIT_RATE, search) < cached < lazy


@pytest.mark.parametrize("name", TABLE_1)
def test_a_hit_saves_half_of_the_projections(name: str) -> None:
    """Queries and keys are half of the weights, with shared key/value heads as without: 1 / (1 - 0.3 / 2) = 1.18."""
    shape = model(name)
    times = memo.layer_times(shape, replace(memo.XEONS, flops=1e9), 1)  # nothing but matrices counts
    assert times.saved == pytest.approx(0.5, abs=0.01)
    assert memo.speedup(times, shape.layers, 0.3) == pytest.approx(1.18, abs=0.01)


def test_bytes_of_maps() -> None:
    assert memo.map_bytes(model("Llama-3-8B"), 32) == 2 * 2**20


@given(st.integers(1, 512), st.floats(0, 1), st.floats(0, 0.5), st.floats(0, 1e-2))
def test_speedup_grows_with_hits_and_shrinks_with_search(tokens: int, rate: float, more: float, search: float) -> None:
    shape = model("Llama-3-8B")
    times = memo.layer_times(shape, memo.XEONS, tokens)
    assert 0 < times.hit < times.full
    base = memo.speedup(times, shape.layers, rate, search)
    assert base <= memo.speedup(times, shape.layers, min(1.0, rate + more), search) * (1 + 1e-12)
    assert base <= memo.speedup(times, shape.layers, rate)
    assert hit_rate_for(times, shape.layers, base, search) == pytest.approx(rate, abs=1e-9)


# ---------------------------------------------------------------------------------------------- the interface


@pytest.mark.parametrize("name", OPERATORS)
def test_tables(name: str) -> None:
    tables = run(name, OperatorOptions(prefix=(128, 1024)))
    for table in tables:
        packed = json.loads(json.dumps(table.as_json()))
        assert [list(row) for row in packed["rows"]] == [list(table.columns)] * len(table.rows)
        assert {row[table.columns[0]] for row in packed["rows"]} == {128, 1024}
    assert run(name, OperatorOptions(prefix=(128, 1024))) == tables


def test_the_paper_s_own_set_up_is_the_default() -> None:
    rows = {row[0]: row for row in run("relay", OperatorOptions(prefix=(2048,)))[0].rows}
    assert rows[2048][4:] == (10.94, 11.14)


@pytest.mark.parametrize(
    ("name", "options", "said"),
    [
        ("rely", {}, "relay"),
        ("relay", {"model": "LLaMA-31B"}, "LLaMA-30B"),
        ("relay", {"hardware": "A41"}, "A40"),
        ("relay", {"batch": 0}, "batch must be at least 1"),
        ("relay", {"context": -1}, "0 or more"),
        ("relay", {"prefix": (0,)}, "1 token or more"),
        ("relay", {"devices": 0}, "devices must be 1 or more"),
        ("importance", {"retention": 0.0}, "retention must be more than 0"),
        ("importance", {"data": 0}, "data must be 1 or more"),
        ("importance", {"disk_read": 0.0}, "bandwidths must be more than 0"),
        ("importance", {"host_cache": -1}, "caches must have 0 or more"),
        ("importance", {"new": 0}, "query must be 1 or more"),
        ("memo", {"hit_rate": 1.5}, "between 0 and 1"),
    ],
)
def test_bad_options(name: str, options: dict[str, object], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        run(name, OperatorOptions(**options))  # type: ignore[arg-type]


def test_a_model_that_does_not_fit_still_has_its_operator() -> None:
    operator, whole = run("relay", OperatorOptions(model="LLaMA-30B", prefix=(512,)))
    assert operator.rows
    assert whole.rows == tuple((512, mode, "-", "-", "-") for mode in MODES)
    assert "does not fit" in whole.note
