"""The digest of a step: what a replay is compared by."""

from __future__ import annotations

import hashlib
import json
from typing import Any

from afterglow.plan.step import Drop, ExtentRecord, Gather, Load, Move, RowsAhead, Run, Save, Selectable, Step, Store


def step_digest(step: Step) -> str:
    """Hash the values of a step (blake2b, 8 bytes, hex): equal for equal steps, in any process and any version of the plan.

    The values are listed here one by one, in an order that is a part of the journal's format. Names of classes and of
    fields are not in it, so that they may change.
    """
    values = [
        step.number,
        [
            [item.job, item.context, item.rows, *([_save_values(item.saves)] if item.saves else [])]
            for item in step.releases
        ],
        step.frees,
        [_move_values(move) for move in step.moves],
        step.urged,
        [_run_values(run) for run in step.runs],
        step.wake_at,
        step.repeat,
        [[share.jobs, share.start, share.stop] for share in step.shares],
        *([_ahead_values(step.ahead)] if step.ahead is not None else []),
        *(["decodes on"] if step.decodes_on else []),
    ]
    return hashlib.blake2b(json.dumps(values, separators=(",", ":")).encode(), digest_size=8).hexdigest()


def _move_values(move: Move) -> list[Any]:
    if isinstance(move, Load):
        extra = [move.ahead, move.most_s, *([move.skip] if move.skip else [])]
        return ["load", move.move, move.extent, move.rows, move.slots, move.priority, move.why, *extra]
    if isinstance(move, Store):
        return ["store", move.move, _record_values(move.record), move.slots, move.priority, move.why]
    if isinstance(move, Drop):
        return ["drop", move.move, move.extent, move.priority, move.why]
    return ["copy", move.move, move.pieces, move.slots, move.rows, move.priority]


def _record_values(record: ExtentRecord) -> list[Any]:
    names = [record.id, record.parent, record.parent_rows, record.salt, record.kind, record.tokens.hex()]
    return [*names, record.file_bytes, record.last_used, record.hits, record.expires]


def _run_values(run: Run) -> list[Any]:
    admit = run.admit
    return [
        run.job,
        run.start,
        run.tokens,
        run.sample,
        run.capacity,
        admit
        and [
            *(admit.context, admit.take, admit.device_rows, [_view_values(v) for v in admit.selectable], admit.exact),
            *([admit.fellow] if admit.fellow is not None else []),
        ],
        _gather_values(run.gathers),
        _save_values(run.saves),
        *([run.guessed] if run.guessed else []),
    ]


def _save_values(saves: tuple[Save, ...]) -> list[Any]:
    return [[save.draft, save.slots, save.draft_row, save.job_row, save.rows] for save in saves]


def _gather_values(gathers: tuple[Gather, ...]) -> list[Any]:
    return [[g.extent, g.start, g.stop, g.slots, g.move] for g in gathers]


def _ahead_values(ahead: RowsAhead) -> list[Any]:
    return [ahead.job, ahead.first, _gather_values(ahead.gathers), ahead.layers]


def _view_values(view: Selectable) -> list[Any]:
    return [view.extent, view.rows, view.start, view.stop, view.slots]
