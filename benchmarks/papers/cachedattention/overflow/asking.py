"""What tables 1 and 2 ask an engine with, and how a conversation goes on until its window overflows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.common.texts import Encode
from benchmarks.papers.cachedattention.overflow.arms import Arm, Rig
from benchmarks.papers.cachedattention.overflow.parts_file import PartsFile


@dataclass(frozen=True)
class Asked:
    """All that is asked of the model. `overflows`: those of each conversation."""

    rig: Rig
    encode: Encode
    data: Path
    file: PartsFile
    overflows: int

    @property
    def bos(self) -> tuple[int, ...]:
        """The head of a plain text: the token that begins it, if the model has one."""
        bos = self.rig.engine.decoder.spec.bos_id
        return () if bos is None else (bos,)


def go_on(arm: Arm, turns: Sequence[Sequence[int]], overflows: int) -> None:
    """Take turns until the window would overflow once more than it should."""
    for turn in turns:
        if arm.overflows == overflows and not arm.fits(turn):
            break
        arm.add(turn)
