"""What docs/gpu.md prints of the pretend device is what it counts now."""

from __future__ import annotations

import importlib.util

import pytest
from scripts.gpu_tables import PAGE, REGION, printed


@pytest.mark.long
@pytest.mark.timeout(1200)
@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="Triton is not installed (the extra gpu)")
def test_triton_counts_are_those_of_the_page() -> None:
    regions = {region["source"]: region["text"] for region in REGION.finditer(PAGE.read_text("utf-8"))}
    assert regions["tests.device.counts"] == printed("tests.device.counts"), "python -m scripts.gpu_tables mends it"
