"""A database of attention maps: projector, vectors, maps and what distances mean, in one folder.

memo.json              settings; written last, so that a database counts only when it is whole
projector.safetensors  the projector
vectors-N.safetensors  the feature vectors of all N records
maps.bin, records.bin  see maps.py
hnsw-S.faiss           the graph of the sentences of S tokens, where there are many
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import google_crc32c
import numpy as np
import torch
from numpy.typing import NDArray
from safetensors.numpy import load, save
from torch import Tensor

from afterglow.choices import KeptWeights
from afterglow.errors import ConfigError, DamageError
from afterglow.kernels.stored_maps import StoredMaps
from afterglow.memo.maps import MAPS, Identity, MapStore
from afterglow.memo.memo_settings import POWER, MemoSettings
from afterglow.memo.packing import packed_size
from afterglow.memo.projector import Projector
from afterglow.memo.vector_index import VectorIndex, weights_of
from afterglow.model.digest import model_digest
from afterglow.model.spec import ModelSpec

PROJECTOR = "projector.safetensors"

Record = NDArray[Any]  # the maps of a sentence, [layers, heads, numbers]
Numbers = dict[int, NDArray[np.int64]]
Vectors = dict[int, NDArray[np.float32]]


def memo_digest(model: str | Path, dtype: str, quantization: KeptWeights = "none") -> str:
    """The digest of a model for its attention maps; `dtype`: the type of the computation. Raises: ModelError."""
    weights = "" if quantization == "none" else f", weights={quantization}"
    return model_digest(model, f"attention maps, compute={dtype}{weights}")


@dataclass(frozen=True, slots=True)
class Found:
    """Neighbours found for n sentences of one length: `numbers` and `weights` [n, neighbours], nearest first;
    `similarity` [n], -inf where there is no neighbour; `layers` [n, layers], which are to take maps."""

    numbers: NDArray[np.int64]
    weights: NDArray[np.float32]
    distances: NDArray[np.float32]
    similarity: NDArray[np.float64]
    layers: NDArray[np.bool_]


class Fetched:
    """Maps of some of a run's sentences, all layers of each: views of the store's records, and how much each counts."""

    __slots__ = ("_addresses", "_first", "_places", "_records", "_weights")

    def __init__(
        self,
        records: Sequence[Sequence[Record]],
        weights: NDArray[np.float32],
        places: NDArray[np.int64],
        *,
        first: int = 0,
    ) -> None:
        """`records`: of each fetched sentence one or more, [layers, heads, numbers], of the layers from `first` on; `weights`
        [fetched, most records]: of each, where there are several; `places` [n]: each sentence's place in `records`, or -1."""
        self._records, self._places, self._first = records, places, first
        self._weights, self._addresses = np.zeros(weights.shape, np.float32), np.zeros(weights.shape, np.int64)
        for place, found in enumerate(records):
            self._addresses[place, : len(found)] = [record.ctypes.data for record in found]
            self._weights[place, : len(found)] = weights[place, : len(found)] if len(found) > 1 else 1

    @staticmethod
    def own(maps: Record | Sequence[Record]) -> Fetched:
        """Make one of the maps of n sentences, [layers, heads, numbers] each."""
        records = [[np.ascontiguousarray(one)] for one in maps]
        return Fetched(records, np.ones((len(maps), 1), np.float32), np.arange(len(maps)))

    def stored(self, layer: int, members: NDArray[np.int64], length: int, *, causal: bool) -> StoredMaps:
        """Return one layer's maps of the sentences `members`, of `length` tokens, where they are stored, as long as this lives."""
        places, record = self._places[members], self._records[0][0]
        layers, heads, numbers = record.shape
        assert 0 <= layer - self._first < layers
        assert numbers == packed_size(length, causal=causal)
        addresses = self._addresses[places] + (layer - self._first) * record.strides[0]
        return StoredMaps(addresses, self._weights[places], record.dtype, heads, length, causal)

    def layer(self, layer: int, members: NDArray[np.int64]) -> Tensor:
        """Compute one layer's maps of the sentences `members` -> float32 [members, heads, numbers], still packed."""
        return torch.stack([self._mean(place, layer - self._first) for place in self._places[members]])

    def _mean(self, place: int, layer: int) -> Tensor:
        parts = torch.from_numpy(np.stack([record[layer] for record in self._records[place]])).float()
        weights = torch.from_numpy(self._weights[place, : len(parts)])
        mean: Tensor = weights[None] @ parts.flatten(1)  # several times faster than einsum
        return mean.view(parts.shape[1:])


class MemoDatabase:
    """Finds sentences that attend alike, and fetches their maps. May be used from several threads."""

    def __init__(self, folder: Path, store: MapStore, projector: Projector, settings: MemoSettings) -> None:
        """Use `open`. Raises: DamageError where the vectors differ from those that were written."""
        self.folder, self.store, self.projector, self.settings = folder, store, projector, settings
        self.index = VectorIndex(folder)
        self.tokens = store.tokens[: settings.records]
        numbers, vectors = read_vectors(folder, settings.records, settings.vectors_crc)
        for length in numbers:
            # Entries that are damaged have lost their length: nothing is to be found by them.
            usable = self.tokens[numbers[length]] == length
            self.index.put(length, numbers[length][usable], vectors[length][usable])
        self.notes = list(self.index.notes)
        if later := settings.records - settings.trained_on:
            self.notes.append(
                f"{folder}: {later} of {settings.records} sentences were added after the projector's training; "
                "building anew finds them better"
            )
        self.stats = {"sentences": 0, "hits": 0, "layers_hit": 0, "damaged": 0}
        self._lock = threading.Lock()

    @staticmethod
    def open(folder: Path, *, model_digest: str, quantisation: str, template: str) -> MemoDatabase:
        """The database of exactly this model. Raises: ConfigError where it is another's, is not finished or not there,
        DamageError where it is damaged as a whole; damaged records only miss."""
        settings = MemoSettings.load(folder)
        store = MapStore.open(folder)
        check_identity(store.identity, folder, quantisation=quantisation, model_digest=model_digest, template=template)
        if len(store) < settings.records:
            raise DamageError(f"{folder / 'records.bin'} ends after {len(store)} of {settings.records} records")
        return MemoDatabase(folder, store, Projector.load(folder / PROJECTOR), settings)

    @property
    def identity(self) -> Identity:
        return self.store.identity

    def check(self, spec: ModelSpec) -> None:
        """Compare the shape of the maps with the model's; records have no bounds of their own. Raises: DamageError where they differ."""
        about = self.identity
        if (about.layers, about.heads, about.causal) != (spec.layers, spec.heads, spec.causal):
            raise DamageError(f"{self.folder / MAPS}: its header is damaged; build the database anew")

    def find(self, inputs: Tensor, threshold: float) -> Found:
        """Embedded inputs [n, tokens, hidden] -> their nearest sentences, and which layers take maps at `threshold`."""
        if self.projector.spec.kind == "public" and inputs.shape[1] > self.projector.spec.max_tokens:
            vectors = np.empty((len(inputs), 0), np.float32)
        else:
            vectors = self.projector.project(inputs).numpy()
        tokens = inputs.shape[1]
        distances, numbers = self.index.search(tokens, vectors, self.settings.options.neighbours)
        nearest = distances[:, 0] if distances.shape[1] else np.full(len(inputs), np.inf, np.float32)
        layers, similarity = self.settings.accepted(nearest, threshold)
        weights = weights_of(distances, POWER) if distances.shape[1] else distances
        return Found(numbers, weights, nearest, similarity, layers)

    def fetch(self, found: Found, *, count: bool = True) -> Fetched:
        """The maps of all sentences of `found` that take any. A sentence whose maps are damaged takes none after this:
        its row of `found.layers` is cleared. `count` False: `stats` stay as they are."""
        wanted = np.flatnonzero(found.layers.any(1))
        self.store.prefetch(found.numbers[wanted].ravel())
        places = np.full(len(found.layers), -1, np.int64)
        records: list[list[Record]] = []
        taken: list[int] = []
        for row in wanted.tolist():
            try:
                records.append(read_records(self.store, found.numbers[row], found.weights[row]))
            except DamageError as error:
                found.layers[row] = False
                if count:
                    self._report(error)
                continue
            places[row] = len(taken)
            taken.append(row)
        if count:
            with self._lock:
                self.stats["sentences"] += len(found.layers)
                self.stats["hits"] += len(records)
                self.stats["layers_hit"] += int(found.layers.sum())
        return Fetched(records, found.weights[taken], places)

    def close(self) -> None:
        """Unmaps nothing that is still in use."""
        self.store.close()

    def _report(self, error: DamageError) -> None:
        with self._lock:
            self.stats["damaged"] += 1
            if len(self.notes) < 100 and str(error) not in self.notes:
                self.notes.append(str(error))


def read_records(store: MapStore, numbers: NDArray[np.int64], weights: NDArray[np.float32]) -> list[Record]:
    """Read the records of a sentence's neighbours; where the nearest has all weight, its record alone. Raises: DamageError."""
    return [store.read(int(number)) for number in (numbers[:1] if weights[0] >= 1 - 1e-6 else numbers)]


def check_identity(identity: Identity, folder: Path, **wanted: str) -> None:
    """Check that a database is of the wanted model: maps of another model are never used. Raises: ConfigError, which names the
    difference."""
    for name, want in wanted.items():
        have = getattr(identity, name)
        if have != want:
            what = {"model_digest": "model"}.get(name, name)
            short = (have[:12], want[:12]) if name == "model_digest" else (repr(have), repr(want))
            raise ConfigError(
                f"{folder} holds attention maps of {what} {short[0]}, and this is {what} {short[1]}; "
                "build a database for it (afterglow memo build)"
            )


def write_vectors(folder: Path, records: int, numbers: Numbers, vectors: Vectors) -> int:
    """Record numbers and feature vectors by length; returns the file's CRC32C. The file is named after the count of `records`, damaged
    ones included, so that `memo.json` and the vectors agree, also when a process is killed between the two."""
    tensors: dict[str, NDArray[Any]] = {}
    for tokens, members in numbers.items():
        tensors[f"numbers.{tokens}"] = members
        tensors[f"vectors.{tokens}"] = np.ascontiguousarray(vectors[tokens], np.float32)
    raw = save(tensors)
    vectors_file(folder, records).write_bytes(raw)
    return int(google_crc32c.value(raw))


def read_vectors(folder: Path, records: int, crc: int) -> tuple[Numbers, Vectors]:
    """Read the vectors that `write_vectors` wrote. Raises: DamageError."""
    path = vectors_file(folder, records)
    try:
        raw = path.read_bytes()
    except OSError as error:
        raise DamageError(f"{path} cannot be read ({error.strerror}); build the database anew") from None
    if google_crc32c.value(raw) != crc:
        raise DamageError(f"{path} is damaged (its checksum differs); build the database anew")
    tensors = load(raw)
    lengths = sorted(int(name.partition(".")[2]) for name in tensors if name.startswith("numbers."))
    return {s: tensors[f"numbers.{s}"] for s in lengths}, {s: tensors[f"vectors.{s}"] for s in lengths}


def vectors_file(folder: Path, records: int) -> Path:
    """Where the vectors of so many records are."""
    return folder / f"vectors-{records}.safetensors"
