"""The compatibility page says what the tests have cases for."""

from __future__ import annotations

import pytest
from scripts.compatibility import COLUMNS, FORMATS, MODELS, PAGE, Column, kind_of, page

from afterglow.model.families import FAMILIES


def test_the_page_is_up_to_date() -> None:
    assert PAGE.read_text("utf-8") == page(), "python -m scripts.compatibility --write mends it"


def test_it_follows_the_tests(monkeypatch: pytest.MonkeyPatch) -> None:
    """A case that a test loses is a cell that the page loses."""
    cases = Column.cases
    without = [case for case in cases(COLUMNS[0]) if kind_of(case) != "olmo2"]
    monkeypatch.setattr(Column, "cases", lambda column: without if column is COLUMNS[0] else cases(column))
    (line,) = (line for line in page().splitlines() if line.startswith("| `olmo2` |"))
    assert line.startswith(f"| `olmo2` | {MODELS['olmo2']} | | 2 |")


def test_cases_are_those_of_the_tests() -> None:
    assert "llama-yarn" in COLUMNS[0].cases()
    assert {"Q4_K", "MXFP4"} < set(FORMATS[0].cases())
    assert [kind_of(case) for case in ("llama-yarn", "qwen3-moe", "gpt2", "phi4-mini", "falcon")] == [
        *("llama", "qwen3_moe", "gpt2", "phi3", "falcon")
    ]
    assert MODELS.keys() == FAMILIES.keys()
    with pytest.raises(ValueError, match="is not parametrised with 'x'"):
        Column("", "", COLUMNS[0].module, COLUMNS[0].test, "x").cases()
    with pytest.raises(AttributeError, match="test_none"):
        Column("", "", COLUMNS[0].module, "test_none", "x").cases()
