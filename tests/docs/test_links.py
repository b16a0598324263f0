"""Relative links, anchors and paths in the documents lead somewhere."""

from __future__ import annotations

import re
import string
from pathlib import Path

import pytest

from tests.docs.code_blocks import DOCUMENTS, ROOT, code_blocks

HISTORY = ("docs/log.md", "CHANGELOG.md")  # name files as they were called then
_LINK = re.compile(r"\[[^\]]*\]\((?P<target>[^)\s]+)\)")
_PATH = re.compile(
    r"`(?P<path>[\w.-]+(?:/[\w.*-]+)+\.(?:py|md|json|toml|c|h|svg|png|html|jinja)|[\w.-]+(?:/[\w-]+)+/)`"
)
_PLACES = (ROOT, ROOT / "src/afterglow", ROOT / "src/afterglow/kernels/native", ROOT / "benchmarks")


def names(paths: list[Path]) -> list[str]:
    return [str(path.relative_to(ROOT)) for path in paths]


def anchors(text: str) -> set[str]:
    """The anchors that GitHub gives the headings of a document."""
    found = re.findall(
        r"^#+ +(.+?) *$", re.sub(r"^```.*?^```$", "", text, flags=re.MULTILINE | re.DOTALL), re.MULTILINE
    )
    kept = string.ascii_lowercase + string.digits + "_- "
    return {"".join(c for c in heading.lower() if c in kept or c.isalpha()).replace(" ", "-") for heading in found}


@pytest.mark.parametrize("document", DOCUMENTS, ids=names(DOCUMENTS))
def test_links_lead_to_files_and_headings(document: Path) -> None:
    for link in _LINK.finditer(document.read_text("utf-8")):
        target, _, anchor = link["target"].partition("#")
        if "://" in target or target.startswith("mailto:"):
            continue
        file = (document.parent / target).resolve() if target else document
        assert file.exists(), f"{link[0]}: there is no {file}"
        assert file.is_relative_to(ROOT), f"{link[0]} leads out of the repository"
        if anchor:
            assert anchor in anchors(file.read_text("utf-8")), f"{link[0]}: {file.name} has no such heading"


NOW = [path for path in DOCUMENTS if str(path.relative_to(ROOT)) not in HISTORY]


@pytest.mark.parametrize("document", NOW, ids=names(NOW))
def test_paths_are_those_of_today(document: Path) -> None:
    missing = [
        found["path"]
        for found in _PATH.finditer(document.read_text("utf-8"))
        if not found["path"].startswith(("build/", "dist/"))
        and not any(list(place.glob(found["path"].rstrip("/"))) for place in _PLACES)
    ]
    assert not missing, f"there is no {', '.join(missing)}"


def test_the_walks_name_files_of_today() -> None:
    """The diagrams of `docs/architecture.md` name files without their endings, from some room on."""
    walks = [block.code for block in code_blocks("") if block.path.name == "architecture.md" and "->" in block.code]
    assert len(walks) == 2
    known = [str(path.relative_to(ROOT / "src/afterglow").with_suffix("")) for path in (ROOT / "src").rglob("*.py")]
    for name in {name for walk in walks for name in re.findall(r"[a-z_]+(?:/[a-z_]+)+", walk)}:
        assert [path for path in known if f"/{path}".endswith(f"/{name}")], f"there is no {name}.py"
