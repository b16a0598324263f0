"""What a tenant may keep in the last tier whatever happens: pinned conversations and registered prompts, over restarts."""

from __future__ import annotations

from tests import doors
from tests.plan.prefix_kit import Prompting

PROMPT = [3] * 32  # two files of 400 bytes


def pinned(server: Prompting) -> int:
    pins = server.scheduler.cache.placement.pins
    return sum(doors.pins_held(pins).values()) + sum(pins.promised.values())


def test_conversations_that_grow_leave_a_prompt_its_room_over_a_restart() -> None:
    server = Prompting(disk_bytes=10_000, tenant_pins=0.2)
    server.register(PROMPT, salt="")
    text = [5] * 16
    server.ask(text, max_tokens=0, session="s")
    server.scheduler.pin_session("", "s", True)
    for token in range(6, 12):  # for more than there is room
        text = [*text, *[token] * 16]
        server.ask(text, max_tokens=0, session="s")
    assert pinned(server) == 2000
    server.restart()
    assert pinned(server) == 2000
    assert server.state("").rows == len(PROMPT)


def test_a_prompt_whose_files_are_more_than_a_smaller_disk_holds_is_not_kept() -> None:
    """It begins in the middle of others' rows, so its files have more rows than it has."""
    server = Prompting(disk_bytes=10_000)
    first, second = [1] * 6, [2] * 6
    for text in (first + [3] * 10, first + second + [4] * 10, first + second + [5] * 16):
        server.ask(text, max_tokens=0)
    server.register(first + second + [5] * 5, salt="")
    server.restart(disk_bytes=1000)
    server.step()
    server.step()
    assert server.scheduler.stats().disk_over_bytes == 0
