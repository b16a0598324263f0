"""Replies to clients that send their conversations back as text: their ids outlive a restart, as long as they may."""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Iterator
from contextlib import closing
from math import inf
from pathlib import Path
from typing import Any

import pytest

from afterglow.config import CacheConfig
from afterglow.errors import StoreError
from afterglow.server.prompts import kept_replies
from afterglow.store.database import replies
from afterglow.store.database.conversations import FILE, Conversations
from afterglow.store.database.replies import StoredReplies
from tests.server.conftest import REPLY, Running, running
from tests.waiting import wait_for


def body(text: str = "text") -> dict[str, Any]:
    return {"text": text, "ids": [1, 2], "end": None, "prompt_chars": 3, "prompt_digest": "00"}


# ------------------------------------------------------------------------------------------------------ the store


class Clock:
    now = 1000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def kept(tmp_path: Path, clock: Clock) -> Iterator[Conversations]:
    store = Conversations(tmp_path, ttl_s=100, clock=clock)
    yield store
    store.close()


def chains(store: Conversations) -> list[str]:
    return [chain for chain, *_ in store.replies.all()]


def test_replies_come_back_with_whose_they_are(tmp_path: Path, kept: Conversations) -> None:
    kept.replies.keep("01", "a", None, body("one"))
    kept.replies.keep("02", "b", "s", body("two"))
    kept.replies.keep("01", "a", None, body("again"))
    kept.close()
    with closing(Conversations(tmp_path, clock=Clock())) as store:
        assert sorted(each[:3] for each in store.replies.all()) == [
            ("01", "a", body("again")),
            ("02", "b", body("two")),
        ]


def test_they_expire_when_they_should(kept: Conversations, clock: Clock) -> None:
    for chain, ttl in (("01", inf), ("02", 10.0), ("03", 1000.0)):
        kept.replies.keep(chain, "a", None, body(), clock.now + ttl)
    clock.now += 11
    assert chains(kept) == ["01", "03"]
    clock.now += 100
    assert chains(kept) == []
    kept.sweep()
    clock.now -= 111
    assert chains(kept) == [], "they are gone, not hidden"


def test_those_before_one_in_its_conversation_live_as_long(kept: Conversations, clock: Clock) -> None:
    kept.replies.keep("01", "a", None, body(), clock.now + 10)
    kept.replies.keep("02", "a", None, body(), clock.now + 60)
    kept.replies.keep("03", "a", None, body(), clock.now + 30, ["01", "02", "unknown"])
    clock.now += 29
    assert sorted(chains(kept)) == ["01", "02", "03"]
    clock.now += 2
    assert chains(kept) == ["02"]


def test_they_are_forgotten_by_tenant_and_by_conversation(kept: Conversations) -> None:
    for chain, salt, session in (("01", "a", "s"), ("02", "a", "t"), ("03", "b", "s"), ("04", "a", None)):
        kept.replies.keep(chain, salt, session, body())
    kept.replies.forget(["a"], "s")
    assert sorted(chains(kept)) == ["02", "03", "04"]
    kept.replies.forget(["a"])
    assert chains(kept) == ["03"]
    kept.replies.forget()
    assert chains(kept) == []


def test_what_is_forgotten_cannot_be_read_in_the_file(tmp_path: Path, kept: Conversations) -> None:
    kept.replies.keep("01", "a", "s", body("a secret of Ada's"))
    kept.replies.forget(["a"], "s")
    kept.close()
    assert not any(b"secret" in file.read_bytes() for file in tmp_path.glob(f"{FILE}*"))


def test_there_are_not_more_than_so_many(kept: Conversations, monkeypatch: pytest.MonkeyPatch, clock: Clock) -> None:
    monkeypatch.setattr(replies, "MAX_REPLIES", 20)
    for number in range(50):
        clock.now += 0.1
        kept.replies.keep(f"{number:02}", "a", None, body())
    assert len(chains(kept)) <= 20
    assert chains(kept)[-1] == "49"


def test_they_leave_half_of_the_file_to_responses(tmp_path: Path) -> None:
    with closing(Conversations(tmp_path, max_bytes=400_000)) as store:
        store.add("r1", "a", None, "m", {"id": "r1"}, [{"text": "x" * 1000}])
        for number in range(100):
            store.replies.keep(f"{number:02}", "a", None, body("y" * 10_000))
        assert 0 < len(chains(store)) < 20
        assert chains(store)[-1] == "99"
        assert store.get("r1", "a") is not None
        store.replies.keep("large", "a", None, body("z" * 300_000))
        assert "large" not in chains(store)


def test_a_file_of_before_there_were_any(tmp_path: Path) -> None:
    with closing(Conversations(tmp_path)) as store:
        store.add("r1", "a", None, "m", {"id": "r1"}, [])
        store.file.run(lambda db: db.execute("DROP TABLE replies"))
    with closing(Conversations(tmp_path)) as store:
        store.replies.keep("01", "a", None, body())
        assert chains(store) == ["01"]
        assert store.get("r1", "a") is not None


def test_a_damaged_one_is_left_out(kept: Conversations) -> None:
    kept.replies.keep("01", "a", None, body())
    kept.replies.keep("02", "a", None, body())
    kept.file.run(lambda db: db.execute("UPDATE replies SET salt = 'b' WHERE chain = '01'"))
    assert chains(kept) == ["02"]


# ----------------------------------------------------------------------------------------------------- the server


def chat(server: Running, *turns: str, **more: Any) -> Any:
    """The reply to a conversation; the assistant's turns are every second one."""
    messages = [{"role": ("user", "assistant")[number % 2], "content": text} for number, text in enumerate(turns)]
    return server.openai().chat.completions.create(model="fake-model", messages=messages, **more)  # type: ignore[arg-type]


def odd_ids(server: Running) -> list[int]:
    """The reply in other ids than the tokenizer would make of its text."""
    return [i for c in REPLY for i in server.tokenizer.encode(c)]


def first_turn(model_dir: Path, folder: Path, act: Any = None, **more: Any) -> None:
    store = Conversations(folder)
    with running(model_dir, conversations=store) as server:
        server.engine.reply = odd_ids(server)
        assert chat(server, "one", **more).choices[0].message.content == REPLY
        wait_for(store.replies.all)
        if act is not None:
            act(server)


def is_known(model_dir: Path, folder: Path) -> bool:
    """Does a new process put the ids in that were generated?"""
    with running(model_dir, conversations=Conversations(folder)) as server:
        chat(server, "one", REPLY, "two")
        prompt, ids = list(server.engine.requests[-1].prompt), odd_ids(server)
        return any(prompt[start : start + len(ids)] == ids for start in range(len(prompt)))


@pytest.mark.parametrize("stream", [False, True])
def test_a_restart_does_not_cost_the_ids(model_dir: Path, tmp_path: Path, stream: bool) -> None:
    store = Conversations(tmp_path)
    with running(model_dir, conversations=store) as server:
        server.engine.reply = odd_ids(server)
        reply = chat(server, "one", stream=stream)
        if stream:
            assert "".join(chunk.choices[0].delta.content or "" for chunk in reply) == REPLY
        wait_for(store.replies.all)
    assert is_known(model_dir, tmp_path)


def test_without_a_disk_tier_nothing_is_written(model_dir: Path) -> None:
    with running(model_dir) as server:
        chat(server, "one")
        assert server.engine.conversations.replies.all() == []


def test_a_cache_that_is_cleared_keeps_none(model_dir: Path, tmp_path: Path) -> None:
    def clear(server: Running) -> None:
        with server.http() as http:
            assert http.post("/reset_prefix_cache").status_code == 200

    first_turn(model_dir, tmp_path, clear)
    assert not is_known(model_dir, tmp_path)


def test_a_conversation_that_is_deleted_leaves_none(model_dir: Path, tmp_path: Path) -> None:
    def delete(server: Running) -> None:
        with server.http() as http:
            assert http.delete("/v1/cache/sessions/ada").status_code == 200

    first_turn(model_dir, tmp_path, delete, extra_body={"session_id": "ada"})
    assert not is_known(model_dir, tmp_path)


def test_a_store_that_fails_costs_no_reply(
    model_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fails(*_: object) -> None:
        raise StoreError("full")

    monkeypatch.setattr(StoredReplies, "keep", fails)
    monkeypatch.setattr(StoredReplies, "all", fails)
    with (
        caplog.at_level(logging.WARNING, "afterglow.server"),
        running(model_dir, conversations=Conversations(tmp_path)) as server,
    ):
        assert chat(server, "one").choices[0].message.content == REPLY
        wait_for(lambda: "not kept: full" in caplog.text)
    assert "lost: full" in caplog.text


def test_they_live_as_long_as_the_servers_setting_says(
    model_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = time.time()
    monkeypatch.setattr(kept_replies, "SWEEP_SECONDS", 0.02)
    cache = CacheConfig(ttl=50.0)
    with running(model_dir, conversations=Conversations(tmp_path), cache=cache) as server:
        chat(server, "one")
        chat(server, "two", extra_body={"prompt_cache_retention": 5000})
        kept = server.engine.conversations
        wait_for(lambda: len(kept.replies.all()) == 2)
        ends = [end for *_, end in kept.replies.all()]
        assert abs(ends[0] - now - 50) < 30
        assert abs(ends[1] - now - 5000) < 30
        assert len(server.tokenizer.replies) == 2
        monkeypatch.setattr(kept, "_clock", lambda: now + 100)
        monkeypatch.setattr(time, "time", lambda: now + 100)
        wait_for(lambda: len(server.tokenizer.replies) == 1)
        wait_for(lambda: kept.file.run(lambda db: db.execute("SELECT COUNT(*) FROM replies").fetchone()) == (1,))


def test_a_conversation_that_goes_on_keeps_its_earlier_replies(model_dir: Path, tmp_path: Path) -> None:
    with running(model_dir, conversations=Conversations(tmp_path)) as server:
        kept = server.engine.conversations
        chat(server, "one", extra_body={"prompt_cache_retention": 50})
        wait_for(kept.replies.all)
        chat(server, "one", REPLY, "two", extra_body={"prompt_cache_retention": 5000})
        wait_for(lambda: len(kept.replies.all()) == 2)
        assert all(end > time.time() + 4000 for *_, end in kept.replies.all())


def test_replies_in_memory_are_not_written(model_dir: Path, tmp_path: Path) -> None:
    with running(model_dir, conversations=Conversations(tmp_path)) as server:
        server.engine.reply = odd_ids(server)
        chat(server, "one", extra_body={"prompt_cache_retention": "in_memory"})
        assert server.engine.requests[-1].volatile
        assert len(server.tokenizer.replies) == 1
        chat(server, "two")
        wait_for(server.engine.conversations.replies.all)
        assert len(server.engine.conversations.replies.all()) == 1, "the other one's"
    assert not is_known(model_dir, tmp_path)


def test_texts_are_deleted_with_a_conversation_whose_rows_are_gone(model_dir: Path, tmp_path: Path) -> None:
    """Rows are evicted long before the texts of replies are."""
    with running(model_dir, conversations=Conversations(tmp_path)) as server:
        chat(server, "one", extra_body={"session_id": "s"})
        chat(server, "two", extra_body={"session_id": "t"})
        kept = server.engine.conversations.replies
        wait_for(lambda: len(kept.all()) == 2)
        server.engine.named.clear()
        with server.http() as http:
            assert http.delete("/v1/cache/sessions/s").json()["deleted"] is True
            assert [session for *_, session, _ in kept.all()] == ["t"]
            assert len(server.tokenizer.replies) == 1
            assert http.delete("/v1/cache/sessions/s").status_code == 404


def test_a_turn_that_runs_while_its_conversation_is_deleted_leaves_no_text(model_dir: Path, tmp_path: Path) -> None:
    with running(model_dir, conversations=Conversations(tmp_path), step_seconds=0.02) as server:
        stream = server.openai().chat.completions.create(
            model="fake-model",
            messages=[{"role": "user", "content": "one"}],
            stream=True,
            extra_body={"session_id": "s"},
        )
        next(iter(stream))
        server.engine.named.clear()
        with server.http() as http:
            http.delete("/v1/cache/sessions/s")
        deque(stream, maxlen=0)
        assert len(server.tokenizer.replies) == 0
        chat(server, "two", extra_body={"session_id": "s"})
        wait_for(lambda: len(server.engine.conversations.replies.all()) == 1)
        assert len(server.tokenizer.replies) == 1
