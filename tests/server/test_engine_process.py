"""An engine in a process of its own: the same answers and errors as of one in the server's process, and either process may be killed."""

from __future__ import annotations

import contextlib
import json
import os
import pickle
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from afterglow.cli.commands import run
from afterglow.engine import engine, loop
from afterglow.errors import AfterglowError, ConfigError, RequestError
from afterglow.request import CachedTokens, Missed, Output, TokenLogprob
from afterglow.server.engine_process import client, far
from afterglow.server.engine_process.channel import Channel
from afterglow.server.engine_process.client import EngineProcess
from afterglow.server.engine_process.outputs import NewTokens, OutputReader, OutputWriter
from afterglow.server.lifecycle.service import Service
from afterglow.server.server_config import ServerConfig
from afterglow.text import Tokenizer
from tests import doors
from tests.memo.tiny import WORDS, tiny_encoder
from tests.server.conftest import REPLY
from tests.server.fake_engine_main import Unreadable
from tests.server.process import Process, serving
from tests.waiting import wait_for

BUNDLED = Path(__file__).parents[2] / "src/afterglow/assets/model"
needs_model = pytest.mark.skipif(not (BUNDLED / "config.json").is_file(), reason="no bundled model here")
CHAT = "/v1/chat/completions"
TALK: dict[str, Any] = {
    "messages": [{"role": "user", "content": "Ada keeps the red kite in the mill. Where is the red kite?"}],
    "max_tokens": 12,
    "temperature": 0,
}
LONG = {**TALK, "max_tokens": 900, "ignore_eos": True}
APART = ("--engine-process", "on")


def engine_of(server: Process) -> int:
    """Return the id of the engine's process."""
    path = Path(f"/proc/{server.process.pid}/task")
    (child,) = {int(pid) for task in path.iterdir() for pid in (task / "children").read_text().split()}
    return child


def lives(pid: int) -> bool:
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    return False


def post(server: Process, body: dict[str, Any], path: str = CHAT) -> httpx.Response:
    return httpx.post(f"{server.url}{path}", json=body, timeout=60)


def counted(server: Process) -> dict[str, float]:
    text = httpx.get(f"{server.url}/metrics").text
    return {s.name: s.value for family in text_string_to_metric_families(text) for s in family.samples if not s.labels.keys() - {"model_name", "engine"}}  # fmt: skip


@contextlib.contextmanager
def begun(server: Process, body: dict[str, Any]) -> Iterator[Iterator[str]]:
    """Send a request whose reply has begun."""
    with httpx.stream("POST", f"{server.url}{CHAT}", json={**body, "stream": True}, timeout=60) as reply:
        lines = reply.iter_lines()
        assert next(lines).startswith("data: ")
        yield lines


@pytest.fixture(scope="module")
def apart(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Process]:
    with serving(tmp_path_factory.mktemp("apart"), *APART, "--max-model-len", "1024") as server:
        yield server


@pytest.fixture(scope="module")
def inside(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Process]:
    with serving(tmp_path_factory.mktemp("inside"), "--engine-process", "off", "--max-model-len", "1024") as server:
        yield server


def told(reply: httpx.Response) -> Any:
    """Return an answer without its id and time."""
    value = reply.json()
    for name in ("id", "created", "created_at", "completed_at"):
        value.pop(name, None)
    return reply.status_code, value


def nearly(value: Any) -> Any:
    """Let fractions differ in their last digits: each process uses the kernels that were fastest when it tried them."""
    if isinstance(value, float):
        return pytest.approx(value, abs=1e-4)
    if isinstance(value, dict):
        return {name: nearly(part) for name, part in value.items()}
    return type(value)(map(nearly, value)) if isinstance(value, list | tuple) else value


@needs_model
def test_it_answers_as_an_engine_in_the_servers_process(apart: Process, inside: Process) -> None:
    schema = {"type": "object", "properties": {"where": {"enum": ["mill", "river"]}}, "required": ["where"]}
    bad = {"type": "object", "properties": {"where": {"type": "string", "pattern": "(?=x)"}}}
    bodies: list[tuple[str, dict[str, Any]]] = [
        (CHAT, TALK),
        (CHAT, TALK),  # from the cache
        (CHAT, {**TALK, "logprobs": True, "top_logprobs": 3}),
        (CHAT, {**TALK, "n": 2}),  # no probabilities: their last digits depend on the batch
        (CHAT, {**TALK, "response_format": {"type": "json_schema", "json_schema": {"name": "w", "schema": schema}}}),
        (CHAT, {**TALK, "response_format": {"type": "json_schema", "json_schema": {"name": "w", "schema": bad}}}),
        (CHAT, {**TALK, "kv_retention": 0.5}),  # refused by the engine
        (CHAT, {**TALK, "messages": [{"role": "user", "content": "kite " * 2000}]}),
        ("/v1/completions", {"prompt": [1, 2, 3], "max_tokens": 3, "temperature": 0, "echo": True, "logprobs": 1}),
        ("/v1/completions", {"prompt": [10**6]}),
        ("/v1/embeddings", {"input": ["a kite", "the mill"]}),
        ("/v1/embeddings", {"input": "kite " * 2000}),
    ]
    for path, body in bodies:
        assert told(post(apart, body, path)) == nearly(told(post(inside, body, path))), (path, body)


@needs_model
def test_a_reply_is_counted_when_it_arrives(apart: Process) -> None:
    before = counted(apart)["vllm:generation_tokens_total"]
    for number in range(1, 6):
        usage = post(apart, {**TALK, "max_tokens": 3, "ignore_eos": True}).json()["usage"]
        assert usage["completion_tokens"] == 3
        assert counted(apart)["vllm:generation_tokens_total"] == before + 3 * number


@needs_model
def test_a_response_is_gone_on_from(apart: Process) -> None:
    first = post(
        apart, {"input": "Ada keeps the red kite in the mill.", "max_output_tokens": 4}, "/v1/responses"
    ).json()
    more = {"input": "Where is it?", "max_output_tokens": 4, "previous_response_id": first["id"]}
    second = post(apart, more, "/v1/responses").json()
    assert second["usage"]["input_tokens_details"]["cached_tokens"] >= first["usage"]["input_tokens"]
    assert httpx.delete(f"{apart.url}/v1/responses/{first['id']}").status_code == 200
    assert post(apart, more, "/v1/responses").status_code == 400


@needs_model
def test_an_encoder_with_a_memo_embeds_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    encoder, maps, texts = tiny_encoder(tmp_path / "tiny"), tmp_path / "maps", tmp_path / "texts"
    known = [f"the {word} sat on the mat" for word in WORDS]
    texts.write_text("\n".join(known))
    build = ["memo", "build", encoder, "--texts", texts, "--out", maps, "--steps", 5, "--threads", 1]
    monkeypatch.setattr("sys.argv", ["afterglow", *map(str, build)])
    assert run() == 0
    memo = ("--memo", str(maps), "--memo-mode", "on", "--threshold", "0.5")
    with serving(tmp_path, *APART, "--embedding-model", str(encoder), *memo) as server:
        assert engine_of(server)
        found = post(server, {"input": known}, "/v1/embeddings").json()
        assert (len(found["data"]), found["usage"]["memo_hits"]) == (len(known), len(known))
        assert counted(server)["afterglow:embedding_memo_damaged"] == 0


@needs_model
def test_a_named_conversation_is_listed_pinned_and_deleted(apart: Process) -> None:
    assert post(apart, {**TALK, "session_id": "ada"}).status_code == 200
    url = f"{apart.url}/v1/cache/sessions"
    wait_for(lambda: [each["name"] for each in httpx.get(url).json()["data"]] == ["ada"])
    assert httpx.post(f"{url}/ada/pin").status_code == 200
    assert httpx.delete(f"{url}/ada").status_code == 200
    assert httpx.get(url).json()["data"] == []
    assert httpx.delete(f"{url}/ada").status_code == 404


@dataclass
class Held:
    """A server whose fake engine is in another process, and answers when `go` is called."""

    engine: EngineProcess
    url: str

    def __post_init__(self) -> None:
        there = far.Far(self.engine.call, "engine")
        self.go, self.cancelled = there.gate.set, there.cancelled.copy

    def running(self) -> int:
        return self.engine.stats().plan.running


@contextlib.contextmanager
def held(model_dir: Path, **options: Any) -> Iterator[Held]:
    tokenizer = Tokenizer(model_dir)
    (eos,) = tokenizer.encode("<|im_end|>", add_special_tokens=False)
    options = {"eos": eos, "vocab_size": tokenizer.vocab_size, "hold": True, **options}
    engine = EngineProcess("tests.server.fake_engine_main", (model_dir, tokenizer.encode(REPLY), options))
    service = Service(engine, tokenizer, ServerConfig(port=0, grace=0.5), model_dir)
    thread = threading.Thread(target=service.run, kwargs={"signals": False})
    thread.start()
    wait_for(lambda: service.started)
    try:
        yield Held(engine, service.address)
    finally:
        service.stop()
        thread.join(15)
        engine.close()
    assert not thread.is_alive()


def test_a_full_queue_refuses_a_stream_with_its_status(model_dir: Path) -> None:
    with held(model_dir, max_queue=2) as server, ThreadPoolExecutor(2) as clients:
        body = {"messages": TALK["messages"], "stream": True}
        waiting = [clients.submit(httpx.post, server.url + CHAT, json=body, timeout=60) for _ in range(2)]
        wait_for(lambda: server.running() == 2)
        refused = httpx.post(server.url + CHAT, json=body)
        assert (refused.status_code, refused.json()["error"]["code"]) == (429, "queue_full")
        server.go()
        assert [each.result().text.count("[DONE]") for each in waiting] == [1, 1]


@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_leaves_ends_its_requests(model_dir: Path, stream: bool) -> None:
    with held(model_dir) as server:
        body = {"messages": TALK["messages"], "stream": stream, "n": 2}
        with pytest.raises(httpx.TimeoutException):
            httpx.post(server.url + CHAT, json=body, timeout=1)
        wait_for(lambda: len(server.cancelled()) == 2)


def test_what_is_asked_of_a_dead_engine_is_refused_at_once(model_dir: Path) -> None:
    with held(model_dir) as server, ThreadPoolExecutor(1) as clients:
        waiting = clients.submit(server.engine.register_prefix, "held", [1, 2])  # which waits for the gate
        os.kill(int(server.engine.call("pid", (), {})), signal.SIGKILL)
        with pytest.raises(RequestError, match="stopped unexpectedly; the server must be restarted"):
            waiting.result(20)
        with pytest.raises(RequestError, match="stopped unexpectedly; the server must be restarted"):
            server.engine.sessions("")
        assert not server.engine.healthy


def test_an_answer_that_cannot_be_read_ends_both_processes(model_dir: Path) -> None:
    with held(model_dir) as server, ThreadPoolExecutor(1) as clients:
        asked = clients.submit(server.engine.call, "unreadable", (), {})
        with pytest.raises(RequestError, match="stopped unexpectedly; the server must be restarted"):
            asked.result(20)
        assert not server.engine.healthy


def test_a_call_that_cannot_be_read_ends_both_processes(model_dir: Path) -> None:
    with held(model_dir) as server, ThreadPoolExecutor(1) as clients:
        asked = clients.submit(server.engine.call, "pid", (Unreadable(),), {})
        with pytest.raises(RequestError, match="stopped unexpectedly; the server must be restarted"):
            asked.result(20)


def test_what_a_call_yields_is_taken_one_by_one(model_dir: Path) -> None:
    with held(model_dir) as server:
        found = server.engine.call("counting", (), {})
        assert next(found) == 0
        assert list(found) == [1, 2]
        left = server.engine.call("counting", (), {})
        assert next(left) == 0
        left.close()
        assert list(server.engine.call("counting", (), {})) == [0, 1, 2]


def test_calls_without_an_answer_are_made_in_order(model_dir: Path) -> None:
    with held(model_dir) as server:
        there = far.Far(server.engine.call, "engine")
        server.engine.reset_cache("ada")
        server.engine.expect([], "before")
        server.engine.cancel("gone")
        server.engine.reset_cache(tenant="bob")
        wait_for(lambda: there.resets.copy() == ["ada", "bob/*"])
        assert (there.expected.copy(), there.cancelled.copy()) == ([[]], ["gone"])


def test_levels_may_come_with_the_facts(model_dir: Path) -> None:
    with held(model_dir, look_seconds=0.0) as server:
        assert server.engine.healthy


def test_no_module_is_taken_from_the_folder_where_the_server_was_started(
    model_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "queue.py").write_text("raise SystemExit('not this one')")
    monkeypatch.chdir(tmp_path)
    with held(model_dir) as server:
        assert server.engine.healthy


def test_an_engine_that_is_killed_while_it_ends_is_told_of_once(model_dir: Path) -> None:
    with held(model_dir) as server, ThreadPoolExecutor(1) as closing:
        pid = int(server.engine.call("pid", (), {}))
        os.kill(pid, signal.SIGSTOP)
        ended = closing.submit(server.engine.close)
        wait_for(lambda: doors.is_ending(server.engine))
        os.kill(pid, signal.SIGKILL)
        with pytest.raises(AfterglowError, match="was killed by signal 9 while it closed: rows that were not on disk"):
            ended.result(20)
        server.engine.close()


@needs_model
def test_a_server_whose_engine_is_killed_while_it_ends_has_not_ended_well(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    doors.kill_engines_that_end(monkeypatch)
    monkeypatch.setattr(Service, "run", lambda service: None)
    monkeypatch.setattr("afterglow.server.lifecycle.service.set_up_logging", lambda level: None)
    options = ["--port", "0", "--threads", "1", "--cache-dir", str(tmp_path), *APART]
    monkeypatch.setattr("sys.argv", ["afterglow", "serve", "afterglow-small", *options])
    assert run() == 1
    assert capsys.readouterr().err.count("afterglow: error: the engine's process was killed by signal 9") == 1


@needs_model
def test_what_went_wrong_first_is_what_a_server_ends_with(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(service: Service) -> None:
        raise ConfigError("the first mistake")

    doors.kill_engines_that_end(monkeypatch)
    monkeypatch.setattr(Service, "run", fail)
    monkeypatch.setattr("afterglow.server.lifecycle.service.set_up_logging", lambda level: None)
    options = ["--port", "0", "--threads", "1", "--cache-dir", str(tmp_path), *APART]
    monkeypatch.setattr("sys.argv", ["afterglow", "serve", "afterglow-small", *options])
    assert run() == 2
    assert "afterglow: error: the first mistake" in capsys.readouterr().err


@needs_model
def test_a_killed_engine_ends_its_requests_and_the_server_says_so(tmp_path: Path) -> None:
    with serving(tmp_path, *APART, "--shared", f"file://{tmp_path}/shared") as server:
        with begun(server, LONG) as lines:
            os.kill(engine_of(server), signal.SIGKILL)
            said = [json.loads(line[6:]) for line in lines if line.startswith("data: {")]
            assert "error" in said[-1]
        asked = [
            httpx.get(f"{server.url}/health"),
            post(server, TALK),
            post(server, {**TALK, "stream": True}),
            post(server, {"input": "hi", "previous_response_id": "resp_1"}, "/v1/responses"),
            httpx.get(f"{server.url}/v1/responses/resp_1"),
            post(server, {"input": "a kite"}, "/v1/embeddings"),
            httpx.get(f"{server.url}/v1/cache/sessions"),
            httpx.get(f"{server.url}/v1/cache/stats"),
        ]
        assert {(each.status_code, each.json()["error"]["message"]) for each in asked} == {
            (503, "the engine has stopped unexpectedly; the server must be restarted")
        }
        assert httpx.get(f"{server.url}/metrics").status_code == 200
        assert "the engine's process was killed by signal 9; the server must be restarted" in server.log.read_text()
        server.process.terminate()
        assert server.process.wait(30) == 1, "what restarts servers sees that this one failed"
        assert "Traceback" not in server.log.read_text()


@needs_model
def test_an_engine_ends_with_a_killed_server(tmp_path: Path) -> None:
    with serving(tmp_path, *APART) as server:
        engine = engine_of(server)
        with contextlib.suppress(httpx.TransportError), begun(server, LONG) as lines:
            server.process.kill()
            list(lines)
        wait_for(lambda: not lives(engine), message="the engine goes on")


@needs_model
@pytest.mark.parametrize("number", [signal.SIGINT, pytest.param(signal.SIGTERM, marks=pytest.mark.long)])
def test_both_processes_get_a_signal_and_the_cache_is_written(tmp_path: Path, number: int) -> None:
    with serving(tmp_path, *APART) as server:
        assert post(server, TALK).json()["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
        engine = engine_of(server)
        os.kill(engine, number)
        assert post(server, TALK).status_code == 200, "the engine's process leaves signals to the server's"
        server.process.send_signal(number)
        assert server.process.wait(60) == 0
        assert not lives(engine)
    with serving(tmp_path, *APART) as server:
        usage = post(server, TALK).json()["usage"]
        assert usage["prompt_tokens_details"]["cached_tokens"] == usage["prompt_tokens"] - 1


@needs_model
def test_an_engine_has_as_long_to_close_as_it_may_take() -> None:
    assert client.CLOSE_SECONDS >= loop.STEP_SECONDS + 2 * loop.DRAIN_SECONDS + engine.CLOSE_SECONDS


def test_a_second_signal_ends_both_processes_at_once_and_says_nothing(tmp_path: Path) -> None:
    with serving(tmp_path, *APART, "--grace", "60") as server:
        engine = engine_of(server)
        with contextlib.suppress(httpx.TransportError), begun(server, LONG) as lines:
            os.kill(engine, signal.SIGSTOP)
            server.process.send_signal(signal.SIGINT)
            wait_for(lambda: "shutting down" in server.log.read_text())
            said = server.log.read_text()
            time.sleep(0.7)  # two at once would be taken for one
            server.process.send_signal(signal.SIGINT)
            list(lines)
        try:
            assert server.process.wait(20) == 130
            wait_for(lambda: not lives(engine), message="the engine goes on")
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.kill(engine, signal.SIGKILL)
        assert server.log.read_text() == said


def test_ctrl_c_while_the_engine_loads_is_no_error(
    model_dir: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    def interrupted(_: EngineProcess) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(EngineProcess, "_started", interrupted)
    with pytest.raises(KeyboardInterrupt):
        EngineProcess("tests.server.fake_engine_main", (model_dir, [1], {"eos": 0}))
    assert capfd.readouterr().err == ""


@needs_model
@pytest.mark.parametrize("wrong", [("--device-cache", "1"), ("--kv-events", "nothing://")])
def test_what_cannot_be_loaded_is_said_in_one_line(tmp_path: Path, wrong: tuple[str, ...]) -> None:
    command = [sys.executable, "-m", "afterglow.cli", "serve", "afterglow-small", "--port", "0", "--cache-dir", str(tmp_path)]  # fmt: skip
    said = [
        subprocess.run([*command, *mode, *wrong], capture_output=True, text=True, timeout=120) for mode in (APART, ())
    ]
    apart, inside = said
    assert apart.returncode == inside.returncode != 0
    assert [line[8:] for line in apart.stderr.splitlines()] == [
        line[8:] for line in inside.stderr.splitlines()
    ]  # after the time


def test_a_call_is_made_there_and_may_be_an_argument() -> None:
    asked: list[tuple[object, ...]] = []
    there = far.Far(lambda *call: asked.append(call), "store", folder="/cache")
    assert there.folder == "/cache"
    there.records.put("ada", 1, replace=True)
    assert asked == [("store.records.put", ("ada", 1), {"replace": True})]
    kept: dict[str, int] = {}
    far.offer("store", kept)
    try:
        pickle.loads(pickle.dumps(partial(there.update, {"ada": 1})))()
    finally:
        far.withdraw("store")
    assert kept == {"ada": 1}


def test_outputs_arrive_as_they_were() -> None:
    """Whole, or as new tokens alone."""
    cached, missed = CachedTokens(device=3), Missed("evicted", 2)
    likely = TokenLogprob(7, -0.5, ((7, -0.5),))
    said = [
        Output("a", (1,), None, cached, missed=missed, waited=0.5),
        Output("b", (5,), None, missed=missed, waited=0.25),
        Output("a", (2, 3), None, cached, missed=missed, waited=0.5),
        Output("a", (4,), None, cached, (likely,), missed=missed, waited=0.5),
        Output("b", (6,), None, missed=missed, waited=0.25),
        Output("b", (), "error", missed=missed, waited=0.25, error="the disk is full"),
        Output("a", (9,), "stop", cached, missed=missed, waited=0.5),
    ]
    sent: list[Output | NewTokens] = []
    writers = {name: OutputWriter(sent.append) for name in "ab"}
    for output in said:
        writers[output.request_id](output)
    assert [type(each) for each in sent].count(NewTokens) == 3
    reader = OutputReader()
    assert [reader.whole(each) for each in pickle.loads(pickle.dumps(sent))] == said


def test_a_channel_sends_in_order_and_ends() -> None:
    ours, theirs = socket.socketpair()
    here, there = Channel(ours), Channel(theirs)
    here.send(*range(1000))
    here.close()
    found: list[int] = []
    with pytest.raises(EOFError):
        while True:
            found += there.receive()
    there.send("too late")
    there.close()
    assert found == list(range(1000))


def test_a_message_that_cannot_be_sent_ends_both() -> None:
    ours, theirs = socket.socketpair()
    here, there = Channel(ours), Channel(theirs)
    here.send("before", threading.Lock())
    for end in (here, there):
        with pytest.raises(EOFError):
            end.receive()
        end.close()
