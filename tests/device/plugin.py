"""Run suites on the pretend device, or with `--real-device` on a real one: `pytest -p tests.device.plugin --pretend-device --answers FILE tests/engine/test_relay.py`.

`--answers FILE` writes the tokens of each test's replies as JSON, also without the device, so that both can be compared. Written are all
replies that came to their end, of whatever asked the engine, in the order of their prompts: threads may ask in any order.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
from collections import Counter, defaultdict
from collections.abc import Callable, Generator
from pathlib import Path
from typing import Any

import pytest

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
REFUSED = "computes on CPU in float32, not on cuda"  # quantised weights

answers: dict[str, list[tuple[str, list[int]]]] = defaultdict(list)
"""By test: of each reply that has ended, a digest of its prompt, and its tokens."""
all_given_up: Counter[str] = Counter()


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--pretend-device", action="store_true", help="Engines run on a pretend CUDA device.")
    parser.addoption("--real-device", action="store_true", help="Engines run on the CUDA device of this machine.")
    parser.addoption("--answers", type=Path, help="Write the tokens of all replies, by test, to this file.")


@pytest.hookimpl(tryfirst=True)
def pytest_load_initial_conftests(early_config: pytest.Config) -> None:
    """Change torch before a conftest imports the package."""
    if early_config.known_args_namespace.pretend_device:
        import tests.conftest  # sets threads and folders

        assert tests.conftest is not None
        from tests.device import pretend

        pretend.install()
        pretend.use_by_default()
    elif early_config.known_args_namespace.real_device:
        from tests.device import pretend

        pretend.use_by_default()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Generator[None]:
    """Let tests compute on the device too."""
    pretended = item.config.getoption("--pretend-device")
    if not (pretended or item.config.getoption("--real-device")):
        return (yield)
    from afterglow.errors import ConfigError
    from afterglow.kernels.gate import refused
    from tests.device import pretend

    with pretend.active() if pretended else contextlib.nullcontext():
        try:
            found = yield
        except ConfigError as error:
            if REFUSED not in str(error):
                raise
            pytest.skip(f"refused by name: {error}")
    given_up = dict(refused)
    refused.clear()
    all_given_up.update(given_up)
    assert (pretended and not INTERPRETED) or not given_up, f"kernels were given up: {given_up}"
    return found


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    """Say which kernels ran."""
    if config.getoption("--pretend-device"):
        from tests.device.watching import watch

        terminalreporter.write_line(f"{watch.counts['launches of Triton']} launches of kernels of Triton's")
    if all_given_up:
        terminalreporter.write_line(f"kernels of Triton's that were given up: {dict(all_given_up)}")


def pytest_configure(config: pytest.Config) -> None:
    from afterglow.engine.cached_attention import RelayCosts
    from afterglow.engine.loop import EngineLoop
    from afterglow.request import Output, Request

    if config.getoption("--pretend-device") and INTERPRETED:
        # Measured in the interpreter, at each start, it would take minutes and say nothing of a device.
        costs = RelayCosts(((1, 1e-6), (32, 4e-6)), 1e-5, 1e-6)
        RelayCosts.measured = classmethod(lambda cls, shape, heads: costs)  # type: ignore[assignment, method-assign]

    prepare = EngineLoop.prepare

    def prepared(self: EngineLoop, request: Request, sink: Callable[[Output], object], *more: Any, **how: Any) -> Any:
        test = os.environ.get("PYTEST_CURRENT_TEST", "").rpartition(" ")[0]
        prompt = hashlib.blake2b(str(list(request.prompt)).encode(), digest_size=8).hexdigest()
        tokens: list[int] = []

        def take(output: Output) -> None:
            tokens.extend(output.tokens)
            if output.finish_reason in ("stop", "length"):  # how far others come depends on the time
                answers[test].append((prompt, tokens))
            sink(output)

        return prepare(self, request, sink if how.get("own") else take, *more, **how)

    EngineLoop.prepare = prepared  # type: ignore[method-assign]


def pytest_unconfigure(config: pytest.Config) -> None:
    path = config.getoption("--answers")
    if path is not None:
        path.write_text(json.dumps({test: sorted(found) for test, found in answers.items()}))
