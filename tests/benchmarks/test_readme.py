"""What the README prints is what its sources say now."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def readme() -> ModuleType:
    spec = importlib.util.spec_from_file_location("readme", ROOT / "scripts/readme.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_what_is_printed_is_what_the_sources_say(readme: ModuleType) -> None:
    for name in readme.DOCUMENTS:
        found = readme.stale(name, (ROOT / name).read_text("utf-8"))
        assert not found, "\n".join(region.difference for region in found) + "\nscripts/readme.py --write mends it"


def test_every_printed_command_is_generated(readme: ModuleType) -> None:
    """A block that begins with a prompt shows what a command printed: it must not be typed by hand."""
    for name in readme.DOCUMENTS:
        text = (ROOT / name).read_text("utf-8")
        printed = re.findall(r"^\$ (.+)$", text, re.MULTILINE)
        assert printed == [r["source"] for r in readme.REGION.finditer(text) if r["kind"] == "command"]
        assert text.count("<!-- generated: ") == len(readme.REGION.findall(text))


def test_a_stale_region_is_found_and_mended(readme: ModuleType) -> None:
    text = "a\n<!-- generated: command: afterglow --version -->\nold\n<!-- end of generated -->\nb\n"
    (region,) = readme.stale("x.md", text)
    assert (region.kind, region.source) == ("command", "afterglow --version")
    assert "-old" in region.difference
    mended = readme.regenerate(text)
    assert mended.startswith(
        "a\n<!-- generated: command: afterglow --version -->\n```\n$ afterglow --version\nafterglow "
    )
    assert mended.endswith("\n```\n<!-- end of generated -->\nb\n")
    assert readme.stale("x.md", mended) == []
    with pytest.raises(ValueError, match="no generated text of kind 'other'; there are command"):
        readme.regenerate("<!-- generated: other: x -->\n<!-- end of generated -->")
    with pytest.raises(ValueError, match="only afterglow's own commands"):
        readme.command("rm -r x")
