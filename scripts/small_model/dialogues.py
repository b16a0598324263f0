"""Dialogues drawn from the templates: facts are told, then asked for, with filler between."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field

from tokenizers import Tokenizer

from scripts.small_model.facts import (
    ACKS,
    ASK_LEADS,
    BOUND_ATTRIBUTES,
    CHAT,
    NAMES,
    OBJECT_COLORS,
    OBJECTS,
    PERSON_PHRASES,
    READ_REPLY,
    READ_REQUESTS,
    RELATIVES,
    SYSTEM_PROMPTS,
    TELL_LEADS,
    THING_PHRASES,
    USER_ATTRIBUTES,
    VALUE_WORDS,
    Attribute,
)
from scripts.small_model.tokenizer import ASSISTANT, BOS, END, SYSTEM, USER


@dataclass
class Fact:
    """One fact told in a dialogue."""

    attribute: Attribute
    key: str
    value: str
    told: bool = False


@dataclass
class Answer:
    """Where an answer lies in the token sequence, and how far back its value was told."""

    start: int
    value: int
    end: int
    kind: str
    attribute: str
    distance: int
    first: bool


@dataclass
class Dialogue:
    """Token ids with one loss weight each."""

    ids: list[int] = field(default_factory=list)
    weights: list[float] = field(default_factory=list)
    answers: list[Answer] = field(default_factory=list)


W_VALUE, W_REPLY, W_USER, W_FILLER = 1.0, 0.15, 0.0, 0.06
W_INDUCTION, W_BRIDGE = 0.25, 0.5
KINDS = (W_VALUE, W_INDUCTION, W_BRIDGE)


class Writer:
    """Draws dialogues from the templates."""

    def __init__(self, tokenizer: Tokenizer, sentences: Sequence[str], seed: int) -> None:
        self.tokenizer = tokenizer
        self.sentences = sentences
        self.rng = random.Random(seed)
        self.cache: dict[str, list[int]] = {}
        self.p_bind = 0.4
        self.value_ids = [self.encode(" " + word)[0] for word in VALUE_WORDS]

    def encode(self, text: str) -> list[int]:
        """Encode a piece of text that starts at a word boundary."""
        ids = self.cache.get(text)
        if ids is None:
            ids = self.tokenizer.encode(text).ids
            if len(self.cache) > 200_000:
                self.cache.clear()
            self.cache[text] = ids
        return ids

    # -- parts -------------------------------------------------------------

    def draw_facts(self, count: int, p_user: float, bind: bool = False) -> list[Fact]:
        """Draw distinct facts: a key has one value of a kind, a value has one key.

        With ``bind`` all are of one or two kinds, so that the kind of the value
        says little and the answer depends on whose value it is.
        """
        rng = self.rng
        facts: list[Fact] = []
        keys: set[tuple[str, str]] = set()
        used: set[str] = set()
        people = rng.sample(NAMES, rng.randint(2, 5))
        things = [f"{rng.choice(OBJECT_COLORS)} {rng.choice(OBJECTS)}" for _ in range(rng.randint(2, 5))]
        focus = rng.sample(BOUND_ATTRIBUTES, rng.randint(2, len(BOUND_ATTRIBUTES)))
        own = USER_ATTRIBUTES
        if bind:
            people = rng.sample(NAMES, min(12, max(3, count)))
            things = [f"{c} {o}" for c in rng.sample(OBJECT_COLORS, 4) for o in rng.sample(OBJECTS, 3)]
            focus = focus[: rng.randint(1, 2)]
            own = [a for a in own if a.name in {f.name for f in focus}]
            p_user = 0.15 if own else 0.0
        for _ in range(count * 20):
            if len(facts) == count:
                break
            if rng.random() < p_user:
                attribute, key = rng.choice(own), ""
            else:
                attribute = rng.choice(focus)
                if attribute.name == "relative":
                    key = rng.choice(RELATIVES)
                elif attribute.name in ("code", "password", "content"):
                    key = rng.choice(things)
                else:
                    key = rng.choice(people)
            value = rng.choice(attribute.values)
            if (attribute.name, key) in keys or value in used or value in people:
                continue
            keys.add((attribute.name, key))
            used.add(value)
            facts.append(Fact(attribute, key, value))
        return facts

    def put(self, d: Dialogue, ids: Sequence[int], weight: float) -> None:
        """Append tokens."""
        d.ids.extend(ids)
        d.weights.extend([weight] * len(ids))

    def put_text(self, d: Dialogue, text: str, weight: float) -> None:
        """Append text."""
        self.put(d, self.encode(text), weight)

    def put_valued(
        self, d: Dialogue, template: str, fact: Fact, weight: float, value_weight: float, lead: str = ""
    ) -> int:
        """Append a template with its value as a piece of its own; returns the value's position."""
        left, _, right = template.partition("{V}")
        self.put_text(d, lead + left.replace("{K}", fact.key), weight)
        position = len(d.ids)
        self.put_text(d, " " + fact.value, value_weight)
        if right:
            self.put_text(d, right.replace("{K}", fact.key), weight)
        return position

    def reply(self, d: Dialogue, text: str) -> None:
        """Append an assistant turn that holds no value."""
        self.put(d, [ASSISTANT], 0.0)
        self.put_text(d, text, W_REPLY)
        self.put(d, [END], W_REPLY)

    def tell(self, d: Dialogue, facts: Sequence[Fact], last: dict[str, int], p_filler: float) -> None:
        """Append a user turn that tells some facts, perhaps with other sentences around them."""
        rng = self.rng
        if len(d.ids) == 1 and rng.random() < 0.1:
            # the facts stand in the system prompt, which has no reply
            self.put(d, [SYSTEM], 0.0)
            self.put_text(d, rng.choice(SYSTEM_PROMPTS), W_USER)
            lead, answer = " ", ""
        elif p_filler and rng.random() < 0.5:
            # the facts stand in a text to read
            self.put(d, [USER], 0.0)
            self.put_text(d, rng.choice(READ_REQUESTS), W_USER)
            lead, answer, p_filler = " ", READ_REPLY, max(p_filler, 0.4)
        else:
            self.put(d, [USER], 0.0)
            lead, answer = "", rng.choice(ACKS)
            if rng.random() < 0.12:
                self.put_text(d, rng.choice(TELL_LEADS), W_USER)
                lead = " "
        for fact in facts:
            if rng.random() < p_filler:
                for _ in range(rng.randint(1, 3)):
                    self.put_text(d, lead + rng.choice(self.sentences), W_FILLER)
                    lead = " "
            template = rng.choice(fact.attribute.tell)
            last[fact.value] = self.put_valued(d, template, fact, W_USER, 0.0, lead)
            fact.told = True
            lead = " "
        self.put(d, [END], W_USER)
        if answer:
            self.reply(d, answer)

    def ask(self, d: Dialogue, fact: Fact, last: dict[str, int], first: bool) -> None:
        """Append a question and its answer."""
        rng = self.rng
        self.put(d, [USER], 0.0)
        question = rng.choice(fact.attribute.ask).replace("{K}", fact.key)
        if rng.random() < 0.1:
            question = question.replace("What is", "What's")
        if rng.random() < 0.15:
            question = f"{rng.choice(ASK_LEADS)} {question}"
        self.put_text(d, question, W_USER)
        self.put(d, [END], W_USER)
        self.put(d, [ASSISTANT], 0.0)
        start = len(d.ids)
        value = self.put_valued(d, fact.attribute.answer, fact, W_REPLY, W_VALUE)
        self.put(d, [END], W_REPLY)
        d.answers.append(
            Answer(
                start,
                value,
                len(d.ids),
                fact.attribute.kind,
                fact.attribute.name,
                start - last.get(fact.value, start),
                first,
            )
        )
        last[fact.value] = value

    def chat(self, d: Dialogue, p_read: float, budget: int) -> None:
        """Append a filler turn: small talk, or a text to read of at most about ``budget`` tokens."""
        rng = self.rng
        self.put(d, [USER], 0.0)
        if rng.random() < p_read and budget > 40:
            self.put_text(d, rng.choice(READ_REQUESTS), W_USER)
            stop = len(d.ids) + rng.randint(20, min(budget, 500))
            while True:
                self.put_text(d, " " + rng.choice(self.sentences), W_FILLER)
                if len(d.ids) >= stop:
                    break
            answer = READ_REPLY
        else:
            question, answer = rng.choice(CHAT)
            self.put_text(d, question, W_USER)
        self.put(d, [END], W_USER)
        self.reply(d, answer)

    # -- whole rows --------------------------------------------------------

    def dialogue(
        self, length: int, p_user: float = 0.35, drop: bool = False, gap: float | None = None, count: int | None = None
    ) -> Dialogue:
        """Draw a dialogue of about ``length`` tokens; ``drop`` leaves out the telling."""
        rng = self.rng
        d = Dialogue()
        self.put(d, [BOS], 0.0)
        long = length > 300
        bind = rng.random() < self.p_bind
        if rng.random() < (0.4 if long else 0.1):
            self.put(d, [SYSTEM], 0.0)
            self.put_text(d, rng.choice(SYSTEM_PROMPTS), W_USER)
            self.put(d, [END], W_USER)
        if count is None:
            low, high = (3, 5) if length < 200 else (4, 8) if not long else (6, max(8, min(24, length // 50)))
            count = rng.randint(low, high)
        facts = self.draw_facts(count, p_user, bind)
        last: dict[str, int] = {}
        p_filler = rng.choice((0.0, 0.0, 0.15, 0.4)) if long else 0.0
        p_chat = rng.choice((0.0, 0.3, 0.6)) if long else 0.04
        todo = list(facts)
        while todo:
            size = rng.randint(1, 4) if long else rng.randint(2, 5)
            part = [todo.pop() for _ in range(min(len(todo), size))]
            if not drop:
                self.tell(d, part, last, p_filler)
            if rng.random() < p_chat:
                self.chat(d, 0.3 if long else 0.0, 60)
        if gap is None:
            gap = rng.choice((0.0, rng.random() * 0.8)) if long else 0.0
        until = gap * length
        p_read = rng.choice((0.3, 0.6, 0.9))
        while len(d.ids) < until:
            self.chat(d, p_read, max(41, int(until) - len(d.ids)))
        fresh = list(facts)
        rng.shuffle(fresh)
        p_question = rng.choice((0.6, 0.8, 1.0)) if long else 0.97
        while len(d.ids) < length:
            if rng.random() < p_question:
                first = bool(fresh)
                self.ask(d, fresh.pop() if first else rng.choice(facts), last, first)
            elif rng.random() < 0.2 and len(facts) < 30:
                extra = [
                    f
                    for f in self.draw_facts(2, p_user)
                    if f.value not in last
                    and all((f.attribute.name, f.key) != (g.attribute.name, g.key) for g in facts)
                ]
                if extra:
                    self.tell(d, extra, last, 0.0)
                    facts += extra
                    fresh += extra
            else:
                self.chat(d, 0.2, 80)
        return d

    def induction(self, length: int) -> Dialogue:
        """Draw a string of value words and repeat it; each repeat is predictable."""
        rng = self.rng
        d = Dialogue()
        self.put(d, [BOS], 0.0)
        period = rng.randint(6, max(8, min(64, length // 3)))
        string = [rng.choice(self.value_ids) for _ in range(period)]
        self.put(d, string, 0.0)
        while len(d.ids) < length:
            self.put(d, string, W_INDUCTION)
        return d

    def bridge(self, length: int) -> Dialogue:
        """Draw rows of key, phrase, value; the same phrase for all, each pair many times.

        With an empty phrase this is plain induction; with a longer one the value
        has to be bound to a key some tokens before it, as in the sentences of the
        dialogues.  The mixture leads from the one to the other.
        """
        rng = self.rng
        d = Dialogue()
        self.put(d, [BOS], 0.0)
        attribute = rng.choice(BOUND_ATTRIBUTES)
        count = rng.randint(2, 6)
        if rng.random() < 0.7:
            names = rng.sample(NAMES, count)
            keys = [(self.encode(" " + n), self.encode(n)) for n in names]
            phrases = PERSON_PHRASES
        else:
            things = rng.sample([f" {c} {o}" for c in OBJECT_COLORS for o in OBJECTS], count)
            keys = [(self.encode(t), self.encode(t)) for t in things]
            phrases = THING_PHRASES
        phrase = self.encode(rng.choice(phrases))
        if rng.random() < 0.3:
            phrase = [rng.choice(self.value_ids) for _ in range(rng.randint(0, 5))]
        stop = self.encode(rng.choice((".", ",", ";")))
        values = [self.encode(" " + v)[0] for v in rng.sample(list(attribute.values), count)]
        seen: set[int] = set()
        while len(d.ids) < length:
            k = rng.randrange(count)
            self.put(d, rng.choice(keys[k]), 0.0)
            self.put(d, phrase, 0.0)
            self.put(d, [values[k]], W_BRIDGE if k in seen else 0.0)
            self.put(d, stop, 0.0)
            seen.add(k)
        return d
