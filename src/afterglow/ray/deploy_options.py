"""The arguments of `afterglow.ray:app`: a few for Ray, and the options of `afterglow serve`. Needs no Ray."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from afterglow.cli.commands import app
from afterglow.cli.parameters import parse
from afterglow.config import EngineConfig
from afterglow.errors import ConfigError
from afterglow.server.server_config import ServerConfig

RAYS_OWN = (
    "host", "port", "ssl_certfile", "ssl_keyfile", "max_connections", "header_timeout", "body_timeout"
)  # fmt: skip
_KINDS: dict[str, type[int] | type[float]] = {"replicas": int, "max_replicas": int, "cpus": float, "gpus": float}


@dataclass(frozen=True, kw_only=True)
class DeployOptions:
    """What Ray is asked for: replicas, at most so many where they are added by load, and each one's cores and GPUs."""

    replicas: int = 1
    max_replicas: int | None = None
    cpus: float = 1
    gpus: float = 0

    def __post_init__(self) -> None:
        if self.replicas < 1:
            raise ConfigError(f"replicas must be at least 1, got {self.replicas}")
        if self.max_replicas is not None and self.max_replicas < self.replicas:
            raise ConfigError(f"max_replicas must be at least replicas ({self.replicas}), got {self.max_replicas}")
        for name, value in (("cpus", self.cpus), ("gpus", self.gpus)):
            if not 0 <= value < 10**6:
                raise ConfigError(f"{name} must be 0 or more, got {value}")


@dataclass(frozen=True)
class ServedWith:
    """All settings of a deployment."""

    options: DeployOptions
    model: str | None
    server: ServerConfig
    config: EngineConfig


def read_arguments(args: Mapping[str, Any]) -> ServedWith:
    """Read the arguments, as text or as YAML's values; variables and `config` count as for `afterglow serve`.

    Raises: ConfigError.
    """
    names = {name.replace("-", "_"): value for name, value in args.items()}
    for name, value in names.items():
        if value is None or (
            isinstance(value, list | tuple) and None in value
        ):  # a key would be the word None, or missing
            raise ConfigError(f"{name} has no value; give it one, or leave it out")
    for name in RAYS_OWN:
        if name in names:
            raise ConfigError(f"{name} is Ray's to choose: give it to Ray's proxy (http_options), or leave it out")
    options = DeployOptions(**{name: _number(name, names.pop(name)) for name in _KINDS if name in names})
    model = names.pop("model", None)
    found = parse(app, ["serve", *_flags(names), *(["--", str(model)] if model is not None else [])])
    server: ServerConfig = found.configs["server"]
    config: EngineConfig = found.configs["engine"]
    one_each = {
        "kv_events": config.kv_events, "journal": config.journal, "record_trace": server.record_trace
    }  # fmt: skip
    for name, value in one_each.items():
        if value is not None:
            raise ConfigError(f"{name} {value} cannot be the same for all replicas; leave it out")
    if "write_policy" not in found.given.names:  # a replica that is killed writes nothing at its end
        config = replace(config, cache=replace(config.cache, write_policy="write_through"))
    return ServedWith(
        options, found.configs["model"], server, replace(config, threads=config.threads or max(1, int(options.cpus)))
    )


def _number(name: str, value: Any) -> Any:
    try:
        return _KINDS[name](value)
    except (TypeError, ValueError):
        raise ConfigError(f"{name} must be a number, got {value!r}") from None


def _flags(values: Mapping[str, Any]) -> list[str]:
    """Write values as on the command line: `warm_start: false` is `--no-warm-start`."""
    flags = []
    for name, value in values.items():
        flag = name.replace("_", "-")
        for each in value if isinstance(value, list | tuple) else [value]:
            word = str(each).lower()
            if word in ("true", "false"):
                flags.append(f"--{flag}" if word == "true" else f"--no-{flag}")
            else:
                flags.append(f"--{flag}={each}")
    return flags
