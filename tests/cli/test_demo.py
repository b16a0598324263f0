"""The servers of `make demo`."""

from __future__ import annotations

from pathlib import Path

import pytest
from scripts import demo

from tests.cli.kit import SMALL, needs_model


@needs_model
def test_variables_change_neither_the_server_nor_the_way_to_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(demo, "BUILD", tmp_path)
    monkeypatch.setenv("AFTERGLOW_API_KEY", "secret")
    monkeypatch.setenv("HTTP_PROXY", "http://127.0.0.1:9")
    monkeypatch.delenv("NO_PROXY", raising=False)
    monkeypatch.delenv("no_proxy", raising=False)
    args = ["afterglow-small", "--served-model-name", "afterglow", "--cache-dir", str(tmp_path / "cache"), *SMALL]
    server = demo.Server("reuse", args)
    try:
        server.start()
        assert server.ask([{"role": "user", "content": "Hello."}], 2)["usage"]["completion_tokens"] == 2
    finally:
        server.stop()
