#!/usr/bin/env python3
# ruff: noqa: SIM905
"""Train the small chat model that ships with the package.

The model is a Llama of a few million parameters whose one skill is recall: it
is told facts early in a dialogue and answers questions about them up to about
1,500 tokens later.  That makes it an instrument: an approximation of the KV
cache which loses information shows up as lost answers.

Everything is made by this one program: the text (dialogues drawn from
templates, with filler from the docstrings of the Python standard library that
runs it), the byte-level BPE tokenizer, the training and the evaluation.

Examples::

    python scripts/train_small_model.py --out build/model --minutes 35
    python scripts/train_small_model.py --out build/model --resume
    python scripts/train_small_model.py --evaluate build/model
"""

from __future__ import annotations

import os

os.environ.setdefault("OMP_WAIT_POLICY", "passive")

import argparse
import ast
import hashlib
import json
import math
import random
import re
import sysconfig
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from torch import Tensor, nn

# --------------------------------------------------------------------------
# Words
# --------------------------------------------------------------------------

SPECIALS = ["<|pad|>", "<|bos|>", "<|system|>", "<|user|>", "<|assistant|>", "<|end|>"]
PAD, BOS, SYSTEM, USER, ASSISTANT, END = range(6)

COLORS = """red blue green yellow purple orange teal pink brown black white gray violet
indigo turquoise crimson gold silver beige maroon navy olive coral cyan magenta lavender
amber ivory scarlet khaki""".split()
CITIES = """Oslo Paris London Berlin Madrid Rome Vienna Prague Lisbon Dublin Athens Warsaw
Helsinki Stockholm Copenhagen Budapest Zurich Geneva Milan Naples Porto Seville Hamburg
Munich Cairo Nairobi Lagos Tunis Delhi Mumbai Tokyo Kyoto Osaka Seoul Beijing Bangkok Hanoi
Manila Jakarta Sydney Perth Toronto Montreal Boston Chicago Denver Seattle Lima""".split()
FOODS = """pizza pasta rice soup salad bread cheese sushi curry tacos noodles pancakes waffles
lasagna risotto falafel hummus burgers dumplings paella ramen stew porridge omelette beans
lentils mushrooms potatoes tomatoes spinach mangoes apples bananas cherries grapes figs
olives honey chocolate cookies""".split()
ANIMALS = """dog cat rabbit hamster parrot turtle goldfish lizard snake pony goat sheep duck
goose chicken ferret mouse rat frog gecko canary pigeon donkey llama hedgehog tortoise spider
crab horse lamb calf monkey""".split()
JOBS = """teacher nurse doctor baker pilot lawyer farmer singer painter plumber carpenter
chef dentist writer driver tailor judge waiter barber gardener librarian scientist journalist
mechanic builder banker butcher florist photographer surgeon translator programmer""".split()
INSTRUMENTS = """piano violin guitar flute cello harp trumpet drums clarinet banjo trombone
viola tuba saxophone mandolin bassoon fiddle lute horn bagpipes""".split()
DRINKS = """tea coffee water milk lemonade cocoa cider juice wine beer soda espresso cola
smoothie whisky champagne punch tonic kefir broth""".split()
SPORTS = """tennis football hockey golf rugby cricket swimming rowing boxing judo cycling
sailing skiing basketball volleyball badminton fencing archery surfing climbing""".split()
NAMES = """Mara Tom Anna Ben Clara David Emma Felix Greta Hugo Ines Jonas Karen Leo Maria
Nina Oscar Paula Quinn Rosa Simon Tina Ursula Victor Wendy Xavier Yara Zoe Adam Bella Carl
Diana Erik Fiona George Hanna Ivan Julia Kevin Laura Martin Nora Otto Peter Ruth Sara Tim
Vera Walter Alice Bob Carol Dora Ella Frank Gina Henry Iris Jack Kate""".split()
NOUNS = """apple lamp book spoon hammer candle mirror pencil button ribbon bottle basket
blanket coin compass feather flag glove helmet jacket kettle ladder lemon magnet marble needle
notebook pillow pebble plate ring rope scarf shell shovel stamp sword ticket towel trophy
umbrella vase wallet whistle wheel violet rocket castle bridge forest river mountain garden
island desert ocean meadow tower temple harbor tunnel""".split()
NUMBERS = [str(n) for n in range(10, 100)]
RELATIVES = """brother sister uncle aunt cousin neighbour boss dentist best_friend doctor
teacher dog cat horse""".split()
OBJECT_COLORS = "red blue green yellow black white gray brown".split()
OBJECTS = "box door bag room safe drawer locker suitcase".split()

# --------------------------------------------------------------------------
# Facts: how they are told, asked for and answered
# --------------------------------------------------------------------------


@dataclass(frozen=True)
class Attribute:
    """One kind of fact; ``{V}`` is the value, ``{K}`` the key (person, object)."""

    name: str
    kind: str
    values: Sequence[str]
    tell: Sequence[str]
    ask: Sequence[str]
    answer: str


def _attributes() -> list[Attribute]:
    out: list[Attribute] = []

    def both(
        name: str,
        values: Sequence[str],
        tell: Sequence[str],
        ask: Sequence[str],
        answer: str,
        tell3: Sequence[str],
        ask3: Sequence[str],
        answer3: str,
    ) -> None:
        out.append(Attribute(name, "user", values, tell, ask, answer))
        out.append(Attribute(name, "bound", values, tell3, ask3, answer3))

    for noun, values in (("color", COLORS), ("food", FOODS), ("drink", DRINKS), ("sport", SPORTS)):
        variants = [f"favourite {noun}", f"favorite {noun}"]
        if noun == "color":
            variants += ["favourite colour"]
        both(
            noun,
            values,
            [f"My {v} is{{V}}." for v in variants],
            [f"What is my {v}?" for v in variants]
            + [f"Which {noun} do I like most?", f"Do you remember my {variants[0]}?", f"Tell me my {variants[0]}."],
            f"Your favourite {noun} is{{V}}.",
            [f"{{K}}'s {v} is{{V}}." for v in variants],
            [f"What is {{K}}'s {v}?" for v in variants]
            + [f"Which {noun} does {{K}} like most?", f"Do you remember {{K}}'s {variants[0]}?"],
            f"{{K}}'s favourite {noun} is{{V}}.",
        )
    both(
        "city",
        CITIES,
        ["I live in{V}.", "My home is in{V}."],
        ["Where do I live?", "In which city do I live?", "Which city do I live in?", "Do you remember where I live?"],
        "You live in{V}.",
        ["{K} lives in{V}.", "The home of {K} is in{V}."],
        ["Where does {K} live?", "In which city does {K} live?", "Which city does {K} live in?"],
        "{K} lives in{V}.",
    )
    both(
        "pet",
        ANIMALS,
        ["I have a pet{V}.", "My pet is a{V}."],
        ["What pet do I have?", "Which pet do I have?", "What is my pet?", "Do you remember what pet I have?"],
        "You have a pet{V}.",
        ["{K} has a pet{V}.", "The pet of {K} is a{V}."],
        ["What pet does {K} have?", "Which pet does {K} have?", "What is {K}'s pet?"],
        "{K} has a pet{V}.",
    )
    both(
        "job",
        JOBS,
        ["I work as a{V}.", "My job is{V}."],
        ["What is my job?", "What do I do for work?", "Do you remember my job?"],
        "You work as a{V}.",
        ["{K} works as a{V}.", "The job of {K} is{V}."],
        ["What is {K}'s job?", "What does {K} do for work?", "What is the job of {K}?"],
        "{K} works as a{V}.",
    )
    both(
        "number",
        NUMBERS,
        ["My lucky number is{V}.", "My number is{V}."],
        [
            "What is my lucky number?",
            "Which number is my lucky number?",
            "What is my number?",
            "Do you remember my lucky number?",
        ],
        "Your lucky number is{V}.",
        ["{K}'s lucky number is{V}.", "The lucky number of {K} is{V}."],
        ["What is {K}'s lucky number?", "What is the lucky number of {K}?"],
        "{K}'s lucky number is{V}.",
    )
    both(
        "instrument",
        INSTRUMENTS,
        ["I play the{V}.", "My instrument is the{V}."],
        ["Which instrument do I play?", "What instrument do I play?", "What do I play?"],
        "You play the{V}.",
        ["{K} plays the{V}.", "The instrument of {K} is the{V}."],
        ["Which instrument does {K} play?", "What does {K} play?"],
        "{K} plays the{V}.",
    )
    out.append(
        Attribute(
            "name",
            "user",
            NAMES,
            ["My name is{V}.", "I am called{V}.", "Hello, my name is{V}."],
            ["What is my name?", "Do you remember my name?", "What am I called?", "Tell me my name."],
            "Your name is{V}.",
        )
    )
    out.append(
        Attribute(
            "relative",
            "bound",
            NAMES,
            ["My {K} is called{V}.", "The name of my {K} is{V}.", "My {K}'s name is{V}."],
            ["What is my {K} called?", "What is the name of my {K}?", "What is my {K}'s name?"],
            "Your {K} is called{V}.",
        )
    )
    out.append(
        Attribute(
            "code",
            "bound",
            NUMBERS,
            ["The code of the {K} is{V}.", "The {K} has the code{V}."],
            ["What is the code of the {K}?", "Which code does the {K} have?", "Tell me the code of the {K}."],
            "The code of the {K} is{V}.",
        )
    )
    out.append(
        Attribute(
            "password",
            "bound",
            NOUNS,
            ["The password of the {K} is{V}.", "The {K} has the password{V}."],
            ["What is the password of the {K}?", "Which password does the {K} have?"],
            "The password of the {K} is{V}.",
        )
    )
    out.append(
        Attribute(
            "content",
            "bound",
            NOUNS,
            ["There is a{V} in the {K}.", "In the {K} there is a{V}."],
            ["What is in the {K}?", "What is there in the {K}?"],
            "There is a{V} in the {K}.",
        )
    )
    return out


ATTRIBUTES = _attributes()
USER_ATTRIBUTES = [a for a in ATTRIBUTES if a.kind == "user"]
BOUND_ATTRIBUTES = [a for a in ATTRIBUTES if a.kind == "bound"]

ACKS = ["Noted.", "I will remember that.", "Okay, noted.", "Got it."]
READ_REQUESTS = ["Please read this:", "Read this text:", "Here is some text:", "Please read:"]
READ_REPLY = "I have read it."
TELL_LEADS = [
    "Please remember:",
    "Remember this:",
    "Please note:",
    "Here are some facts.",
    "I want to tell you something.",
    "Hello!",
    "Thank you.",
]
ASK_LEADS = [
    "Tell me:",
    "Question:",
    "Please answer:",
    "One more question:",
    "Thank you.",
    "Now a question.",
    "I have a question.",
]
SYSTEM_PROMPTS = [
    "You are a helpful assistant.",
    "You are a helpful assistant with a good memory.",
    "You are a friendly assistant. Answer in short sentences.",
    "Remember what the user tells you and answer questions about it.",
    "You are a careful assistant. You remember facts and answer briefly.",
    "Answer briefly.",
]
CHAT = [
    ("Hello!", "Hello! How can I help you?"),
    ("Hi!", "Hello! How can I help you?"),
    ("Good morning.", "Good morning! How can I help you?"),
    ("How are you?", "I am fine, thank you."),
    ("How are you today?", "I am fine, thank you."),
    ("Thank you.", "You are welcome."),
    ("Thanks!", "You are welcome."),
    ("Thank you very much.", "You are welcome."),
    ("That is nice.", "I am glad to hear that."),
    ("The weather is nice today.", "I am glad to hear that."),
    ("I am tired today.", "I am sorry to hear that."),
    ("It is raining today.", "I am sorry to hear that."),
    ("Can you help me?", "Of course. What do you need?"),
    ("Are you there?", "Yes, I am here."),
    ("Who are you?", "I am a small language model."),
    ("What are you?", "I am a small language model."),
    ("What can you do?", "I can remember facts and answer questions about them."),
    ("Do you have a good memory?", "I try to remember what you tell me."),
    ("Tell me a joke.", "I know only one joke, and I forgot it."),
    ("Wait a moment.", "Of course, take your time."),
    ("Let us talk about something else.", "Of course. What do you have in mind?"),
    ("Let me think.", "Of course, take your time."),
    ("What is a list?", "A list is an ordered collection of items."),
    ("What is a dictionary?", "A dictionary maps keys to values."),
    ("What is a function?", "A function is a named piece of code that can be called."),
    ("What is a file?", "A file is a named piece of data on a disk."),
    ("What is a string?", "A string is a sequence of characters."),
    ("What is a loop?", "A loop repeats a piece of code."),
    ("What is a module?", "A module is a file with code that can be imported."),
    ("What is a class?", "A class describes objects of one kind."),
    ("What is a server?", "A server is a program that answers requests."),
    ("What is a cache?", "A cache keeps results so that they can be used again."),
    ("What is a token?", "A token is a small piece of text."),
    ("What is rain?", "Rain is water that falls from clouds."),
    ("What is snow?", "Snow is frozen water that falls from clouds."),
    ("What is the sun?", "The sun is the star at the center of our system."),
    ("What is the moon?", "The moon is the body that goes around the earth."),
    ("Why is the sky blue?", "The air scatters blue light more than red light."),
    ("Why do leaves fall?", "Trees drop their leaves to save water in winter."),
    ("How does a clock work?", "A clock counts regular beats and shows the time."),
    ("How do plants grow?", "Plants grow from light, water and air."),
    ("How do birds fly?", "Birds push air down with their wings."),
    ("What is a river?", "A river is water that flows to the sea."),
    ("What is bread made of?", "Bread is made of flour, water, salt and yeast."),
    ("What is glass made of?", "Glass is made of melted sand."),
    ("How long is a day?", "A day is the time in which the earth turns once."),
    ("Tell me about bees.", "Bees live in groups and make honey."),
    ("Tell me about whales.", "Whales are large animals that live in the sea."),
    ("Tell me about computers.", "Computers follow instructions very fast."),
    ("Tell me about the sea.", "The sea is large, deep and salty."),
    ("Can you explain what a test is?", "A test checks that a program does what it should."),
    ("Can you explain what memory is?", "Memory keeps data while a program runs."),
    ("I will ask you something later.", "Of course, I am ready."),
    ("Now I have some questions.", "Of course, I am ready."),
    ("Are you ready?", "Of course, I am ready."),
]

CHAT_TEMPLATE = (
    "{{ '<|bos|>' }}"
    "{% for message in messages %}"
    "{% if message['role'] == 'system' %}{{ '<|system|>' + message['content'] + '<|end|>' }}"
    "{% elif message['role'] == 'user' %}{{ '<|user|>' + message['content'] + '<|end|>' }}"
    "{% elif message['role'] == 'assistant' %}"
    "{{ '<|assistant|>' + message['content'] + '<|end|>' }}"
    "{% else %}{{ raise_exception('unknown role: ' + message['role']) }}{% endif %}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)


def filler_sentences() -> tuple[list[str], list[str]]:
    """Sentences from standard library docstrings: (for training, held out)."""
    root = Path(sysconfig.get_paths()["stdlib"])
    seen: set[str] = set()
    for path in sorted(root.glob("*.py")) + sorted(root.glob("*/*.py")):
        if {"test", "tests", "site-packages", "idlelib", "lib2to3"} & set(path.parts):
            continue
        try:
            tree = ast.parse(path.read_text(encoding="utf-8"))
        except (SyntaxError, UnicodeDecodeError, ValueError):
            continue
        kinds = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
        for node in ast.walk(tree):
            if not isinstance(node, kinds):
                continue
            for block in re.split(r"\n\s*\n", ast.get_docstring(node) or ""):
                text = " ".join(block.split())
                for sentence in re.split(r"(?<=[.!?]) (?=[A-Z])", text):
                    if (
                        30 <= len(sentence) <= 200
                        and sentence.endswith(".")
                        and sentence[0].isupper()
                        and sentence.isascii()
                        and not re.search(r">>>|\.\.\.|[<>{}|\\=@#*~^\[\]_/]|\d{3}| {2}", sentence)
                    ):
                        seen.add(sentence)
    train: list[str] = []
    held: list[str] = []
    for sentence in sorted(seen):
        bucket = hashlib.sha256(sentence.encode()).digest()[0] % 12
        (held if bucket == 0 else train).append(sentence)
    return train, held


# --------------------------------------------------------------------------
# Tokenizer
# --------------------------------------------------------------------------


def train_tokenizer(sentences: Sequence[str], vocab_size: int) -> Tokenizer:
    """Byte-level BPE; the words of the facts are frequent enough to be single tokens."""
    words = set(COLORS + CITIES + FOODS + ANIMALS + JOBS + INSTRUMENTS + DRINKS + SPORTS)
    words |= set(NAMES + NOUNS + NUMBERS)
    corpus = [" " + " ".join([w] * 300) for w in sorted(words)]
    corpus += [(w + "\n") * 300 for w in sorted(NAMES)]
    templates: list[str] = []
    for a in ATTRIBUTES:
        templates += [*a.tell, *a.ask, a.answer]
    for q, r in CHAT:
        templates += [q, r]
    templates += ACKS + READ_REQUESTS + [READ_REPLY] + SYSTEM_PROMPTS
    templates += [
        f"My {r.replace('_', ' ')} is the {c} {o}."
        for r in RELATIVES
        for c, o in zip(OBJECT_COLORS, OBJECTS, strict=True)
    ]
    plain = [re.sub(r"\{[VK]\}", "", t) for t in templates]
    corpus += plain * 20 + list(sentences)
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=SPECIALS,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(corpus, trainer)
    for word in sorted(words):
        if len(tokenizer.encode(" " + word).ids) != 1:
            raise RuntimeError(f"{word!r} is not one token; raise the vocabulary size")
    return tokenizer


# --------------------------------------------------------------------------
# Dialogues
# --------------------------------------------------------------------------


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
        self.value_ids = [
            self.encode(" " + w)[0] for w in COLORS + CITIES + FOODS + NOUNS + NUMBERS + NAMES + ANIMALS + JOBS
        ]

    def encode(self, text: str) -> list[int]:
        """Token ids of a piece of text that starts at a word boundary."""
        ids = self.cache.get(text)
        if ids is None:
            ids = self.tokenizer.encode(text).ids
            if len(self.cache) > 200_000:
                self.cache.clear()
            self.cache[text] = ids
        return ids

    # -- parts -------------------------------------------------------------

    def draw_facts(self, count: int, p_user: float, bind: bool = False) -> list[Fact]:
        """Distinct facts: a key has one value of a kind, a value has one key.

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
                    key = rng.choice(RELATIVES).replace("_", " ")
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
        """Append a template with its value as a piece of its own; the value's position."""
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
        """A user turn that tells some facts, perhaps with other sentences around them."""
        rng = self.rng
        if len(d.ids) == 1 and rng.random() < 0.1:
            # the facts stand in the system prompt, which nobody answers
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
        """A question and its answer."""
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
        """A filler turn: small talk, or a text to read of at most about ``budget`` tokens."""
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
        """A dialogue of about ``length`` tokens; ``drop`` leaves out the telling."""
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
        """A random string of value words, repeated; each repeat is predictable."""
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
        """Key, a phrase, value; the same phrase for all, each pair many times.

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
            phrases = [f"'s favourite {a}" for a in ("color", "food", "drink", "sport")]
            phrases = [p + " is" for p in phrases] + [
                " lives in",
                " has a pet",
                " works as a",
                "'s lucky number is",
                " plays the",
                " is in",
                " is",
                " has",
                " likes",
                "",
                "",
            ]
        else:
            things = rng.sample([f" {c} {o}" for c in OBJECT_COLORS for o in OBJECTS], count)
            keys = [(self.encode(t), self.encode(t)) for t in things]
            phrases = [" is", " has the code", " has the password", " is the", "", ""]
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


# --------------------------------------------------------------------------
# Model (the same computation as transformers' LlamaForCausalLM)
# --------------------------------------------------------------------------


@dataclass
class ModelConfig:
    """Shape of the model."""

    vocab_size: int = 2048
    hidden_size: int = 192
    intermediate_size: int = 384
    num_hidden_layers: int = 6
    num_attention_heads: int = 16
    num_key_value_heads: int = 8
    head_dim: int = 16
    max_position_embeddings: int = 2048
    rope_theta: float = 100000.0
    rms_norm_eps: float = 1e-5


class RMSNorm(nn.Module):
    """Root mean square norm with a weight."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        """Normalise the last dimension."""
        return F.rms_norm(x, (x.shape[-1],), self.weight, self.eps)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary position embedding, halves convention."""
    a, b = x.chunk(2, dim=-1)
    return torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1)


class Attention(nn.Module):
    """Grouped-query attention."""

    def __init__(self, c: ModelConfig) -> None:
        super().__init__()
        self.heads, self.kv, self.dim = c.num_attention_heads, c.num_key_value_heads, c.head_dim
        self.q_proj = nn.Linear(c.hidden_size, self.heads * self.dim, bias=False)
        self.k_proj = nn.Linear(c.hidden_size, self.kv * self.dim, bias=False)
        self.v_proj = nn.Linear(c.hidden_size, self.kv * self.dim, bias=False)
        self.o_proj = nn.Linear(self.heads * self.dim, c.hidden_size, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """Causal self-attention over whole rows."""
        b, t, _ = x.shape
        weight = torch.cat((self.q_proj.weight, self.k_proj.weight, self.v_proj.weight))
        qkv = F.linear(x, weight).view(b, t, self.heads + 2 * self.kv, self.dim)
        qk = rotate(qkv[:, :, : self.heads + self.kv], cos, sin).transpose(1, 2)
        v = qkv[:, :, self.heads + self.kv :].transpose(1, 2)
        q, k = qk[:, : self.heads], qk[:, self.heads :]
        group = self.heads // self.kv
        k = k.repeat_interleave(group, dim=1)
        v = v.repeat_interleave(group, dim=1)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        out: Tensor = self.o_proj(y.transpose(1, 2).reshape(b, t, -1))
        return out


class MLP(nn.Module):
    """Gated feed-forward layer."""

    def __init__(self, c: ModelConfig) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(c.hidden_size, c.intermediate_size, bias=False)
        self.up_proj = nn.Linear(c.hidden_size, c.intermediate_size, bias=False)
        self.down_proj = nn.Linear(c.intermediate_size, c.hidden_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """SwiGLU."""
        out: Tensor = self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))
        return out


class Block(nn.Module):
    """One decoder layer."""

    def __init__(self, c: ModelConfig) -> None:
        super().__init__()
        self.self_attn = Attention(c)
        self.mlp = MLP(c)
        self.input_layernorm = RMSNorm(c.hidden_size, c.rms_norm_eps)
        self.post_attention_layernorm = RMSNorm(c.hidden_size, c.rms_norm_eps)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """Attention and feed-forward, each with a residual."""
        x = x + self.self_attn(self.input_layernorm(x), cos, sin)
        out: Tensor = x + self.mlp(self.post_attention_layernorm(x))
        return out


class SmallLlama(nn.Module):
    """Decoder with tied embeddings."""

    def __init__(self, c: ModelConfig) -> None:
        super().__init__()
        self.config = c
        self.embed_tokens = nn.Embedding(c.vocab_size, c.hidden_size)
        self.layers = nn.ModuleList(Block(c) for _ in range(c.num_hidden_layers))
        self.norm = RMSNorm(c.hidden_size, c.rms_norm_eps)
        steps = torch.arange(0, c.head_dim, 2, dtype=torch.float32) / c.head_dim
        angle = torch.outer(
            torch.arange(c.max_position_embeddings, dtype=torch.float32),
            1.0 / c.rope_theta**steps,
        )
        self.register_buffer("cos", angle.cos(), persistent=False)
        self.register_buffer("sin", angle.sin(), persistent=False)
        self.cos: Tensor
        self.sin: Tensor
        self.run_hidden: Callable[[Tensor], Tensor] = self.hidden
        self.initialize()

    @torch.no_grad()
    def initialize(self) -> None:
        """Random weights, and layer 0 heads that look a fixed number of tokens back.

        The embeddings are large enough to stay visible in the residual stream;
        the final norm makes up for that in the (tied) logits.  They share a
        constant direction, and some heads of the first layer read only that one,
        so their scores depend on the distance alone.  Such heads form in any
        trained model and every later match needs them; here they are a start.
        """
        c = self.config
        for name, p in self.named_parameters():
            if name.endswith("proj.weight"):
                std = p.shape[1] ** -0.5
                if "o_proj" in name or "down_proj" in name:
                    std /= math.sqrt(2 * c.num_hidden_layers)
                nn.init.normal_(p, std=std)
        std = 0.5
        constant = torch.full((c.hidden_size,), c.hidden_size**-0.5)
        other = torch.eye(c.hidden_size) - torch.outer(constant, constant)
        length = std * math.sqrt(c.hidden_size)
        embed = torch.randn(c.vocab_size, c.hidden_size) * std
        self.embed_tokens.weight.copy_(embed @ other + 0.75 * length * constant)
        nn.init.constant_(self.norm.weight, 0.1)
        for name, p in self.named_parameters():
            if p.ndim == 2 and p.shape[1] == c.hidden_size and "proj" in name and "o_proj" not in name:
                p.copy_(p @ other)
        attention = self.layers[0].self_attn
        assert isinstance(attention, Attention)
        q, k = attention.q_proj.weight, attention.k_proj.weight
        d = c.head_dim
        read = constant / (math.sqrt(c.hidden_size) * 0.6)  # gives 1 on the normalised input
        pairs = range(min(3, c.head_dim // 2))
        scale = math.sqrt(math.sqrt(c.head_dim))
        amplitude = [scale * math.sqrt(a) for a in (12.0, 6.0, 6.0)]
        frequency = [c.rope_theta ** (-2 * i / c.head_dim) for i in pairs]
        group, half = c.num_attention_heads // c.num_key_value_heads, c.head_dim // 2
        for j, offsets in enumerate(((1, 2), (1, 3), (1, 4), (2, 5))):
            rows = k[j * d : (j + 1) * d]
            rows.mul_(0.1)
            for i in pairs:
                rows[i] += amplitude[i] * read
            for g in range(group):
                head = j * group + g
                rows = q[head * d : (head + 1) * d]
                rows.mul_(0.1)
                angle = offsets[g % 2]
                for i in pairs:
                    rows[i] += amplitude[i] * math.cos(angle * frequency[i]) * read
                    rows[half + i] -= amplitude[i] * math.sin(angle * frequency[i]) * read

    def hidden(self, ids: Tensor) -> Tensor:
        """Final hidden states of whole rows."""
        x = self.embed_tokens(ids)
        cos = self.cos[: ids.shape[1]][None, :, None]
        sin = self.sin[: ids.shape[1]][None, :, None]
        for layer in self.layers:
            x = layer(x, cos, sin)
        out: Tensor = self.norm(x)
        return out

    def logits(self, hidden: Tensor) -> Tensor:
        """Scores over the vocabulary."""
        return F.linear(hidden, self.embed_tokens.weight)

    def loss(self, ids: Tensor, targets: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
        """Weighted sum of cross entropies, and the accuracy on each of KINDS."""
        h = self.run_hidden(ids).flatten(0, 1)
        keep = weights.flatten().nonzero().squeeze(1)
        logits = self.logits(h[keep])
        target, w = targets.flatten()[keep], weights.flatten()[keep]
        ce = F.cross_entropy(logits, target, reduction="none")
        right = logits.argmax(-1) == target
        return (ce * w).sum(), torch.stack([right[w == kind].float().mean() for kind in KINDS])


# --------------------------------------------------------------------------
# Optimizer
# --------------------------------------------------------------------------


def orthogonalize(g: Tensor, steps: int = 5) -> Tensor:
    """Newton-Schulz iteration towards the nearest orthogonal matrix (batched)."""
    a, b, c = 3.4445, -4.7750, 2.0315
    x = g / (g.norm(dim=(-2, -1), keepdim=True) + 1e-7)
    tall = g.shape[-2] > g.shape[-1]
    if tall:
        x = x.mT
    for _ in range(steps):
        xx = x @ x.mT
        x = a * x + (b * xx + c * (xx @ xx)) @ x
    out: Tensor = x.mT if tall else x
    return out


class Muon(torch.optim.Optimizer):
    """Momentum whose update is orthogonalised; for hidden matrices."""

    def __init__(
        self, params: Sequence[nn.Parameter], lr: float, momentum: float = 0.95, weight_decay: float = 0.05
    ) -> None:
        super().__init__(params, {"lr": lr, "momentum": momentum, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """One update; matrices of one shape are orthogonalised together."""
        for group in self.param_groups:
            shapes: dict[torch.Size, list[nn.Parameter]] = {}
            for p in group["params"]:
                if p.grad is not None:
                    shapes.setdefault(p.shape, []).append(p)
            for shape, params in shapes.items():
                updates = []
                for p in params:
                    grad, state = p.grad, self.state[p]
                    assert grad is not None
                    if "m" not in state:
                        state["m"] = torch.zeros_like(p)
                    state["m"].lerp_(grad, 1 - group["momentum"])
                    updates.append(grad.lerp(state["m"], group["momentum"]))
                scale = math.sqrt(max(1.0, shape[0] / shape[1]))
                for p, u in zip(params, orthogonalize(torch.stack(updates)), strict=True):
                    p.mul_(1 - group["lr"] * group["weight_decay"])
                    p.add_(u, alpha=-group["lr"] * scale)


# --------------------------------------------------------------------------
# Saving
# --------------------------------------------------------------------------


def atomic_write(path: Path, data: bytes) -> None:
    """Write a file so that readers see the old or the new one, never a part."""
    temporary = path.with_name(path.name + ".tmp")
    temporary.write_bytes(data)
    os.replace(temporary, path)


def export(model: SmallLlama, tokenizer: Tokenizer, out: Path) -> None:
    """Write a transformers directory."""
    out.mkdir(parents=True, exist_ok=True)
    c = model.config
    state = {("model." + k): v.detach().to("cpu", torch.bfloat16).contiguous() for k, v in model.state_dict().items()}
    temporary = out / "model.safetensors.tmp"
    save_file(state, str(temporary), metadata={"format": "pt"})
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        **asdict(c),
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
        "attention_dropout": 0.0,
        "initializer_range": 0.02,
        "rope_parameters": {"rope_theta": c.rope_theta, "rope_type": "default"},
        "tie_word_embeddings": True,
        "use_cache": True,
        "bos_token_id": BOS,
        "eos_token_id": END,
        "pad_token_id": PAD,
        "dtype": "bfloat16",
        "torch_dtype": "bfloat16",
    }
    tokenizer_config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": "<|bos|>",
        "eos_token": "<|end|>",
        "pad_token": "<|pad|>",
        "additional_special_tokens": ["<|system|>", "<|user|>", "<|assistant|>"],
        "clean_up_tokenization_spaces": False,
        "model_max_length": c.max_position_embeddings,
        "chat_template": CHAT_TEMPLATE,
    }
    generation = {
        "bos_token_id": BOS,
        "eos_token_id": END,
        "pad_token_id": PAD,
        "do_sample": False,
        "max_new_tokens": 64,
    }
    files = {"config.json": config, "tokenizer_config.json": tokenizer_config, "generation_config.json": generation}
    for name, content in files.items():
        atomic_write(out / name, (json.dumps(content, indent=2) + "\n").encode())
    atomic_write(out / "tokenizer.json", (tokenizer.to_str(pretty=False) + "\n").encode())
    temporary.chmod(0o644)
    os.replace(temporary, out / "model.safetensors")


def load(directory: Path) -> tuple[SmallLlama, Tokenizer]:
    """Read a directory that :func:`export` wrote."""
    raw = json.loads((directory / "config.json").read_text())
    names = ModelConfig.__dataclass_fields__
    model = SmallLlama(ModelConfig(**{k: v for k, v in raw.items() if k in names}))
    state = load_file(str(directory / "model.safetensors"))
    model.load_state_dict({k.removeprefix("model."): v.float() for k, v in state.items()})
    return model, Tokenizer.from_file(str(directory / "tokenizer.json"))


# --------------------------------------------------------------------------
# Evaluation
# --------------------------------------------------------------------------

BUCKETS = [(0, 128), (128, 256), (256, 512), (512, 1024), (1024, 1500)]


@torch.no_grad()
def score(model: SmallLlama, d: Dialogue) -> tuple[list[bool], list[bool]]:
    """For each answer: was the value right, and was the whole greedy answer right."""
    device = model.embed_tokens.weight.device
    guess = model.logits(model.hidden(torch.tensor([d.ids], device=device)))[0].argmax(-1).tolist()
    values = [guess[a.value - 1] == d.ids[a.value] for a in d.answers]
    whole = [guess[a.start - 1 : a.end - 1] == d.ids[a.start : a.end] for a in d.answers]
    return values, whole


def evaluate(model: SmallLlama, tokenizer: Tokenizer, per_bucket: int = 240, seed: int = 977_123) -> dict[str, Any]:
    """Recall by distance on held-out dialogues, a control, and loss on held-out filler.

    One forward pass gives every greedy answer of a dialogue: an answer is what
    greedy decoding would produce exactly when each of its tokens is the argmax
    after the ones before it.  Only the first question about a fact counts, and
    its distance is counted from the last mention of the value.
    """
    model.eval()
    _, held = filler_sentences()
    writer = Writer(tokenizer, held, seed)
    table: dict[tuple[int, int], dict[str, list[int]]] = {
        b: {"user": [0, 0], "bound": [0, 0], "whole": [0, 0]} for b in BUCKETS
    }
    attributes: dict[str, list[int]] = {}

    def fill(bucket: tuple[int, int]) -> None:
        row = table[bucket]
        while row["whole"][1] < per_bucket:
            target = writer.rng.randint(*bucket)
            d = writer.dialogue(
                min(target + 250, 1990),
                p_user=0.5,
                gap=0.0 if target < 60 else max(0.0, target / (target + 250)),
                count=writer.rng.randint(5, 9),
            )
            d.ids = d.ids[:2048]
            d.answers = [a for a in d.answers if a.end <= len(d.ids)]
            values, whole = score(model, d)
            for a, ok, exact in zip(d.answers, values, whole, strict=True):
                if a.first and bucket[0] <= a.distance < bucket[1]:
                    row[a.kind][0] += ok
                    row[a.kind][1] += 1
                    row["whole"][0] += exact
                    row["whole"][1] += 1
                    cell = attributes.setdefault(f"{a.kind}:{a.attribute}", [0, 0])
                    cell[0] += ok
                    cell[1] += 1

    for bucket in BUCKETS:
        fill(bucket)

    def rate(pairs: Sequence[Sequence[int]]) -> dict[str, Any]:
        right, n = sum(p[0] for p in pairs), sum(p[1] for p in pairs)
        return {"recall": round(right / n, 4) if n else None, "questions": n}

    control, chance = [0, 0], 0.0
    sizes = {(a.kind, a.name): len(a.values) for a in ATTRIBUTES}
    while control[1] < 300:
        d = writer.dialogue(400, p_user=0.5, drop=True, gap=0.4, count=6)
        values, _ = score(model, d)
        for a, ok in zip(d.answers, values, strict=True):
            if a.first and a.distance == 0:
                control[0] += ok
                control[1] += 1
                chance += 1 / sizes[a.kind, a.attribute]
    device = model.embed_tokens.weight.device
    total, count = 0.0, 0
    with torch.no_grad():
        for start in range(0, min(len(held), 400), 20):
            text = "Please read this: " + " ".join(held[start : start + 20])
            ids = torch.tensor([[BOS, USER, *tokenizer.encode(text).ids][:2048]], device=device)
            logits = model.logits(model.hidden(ids[:, :-1]))
            total += F.cross_entropy(logits[0], ids[0, 1:], reduction="sum").item()
            count += ids.shape[1] - 1
    rows = list(table.values())
    return {
        "parameters": sum(p.numel() for p in model.parameters()),
        "seed": seed,
        "method": "held-out dialogues and filler, greedy, argmax of the value token; distance in "
        "tokens from the last mention of the value to the start of the answer",
        "overall": rate([r[k] for r in rows for k in ("user", "bound")]),
        "user_facts": rate([r["user"] for r in rows]),
        "bound_facts": rate([r["bound"] for r in rows]),
        "whole_answer_exact": rate([r["whole"] for r in rows]),
        "by_distance": {
            f"{b[0]}-{b[1]}": {
                "all": rate([table[b]["user"], table[b]["bound"]]),
                "user": rate([table[b]["user"]]),
                "bound": rate([table[b]["bound"]]),
            }
            for b in BUCKETS
        },
        "by_attribute": {k: rate([v]) for k, v in sorted(attributes.items())},
        "control_fact_removed": rate([control]) | {"chance": round(chance / control[1], 4)},
        "held_out_filler_loss": round(total / count, 4),
        "held_out_filler_tokens": count,
    }


# --------------------------------------------------------------------------
# Training
# --------------------------------------------------------------------------


@dataclass(frozen=True)
class Stage:
    """A step of the curriculum: row lengths with their shares of the tokens."""

    lengths: dict[int, float]
    induction: float
    until: float
    """Latest end, as a fraction of the training time."""
    recall: float
    """Ends earlier when recall on the longest rows passes this."""
    bind: float
    """Share of the dialogues whose facts are all of one or two kinds."""
    bridge: float
    """Share of the rows that are keys, phrases and values without a dialogue."""


STAGES = [
    Stage({64: 1.0}, 0.5, 0.22, 0.74, 0.0, 0.5),
    Stage({128: 1.0}, 0.05, 0.42, 0.88, 0.6, 0.35),
    Stage({128: 0.3, 256: 0.7}, 0.02, 0.55, 0.92, 0.6, 0.1),
    Stage({128: 0.1, 256: 0.3, 512: 0.6}, 0.01, 0.68, 0.93, 0.5, 0.05),
    Stage({256: 0.25, 512: 0.25, 1024: 0.5}, 0.0, 0.82, 0.88, 0.4, 0.02),
    Stage({256: 0.1, 512: 0.2, 1024: 0.3, 2040: 0.4}, 0.0, 1.0, 2.0, 0.4, 0.0),
]


def batch(
    writer: Writer, length: int, rows: int, induction: float, bridge: float, device: torch.device
) -> tuple[Tensor, Tensor, Tensor]:
    """Inputs, targets and weights of one step."""
    ids, weights = [], []
    for _ in range(rows):
        draw = writer.rng.random()
        if draw < induction:
            d = writer.induction(length + 1)
        elif draw < induction + bridge:
            d = writer.bridge(length + 1)
        else:
            d = writer.dialogue(length + 1)
        ids.append(d.ids[: length + 1])
        weights.append(d.weights[: length + 1])
    x = torch.tensor(ids, device=device)
    w = torch.tensor(weights, device=device)
    return x[:, :-1], x[:, 1:], w[:, 1:]


def train(args: argparse.Namespace) -> None:
    """Train, log, save and export."""
    device = torch.device(("cuda" if torch.cuda.is_available() else "cpu") if args.device == "auto" else args.device)
    work = Path(args.work or (args.out + ".work"))
    work.mkdir(parents=True, exist_ok=True)
    out = Path(args.out)
    sentences, held = filler_sentences()
    checkpoint = work / "state.pt"
    resume = args.resume and checkpoint.exists()
    if resume:
        tokenizer = Tokenizer.from_file(str(work / "tokenizer.json"))
    else:
        tokenizer = train_tokenizer(sentences, args.vocab)
        tokenizer.save(str(work / "tokenizer.json"))
    config = ModelConfig(
        vocab_size=tokenizer.get_vocab_size(),
        hidden_size=args.hidden,
        intermediate_size=args.ffn,
        num_hidden_layers=args.layers,
    )
    torch.manual_seed(args.seed)
    model = SmallLlama(config).to(device)
    matrices = [p for n, p in model.named_parameters() if n.endswith("proj.weight")]
    others = [p for n, p in model.named_parameters() if not n.endswith("proj.weight")]
    if args.compile:
        model.run_hidden = torch.compile(model.hidden, dynamic=False)
    muon = Muon(matrices, lr=args.lr)
    adam = torch.optim.AdamW(others, lr=args.adam_lr, betas=(0.9, 0.98), weight_decay=0.0)
    tokens, seconds, stage, step = 0, 0.0, 0, 0
    recall: dict[int, float] = {}
    if resume:
        saved = torch.load(checkpoint, map_location=device, weights_only=True)
        model.load_state_dict(saved["model"])
        muon.load_state_dict(saved["muon"])
        adam.load_state_dict(saved["adam"])
        tokens, seconds = saved["tokens"], saved["seconds"]
        stage, step, recall = saved["stage"], saved["step"], saved.get("recall", {})
    if args.stage is not None:
        stage = args.stage
    writer = Writer(tokenizer, sentences, args.seed + 1 + step)
    count = sum(p.numel() for p in model.parameters())
    print(
        f"parameters {count:,}  vocabulary {config.vocab_size}  filler sentences "
        f"{len(sentences)} + {len(held)} held out  device {device}",
        flush=True,
    )

    def save() -> None:
        temporary = checkpoint.with_suffix(".tmp")
        torch.save(
            {
                "model": model.state_dict(),
                "muon": muon.state_dict(),
                "adam": adam.state_dict(),
                "tokens": tokens,
                "seconds": seconds,
                "stage": stage,
                "step": step,
                "recall": recall,
            },
            temporary,
        )
        os.replace(temporary, checkpoint)
        export(model, tokenizer, out)

    started, before = time.monotonic(), seconds
    report = saved_at = time.monotonic()
    shown, loss_sum, loss_n = tokens, 0.0, 0
    total = args.minutes * 60
    while seconds < total:
        plan = STAGES[stage]
        reached = recall.get(max(plan.lengths), 0.0)
        if plan.induction + plan.bridge > 0.9:
            reached = min(recall.get(-1, 0.0), recall.get(-2, 0.0))
        if stage + 1 < len(STAGES) and (seconds / total > plan.until or reached > plan.recall):
            stage += 1
            print(f"stage {stage}: {STAGES[stage]}", flush=True)
        plan = STAGES[stage]
        writer.p_bind = plan.bind
        length = writer.rng.choices(list(plan.lengths), list(plan.lengths.values()))[0]
        rows = max(1, args.batch // length)
        x, y, w = batch(writer, length, rows, plan.induction, plan.bridge, device)
        scale = min(1.0, (step + 1) / 20, max(0.0, (1 - seconds / total) / args.decay))
        for group in muon.param_groups:
            group["lr"] = args.lr * scale
        for group in adam.param_groups:
            group["lr"] = args.adam_lr * scale
        loss, right = model.loss(x, y, w)
        loss = loss / w.sum()
        torch.autograd.backward(loss)
        torch.nn.utils.clip_grad_norm_(others, 1.0)
        muon.step()
        adam.step()
        model.zero_grad(set_to_none=True)
        step += 1
        tokens += x.numel()
        loss_sum += loss.item()
        loss_n += 1
        for key, value in zip((length, -1, -2), right.tolist(), strict=True):
            if not math.isnan(value):
                old = recall.get(key, 0.0)
                recall[key] = old + 0.06 * (value - old)
        now = time.monotonic()
        seconds = before + now - started
        if now - report > args.report:
            rates = " ".join(f"{k}:{v:.3f}" for k, v in sorted(recall.items()))
            print(
                f"min {seconds / 60:6.2f} stage {stage} step {step} tokens {tokens / 1e6:.3f}M "
                f"loss {loss_sum / loss_n:.4f} recall[{rates}] "
                f"{(tokens - shown) / (now - report):.0f} tok/s",
                flush=True,
            )
            report, shown, loss_sum, loss_n = now, tokens, 0.0, 0
        if now - saved_at > args.save_every:
            save()
            saved_at = now
    save()
    print(f"trained {tokens:,} tokens in {seconds / 60:.1f} minutes", flush=True)
    result = evaluate(model, tokenizer)
    result |= {"training_tokens": tokens, "training_minutes": round(seconds / 60, 1)}
    atomic_write(out / "evaluation.json", (json.dumps(result, indent=2) + "\n").encode())
    print(json.dumps(result, indent=2), flush=True)


def main(argv: Sequence[str] | None = None) -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--out", default="build/small-model")
    parser.add_argument("--work", default=None, help="folder for the resumable state")
    parser.add_argument("--minutes", type=float, default=35.0)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--device", default="auto")
    parser.add_argument("--resume", action="store_true")
    parser.add_argument("--evaluate", metavar="DIR", default=None)
    parser.add_argument("--vocab", type=int, default=2048)
    parser.add_argument("--hidden", type=int, default=192)
    parser.add_argument("--ffn", type=int, default=384)
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--batch", type=int, default=2048, help="tokens in a step")
    parser.add_argument("--lr", type=float, default=0.012, help="of Muon")
    parser.add_argument("--adam-lr", type=float, default=0.004)
    parser.add_argument("--decay", type=float, default=0.8, help="share of the time in which the rates decay")
    parser.add_argument("--stage", type=int, default=None, help="start at this stage")
    parser.add_argument("--compile", action="store_true", help="use torch.compile")
    parser.add_argument("--report", type=float, default=15.0, help="seconds between reports")
    parser.add_argument("--save-every", type=float, default=180.0)
    args = parser.parse_args(argv)
    torch.set_num_threads(args.threads)
    if args.evaluate:
        model, tokenizer = load(Path(args.evaluate))
        result = evaluate(model, tokenizer)
        path = Path(args.evaluate) / "evaluation.json"
        if path.exists():
            old = json.loads(path.read_text())
            keep = ("training_tokens", "training_minutes")
            result |= {k: old[k] for k in keep if k in old}
        atomic_write(path, (json.dumps(result, indent=2) + "\n").encode())
        print(json.dumps(result, indent=2))
        return
    train(args)


if __name__ == "__main__":
    main()
