"""Several engines: one is the simulation, many answer every turn once, and a shared store makes up for a bad router."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from afterglow.plan.retention.shared_room import PARTS
from afterglow.sim.cluster.engines import Cluster, Network, SharingEngine
from afterglow.sim.cluster.routers import BUSIER, router
from afterglow.sim.cluster.shared_tier import SharedTier
from afterglow.sim.scenario import Running, setup_of, source_of
from afterglow.sim.scenario_options import ClusterConfig, EngineModel, RouterName, Scenario, TierConfig, WorkloadConfig
from afterglow.sim.simulator import Outcome, Simulation
from afterglow.sim.workload.turns import Conversation, StreamSegment, TraceTurn, Workload
from tests import doors

ROUTERS: tuple[RouterName, ...] = ("random", "least-loaded", "conversation", "prefix")
GIB = 2**30
COLUMNS = ("ttft", "waited", "history", "device", "host", "disk", "prompts")


def scenario(conversations: int = 40, rate: float = 1.0, **values: Any) -> Scenario:
    made = Scenario(
        workload="sharegpt-atc",
        source=WorkloadConfig(conversations=conversations, rate=rate, think=10.0),
        engine=EngineModel(model="Llama-3-8B"),
        tiers=TierConfig(devices=1, dram=8 * GIB, disk=64 * GIB),
        cluster=ClusterConfig(),
    )
    return made.with_values(**values)


def clustered(wanted: Scenario) -> tuple[Cluster, Outcome]:
    setup = setup_of(wanted)
    _, source = source_of(wanted, setup.longest)
    config = wanted.cluster
    network = Network(config.network * 1e9, config.shared_tier)
    cluster = Cluster(setup, Workload(source), config.engines, config.router, network, warm_up=wanted.source.warm_up)
    return cluster, cluster.run()


@pytest.mark.parametrize(
    "values", [{}, {"retain": False, "prefill_chunk": 0}, {"rate": 20.0, "dram": 2 * GIB, "disk": 0}, {"window": 2048}]
)
def test_one_engine_is_the_simulation(values: dict[str, Any]) -> None:
    wanted = scenario(**values)
    setup = setup_of(wanted)
    alone = Simulation(setup, Workload(source_of(wanted, setup.longest)[1])).run()
    cluster, together = clustered(wanted)
    assert together.turns == alone.turns > 100
    assert together.steps == alone.steps
    for column in COLUMNS:
        assert getattr(together, column) == getattr(alone, column)
    assert together.bytes_moved == alone.bytes_moved
    assert together.ended == alone.ended
    cluster.engines[0].scheduler.check()


@pytest.mark.parametrize("name", ROUTERS)
@pytest.mark.parametrize("shared", [0, 64 * GIB])
def test_every_turn_is_answered_once(name: RouterName, shared: int) -> None:
    wanted = scenario(engines=5, router=name, shared_tier=shared)
    cluster, outcome = clustered(wanted)
    alone = clustered(scenario())[1]
    assert (outcome.turns, outcome.output_tokens) == (alone.turns, alone.output_tokens)
    assert outcome.counters is not None
    assert outcome.counters.submitted == outcome.counters.finished == outcome.turns
    assert sum(engine.outcome.turns > 0 for engine in cluster.engines) == 5
    assert all(engine.load == 0 for engine in cluster.engines)
    for engine in cluster.engines:
        engine.scheduler.check()


def test_a_conversation_that_stays_is_cached() -> None:
    stays = Running(scenario(engines=4, router="conversation")).run()
    moves = Running(scenario(engines=4, router="random")).run()
    assert stays["cluster"]["moved_turns"] == 0
    assert moves["cluster"]["moved_turns"] > 50
    assert moves["hit_rate"] < stays["hit_rate"] - 0.2
    assert stays["cluster"]["network_in_bytes"] == stays["cluster"]["network_out_bytes"] == 0


def test_a_shared_store_brings_rows_after_their_conversations() -> None:
    without = Running(scenario(engines=4, router="random")).run()
    shared = Running(scenario(engines=4, router="random", shared_tier=256 * GIB, network=100.0)).run()
    assert shared["hit_rate"] > without["hit_rate"] + 0.1
    moved = shared["cluster"]
    assert moved["network_in_bytes"] > 0
    assert moved["network_out_bytes"] >= moved["shared_bytes"] > 0
    # Fetched extents leave a file: the disks are written sealed and fetched extents.
    assert shared["bytes_moved"]["host to disk"] >= moved["network_out_bytes"] + moved["network_in_bytes"]


def test_truncated_conversations_go_on_elsewhere(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where a conversation was cut is known to the engine that goes on with it: nothing is computed that an engine that
    had it from the start would not compute, where a few rows are looked up too."""
    monkeypatch.setattr("afterglow.sim.cluster.engines.MIN_LOOKUP_ROWS", 1)
    cut = scenario(window=2048, engines=3)
    stays = clustered(cut)[1]
    moves = clustered(cut.with_values(router="random"))[1]
    follows = clustered(cut.with_values(router="random", shared_tier=256 * GIB, network=1000.0))[1]
    assert follows.counters is not None
    assert follows.counters.truncations > 50
    assert follows.computed_tokens == stays.computed_tokens < 0.7 * moves.computed_tokens


def test_a_small_shared_store_stays_small() -> None:
    cluster, _ = clustered(scenario(engines=4, router="random", shared_tier=GIB))
    assert isinstance(cluster.shared, SharedTier)
    assert 0 < cluster.shared.used <= GIB + 4 * (GIB // PARTS), "each engine counts for itself"
    assert cluster.shared.evicted > 0


def test_equal_seeds_make_equal_clusters() -> None:
    first, second = (Running(scenario(engines=3, router="random", shared_tier=64 * GIB)).run() for _ in range(2))
    assert first == second


def test_a_thousand_engines() -> None:
    wanted = scenario(conversations=300, rate=100.0, engines=1000, router="least-loaded")
    cluster, outcome = clustered(wanted)
    assert outcome.turns > 1000
    assert outcome.queue_seconds < 1.0
    used = [engine.outcome.turns for engine in cluster.engines]
    assert max(used) < 15
    assert sum(used) == outcome.turns


def turn(session: str, index: int, tokens: int, stream: str | None = None) -> TraceTurn:
    return TraceTurn(session, index, (StreamSegment(stream or session, 0, tokens),), (), tokens)


def test_least_loaded_is_least_loaded() -> None:
    chosen = {router("least-loaded", seed).choose(turn("a", 0, 10), [3, 1, 2, 1]) for seed in range(20)}
    assert chosen == {1, 3}


def test_prefix_follows_what_was_sent_until_that_engine_is_busy() -> None:
    found = router("prefix", 0)
    loads = [0] * 8
    first = found.choose(turn("a", 0, 640), loads)
    assert found.choose(turn("b", 0, 1000, "a"), loads) == first
    loads[first] = BUSIER
    assert found.choose(turn("a", 1, 900), loads) == first
    loads[first] = BUSIER + 1
    assert (elsewhere := found.choose(turn("a", 2, 900), loads)) != first
    loads[first] = 0
    assert found.choose(turn("a", 3, 900), loads) == elsewhere


def test_warm_up_is_left_out() -> None:
    everything = Running(scenario(engines=2)).run()
    some = Running(scenario(engines=2, warm_up=20)).run()
    assert some["turns"] == everything["turns"] - 20


@pytest.mark.parametrize("engines", [1, 2])
def test_what_the_warm_up_moved_is_left_out(engines: int) -> None:
    wanted = scenario(12, engines=engines, router="random", shared_tier=256 * GIB, dram=GIB, retain=False)
    everything = Running(wanted).run()
    some = Running(wanted.with_values(warm_up=40)).run()
    assert everything["bytes_moved"].keys() == some["bytes_moved"].keys()
    for link, size in everything["bytes_moved"].items():
        assert 0 < some["bytes_moved"][link] < size or not size
    assert some["bytes_moved"]["network to engine"] == some["cluster"]["network_in_bytes"]
    assert some["bytes_moved"]["engine to network"] == some["cluster"]["network_out_bytes"]
    for name in ("steps", "events"):
        assert 0 < some[name] < 0.9 * everything[name]


def test_an_engine_that_is_still_warming_up_counts_for_nothing() -> None:
    cluster, together = clustered(scenario(12, engines=3, warm_up=90))
    outcomes = [engine.outcome for engine in cluster.engines]
    assert [outcome.skipped < 30 for outcome in outcomes] == [False, False, True]
    counted, warming = outcomes[:2], outcomes[2]
    assert (warming.prefilling, warming.decoding, warming.queue_seconds, warming.ended, warming.steps) == (
        0,
        0,
        0,
        0,
        0,
    )
    assert not any(warming.bytes_moved.values())
    assert together.prefilling == sum(outcome.prefilling for outcome in counted) > 0
    assert together.decoding == sum(outcome.decoding for outcome in counted) > 0


def test_turns_that_are_computed_anew_are_not_saved() -> None:
    moved = {mode: Running(scenario(5, mode=mode)).run()["bytes_moved"] for mode in ("reuse", "recompute")}
    assert moved["reuse"]["device to host"] > 0
    assert not any(moved["recompute"].values())


def test_turns_that_the_warm_up_refused_are_left_out() -> None:
    def request(name: str, start: float, tokens: int) -> Conversation:
        prompt = (StreamSegment(name, 0, tokens),)
        return Conversation(name, start, [TraceTurn(name, 0, prompt, (StreamSegment(name, tokens, 4),), tokens)])

    starts = [("a", 0.0, 100), ("b", 1.0, 5000), ("c", 100.0, 100), ("d", 101.0, 5000), ("e", 102.0, 100)]
    refused = {}
    for warm_up in (0, 2, 3):
        setup = replace(setup_of(scenario(window=1024)), truncate=False)
        workload = Workload([request(*each) for each in starts])
        refused[warm_up] = Simulation(setup, workload, warm_up=warm_up).run().refused
    assert refused == {0: 2, 2: 1, 3: 0}


def test_every_promise_is_kept_or_given_back() -> None:
    cluster, _ = clustered(scenario(engines=4, router="random", shared_tier=64 * GIB, dram=2 * GIB, disk=4 * GIB))
    engines = [engine.executor for engine in cluster.engines if isinstance(engine, SharingEngine)]
    assert cluster.shared is not None
    unread = [name for executor in engines for name in doors.unread_extents(executor)]
    assert sum(doors.promised_reads(cluster.shared).values()) == len(unread)
    assert sum(executor.network_in.bytes for executor in engines) > 0
