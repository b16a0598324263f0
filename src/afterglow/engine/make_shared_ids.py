"""Make the parts by which servers share names of conversations and prompts. Without `--shared` none is imported."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from afterglow.engine.loop import EngineLoop
from afterglow.engine.setup import EngineParts

if TYPE_CHECKING:
    from afterglow.engine.shared_ids import SharedIds


def shared_ids(parts: EngineParts, loop: EngineLoop, forget_prefix: Callable[[str, str], bool]) -> SharedIds | None:
    """Make the names that engines share; None where they share nothing. `forget_prefix`: by owner and name."""
    shared, folder = parts.store.shared, parts.conversations.folder
    if shared is None or folder is None:
        return None
    from afterglow.engine.shared_ids import SharedIds

    return SharedIds(shared.records, folder, loop, forget_prefix)
