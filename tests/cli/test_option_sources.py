"""Options from a file and from variables."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from typer.main import get_command

from afterglow.cli import serve as serving
from afterglow.cli.commands import app
from afterglow.cli.option_sources import NAMES, options_by_command
from afterglow.config import CacheConfig, EngineConfig
from afterglow.server.server_config import ServerConfig
from tests.cli.kit import inside

YAML = """
host-cache: 3G
tenant_quota: 10G
relay: off
api_key: [one, two]
stop: "\\n"
model: a-model
threads:
memo_mode: on
admin_key: null
grace: 7
serve:
  grace: 1
  disk_cache: 4G
  no_such_thing: 1
simulate:
  model:
"""
TOML = """
host-cache = "3G"
tenant_quota = "10G"
relay = "off"
api_key = ["one", "two"]
stop = "\\n"
model = "a-model"
memo_mode = "on"
[serve]
grace = 1
disk_cache = 4294967296
no_such_thing = 1
"""

Called = list[tuple[str | None, ServerConfig, EngineConfig]]


@pytest.fixture
def called(monkeypatch: pytest.MonkeyPatch) -> Called:
    """What `afterglow serve` would have served."""
    calls: Called = []

    def record(model: str | None, server: ServerConfig, engine: EngineConfig) -> int:
        calls.append((model, server, engine))
        return 0

    monkeypatch.setattr(serving, "serve", record)
    return calls


@pytest.mark.parametrize(("name", "text"), [("a.yaml", YAML), ("a.yml", YAML), ("a.toml", TOML)])
def test_a_file_sets_the_options_of_every_command_or_of_one(
    called: Called, tmp_path: Path, name: str, text: str
) -> None:
    """Words that YAML takes for truth values stay words; an empty value is the default."""
    path = tmp_path / name
    path.write_text(text)
    refused = inside("serve", "--config", str(path))
    assert refused.returncode == 2
    assert refused.stderr.startswith(f"afterglow: error: serve.no_such_thing in {path} is no option")
    path.write_text("\n".join(line for line in text.splitlines() if "no_such" not in line))
    assert inside("serve", "--config", str(path)).stderr == ""
    (model, server, engine), *_ = called
    assert model == "a-model"
    assert server == ServerConfig(api_key=("one", "two"), memo_mode="on", grace=1.0)
    cache = CacheConfig(host_cache=3 * 2**30, disk_cache=4 * 2**30, tenant_quota=10 * 2**30)
    assert engine == EngineConfig(cache=cache, relay="off")


def test_the_command_line_goes_before_variables_and_they_before_the_file(
    called: Called, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "options.yaml"
    path.write_text("port: 1\ngrace: 1\nmax_batch: 1\nthreads: 1\nhost: a\nserve: {threads: 2, host: b}\n")
    monkeypatch.setenv("AFTERGLOW_CONFIG", str(path))
    monkeypatch.setenv("AFTERGLOW_PORT", "3")
    monkeypatch.setenv("AFTERGLOW_SERVE_PORT", "4")
    monkeypatch.setenv("AFTERGLOW_GRACE", "3")
    monkeypatch.setenv("AFTERGLOW_THREADS", "3")
    monkeypatch.setenv("AFTERGLOW_MAX_BATCH", "")  # as if it were not set
    monkeypatch.setenv("AFTERGLOW_WARM_START", "no")
    monkeypatch.setenv("AFTERGLOW_SERVICE_HOST", "10.0.0.1")  # Kubernetes, for a service of that name
    monkeypatch.setenv("AFTERGLOW_PORT_8000_TCP", "tcp://10.0.0.1:8000")
    monkeypatch.setenv("AFTERGLOW_KERNELS", "none")  # how a wheel is built
    assert inside("serve", "--grace", "5").stderr == ""
    _, server, engine = called[0]
    assert (server.port, server.grace, server.host) == (4, 5.0, "b")
    assert (engine.max_batch, engine.threads, engine.cache.warm_start) == (1, 3, False)


def test_keys_come_from_variables(called: Called, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AFTERGLOW_API_KEY", "a key")
    monkeypatch.setenv("AFTERGLOW_ADMIN_KEY", "b")
    monkeypatch.setenv("AFTERGLOW_METRICS_KEY", "c")
    assert inside("serve").stderr == ""
    monkeypatch.setenv("AFTERGLOW_API_KEY", '["a", "d"]')
    monkeypatch.setenv("AFTERGLOW_URGENT_KEY", "d")
    assert inside("serve").stderr == ""
    assert [server for _, server, _ in called] == [
        ServerConfig(api_key=("a key",), admin_key="b", metrics_key="c"),
        ServerConfig(api_key=("a", "d"), admin_key="b", metrics_key="c", urgent_key=("d",)),
    ]


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("prot: 1", "prot in {path} is no option; did you mean prompt or port?"),
        ("serve: {prompt: a}", "serve.prompt in {path} is no option"),
        ("simulate: {host_cache: 1}", "simulate.host_cache in {path} is no option"),
        (
            "port: many",
            "port in {path}: 'many' is not a whole number; write it in digits; a table `serve` in the file can",
        ),
        (
            "serve: {port: many}",
            "serve.port in {path}: 'many' is not a whole number; write it in digits; the command line",
        ),
        ("port: 70000", "port in {path} must be between 0 and 65535, got 70000"),
        ("policy: lry", "policy in {path}: 'lry' is not one of 'lookahead', 'lru', 'fifo', 'lfu'; a table"),
        ("disk_cache: 3X", "disk_cache in {path}: '3X' is not a size; write a number with K, M, G or T"),
        ("warm_start: maybe", "warm_start in {path}: 'maybe' is neither true nor false"),
        ("port: [1, 2]", "port in {path} must be one value, not a list"),
        ("port: {a: 1}", "port in {path} must be a value or a list of values"),
        ("admin_key: a\nmetrics_key: a", "metrics_key in {path} opens /metrics alone: it must not be the admin_key in"),
        ("- port", "--config {path} must have a line such as `host_cache: 8G` for each option"),
        (
            "port: 1\napi_key: secret: x",
            "--config {path} is not valid YAML: mapping values are not allowed here, line 2\n",
        ),
        ("api_key: *topsecret", "--config {path} is not valid YAML, line 1\n"),
        ("api_key: ''", "api_key in {path} cannot be empty"),
        ("api_key: [a, '']", "api_key in {path} cannot be empty"),
        ("admin_key:", "admin_key in {path} cannot be empty"),
    ],
)
def test_what_is_wrong_in_a_file_is_named_with_the_file(tmp_path: Path, text: str, says: str) -> None:
    path = tmp_path / "options.yaml"
    path.write_text(text)
    result = inside("serve", "--config", str(path))
    assert result.returncode == 2
    assert result.stderr.startswith(f"afterglow: error: {says.format(path=path)}")
    assert result.stderr.count("\n") == 1


@pytest.mark.parametrize("variable", ["AFTERGLOW_API_KEY", "AFTERGLOW_SERVE_API_KEY", "AFTERGLOW_ADMIN_KEY"])
def test_an_empty_key_in_a_variable_does_not_leave_the_server_open(
    monkeypatch: pytest.MonkeyPatch, variable: str
) -> None:
    """A secret that was not found is an empty variable."""
    monkeypatch.setenv(variable, "")
    result = inside("serve", "/no/model")
    assert result.returncode == 2
    assert result.stderr == f"afterglow: error: {variable} cannot be empty\n"


@pytest.mark.parametrize("text", ["api_key: []\n", "serve: {api-key: []}\n", None])
def test_an_empty_list_of_keys_does_not_either(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str | None
) -> None:
    (file := tmp_path / "a.yaml").write_text(text or "")
    if text is None:
        monkeypatch.setenv("AFTERGLOW_API_KEY", "[]")
    result = inside("serve", "/no/model", "--config", str(file))
    assert result.returncode == 2
    assert "is an empty list; give a key, or leave it out" in result.stderr


@pytest.mark.parametrize("place", ["file", "variable", "option"])
def test_a_home_is_found_wherever_a_folder_is_named(
    called: Called, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, place: str
) -> None:
    (file := tmp_path / "a.yaml").write_text("cache_dir: ~/kv\n" if place == "file" else "")
    if place == "variable":
        monkeypatch.setenv("AFTERGLOW_CACHE_DIR", "~/kv")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert inside("serve", *(["--cache-dir=~/kv"] if place == "option" else []), "--config", str(file)).returncode == 0
    assert called[0][2].cache.cache_dir == tmp_path / "kv"
    assert CacheConfig(cache_dir="~/kv").cache_dir == tmp_path / "kv"  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("name", "content", "says"),
    [
        ("a.toml", b"port =", "is not valid TOML"),
        ("a.ini", b"", "must be named .yaml, .yml or .toml"),
        ("a.yaml", b"\xff", "cannot be read: it is not UTF-8"),
        ("a.yaml", None, "cannot be read: No such file"),
    ],
)
def test_files_that_cannot_be_read(tmp_path: Path, name: str, content: bytes | None, says: str) -> None:
    if content is not None:
        (tmp_path / name).write_bytes(content)
    result = inside("cache", "ls", "--config", str(tmp_path / name))
    assert result.returncode == 2
    assert result.stderr.startswith(f"afterglow: error: --config {tmp_path / name} {says}")


@pytest.mark.parametrize(
    ("variable", "value", "says"),
    [
        ("API_KYE", "x", "the variable AFTERGLOW_API_KYE is no option; did you mean AFTERGLOW_API_KEY"),
        ("SERVE_PROMPT", "x", "the variable AFTERGLOW_SERVE_PROMPT is no option"),
        ("XYZ", "x", "the variable AFTERGLOW_XYZ is no option; afterglow COMMAND --help lists them"),
        (
            "PORT",
            "x",
            "AFTERGLOW_PORT: 'x' is not a whole number; write it in digits; AFTERGLOW_SERVE_PORT is for `serve`",
        ),
        ("SERVE_PORT", "-1", "AFTERGLOW_SERVE_PORT must be between 0 and 65535, got -1"),
        (
            "SERVE_RELAY",
            "of",
            "AFTERGLOW_SERVE_RELAY: 'of' is not one of 'auto', 'on', 'off'; the command line goes before",
        ),
        ("STOP", "[1", None),  # of another command
        ("API_KEY", '["a"', "AFTERGLOW_API_KEY must be one value, or a list in JSON such as"),
        ("CONFIG", "/nowhere.toml", "--config /nowhere.toml cannot be read"),
    ],
)
def test_what_is_wrong_in_a_variable_is_named(
    called: Called, monkeypatch: pytest.MonkeyPatch, variable: str, value: str, says: str | None
) -> None:
    monkeypatch.setenv(NAMES + variable, value)
    result = inside("serve")
    assert (result.returncode == 0) is (says is None)
    assert says is None or result.stderr.startswith(f"afterglow: error: {says}"), result.stderr


def test_arguments_and_groups_read_them_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AFTERGLOW_CACHE_CACHE_DIR", str(tmp_path / "none"))
    result = inside("cache", "ls")
    assert "there is no cache directory" in result.stderr
    monkeypatch.delenv("AFTERGLOW_CACHE_CACHE_DIR")
    path = tmp_path / "simulate.toml"
    path.write_text('[simulate]\nworkload = "sharegpt-atc"\nconversations = 3\nsweep = ["disk=0,1T"]\n')
    rows = inside("simulate", "--config", str(path), "--conversations", "2").stdout.splitlines()
    assert [row.split()[0] for row in rows] == ["disk", "0", "1T"]


def test_what_was_not_typed_is_not_held_against_a_replay_or_an_operator(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AFTERGLOW_DRAM", "1G")
    monkeypatch.setenv("AFTERGLOW_SIMULATE_MODEL", "OPT-13B")
    out = inside("simulate", "--operator", "importance", "--prefix", "1024").stdout
    assert "OPT-13B" in out


def test_a_variable_belongs_to_one_option() -> None:
    """No option of all commands is called as a command with its own option is."""
    known = options_by_command(get_command(app))
    of_one = {f"{command}_{name}" for command, names in known.items() for name in names}
    assert not of_one & set().union(*known.values())


def test_an_option_has_one_name_in_files_variables_and_on_the_command_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def parameters(command: Any) -> Iterator[Any]:
        yield from command.params
        for inner in getattr(command, "commands", {}).values():
            yield from parameters(inner)

    options = [each for each in parameters(get_command(app)) if each.param_type_name == "option"]
    assert len(options) > 100
    assert not [each for each in options if f"--{each.name.replace('_', '-')}" not in each.opts]
    path = tmp_path / "options.yaml"
    path.write_text("cache: {json: true}")
    ls = ("cache", "ls", "--cache-dir", str(tmp_path))
    assert inside(*ls, "--config", str(path)).stdout == "[]\n"
    monkeypatch.setenv("AFTERGLOW_JSON", "true")
    assert inside(*ls).stdout == "[]\n"


def test_completion_knows_commands_options_and_choices() -> None:
    def complete(words: str) -> list[str]:
        code = "from afterglow.cli import main; import sys; sys.argv[0] = 'afterglow'; main()"
        env = {"_AFTERGLOW_COMPLETE": "complete_bash", "COMP_WORDS": words, "COMP_CWORD": str(words.count(" "))}
        ran = subprocess.run(
            [sys.executable, "-c", code], env=env, capture_output=True, text=True, timeout=60, check=False
        )
        return ran.stdout.split()

    assert complete("afterglow se") == ["serve"]
    assert complete("afterglow cache un") == ["unpin", "unregister"]
    assert complete("afterglow serve --host") == ["--host", "--host-cache"]
    assert complete("afterglow serve --policy l") == ["lookahead", "lru", "lfu"]
