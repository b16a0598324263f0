"""Long dialogues of the kind that the bundled model was trained on, with held-out text: facts told, some asked for, filler between.

A session outgrows its window several times. Replies to questions about facts that are still in the window give the
perplexity. After each overflow, facts that were not asked for yet are asked for on the side, in branches that are
thrown away: facts that were kept and facts that were dropped; also in the whole window as it was before.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import tokenizers
import torch
from scripts.small_model.dialogues import W_FILLER, W_REPLY, W_VALUE, Dialogue, Fact, Writer
from scripts.small_model.facts import SYSTEM_PROMPTS
from scripts.small_model.tokenizer import ASSISTANT, BOS, END, SYSTEM
from torch import Tensor

from afterglow.model.decoder import Decoder
from benchmarks.common.model_texts import SEED
from benchmarks.common.paired import Paired
from benchmarks.papers.cachedattention.overflow.context import Prefill, Session

ALOUD = 0.3  # of the facts are asked for in the dialogue itself
COUNT = 7  # facts told in one block of a dialogue, at most


@dataclass(slots=True)
class Told:
    """A fact in the stream: where its sentence ended, and whether the dialogue itself may ask for it."""

    fact: Fact
    at: int
    aloud: bool
    probed: bool = False  # while it was kept
    done: bool = False


@dataclass
class Found:
    """What all sessions gave."""

    replies: Paired = field(default_factory=Paired)  # losses of reply tokens
    values: Paired = field(default_factory=Paired)  # losses of the values in them: one token each
    filler: Paired = field(default_factory=Paired)  # losses of filler text
    kept: list[Paired] = field(default_factory=list)  # right or wrong, facts kept; by overflows passed
    dropped: Paired = field(default_factory=Paired)
    kinds: dict[str, Paired] = field(default_factory=lambda: {"user": Paired(), "bound": Paired()})  # facts kept
    prefill: Prefill = field(default_factory=Prefill)


class Stream:
    """Draws one endless dialogue, turn by turn; tells the session's first surviving token from the dropped ones."""

    def __init__(self, writer: Writer, window: int, facts: int) -> None:
        """`facts`: how many a full window holds, about; training showed the bundled model 6 to 30."""
        self.writer, self.rng = writer, writer.rng
        self._window, self._block = window, COUNT * window // facts  # tokens that a block takes at least
        self._block_end = 0
        self.dialogue = Dialogue()
        writer.put(self.dialogue, [BOS], 0.0)
        if self.rng.random() < 0.5:
            writer.put(self.dialogue, [SYSTEM], 0.0)
            writer.put_text(self.dialogue, self.rng.choice(SYSTEM_PROMPTS), 0.0)
            writer.put(self.dialogue, [END], 0.0)
        self.head = list(self.dialogue.ids)
        self.told: list[Told] = []
        self._last: dict[str, int] = {}
        self._used: set[Any] = set()
        self._plan: list[tuple[str, Any]] = [("chat", 0)]  # never facts as part of the system prompt

    def turn(self, session: Session) -> tuple[list[int], list[int], list[float]]:
        """The next turn: prompt, reply (the marker that opens it belongs to the prompt) and loss weights of both."""
        start = len(self.dialogue.ids)
        assert start == session.length
        while len(self.dialogue.ids) == start:
            if not self._plan:
                self._plan_block()
            kind, what = self._plan.pop(0)
            if kind == "chat":
                self.writer.chat(self.dialogue, 0.6 if what else 0.0, what)
            elif kind == "tell":
                self.writer.tell(self.dialogue, what, self._last, self.rng.choice((0.0, 0.0, 0.15)))
                for fact in what:
                    self.told.append(Told(fact, self._last[fact.value], self.rng.random() < ALOUD))
            else:
                self._ask(session)
        ids, weights = self.dialogue.ids[start:], self.dialogue.weights[start:]
        reply = ids.index(ASSISTANT) + 1
        return ids[:reply], ids[reply:], weights

    def _plan_block(self) -> None:
        """Facts in a few turns, then talk and texts to read, then questions; more of the latter until it is time for
        new facts."""
        rng, window = self.rng, self._window
        if len(self.dialogue.ids) < self._block_end:
            self._plan = [("chat", rng.choice((0, window // 8)))] + [("ask", None)] * rng.randint(0, 1)
            return
        self._block_end = len(self.dialogue.ids) + self._block
        bind = rng.random() < self.writer.p_bind
        facts: list[Any] = []
        for fact in self.writer.draw_facts(COUNT * 2, 0.35, bind):
            names = {fact.value, (fact.attribute.name, fact.key)}
            if len(facts) < COUNT and not names & self._used:  # one value for a key, one key for a value, for ever
                self._used |= names
                facts.append(fact)
        while facts:
            part = [facts.pop() for _ in range(min(len(facts), rng.randint(1, 3)))]
            self._plan.append(("tell", part))
            if rng.random() < 0.3:
                self._plan.append(("chat", 0))
        self._plan += [("chat", rng.choice((0, window // 16, window // 8))) for _ in range(rng.randint(1, 4))]
        self._plan += [("ask", None)] * rng.randint(2, 4)
        if rng.random() < 0.5:
            self._plan.append(("chat", window // 8))

    def _ask(self, session: Session) -> None:
        """Ask for a fact that will still be there; nothing where there is none."""
        options = [told for told in self.told if told.aloud and not told.done and told.at >= session.first]
        if not options:
            return
        told = self.rng.choice(options)
        d, start = self.dialogue, len(self.dialogue.ids)
        last = dict(self._last)
        self.writer.ask(d, told.fact, self._last, True)
        told.done = True
        if session.first_after(len(d.ids) - start) > told.at:  # this very question would push it out
            del d.ids[start:], d.weights[start:], d.answers[-1:]
            self._last = last

    def question(self, told: Told) -> tuple[list[int], int]:
        """A question with its answer, as ids, and the index of the value in it."""
        d = Dialogue()
        self.writer.ask(d, told.fact, {}, True)
        return d.ids, d.answers[0].value


def run(
    decoder: Decoder,
    directory: Path,
    sentences: Sequence[str],
    *,
    window: int,
    facts: int,
    sessions: int,
    overflows: int,
    seed: int,
) -> Found:
    """So many sessions, each until its window has overflowed so many times.

    `sentences` make their texts to read; `facts` is how many facts a full window holds, about.
    """
    found = Found()
    fast = tokenizers.Tokenizer.from_file(str(directory / "tokenizer.json"))
    writer = Writer(fast, sentences, SEED + seed)
    for number in range(sessions):
        stream = Stream(writer, window, facts)
        session = Session(decoder, stream.head, window, whole_turns=True)
        _talk(session, stream, overflows, found, number)
        found.prefill.add(session.prefill)
    return found


def _talk(session: Session, stream: Stream, overflows: int, found: Found, number: int) -> None:
    """Turn by turn, until a quarter of a window after the last overflow."""
    seen, stop = 0, None
    while stop is None or session.length < stop:
        before = session.length
        prompt, reply, weights = stream.turn(session)
        losses = session.add(prompt, reply)
        weight = torch.tensor(weights[1:])
        value = weight == W_VALUE
        for into, at in (
            (found.values, value),
            (found.replies, value | (weight == W_REPLY)),
            (found.filler, weight == W_FILLER),
        ):
            into.add({name: rows[at] for name, rows in losses.items()}, number)
        if session.overflows > seen:
            seen = session.overflows
            _probe(session, stream, before, found, number)
            if seen == overflows:
                stop = session.length + session.window // 4


def _probe(session: Session, stream: Stream, before: int, found: Found, number: int) -> None:
    """Ask on the side for facts told before the turn that overflowed and not asked for yet; each fact once while it
    is kept, once after it was dropped."""
    asked = [told for told in stream.told if told.at < before and not told.done]
    kept = [told for told in asked if told.at >= session.first and not told.probed]
    dropped = [told for told in asked if told.at < session.first]
    for told in kept:
        told.probed = True
    for told in dropped:
        told.done = True
    while len(found.kept) < session.overflows:
        found.kept.append(Paired())
    right = _answers(session, stream, kept + dropped)
    found.kept[session.overflows - 1].add({name: values[: len(kept)] for name, values in right.items()}, number)
    found.dropped.add({name: values[len(kept) :] for name, values in right.items()}, number)
    for kind in ("user", "bound"):
        at = torch.tensor([told.fact.attribute.kind == kind for told in kept], dtype=torch.bool)
        found.kinds[kind].add({name: values[: len(kept)][at] for name, values in right.items()}, number)


def _answers(session: Session, stream: Stream, asked: Sequence[Told]) -> dict[str, Tensor]:
    """Whether the value is the first choice after the words before it, 0 or 1: in each variant, and before the window
    was truncated ("before")."""
    assert session.before is not None
    contexts = session.contexts | {"before": session.before}
    if not asked:
        return {name: torch.empty(0) for name in contexts}
    questions = [stream.question(told) for told in asked]
    starts = torch.tensor([len(ids) for ids, _ in questions]).cumsum(0) - torch.tensor([len(i) for i, _ in questions])
    rows = starts + torch.tensor([value - 1 for _, value in questions])
    wanted = torch.tensor([ids[value] for ids, value in questions])
    right = {}
    for name, context in contexts.items():
        hidden = context.branches([ids for ids, _ in questions])
        right[name] = (session.decoder.logits(hidden[rows]).argmax(-1).cpu() == wanted).float()
    return right
