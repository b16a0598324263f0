"""Making a database: collect maps, train the projector, calibrate, index (AttnCache, figure 4). And adding to one.

Collecting takes longest and is what a killed build goes on from; the rest is done anew. While it goes on, `inputs-KIND.bin`
holds what the projector will be trained on (float16, in the order of records).
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from afterglow.errors import ConfigError
from afterglow.memo.database import PROJECTOR, MemoDatabase, check_identity, vectors_file, write_vectors
from afterglow.memo.evaluate import HeldOut, HeldOutTrial, Report, calibrate, threshold_curve
from afterglow.memo.map_attention import RecordingAttend
from afterglow.memo.maps import MAPS, Identity, MapStore, token_key
from afterglow.memo.memo_settings import SETTINGS, MemoSettings
from afterglow.memo.options import MemoOptions
from afterglow.memo.packing import pack, unpack
from afterglow.memo.projector import Projector, ProjectorSpec
from afterglow.memo.sequence_embedder import Embedder
from afterglow.memo.training import buckets_of, train
from afterglow.memo.vector_index import VectorIndex

BATCH_TOKENS = 1024
FLUSH = 64  # sentences after which a killed build loses nothing


class Builder:
    """Builds, or goes on building, the database of one model in one folder."""

    def __init__(
        self,
        embedder: Embedder,
        folder: Path,
        options: MemoOptions,
        *,
        model_digest: str,
        quantisation: str,
        template: str,
        report: Report = lambda what, done, total: None,
    ) -> None:
        """`embedder` without a memo. `template` is what the sentences have been put into, for the record."""
        spec = embedder.model.spec
        self._embedder, self._folder, self._options, self._report = embedder, folder, options, report
        self._identity = Identity(
            model_digest=model_digest,
            quantisation=quantisation,
            template=template,
            layers=spec.layers,
            heads=spec.heads,
            causal=spec.causal,
            dtype=options.dtype,
        )
        self._projector = ProjectorSpec(options.projector, spec.hidden, embedder.max_tokens)
        self.skipped = 0  # sentences that were too long, or for which the budget had no room

    def run(self, sentences: Sequence[Sequence[int]], calibrate_on: Sequence[Sequence[int]] = ()) -> MemoDatabase:
        """The database of `sentences`, token ids each; equal ones count once. `calibrate_on`: sentences of another source.
        Some of them judge distances; without them some of `sentences` do, which training does not see.

        Raises: ConfigError for a folder that holds something else, RequestError for tokens that the model does not have.
        """
        others, wanted = self._wanted(calibrate_on), self._wanted(sentences)
        known = {token_key(ids) for ids in wanted}
        others = [ids for ids in others if token_key(ids) not in known]
        if calibrate_on and not others:
            raise ConfigError("all texts to calibrate on are too long, or among the texts of the database")
        others = [others[n] for n in chosen(len(others), self._options.held_out, self._options.seed)]
        if (self._folder / SETTINGS).is_file():
            raise ConfigError(f"{self._folder} holds a finished database; add to it (afterglow memo add), or delete it")
        store = (
            self._resume(wanted) if (self._folder / MAPS).is_file() else MapStore.create(self._folder, self._identity)
        )
        try:
            self._collect(store, wanted)
            if len(store) < 2:
                raise ConfigError(
                    f"a database needs 2 sentences at least, there is room for, or there are, {len(store)}"
                )
            self._finish(store, wanted[: len(store)], others)
        finally:
            store.close()
        return self.open()

    def open(self) -> MemoDatabase:
        """Open the database. Raises: as `MemoDatabase.open`."""
        about = self._identity
        return MemoDatabase.open(
            self._folder, model_digest=about.model_digest, quantisation=about.quantisation, template=about.template
        )

    def add(self, sentences: Sequence[Sequence[int]], max_bytes: int | None = None) -> int:
        """Put more sentences into a finished database, found by the projector as it is; returns how many were new.
        `max_bytes`: the budget this time (None: the one that it was built with). Raises as `open`, and ConfigError while
        another process writes."""
        MemoSettings.load(self._folder)  # that there is one
        store = MapStore.open(self._folder, writable=True)
        try:  # the records count from now on: another process may have added some until it gave the lock back
            database = self.open()
            settings, projector = database.settings, database.projector
            database.close()
            budget = settings.options.max_bytes if max_bytes is None else max_bytes
            self._options = replace(settings.options, max_bytes=budget)
            store.cut(settings.records)  # of an earlier attempt
            known = set(store.keys())
            fresh = [ids for ids in self._wanted(sentences) if token_key(ids) not in known]
            vectors: list[Tensor] = []
            self._projector = projector.spec

            def keep(number: int, x: Tensor) -> None:
                vectors.append(projector.project(x[None])[0])

            self._record(store, fresh, keep, later=True)
            store.flush()
            if len(store) == settings.records:
                # The vectors' file has the name that it had: a process that is killed while it writes would damage the database.
                return 0
            numbers, rows = self._merge(database, store.tokens, settings.records, vectors)
            crc = write_vectors(self._folder, len(store), numbers, rows)
            replace(settings, records=len(store), vectors_crc=crc).save(self._folder)
            vectors_file(self._folder, settings.records).unlink(missing_ok=True)
            return len(store) - settings.records
        finally:
            store.close()

    # --------------------------------------------------------------------------------------------- collecting

    def _wanted(self, sentences: Sequence[Sequence[int]]) -> list[list[int]]:
        """Each once, in the order of first appearance; too long ones are counted and left out."""
        unique = {token_key(ids): list(ids) for ids in sentences if len(ids)}
        kept = [ids for ids in unique.values() if len(ids) <= self._embedder.max_tokens]
        self.skipped = len(unique) - len(kept)
        for ids in kept:
            self._embedder.check(ids)
        return kept

    def _resume(self, wanted: Sequence[Sequence[int]]) -> MapStore:
        store = MapStore.open(self._folder, writable=True)
        try:
            about = self._identity
            names = ("quantisation", "model_digest", "template", "dtype")
            check_identity(store.identity, self._folder, **{name: getattr(about, name) for name in names})
            damaged = min(store.check(), default=len(store))
            store.cut(damaged)
            keys = [token_key(ids) for ids in wanted[: len(store)]]
            if store.keys() != keys:
                raise ConfigError(
                    f"{self._folder} holds an unfinished build of other texts; delete it, or choose another --out"
                )
            sizes = np.cumsum([2 * self._projector.width(int(tokens)) for tokens in store.tokens])
            have = self._inputs_file.stat().st_size if self._inputs_file.is_file() else 0
            store.cut(int(np.searchsorted(sizes, have, side="right")))
        except BaseException:
            store.close()
            raise
        return store

    @property
    def _inputs_file(self) -> Path:
        """Name the file of what the projector is trained on: another kind of projector reads it otherwise."""
        return self._folder / f"inputs-{self._projector.kind}.bin"

    def _collect(self, store: MapStore, wanted: Sequence[Sequence[int]]) -> None:
        sizes = [2 * self._projector.width(int(tokens)) for tokens in store.tokens]
        with open(self._inputs_file, "r+b" if self._inputs_file.is_file() else "w+b") as inputs:
            inputs.truncate(sum(sizes))
            inputs.seek(0, os.SEEK_END)

            def keep(number: int, x: Tensor) -> None:
                inputs.write(self._projector.reduce(x[None])[0].half().cpu().numpy().tobytes())
                if number % FLUSH == FLUSH - 1:
                    inputs.flush()
                    store.flush()

            self._record(store, wanted[len(store) :], keep)
        store.flush()

    def _record(
        self,
        store: MapStore,
        sentences: Sequence[Sequence[int]],
        keep: Callable[[int, Tensor], None],
        *,
        later: bool = False,
    ) -> None:
        """Append the maps of `sentences`, in order, until the budget is used up; `keep` gets each one's number and its
        embedded input [tokens, hidden]."""
        budget = self._options.max_bytes
        at = 0
        while at < len(sentences):
            stop = at + 1  # a batch in the order of records, so that a resumed build goes on where it was
            while stop < len(sentences) and sum(map(len, sentences[at : stop + 1])) <= BATCH_TOKENS:
                stop += 1
            batch = sentences[at:stop]
            recorded = record(self._embedder, batch)
            lengths = [len(ids) for ids in batch]
            for ids, maps, x in zip(batch, recorded.sentences(), torch.split(recorded.inputs[0], lengths), strict=True):
                if budget is not None and store.nbytes + store.cost(len(ids)) > budget:
                    self.skipped += len(sentences) - at
                    return
                keep(store.append(maps.cpu().numpy(), token_key(ids), later=later), x)
                at += 1
            self._report("collecting attention maps", at, len(sentences))

    # --------------------------------------------------------------------------------------------- finishing

    def _finish(self, store: MapStore, sentences: Sequence[Sequence[int]], others: Sequence[Sequence[int]]) -> None:
        options, tokens, identity = self._options, store.tokens, store.identity
        read_input = self._inputs(tokens)
        held = [] if others else held_out(len(store), options.held_out, options.seed)

        def read_maps(number: int, heads: NDArray[np.int64]) -> Tensor:
            packed = store.read(number).reshape(identity.layers * identity.heads, -1)[heads]
            return unpack(torch.from_numpy(packed), int(tokens[number]), causal=identity.causal)[None]

        shown = tokens.copy()
        shown[held] = 0
        projector = train(
            self._projector,
            shown,
            identity.layers * identity.heads,
            read_input,
            read_maps,
            mode=options.label,
            alpha=options.alpha,
            steps=options.steps,
            seed=options.seed,
            progress=lambda done, total: self._report("training the projector", done, total),
        )
        projector.save(self._folder / PROJECTOR)
        numbers = buckets_of(tokens)
        with torch.inference_mode():
            vectors = {
                s: torch.cat([projector(read_input(int(n))[None]) for n in members]).numpy()
                for s, members in numbers.items()
            }
        index = VectorIndex()
        for s, members in numbers.items():
            known = ~np.isin(members, held)
            if known.any():
                index.put(s, members[known], vectors[s][known])
        place = {int(n): (s, row) for s, members in numbers.items() for row, n in enumerate(members)}
        samples = [HeldOut(sentences[n], vectors[place[n][0]][place[n][1]], store.read(n)) for n in held]
        samples += self._recorded(others, projector)
        trial = HeldOutTrial(self._embedder, store, index, samples, options.neighbours)
        variation, order, errors = calibrate(trial, identity.layers, self._report)
        crc = write_vectors(self._folder, len(store), numbers, vectors)
        settings = MemoSettings(
            pooling=self._embedder.pooling.mode,
            records=len(store),
            trained_on=len(store),
            vectors_crc=crc,
            options=options,
            variation=variation,
            order=order,
            errors=errors,
            calibrated_on=len(others),
        )
        settings.curve.extend(threshold_curve(trial, settings, self._report))
        settings.save(self._folder)
        for inputs in self._folder.glob("inputs-*.bin"):
            inputs.unlink()

    def _recorded(self, sentences: Sequence[Sequence[int]], projector: Projector) -> list[HeldOut]:
        """Compute the maps and feature vectors of sentences that are not stored."""
        found = []
        for at, ids in enumerate(sentences):
            recorded = record(self._embedder, [ids])
            (maps,) = recorded.sentences()
            packed = pack(maps.cpu().numpy(), causal=self._identity.causal).astype(self._identity.dtype)
            found.append(HeldOut(ids, projector.project(recorded.inputs[0][None])[0].numpy(), packed))
            self._report("collecting texts to calibrate on", at + 1, len(sentences))
        return found

    def _inputs(self, tokens: NDArray[np.int64]) -> Callable[[int], Tensor]:
        widths = np.array([self._projector.width(int(s)) for s in tokens], np.int64)
        starts = np.cumsum(widths) - widths
        flat = np.memmap(self._inputs_file, np.float16, "r") if len(tokens) else np.empty(0, np.float16)
        return lambda number: torch.from_numpy(
            flat[starts[number] : starts[number] + widths[number]].astype(np.float32)
        )

    @staticmethod
    def _merge(
        database: MemoDatabase, tokens: NDArray[np.int64], before: int, vectors: Sequence[Tensor]
    ) -> tuple[dict[int, NDArray[np.int64]], dict[int, NDArray[np.float32]]]:
        """The database's vectors, and those of the records from number `before` on, by length."""
        numbers, rows = database.index.contents()
        for s, members in buckets_of(tokens).items():
            fresh = members[members >= before]
            if len(fresh):
                new = np.stack([vectors[n - before].numpy() for n in fresh])
                old = rows.get(s, new[:0])
                numbers[s] = np.concatenate((numbers.get(s, fresh[:0]), fresh))
                rows[s] = np.concatenate((old, new))
        return numbers, rows


def record(embedder: Embedder, batch: Sequence[Sequence[int]]) -> RecordingAttend:
    """One exact pass over a flat batch, with all maps and inputs kept."""
    model = embedder.model
    lengths = [len(ids) for ids in batch]
    positions = torch.cat([torch.arange(length, device=model.device) for length in lengths])
    attend = RecordingAttend(model, positions, lengths)
    with torch.inference_mode():
        model.forward(torch.tensor([i for ids in batch for i in ids], device=model.device), positions, attend)
    return attend


def held_out(count: int, most: int, seed: int) -> list[int]:
    """Numbers of sentences that training does not see: a tenth, `most` at most, one at least."""
    return chosen(count, max(1, min(most, count // 10)), seed)


def chosen(count: int, most: int, seed: int) -> list[int]:
    """Draw `most` of the numbers below `count`, ascending."""
    return sorted(map(int, np.random.default_rng(seed).permutation(count)[:most]))
