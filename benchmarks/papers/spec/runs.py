"""Every variant on the same requests: right or wrong, and like the full cache or not."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from afterglow.importance.row_layout import RowImportance, normalised
from afterglow.importance.select import Selection, SelectionRules
from afterglow.model.decoder import Decoder
from benchmarks.common.paired import Paired
from benchmarks.papers.spec.accounting import Layer
from benchmarks.papers.spec.attend import Prefix, SelectingAttend, prefill
from benchmarks.papers.spec.baselines import Mode, attend_as
from benchmarks.papers.spec.prefixes import Query, Question, Shared

RETENTIONS = (0.5, 0.4, 0.25, 0.1, 0.05)
ALPHAS = (0.0, 0.2, 0.4, 0.6, 0.8, 1.0, 1.5, 2.0)
DEFAULT = 0.25  # where alpha is varied
EARLIER = 3  # questions of multiple choice over each prefix that are not judged
SELECTING: tuple[Mode, ...] = ("spec", "h2o", "spi", "random", "sinks")


class Variant(NamedTuple):
    """A mode with its retention and alpha."""

    mode: Mode
    retention: float = 1.0
    alpha: float = 0.6

    @property
    def name(self) -> str:
        """Its key in tables of values."""
        return self.mode if self.mode == "exact" else f"{self.mode} {self.retention:g} {self.alpha:g}"


EXACT = Variant("exact")


def variants(retentions: Sequence[float], alphas: Sequence[float], modes: Sequence[Mode] = SELECTING) -> list[Variant]:
    """The full cache first; every mode at every retention; SPEC with other alphas."""
    found = [EXACT, *(Variant(mode, retention) for retention in retentions for mode in modes)]
    return found + [Variant("spec", DEFAULT, alpha) for alpha in alphas if alpha != 0.6]


@dataclass
class Loaded:
    """What selections cost, by layer, summed over requests."""

    requests: int = 0
    fallbacks: dict[int, float] = field(default_factory=dict)
    similarity: dict[int, float] = field(default_factory=dict)
    keys: dict[int, float] = field(default_factory=dict)  # shares of all keys
    vectors: dict[int, float] = field(default_factory=dict)  # shares of all keys and values

    def add(self, layer: Layer, selections: Sequence[Selection]) -> None:
        """One request."""
        self.requests += 1
        for number, selection in enumerate(selections):
            found = layer.vectors(selection.kind, selection.count, selection.kept)
            whole = layer.kv_heads * selection.count
            measures: tuple[tuple[dict[int, float], float], ...] = (
                (self.fallbacks, float(selection.kind != "shared")),
                (self.similarity, selection.similarity or 0.0),
                (self.keys, (found.probe_keys + found.keys) / whole),
                (self.vectors, found.total / (2 * whole)),
            )
            for into, value in measures:
                into[number] = into.get(number, 0) + value

    def mean(self, what: dict[int, float]) -> float:
        """Over layers and requests."""
        return sum(what.values()) / (self.requests * len(what))

    def by_layer(self, what: dict[int, float]) -> list[float]:
        """Over requests."""
        return [round(what[layer] / self.requests, 4) for layer in sorted(what)]


@dataclass
class Seen:
    """One prefix with what exact requests over it have shown: for `observations`."""

    count: int
    sums: list[Tensor]  # of each judged request, float32 [layers, kv_heads, rows]
    before: RowImportance  # of the earlier requests


Protocol = Literal["scored", "generated", "published"]
"""`scored`: the reply comes with the request, as multiple choice is scored, and is among what the selection goes by (how SPEC
measured); `generated`: it is decoded as the engine does it if nothing else is said, selecting anew for each token;
`published`: decoded over what the prompt selected, as the paper decodes."""


@dataclass
class Found:
    """What all requests gave in one protocol."""

    right: Paired = field(default_factory=Paired)  # facts, 0 or 1
    agree: Paired = field(default_factory=Paired)  # next tokens like the full cache's, in replies to questions
    text_agree: Paired = field(default_factory=Paired)  # in texts that are gone on with
    text_correct: Paired = field(default_factory=Paired)  # next tokens like the text's
    text_loss: Paired = field(default_factory=Paired)  # of the text's tokens, nats
    loaded: dict[str, Loaded] = field(default_factory=dict)


@dataclass
class Session:
    """One prefix: its length, and what exact requests over it show."""

    rows: int
    before: RowImportance  # of the earlier requests
    sums: list[Tensor] = field(default_factory=list)  # of each judged request, float32 [layers, kv_heads, rows]


def run(
    decoder: Decoder, shared: Iterable[Shared], wanted: dict[Protocol, list[Variant]], seed: int
) -> tuple[dict[Protocol, Found], list[Session]]:
    """The variants of each protocol on all requests that are judged; sessions as the first protocol sees them."""
    found: dict[Protocol, Found] = {protocol: Found() for protocol in wanted}
    sessions = []
    generator = torch.Generator().manual_seed(seed)
    for cluster, each in enumerate(shared):
        prefix = prefill(decoder, each.prefix).turn(decoder)
        for protocol, variants_ in wanted.items():
            session = Session(len(prefix), RowImportance(decoder.spec.layers, len(prefix)))
            for query in each.queries[: each.earlier]:
                _learn(decoder, prefix, first_part(query, protocol), session.before)
            for query in each.queries[each.earlier :]:
                _query(decoder, prefix, query, protocol, variants_, session, generator, found[protocol], cluster)
            if protocol == next(iter(wanted)):
                sessions.append(session)
    return found, sessions


def first_part(query: Query, protocol: Protocol) -> list[int]:
    """The tokens that the selection goes by."""
    return query.prompt + query.reply[:-1] if protocol == "scored" else query.prompt


def _learn(decoder: Decoder, prefix: Prefix, ids: list[int], into: RowImportance) -> None:
    """The rows that are important to an earlier request."""
    request = attend_as("exact", decoder, prefix, 1.0, observe=True)
    request.extend(ids)
    for layer, sums in enumerate(request.sums):
        into.add(layer, 0, normalised(sums.mean(0)).cpu())


def _query(
    decoder: Decoder,
    prefix: Prefix,
    query: Query,
    protocol: Protocol,
    wanted: Sequence[Variant],
    session: Session,
    generator: torch.Generator,
    found: Found,
    cluster: int,
) -> None:
    reply, last = torch.tensor(query.reply), len(query.prompt) - 1
    guesses: dict[str, Tensor] = {}
    losses: dict[str, Tensor] = {}
    for variant in wanted:
        exact = variant == EXACT
        renew = protocol == "generated" and variant.mode in ("spec", "h2o")  # the others select without looking
        request = _request(variant, decoder, prefix, session.before, generator, renew=renew, observe=exact)
        hidden = [request.extend(first_part(query, protocol))[last:]]
        if exact:
            session.sums.append(torch.stack(request.sums).cpu())
        elif variant.mode in ("spec", "h2o") and not renew:  # which goes on loading
            found.loaded.setdefault(variant.name, Loaded()).add(shape(decoder), request.selections)
        rest = query.reply[:-1] if protocol != "scored" else []
        parts = [[token] for token in rest] if renew else [rest] * bool(rest)
        hidden += [request.extend(part) for part in parts]
        logits = decoder.logits(torch.cat(hidden)).cpu()
        guesses[variant.name] = logits.argmax(-1)
        losses[variant.name] = F.cross_entropy(logits, reply, reduction="none")
    full = guesses[EXACT.name]
    alike = {name: (guess == full).float() for name, guess in guesses.items()}
    if query.value is None:
        found.text_agree.add(alike, cluster)
        found.text_correct.add({name: (guess == reply).float() for name, guess in guesses.items()}, cluster)
        found.text_loss.add(losses, cluster)
    else:
        found.agree.add(alike, cluster)
        at = slice(query.value, query.value + 1)
        found.right.add({name: (guess[at] == reply[at]).float() for name, guess in guesses.items()}, cluster)


def _request(
    variant: Variant,
    decoder: Decoder,
    prefix: Prefix,
    before: RowImportance,
    generator: torch.Generator,
    *,
    renew: bool = False,
    observe: bool = False,
) -> SelectingAttend:
    return attend_as(
        variant.mode,
        decoder,
        prefix,
        variant.retention,
        alpha=variant.alpha,
        static=list(before.mean.to(decoder.device)),
        generator=generator,
        renew=renew,
        observe=observe,
    )


def shape(decoder: Decoder) -> Layer:
    """A layer, with vectors in two bytes."""
    spec = decoder.spec
    return Layer(
        kv_heads=spec.kv_heads,
        probe_heads=min(SelectionRules().probe_heads, spec.kv_heads),
        vector_bytes=2 * spec.head_dim,
    )


@dataclass
class Chosen:
    """Multiple choice."""

    right: Paired = field(default_factory=Paired)
    same: Paired = field(default_factory=Paired)  # as with the full cache
    loaded: dict[str, Loaded] = field(default_factory=dict)
    chances: list[float] = field(default_factory=list)
    rows: list[int] = field(default_factory=list)


def choose(
    decoder: Decoder, shared: Iterable[tuple[list[int], list[Question]]], wanted: Sequence[Variant], seed: int
) -> Chosen:
    """Take the choice whose tokens have the largest mean log-likelihood, in all variants: a sum would prefer short ones. The first
    `EARLIER` questions over a prefix are the earlier requests."""
    found, generator = Chosen(), torch.Generator().manual_seed(seed)
    for cluster, (ids, questions) in enumerate(shared):
        prefix = prefill(decoder, ids).turn(decoder)
        found.rows.append(len(ids))
        before = RowImportance(decoder.spec.layers, len(ids))
        for question in questions[:EARLIER]:
            _learn(decoder, prefix, question.prompt + question.choices[question.answer][:-1], before)
        for question in questions[EARLIER:]:
            picks = {}
            for variant in wanted:
                picks[variant.name] = _pick(decoder, prefix, question, variant, before, generator, found)
            found.chances.append(1 / len(question.choices))
            full = picks[EXACT.name]
            found.right.add({name: _flag(pick == question.answer) for name, pick in picks.items()}, cluster)
            found.same.add({name: _flag(pick == full) for name, pick in picks.items()}, cluster)
    return found


def _pick(
    decoder: Decoder,
    prefix: Prefix,
    question: Question,
    variant: Variant,
    before: RowImportance,
    generator: torch.Generator,
    found: Chosen,
) -> int:
    means = []
    for choice in question.choices:
        request = _request(variant, decoder, prefix, before, generator)
        hidden = request.extend(question.prompt + choice[:-1])[len(question.prompt) - 1 :]
        means.append(-float(F.cross_entropy(decoder.logits(hidden).cpu(), torch.tensor(choice))))
        if variant.mode in ("spec", "h2o"):
            found.loaded.setdefault(variant.name, Loaded()).add(shape(decoder), request.selections)
    return max(range(len(means)), key=means.__getitem__)


def _flag(value: bool) -> Tensor:
    return torch.tensor([float(value)])
