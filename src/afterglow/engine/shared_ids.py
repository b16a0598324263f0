"""Names of conversations and prompts that engines share, for those that know a tenant by the plan's salt alone."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from afterglow.engine.inbox import Inbox
from afterglow.engine.loop import EngineLoop
from afterglow.errors import RequestError
from afterglow.plan.scheduler import Scheduler
from afterglow.store.shared.notices import Notices
from afterglow.store.shared.records import Records


class SharedIds:
    """What other engines have told, and how it is acted upon here. The engine's thread is waited for."""

    def __init__(
        self, records: Records, folder: Path, loop: EngineLoop, forget_prefix: Callable[[str, str], bool]
    ) -> None:
        """`folder`: of this engine alone. `forget_prefix`: by owner and name."""
        self.records = records
        self.notices = Notices(records, folder)
        self.forget_prefix = forget_prefix
        self._loop = loop

    @property
    def _inbox(self) -> Inbox:
        return self._loop.parts.inbox

    @property
    def _plan(self) -> Scheduler:
        return self._loop.parts.scheduler

    def forget_session(self, owner: str, name: str) -> bool:
        """Remove a conversation, by the plan's salt. Returns False if there is none."""
        return self._inbox.ask(lambda: self._loop.forget_session(owner, name))

    def reset(self, whose: str | None) -> None:
        """Forget all rows of a salt, of a tenant (`everything_of`) or of all."""
        self._inbox.send(lambda: self._loop.reset(whose))

    def pin(self, sessions: Sequence[tuple[str, str]], pinned: bool = True) -> dict[tuple[str, str], str]:
        """Pin the conversations that are here, or unpin them. Returns why some could not be pinned."""

        def work() -> dict[tuple[str, str], str]:
            refused = {}
            for owner, name in sessions:
                if self._plan.cache.sessions.is_pinned(owner, name) in (None, pinned):
                    continue  # each input of the plan has its line in the journal
                try:
                    self._plan.pin_session(owner, name, pinned)
                except RequestError as error:
                    refused[owner, name] = str(error)
            return refused

        return self._inbox.ask(work)
