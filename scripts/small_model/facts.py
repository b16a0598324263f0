"""Facts: how they are told, asked for and answered. The words are in `words.toml`."""

from __future__ import annotations

import tomllib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

_DATA = tomllib.loads((Path(__file__).parent / "words.toml").read_text(encoding="utf-8"))
WORDS: dict[str, list[str]] = {**_DATA["words"], "numbers": [str(n) for n in range(10, 100)]}
NAMES, NUMBERS, NOUNS = WORDS["names"], WORDS["numbers"], WORDS["nouns"]
RELATIVES, OBJECT_COLORS, OBJECTS = WORDS["relatives"], WORDS["object_colors"], WORDS["objects"]
VALUE_WORDS = [
    word
    for kind in ["colors", "cities", "foods", "nouns", "numbers", "names", "animals", "jobs"]
    for word in WORDS[kind]
]

_SENTENCES = _DATA["sentences"]
ACKS: list[str] = _SENTENCES["acks"]
READ_REQUESTS: list[str] = _SENTENCES["read_requests"]
READ_REPLY: str = _SENTENCES["read_reply"]
TELL_LEADS: list[str] = _SENTENCES["tell_leads"]
ASK_LEADS: list[str] = _SENTENCES["ask_leads"]
SYSTEM_PROMPTS: list[str] = _SENTENCES["system_prompts"]
CHAT: list[tuple[str, str]] = [(message, reply) for message, reply in _SENTENCES["chat"]]
PERSON_PHRASES: list[str] = _DATA["phrases"]["person"]
THING_PHRASES: list[str] = _DATA["phrases"]["thing"]


@dataclass(frozen=True)
class Attribute:
    """One kind of fact; ``{V}`` is the value, ``{K}`` the key (a person or an object)."""

    name: str
    kind: str
    values: Sequence[str]
    tell: Sequence[str]
    ask: Sequence[str]
    answer: str


ATTRIBUTES = [Attribute(**{**row, "values": WORDS[row["values"]]}) for row in _DATA["attributes"]]
USER_ATTRIBUTES = [a for a in ATTRIBUTES if a.kind == "user"]
BOUND_ATTRIBUTES = [a for a in ATTRIBUTES if a.kind == "bound"]
