"""What the README prints is what its sources say now."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from scripts import readme

from benchmarks import readme_tables

ROOT = Path(__file__).parents[2]


def test_what_is_printed_is_what_the_sources_say() -> None:
    for name in readme.DOCUMENTS:
        found = readme.stale(name, (ROOT / name).read_text("utf-8"))
        assert not found, (
            "\n".join(region.difference for region in found) + "\npython -m scripts.readme --write mends it"
        )


def test_every_printed_command_is_generated() -> None:
    """A block that begins with a prompt shows what a command printed: it must not be typed by hand."""
    for name in readme.DOCUMENTS:
        text = (ROOT / name).read_text("utf-8")
        printed = re.findall(r"^\$ (.+)$", text, re.MULTILINE)
        assert printed == [r["source"] for r in readme.REGION.finditer(text) if r["kind"] == "command"]
        assert text.count("<!-- generated: ") == len(readme.REGION.findall(text))


def test_a_stale_region_is_found_and_mended() -> None:
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
    with pytest.raises(ValueError, match="no generated text of kind 'other'; there are command, table, papers"):
        readme.regenerate("<!-- generated: other: x -->\n<!-- end of generated -->")
    with pytest.raises(ValueError, match="only afterglow's own commands"):
        readme.command("rm -r x")


def test_every_table_of_figures_is_generated() -> None:
    """Under "Measured" no table is typed by hand, and each says whether its run was a quick one."""
    text = (ROOT / "README.md").read_text("utf-8")
    measured = text[text.index("\n## Measured\n") : text.index("\n## Embeddings\n")]
    regions = [region for region in readme.REGION.finditer(measured) if region["kind"] == "table"]
    assert len(regions) > 5
    by_hand = readme.REGION.sub("", measured)
    assert not re.findall(r"^\|", by_hand, re.MULTILINE)
    for region in regions:
        assert region["source"] == "peers over HTTP" or re.search("--quick`|a full run", region["text"].split("\n")[1])


def test_a_table_follows_its_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = json.loads((readme_tables.RESULTS / "multiturn.json").read_text())
    found["rows"][0]["ttft_ms"]["device"] = 123456.0
    found["quick"] = not found["quick"]
    (tmp_path / "multiturn.json").write_text(json.dumps(found))
    monkeypatch.setattr(readme_tables, "RESULTS", tmp_path)
    text = "".join(
        r[0] + "<!-- end of generated -->"
        for r in readme.REGION.finditer((ROOT / "README.md").read_text())
        if r["source"] == "multiturn"
    )
    (stale,) = readme.stale("x.md", text)
    assert "123,456 ms" in stale.difference
    assert "multiturn --quick`" in stale.difference
    assert "`, a full run" in stale.difference
    with pytest.raises(ValueError, match="no table 'none'; there are multiturn"):
        readme.KINDS["table"]("none")
