"""Attention maps of texts on a device: scenes for `play.py`."""

from __future__ import annotations

import contextlib
from pathlib import Path
from unittest import mock

import torch

from afterglow.memo import map_attention
from afterglow.memo.map_attention import AttentionMemo
from afterglow.memo.pooling import Pooling
from afterglow.memo.sequence_embedder import Embedder
from afterglow.model.names import Names
from afterglow.model.presets import PRESETS
from afterglow.model.weights import WeightAssembler
from tests.device import pretend
from tests.memo.kit import builder, sentences
from tests.memo.tiny import Large


def maps(device: str, folder: Path) -> list[list[int]]:
    """A database that is built, calibrated on other texts, and added to; then texts of which some have maps, with contexts as large as of
    models that are used. Returns which texts had maps, and for each the text whose vector without maps is nearest."""
    own, others, later = sentences(12), sentences(6, seed=1), sentences(2, seed=2)
    on = torch.device(device)
    active = pretend.active() if device == "cuda" else contextlib.nullcontext()
    with active, mock.patch.object(map_attention, "FEW", 0):
        model = WeightAssembler(PRESETS["tiny"], Names(), Large(0), torch.float32, on, "none").decoder()
        plain = Embedder(model, Pooling("last"), max_tokens=48)
        making = builder(plain, folder)
        making.run(own, others).close()
        assert making.add(later) == len(later)
        database = making.open()
        asked = [*own[:3], *later, *sentences(3, seed=3)]
        found = Embedder(model, Pooling("last"), memo=AttentionMemo(database, 0.99), max_tokens=48).embed(asked)
        nearest = (found.vectors @ plain.embed(asked).vectors.T).argmax(1)
        database.close()
    return [list(map(int, found.hits)), nearest.tolist()]
