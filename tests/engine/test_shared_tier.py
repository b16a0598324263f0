"""Two engines with folders of their own over one shared store: what one has computed the other finds, and never a wrong token."""

from __future__ import annotations

import random
import shutil
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from afterglow.config import CacheConfig, EngineConfig
from afterglow.engine.engine import Completion
from afterglow.errors import ConfigError
from afterglow.plan.journal.replaying import replay
from afterglow.plan.prefix.published import MIN_LOOKUP_ROWS
from afterglow.request import Request, SamplingParams
from afterglow.store.extents.disk_tier import DiskTier
from afterglow.store.shared.objects import Listed, ObstoreObjects
from tests import doors
from tests.engine.conftest import VOCAB, Handle
from tests.waiting import wait_for

pytest.importorskip("obstore")

Start = Callable[..., Handle]
Models = Callable[[str], Path]


def rows_of(seed: int, rows: int) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(VOCAB) for _ in range(rows)]


def published(handle: Handle) -> None:
    """Wait until all that an engine has stored is published."""
    handle.engine.settle()
    shared = handle.engine.parts.store.shared
    assert shared is not None
    assert shared.rest(20.0)


def same(found: Completion, handle: Handle, prompt: list[int]) -> None:
    """Token-equal with computing all, and every log-probability within 1e-4."""
    wanted = handle.ask(prompt, reuse=False, max_tokens=len(found.tokens))
    assert found.tokens == wanted.tokens
    for a, b in zip(found.logprobs, wanted.logprobs, strict=True):
        left, right = dict(a.top), dict(b.top)
        assert max(abs(left[token] - right[token]) for token in left) < 1e-4


def failures(handle: Handle) -> dict[str, int]:
    shared = handle.engine.stats().shared
    assert shared is not None
    return shared.failures


class Cluster:
    """Engines over one store."""

    def __init__(self, start: Start, model: Path, folder: Path) -> None:
        self._start = start
        self.model = model
        self.folder = folder
        self.store = folder / "store"

    def engine(self, name: str, **options: object) -> Handle:
        options = {"shared": f"file://{self.store}", **options}
        return self._start(options.pop("model", self.model), self.folder / name, **options)

    def files(self, what: str = "extents") -> list[Path]:
        return sorted(path for path in self.store.glob(f"*/{what}/**/*") if path.is_file())


@pytest.fixture(autouse=True)
def patience(monkeypatch: pytest.MonkeyPatch) -> None:
    """A store that answers later than a request waits for it is another test's: a machine that has much to do does so too."""
    monkeypatch.setattr("afterglow.store.shared.shared_store.LOOKUP_S", 20.0)


@pytest.fixture
def cluster(start: Start, model_of: Models, tmp_path: Path) -> Cluster:
    return Cluster(start, model_of("llama"), tmp_path)


def test_a_conversation_that_changes_its_engine_every_turn_is_computed_once(cluster: Cluster) -> None:
    engines = [cluster.engine("a"), cluster.engine("b")]
    text, previous = rows_of(1, 150), 0
    for turn in range(5):
        handle = engines[turn % 2]
        before = len(text)
        done = handle.ask(text, max_tokens=20)
        same(done, handle, text)
        published(handle)
        if turn:  # but for the turn's own tokens, and the last one of the reply before, which was never fed
            assert done.cached.total == previous, turn
            assert done.cached.shared > 0
        previous = before + len(done.tokens) - 1
        text = [*text, *done.tokens, *rows_of(10 + turn, 30)]
    for handle in engines:
        assert failures(handle) == {}
        stats = handle.engine.stats()
        assert stats.engine.cached_tokens["shared"] == stats.plan.counters.hit_shared > 0


def test_whichever_engine_answers_a_turn_finds_the_turns_before_it(cluster: Cluster) -> None:
    """Also where it has merged extents whose parts others still have."""
    engines = [cluster.engine(name) for name in "ab"]
    for seed in range(6):
        rng = random.Random(seed)
        text, before = rows_of(1000 + seed, 120), 0
        for turn in range(6):
            handle = rng.choice(engines)
            done = handle.ask(text, max_tokens=8)
            published(handle)
            assert done.cached.total > before - MIN_LOOKUP_ROWS, (seed, turn)
            before = len(text) + len(done.tokens) - 1
            text = [*text, *done.tokens, *rows_of(100 * seed + turn, rng.randrange(35, 55))]


def test_conversations_that_begin_alike_branch_wherever_they_do(cluster: Cluster) -> None:
    """The first engine has a tree; the second finds the way to every leaf of it."""
    system = rows_of(2, 100)
    prompts = [[*system[:at], (system[at] + 1) % VOCAB, *rows_of(at, 90)] for at in (99, 64, 63, 17, 16, 3, 1)]
    a, b = cluster.engine("a"), cluster.engine("b")
    a.ask([*system, *rows_of(3, 70)])
    for prompt in prompts:
        a.ask(prompt)
    published(a)
    for prompt in prompts:
        done = b.ask([*prompt, *rows_of(4, 10)])
        assert done.cached.total == len(prompt), "the whole prompt of the other engine"
        same(done, b, [*prompt, *rows_of(4, 10)])


def test_what_two_engines_computed_at_the_same_time_is_found_by_a_third(cluster: Cluster) -> None:
    system = rows_of(5, 80)
    one, other = [*system, 1, *rows_of(6, 80)], [*system, 2, *rows_of(7, 80)]
    a, b = cluster.engine("a"), cluster.engine("b")
    a.ask(one)
    b.ask(other)  # before anything of `a` is published, perhaps
    published(a)
    published(b)
    c = cluster.engine("c")
    assert c.ask([*one, 1]).cached.total >= len(one)
    assert c.ask([*other, 1]).cached.total >= len(other)


def test_tenants_and_models_never_meet(cluster: Cluster, model_of: Models, monkeypatch: pytest.MonkeyPatch) -> None:
    prompt = rows_of(8, 200)
    a, b = cluster.engine("a"), cluster.engine("b")
    params = SamplingParams(max_tokens=4, temperature=0, ignore_eos=True)
    list(a.engine.generate([Request("mine", prompt, params, salt="tenant/one")]))
    published(a)
    assert cluster.files()
    (done,) = b.engine.generate([Request("theirs", prompt, params, salt="tenant/two")])
    assert done.cached.total == 0
    (done,) = b.engine.generate([Request("nobodys", prompt, params)])
    assert done.cached.total == 0
    (done,) = b.engine.generate([Request("again", prompt, params, salt="tenant/one")])
    assert done.cached.shared == len(prompt) - 1
    reads: list[str] = []

    class Watched(ObstoreObjects):
        def get(self, path: str, start: int, length: int) -> bytes:
            reads.append(path)
            return super().get(path, start, length)

    monkeypatch.setattr("afterglow.store.shared.objects.ObstoreObjects", Watched)
    other = cluster.engine("c", model=model_of("qwen2"))
    (done,) = other.engine.generate([Request("other model", prompt, params, salt="tenant/one")])
    assert done.cached.total == 0
    rounded = cluster.engine("d", kv_dtype="int8")
    (done,) = rounded.engine.generate([Request("other dtype", prompt, params, salt="tenant/one")])
    assert done.cached.total == 0
    assert reads == []


def test_an_extent_that_says_it_is_another_is_not_taken(cluster: Cluster) -> None:
    """Names and objects are not believed: an object under another's name, or listed under another's tokens, is a miss."""
    prompts = [rows_of(20, 150), rows_of(21, 150)]
    a = cluster.engine("a")
    for prompt in prompts:
        a.ask(prompt, max_tokens=1)
    published(a)
    one, other = cluster.files()
    shutil.copy(one, other)
    kids = cluster.files("kids")
    for kid in kids:
        for folder in {each.parent for each in kids}:
            (folder / kid.name).touch()
    b = cluster.engine("b")
    for prompt in prompts:
        same(b.ask(prompt, max_tokens=4), b, prompt)
    assert failures(b) == {"damage": 1}


@pytest.mark.parametrize("at", [40, 5000, -1], ids=["head", "rows", "last byte"])
def test_damage_is_a_miss_and_mended(cluster: Cluster, at: int) -> None:
    prompt = rows_of(9, 150)
    a = cluster.engine("a")
    a.ask(prompt, max_tokens=1)
    published(a)
    (file,) = cluster.files()
    data = bytearray(file.read_bytes())
    data[at] ^= 4
    file.write_bytes(data)
    b = cluster.engine("b")
    done = b.ask(prompt)
    same(done, b, prompt)
    assert done.cached.total == 0
    assert b.engine.stats().plan.counters.damaged == 1
    published(b)  # the damaged object was removed; the rows computed again are published in its place
    assert not any(path.read_bytes() == bytes(data) for path in cluster.files())
    c = cluster.engine("c")
    wait_for(lambda: c.ask(prompt).cached.shared or c.ask(prompt).cached.total)
    same(c.ask(prompt), c, prompt)


def test_an_object_that_ends_early_or_is_gone_is_a_miss(cluster: Cluster) -> None:
    prompts = [rows_of(30, 150), rows_of(31, 150)]
    a, b = cluster.engine("a"), cluster.engine("b")
    for prompt in prompts:
        a.ask(prompt, max_tokens=1)
    published(a)
    short, gone = cluster.files()
    short.write_bytes(short.read_bytes()[:6000])
    gone.unlink()
    for prompt in prompts:
        done = b.ask(prompt)
        assert done.cached.total == 0
        same(done, b, prompt)
    assert failures(b) == {"damage": 1, "missing": 1}


def test_no_store_at_all_is_no_fault_of_a_request(cluster: Cluster) -> None:
    """The store's folder cannot be made: all is computed here, errors are counted, and the store is left alone."""
    cluster.store.write_text("a file where the folder should be")
    a = cluster.engine("a")
    for seed in range(4):
        prompt = rows_of(seed, 150)
        same(a.ask(prompt), a, prompt)
    shared = a.engine.parts.store.shared
    assert shared is not None
    # It rests from the third failure on, which is counted a moment later.
    wait_for(lambda: shared.stats().rests and shared.stats().failures.get("io", 0) >= 3)
    assert a.ask([*rows_of(0, 150), 1]).cached.total == 150, "what is here is found all the same"


def test_a_fault_of_taking_over_is_a_miss(cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    prompt = rows_of(1, 150)
    a, b = cluster.engine("a"), cluster.engine("b")
    a.ask(prompt)
    published(a)

    def fails(*_: object) -> None:
        raise RuntimeError("not foreseen")

    with monkeypatch.context() as broken:
        broken.setattr(b.engine.parts.scheduler, "adopt", fails)
        done = b.ask([*prompt, 1])
    assert done.cached.total == 0
    same(done, b, [*prompt, 1])
    assert failures(b) == {"io": 1}
    assert b.ask([*prompt, *rows_of(2, 70)]).cached.total >= 150, "the engine lives"


class Hanging(ObstoreObjects):
    """A store whose calls hang until it is let go."""

    free = threading.Event()

    def get(self, path: str, start: int, length: int) -> bytes:
        self.free.wait()
        return super().get(path, start, length)

    def put(self, path: str, data: bytes, *, replace: bool = False) -> bool:
        self.free.wait()
        return super().put(path, data, replace=replace)

    def list(self, prefix: str) -> Iterator[list[Listed]]:
        self.free.wait()
        return super().list(prefix)


def test_a_store_that_hangs_delays_a_request_no_longer_than_its_lookup(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("afterglow.store.shared.objects.ObstoreObjects", Hanging)
    # Enough for the call to begin on a busy machine: a lookup that is over before says nothing of the store.
    monkeypatch.setattr("afterglow.store.shared.shared_store.LOOKUP_S", 0.5)
    Hanging.free.clear()
    try:
        a = cluster.engine("a")
        for seed in range(4):
            prompt = rows_of(seed, 150)
            same(a.ask(prompt), a, prompt)
        stats = a.engine.stats().shared
        assert stats is not None
        assert stats.rests
        assert stats.failures["timeout"] == 3, "then the store is left alone"
        assert stats.lookups_skipped >= 1
    finally:
        Hanging.free.set()
    wait_for(lambda: (found := a.engine.stats().shared) is not None and found.hung == 0)


def test_a_request_that_is_cancelled_while_it_is_looked_up_ends(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("afterglow.store.shared.objects.ObstoreObjects", Hanging)
    Hanging.free.clear()
    try:
        a = cluster.engine("a")
        ends: list[str | None] = []
        request = Request("r", rows_of(1, 150), SamplingParams(max_tokens=4))
        a.engine.submit(request, lambda output: ends.append(output.finish_reason))
        a.engine.cancel("r")
        wait_for(lambda: ends)
        assert ends == ["cancelled"]
    finally:
        Hanging.free.set()
    assert len(a.ask(rows_of(1, 150)).tokens) == 4


def test_a_conversation_that_is_deleted_while_a_prompt_is_looked_up_does_not_come_back(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("afterglow.store.shared.objects.ObstoreObjects", Hanging)
    monkeypatch.setattr("afterglow.store.shared.shared_store.LOOKUP_S", 10.0)
    Hanging.free.set()
    text = rows_of(1, 250)
    params = SamplingParams(max_tokens=4, temperature=0, ignore_eos=True)
    a, b = cluster.engine("a"), cluster.engine("b")
    a.ask(text)
    published(a)
    list(b.engine.generate([Request("first", rows_of(3, 100), params, session_id="name")]))
    published(b)
    Hanging.free.clear()
    try:
        ends: list[str | None] = []
        request = Request("second", text, params, session_id="name")
        b.engine.submit(request, lambda output: ends.append(output.finish_reason))
        assert b.engine.forget_session("", "name")
        wait_for(lambda: "length" in ends, 20.0)
    finally:
        Hanging.free.set()
    published(b)
    assert b.engine.sessions("") == []
    stats = b.engine.stats().plan
    assert (stats.extents, stats.counters.hit_shared) == (0, 0)


def test_the_budget_holds_and_the_last_used_stay(cluster: Cluster) -> None:
    size = 0
    a = cluster.engine("a")
    a.ask(rows_of(40, 150), max_tokens=1)
    published(a)
    size = sum(file.stat().st_size for file in cluster.files())
    small = cluster.engine("b", shared_cache=5 * size)
    for seed in range(41, 51):
        small.ask(rows_of(seed, 150), max_tokens=1)
        published(small)
        assert sum(file.stat().st_size for file in cluster.files()) <= 5 * size
    stats = small.engine.stats().shared
    assert stats is not None
    assert stats.swept >= 6
    assert len(cluster.files("kids")) == len(cluster.files()), "what lists an extent goes with it"
    c = cluster.engine("c")
    assert c.ask(rows_of(50, 150)).cached.shared == 149
    assert c.ask(rows_of(40, 150)).cached.total == 0


def test_what_a_client_deletes_leaves_the_shared_store_too(cluster: Cluster) -> None:
    a, b = cluster.engine("a"), cluster.engine("b")
    prompt = rows_of(60, 150)
    a.ask(prompt)
    published(a)
    assert cluster.files()
    a.engine.reset_cache()
    published(a)
    assert cluster.files() == []
    done = b.ask(prompt)
    assert done.cached.total == 0
    same(done, b, prompt)


def test_rows_that_stay_in_memory_ask_nothing_of_the_store(cluster: Cluster) -> None:
    """Neither when they are stored nor when a merged extent replaces them."""
    a = cluster.engine("a")
    text = rows_of(65, 40)
    for turn in range(4):
        params = SamplingParams(max_tokens=20, temperature=0, ignore_eos=True)
        (done,) = a.engine.generate([Request(f"volatile-{turn}", text, params, volatile=True)])
        assert turn == 0 or done.cached.total > 40
        text = [*text, *done.tokens, *rows_of(66 + turn, 20)]
    published(a)
    stats = a.engine.stats()
    assert stats.plan.counters.merges > 0
    assert stats.shared is not None
    assert (stats.shared.published, stats.shared.deleted) == (0, 0)
    assert cluster.files() == []


def test_rows_that_expire_are_not_found_later(cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    """By a clock that is moved: rows that live for a second may have gone before they are published."""
    prompt, now = rows_of(70, 150), time.time
    a = cluster.engine("a", ttl=3600.0)
    a.ask(prompt, max_tokens=1)
    published(a)
    (kid,) = cluster.files("kids")
    assert cluster.engine("b").ask(prompt, max_tokens=1).cached.shared == 149
    assert now() < int(kid.name.rsplit("-", 1)[1]) < now() + 3700
    monkeypatch.setattr(time, "time", lambda: now() + 3700)
    assert cluster.engine("c").ask(prompt, max_tokens=1).cached.total == 0


def test_rows_of_others_live_here_no_longer_than_a_servers_own(cluster: Cluster) -> None:
    prompt = rows_of(71, 150)
    a, b = cluster.engine("a"), cluster.engine("b", ttl=3600.0)
    a.ask(prompt, max_tokens=1)
    published(a)
    assert b.ask(prompt, max_tokens=1).cached.shared == 149
    extents = b.engine.parts.scheduler.cache.index.extents.values()
    assert extents
    assert all(each.expires < time.time() + 3700 for each in extents)


def test_a_restart_finds_what_came_from_others_on_its_own_disk(cluster: Cluster) -> None:
    prompt = rows_of(80, 150)
    a, b = cluster.engine("a"), cluster.engine("b")
    a.ask(prompt)
    published(a)
    assert b.ask(prompt).cached.shared == 149
    b.engine.settle()
    b.engine.close()
    shutil.rmtree(cluster.store)
    again = cluster.engine("b")
    assert again.ask(prompt).cached.disk == 149


@pytest.mark.parametrize("family", ["gemma3_text", "mistral-window"])
def test_extents_with_windows_are_published_and_fetched_whole(
    cluster: Cluster, model_of: Models, monkeypatch: pytest.MonkeyPatch, family: str
) -> None:
    """A copy in host may lack rows before a window; what others get lacks none. Rows that nothing has filled are NaN here."""
    doors.fill_new_contexts(monkeypatch, torch.nan)
    cluster.model = model_of(family)
    a, b = cluster.engine("a"), cluster.engine("b")
    text = rows_of(100, 300)
    a.ask(text, max_tokens=1)
    for seed in (101, 102):
        published(a)
        a.engine.demote("disk")
        a.engine.parts.store.arena.view.fill(0xFF)
        text = [*text, *rows_of(seed, 70)]
        same(a.ask(text), a, text)
    assert a.engine.stats().plan.counters.load_bytes_left > 0
    published(a)
    store = a.engine.parts.store
    (folder,) = cluster.store.glob("*/extents")
    objects = DiskTier(folder, store.layout, folder.parent.name, inspect=True)
    assert [objects.verify(path.stem) for path in cluster.files()]
    b.engine.parts.store.arena.view.fill(0xFF)
    for rows in (len(text), 350, 150, 70):  # from the middle on, rows are seen that a's last turn did not need
        prompt = [*text[:rows], *rows_of(rows, 30)]
        done = b.ask(prompt)
        assert done.cached.total >= rows - 1
        same(done, b, prompt)
    assert failures(b) == {}


def test_journals_replay_what_was_taken_over(cluster: Cluster, tmp_path: Path) -> None:
    prompt, journal = rows_of(90, 150), tmp_path / "journal"
    a, b = cluster.engine("a"), cluster.engine("b", journal=journal)
    a.ask(prompt)
    published(a)
    done = b.ask([*prompt, *rows_of(91, 80)])
    assert done.cached.shared == 150
    b.engine.settle()
    b.engine.close()
    lines = journal.read_text().splitlines()
    assert any('"op":"adopt"' in line for line in lines)
    from afterglow.plan.journal.step_digest import step_digest

    steps = list(replay(lines))
    assert len(steps) > 3
    assert all(step_digest(step) == recorded for step, recorded in steps)


@pytest.mark.parametrize("url", ["/folder", "ftp://host/folder", "file://host/folder", "file:", "s3:///folder"])
def test_a_url_that_names_no_store_is_refused_before_the_model_is_read(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch, url: str
) -> None:
    monkeypatch.setattr("afterglow.engine.setup.load_model", None)  # it is not called
    with pytest.raises(ConfigError, match="--shared"):
        cluster.engine("a", shared=url)


@pytest.mark.parametrize("package", ["obstore", "redis"])
def test_what_is_missing_is_said_before_the_model_is_read(
    cluster: Cluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, package: str
) -> None:
    monkeypatch.setattr("afterglow.engine.setup.load_model", None)  # it is not called
    for module in ("objects", "directory"):
        monkeypatch.setattr(
            f"afterglow.store.shared.{module}.find_spec", lambda name: None if name == package else name
        )
    with pytest.raises(ConfigError, match=rf"package {package}: pip install 'afterglow-llm\[shared\]'"):
        cluster.engine("a", shared=f"file://{tmp_path}", shared_directory="redis://127.0.0.1:1/0")


def test_options_that_do_not_go_with_a_shared_store_are_refused(tmp_path: Path) -> None:
    url = f"file://{tmp_path}"
    for options in ({"disk_cache": 0}, {"reuse": False}, {"shared_cache": 0}):
        with pytest.raises(ConfigError, match="--shared"):
            CacheConfig(shared=url, **options)  # type: ignore[arg-type]
    for alone in ({"shared_cache": 1024**3}, {"shared_cache": 100 * 1024**3}, {"shared_directory": "redis://host"}):
        with pytest.raises(ConfigError, match="with --shared"):
            CacheConfig(**alone)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="--importance"):
        EngineConfig(cache=CacheConfig(shared=url), importance=0.5)
