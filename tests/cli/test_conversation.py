"""`afterglow chat`."""

from __future__ import annotations

import contextlib
import io
import re
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest

from afterglow.cli.conversation import (
    BUNDLED_LONGEST,
    TRY_BUNDLED,
    LocalSpeaker,
    Messages,
    RemoteSpeaker,
    converse,
)
from afterglow.errors import RequestError
from afterglow.library.language_model import LanguageModel
from afterglow.request import Reasoning, SamplingParams
from tests.cli.kit import BUNDLED, SMALL, afterglow, inside
from tests.reasoning_templates import QWEN, TAGGED, THOUGHT
from tests.scripted_model import scripted
from tests.server.conftest import REPLY, running
from tests.text import toys
from tests.waiting import wait_for


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with running(toys.byte_level(tmp_path_factory.mktemp("model"))) as server:
        yield server.url


def test_chat_over_pipes(url: str) -> None:
    result = afterglow("chat", "--url", url, "--system", "Be brief.", input="hello\n\n/reset\nagain\nmore\n/quit\nno\n")
    assert result.returncode == 0
    assert result.stdout.splitlines() == [REPLY] * 3
    notes = result.stderr.splitlines()
    assert len(notes) == 3
    assert re.fullmatch(r"\[\d+ prompt tokens, 0 cached, first token after \d+ ms\]", notes[0])
    assert re.search(r"\d+ cached \(host \d+\)", notes[2])


def test_what_the_environment_says_of_servers_here_does_not_lead_a_chat_away(url: str) -> None:
    """A proxy, and the model that `afterglow serve` takes on this machine."""
    proxy = "http://127.0.0.1:9"
    env = {"AFTERGLOW_MODEL": "/models/another", "HTTP_PROXY": proxy, "http_proxy": proxy, "ALL_PROXY": proxy}
    result = afterglow("chat", "--url", url, input="hello\n", **env)
    assert (result.returncode, result.stdout.splitlines()) == (0, [REPLY])
    assert afterglow("cache", "stats", "--server", url, **env).returncode == 0


@pytest.mark.parametrize("command", [("chat", "--url"), ("cache", "stats", "--server")])
def test_a_key_that_no_request_can_carry_is_not_shown(command: tuple[str, ...]) -> None:
    result = inside(*command, "http://127.0.0.1:9", "--api-key", "sk-secret\n")
    assert result.returncode == 2
    assert result.stderr.startswith(
        "afterglow: error: --api-key must be printable ASCII without white space at its ends"
    )
    assert "secret" not in result.stderr


class Canned:
    note = "note"

    def __init__(self, pieces: list[str | Reasoning | BaseException]) -> None:
        self.pieces = pieces
        self.asked: list[Messages] = []

    def reply(self, messages: Messages) -> Iterator[str | Reasoning]:
        self.asked.append([dict(m) for m in messages])
        for piece in self.pieces:
            if isinstance(piece, BaseException):
                raise piece
            yield piece


def test_commands_and_interruptions(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO("hi\n/system Be kind.\nhi again\n/help\n/nonsense\n"))
    speaker = Canned(["par", KeyboardInterrupt()])
    assert converse(speaker, None) == 0
    assert speaker.asked == [
        [{"role": "user", "content": "hi"}],
        [{"role": "system", "content": "Be kind."}, {"role": "user", "content": "hi again"}],
    ]
    out = capsys.readouterr().out
    assert out.count("par …") == 2
    assert "/reset" in out
    assert "there is no command /nonsense" in out


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize("out", [Terminal, io.StringIO])
def test_reasoning_is_dim_on_a_terminal_and_not_shown_over_pipes(
    monkeypatch: pytest.MonkeyPatch, out: type[io.StringIO]
) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO("hi\nand\n"))
    monkeypatch.setattr("sys.stdout", shown := out())
    speaker = Canned([Reasoning("Who"), Reasoning(" is it?"), "Hello", " you."])
    assert converse(speaker, None) == 0
    thought = "\x1b[2mWho\x1b[0m\x1b[2m is it?\x1b[0m\n\n" if out is Terminal else ""
    assert shown.getvalue() == f"{thought}Hello you.\n" * 2
    assert speaker.asked[1][1] == {"role": "assistant", "content": "Hello you."}


def test_reasoning_of_servers_and_of_models_here(tmp_path: Path) -> None:
    with scripted(tmp_path, QWEN) as server:
        server.say(TAGGED + "Yes.", TAGGED + "Yes.")
        remote = RemoteSpeaker(server.url, None, None, None, {})
        with contextlib.closing(remote):
            said: list[str | Reasoning] = list(remote.reply([{"role": "user", "content": "Rain?"}]))
        model = LanguageModel(server.engine, server.tokenizer)
        here = LocalSpeaker(model, SamplingParams(max_tokens=200))
        for pieces in (said, list(here.reply([{"role": "user", "content": "Rain?"}]))):
            assert "".join(piece for piece in pieces if isinstance(piece, str)) == "Yes."
            assert "".join(piece.text for piece in pieces if isinstance(piece, Reasoning)) == THOUGHT


def test_the_bundled_model_says_what_it_can_do(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.stdin", Terminal(""))
    monkeypatch.setattr("builtins.input", lambda prompt: (_ for _ in ()).throw(EOFError))
    assert converse(Canned([]), None, TRY_BUNDLED) == 0
    assert capsys.readouterr().out.startswith(
        "afterglow-small remembers what it was told, and can do nothing else; pip install"
    )
    assert converse(Canned([]), None) == 0
    assert capsys.readouterr().out.startswith("Type a message")


@pytest.mark.skipif(not (BUNDLED / "config.json").is_file(), reason="no bundled model here")
def test_the_first_conversation_works_and_ends() -> None:
    """The prompts that are proposed are answered; a question that the model cannot answer ends all the same, and says so."""
    told, asked = (line.strip() for line in TRY_BUNDLED.splitlines()[1:3])
    talk = f"{told}\n{asked}\n/reset\nMy name is Ada.\nWhat is my name?\n"
    result = afterglow("chat", "afterglow-small", *SMALL, input=talk)
    replies = result.stdout.splitlines()
    assert result.returncode == 0
    assert "teal" in replies[1]
    assert len(replies[3]) < 1000
    notes = [line for line in result.stderr.splitlines() if line.startswith("[")]
    assert notes[3].endswith((f"cut off after {BUNDLED_LONGEST} tokens (--max-tokens)]", "stopped: it repeats itself]"))
    assert "cut off" not in notes[1]


def test_a_server_that_never_ends_is_stopped(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Without asking for fewer tokens, which a server with a short context would refuse."""
    monkeypatch.setattr("afterglow.cli.conversation.LONGEST", 5)
    with running(toys.byte_level(tmp_path)) as server:
        speaker = RemoteSpeaker(server.url, None, None, None, {"temperature": 0.0})
        assert 0 < len("".join(speaker.reply([{"role": "user", "content": "hi"}]))) < len(REPLY)
        speaker._client.close()
        assert speaker.note.endswith("cut off after 5 tokens (--max-tokens)")
        wait_for(lambda: server.engine.in_flight == 0)
        assert server.engine.requests[0].sampling.max_tokens > 5


@pytest.mark.parametrize(
    ("line", "said", "wrong"),
    [
        ('data:{"choices": [{"delta": {"content": "hi"}}]}', ["hi"], None),  # without a blank
        ('data: {"error": "overloaded"}', [], "overloaded"),
        ('data: {"error": {"message": "too much"}}', [], "too much"),
        ("data: []", [], "the connection to the server broke"),
        ('data: {"choices": null}', [], "the connection to the server broke"),
        *((line, [], None) for line in (": a comment", ": ", ": keep-alive ", "event: message ", "data:", " ")),
        ('data: {"error": null, "choices": [{"delta": {"content": "hi"}}]}', ["hi"], None),
    ],
)
def test_lines_of_other_servers(line: str, said: list[str], wrong: str | None) -> None:
    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            self.send_response(200)
            self.end_headers()
            self.wfile.write(f"{line}\n\ndata: [DONE]\n\n".encode())

        def log_message(self, *_: object) -> None:
            pass

    with HTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.handle_request, daemon=True).start()
        speaker = RemoteSpeaker(f"http://127.0.0.1:{server.server_port}", None, "m", None, {})
        with pytest.raises(RequestError, match=wrong) if wrong else contextlib.nullcontext():
            assert list(speaker.reply([{"role": "user", "content": "hi"}])) == said
        speaker.close()


def test_an_error_of_the_server_ends_a_pipe(url: str) -> None:
    result = afterglow("chat", "--url", url, input="the mill " * 600 + "\n")
    assert result.returncode == 2
    assert "maximum context length is 512 tokens" in result.stderr
    assert "Traceback" not in result.stderr
