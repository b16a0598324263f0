"""`/v1/embeddings` and `/v1/rerank`: formats, batching, limits, keys; beside a model that generates, and without one."""

from __future__ import annotations

import asyncio
import base64
import json
import re
import shutil
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager
from dataclasses import dataclass, replace
from http.client import HTTPConnection
from pathlib import Path
from typing import Any, cast

import numpy as np
import openai
import pytest
import torch
from torch import Tensor

from afterglow.config import CacheConfig, EngineConfig
from afterglow.engine.engine import Engine
from afterglow.errors import ConfigError, RequestError
from afterglow.memo.build import Builder
from afterglow.memo.options import MemoOptions
from afterglow.memo.sequence_embedder import Embedder, EmbedResult
from afterglow.memo.texts import TextEmbedder, memo_identity, text_embedder
from afterglow.model.decoder import Attention
from afterglow.model.encoder import BatchAttend, Model
from afterglow.model.loader import load_encoder
from afterglow.server.embedding_models import EmbeddingWorker, EncoderOnly
from afterglow.server.lifecycle.service import Service
from afterglow.server.server_config import ServerConfig
from afterglow.text import Tokenizer
from tests import doors
from tests.memo.tiny import tiny_encoder
from tests.server.conftest import Running, running
from tests.waiting import wait_for

BUNDLED = Path(__file__).parents[2] / "src/afterglow/assets/model"
TEXTS = ["the cat sat on the mat", "a dog", "the red kite is near the old mill.", "a cat", "a dog ran in the rain"]


class Gate(BatchAttend):
    """Attention that waits until it may go on, or fails: to see what happens meanwhile."""

    def __init__(self, memo: GatedMemo, model: Model, positions: Tensor, lengths: Sequence[int]) -> None:
        super().__init__(model, positions, lengths)
        self.hits = [length == 4 for length in lengths]
        self._memo = memo

    def __call__(self, layer: int, attention: Attention, x: Tensor) -> Tensor:
        assert self._memo.gate.wait(20)
        if self._memo.fail:
            raise RuntimeError("a test's own failure")
        return super().__call__(layer, attention, x)


class GatedMemo:
    def __init__(self) -> None:
        self.gate = threading.Event()
        self.gate.set()
        self.passes: list[list[int]] = []
        self.fail = False

    def attend(self, model: Model, positions: Tensor, lengths: Sequence[int]) -> Gate:
        self.passes.append(list(lengths))
        return Gate(self, model, positions, lengths)


@dataclass
class Beside:
    """A server with a (fake) engine and an encoder beside it."""

    running: Running
    model: TextEmbedder
    memo: GatedMemo

    def post(self, path: str = "/v1/embeddings", **body: Any) -> Any:
        return self.running.http().post(path, json=body)

    def metric(self, name: str) -> float:
        found = re.search(rf"^afterglow:embedding_{name}{{.*}} (.*)$", self.running.http().get("/metrics").text, re.M)
        return float(found[1]) if found else 0.0


@contextmanager
def beside(folder: Path, model_dir: Path, config: ServerConfig | None = None, **options: Any) -> Iterator[Beside]:
    memo = GatedMemo()
    encoder = load_encoder(folder)
    plain = text_embedder(encoder, folder, Tokenizer(folder), "tiny")
    model = replace(plain, embedder=Embedder(encoder, plain.embedder.pooling, memo=memo))
    with running(model_dir, config, [model], **options) as server:
        try:
            yield Beside(server, model, memo)
        finally:
            memo.gate.set()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_encoder(tmp_path_factory.mktemp("encoder"))


@pytest.fixture(scope="module")
def server(folder: Path, model_dir: Path) -> Iterator[Beside]:
    with beside(folder, model_dir) as value:
        yield value


def vectors_of(reply: Any) -> Tensor:
    assert [item["index"] for item in reply.json()["data"]] == list(range(len(reply.json()["data"])))
    return torch.tensor([item["embedding"] for item in reply.json()["data"]])


def expected(model: TextEmbedder, texts: Sequence[str]) -> Tensor:
    return model.embed(texts).vectors


def near(found: Tensor, wanted: Tensor) -> None:
    torch.testing.assert_close(found, wanted, atol=2e-6, rtol=0)


# ------------------------------------------------------------------------------------------------------ formats


def test_through_the_openai_client(server: Beside) -> None:
    client = server.running.openai()
    for options in ({}, {"encoding_format": "float"}, {"encoding_format": "base64"}):
        reply: Any = client.embeddings.create(model="tiny", input=TEXTS, user="client-7", **options)  # type: ignore[call-overload]
        found = [
            np.frombuffer(base64.b64decode(item.embedding), "<f4")
            if isinstance(item.embedding, str)
            else item.embedding
            for item in reply.data
        ]
        near(torch.tensor(np.array(found), dtype=torch.float32), expected(server.model, TEXTS))
        assert reply.model == "tiny"
        tokens = sum(len(server.model.tokens(text)) for text in TEXTS)
        assert (reply.usage.prompt_tokens, reply.usage.total_tokens) == (tokens, tokens)
        assert reply.usage.memo_hits == sum(len(server.model.tokens(text)) == 4 for text in TEXTS) == 2


def test_all_kinds_of_input(server: Beside) -> None:
    ids = [server.model.tokens(text) for text in TEXTS]
    wanted = expected(server.model, TEXTS)
    near(vectors_of(server.post(input=TEXTS[0])), wanted[:1])
    near(vectors_of(server.post(input=TEXTS[:1])), wanted[:1])
    near(vectors_of(server.post(input=ids[0])), wanted[:1])
    near(vectors_of(server.post(input=ids)), wanted)
    near(vectors_of(server.post(input=[TEXTS[1]] * 3)), wanted[[1, 1, 1]])


def test_both_formats_are_the_same_numbers(server: Beside) -> None:
    plain = vectors_of(server.post(input=TEXTS))
    coded = server.post(input=TEXTS, encoding_format="base64").json()["data"]
    found = [np.frombuffer(base64.b64decode(item["embedding"]), "<f4") for item in coded]
    torch.testing.assert_close(torch.tensor(np.array(found)), plain, atol=1e-7, rtol=0)


def test_fewer_dimensions_are_of_unit_length(server: Beside) -> None:
    found = vectors_of(server.post(input=TEXTS, dimensions=5))
    first = expected(server.model, TEXTS)[:, :5]
    near(found, first / first.norm(dim=-1, keepdim=True))
    near(vectors_of(server.post(input=TEXTS, dimensions=32)), expected(server.model, TEXTS))


def test_long_texts_can_be_cut_off(server: Beside) -> None:
    long = "the cat " * 40
    assert server.post(input=long).status_code == 400
    for wanted in (48, -1):
        reply = server.post(input=long, truncate_prompt_tokens=wanted)
        assert reply.json()["usage"]["prompt_tokens"] == 48
    near(
        vectors_of(server.post(input=TEXTS[0], truncate_prompt_tokens=5)),
        server.model.embedder.embed([server.model.tokens(TEXTS[0], 5)]).vectors,
    )


# ------------------------------------------------------------------------------------------------------- errors


@pytest.mark.parametrize(
    ("body", "param", "words"),
    [
        ({}, "input", "input is required"),
        ({"input": ""}, "input", "empty string.*leave it out"),
        ({"input": []}, "input", "empty list"),
        ({"input": ["a cat", ""]}, "input", r"input\[1\] is an empty string"),
        ({"input": [[5], []]}, "input", r"input\[1\] is an empty list of token ids"),
        ({"input": 5}, "input", "must be a string.*got 5"),
        ({"input": "a", "input_type": "search_query"}, "input_type", "input_type is not supported"),
        ({"input": {"text": "a"}}, "input", "must be a string"),
        ({"input": ["a", 5]}, "input", r"input\[1\] is 5"),
        ({"input": [5, "a"]}, "input", r"input\[1\] is 'a'"),
        ({"input": [[5], "a"]}, "input", r"input\[1\] is 'a'"),
        ({"input": [1.5]}, "input", r"input\[0\] is 1.5"),
        ({"input": [True]}, "input", r"input\[0\] is true"),
        ({"input": [None]}, "input", r"input\[0\] is null"),
        ({"input": [5, 80]}, "input", "token id 80.*vocabulary of 80.*0 to 79"),
        ({"input": [[5], [-1]]}, "input", r"input\[1\]: token id -1"),
        ({"input": [10**30]}, "input", "token id 1000"),
        ({"input": "a " * 100}, "input", "102 tokens.*at most 48.*truncate_prompt_tokens"),
        ({"input": ["a", "a " * 100]}, "input", r"input\[1\] has 102 tokens"),
        ({"input": ["a"] * 2049}, "input", "at most 2048.*2049.*in parts"),
        ({"input": "a", "encoding_format": "int8"}, "encoding_format", "'float' or 'base64'.*'int8'"),
        ({"input": "a", "encoding_format": 5}, "encoding_format", "got 5"),
        ({"input": "a", "dimensions": 33}, "dimensions", "between 1 and 32.*got 33"),
        ({"input": "a", "dimensions": 0}, "dimensions", "between 1 and 32"),
        ({"input": "a", "dimensions": "5"}, "dimensions", "'5'"),
        ({"input": "a", "truncate_prompt_tokens": 49}, "truncate_prompt_tokens", "between 1 and 48.*got 49"),
        ({"input": "a", "truncate_prompt_tokens": 2}, "truncate_prompt_tokens", "use 3 or more"),
    ],
)
def test_what_is_wrong_is_named(server: Beside, body: dict[str, Any], param: str, words: str) -> None:
    reply = server.post(**body)
    error = reply.json()["error"]
    assert reply.status_code == 400
    assert error["type"] == "invalid_request_error"
    assert error["param"] == param
    assert re.search(words, error["message"]), error["message"]


def test_too_long_has_openais_code(server: Beside) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        server.running.openai().embeddings.create(model="tiny", input="a " * 100)
    assert caught.value.code == "context_length_exceeded"


def test_a_body_that_is_no_object(server: Beside) -> None:
    for content in (b"[]", b"{", b'{"input": "a", "dimensions": 1e400}'):
        assert server.running.http().post("/v1/embeddings", content=content).status_code == 400


# ------------------------------------------------------------------------------------------------------- models


def test_models_by_name(server: Beside) -> None:
    http = server.running.http()
    cards = {card["id"]: card for card in http.get("/v1/models").json()["data"]}
    assert set(cards) == {"fake-model", "tiny"}
    assert cards["tiny"]["max_model_len"] == 48
    assert http.get("/v1/models/tiny").json() == cards["tiny"]
    assert http.get("/v1/models/none").status_code == 404
    for name in ("none", "fake-model"):  # a fake model embeds nothing
        error = server.post(input="a cat", model=name).json()["error"]
        assert (error["code"], error["param"]) == ("model_not_found", "model")
        assert "embeds with tiny" in error["message"]
    assert server.post(input="a cat").json()["model"] == "tiny"


def test_an_encoder_does_not_chat(server: Beside) -> None:
    client = server.running.openai()
    with pytest.raises(openai.NotFoundError, match=r"embeds texts and generates none.*v1/embeddings"):
        client.chat.completions.create(model="tiny", messages=[{"role": "user", "content": "Hello"}])
    with pytest.raises(openai.NotFoundError, match="generates none"):
        client.completions.create(model="tiny", prompt="Hello")
    assert client.completions.create(model="fake-model", prompt="Hello").choices[0].text


def test_a_server_without_embeddings_says_so(model_dir: Path) -> None:
    with running(model_dir) as server:
        reply = server.http().post("/v1/embeddings", json={"input": "a cat"})
        assert reply.status_code == 404
        assert "--embedding-model" in reply.json()["error"]["message"]
        assert server.http().post("/v1/rerank", json={"query": "a", "documents": ["a"]}).status_code == 404


# ----------------------------------------------------------------------------------------------------- batching


def test_64_requests_at_once_share_passes(server: Beside) -> None:
    """The first one is being embedded while the others come: they then go together."""
    words = [
        "the",
        "a",
        "cat",
        "dog",
        "sat",
        "on",
        "mat",
        "red",
        "blue",
        "kite",
        "mill",
        "river",
        "is",
        "near",
        "old",
        "word",
    ]
    texts = [" ".join((words[n % 16], words[n // 4], words[n * 7 % 16])) for n in range(64)]
    wanted = expected(server.model, texts)
    client = server.running.openai()
    server.memo.passes.clear()
    server.memo.gate.clear()
    before = server.metric("requests_total"), server.metric("batch_size_count")
    worker = server.running.service.state.embeddings.worker
    with ThreadPoolExecutor(64) as pool:
        replies = [pool.submit(client.embeddings.create, model="tiny", input=text) for text in texts]
        wait_for(lambda: len(worker.jobs) + sum(map(len, server.memo.passes)) == 64, 20)
        server.memo.gate.set()
        found = torch.tensor([reply.result().data[0].embedding for reply in replies])
    near(found, wanted)
    assert len(server.memo.passes) <= 2 + len(texts) * 5 // 1024
    assert sum(map(len, server.memo.passes)) == 64
    assert server.metric("requests_total") - before[0] == 64
    assert server.metric("batch_size_count") - before[1] == len(server.memo.passes)


def test_small_requests_do_not_wait_for_large_ones(server: Beside) -> None:
    """Each waiting request has its turn in every pass: a large one is cut up."""
    server.memo.passes.clear()
    server.memo.gate.clear()
    worker = server.running.service.state.embeddings.worker
    done: list[str] = []

    def ask(name: str, texts: list[str]) -> None:
        assert server.post(input=texts).status_code == 200
        done.append(name)

    with ThreadPoolExecutor(3) as pool:
        first = pool.submit(ask, "first", ["a cat"])
        wait_for(lambda: server.memo.passes)
        large = pool.submit(ask, "large", ["the cat sat on the mat and the dog ran in the rain"] * 600)
        wait_for(lambda: len(worker.jobs) == 1)
        small = pool.submit(ask, "small", ["a dog"])
        wait_for(lambda: len(worker.jobs) == 2)
        server.memo.gate.set()
        for job in (first, large, small):
            job.result(30)
    assert done.index("small") < done.index("large")
    assert len(server.memo.passes) > 5


def test_passes_are_small_while_the_engine_works(folder: Path, model_dir: Path) -> None:
    with beside(folder, model_dir, hold=True) as server:
        texts = ["the cat sat on the mat"] * 100
        assert server.post(input=texts).status_code == 200
        assert max(map(sum, server.memo.passes)) == 800
        server.memo.passes.clear()
        client = server.running.openai()
        with ThreadPoolExecutor(1) as pool:
            chat = pool.submit(client.completions.create, model="fake-model", prompt="Hello", max_tokens=4)
            wait_for(lambda: server.running.engine.stats().plan.running == 1)
            assert server.post(input=texts).status_code == 200
            server.running.engine.gate.set()
            chat.result(20)
        assert max(map(sum, server.memo.passes)) <= 128


def test_who_leaves_is_not_embedded(server: Beside) -> None:
    server.memo.passes.clear()
    server.memo.gate.clear()
    worker = server.running.service.state.embeddings.worker
    with ThreadPoolExecutor(1) as pool:
        stays = pool.submit(server.post, input="a cat")
        wait_for(lambda: server.memo.passes)
        with closing(HTTPConnection(server.running.url.removeprefix("http://"), timeout=20)) as leaves:
            body = json.dumps({"input": ["the red kite"] * 50})
            leaves.request("POST", "/v1/embeddings", body, {"Content-Type": "application/json"})
            wait_for(lambda: len(worker.jobs) == 1)
        wait_for(lambda: all(job.future.cancelled() for job in worker.jobs))
        server.memo.gate.set()
        assert stays.result(20).status_code == 200
    assert server.post(input="a dog").status_code == 200
    assert sum(map(len, server.memo.passes)) == 2


def test_a_failed_pass_is_an_error_and_no_end(server: Beside) -> None:
    server.memo.fail = True
    reply = server.post(input="a cat")
    server.memo.fail = False
    assert reply.status_code == 500
    assert reply.json()["error"]["type"] == "server_error"
    assert server.post(input="a cat").status_code == 200


def test_a_full_queue_is_refused(folder: Path, model_dir: Path) -> None:
    with beside(folder, model_dir, max_queue=3) as server:
        server.memo.gate.clear()
        worker = server.running.service.state.embeddings.worker
        with ThreadPoolExecutor(4) as pool:
            asked = [pool.submit(server.post, input="a cat")]
            wait_for(lambda: server.memo.passes)
            asked += [pool.submit(server.post, input="a cat") for _ in range(3)]
            wait_for(lambda: len(worker.jobs) == 3)
            reply = server.post(input="a cat")
            assert reply.status_code == 429
            assert reply.headers["retry-after"]
            assert "--max-queue" in reply.json()["error"]["message"]
            server.memo.gate.set()
            assert [job.result(20).status_code for job in asked] == [200] * 4


class Slow:
    """What a worker needs of a model, and the order of passes. The first pass waits for `gate`."""

    def __init__(self, name: str, order: list[str], gate: threading.Event) -> None:
        self.name, self.embedder = name, self
        self.dimensions, self._order, self._gate = 2, order, gate

    def embed(self, sequences: Sequence[Sequence[int]]) -> EmbedResult:
        assert self._gate.wait(20)
        self._order.append(self.name)
        return EmbedResult(torch.zeros(len(sequences), 2), sum(map(len, sequences)), (False,) * len(sequences))


def test_two_models_take_turns() -> None:
    """Two large jobs of each: none of them waits until all of another model's have ended."""
    order: list[str] = []
    gate = threading.Event()
    worker = EmbeddingWorker(lambda: False, 8)
    first, second = (cast(TextEmbedder, Slow(name, order, gate)) for name in ("first", "second"))

    async def ask() -> None:
        jobs = [asyncio.create_task(worker.embed(model, [[1] * 700] * 6)) for model in (first, second, first, second)]
        await asyncio.sleep(0.1)
        worker.start()
        gate.set()
        await asyncio.gather(*jobs)

    try:
        asyncio.run(ask())
    finally:
        worker.close()
    assert order[:8] == ["first", "second"] * 4
    assert order.count("second") == 12


def test_who_has_left_takes_no_place_in_the_queue() -> None:
    order: list[str] = []
    gate = threading.Event()
    worker = EmbeddingWorker(lambda: False, 1)
    model = cast(TextEmbedder, Slow("first", order, gate))

    async def ask() -> None:
        working = asyncio.create_task(worker.embed(model, [[1]]))
        while not worker.jobs:
            await asyncio.sleep(0.01)
        worker.start()
        while worker.jobs:
            await asyncio.sleep(0.01)
        leaves = asyncio.create_task(worker.embed(model, [[1]]))
        await asyncio.sleep(0.05)
        with pytest.raises(RequestError, match="1 embedding requests are waiting already"):
            await worker.embed(model, [[1]])
        leaves.cancel()
        await asyncio.sleep(0.05)
        stays = asyncio.create_task(worker.embed(model, [[1]]))
        await asyncio.sleep(0.05)
        gate.set()
        await asyncio.gather(working, stays)

    try:
        asyncio.run(ask())
    finally:
        gate.set()
        worker.close()
    assert len(order) == 2


def test_stopping_ends_what_waits(folder: Path, model_dir: Path) -> None:
    with beside(folder, model_dir, ServerConfig(port=0, grace=0.2)) as server:
        server.memo.gate.clear()
        worker = server.running.service.state.embeddings.worker
        with ThreadPoolExecutor(2) as pool:
            asked = [pool.submit(server.post, input="a cat")]
            wait_for(lambda: server.memo.passes)
            asked.append(pool.submit(server.post, input="a dog"))
            wait_for(lambda: len(worker.jobs) == 1)
            server.running.service.stop()
            time.sleep(0.1)
            server.memo.gate.set()
            for job in asked:  # answered in time, or told so
                assert job.exception(20) is not None or job.result().status_code in (200, 503)
        server.running.thread.join(15)
        assert not server.running.thread.is_alive()
        assert not doors.thread_of(worker).is_alive()


# -------------------------------------------------------------------------------------------- keys and accounts


def test_keys_and_accounts(folder: Path, model_dir: Path) -> None:
    config = ServerConfig(port=0, grace=0.5, api_key=("one", "two"), admin_key="boss")
    with beside(folder, model_dir, config) as server:
        running = server.running
        assert server.post(input="a cat").status_code == 401
        with pytest.raises(openai.AuthenticationError):
            running.openai("wrong").embeddings.create(model="tiny", input="a cat")
        running.openai("one").embeddings.create(model="tiny", input=["a cat", "a dog"])
        stats = {
            key: running.http().get("/v1/cache/stats", headers={"Authorization": f"Bearer {key}"}).json()
            for key in ("one", "two")
        }
        assert "'prompt_tokens': 8" in str(stats["one"])
        assert "'prompt_tokens': 8" not in str(stats["two"])
        headers = {"Authorization": "Bearer boss"}
        metrics = running.http().get("/metrics", headers=headers).text
        for name, value in (("requests", 1), ("texts", 2), ("tokens", 8), ("memo_hits", 2)):
            assert f'afterglow:embedding_{name}_total{{model_name="tiny"}} {value}.0' in metrics


# ------------------------------------------------------------------------------------------------------- rerank


def test_documents_are_ranked_by_cosine(server: Beside) -> None:
    vectors = expected(server.model, TEXTS)
    scores = vectors @ vectors[0]
    reply = server.post("/v1/rerank", query=TEXTS[0], documents=TEXTS).json()
    assert [item["index"] for item in reply["results"]] == scores.argsort(descending=True).tolist()
    assert reply["results"][0]["index"] == 0
    for item in reply["results"]:
        assert item["relevance_score"] == pytest.approx(scores[item["index"]].item(), abs=1e-5)
        assert "document" not in item
    tokens = sum(len(server.model.tokens(text)) for text in [TEXTS[0], *TEXTS])
    assert reply["usage"]["total_tokens"] == tokens
    assert reply["model"] == "tiny"


def test_the_best_n_with_their_documents(server: Beside) -> None:
    documents = [{"text": TEXTS[1], "id": 7}, TEXTS[3], TEXTS[1]]
    for path in ("/v1/rerank", "/v2/rerank", "/rerank"):
        reply = server.post(path, query=TEXTS[1], documents=documents, top_n=2, return_documents=True).json()
        assert [item["index"] for item in reply["results"]] == [0, 2]  # equally near: in their order
        assert [item["document"] for item in reply["results"]] == [{"text": TEXTS[1]}] * 2


def test_documents_are_cut_off_where_coheres_clients_ask_for_it(server: Beside) -> None:
    long = "a dog " * 60
    cut = server.post("/v2/rerank", query="a cat", documents=[long, "a cat"], max_tokens_per_doc=9).json()
    query, short = (len(server.model.tokens(text)) for text in ("a cat", "a cat"))
    assert cut["usage"]["total_tokens"] == query + 9 + short
    at_most = server.post("/v2/rerank", query="a cat", documents=[long, "a cat"], max_tokens_per_doc=4096).json()
    assert at_most["usage"]["total_tokens"] == query + 48 + short  # no more than the model takes


@pytest.mark.parametrize(
    ("body", "param", "words"),
    [
        ({"query": "a", "documents": ["a"], "max_tokens_per_doc": 0}, "max_tokens_per_doc", "1 or more, got 0"),
        ({"documents": ["a"]}, "query", "non-empty string.*null"),
        ({"query": "", "documents": ["a"]}, "query", "non-empty string"),
        ({"query": "a"}, "documents", "at least one text.*null"),
        ({"query": "a", "documents": []}, "documents", "at least one"),
        ({"query": "a", "documents": "a"}, "documents", "list of at least one text, got 'a'"),
        ({"query": "a", "documents": ["a", 5]}, "documents", r"documents\[1\] must be a string.*got 5"),
        ({"query": "a", "documents": ["a", ""]}, "documents", r"documents\[1\] is an empty string"),
        ({"query": "a", "documents": ["a", "a " * 99]}, "documents", r"documents\[1\] has 101 tokens"),
        ({"query": "a " * 99, "documents": ["a"]}, "query", "query has 101 tokens"),
        ({"query": "a", "documents": ["a"], "top_n": 0}, "top_n", "1 or more, got 0"),
        ({"query": "a", "documents": ["a"] * 2048}, "documents", "at most 2047"),
    ],
)
def test_what_is_wrong_with_a_ranking_is_named(server: Beside, body: dict[str, Any], param: str, words: str) -> None:
    reply = server.post("/v1/rerank", **body)
    error = reply.json()["error"]
    assert (reply.status_code, error["param"]) == (400, param)
    assert re.search(words, error["message"]), error["message"]


# ------------------------------------------------------------------------------------------------- attention maps


@pytest.fixture(scope="module")
def maps(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A database of the tiny encoder's attention maps, of texts that the tests ask for and others."""
    model = text_embedder(load_encoder(folder), folder, Tokenizer(folder), "tiny")
    where = tmp_path_factory.mktemp("memo") / "maps"
    words = ["cat", "dog", "kite", "mill", "river", "mat", "rain", "word"]
    known = [f"the {a} is near the {b}" for a in words for b in words] + TEXTS
    identity = memo_identity(model.embedder.model, folder, model.template)
    Builder(model.embedder, where, MemoOptions(), **identity).run([model.tokens(text) for text in known])
    return where


def test_a_memo_that_was_calibrated_for_other_embeddings_is_refused(folder: Path, maps: Path, tmp_path: Path) -> None:
    """The maps are the same, but not what they cost an embedding."""
    other = Path(shutil.copytree(folder, tmp_path / "other"))
    (other / "modules.json").write_text(
        json.dumps([{"type": "sentence_transformers.models.Pooling", "path": "1_Pooling"}])
    )
    (other / "1_Pooling").mkdir(exist_ok=True)
    kinds = dict.fromkeys(("pooling_mode_mean_tokens", "pooling_mode_max_tokens"), False)
    (other / "1_Pooling/config.json").write_text(json.dumps({"pooling_mode_cls_token": True, **kinds}))
    with pytest.raises(ConfigError, match="calibrated for embeddings by 'mean' pooling, and this model's are by 'cls'"):
        text_embedder(load_encoder(other), other, Tokenizer(other), "tiny", memo=maps, template="{text}")


def test_known_texts_take_their_attention_from_the_memo(folder: Path, model_dir: Path, maps: Path) -> None:
    encoder = load_encoder(folder)
    exact = text_embedder(encoder, folder, Tokenizer(folder), "tiny")
    memo = text_embedder(encoder, folder, Tokenizer(folder), "tiny", memo=maps, threshold=0.5)
    with running(model_dir, embedders=[memo]) as server:
        reply = server.http().post("/v1/embeddings", json={"input": [*TEXTS, "a " * 40]})
        assert reply.json()["usage"]["memo_hits"] == len(TEXTS)  # of the other one's length there is nothing
        found = vectors_of(reply)
        assert (found[:-1] * expected(exact, TEXTS)).sum(-1).min() > 0.99
        near(found[-1:], expected(exact, ["a " * 40]))
        text = server.http().get("/metrics").text
        assert f'afterglow:embedding_memo_hits_total{{model_name="tiny"}} {len(TEXTS)}.0' in text
        assert 'afterglow:embedding_memo_damaged{model_name="tiny"} 0.0' in text
        assert 'afterglow:embedding_memo_used{model_name="tiny"} 1.0' in text
        assert 'embedding_memo_expected_speedup{model_name="tiny"}' not in text  # it was not measured
    assert exact.memo is None
    measured = text_embedder(encoder, folder, Tokenizer(folder), "tiny", memo=maps, threshold=0.5, memo_mode="auto")
    assert measured.memo is not None
    with running(model_dir, embedders=[measured]) as server:
        used = measured.memo.used
        reply = server.http().post("/v1/embeddings", json={"input": TEXTS})
        assert reply.json()["usage"]["memo_hits"] == (len(TEXTS) if used else 0)
        text = server.http().get("/metrics").text
        assert f'afterglow:embedding_memo_used{{model_name="tiny"}} {float(used)}' in text
        assert 'embedding_memo_expected_speedup{model_name="tiny"}' in text


def test_the_maps_of_another_model_or_prompt_are_refused(folder: Path, maps: Path, tmp_path: Path) -> None:
    encoder = load_encoder(folder)
    with pytest.raises(ConfigError, match="template"):
        text_embedder(encoder, folder, Tokenizer(folder), "tiny", memo=maps, template="Say {text}!")
    other = tiny_encoder(tmp_path / "other", modules=False)
    config = json.loads((other / "config.json").read_text())
    (other / "config.json").write_text(json.dumps({**config, "layer_norm_eps": 1e-5}))
    with pytest.raises(ConfigError, match="afterglow memo build"):
        text_embedder(load_encoder(other), other, Tokenizer(other), "other", memo=maps)
    with pytest.raises(ConfigError, match="nowhere"):
        text_embedder(encoder, folder, Tokenizer(folder), "tiny", memo=tmp_path / "nowhere")


# ---------------------------------------------------------------------------------- encoders alone, and decoders


def test_an_encoder_alone(folder: Path) -> None:
    tokenizer = Tokenizer(folder)
    model = text_embedder(load_encoder(folder), folder, tokenizer, "only")
    engine = EncoderOnly(model, EngineConfig())
    config = ServerConfig(port=0, grace=0.2, served_model_name=("only",))
    service = Service(engine, tokenizer, config, folder, embedders=[model])
    thread = threading.Thread(target=service.run, kwargs={"signals": False})
    thread.start()
    wait_for(lambda: service.started)
    try:
        with openai.OpenAI(base_url=f"{service.address}/v1", api_key="none", max_retries=0) as client:
            near(torch.tensor([client.embeddings.create(model="only", input="a cat").data[0].embedding]),
                 expected(model, ["a cat"]))  # fmt: skip
            assert [card.id for card in client.models.list()] == ["only"]
            for ask in (
                lambda: client.chat.completions.create(model="only", messages=[{"role": "user", "content": "Hello"}]),
                lambda: client.completions.create(model="only", prompt="Hello"),
                lambda: client.responses.create(model="only", input="Hello"),
            ):
                with pytest.raises(openai.NotFoundError, match="embeds texts and generates none"):
                    ask()
            with pytest.raises(openai.NotFoundError, match="does not exist"):
                client.completions.create(model="other", prompt="Hello")
            http = client._client
            root = service.address
            assert http.get(f"{root}/health").json() == {"status": "ok"}
            assert http.get(f"{root}/dashboard/data").status_code == 200
            assert http.get(f"{root}/v1/cache/sessions").json()["data"] == []
            assert 'embedding_requests_total{model_name="only"} 1.0' in http.get(f"{root}/metrics").text
            ids = http.post(f"{root}/tokenize", json={"prompt": "a cat"}).json()["tokens"]
            assert ids == model.tokens("a cat")
    finally:
        service.stop()
        thread.join(15)


@pytest.mark.skipif(not (BUNDLED / "config.json").is_file(), reason="no bundled model here")
def test_the_decoder_embeds_while_it_generates(tmp_path: Path, folder: Path) -> None:
    """The same weights in two threads: neither replies nor vectors change."""
    cache = CacheConfig(device_cache=64 << 20, host_cache=64 << 20, disk_cache=0)
    engine = Engine.load(BUNDLED, EngineConfig(threads=1, cache=cache))
    engine.start()
    tokenizer = Tokenizer(BUNDLED)
    own = text_embedder(engine.decoder, BUNDLED, tokenizer, "small", max_tokens=engine.max_model_len)
    other = text_embedder(load_encoder(folder), folder, Tokenizer(folder), "tiny")
    config = ServerConfig(port=0, grace=0.5, served_model_name=("small", "alias"))
    service = Service(engine, tokenizer, config, BUNDLED, embedders=[other, own])
    thread = threading.Thread(target=service.run, kwargs={"signals": False})
    thread.start()
    wait_for(lambda: service.started)
    try:
        with openai.OpenAI(base_url=f"{service.address}/v1", api_key="none", max_retries=0) as client:

            def chat(number: int) -> str:
                asked: Any = [{"role": "user", "content": f"My name is Ada. Say my name. {number}"}]
                reply = client.chat.completions.create(model="small", messages=asked, max_tokens=24, temperature=0)
                return reply.choices[0].message.content or ""

            alone = [chat(number) for number in range(3)]
            wanted = Embedder(engine.decoder, own.embedder.pooling).embed([own.tokens(text) for text in TEXTS]).vectors
            stop = threading.Event()
            found: list[Tensor] = []

            def embed() -> None:
                while not stop.is_set():
                    reply = client.embeddings.create(model="alias", input=TEXTS)
                    found.append(torch.tensor([item.embedding for item in reply.data]))

            threads = [threading.Thread(target=embed) for _ in range(4)]
            for each in threads:
                each.start()
            wait_for(lambda: found, 20)
            assert [chat(number) for number in range(3)] == alone
            stop.set()
            for each in threads:
                each.join(20)
            for vectors in found:
                torch.testing.assert_close(vectors, wanted, atol=1e-5, rtol=0)
            assert client.embeddings.create(model="tiny", input="a cat").usage.prompt_tokens == 4
            with pytest.raises(openai.BadRequestError, match="at most 2048"):
                client.embeddings.create(model="small", input="word " * 3000)
    finally:
        service.stop()
        thread.join(20)
        engine.close()
