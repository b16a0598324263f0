"""Recall on held-out dialogues, by distance, and loss on held-out filler."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from tokenizers import Tokenizer

from scripts.small_model.dialogues import Dialogue, Writer
from scripts.small_model.facts import ATTRIBUTES
from scripts.small_model.filler import filler_sentences
from scripts.small_model.model import SmallLlama
from scripts.small_model.tokenizer import BOS, USER

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
