"""Training of the projector: a Siamese network on pairs of sentences (AttnCache, 3.1, equations 1 to 3).

Two inputs go through the same projector, the Euclidean distance of their vectors is to be that of their maps, and
smooth L1 says by how much it is not. Only sentences of equal length can lend each other maps, so those of a batch are
equally long; the kind `public` draws batches as the published program does, of any lengths, all pairs of each.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from afterglow.memo.distances import labels
from afterglow.memo.options import ALPHA, STEPS, LabelMode
from afterglow.memo.projector import Projector, ProjectorSpec

ReadInput = Callable[[int], Tensor]
"""`read(number)`: what `ProjectorSpec.reduce` made of a sentence, [width]."""
ReadMaps = Callable[[int, NDArray[np.int64]], Tensor]
"""`read(number, heads)`: a sentence's maps of some heads, numbered over all layers -> float32 [1, heads, s, s]."""

BATCH = 32
RATE = 1e-3  # kinds `positions` and `binned`
EPOCHS, PUBLIC_RATE, MOMENTUM = 3, 0.1, 0.9  # kind `public`
SAMPLE = 512  # sentences whose inputs are taken as typical
BATCH_NUMBERS = 1 << 20  # of a batch's maps; of larger ones a random part of the heads is compared


def train(
    spec: ProjectorSpec,
    tokens: NDArray[np.int64],
    heads: int,
    read_input: ReadInput,
    read_maps: ReadMaps,
    *,
    mode: LabelMode = "tv",
    alpha: float = ALPHA,
    length_term: bool = True,
    steps: int = STEPS,
    seed: int = 0,
    progress: Callable[[int, int], None] | None = None,
) -> Projector:
    """A projector for sentences of lengths `tokens` (0: not to be used), whose maps have `heads` heads in all layers
    together. Without two sentences of equal length it stays as drawn. `length_term` False leaves the lengths out of the
    labels (AttnCache-f)."""
    projector = Projector(spec, seed)
    usable = np.flatnonzero(tokens)
    if len(usable):
        projector.standardise([read_input(int(number)) for number in usable[:SAMPLE]])
    random = np.random.default_rng(seed)
    batches = list(_public(usable, random)) if spec.kind == "public" else list(_equal(tokens, steps, random))
    if not batches:
        return projector
    projector.train()
    optimiser, schedule = _optimiser(projector, len(batches))
    for done, batch in enumerate(batches):
        chosen = _heads(heads, int(tokens[batch].max()), len(batch), random)
        wanted = labels([read_maps(int(number), chosen) for number in batch], mode, alpha)
        if not length_term:
            length = torch.from_numpy(tokens[batch]).float()
            wanted -= (alpha if mode == "tv" else 1.0) * (length[:, None] - length[None]).abs()
        vectors = projector(torch.stack([read_input(int(number)) for number in batch]))
        first, second = torch.triu_indices(len(batch), len(batch), 1)
        # The gradient of a norm at zero is not a number; 1e-12 under the root is.
        found = (vectors[first] - vectors[second]).pow(2).sum(-1).add(1e-12).sqrt()
        loss = F.smooth_l1_loss(found, wanted[first, second])
        optimiser.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        optimiser.step()
        schedule.step()
        if progress is not None:
            progress(done + 1, len(batches))
    return projector.eval()


def _optimiser(projector: Projector, steps: int) -> tuple[torch.optim.Optimizer, torch.optim.lr_scheduler.LRScheduler]:
    if projector.spec.kind == "public":
        sgd = torch.optim.SGD(projector.parameters(), PUBLIC_RATE, momentum=MOMENTUM)
        return sgd, torch.optim.lr_scheduler.ConstantLR(sgd, 1.0)
    adam = torch.optim.AdamW(projector.parameters(), RATE, weight_decay=0.01)
    return adam, torch.optim.lr_scheduler.OneCycleLR(adam, RATE, total_steps=steps)


def _equal(tokens: NDArray[np.int64], steps: int, random: np.random.Generator) -> Iterator[NDArray[np.int64]]:
    """Draw batches of one length each, a length as often as it has sentences."""
    buckets = buckets_of(tokens)
    usable = [members for members in buckets.values() if len(members) > 1]
    if not usable:
        return
    sizes = np.array([len(members) for members in usable], float)
    for chosen in random.choice(len(usable), steps, p=sizes / sizes.sum()):
        members = usable[chosen]
        yield random.choice(members, min(BATCH, len(members)), replace=False)


def _public(usable: NDArray[np.int64], random: np.random.Generator) -> Iterator[NDArray[np.int64]]:
    for _ in range(EPOCHS):
        order = random.permutation(usable)
        for start in range(0, len(order), BATCH):
            if len(batch := order[start : start + BATCH]) > 1:  # batch norm cannot take a single one
                yield batch


def _heads(heads: int, tokens: int, batch: int, random: np.random.Generator) -> NDArray[np.int64]:
    room = max(1, BATCH_NUMBERS // (batch * tokens * tokens))
    return np.arange(heads) if room >= heads else np.sort(random.choice(heads, room, replace=False))


def buckets_of(tokens: NDArray[np.int64]) -> dict[int, NDArray[np.int64]]:
    """Which sentences have how many tokens; lengths of 0 (unusable records) are left out."""
    return {int(s): np.flatnonzero(tokens == s) for s in np.unique(tokens) if s > 0}
