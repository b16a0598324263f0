"""Keys and values stored in 8 bits: what is reused are rounded rows, the same ones from every tier, and nothing else differs.

The reference is an engine that stores float32 rows which were rounded by hand. Both engines do the same arithmetic with the same
numbers, so their log-probabilities are equal to the bit.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.numpy import load_file
from torch import Tensor

from afterglow.engine import tee
from afterglow.engine.engine import Completion
from tests.engine.by_hand import ask_truncated
from tests.engine.conftest import FAMILIES, Handle, in_turn
from tests.engine.test_exact_reuse import same
from tests.engine.test_selecting import ask as select
from tests.engine.test_selecting import draw, loader_of, reorder
from tests.engine.test_truncation import SYSTEM, TURN, WINDOW, turns_of

Start = Callable[..., Handle]
Models = Callable[[str], Path]

ROWS = 150


def by_hand(rows: Tensor, dtype: torch.dtype) -> Tensor:
    """Round each head of each row to 255 steps, the largest magnitude being 127 of them; ties to even."""
    assert dtype == torch.float32
    scale = rows.abs().amax(-1, keepdim=True) / 127
    return torch.round(rows / scale) * scale


@contextmanager
def rounding_by_hand() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tee, "narrowed", by_hand)
        yield


class Two:
    """The engine under test and the reference, which are asked the same. `options` are those of both."""

    def __init__(self, start: Start, model: Path, folder: Path, **options: object) -> None:
        # Without guesses: a row of a step of several may differ in its last bits from one alone.
        self._start = lambda name, kv: start(model, folder / name, kv_dtype=kv, speculate="off", **options)
        self.ours, self.theirs = self._start("ours", "int8"), self._start("theirs", "float32")

    def both(self, ask: Callable[[Handle], Completion]) -> tuple[Completion, Completion]:
        ours = ask(self.ours)
        with rounding_by_hand():
            theirs = ask(self.theirs)
            self.theirs.engine.settle()
        self.ours.engine.settle()
        return ours, theirs

    def equal(self, ask: Callable[[Handle], Completion]) -> Completion:
        """Ask both, and expect the same to the bit."""
        ours, theirs = self.both(ask)
        assert (ours.tokens, ours.logprobs, ours.cached) == (theirs.tokens, theirs.logprobs, theirs.cached)
        return ours

    def place(self, tier: str) -> None:
        """Leave what is cached in one tier only."""
        for handle in (self.ours, self.theirs):
            handle.engine.settle()
            if tier == "restart":
                handle.engine.close()
            elif tier != "device":
                handle.engine.demote(tier)
        if tier == "restart":
            self.ours, self.theirs = self._start("ours", "int8"), self._start("theirs", "float32")


@pytest.mark.parametrize("tier", ["device", "host", "disk", "restart"])
@pytest.mark.parametrize("family", in_turn(FAMILIES))
def test_what_is_reused_are_rounded_rows(
    start: Start, model_of: Models, tmp_path: Path, family: str, tier: str
) -> None:
    two = Two(start, model_of(family), tmp_path)
    prompt, more = draw(family, ROWS), draw(tier, 40)
    two.equal(lambda handle: handle.ask(prompt, max_tokens=20))
    two.place(tier)
    for shared in (ROWS, 100, 64):
        ask = [*prompt[:shared], *more[shared % 7 :]]
        found = two.equal(lambda handle, ask=ask: handle.ask(ask, max_tokens=6))
        assert found.cached.total >= shared - 1


def test_rows_that_never_left_the_device_are_not_rounded(start: Start, model_of: Models, tmp_path: Path) -> None:
    handle = start(model_of("llama"), tmp_path, kv_dtype="int8")
    text = draw("device", ROWS)
    for turn in range(3):
        answer = handle.ask(text, max_tokens=9)
        assert answer.cached.total == answer.cached.device
        same(answer, handle.ask(text, reuse=False, max_tokens=9))
        text += [*answer.tokens, *draw(turn, 30)]


def test_no_tier_gives_other_rows_than_another(start: Start, model_of: Models, tmp_path: Path) -> None:
    model, prompt = model_of("llama"), draw("tiers", ROWS)
    options = {
        "kv_dtype": "int8",
        "speculate": "off",
    }  # a row of a step of several may differ in its last bits from one alone
    answers = []
    for tier in ("host", "disk", "restart"):
        handle = start(model, tmp_path / tier, **options)
        handle.ask(prompt)
        handle.engine.settle()
        if tier == "restart":
            handle.engine.close()
            handle = start(model, tmp_path / tier, **options)
        else:
            handle.engine.demote(tier)
        answers.append(handle.ask([*prompt, 1, 2, 3], max_tokens=8).logprobs)
    assert answers[0] == answers[1] == answers[2]
    plain = start(model, kv_dtype="float32").ask([*prompt, 1, 2, 3], max_tokens=1).logprobs[0]
    left, right = dict(answers[0][0].top), dict(plain.top)
    assert 0 < max(abs(left[token] - right[token]) for token in left) < 0.1  # rounded on the way, and only that


def test_what_was_rounded_once_is_never_rounded_again(start: Start, model_of: Models, tmp_path: Path) -> None:
    """A conversation that goes through all tiers between its turns, and whose turns are merged: the bytes of a row stay."""
    two = Two(start, model_of("llama"), tmp_path)
    text, known = draw("turns", 100), 0
    before: set[bytes] = set()
    for turn, tier in enumerate(("disk", "host", "restart", "disk", "host", "restart")):
        prompt = list(text)
        done = two.equal(lambda handle, prompt=prompt: handle.ask(prompt, max_tokens=10))
        assert done.cached.total == known
        text += done.tokens
        known = len(text) - 1
        text += draw(turn, 20)
        two.place(tier)
        if tier != "host":
            now = {row.tobytes() for path in (tmp_path / "ours").rglob("*.safetensors") for row in stored_rows(path)}
            assert len(now) > 2 * known  # of two layers, and the keys of other rows are other ones
            assert before <= now
            before = now


def stored_rows(path: Path) -> Iterator[np.ndarray]:
    for name, tensor in load_file(path).items():
        if name.startswith("layers."):
            yield from tensor


def test_a_truncated_conversation_keeps_rounded_rows(start: Start, model_of: Models, tmp_path: Path) -> None:
    for policy in ("oldest", "sinks_and_recent", "importance"):
        two = Two(start, model_of("llama"), tmp_path / policy, max_model_len=WINDOW, truncation_policy=policy)
        text = draw("cut", SYSTEM)
        for turn in range(9):
            text += draw(turn, TURN)
            turns = turns_of(len(text))
            ours = ask_truncated(two.ours.engine, text, turns=turns)
            with rounding_by_hand():
                theirs = ask_truncated(two.theirs.engine, text, turns=turns)
                two.theirs.engine.settle()
            assert [output.logprobs for output in ours] == [output.logprobs for output in theirs]
            assert ours[0].truncation == theirs[0].truncation
            two.place("disk" if turn % 2 else "host")
        assert ours[0].truncation is not None
        assert ours[0].truncation.reused


@pytest.mark.parametrize("tier", ["host", "disk", "restart"])
def test_selecting_takes_rounded_rows(start: Start, model_of: Models, tmp_path: Path, tier: str) -> None:
    """In chunks from disk, by probe keys, ahead of need, and after rows have been put in another order."""
    two = Two(start, model_of("phi"), tmp_path, importance=1.0, importance_exact="never", reorder_interval=0.0)
    prefix = draw("prefix", 330)
    two.equal(lambda handle: handle.ask(prefix, max_tokens=1))
    two.place(tier)
    for turn, retention in enumerate((0.1, 0.4, 0.9, 0.1)):
        prompt = [*prefix, *draw(turn, 20)]
        found = two.equal(lambda handle, prompt=prompt, share=retention: select(handle, prompt, share))
        assert found.selected is not None
        if tier != "host" and turn == 1:
            assert loader_of(two.ours).stats.read_bytes < 0.6 * loader_of(two.theirs).stats.read_bytes
            assert reorder(two.ours) == reorder(two.theirs) > 0


def test_caches_of_other_kinds_are_kept_apart(start: Start, model_of: Models, tmp_path: Path) -> None:
    prompt = draw("apart", ROWS)
    for kind in ("float32", "bfloat16", "int8"):
        handle = start(model_of("llama"), tmp_path, kv_dtype=kind)
        assert handle.ask(prompt).cached.total == 0
        handle.engine.close()
    assert len(list(tmp_path.iterdir())) == 3  # a folder each
    handle = start(model_of("llama"), tmp_path, kv_dtype="int8")
    assert handle.engine.stats().tiers.kv_dtype == "int8"
    assert handle.ask(prompt).cached.disk == ROWS - 1


def test_a_damaged_scale_is_found(start: Start, model_of: Models, tmp_path: Path) -> None:
    handle = start(model_of("llama"), tmp_path, kv_dtype="int8")
    prompt = draw("damage", ROWS)
    expected = handle.ask(prompt, reuse=False)
    handle.ask(prompt)
    handle.engine.demote("disk")
    layout = handle.engine.parts.store.layout
    for path in tmp_path.rglob("*.safetensors"):
        content = bytearray(path.read_bytes())
        rows = int(content[48:].split(b'"rows":"')[1][:8])
        content[layout.offset(rows, 1, 0) + layout.width - 1] ^= 1  # the last byte of the first scale
        path.write_bytes(content)
    found = handle.ask(prompt)
    assert found.cached.total == 0
    same(found, expected)
    assert handle.engine.stats().store.errors.get("damage")
