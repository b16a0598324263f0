"""Servers on real sockets, with a fake engine behind them."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import httpx
import openai
import pytest

from afterglow.memo.texts import TextEmbedder
from afterglow.server.lifecycle.service import Service
from afterglow.server.server_config import ServerConfig
from afterglow.text import Tokenizer
from tests.server.fake_engine import FakeEngine
from tests.text import toys
from tests.waiting import wait_for

REPLY = "The kite is red, grüße 🙂 and the mill is near the river."


@dataclass
class Running:
    engine: FakeEngine
    tokenizer: Tokenizer
    url: str
    service: Service
    thread: threading.Thread

    clients: list[openai.OpenAI | httpx.Client] = field(default_factory=list)

    def openai(self, key: str = "none") -> openai.OpenAI:
        client = openai.OpenAI(base_url=f"{self.url}/v1", api_key=key, max_retries=0, timeout=20)
        self.clients.append(client)  # closed in the end: a socket left to the garbage collector is a warning
        return client

    def http(self, headers: Mapping[str, str] | None = None) -> httpx.Client:
        """A client whose bodies are JSON, also those that are sent as they are."""
        client = httpx.Client(
            base_url=self.url, timeout=20, headers={"Content-Type": "application/json", **(headers or {})}
        )
        self.clients.append(client)
        return client


@pytest.fixture(scope="session")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return toys.byte_level(tmp_path_factory.mktemp("model"))


@contextmanager
def running(
    model_dir: Path,
    config: ServerConfig | None = None,
    embedders: Sequence[TextEmbedder] = (),
    **engine_options: object,
) -> Iterator[Running]:
    tokenizer = Tokenizer(model_dir)
    (eos,) = tokenizer.encode("<|im_end|>", add_special_tokens=False)
    engine = FakeEngine(
        tokenizer.encode(REPLY),
        eos=eos,
        vocab_size=tokenizer.vocab_size,
        **engine_options,  # type: ignore[arg-type]
    )
    engine.start()
    service = Service(engine, tokenizer, config or ServerConfig(port=0, grace=0.5), model_dir, embedders=embedders)
    thread = threading.Thread(target=service.run, kwargs={"signals": False})
    thread.start()
    wait_for(lambda: service.started)
    server = Running(engine, tokenizer, service.address, service, thread)
    try:
        yield server
    finally:
        for client in server.clients:
            client.close()
        service.stop()
        engine.gate.set()
        thread.join(15)
        assert not thread.is_alive()
        engine.close()


@pytest.fixture(scope="module")
def server(model_dir: Path) -> Iterator[Running]:
    with running(model_dir) as value:
        yield value
