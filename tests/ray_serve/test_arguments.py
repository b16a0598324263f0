"""What `afterglow.ray:app` takes, and how conversations and folders are given to replicas: without Ray."""

from __future__ import annotations

import os
import subprocess
import sys
from collections import Counter
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import yaml

from afterglow.config import CacheConfig, EngineConfig
from afterglow.errors import ConfigError
from afterglow.ray.deploy_options import DeployOptions, read_arguments
from afterglow.ray.replica_folder import own_folder, ranked
from afterglow.server.server_config import ServerConfig
from tests.docs.code_blocks import code_blocks

# ------------------------------------------------------------------------------------------------------- arguments


@pytest.fixture(autouse=True)
def no_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in os.environ if name.startswith("AFTERGLOW_")]:
        monkeypatch.delenv(name)


def test_arguments_are_text_or_values_of_yaml() -> None:
    text = {"model": "a/model", "replicas": "2", "max_replicas": "4", "gpus": "1", "host_cache": "8G"}
    text |= {"api-key": "one", "warm_start": "false", "grace": "7"}
    values = {"model": "a/model", "replicas": 2, "max_replicas": 4, "gpus": 1, "host_cache": "8G"}
    values |= {"api_key": ["one"], "warm_start": False, "grace": 7}
    found = read_arguments(text)
    assert found == read_arguments(values)
    assert found.options == DeployOptions(replicas=2, max_replicas=4, gpus=1)
    assert found.model == "a/model"
    assert found.server == ServerConfig(api_key=("one",), grace=7)
    cache = CacheConfig(host_cache=8 * 1024**3, warm_start=False, write_policy="write_through")
    assert found.config == EngineConfig(cache=cache, threads=1)
    assert read_arguments({}).model is None
    several = read_arguments({"api_key": ["one", "two"], "cpus": 2.5})
    assert several.server.api_key == ("one", "two")
    assert several.config.threads == 2
    assert read_arguments({"cpus": 8, "threads": 3}).config.threads == 3


def test_variables_and_the_file_count_as_for_serve(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    file = tmp_path / "config.yaml"
    file.write_text("host_cache: 1G\nserve:\n  disk_cache: 3G\n  write_policy: write_back\nchat:\n  system: hello\n")
    monkeypatch.setenv("AFTERGLOW_ADMIN_KEY", "secret")
    monkeypatch.setenv("AFTERGLOW_SERVE_DEVICE_CACHE", "5G")
    found = read_arguments({"config": str(file), "host_cache": "2G"})
    gigabyte = 1024**3
    assert found.config.cache == CacheConfig(
        host_cache=2 * gigabyte, disk_cache=3 * gigabyte, device_cache=5 * gigabyte, write_policy="write_back"
    )
    assert found.server.admin_key == "secret"


@pytest.mark.parametrize(
    ("args", "said"),
    [
        ({"replicas": "two"}, "replicas must be a number, got 'two'"),
        ({"replicas": 0}, "replicas must be at least 1, got 0"),
        ({"replicas": 3, "max_replicas": 2}, "max_replicas must be at least replicas (3), got 2"),
        ({"gpus": -1}, "gpus must be 0 or more, got -1.0"),
        ({"shard": "x"}, "no such option: --shard"),
        ({"host_cache": "much"}, "--host-cache"),
        ({"port": 9000}, "port is Ray's to choose"),
        ({"journal": "/tmp/journal"}, "journal /tmp/journal cannot be the same for all replicas"),
        ({"kv_events": "tcp://127.0.0.1:5557"}, "kv_events tcp://127.0.0.1:5557 cannot be the same for all replicas"),
        ({"help": "true"}, "only shows something"),
        ({"admin_key": None}, "admin_key has no value; give it one, or leave it out"),
        ({"api-key": ["one", None]}, "api_key has no value"),
    ],
)
def test_mistakes_are_named(args: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError) as error:
        read_arguments(args)
    assert said in str(error.value)
    assert "\n" not in str(error.value)


def test_what_the_document_shows_is_taken() -> None:
    (file,) = (yaml.safe_load(block.code) for block in code_blocks("yaml") if "afterglow.ray:app" in block.code)
    (application,) = file["applications"]
    found = read_arguments(application["args"])
    assert (found.options.replicas, found.config.cache.warm_start) == (2, False)
    commands = [block.code for block in code_blocks("sh") if "serve run afterglow.ray:app" in block.code]
    typed = [line.split()[3:] for code in commands for line in code.splitlines() if line.startswith("serve run")]
    assert typed
    for arguments in typed:
        read_arguments(dict(argument.split("=", 1) for argument in arguments))


# --------------------------------------------------------------------------------------------------------- affinity


def test_a_conversation_has_one_place_and_changes_it_only_with_the_place() -> None:
    places = [f"machine:/cache/replica-{number}" for number in range(4)]
    sessions = [f"conversation {number}" for number in range(2000)]
    own = {session: ranked(session, places)[0] for session in sessions}
    assert own == {session: ranked(session, reversed(places))[0] for session in sessions}
    assert all(400 < count < 600 for count in Counter(own.values()).values())  # 500, five standard deviations
    without = {session: ranked(session, places[:3])[0] for session in sessions}
    assert {session for session in sessions if without[session] != own[session]} == {
        session for session in sessions if own[session] == places[3]
    }
    assert all(without[session] == ranked(session, places)[1] for session in sessions if own[session] == places[3])
    assert ranked("\udcff", places)  # whatever a header held


# ---------------------------------------------------------------------------------------------------------- folders


def test_a_replica_takes_the_first_folder_that_is_free(tmp_path: Path) -> None:
    with ExitStack() as others:
        first = others.enter_context(own_folder(tmp_path / "cache"))
        with own_folder(tmp_path / "cache") as second:
            assert (first.name, second.name) == ("replica-1", "replica-2")
            others.close()
            with own_folder(tmp_path / "cache") as again:
                assert again == first
    assert first.stat().st_mode & 0o077 == 0


HOLDER = """
import sys
from pathlib import Path
from afterglow.ray.replica_folder import own_folder
with own_folder(Path(sys.argv[1])) as folder:
    print(folder.name, flush=True)
    sys.stdin.read()
"""


def test_the_folder_of_a_killed_process_is_free(tmp_path: Path) -> None:
    command = [sys.executable, "-c", HOLDER, str(tmp_path)]
    holder = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert holder.stdout is not None
    assert holder.stdin is not None
    assert holder.stdout.readline() == "replica-1\n"
    with own_folder(tmp_path) as beside:
        assert beside.name == "replica-2"
    holder.kill()
    holder.wait()
    with own_folder(tmp_path) as folder:
        assert folder.name == "replica-1"
    holder.stdout.close()
    holder.stdin.close()
