"""What the HTTP side can be told. Light to import: the command line builds its flags from these fields."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from afterglow.config import option
from afterglow.errors import ConfigError

LogLevel = Literal["debug", "info", "warning", "error"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerConfig:
    """Where to listen, whom to serve, and how long to wait at the end."""

    host: str = option("127.0.0.1", "Address to listen on; 0.0.0.0 is every interface.")
    port: int = option(8000, "Port to listen on; 0 takes a free one.")
    served_model_name: tuple[str, ...] = option(
        (), "Name of the model in the API, may be given several times; default: the model's own name."
    )
    api_key: tuple[str, ...] = option(
        (),
        "Key that requests must carry, may be given several times (one per tenant: their caches are apart); "
        "default: the variable AFTERGLOW_API_KEY, or no key.",
    )
    max_body: int = option(16 * 1024**2, "Bytes of the largest request body; larger ones get status 413.")
    grace: float = option(5.0, "Seconds that running requests may go on after SIGTERM or Ctrl-C.")
    log_level: LogLevel = option("info", "How much to log: debug, info, warning or error.")

    def __post_init__(self) -> None:
        if not 0 <= self.port < 65536:
            raise ConfigError(f"--port must be between 0 and 65535, got {self.port}")
        if self.max_body < 1:
            raise ConfigError(f"--max-body must be at least 1, got {self.max_body}")
        if not 0 <= self.grace <= 3600:
            raise ConfigError(f"--grace must be between 0 and 3600 seconds, got {self.grace}")
        for name in ("served_model_name", "api_key"):
            if not all(getattr(self, name)):
                raise ConfigError(f"--{name.replace('_', '-')} cannot be empty")
