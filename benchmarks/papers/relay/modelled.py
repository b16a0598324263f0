"""RelayAttention's figures and tables beside the operator model."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from random import Random

from afterglow.sim.machine.catalogue import Hardware, hardware, model
from afterglow.sim.machine.shape import ModelShape
from afterglow.sim.operators.relay import MODES, Heads, Mode, Roof, attention_seconds, printed_speedup
from afterglow.sim.operators.relay import speedup as counted_speedup
from afterglow.sim.operators.serving import (
    SHAREGPT,
    Lengths,
    ServingModel,
    ServingRequest,
    requests,
    serve,
    sustained,
)
from benchmarks.papers.modelled_rows import FITTED, Row, row

# Bounds as in Table 1, at most 2,048 tokens together as in vLLM's benchmark; means near those that are published: 152 and 723.
MMLU_QUESTION = Lengths(55, 1219, 87, 0.8)
MMLU_EXAMPLES = Lengths(379, 2895, 330, 0.9)  # five
MMLU_TASKS, MMLU_QUESTIONS = 57, 14042

# RelayAttention, as printed or plotted
FIGURE_1 = {  # us, LLaMA-30B, A40, 32 requests, 128 tokens of context: paged, relay
    64: (270.5, 191.0),
    128: (342, 201),
    256: (501, 211),
    512: (820, 226),
    1024: (1466, 240),
    2048: (2746, 287),
    4096: (5324, 366),
    8192: (10541, 531),
    16384: (20917, 868),
}
FIGURE_5 = {64: (1.42, 1.42), 256: (2.70, 2.38), 1024: (6.91, 6.10), 2048: (10.94, 9.56)}  # theory, practice
FIGURE_6 = {  # requests/s: vLLM, with prefix sharing, with relay
    ("A40", 64): (3.95, 4.06, 4.20),
    ("A40", 512): (2.27, 3.26, 4.15),
    ("A40", 2048): (0.91, 1.90, 3.97),
    ("A100-80G", 64): (8.49, 8.43, 9.08),
    ("A100-80G", 512): (5.40, 6.74, 9.05),
    ("A100-80G", 2048): (2.26, 3.75, 8.81),
}
TABLE_3 = {  # seconds
    ("A100-80G", 1): (502, 336, 306),
    ("A40", 1): (1012, 675, 621),
    ("A100-80G", 3): (851, 378, 311),
    ("A40", 3): (1751, 752, 629),
    ("A100-80G", 5): (1308, 432, 316),
    ("A40", 5): (2660, 850, 641),
}
TABLE_4 = {  # requests/s: model, device, devices, system prompt
    ("LLaMA-2-13B", "A40", 1, 512): (0.99, 1.44, 1.71),
    ("LLaMA-30B", "A100-80G", 2, 512): (2.15, 3.01, 3.65),
    ("Phi-2", "A40", 1, 512): (5.03, 6.29, 8.85),
    ("Mistral-7B", "A40", 1, 512): (3.68, 5.40, 5.90),
    ("LLaMA-2-13B", "A40", 1, 1024): (0.66, 1.23, 1.69),
    ("LLaMA-30B", "A100-80G", 2, 1024): (1.52, 2.55, 3.64),
    ("Phi-2", "A40", 1, 1024): (3.54, 4.82, 8.76),
    ("Mistral-7B", "A40", 1, 1024): (2.60, 4.92, 5.85),
}
FIGURE_8 = (0.50, 0.93, 2.00)  # LLaMA-2-7B, A40, 256 + 512 tokens, system prompt of 2,048
FIGURE_7 = {"shared": 2.2, "relay": 4.9}  # requests/s at 0.5 s/token, A40, system prompt of 2,048


def figure_1() -> Iterator[Row]:
    heads, roof = Heads.of(model("LLaMA-30B")), Roof.of(hardware("A40"))
    modes: tuple[Mode, ...] = ("plain", "relay")
    for system, values in FIGURE_1.items():
        for mode, paper in zip(modes, values, strict=True):
            seconds = attention_seconds(mode, heads, roof, 32, 128, system)
            yield row("RelayAttention Fig. 1", f"{mode} us, s={system}", paper, seconds * 1e6, FITTED)
    cases: tuple[tuple[Mode, float], ...] = (("plain", 98), ("relay", 116))
    for mode, paper in cases:
        seconds = attention_seconds(mode, heads, roof, 1, 128, 2048)
        yield row("RelayAttention, limits", f"{mode} us, one request, s=2048", paper, seconds * 1e6)


def figure_5() -> Iterator[Row]:
    heads, roof = Heads.of(model("LLaMA-30B")), Roof.of(hardware("A40"))
    for system, (theory, practice) in FIGURE_5.items():
        yield row("RelayAttention Fig. 5", f"theory, s={system}", theory, printed_speedup(32, 128, system), "exact")
        found = _gain(heads, roof, 32, 128, system)
        yield row("RelayAttention Fig. 5", f"practice, s={system}", practice, found, "with Fig. 1's constants")
    yield row("RelayAttention Fig. 5", "keys and values counted, s=2048", "", counted_speedup(32, 128, 2048))
    yield row("RelayAttention, limits", "practice, c=256, s=2048", 6.59, _gain(heads, roof, 32, 256, 2048))


def _gain(heads: Heads, roof: Roof, batch: int, context: int, system: int) -> float:
    plain, relay = (attention_seconds(mode, heads, roof, batch, context, system) for mode in ("plain", "relay"))
    return plain / relay


def figure_6(seed: int) -> Iterator[Row]:
    work = requests(1000, *SHAREGPT, seed=seed)
    for (device, system), values in FIGURE_6.items():
        for mode, paper in zip(MODES, values, strict=True):
            server = ServingModel(model=model("LLaMA-2-7B"), hardware=hardware(device), mode=mode, system=system)
            what = f"{device} {mode} req/s, s={system}"
            yield row("RelayAttention Fig. 6", what, paper, serve(server, work).requests_per_s, FITTED)
    for mode in MODES:
        server = ServingModel(model=model("LLaMA-2-7B"), hardware=hardware("A100-PCIE-40G"), mode=mode, system=2048)
        found = serve(server, work).requests_per_s
        yield row("RelayAttention Fig. 6", f"A100-PCIE-40G {mode} req/s, s=2048", "not printed", found)


def figure_7(seed: int) -> Iterator[Row]:
    shape, device = model("LLaMA-2-7B"), hardware("A40")
    for system in (512, 1024, 2048):
        for mode in MODES:
            rate = sustained(ServingModel(model=shape, hardware=device, mode=mode, system=system), SHAREGPT, seed=seed)
            paper = FIGURE_7.get(mode, "") if system == 2048 else ""
            yield row("RelayAttention Fig. 7", f"{mode} req/s at 0.5 s/token, s={system}", paper, rate)
    for note, count, factor in (("5,000 requests", 5000, 1), ("1,000, host twice as slow", 1000, 2)):
        for mode in MODES:
            plain = ServingModel(model=shape, hardware=device, mode=mode, system=2048)
            server = replace(plain, host_step=factor * plain.host_step, host_request=factor * plain.host_request)
            rate = sustained(server, SHAREGPT, count=count, seed=seed)
            yield row(
                "RelayAttention Fig. 7", f"{mode} req/s, s=2048, {note}", FIGURE_7.get(mode, ""), rate, "sensitivity"
            )


def figure_8() -> Iterator[Row]:
    for prompt, reply in ((64, 128), (128, 256), (256, 512)):
        for system in (64, 512, 2048):
            printed = (prompt, system) == (256, 2048)
            work = requests(1000, Lengths(prompt, prompt), Lengths(reply, reply))
            for mode, paper in zip(MODES, FIGURE_8, strict=True):
                server = ServingModel(model=model("LLaMA-2-7B"), hardware=hardware("A40"), mode=mode, system=system)
                what = f"{prompt}+{reply} {mode} req/s, s={system}"
                yield row("RelayAttention Fig. 8", what, paper if printed else "", serve(server, work).requests_per_s)


def table_3(seed: int) -> Iterator[Row]:
    for (device, shots), values in TABLE_3.items():
        for mode, paper in zip(MODES, values, strict=True):
            seconds = mmlu_seconds(model("LLaMA-2-7B"), hardware(device), mode, shots, seed=seed)
            yield row("RelayAttention Table 3", f"{device} {shots}-shot {mode} s", paper, seconds)


def table_4(seed: int) -> Iterator[Row]:
    work = requests(1000, *SHAREGPT, seed=seed)
    for (name, device, devices, system), values in TABLE_4.items():
        for mode, paper in zip(MODES, values, strict=True):
            server = ServingModel(
                model=model(name), hardware=hardware(device), devices=devices, mode=mode, system=system
            )
            note = FITTED if devices > 1 and system == 512 else ""
            what = f"{name} {mode} req/s, s={system}"
            yield row("RelayAttention Table 4", what, paper, serve(server, work).requests_per_s, note)


def mmlu_seconds(
    model: ModelShape, hardware: Hardware, mode: Mode, shots: int, devices: int = 1, seed: int = 0
) -> float:
    """Seconds for all of MMLU's questions, task after task, each task with `shots` examples of its own as system prompt
    (a fifth of five examples each) and 32 tokens to a reply."""
    rng = Random(seed)
    seconds = 0.0
    for task in range(MMLU_TASKS):
        system = round(MMLU_EXAMPLES.draw(rng) * shots / 5)
        count = MMLU_QUESTIONS // MMLU_TASKS + (task < MMLU_QUESTIONS % MMLU_TASKS)
        server = ServingModel(model=model, hardware=hardware, devices=devices, mode=mode, system=system)
        if mode != "plain":  # once, before the first question
            seconds += ServingModel(
                model=model, hardware=hardware, devices=devices, mode=mode, system=0
            ).prefill_seconds([system])
        questions = [ServingRequest(MMLU_QUESTION.draw(rng), 32) for _ in range(count)]
        seconds += serve(server, questions).seconds
    return seconds
