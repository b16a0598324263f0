"""The byte-level BPE tokenizer, its special tokens and the chat template."""

from __future__ import annotations

import re
from collections.abc import Sequence

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from scripts.small_model.facts import (
    ACKS,
    ATTRIBUTES,
    CHAT,
    NAMES,
    OBJECT_COLORS,
    OBJECTS,
    READ_REPLY,
    READ_REQUESTS,
    RELATIVES,
    SYSTEM_PROMPTS,
    WORDS,
)

SPECIALS = ["<|pad|>", "<|bos|>", "<|system|>", "<|user|>", "<|assistant|>", "<|end|>"]
PAD, BOS, SYSTEM, USER, ASSISTANT, END = range(6)
VALUE_KINDS = [
    "colors",
    "cities",
    "foods",
    "animals",
    "jobs",
    "instruments",
    "drinks",
    "sports",
    "names",
    "nouns",
    "numbers",
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


def train_tokenizer(sentences: Sequence[str], vocab_size: int) -> Tokenizer:
    """Train byte-level BPE; the words of the facts are frequent enough to be single tokens."""
    words = {word for kind in VALUE_KINDS for word in WORDS[kind]}
    corpus = [" " + " ".join([w] * 300) for w in sorted(words)]
    corpus += [(w + "\n") * 300 for w in sorted(NAMES)]
    templates: list[str] = []
    for a in ATTRIBUTES:
        templates += [*a.tell, *a.ask, a.answer]
    for q, r in CHAT:
        templates += [q, r]
    templates += ACKS + READ_REQUESTS + [READ_REPLY] + SYSTEM_PROMPTS
    templates += [f"My {r} is the {c} {o}." for r in RELATIVES for c, o in zip(OBJECT_COLORS, OBJECTS, strict=True)]
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
