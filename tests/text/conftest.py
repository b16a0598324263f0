from __future__ import annotations

from pathlib import Path

import pytest

from afterglow.text import Tokenizer
from tests.text import toys

BUNDLED = Path(__file__).parents[2] / "src/afterglow/assets/model"


@pytest.fixture(scope="session")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    base = tmp_path_factory.mktemp("tokenizers")
    found = {
        "byte_level": toys.byte_level(base / "byte_level"),
        "byte_fallback": toys.metaspace(base / "byte_fallback"),
        "metaspace": toys.metaspace(base / "metaspace", byte_fallback=False),
    }
    if (BUNDLED / "tokenizer.json").is_file():
        found["bundled"] = BUNDLED
    return found


@pytest.fixture(scope="session")
def tokenizers(folders: dict[str, Path]) -> dict[str, Tokenizer]:
    return {name: Tokenizer(folder) for name, folder in folders.items()}


@pytest.fixture(scope="session")
def byte_level(tokenizers: dict[str, Tokenizer]) -> Tokenizer:
    return tokenizers["byte_level"]


@pytest.fixture(scope="session")
def llama(tokenizers: dict[str, Tokenizer]) -> Tokenizer:
    return tokenizers["byte_fallback"]
