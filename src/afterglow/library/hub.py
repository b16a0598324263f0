"""Models of the Hugging Face hub: those that were downloaded before, and downloads of others, by the hub's own library."""

from __future__ import annotations

import glob
import json
import re
from pathlib import Path
from typing import NamedTuple

from afterglow.errors import ModelError
from afterglow.gguf_file import PART, part_paths

_NAME = re.compile(r"(?P<repository>[\w-][\w.-]*/[\w.-]+)(?::(?P<file>[^:]+\.gguf))?")
_WEIGHTS = ".safetensors"
_SINGLE, _INDEX = "model.safetensors", "model.safetensors.index.json"
_OTHER_COPIES = ("consolidated",)  # the same weights under the names of other programs
_TOKENIZERS = ("tokenizer.json", "vocab.txt")
_POOLING = "1_Pooling/config.json"  # how an encoder's vectors are made
MOST_NAMES = 8  # files that an error lists


class HubModel(NamedTuple):
    """A model on the hub: a repository of safetensors, or one GGUF file in a repository."""

    repository: str
    file: str | None

    @classmethod
    def parse(cls, model: str) -> HubModel | None:
        """Read `OWNER/NAME` or `OWNER/NAME:FILE.gguf`; None if the text is neither."""
        found = _NAME.fullmatch(model)
        return None if found is None else cls(found["repository"], found["file"])

    def __str__(self) -> str:
        """Return the text that names the model."""
        return self.repository if self.file is None else f"{self.repository}:{self.file}"


def in_cache(model: HubModel) -> Path | None:
    """Find a model that was downloaded before, also by other programs: its directory or its (first) GGUF file. Asks no network."""
    from huggingface_hub import try_to_load_from_cache

    try:
        found = try_to_load_from_cache(model.repository, model.file or "config.json")
    except ValueError:  # no repository can have this name
        return None
    if not isinstance(found, str):
        return None
    return Path(found).parent if model.file is None else Path(found)


def is_whole(path: Path) -> bool:
    """Check whether no file of weights is missing, nor the tokenizer: a download may have ended in the middle."""
    if not path.is_dir():
        try:
            return bool(part_paths(path))
        except ModelError:
            return False
    if not any((path / name).is_file() for name in _TOKENIZERS):
        return False
    if (path / _SINGLE).is_file():
        return True
    try:
        names = json.loads((path / _INDEX).read_text("utf-8"))["weight_map"].values()
        return all((path / name).is_file() for name in names)
    except (OSError, ValueError, KeyError, AttributeError, TypeError):
        return False


def download(model: HubModel) -> Path:
    """Download what is missing of a model, with a progress bar on a terminal, and return its directory or GGUF file.

    Raises: ModelError: one line that says what the hub has answered, or that the file is not there.
    """
    from huggingface_hub import HfApi, constants, snapshot_download
    from huggingface_hub.errors import GatedRepoError, OfflineModeIsEnabled, RepositoryNotFoundError

    hub = constants.ENDPOINT
    try:
        files = [entry.rfilename for entry in HfApi().model_info(model.repository).siblings or ()]
        names = [glob.escape(name) for name in _wanted(model, files)]  # the hub's library takes patterns
        folder = Path(snapshot_download(model.repository, allow_patterns=names))
    except ModelError:
        raise
    except GatedRepoError:
        raise ModelError(
            f"{model.repository} is gated: accept its terms at {hub}/{model.repository}, and log in (hf auth login, or the "
            "variable HF_TOKEN)"
        ) from None
    except RepositoryNotFoundError:
        raise ModelError(
            f"{hub} has no model {model.repository}, or it is private: then log in (hf auth login)"
        ) from None
    except OfflineModeIsEnabled:
        raise ModelError(f"{model} was not downloaded before, and HF_HUB_OFFLINE forbids downloads") from None
    except (
        Exception
    ) as error:  # the errors of the hub's library depend on its version, and those of its transport on that
        raise ModelError(f"{model} cannot be downloaded from {hub}: {_first_line(error)}") from None
    path = folder if model.file is None else folder / model.file
    if not path.exists():
        raise ModelError(f"the download of {model} has ended without the file; download it again")
    return path


def _wanted(model: HubModel, files: list[str]) -> list[str]:
    """Choose the files of a repository that belong to the model. Raises: ModelError if it has no such weights."""
    ggufs = [name for name in files if name.endswith(".gguf")]
    listed = ", ".join(ggufs[:MOST_NAMES]) + (", ..." if len(ggufs) > MOST_NAMES else "")
    if model.file is not None:
        if model.file not in ggufs:
            raise ModelError(f"{model.repository} has no file {model.file}; its GGUF files: {listed or 'none'}")
        split = PART.fullmatch(model.file)
        parts = rf"{re.escape(split['stem'])}-\d{{5}}-of-{split['count']}\.gguf" if split else re.escape(model.file)
        return [name for name in ggufs if re.fullmatch(parts, name)]
    wanted = [
        name
        for name in files
        if name in ("vocab.txt", _POOLING)
        or ("/" not in name and name.endswith((_WEIGHTS, ".json", ".jinja")) and not name.startswith(_OTHER_COPIES))
    ]
    if any(name.endswith(_WEIGHTS) for name in wanted):
        return wanted
    if ggufs:
        raise ModelError(f"{model.repository} has GGUF files: name one, as in {model.repository}:{ggufs[0]} ({listed})")
    raise ModelError(
        f"{model.repository} has no safetensors and no GGUF file, so there are no weights that can be read"
    )


def _first_line(error: Exception) -> str:
    return next(iter(str(error).strip().splitlines()), type(error).__name__)
