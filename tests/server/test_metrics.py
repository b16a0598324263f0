"""Metrics as vLLM's own dashboard asks for them, and the key that opens nothing else."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families
from typer.testing import CliRunner

from afterglow.cli import serve
from afterglow.cli.commands import app
from afterglow.errors import ConfigError
from afterglow.server.server_config import ServerConfig
from tests.server.conftest import Running, running

CHAT = "/v1/chat/completions"
HI: dict[str, Any] = {"messages": [{"role": "user", "content": "hi, who is there?"}], "max_tokens": 4}
OURS = {"model_name": "fake-model", "engine": "0"}
PER_REQUEST = (
    "queue_time_seconds",
    "prefill_time_seconds",
    "decode_time_seconds",
    "prompt_tokens",
    "generation_tokens",
)


def samples(server: Running) -> dict[str, list[tuple[dict[str, str], float]]]:
    with server.http() as http:
        text = http.get("/metrics").text
    found: dict[str, list[tuple[dict[str, str], float]]] = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            found.setdefault(sample.name, []).append((sample.labels, sample.value))
    return found


def one(found: dict[str, list[tuple[dict[str, str], float]]], name: str) -> float:
    ((labels, value),) = found[f"vllm:request_{name}"]
    assert labels == OURS
    return value


def test_each_request_is_in_vllms_histograms(model_dir: Path) -> None:
    with running(model_dir, step_seconds=0.1) as server, server.http() as http:
        for body in (HI, {**HI, "max_tokens": 1}):
            assert http.post(CHAT, json=body).status_code == 200
        prompt = len(server.engine.requests[0].prompt)
        found = samples(server)
    assert {one(found, f"{name}_count") for name in PER_REQUEST} == {2}
    assert (one(found, "prompt_tokens_sum"), one(found, "generation_tokens_sum")) == (2 * prompt, 5)
    # Three steps after the first token, which may be heard of a step late.
    assert one(found, "decode_time_seconds_sum") >= 0.15
    assert one(found, "time_per_output_token_seconds_count") == 1  # one token alone has no time between tokens
    assert one(found, "time_per_output_token_seconds_sum") * 3 == pytest.approx(one(found, "decode_time_seconds_sum"))
    buckets = {labels["le"] for labels, _ in found["vllm:request_prompt_tokens_bucket"]}
    assert buckets == {"1.0", "2.0", "5.0", "10.0", "20.0", "50.0", "100.0", "200.0", "500.0", "+Inf"}  # context: 512


def test_of_several_replies_the_longest_counts_once(model_dir: Path) -> None:
    with running(model_dir) as server, server.http() as http:
        http.post("/v1/completions", json={"prompt": ["a", "b"], "n": 2, "max_tokens": 3})
        found = samples(server)
    assert one(found, "generation_tokens_count") == 4
    assert (one(found, "max_num_generation_tokens_count"), one(found, "max_num_generation_tokens_sum")) == (2, 6)


def test_what_was_cancelled_is_no_finished_request(model_dir: Path) -> None:
    # 20 s: it has not ended when the client leaves.
    with running(model_dir, step_seconds=0.05) as server, server.http() as http:
        body = {**HI, "max_tokens": 400, "ignore_eos": True, "stream": True}
        with http.stream("POST", CHAT, json=body) as answer:
            lines = answer.iter_lines()
            next(lines)
        assert one(samples(server), "generation_tokens_count") == 0


def test_vllms_families_have_its_label_and_ours_have_not(server: Running) -> None:
    for name, found in samples(server).items():
        for labels, _ in found:
            assert ("engine" in labels) == name.startswith("vllm:"), name


# ------------------------------------------------------------------------------------------------ the key


@pytest.mark.parametrize("others", [{"api_key": ("one", "two")}, {"api_key": ("one",)}, {"admin_key": "boss"}, {}])
def test_the_metrics_key_opens_metrics_alone(model_dir: Path, others: dict[str, Any]) -> None:
    config = ServerConfig(port=0, grace=0.5, metrics_key="scrape", **others)
    with running(model_dir, config) as server:
        with server.http(headers={"Authorization": "Bearer scrape"}) as http:
            assert "vllm:num_requests_running" in http.get("/metrics").text
            for method, path in (
                ("GET", "/v1/models"),
                ("GET", "/dashboard/data"),
                ("GET", "/v1/cache/sessions"),
                ("GET", "/v1/cache/stats"),
                ("GET", "/metrics/"),
                ("POST", "/reset_prefix_cache"),
                ("POST", CHAT),
            ):
                answer = http.request(method, path, json=HI)
                assert (answer.status_code, answer.json()["error"]["code"]) == (403, "metrics_key_only"), path
        with server.http(headers={"Authorization": "Bearer wrong"}) as http:
            assert http.get("/metrics").status_code == (401 if "api_key" in others else 403 if others else 200)
        assert server.engine.requests == []


def test_a_metrics_key_is_a_key_of_its_own() -> None:
    for config in ({"api_key": ("k",)}, {"admin_key": "k"}):
        with pytest.raises(ConfigError, match="--metrics-key opens /metrics alone: it must not be the --admin-key"):
            ServerConfig(metrics_key="k", **config)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="--metrics-key cannot be empty"):
        ServerConfig(metrics_key="")


def test_the_key_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """As the admin key: the flag goes first."""
    seen: list[ServerConfig] = []
    monkeypatch.setenv("AFTERGLOW_METRICS_KEY", "scrape")
    monkeypatch.setattr(serve, "set_up_threads", lambda threads: None)
    monkeypatch.setattr("afterglow.server.lifecycle.service.set_up_logging", lambda level: None)
    monkeypatch.setattr("afterglow.server.lifecycle.service.listen", lambda config: seen.append(config) or 1 / 0)
    for given, wanted in (([], "scrape"), (["--metrics-key", "other"], "other")):
        result = CliRunner().invoke(app, ["serve", "--port", "0", *given])
        assert isinstance(result.exception, ZeroDivisionError), result.output
        assert seen[-1].metrics_key == wanted
