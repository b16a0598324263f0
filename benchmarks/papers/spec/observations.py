"""What the requests' attention shows: how alike heads and layers are, how rows lie in chunks, what a prior finds.

All from the attention of the full cache (`Session.sums`), so that no earlier selection has a part in it.
"""

from __future__ import annotations

import math
import random
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from afterglow.importance.chunk_cache import CHUNK_POLICIES, ChunkPlacement, Place
from afterglow.importance.row_layout import ExtentView, RowLayout, RowOrder
from afterglow.importance.select import Selection, SelectionRules, fall_back, judge, threshold, top
from afterglow.importance.speculation import Prior, Speculation, SpeculationTally, guess, within
from benchmarks.papers.spec.accounting import amplification
from benchmarks.papers.spec.runs import RETENTIONS, Session
from benchmarks.papers.spec.similarity import head_similarity, layer_similarity, recall

MOST = 160  # requests that are looked at, over all sessions
PRIORS: tuple[Prior, ...] = ("prior", "cut", "random", "sinks")


def spread(sessions: Sequence[Session], most: int = MOST) -> Iterator[tuple[Session, Tensor]]:
    """Requests of all sessions, about equally many of each."""
    for session in sessions:
        yield from ((session, sums) for sums in session.sums[: max(1, most // len(sessions))])


def heads(sessions: Sequence[Session]) -> list[dict[str, Any]]:
    """Figure 8: mean Jaccard indices of heads' important rows, by layer; and of adjacent layers'."""
    rows, layers = [], len(sessions[0].sums[0])
    for share in (0.1, 0.25, 0.4):
        between, adjacent, count = torch.zeros(layers), torch.zeros(layers - 1), 0
        for session, sums in spread(sessions):
            k = max(1, round(share * session.rows))
            between = between + torch.tensor([head_similarity(layer, k) for layer in sums])
            adjacent = adjacent + layer_similarity(sums, k)
            count += 1
        rows.append(
            {
                "important": share,
                "random": round(share / (2 - share), 4),
                "threshold": round(threshold(round(1e4 * share), 10_000, 0.6), 4),
                "heads": _rounded(between, count),
                "adjacent_layers": _rounded(adjacent, count),
            }
        )
    return rows


def _rounded(total: Tensor, count: int) -> list[float]:
    return [round(float(value), 4) for value in total / count]


def select(sums: Tensor, k: int, rules: SelectionRules) -> Selection:
    """A layer's selection from its KV heads' sums [kv_heads, rows]; the first probe heads vote."""
    verdict = judge(sums[: rules.probe_heads], k, rules)
    return verdict.selection or fall_back(sums, k, rules, verdict)


def static(sessions: Sequence[Session]) -> list[dict[str, Any]]:
    """Figure 4: of the rows that are important to a request, those that were to earlier ones (SPI's)."""
    rows = []
    for share in RETENTIONS:
        found = []
        for session, sums in spread(sessions):
            k = max(1, round(share * session.rows))
            earlier, now = top(session.before.mean, k), top(sums.mean(1), k)
            found += [recall(a, b) for a, b in zip(earlier, now, strict=True)]
        rows.append({"retention": share, "recall": round(sum(found) / len(found), 4)})
    return rows


def chunks(sessions: Sequence[Session], sizes: Sequence[int] = (16, 64)) -> list[dict[str, Any]]:
    """Figures 5 and 20: important rows in the chunks that are read, in the order of the text and reordered by their
    importance to earlier requests. One set for all heads in every layer."""
    rows = []
    rules = SelectionRules(force="pass")
    for share in (0.5, 0.25, 0.1):
        for size in sizes:
            reads = {"text": 0, "reordered": 0}
            wanted = count = all_chunks = 0
            hot: list[float] = []
            for session in sessions:
                k = max(1, round(share * session.rows))
                for layer in range(len(session.before.mean)):
                    view = [ExtentView(session.rows, 0, session.rows)]
                    text = RowLayout(view, chunk=size)
                    order = RowLayout(view, [RowOrder.by(session.before.mean[layer])], chunk=size)
                    hits = []
                    for sums in session.sums:
                        selected = select(sums[layer], k, rules).rows
                        hits.append(text.hits(selected))
                        reads["text"] += int((hits[-1] > 0).sum())
                        reads["reordered"] += len(order.chunks(selected))
                        wanted, count, all_chunks = wanted + k, count + 1, all_chunks + len(text)
                    hot += _hotness(torch.stack(hits), size)
            rows.append(
                {
                    "retention": share,
                    "chunk": size,
                    "read": {name: round(n / all_chunks, 4) for name, n in reads.items()},
                    "important_in_read": {name: round(wanted / (n * size), 4) for name, n in reads.items()},
                    "amplification": {name: round(amplification(n, size, wanted), 4) for name, n in reads.items()},
                    "fewer_by_reordering": round(reads["text"] / reads["reordered"], 4),
                    "frequency_to_share": round(sum(hot) / len(hot), 4) if hot else None,
                }
            )
    return rows


def _hotness(hits: Tensor, size: int) -> list[float]:
    """Correlation of chunks' access frequency with the share of important rows when read; nothing where all chunks are
    read alike. `hits` int64 [requests, chunks]."""
    times = (hits > 0).sum(0).float()
    seen = times > 0
    shares = hits.sum(0)[seen] / times[seen] / size
    times = times[seen]
    if len(times) < 3 or float(times.std()) == 0 or float(shares.std()) == 0:
        return []
    return [float(torch.corrcoef(torch.stack((times, shares)))[0, 1])]


def caching(sessions: Sequence[Session], *, chunk: int = 16, retention: float = 0.25) -> list[dict[str, Any]]:
    """Figure 21: of the rows that requests want, the share that is on the device, by policy, before and after reordering.

    Prefixes are asked for with normal frequency; the device holds 17.5 % of all chunks, host 56 % (10 and 32 of about 57 GB).
    The first half of the requests warms the caches, and is not counted.
    """
    rules, rng, count = SelectionRules(retention=retention, force="pass"), random.Random(0), len(sessions)
    popularity = [math.exp(-(((i - (count - 1) / 2) / (0.17 * count)) ** 2) / 2) for i in range(count)]
    trace = [
        (session, rng.randrange(len(sessions[session].sums)))
        for session in rng.choices(range(count), popularity, k=25 * count)
    ]
    rows = []
    for name in ("text", "reordered"):
        wanted, chunks = _chunk_hits(sessions, name == "reordered", chunk, rules)
        caches = {
            policy: ChunkPlacement[Any](round(0.175 * chunks), round(0.56 * chunks), policy)
            for policy in CHUNK_POLICIES
        }
        warm: dict[str, dict[Place, int]] = {}
        for number, request in enumerate(trace):
            for policy, cache in caches.items():
                if number == len(trace) // 2:
                    warm[policy] = dict(cache.rows)
                for where, hits in wanted[request]:
                    cache.access(where, 1, chunk, hits)
        for policy, cache in caches.items():
            rows_of = {place: cache.rows[place] - warm[policy][place] for place in cache.rows}
            shares = {place: round(n / sum(rows_of.values()), 4) for place, n in rows_of.items()}
            rows.append({"order": name, "policy": policy, "chunk": chunk, "retention": retention, "rows_on": shares})
    return rows


def _chunk_hits(
    sessions: Sequence[Session], reordered: bool, chunk: int, rules: SelectionRules
) -> tuple[dict[tuple[int, int], list[tuple[tuple[int, int, int], int]]], int]:
    """Of each request (session, number) the chunks (session, layer, number) that it reads, with the rows that it wants of
    each; and the number of all chunks."""
    found: dict[tuple[int, int], list[tuple[tuple[int, int, int], int]]] = {}
    chunks = 0
    for index, session in enumerate(sessions):
        k = rules.keep(session.rows)
        assert k is not None
        for layer, mean in enumerate(session.before.mean):
            orders = [RowOrder.by(mean)] if reordered else None
            places = RowLayout([ExtentView(session.rows, 0, session.rows)], orders, chunk)
            chunks += len(places)
            for number, sums in enumerate(session.sums):
                hits = places.hits(select(sums[layer], k, rules).rows).tolist()
                read = [((index, layer, at), n) for at, n in enumerate(hits) if n]
                found.setdefault((index, number), []).extend(read)
    return found, chunks


def priors(sessions: Sequence[Session], *, chunk: int = 16, retention: float = 0.25) -> list[dict[str, Any]]:
    """What each prior would read early, with room for a tenth, a quarter and half of a layer's chunks, and what of that
    the next layer wants. Budget and sizes in chunks; a layer wants keys and values alike."""
    rules, generator = SelectionRules(retention=retention), torch.Generator().manual_seed(0)
    tallies: dict[tuple[str, Prior, float], SpeculationTally] = {}
    rows_found: dict[Prior, list[float]] = {prior: [] for prior in PRIORS}
    share_wanted: dict[str, list[float]] = {}
    for session, sums in spread(sessions, MOST // 2):
        k = rules.keep(session.rows)
        assert k is not None
        selections = [select(layer, k, rules) for layer in sums]
        view = [ExtentView(session.rows, 0, session.rows)]
        for layer, selection in enumerate(selections):
            orders = {"text": None, "reordered": [RowOrder.by(session.before.mean[layer])]}
            laid = {name: RowLayout(view, order, chunk=chunk) for name, order in orders.items()}
            wanted = {name: places.chunks(selection.wanted()).tolist() for name, places in laid.items()}
            for name, places in laid.items():
                share_wanted.setdefault(name, []).append(len(wanted[name]) / len(places))
            for prior in PRIORS:
                before = selections[layer - 1] if layer else None
                guessed = guess(prior, before, session.before.mean[layer], session.rows, k, generator=generator)
                if layer:
                    mask = torch.zeros(session.rows, dtype=torch.bool)
                    mask[guessed] = True
                    rows_found[prior].append(recall(mask, selection.mask()))
                for name, places in laid.items():
                    for room in (0.1, 0.25, 0.5):
                        tally = tallies.setdefault((name, prior, room), SpeculationTally())
                        speculation = Speculation[int](tally)
                        most = round(room * len(places))
                        for number in within(places.by_hits(guessed), lambda number: [number], most):
                            speculation.submit(number, 1)
                            speculation.landed(number)
                        speculation.settle((number, 1) for number in wanted[name])
    for tally in tallies.values():
        tally.check()
    return [
        {
            "order": name,
            "prior": prior,
            "budget": room,
            "chunk": chunk,
            "retention": retention,
            "recall": round(tally.recall, 4),
            "precision": round(tally.precision, 4),
            "wasted": round(1 - tally.precision, 4),
            "rows_recall": round(sum(rows_found[prior]) / len(rows_found[prior]), 4),
            "chunks_wanted": round(sum(share_wanted[name]) / len(share_wanted[name]), 4),
        }
        for (name, prior, room), tally in tallies.items()
    ]
