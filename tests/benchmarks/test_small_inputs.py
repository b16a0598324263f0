"""Benchmarks that are asked for too little say so."""

from __future__ import annotations

from pathlib import Path
from unittest import mock

import pytest
from benchmarks.engine import kv_dtypes, scale

from afterglow.errors import ConfigError


def test_a_catalog_below_the_smallest_size_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        scale.main(["--extents", "5000"])
    assert "--extents must be 10000 or more, the smallest size, got 5000" in capsys.readouterr().err


def test_a_text_below_one_window_is_refused(tmp_path: Path) -> None:
    text = tmp_path / "short.txt"
    text.write_text("one two three")
    with pytest.raises(ConfigError, match=r"short.txt has \d+ tokens; give a text of more than 1280"):
        kv_dtypes.perplexity(mock.Mock(spec=kv_dtypes.Judge), kv_dtypes.BUNDLED, text, 4)
