"""AttnCache: one layer's time with attention maps that are at hand, against computing them, by the share of sentences that have one."""

from __future__ import annotations

import dataclasses
import random
import statistics
from collections.abc import Callable
from functools import partial

import torch

from afterglow.bench.report import interleaved, spread
from afterglow.model.decoder import Decoder
from afterglow.model.families import spec_from_config
from afterglow.model.weights import WeightAssembler
from afterglow.sim.machine.shape import ModelShape
from benchmarks.gpu.models import DrawnOnDevice, config_of, shape_of
from benchmarks.gpu.setting import DEVICE, DTYPE, Ceilings, Found, Setting, seconds, table
from benchmarks.papers.attncache.random_models import VOCAB
from benchmarks.papers.attncache.shapes import RATES, SENTENCES, Batch, allowed_by

MODELS = ("LLaMA-2-7B", "Llama-3-8B", "Mistral-7B")


def layers(setting: Setting, ceilings: Ceilings) -> Found:
    """Time ten sentences in one layer, ways in random order. Maps come from host memory, packed, as from the store; looking them up is
    not counted."""
    names, lengths, rates = setting.of((MODELS, (16, 32, 64, 128), RATES), (MODELS[1:2], (8,), (0.5, 1.0)))
    rows, order = [], random.Random(setting.seed)
    for name in names:
        shape = dataclasses.replace(shape_of(name, setting), layers=1, vocab=VOCAB)
        model = one_layer(shape, setting.seed)
        for length in lengths:
            batch = Batch(model, length, setting.seed)
            repeats, times = setting.of((15, 5), (1, 1))
            ways: dict[str, Callable[[], object]] = {"full": partial(batch.attention, None), "mlp": batch.mlp}
            ways |= {str(rate): partial(batch.attention, rate) for rate in rates}
            with torch.no_grad():
                for call in ways.values():
                    call()
                timed = {way: partial(seconds, call, times) for way, call in ways.items()}
                samples = interleaved(timed, repeats, order)
            taken = {way: statistics.median(found) for way, found in samples.items()}
            products = SENTENCES * length * shape.linear_flops_per_token / ceilings.flops
            for rate in rates:
                own = taken[str(rate)]
                rows.append(
                    {
                        "model": shape.name,
                        "tokens": length,
                        "hit_rate": rate,
                        "full_us": taken["full"] * 1e6,
                        "maps_us": own * 1e6,
                        "gain": taken["full"] / own,
                        "allowed": allowed_by(shape.hidden, shape.heads, shape.kv_heads, length, rate),
                        "layer_gain": (taken["full"] + taken["mlp"]) / (own + taken["mlp"]),
                        "layer_bound_us": max(products, 2 * shape.layer_parameters / ceilings.memory) * 1e6,
                        "spread": max(spread(samples["full"]), spread(samples[str(rate)])),
                    }
                )
    table(f"AttnCache, one layer, {SENTENCES} sentences: attention in full, and with maps at a hit rate", rows)
    return Found(rows, [])


def one_layer(shape: ModelShape, seed: int) -> Decoder:
    """Make a model of one layer on the device."""
    spec, names = spec_from_config(config_of(shape))
    return WeightAssembler(spec, names, DrawnOnDevice(seed, DEVICE), DTYPE, DEVICE).decoder()
