"""Requests that are meant to hurt: whatever comes, the answer is no 5xx, others do not wait, and memory comes back."""

from __future__ import annotations

import contextlib
import json
import os
import random
import re
import resource
import signal
import socket
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import httpx
import pytest

from afterglow.server.api.openapi import ENDPOINTS
from afterglow.server.bodies.message_bodies import MessagesBody
from afterglow.server.bodies.reply_bodies import ChatBody, CompletionBody, ResponseBody
from afterglow.server.bodies.text_bodies import DetokenizeBody, EmbeddingBody, PromptBody, RerankBody, TokenizeBody
from tests.memo.tiny import tiny_encoder
from tests.server import process
from tests.server.hostile import Answer, Hostile, serving
from tests.server.process import Process, half_open
from tests.waiting import wait_for

CHAT, TEXT, RESPONSES = "/v1/chat/completions", "/v1/completions", "/v1/responses"
MESSAGES = "/v1/messages"
EMBED, RERANK, TOKENIZE, DETOKENIZE = "/v1/embeddings", "/v1/rerank", "/tokenize", "/detokenize"
PROMPT = "/v1/cache/prompts/p"
STALL_SECONDS = 0.25
ATTEMPTS = 3  # a machine that stands still for a moment is no fault of the server, though hardly three times

MB = 1_000_000

FILES = 256  # descriptors of a server,
HALF_OPEN = 400  # and connections to it
SHORT = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 2}


@pytest.fixture(scope="module")
def server(model_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Hostile]:
    with serving(model_dir, tiny_encoder(tmp_path_factory.mktemp("encoder"))) as value:
        yield value


def many(value: bytes, size: float) -> bytes:
    """An array of so many bytes."""
    return b"[" + b",".join([value] * int(size // (len(value) + 1))) + b"]"


def inside(field: str, value: bytes, **more: object) -> bytes:
    rest = "".join(f", {json.dumps(key)}: {json.dumps(other)}" for key, other in more.items())
    return f"{{{json.dumps(field)}: ".encode() + value + rest.encode() + b"}"


USER = b'{"role":"user","content":""}'
HI = [{"role": "user", "content": "hi"}]

# name: (path, what makes the body, the expected status, what the message says)
BODIES: dict[str, tuple[str, Callable[[], bytes], int, str]] = {
    "half a million items": (RESPONSES, lambda: inside("input", many(USER, 14.5 * MB)), 400, "JSON values"),
    "items under the limit of a quick look": (
        RESPONSES,
        lambda: inside("input", many(USER, 0.9 * MB)),
        400,
        "input: at most 16384 messages",
    ),
    "as many items as are read": (RESPONSES, lambda: inside("input", many(USER, 29 * 16384)), 400, "maximum context"),
    "half a million messages": (CHAT, lambda: inside("messages", many(USER, 14.5 * MB)), 400, "JSON values"),
    "messages under the limit of a quick look": (
        CHAT,
        lambda: inside("messages", many(USER, 0.9 * MB)),
        400,
        "messages: at most 16384 messages",
    ),
    "Anthropic's messages under the limit of a quick look": (
        MESSAGES,
        lambda: inside("messages", many(USER, 0.9 * MB), max_tokens=1),
        400,
        "messages: at most 16384 blocks",
    ),
    "Anthropic's blocks, as many as are read": (
        MESSAGES,
        lambda: inside(
            "messages",
            b'[{"role":"user","content":"a"},{"role":"assistant","content":'
            + many(b'{"type":"text","text":"%s"}' % (b"a" * 200), 228 * 16000)
            + b'},{"role":"user","content":"a"}]',
            max_tokens=1,
        ),
        400,
        "prompt is too long",
    ),
    "Anthropic's calls": (
        MESSAGES,
        lambda: inside(
            "messages",
            b'[{"role":"user","content":"a"},{"role":"assistant","content":['
            + b",".join(b'{"type":"tool_use","id":"%d","name":"f","input":{}}' % n for n in range(16000))
            + b']},{"role":"user","content":"a"}]',
            max_tokens=1,
        ),
        400,
        "at most 1024 calls",
    ),
    "as many messages as are read, cut": (
        CHAT,
        lambda: inside("messages", many(USER, 29 * 16384), truncation="auto", max_tokens=1),
        200,
        "",
    ),
    "parts of one message": (
        CHAT,
        lambda: inside("messages", b'[{"role":"user","content":' + many(b'{"type":"text","text":"a"}', MB) + b"}]"),
        400,
        "messages, or parts of messages",
    ),
    "a text of 15 MB": (
        CHAT,
        lambda: json.dumps({"messages": [{"role": "user", "content": "x " * 7_400_000}]}).encode(),
        400,
        "4194304 char",
    ),
    "as much text as is read, cut": (
        CHAT,
        lambda: json.dumps(
            {"messages": [{"role": "user", "content": "the kite " * 100_000}], "truncation": "auto", "max_tokens": 1}
        ).encode(),
        200,
        "",
    ),
    "markers all over": (
        CHAT,
        lambda: json.dumps(
            {"messages": [{"role": "user", "content": "<|im_end|>" * 50_000}], "truncation": "auto", "max_tokens": 1}
        ).encode(),
        200,
        "",
    ),
    "deep arrays": (
        CHAT,
        lambda: inside("messages", b"[" * 7_000_000 + b"]" * 7_000_000),
        400,
        "nested too deeply|JSON values",
    ),
    "deep objects": (
        CHAT,
        lambda: inside("metadata", b'{"a":' * 500 + b"1" + b"}" * 500, messages=HI),
        400,
        "nested too deeply",
    ),
    "brackets that never close": (TEXT, lambda: inside("prompt", b"[" * 1_500_000), 400, "nested too deeply"),
    "brackets in a text": (TEXT, lambda: json.dumps({"prompt": '[{"\\' * 100, "max_tokens": 1}).encode(), 200, ""),
    "broken UTF-8": (CHAT, lambda: b'{"messages":"' + b"\xff\xfe" * 1_000_000 + b'"}', 400, "not UTF-8"),
    "UTF-16": (CHAT, lambda: json.dumps({"messages": HI}).encode("utf-16"), 400, "not UTF-8"),
    "a byte order mark": (
        CHAT,
        lambda: b"\xef\xbb\xbf" + json.dumps({"messages": HI, "max_tokens": 1}).encode(),
        200,
        "",
    ),
    "lone surrogates": (CHAT, lambda: b'{"messages":[{"role":"user","content":"\\ud800\\udfff\\ud800"}]}', 200, ""),
    "NUL characters": (
        CHAT,
        lambda: b'{"messages":[{"role":"user","content":"\\u0000\\u0000"}],"user":"\\u0000"}',
        200,
        "",
    ),
    "escapes": (
        CHAT,
        lambda: inside("messages", b'[{"role":"user","content":"' + b"\\u00e4" * 2_400_000 + b'"}]'),
        400,
        "maximum context",
    ),
    "NaN": (
        CHAT,
        lambda: inside("messages", json.dumps(HI).encode()).replace(b"}]}", b'}],"temperature":NaN}'),
        400,
        "NaN is no JSON",
    ),
    "infinity": (
        CHAT,
        lambda: json.dumps({"messages": HI}).encode().replace(b"}]}", b'}],"top_p":-1e999}'),
        400,
        "-1e999 is",
    ),
    "numbers of a million digits": (
        TEXT,
        lambda: inside("prompt", b"[" + b"9" * MB + b"]"),
        400,
        "thousands of digits",
    ),
    "many long numbers": (TEXT, lambda: inside("prompt", many(b"9" * 4000, 14 * MB)), 400, "outside the vocabulary"),
    "equal keys": (CHAT, lambda: b"{" + b'"messages":[],' * 1_000_000 + b'"messages":null}', 400, "JSON values"),
    "a million keys": (
        CHAT,
        lambda: b"{" + b",".join(b'"k%d":1' % n for n in range(1_000_000)) + b"}",
        400,
        "JSON values",
    ),
    "ids by the million": (TEXT, lambda: inside("prompt", many(b"7", 15 * MB)), 400, "JSON values"),
    "a million ids": (TEXT, lambda: inside("prompt", many(b"7", 2 * MB)), 400, "maximum context length is 512"),
    "wrong ids": (DETOKENIZE, lambda: inside("tokens", many(b'"a"', 4 * MB)), 400, "tokens: .*got 'a'"),
    "a million tokens": (DETOKENIZE, lambda: inside("tokens", many(b"7", 2 * MB)), 200, ""),
    "stop strings": (CHAT, lambda: inside("stop", many(b'""', 2.5 * MB // 4), messages=HI), 400, "stop: at most 4096"),
    "stop tokens": (
        CHAT,
        lambda: inside("stop_token_ids", many(b"1", 400_000), messages=HI),
        400,
        "stop_token_ids: at most 4096",
    ),
    "a model of 15 MB": (
        CHAT,
        lambda: json.dumps({"model": "ü" * 5_000_000, "messages": HI}, ensure_ascii=False).encode(),
        400,
        "model: at most 4096",
    ),
    "metadata": (
        RESPONSES,
        lambda: json.dumps({"input": "hi", "metadata": {str(n): n for n in range(20_000)}}).encode(),
        400,
        "metadata: at most 16",
    ),
    "biases": (
        CHAT,
        lambda: json.dumps({"messages": HI, "logit_bias": {str(n): "x" for n in range(20_000)}}).encode(),
        400,
        "logit_bias",
    ),
    "no object": (CHAT, lambda: many(b"null", 3 * MB), 400, "JSON values"),
    "white space": (CHAT, lambda: b" " * 15 * MB, 400, "not valid JSON"),
    "nothing": (CHAT, lambda: b"", 400, "not valid JSON"),
    "more than --max-body": (CHAT, lambda: b"[" + b" " * 17 * MB + b"]", 413, "--max-body"),
    "texts to embed": (EMBED, lambda: inside("input", many(b'"a"', 2 * MB)), 400, "at most 2048 inputs"),
    "all texts at once": (EMBED, lambda: json.dumps({"input": ["a"] * 2048}).encode(), 200, ""),
    "a long text to embed": (
        EMBED,
        lambda: json.dumps({"input": "the cat " * 50_000, "truncate_prompt_tokens": -1}).encode(),
        200,
        "",
    ),
    "documents": (
        RERANK,
        lambda: inside("documents", many(b'{"text":"a"}', 1.4 * MB), query="a"),
        400,
        "at most 2047 documents",
    ),
    "large documents": (
        RERANK,
        lambda: json.dumps(
            {
                "query": "a",
                "documents": ["the cat " * 900] * 2000,
                "truncate_prompt_tokens": 3,
                "return_documents": True,
            }
        ).encode(),
        200,
        "",
    ),
    "a long query": (
        RERANK,
        lambda: json.dumps({"query": "a " * 7_000_000, "documents": ["a"]}).encode(),
        400,
        "query: at most 4194304",
    ),
    "a text to tokenise": (TOKENIZE, lambda: json.dumps({"prompt": "the kite " * 50_000}).encode(), 200, ""),
    "too long a text to tokenise": (
        TOKENIZE,
        lambda: json.dumps({"prompt": "x" * 15_000_000}).encode(),
        400,
        "at most 4194304",
    ),
    "template variables": (
        CHAT,
        lambda: inside("chat_template_kwargs", b'{"a":' + many(b"{}", 0.35 * MB) + b"}", messages=HI, max_tokens=1),
        200,
        "",
    ),
    "a system prompt": (PROMPT, lambda: json.dumps({"text": "x" * 15_000_000}).encode(), 400, "text: at most 4194304"),
}


def settled(server: Hostile, most: float, seconds: float = 20.0) -> int:
    """Memory, once it is under `most` or does not get there."""
    deadline = time.monotonic() + seconds
    while (now := server.memory()) > most and time.monotonic() < deadline:
        time.sleep(0.2)
    return now


@pytest.mark.parametrize("name", BODIES)
def test_hostile_bodies(server: Hostile, name: str) -> None:
    path, make, status, says = BODIES[name]
    body = make()
    stalls = []
    while True:
        answer = server.watched(path, body, "PUT" if path == PROMPT else "POST")
        assert answer.status == status, answer.data[:400]
        if status != 200:
            assert re.search(says, answer.error["message"] or ""), answer.error
            assert len(answer.data) < 1000
        stalls.append(answer.slowest)
        print(f"others waited for {answer.slowest * 1e3:.0f} ms")
        if answer.slowest <= STALL_SECONDS:
            return
        assert len(stalls) < ATTEMPTS, f"others waited for {stalls} s"


def test_health_answers_while_six_bodies_of_15_mb_are_read(server: Hostile) -> None:
    body = inside("input", many(USER, 15 * MB))
    stalls = []
    while True:
        answers: list[Answer] = []

        def post(answers: list[Answer] = answers) -> None:
            answers.append(server.ask("POST", RESPONSES, body))
            server.hang_up()

        threads = [threading.Thread(target=post) for _ in range(5)]
        for thread in threads:
            thread.start()
        watched = server.watched(RESPONSES, body)
        for thread in threads:
            thread.join()
        assert [answer.status for answer in (watched, *answers)] == [400] * 6
        stalls.append(watched.slowest)
        print(f"others waited for {watched.slowest * 1e3:.0f} ms")
        if watched.slowest <= STALL_SECONDS:
            return
        assert len(stalls) < ATTEMPTS, f"others waited for {stalls} s"


def test_memory_comes_back(server: Hostile) -> None:
    """The process that reads large bodies counts too, at its own size, which is in the first measurement already."""
    bodies = [BODIES[name] for name in ("half a million items", "escapes", "a million ids", "a text of 15 MB")]
    made = [(path, make()) for path, make, _, _ in bodies]
    for path, body in made:
        server.ask("POST", path, body[: 2 * MB])
    time.sleep(2)
    before = server.memory()

    def post(path: str, body: bytes) -> None:
        server.ask("POST", path, body)
        server.hang_up()

    threads = [threading.Thread(target=post, args=each) for each in made * 2]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    most = before * 1.2
    assert settled(server, most) <= most


def test_a_process_that_dies_is_started_again(server: Hostile) -> None:
    body = json.dumps({"prompt": "x" * 4 * MB, "max_tokens": 1}).encode()
    assert server.ask("POST", TEXT, body).status == 400
    (child,) = server.children()
    os.kill(child, signal.SIGKILL)
    answer = server.ask("POST", TEXT, body)
    assert (answer.status, answer.error["code"]) == (400, "context_length_exceeded")
    (other,) = server.children()
    assert other != child


def test_bodies_that_wait_are_bounded(server: Hostile) -> None:
    """Bodies of no declared length are counted while they come: 8 of the largest may be on their way at once."""
    held = []
    refused: set[socket.socket] = set()
    try:
        for _ in range(10):
            sock = server.raw()
            held.append(sock)
            with contextlib.suppress(OSError):
                sock.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n")
                sock.sendall(b"Content-Length: 16000000\r\n\r\n" + b" " * 15_900_000)
            sock.setblocking(False)

        def count() -> int:
            for sock in held:
                with contextlib.suppress(BlockingIOError):
                    if b" 503 " in sock.recv(100):
                        refused.add(sock)
            return len(refused)

        wait_for(lambda: count() >= 2)
        assert server.ask("POST", TEXT, b'{"prompt": "hi", "max_tokens": 1}').status == 200
        assert count() == 2
    finally:
        for sock in held:
            sock.close()


# -------------------------------------------------------------------------------------------- half-open connections


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Process]:
    """A server that may have FILES descriptors, and waits long: its places stay taken while a test looks."""
    with process.serving(
        tmp_path_factory.mktemp("hostile"), "--header-timeout", "60", "--body-timeout", "60", files=FILES
    ) as server:
        yield server


@pytest.fixture(scope="module")
def impatient(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Process]:
    """One that does not wait long."""
    with process.serving(
        tmp_path_factory.mktemp("impatient"), "--header-timeout", "2", "--body-timeout", "2", files=FILES
    ) as server:
        yield server


def ended(sock: socket.socket) -> bool:
    """Has the server closed this connection?"""
    sock.setblocking(False)
    try:
        while sock.recv(1 << 16):
            pass
    except BlockingIOError:
        return False
    except OSError:
        pass
    return True


@pytest.mark.parametrize(
    "said",
    [
        b"",
        b"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\n",
        b"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nContent-Length: 99\r\n\r\n{",
    ],
    ids=["silent", "half the headers", "half the body"],
)
def test_half_open_connections_leave_health_answering(small: Process, impatient: Process, said: bytes) -> None:
    """More connections than descriptors: others are answered, the log stays short, and silent ones end by themselves."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    assert soft > HALF_OPEN + 100, f"this test itself needs {HALF_OPEN + 100} files (hard limit {hard})"
    before = small.log.stat().st_size + impatient.log.stat().st_size
    with ExitStack() as sockets:
        half_open(small.port, sockets, HALF_OPEN, said)
        for _ in range(10):
            began = time.monotonic()
            assert httpx.get(f"{small.url}/health", timeout=10).json() == {"status": "ok"}
            assert time.monotonic() - began < 5
        assert small.files < FILES - 32  # what the cache may need is left
        full = httpx.post(f"{small.url}{CHAT}", json=SHORT, timeout=10)
        assert full.status_code == 503
        assert full.json()["error"]["code"] == "too_many_connections"
        assert full.headers["connection"] == "close"
    wait_for(lambda: httpx.post(f"{small.url}{CHAT}", json=SHORT, timeout=30).status_code == 200)
    with ExitStack() as sockets:
        made = half_open(impatient.port, sockets, HALF_OPEN, said)
        wait_for(lambda: all(map(ended, made)), seconds=40)
        assert httpx.post(f"{impatient.url}{CHAT}", json=SHORT, timeout=30).status_code == 200
    assert small.log.stat().st_size + impatient.log.stat().st_size - before < 20_000
    for server in (small, impatient):
        assert "Traceback" not in server.log.read_text()


def test_foreign_pages_get_nothing(server: Hostile) -> None:
    """By a name that a page lent to the server, or from a page that is not allowed: no endpoint does anything."""
    own = server.url.removeprefix("http://")
    paths = httpx.get(f"{server.url}/openapi.json").json()["paths"]
    assert {CHAT, TEXT, RESPONSES, EMBED, PROMPT.rpartition("/")[0], "/metrics", "/reset_prefix_cache"} <= set(paths)
    for path, methods in paths.items():
        for method in methods:
            for host, origin in (
                ("evil.example", None),
                ("evil.example", "http://evil.example"),
                (own, "http://evil.example"),
            ):
                headers = {"Host": host, "Content-Type": "application/json"} | ({"Origin": origin} if origin else {})
                answer = httpx.request(method, f"{server.url}{path}", headers=headers, content=b"{}")
                assert answer.status_code == 403, (method, path, host, origin)
                error = answer.json()["error"]
                if path.startswith(MESSAGES):
                    assert error["type"] == "permission_error"
                else:
                    assert error["code"] == ("origin_not_allowed" if host == own else "host_not_allowed")


# ------------------------------------------------------------------------------------------------ random fields

BASES: dict[str, dict[str, object]] = {
    CHAT: {"messages": HI, "max_tokens": 2},
    TEXT: {"prompt": "Ada", "max_tokens": 2},
    RESPONSES: {"input": "hi", "max_output_tokens": 2},
    MESSAGES: {"messages": HI, "max_tokens": 2},
    EMBED: {"input": ["a cat"]},
    RERANK: {"query": "a cat", "documents": ["a dog", {"text": "a cat"}]},
    TOKENIZE: {"prompt": "a cat"},
    DETOKENIZE: {"tokens": [1, 2, 3]},
    PROMPT: {"text": "Be brief."},
}
KINDS = (
    ChatBody,
    CompletionBody,
    ResponseBody,
    MessagesBody,
    EmbeddingBody,
    RerankBody,
    TokenizeBody,
    DetokenizeBody,
    PromptBody,
)
FUZZED = dict(zip(BASES, KINDS, strict=True))
UNKNOWN = ("tools", "tool_choice", "response_format", "functions", "suffix", "audio", "modalities", "background", "é")
ODD: tuple[object, ...] = (
    None, True, False, 0, 1, -1, 2, 0.5, -0.0, 1e-320, 1e308, -1e308, 2**31, 2**63 - 1, -(2**63), 2**64, 10**400,
    "", " ", "a", "\x00", "\ud800", "🙂" * 50, "<|im_end|>", "{{ 7*7 }}", "../../etc/passwd", "x" * 5000, "1e400", "NaN",
    [], {}, [[]], [{}], [None], [0], [-1], [2**31], [10**30], ["a"], [""], ["a", 1], {"a": None}, {"": ""}, {"type": "text"},
    {"type": "json_object"}, {"role": "user"}, {"include_usage": True}, {"1": 5}, {"-1": 5}, {"1": 1e9}, {"x": 1},
    "in_memory", "24h", "auto", "disabled", "none", "base64", "float", "fake-model", "tiny",
)  # fmt: skip


def odd(rng: random.Random, depth: int = 0) -> object:
    """A value that no field expects, or one that some field does."""
    choice = rng.random()
    if choice < 0.7 or depth > 3:
        return rng.choice(ODD)
    if choice < 0.8:
        return [odd(rng, depth + 1) for _ in range(rng.randrange(4))]
    if choice < 0.9:
        keys = ("role", "content", "type", "text", "id", "messages", "a")
        return {rng.choice(keys): odd(rng, depth + 1) for _ in range(rng.randrange(4))}
    message = {"role": rng.choice(["user", "system", "assistant", "developer", "tool", odd(rng, 4)])}
    return [message | {"content": odd(rng, depth + 1)} for _ in range(rng.randrange(1, 4))]


def fuzz(server: Hostile, path: str, count: int) -> None:
    seed = random.randrange(2**32)
    print(f"seed {seed}, {path}")  # a failure shows it
    rng = random.Random(seed)
    fields = [*FUZZED[path].model_fields, *UNKNOWN]
    statuses: Counter[int] = Counter()
    slowest = 0.0
    for _ in range(count):
        body = dict(BASES[path])
        for _ in range(rng.choice((1, 1, 1, 2, 3))):
            body[rng.choice(fields)] = odd(rng)
        if body.get("ignore_eos") is True or body.get("n") == 2**31:
            body.pop("ignore_eos", None)  # the fake engine would go on and on
        began = time.perf_counter()
        answer = server.ask("PUT" if path == PROMPT else "POST", path, json.dumps(body).encode())
        slowest = max(slowest, time.perf_counter() - began)
        statuses[answer.status] += 1
        assert answer.status < 500, (body, answer.data[:400])
        if answer.status != 200:
            assert answer.error["message"], body
            assert len(answer.data) < 2000, (body, answer.data[:400])
    print(dict(statuses), f"slowest {slowest * 1e3:.0f} ms")
    assert statuses[200], "nothing was accepted: it tested refusals only"
    assert statuses[400], "nothing was refused: it tested nothing"


@pytest.mark.parametrize("path", BASES)
def test_odd_fields(server: Hostile, path: str) -> None:
    fuzz(server, path, 150)


@pytest.mark.long
@pytest.mark.parametrize("path", BASES)
def test_a_thousand_odd_fields(server: Hostile, path: str) -> None:
    """With a client beside it that asks for /health."""
    for attempt in range(ATTEMPTS):
        with server.onlooker() as slowest:
            fuzz(server, path, 1000)
        if max(slowest) <= STALL_SECONDS:
            return
        assert attempt < ATTEMPTS - 1, f"others waited for {max(slowest)} s"


# ------------------------------------------------------------------------------------------------- the document

CHECKS = (
    "not_a_server_error,status_code_conformance,content_type_conformance,response_schema_conformance,"
    "response_headers_conformance,unsupported_method"
)


def schemathesis(server: Hostile, folder: Path, phases: str, examples: int) -> None:
    """Requests made from /openapi.json, valid and not; the answers must be as it says."""
    seed = random.randrange(2**32)
    program = "import sys; sys.argv[0] = 'st'; from schemathesis.cli import schemathesis; schemathesis()"
    options = ["--phases", phases, "-n", str(examples), "--seed", str(seed), "-c", CHECKS]
    found = subprocess.run(
        [sys.executable, "-c", program, "run", f"{server.url}/openapi.json", *options],
        cwd=folder, capture_output=True, text=True, timeout=280,
    )  # fmt: skip
    print(found.stdout[-6000:], found.stderr[-2000:])
    assert found.returncode == 0
    assert "not defined" not in found.stdout
    assert f"Tested: {len(ENDPOINTS)}" in found.stdout


def test_schemathesis_finds_nothing(server: Hostile, tmp_path: Path) -> None:
    schemathesis(server, tmp_path, "fuzzing", 2)


@pytest.mark.long
def test_schemathesis_finds_nothing_in_many_examples(server: Hostile, tmp_path: Path) -> None:
    schemathesis(server, tmp_path, "examples,coverage,fuzzing", 50)
