"""Folders of the checkout that programs read and write."""

from __future__ import annotations

from pathlib import Path

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "benchmarks" / "results"
DOCS = ROOT / "docs"
IMAGES = DOCS / "images"
