"""The process that reads large bodies: when it ends."""

from __future__ import annotations

import asyncio

import pytest

from afterglow.server.bodies.reader import BodyReader
from afterglow.server.bodies.text_bodies import TokenizeBody


def test_only_the_last_body_decides_when_the_process_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    async def main() -> list[asyncio.TimerHandle]:
        loop = asyncio.get_running_loop()
        timers: list[asyncio.TimerHandle] = []
        later = loop.call_later

        def call_later(*args: object) -> asyncio.TimerHandle:
            timers.append(later(*args))  # type: ignore[arg-type]
            return timers[-1]

        monkeypatch.setattr(loop, "call_later", call_later)
        bodies = BodyReader(1024)
        body = bytearray(b'{"prompt": "hi"}')
        await asyncio.gather(*(bodies._elsewhere(body, TokenizeBody) for _ in range(3)))
        left = [timer for timer in timers if not timer.cancelled()]
        bodies.close()
        return left

    assert len(asyncio.run(main())) == 1
