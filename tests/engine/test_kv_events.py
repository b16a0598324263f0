"""KV events: what a subscriber makes of them is what the plan's index and tiers hold, whatever happened."""

from __future__ import annotations

import contextlib
import importlib.util
import os
import random
import socket
import threading
from pathlib import Path
from typing import Any

import pytest

from afterglow.config import BLOCK_ROWS, CacheConfig, EngineConfig
from afterglow.engine.engine import Engine
from afterglow.engine.kv_events import publisher
from afterglow.engine.kv_events.blocks import MEDIA, Blocks, ChangedExtents, StoredBlocks
from afterglow.engine.kv_events.publisher import END, encode
from afterglow.errors import ConfigError
from afterglow.library.locate import BUNDLED, find_model
from afterglow.plan.cache import Cache
from afterglow.plan.prefix.salts import approximate, kind_of
from afterglow.plan.prefix.shared_prefixes import OPERATOR
from afterglow.request import Request, SamplingParams
from tests.plan.lasting_kit import Lasting
from tests.plan.prefix_kit import PROMPTS, Prompting, prompted
from tests.plan.server_kit import words
from tests.plan.test_merging import Real
from tests.waiting import wait_for

msgpack = pytest.importorskip("msgpack")
zmq = pytest.importorskip("zmq")
BLOCK_BYTES = 4 * BLOCK_ROWS
View = set[tuple[str, str, bytes]]  # (medium, hashed salt, all tokens up to the block's end)


class LongLasting(Real, Lasting):
    """Blocks of real sizes, over restarts."""


class RealPrompting(Real, Prompting):
    """Blocks of real sizes, and registered prefixes."""


class Subscriber:
    """Reads messages as a router would, with msgpack alone. It knows blocks by their hashes."""

    def __init__(self) -> None:
        self.paths: dict[int, tuple[str, bytes]] = {}  # by hash: salt, and the tokens from the root on
        self.held: set[tuple[str, int]] = set()

    def read(self, payload: bytes) -> None:
        at, events, rank = msgpack.unpackb(payload)
        assert isinstance(at, float)
        assert rank == 0
        for event in events:
            getattr(self, event.pop("type"))(**event)

    def BlockStored(
        self,
        block_hashes: list[int],
        parent_block_hash: int | None,
        token_ids: list[int],
        block_size: int,
        lora_id: None,
        medium: str,
        lora_name: None,
        extra_keys: list[Any] | None = None,
    ) -> None:
        assert (block_size, lora_id, lora_name) == (BLOCK_ROWS, None, None)
        assert len(token_ids) == BLOCK_ROWS * len(block_hashes)
        assert medium in MEDIA
        salt, path = ("", b"") if parent_block_hash is None else self.paths[parent_block_hash]
        for number, name in enumerate(block_hashes):
            for key in (extra_keys[number] if extra_keys else None) or ():
                assert key["type"] == "cache_salt"
                salt = key["salt"]
            own = token_ids[number * BLOCK_ROWS : (number + 1) * BLOCK_ROWS]
            path += b"".join(token.to_bytes(4, "little") for token in own)
            assert self.paths.setdefault(name, (salt, path)) == (salt, path), "two blocks of one name"
            assert (medium, name) not in self.held, "stored twice"
            self.held.add((medium, name))

    def BlockRemoved(self, block_hashes: list[int], medium: str) -> None:
        for name in block_hashes:
            self.held.remove((medium, name))

    def AllBlocksCleared(self) -> None:
        self.held.clear()

    @property
    def view(self) -> View:
        return {(medium, *self.paths[name]) for medium, name in self.held}


def truth(cache: Cache, salts: dict[str, str]) -> View:
    """Ask the index and the device for every beginning of every path. `salts`: as they are published."""
    paths = {(each.salt, cache.index.before(each) + each.tokens) for each in cache.index.extents.values()}
    paths = {(salt, path) for salt, path in paths if kind_of(salt) == "exact" and salt != OPERATOR}
    paths |= {("", each.tokens) for each in cache.index.prefixes.of("")}
    return {found for salt, path in paths for found in matched(cache, salts, salt, path)}


def matched(cache: Cache, salts: dict[str, str], salt: str, path: bytes) -> View:
    """List what prompts under a salt match of a path, if they are parts of that path, or all."""
    found: View = set()
    stops = {*range(BLOCK_ROWS, len(path) // 4, BLOCK_ROWS), len(path) // 4}
    for stop in stops:
        match = cache.match(salt, path[: 4 * stop])
        _, on_device = cache.device.best(path[: 4 * stop], match)
        holders = [view.extent for view in match.views for _ in range(view.start, view.stop)]
        for end in range(BLOCK_ROWS, match.rows + 1, BLOCK_ROWS):
            rows = holders[end - BLOCK_ROWS : end]
            in_host = all(row.host == "ready" for row in rows)
            on_disk = all(row.disk == "ready" for row in rows)
            assert all(row.host == "ready" or row.disk == "ready" for row in rows)
            tiers = (end <= on_device, in_host, on_disk or not in_host)
            there = [medium for medium, yes in zip(MEDIA, tiers, strict=True) if yes]
            found |= {(medium, salts[rows[-1].salt], path[: 4 * end]) for medium in there}
    return found


class Watched:
    """A plan, its events, and a subscriber that has all of them."""

    def __init__(self, server: Lasting) -> None:
        self.server = server
        self.blocks = Blocks("m")
        self.subscriber = Subscriber()
        self.salts = {"": ""}
        self.compared = 0
        self.watch()

    def watch(self) -> None:
        """Begin with the whole index, as after a start, or when messages were left out."""
        self.changed = ChangedExtents(self.server.scheduler.cache)
        self.read(self.changed.everything())

    def read(self, changes: Any) -> None:
        if changes is not None:
            for each in changes.states:
                self.salts.setdefault(each.salt, self.blocks.salt_tag(each.salt))
            self.subscriber.read(encode(self.blocks.apply(changes), 1.0, token_ids=True))

    def compare(self) -> None:
        self.read(self.changed.take())
        view, expected = self.subscriber.view, truth(self.server.scheduler.cache, self.salts)
        assert view == expected
        self.compared += len(view)


@pytest.mark.parametrize("seed", [3, *(pytest.param(seed, marks=pytest.mark.long) for seed in range(10, 30))])
def test_a_subscriber_knows_the_index_after_random_traffic(seed: int) -> None:
    """Turns of all lengths, branches, two salts, evictions from all tiers, merges, resets and restarts."""
    rng = random.Random(seed)
    policy = rng.choice(["write_back", "write_through", "write_through_selective"])
    server = LongLasting(host_slots=30, device_rows=1024, disk_bytes=40_000, write_policy=policy, retain=True)
    watched = Watched(server)
    talks: list[tuple[str, list[int]]] = []
    for _ in range(20):
        if talks and rng.random() < 0.7:
            salt, text = rng.choice(talks)
            text = text[: rng.randint(1, len(text))] if rng.random() < 0.3 else text
        else:
            salt, text = rng.choice(["", "tenant"]), []
        prompt = [*text, *rng.choices(range(50), k=rng.randint(1, 150))]
        if len(prompt) > 500:
            continue
        job = server.submit(prompt, rng.randint(1, 40), salt=salt)
        while server.scheduler.unfinished:
            server.step()
            watched.compare()
        server.finish()
        watched.compare()
        talks = [*talks, (salt, list(server.text(job)))][-8:]
        what = rng.random()
        if what < 0.08:
            server.to_disk()
        elif what < 0.12:
            server.scheduler.reset(server.now, rng.choice([None, "tenant"]))
        elif what < 0.2:
            server.restart(after=1.0)
            watched.watch()
        elif what < 0.3:
            server.scheduler.drop_contexts()
        watched.compare()
    assert watched.compared > 300


def test_blocks_behind_a_registered_prefix_are_their_tenants(monkeypatch: pytest.MonkeyPatch) -> None:
    with prompted(monkeypatch):
        server = RealPrompting(host_slots=100, device_rows=2048, disk_bytes=100_000, write_policy="write_through")
        watched = Watched(server)
        prompt = words(100, 1000)
        server.register(prompt)
        for salt in ("a", "b", ""):
            text = server.text(server.ask([*prompt, *words(90, 5000)], 5, salt=salt))
            server.ask([*text, *words(70, 6000)], 5, salt=salt)
            watched.compare()
        server.to_disk()
        watched.compare()
    shared = b"".join(token.to_bytes(4, "little") for token in prompt[:BLOCK_ROWS])
    blocks = {(salt, path) for _, salt, path in watched.subscriber.view}
    assert ("", shared) in blocks
    assert {salt for salt, path in blocks if path != shared} == {"", watched.salts["a"], watched.salts["b"]}
    assert len({"", watched.salts["a"], watched.salts["b"]}) == 3


def test_blocks_of_two_extents_are_removed_with_the_last(monkeypatch: pytest.MonkeyPatch) -> None:
    """The operator registers the beginning of a conversation without a salt; the conversation's rows go later."""
    with prompted(monkeypatch):
        server = RealPrompting(host_slots=100, device_rows=2048, disk_bytes=400_000, write_policy="write_through")
        watched = Watched(server)
        prompt = words(128, 1000)
        long = [*prompt, *words(90, 5000)]
        server.ask(long, 5)
        watched.compare()
        before = set(watched.subscriber.held)
        server.register(prompt)
        server.finish()
        watched.compare()
        # the last block lies behind the prefix, where no prompt matches the old rows
        assert len({name for _, name in before} - {name for _, name in watched.subscriber.held}) == 1
        server.ask(long, 5)
        server.finish()
        watched.compare()
        cache = server.scheduler.cache
        (old,) = (each for each in cache.index.extents.values() if each.salt == "" and not each.first_row)
        server.scheduler.drop_contexts()
        watched.compare()
        assert len({name for _, name in watched.subscriber.held}) == 3
        cache.placement.forget(old, "evicted")
        server.finish()
        watched.compare()
        assert len({name for _, name in watched.subscriber.held}) == 3
        assert old.id not in cache.index.extents


@pytest.mark.parametrize("salt", ["", "a"])
def test_blocks_that_no_prompt_matches_are_not_published(monkeypatch: pytest.MonkeyPatch, salt: str) -> None:
    with prompted(monkeypatch):
        server = RealPrompting(host_slots=100, device_rows=2048, disk_bytes=400_000, write_policy="write_through")
        watched = Watched(server)
        prompt = words(128, 1000)
        server.register(prompt)
        server.ask([*prompt, *words(90, 5000)], 5, salt=salt)
        server.finish()
        watched.compare()
        assert len(watched.subscriber.view) == 3 * 3
        # one that has rows of the first one, and others
        server.register([*prompt[:100], *words(50, 7000)], name="other")
        server.finish()
        server.scheduler.drop_contexts()
        watched.compare()
        server.scheduler.forget_prefix(OPERATOR, "prompt")
        PROMPTS.remove(prompt)
        watched.compare()
        assert len({name for _, name in watched.subscriber.held}) == 2
        server.scheduler.forget_prefix(OPERATOR, "other")
        watched.compare()
        assert not watched.subscriber.held


def test_a_tenants_own_prefix_changes_no_blocks_but_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    with prompted(monkeypatch):
        server = RealPrompting(host_slots=100, device_rows=2048)
        prompt = words(128, 1000)
        for salt in ("a", "b"):
            server.ask([*prompt, *words(90, 5000)], 5, salt=salt)
        watched = Watched(server)
        server.register(prompt, salt="a", name="own")
        server.finish()
        changes = watched.changed.take()
        assert changes is None or not changes.anew
        watched.read(changes)
        watched.compare()
        server.scheduler.forget_prefix("a", "own")
        assert watched.changed.take() is None
        watched.compare()


@pytest.mark.parametrize("seed", [1, *(pytest.param(seed, marks=pytest.mark.long) for seed in range(10, 30))])
def test_a_subscriber_knows_the_index_whatever_is_registered(monkeypatch: pytest.MonkeyPatch, seed: int) -> None:
    """Prefixes come and go that are parts of each other, and of what three tenants ask."""
    rng, base = random.Random(seed), words(400, 1000)
    with prompted(monkeypatch):
        server = RealPrompting(host_slots=60, device_rows=2048, disk_bytes=100_000, write_policy="write_through")
        watched = Watched(server)
        registered: dict[str, list[int]] = {}
        for number in range(25):
            what = rng.random()
            if what < 0.25:
                registered[str(number)] = [*base[: rng.randint(1, 200)], *rng.choice([[], words(60, 9000 + number)])]
                server.register(registered[str(number)], name=str(number))
            elif what < 0.35 and registered:
                name = rng.choice(list(registered))
                server.scheduler.forget_prefix(OPERATOR, name)
                if (forgotten := registered.pop(name)) not in registered.values():
                    PROMPTS.remove(forgotten)
                    server.ends.clear()
            elif what < 0.4:
                server.scheduler.reset(server.now, rng.choice(["", "a"]))
            else:
                prompt = [*base[: rng.randint(1, 300)], *rng.choices(range(50), k=rng.randint(1, 150))]
                server.ask(prompt, rng.randint(1, 20), salt=rng.choice(["", "a", "b"]))
            server.finish()
            # what contexts of tenants have of a registered prefix is not said
            server.scheduler.drop_contexts()
            watched.compare()
    assert watched.compared > 200


def test_approximate_rows_are_not_published_after_a_restart() -> None:
    server = LongLasting(host_slots=100, device_rows=2048, disk_bytes=400_000, write_policy="write_through")
    watched = Watched(server)
    prompt = words(128, 1000)
    server.ask(prompt, 1)
    server.finish()
    server.ask([*prompt, *words(150, 5000)], 5, salt=approximate(""))
    server.finish()
    watched.compare()
    assert len({name for _, name in watched.subscriber.held}) == 2
    server.restart(after=1.0)
    watched.watch()
    watched.compare()
    assert len({name for _, name in watched.subscriber.held}) == 2


def test_tokens_and_salts_are_published_on_demand_only() -> None:
    server = LongLasting()
    watched = Watched(server)
    server.ask(words(200), salt="secret")
    server.finish()
    changes = watched.changed.take()
    assert changes is not None
    _, events, _ = msgpack.unpackb(encode(watched.blocks.apply(changes), 1.0, token_ids=False))
    stored = [event for event in events if event["type"] == "BlockStored"]
    assert sum(len(event["block_hashes"]) for event in stored if event["medium"] == "CPU") == 3
    assert all(event["token_ids"] == [] for event in stored)
    assert "secret" not in str(events)
    assert stored[0]["extra_keys"] == [[{"type": "cache_salt", "salt": watched.blocks.salt_tag("secret")}], None, None]


def test_equal_blocks_of_different_models_and_salts_have_different_names() -> None:
    def names(seed: str, salt: str) -> set[int]:
        server = LongLasting()
        changed, blocks = ChangedExtents(server.scheduler.cache), Blocks(seed)
        server.ask(words(200), salt=salt)
        server.finish()
        changes = changed.take()
        assert changes is not None
        return {name for event in blocks.apply(changes) if isinstance(event, StoredBlocks) for name in event.hashes}

    found = [names("m", ""), names("m", "a"), names("n", ""), names("m", "")]
    assert found[0] == found[3]
    assert len(found[0] | found[1] | found[2]) == 3 * len(found[0]) == 9


# ---------------------------------------------------------------------------------------------------- over ZeroMQ


class Listener:
    """A subscriber with sockets, as in vLLM's own example."""

    def __init__(self, publish: str, replay: str) -> None:
        self.context = zmq.Context()
        self.events = self.context.socket(zmq.SUB)
        self.events.subscribe(b"")
        self.events.connect(publish)
        self.replays = self.context.socket(zmq.DEALER)
        self.replays.connect(replay)
        self.seen: dict[int, bytes] = {}

    def ask_again(self, first: int) -> list[int]:
        """Ask for messages from a number on; returns their numbers."""
        self.replays.send_multipart((b"", first.to_bytes(8, "big")))
        numbers = []
        while True:
            assert self.replays.poll(10_000), "no replay"
            empty, topic, number, payload = self.replays.recv_multipart()
            assert (empty, topic) == (b"", b"")
            if number == END:
                return numbers
            numbers.append(int.from_bytes(number, "big"))
            self.seen[numbers[-1]] = payload

    def listen(self) -> dict[int, bytes]:
        """Read what has been published."""
        while self.events.poll(300):
            topic, number, payload = self.events.recv_multipart()
            assert topic == b""
            self.seen[int.from_bytes(number, "big")] = payload
        return self.seen

    @property
    def view(self) -> View:
        subscriber = Subscriber()
        for number in sorted(self.seen):
            subscriber.read(self.seen[number])
        return subscriber.view

    def close(self) -> None:
        self.context.destroy(linger=0)


@pytest.fixture
def addresses(tmp_path: Path) -> tuple[str, str]:
    return f"ipc://{tmp_path}/events", f"ipc://{tmp_path}/replay"


def simplified(listener: Listener) -> View:
    """Read all messages; every salt is called the same."""
    listener.ask_again(0)
    return {(medium, "salted" if salt else "", path) for medium, salt, path in listener.view}


def test_a_subscriber_of_an_engine_knows_its_blocks(addresses: tuple[str, str], tmp_path: Path) -> None:
    """Of an engine that is running, and from the first message on, which it has not heard."""
    cache = CacheConfig(host_cache=5 * 2**20, device_cache=5 * 2**20, disk_cache=2**30, cache_dir=tmp_path / "cache")
    config = EngineConfig(cache=cache, kv_events=addresses[0], kv_events_replay=addresses[1], kv_events_tokens=True)
    engine = Engine.load(find_model(BUNDLED), config)
    engine.start()
    listener = Listener(*addresses)
    try:
        for salt in ("", "tenant"):
            tokens = list(range(100, 300))
            for _ in range(2):
                request = Request(f"{salt}{len(tokens)}", tokens, SamplingParams(max_tokens=20), salt=salt)
                (done,) = engine.generate([request])
                tokens = [*tokens, *done.tokens, 7]
        engine.settle()
        plan = engine.parts.scheduler.cache
        salts = {each.salt: "salted" if each.salt else "" for each in plan.index.extents.values()}
        expected = engine.ask(lambda: truth(plan, salts))
        assert {salt for _, salt, _ in expected} == {"", "salted"}
        wait_for(lambda: simplified(listener) == expected)
        assert listener.ask_again(2) == list(range(2, len(listener.seen)))
        engine.reset_cache()
        engine.settle()
        wait_for(lambda: simplified(listener) == set())
        engine.ask(lambda: None)  # numbers are published behind each question: now with those of the last messages
        counted = engine.stats().engine.kv_events
        assert sorted(listener.seen) == list(range(counted.messages))
        assert counted.dropped == 0
        listener.seen.clear()

        def hears() -> bool:
            """Has anything been heard? A subscription may come late: then more happens."""
            if not listener.listen():
                engine.generate([Request("more", list(range(100, 200)), SamplingParams(max_tokens=1))])
                engine.reset_cache()
            return bool(listener.seen)

        wait_for(hears)
        before = max(listener.seen)
        engine.generate([Request("last", list(range(100, 200)), SamplingParams(max_tokens=1))])
        wait_for(lambda: max(listener.listen()) > before)
        heard = dict(listener.seen)
        listener.seen.clear()
        listener.ask_again(0)
        assert heard.items() <= listener.seen.items(), "what is published is what is repeated"
    finally:
        listener.close()
        engine.close()


def test_a_full_queue_leaves_a_gap_and_then_the_whole_index(
    addresses: tuple[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    server = LongLasting()
    config = EngineConfig(kv_events=addresses[0], kv_events_replay=addresses[1], kv_events_tokens=True)
    monkeypatch.setattr(publisher, "MAX_WAITING", 1)
    held = threading.Event()
    apply = Blocks.apply

    def slow(self: Blocks, changes: Any) -> Any:
        held.wait()
        return apply(self, changes)

    monkeypatch.setattr(Blocks, "apply", slow)
    woken = threading.Event()
    events = publisher.KVEvents(server.scheduler.cache, config, "m", woken.set)
    listener = Listener(*addresses)
    try:
        for first in range(100, 1000, 100):
            server.ask(words(90, first))
            events.publish()
        held.set()
        expected = truth(server.scheduler.cache, {"": ""})

        def caught_up() -> bool:
            if woken.is_set():  # an engine that is idle hears that there is room
                events.publish()
            listener.ask_again(0)
            return listener.view == expected

        wait_for(caught_up)
        numbers = sorted(listener.seen)
        assert numbers[-1] + 1 - len(numbers) == events.counters.dropped > 0, "the numbers show what was left out"
    finally:
        held.set()
        listener.close()
        events.close()


def test_changes_that_could_not_be_sent_leave_a_gap_and_then_the_whole_index(
    addresses: tuple[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    server = LongLasting()
    config = EngineConfig(kv_events=addresses[0], kv_events_replay=addresses[1], kv_events_tokens=True)
    woken = threading.Event()
    monkeypatch.setattr(publisher, "AGAIN_SECONDS", 0.05)
    events = publisher.KVEvents(server.scheduler.cache, config, "m", woken.set)
    listener = Listener(*addresses)
    failing = iter([True, True])

    def encoded(*what: Any) -> bytes:
        if next(failing, False):
            raise MemoryError
        return encode(*what)

    try:
        events.publish()
        wait_for(lambda: listener.ask_again(0) == [0])
        monkeypatch.setattr(publisher, "encode", encoded)
        server.ask(words(90, 100))
        events.publish()
        wait_for(lambda: events.counters.dropped == 1)
        server.ask(words(90, 200))
        for _ in range(2):  # the whole index cannot be sent the first time either; an idle engine tries it again
            woken.clear()
            assert woken.wait(20)
            events.publish()
        wait_for(lambda: max(listener.ask_again(0)) > 0)
        assert sorted(listener.seen) == [0, 3], "the numbers show what was left out"
        server.ask(words(90, 400))
        events.publish()
        expected = truth(server.scheduler.cache, {"": ""})
        wait_for(lambda: listener.ask_again(0)[-1] == 4 and listener.view == expected)
        assert events.counters.dropped == 2
    finally:
        listener.close()
        events.close()


def test_a_replay_that_fails_leaves_no_gap(addresses: tuple[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    server = LongLasting()
    config = EngineConfig(kv_events=addresses[0], kv_events_replay=addresses[1], kv_events_tokens=True)
    events = publisher.KVEvents(server.scheduler.cache, config, "m", lambda: None)
    listener = Listener(*addresses)
    asked = threading.Event()

    def failing(number: int) -> bytes:
        asked.set()
        raise MemoryError

    try:
        events.publish()
        wait_for(lambda: listener.ask_again(0) == [0])
        with monkeypatch.context() as patch:
            patch.setattr(publisher, "number_frame", failing)
            listener.replays.send_multipart((b"", bytes(8)))
            assert asked.wait(10)
        server.ask(words(90, 100))
        events.publish()
        wait_for(lambda: len(listener.ask_again(0)) == 2)
        assert sorted(listener.seen) == [0, 1]
    finally:
        listener.close()
        events.close()


def test_an_engine_that_outlives_its_publisher_writes_to_no_other_file(
    addresses: tuple[str, str], tmp_path: Path
) -> None:
    server = LongLasting()
    events = publisher.KVEvents(server.scheduler.cache, EngineConfig(kv_events=addresses[0]), "m", lambda: None)
    events.publish()
    events.close()
    with contextlib.ExitStack() as files:  # they take the numbers of what was closed
        opened = [files.enter_context((tmp_path / str(number)).open("wb")) for number in range(20)]
        server.ask(words(90, 100))
        events.publish()
        assert [Path(file.name).stat().st_size for file in opened] == [0] * 20


def test_addresses_of_ipv6_and_systems_without_pipe2(monkeypatch: pytest.MonkeyPatch) -> None:
    with contextlib.suppress(AttributeError):
        monkeypatch.delattr(os, "pipe2")
    try:
        with socket.socket(socket.AF_INET6) as probe:
            probe.bind(("::1", 0))
    except OSError:
        pytest.skip("no IPv6 here")
    config = EngineConfig(kv_events="tcp://[::1]:*")
    events = publisher.KVEvents(LongLasting().scheduler.cache, config, "m", lambda: None)
    try:
        assert events.address.startswith("tcp://[::1]:")
    finally:
        events.close()


def test_mistakes_are_named(addresses: tuple[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match=r"--kv-events is an address such as tcp://127.0.0.1:5557 .*, got '5557'"):
        EngineConfig(kv_events="5557")
    with pytest.raises(ConfigError, match="--kv-events-tokens does nothing without --kv-events"):
        EngineConfig(kv_events_tokens=True)
    cache = LongLasting().scheduler.cache
    first = publisher.KVEvents(cache, EngineConfig(kv_events="tcp://127.0.0.1:*"), "m", lambda: None)
    taken = first.address
    with pytest.raises(ConfigError, match=r"--kv-events tcp://127\.0\.0\.1:\d+ cannot be bound: .*; choose another"):
        publisher.KVEvents(cache, EngineConfig(kv_events=taken), "m", lambda: None)
    first.close()
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"needs the module zmq: pip install 'afterglow-llm\[cluster\]'"):
        publisher.check_installed()
