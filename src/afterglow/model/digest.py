"""The model digest: the name under which keys and values are stored; no other model ever reads them."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import tempfile
from pathlib import Path

import platformdirs

from afterglow.choices import KeptWeights
from afterglow.model.checkpoint import Progress, read_json, weight_files
from afterglow.model.loader import is_preset, read_spec
from afterglow.model.presets import PRESETS
from afterglow.model.quantized import unpacking

KV_LAYOUT_VERSION = 1  # raise it whenever the same weights would yield differently laid out keys and values
READ_BYTES = 8 << 20


def numeric_mode(compute_dtype: str, kv_dtype: str, quantization: KeptWeights = "none") -> str:
    """Return the properties of the arithmetic that a digest depends on, as text."""
    quantized = "" if quantization == "none" else f",weights={quantization}"
    return f"compute={compute_dtype},kv={kv_dtype}{quantized}"


def model_digest(
    model: str | Path,
    mode: str,
    *,
    seed: int = 0,
    context: int | None = None,
    cache_file: Path | None = None,
    progress: Progress | None = None,
) -> str:
    """Return 64 hex digits that name everything that stored KV depends on, besides its tokens.

    SHA-256 over every weight byte, the config fields that matter, `mode` (see `numeric_mode`) and the KV
    layout version; for a preset over its spec and `seed`. `context`: the longest context in tokens, None for the model's own; windows
    that are no shorter change nothing (see `ModelSpec.within`). File hashes are remembered in `cache_file`
    (default: in the user's cache directory) by path, size, modification time and inode.

    Raises: ModelError if a file of the model cannot be read.
    """
    if is_preset(model):
        spec = PRESETS[str(model)]
        hashes = [f"random weights, seed {seed}"]
    else:
        spec, _ = read_spec(Path(model))
        files = weight_files(Path(model))
        hashes = _file_hashes(files, cache_file or default_cache_file(), progress) + _packing(Path(model))
    spec = spec.within(spec.max_positions if context is None else context)
    parts = [f"kv layout {KV_LAYOUT_VERSION}", mode, spec.fingerprint(), *hashes]
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()


def _packing(model: Path) -> list[str]:
    """Return how matrices of a quantised checkpoint are packed, which its weights' files do not say."""
    config = model / "config.json"
    unpack = unpacking(read_json(config)) if config.is_file() else None
    return [] if unpack is None else [f"packed as {unpack.__name__}"]


def default_cache_file() -> Path:
    """Return the file where hashes are remembered."""
    return Path(platformdirs.user_cache_dir("afterglow")) / "weight-hashes.json"


def _file_hashes(files: list[Path], cache_file: Path, progress: Progress | None) -> list[str]:
    known = _read_cache(cache_file)
    total, done, fresh = sum(path.stat().st_size for path in files), 0, {}
    hashes = []
    for path in files:
        about = path.stat()
        key = f"{path.resolve()}|{about.st_size}|{about.st_mtime_ns}|{about.st_ino}"
        if key not in known:
            fresh[key] = _hash(path, done, total, progress)
        hashes.append(known.get(key) or fresh[key])
        done += about.st_size
        if progress is not None:
            progress(done, total)
    if fresh:
        _write_cache(cache_file, known | fresh)
    return hashes


def _hash(path: Path, done: int, total: int, progress: Progress | None) -> str:
    digest = hashlib.sha256()
    buffer = memoryview(bytearray(READ_BYTES))
    with path.open("rb", buffering=0) as file:
        while count := file.readinto(buffer):
            digest.update(buffer[:count])
            done += count
            if progress is not None:
                progress(done, total)
    return digest.hexdigest()


def _read_cache(path: Path) -> dict[str, str]:
    """Return the remembered hashes; none if the file is absent or damaged: hashing again is only slower."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    if not isinstance(value, dict):
        return {}
    return {key: text for key, text in value.items() if isinstance(text, str) and len(text) == 64}


def _write_cache(path: Path, hashes: dict[str, str]) -> None:
    with contextlib.suppress(OSError):  # a read-only home costs a rehash at the next start, nothing else
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=path.name)
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            json.dump(hashes, file, indent=1)
        os.replace(temporary, path)
