"""Conversations like ShareGPT's, fitted to the numbers that CachedAttention (ATC'24) and AttentionStore (arXiv v1) print.

Printed (§2.3, §2.4, §4.1, §4.2, Figure 2): the share of conversations with several turns, the mean number of turns, the
shares of conversations longer than 2K and 4K tokens, the number of conversations, Poisson arrivals of one per second.
Not printed, and chosen here: the law of the number of turns beyond its mean (log-normal from the second turn on), that of
lengths (log-normal, with a factor common to a conversation, fitted to the two shares), how a turn's tokens divide between
user and model (35:65 in the median, which keeps the new tokens of late turns near the 1 % of Figure 4a), and the time
that users think. `docs/papers.md` says how much each matters.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from math import log
from random import Random
from typing import Literal, get_args

from afterglow.errors import ConfigError
from afterglow.sim.nearest import unknown
from afterglow.sim.workload.turns import Conversation, StreamSegment, TraceTurn, joined

ThinkLaw = Literal["exponential", "constant", "lognormal"]
THINK_SIGMA = 1.0  # of the log-normal law: a mean of 1.65 medians


@dataclass(frozen=True, slots=True)
class ThinkTime:
    """Seconds between a reply's end and the same user's next question. No paper says how long: a minute is assumed."""

    mean: float = 60.0
    law: ThinkLaw = "exponential"

    def __post_init__(self) -> None:
        if not 0 <= self.mean < 1e9:
            raise ConfigError(f"the mean think time must be 0 or more seconds, got {self.mean}")
        if self.law not in get_args(ThinkLaw):
            raise ConfigError(f"think times are {', '.join(get_args(ThinkLaw))}, not {self.law!r}")

    def draw(self, rng: Random) -> float:
        if self.law == "constant" or not self.mean:
            return self.mean
        if self.law == "exponential":
            return rng.expovariate(1 / self.mean)
        return rng.lognormvariate(log(self.mean) - THINK_SIGMA**2 / 2, THINK_SIGMA)


@dataclass(frozen=True, slots=True, kw_only=True)
class ShareGPTLaw:
    """How conversations of a kind are drawn; lengths in tokens.

    A conversation has one turn, or, with probability `multi_turn`, two and a log-normal number more, of median
    `more_turns` and deviation `turns_sigma`, drawn anew where all are more than `max_turns`. Its questions and replies are log-normal with medians `prompt` and `reply`,
    deviation `turn_sigma`, times a common log-normal factor of deviation `session_sigma`; cut at `max_prompt` and
    `max_reply`, and scaled down together where they exceed `max_session`.
    """

    name: str
    conversations: int
    multi_turn: float
    more_turns: float
    prompt: float
    reply: float
    session_sigma: float
    turn_sigma: float
    max_prompt: int
    max_reply: int
    turns_sigma: float = 1.2
    max_turns: int = 40  # Figure 2 ends there
    max_session: int = 32768

    def lengths(self, rng: Random) -> list[tuple[int, int]]:
        """One conversation: tokens of question and reply, turn by turn."""
        turns = self._count(rng)
        scale = rng.lognormvariate(0.0, self.session_sigma)
        drawn = [
            (
                min(self.prompt * scale * rng.lognormvariate(0.0, self.turn_sigma), self.max_prompt),
                min(self.reply * scale * rng.lognormvariate(0.0, self.turn_sigma), self.max_reply),
            )
            for _ in range(turns)
        ]
        shrink = min(1.0, self.max_session / sum(q + a for q, a in drawn))
        return [(max(1, int(q * shrink)), max(1, int(a * shrink))) for q, a in drawn]

    def _count(self, rng: Random) -> int:
        if rng.random() >= self.multi_turn:
            return 1
        while (more := int(self.more_turns * rng.lognormvariate(0.0, self.turns_sigma))) > self.max_turns - 2:
            pass
        return 2 + more


# `more_turns` gives the printed mean; `prompt`, `reply` and `session_sigma` are fitted to the two shares of long
# conversations. ATC: questions and replies end at
# 1,024 tokens, as where ShareGPT's lengths are published as a serving workload; the arXiv version's shares cannot be had
# with that, its turns are thousands of tokens long.
PRESETS = {
    "sharegpt-atc": ShareGPTLaw(
        name="sharegpt-atc",
        conversations=9000,
        multi_turn=0.73,
        more_turns=3.657,
        prompt=170.0,
        reply=315.0,
        session_sigma=1.05,
        turn_sigma=0.8,
        max_prompt=1024,
        max_reply=1024,
    ),
    "sharegpt-arxiv": ShareGPTLaw(
        name="sharegpt-arxiv",
        conversations=9000,
        multi_turn=0.78,
        more_turns=1.388,
        prompt=890.0,
        reply=1650.0,
        session_sigma=1.05,
        turn_sigma=0.8,
        max_prompt=4096,
        max_reply=4096,
    ),
}


def preset(name: str) -> ShareGPTLaw:
    """Look up a preset. Raises: ConfigError, with the nearest names."""
    if name not in PRESETS:
        raise unknown("workload", name, PRESETS)
    return PRESETS[name]


class ShareGPT:
    """A source of conversations that begin as a Poisson process of `rate` per second; equal seeds, equal conversations.

    A conversation's turns depend on the seed and its number alone, and are drawn when it begins. All begin with the same
    `system_tokens`. `max_prompt` and `max_reply` cut single turns further, where a model's window asks for it.
    """

    def __init__(
        self,
        law: ShareGPTLaw,
        *,
        conversations: int | None = None,
        rate: float = 1.0,
        think: ThinkTime | None = None,
        seed: int = 0,
        system_tokens: int = 0,
        max_prompt: int | None = None,
        max_reply: int | None = None,
    ) -> None:
        self.law = law
        self.conversations = law.conversations if conversations is None else conversations
        self.rate = rate
        self.think = think or ThinkTime()
        self.seed = seed
        self.system_tokens = system_tokens
        self.max_prompt = law.max_prompt if max_prompt is None else max_prompt
        self.max_reply = law.max_reply if max_reply is None else max_reply
        self.begun = 0
        self.shortened = 0  # turns that `max_prompt` or `max_reply` has cut
        if not 0 < rate < 1e9:
            raise ConfigError(f"the rate must be a positive number of conversations per second, got {rate}")
        wanted = {"conversations": self.conversations, "max_prompt": self.max_prompt, "max_reply": self.max_reply}
        for name, value in wanted.items():
            if value < 1:
                raise ConfigError(f"{name} must be at least 1, got {value}")
        if system_tokens < 0:
            raise ConfigError(f"system_tokens must be 0 or more, got {system_tokens}")

    @property
    def fraction(self) -> float:
        """Of the conversations, how many have begun."""
        return self.begun / self.conversations

    def __iter__(self) -> Iterator[Conversation]:
        arrivals = Random(f"{self.seed} {self.law.name} arrivals")
        now = 0.0
        self.shortened = 0
        for number in range(self.conversations):
            now += arrivals.expovariate(self.rate)
            self.begun = number + 1
            name = f"{self.seed}-{number}"
            yield Conversation(name, now, self._turns(name, now))

    def _turns(self, name: str, start: float) -> Iterator[TraceTurn]:
        rng = Random(f"{name} {self.law.name}")
        stream = f"{self.law.name} {name}"
        system = StreamSegment(f"{self.law.name} system", 0, self.system_tokens)
        said = 0  # tokens of the conversation so far
        ends = [self.system_tokens]
        for index, (question, reply) in enumerate(self.law.lengths(rng)):
            self.shortened += question > self.max_prompt or reply > self.max_reply
            question, reply = min(question, self.max_prompt), min(reply, self.max_reply)
            think = self.think.draw(rng) if index else 0.0
            yield TraceTurn(
                session=name,
                index=index,
                prompt=joined((system, StreamSegment(stream, 0, said + question))),
                reply=(StreamSegment(stream, said + question, reply),),
                new_tokens=question + (0 if index else self.system_tokens),
                arrival=None if index else start,
                think=think,
                turns=tuple(ends),
            )
            said += question + reply
            ends.append(self.system_tokens + said)
