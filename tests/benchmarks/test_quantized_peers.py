"""The comparison of quantised models: its machinery on small models of Afterglow's own; llama.cpp is not needed."""

from __future__ import annotations

import contextlib
import math
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from benchmarks.peers import plan
from benchmarks.peers.quantized import flags, lives, pairs, perplexity, tables
from benchmarks.peers.quantized.bounds import bandwidth, bytes_per_token
from benchmarks.peers.quantized.lives import Arm, Lived, live
from benchmarks.peers.quantized.models import FORMATS, MODELS, RandomShape
from benchmarks.peers.random_gguf import write_random
from benchmarks.peers.rounds import measured
from benchmarks.peers.worker import Answer

from afterglow.model.presets import PRESETS, save_hf
from afterglow.model.spec import RopeSpec


@pytest.fixture
def doing(tmp_path: Path) -> plan.Plan:
    core = min(os.sched_getaffinity(0))
    return plan.Plan((), tmp_path / "none", tmp_path, 0, True, (core,), False, "default", lambda _: None)


def test_the_next_life_goes_on_from_the_disk(doing: plan.Plan, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[int, str]] = []
    ask = lives.Worker.ask

    def seen(self: Any, prompts: Any, new: int, mode: str = "") -> Any:
        asked.append((len(prompts[0]) if prompts else 0, mode.split(" ")[0]))
        return ask(self, prompts, new, mode)

    monkeypatch.setattr(lives.Worker, "ask", seen)
    save_hf("tiny", tmp_path / "hf")
    arm = Arm("afterglow", "int8", tmp_path / "hf", PRESETS["tiny"].vocab, rounding=True)
    lived = Lived()
    live(doing, arm, 0, lived)
    talk = len(lived.talk)
    live(doing, arm, 1, lived)
    once = {"load", "load, first", "ttft after a restart"}
    assert {name: len(samples) for name, samples in lived.samples.items()} == {
        name: 1 if name in once else 2
        for name in (*once, "resident", "peak", "prefill", "decode 1", "decode 8", "ttft of a second turn")
    }
    assert all(value > 0 for samples in lived.samples.values() for value in samples)
    assert max(lived.samples["resident"]) <= max(lived.samples["peak"])
    assert lived.settings["quantization"] == "int8"
    assert len(lived.firsts) == 2 * lives.FIRST_TOKENS
    restarted = [length for length, mode in asked if mode == "restore"]
    assert restarted == [talk + lives.TURN]
    assert [mode for _, mode in asked].count("save") == 2
    assert list((tmp_path / "cache").rglob("*.*"))


def test_decoding_reads_each_matrix_once_and_the_table_only_as_a_head(tmp_path: Path) -> None:
    spec = replace(PRESETS["tiny"], hidden=256, heads=4, head_dim=64, ffn=512, rope=RopeSpec(dim=64, base=10000.0))
    path = tmp_path / "model.gguf"
    attention = 2 * spec.hidden**2 + 2 * spec.hidden * spec.kv_heads * 64
    weights = spec.layers * (attention + 3 * spec.hidden * spec.ffn) + spec.hidden * spec.vocab
    norms = 4 * spec.hidden * (2 * spec.layers + 1)
    for tied in (False, True):
        write_random(path, replace(spec, tied_embeddings=tied), "Q8_0")
        assert bytes_per_token(path) == weights * 34 // 32 + norms
    assert bandwidth(1, repeats=1, words=1 << 16) > 0


def test_llama_cpp_gets_the_flags_that_are_quickest(
    doing: plan.Plan, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    speeds = {(): 1.0, (("flash", False),): 2.0, (("repack", False),): 0.5}

    class Timed:
        def __init__(self, seconds: float) -> None:
            self.seconds = seconds

        def ask(self, prompts: list[list[int]], new: int) -> Answer:
            return Answer([[1] * new for _ in prompts], [[self.seconds * (n + 1) for n in range(new)] for _ in prompts])

    monkeypatch.setattr(flags, "running", lambda _, arm: contextlib.nullcontext(Timed(speeds[arm.flags])))
    arm, found = flags.tried(doing, Arm("llama-cpp", "Q4_0", tmp_path / "a.gguf", 10))
    assert arm.flags == (("repack", False),)
    assert [row["seconds"]["prefill"] for row in found] == list(speeds.values())
    assert [row["flags"] for row in found] == list(flags.QUICK)


def test_two_engines_decode_in_turns(doing: plan.Plan, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both are open all the time, are asked the same, and take turns in being first; a pair is compared with itself alone."""
    asked: list[tuple[str, int]] = []

    class Slowing:
        """Pretend to be an engine on a machine that gets slower after each pair."""

        def __init__(self, name: str, rate: float) -> None:
            self.name, self.rate = name, rate

        def ask(self, prompts: Any, new: int) -> Answer:
            asked.append((self.name, prompts[0][0]))
            seconds = (len(asked) - 1) // 2 / self.rate
            return Answer([[1] * new], [[seconds * n for n in range(new)]])

    ours, theirs = (Arm(engine, "Q4_0", tmp_path / "a.gguf", 1000) for engine in ("afterglow", "llama-cpp"))
    engines = {ours: Slowing("ours", 300.0), theirs: Slowing("theirs", 200.0)}
    monkeypatch.setattr(pairs, "running", lambda _, arm: contextlib.nullcontext(engines[arm]))
    found = pairs.decoded_in_turns(doing, ours, theirs)
    count = pairs.PAIRS[True]
    turns = [asked[2 + 2 * i : 4 + 2 * i] for i in range(count)]
    assert all(first[1] == second[1] for first, second in turns)
    assert [first[0] for first, _ in turns] == ["ours", "theirs"] * (count // 2)
    assert [len(rates) for rates in found["rates"].values()] == [count, count]
    assert found["quotient"] == pytest.approx(1.5, abs=0.01)
    assert found["spread"] < 0.01


def rows(**speeds: tuple[float, float]) -> list[dict[str, Any]]:
    """Rows of both engines: of each measure Afterglow's value and llama.cpp's."""
    return [
        measured("quantized", [value], model="1.1b", engine=engine, kind="Q4_0", measure=measure.replace("_", " "))
        for measure, values in speeds.items()
        for engine, value in zip(("afterglow", "llama-cpp"), values, strict=True)
    ]


def test_goals_are_against_the_same_file() -> None:
    found = rows(load=(1.5, 1.0), resident=(1.3e9, 1.4e9), prefill=(300, 100), decode_1=(30, 24), decode_8=(160, 60))
    found += [row | {"measure": "load, first", "value": 4.5} for row in rows(load=(0, 0))]
    in_turns = {"Q4_0": {"quotient": 1.4, "spread": 0.02}}
    assert {
        g["name"].removeprefix("1.1b, Q4_0: "): g["met"]
        for g in tables.goals(found, {"1.1b": {"bytes": {"Q4_0": 0.7e9}, "decode in turns": in_turns}})
    } == {
        "load, first, s": False,
        "load, s": True,
        "resident besides the weights, bytes": False,
        "prefill / llama.cpp": True,
        "decode 8 / llama.cpp": True,
        "decode 1 in turns / llama.cpp": False,
    }
    assert tables.goals(rows(prefill=(1, 1)), {}) == []


def test_where_llama_cpp_is_ahead_is_said() -> None:
    found = rows(load=(2.0, 1.0), decode_1=(30.0, 24.0), decode_8=(60.0, 90.0), resident=(1e9, 2e9))
    assert tables.behind(found, "1.1b") == ["load (Q4_0 2.00 times)", "decode 8 (Q4_0 1.50 times)"]


def test_a_line_says_how_near_the_bound_is() -> None:
    found = rows(decode_1=(30.0, 24.0), load=(1.5, 123.0))
    ours, theirs = tables.cells(found, "1.1b", {"Q4_0": 40.0})
    assert ours[0] == "Q4_0, afterglow"
    assert dict(zip(tables.HEADS, ours[1:], strict=True))["of the bound"] == "75 %"
    assert dict(zip(tables.HEADS, theirs[1:], strict=True))["load again, s"] == "123"


def test_the_file_as_a_page() -> None:
    found = rows(decode_1=(30.0, 24.0), load=(1.5, 123.0))
    facts: dict[str, Any] = {
        "first tokens": {"Q4_0": "3 of 3"},
        "chosen": {"llama-cpp Q4_0": {"flash": True}},
        "left out": {"a": "b"},
    }
    facts["decode in turns"] = {"Q4_0": {"quotient": 1.4, "spread": 0.02}}
    text = tables.markdown(
        {
            "bandwidth": 2.5e10,
            "settings": {"threads": 2},
            "hardware": {"cpu": "a processor"},
            "versions": {"llama-cpp": {"gguf": "1"}},
            "commit": "abc",
            "quick": True,
            "rows": found,
            "bounds": {"1.1b": {"Q4_0": 40.0}},
            "models": {"1.1b": facts},
            "goals": [{"name": "g", "value": 1.0, "goal": ">= 2", "met": False, "within_noise": False}],
        }
    )
    assert text.startswith(
        "a processor, 2 threads for both, memory read at 25.0 GB/s. Afterglow abc; gguf 1, a quick run."
    )
    assert "| Q4_0, llama-cpp |  | 123 |" in text
    assert "llama.cpp's flags: Q4_0 flash=True. First tokens that are the same: Q4_0 3 of 3." in text
    assert "in turns of a second, Afterglow's rate over llama.cpp's: Q4_0 1.40 times ± 2 %." in text
    assert "Left out: a (b)." in text
    assert "| g | 1 | >= 2 | **missed** |" in text


def test_perplexities_are_compared_token_by_token() -> None:
    losses = [torch.tensor([1.0, 2.0]), torch.tensor([3.0, 2.0])]
    row = perplexity.compared({"afterglow": [each + 0.01 for each in losses], "llama.cpp": losses})
    assert row["tokens"] == 4
    assert row["perplexity"]["llama.cpp"] == pytest.approx(math.exp(2), abs=1e-3)
    assert row["ratio"]["afterglow"]["value"] == pytest.approx(math.exp(0.01), abs=1e-4)


def test_the_second_half_of_a_window_is_scored(tmp_path: Path) -> None:
    save_hf("tiny", tmp_path)
    ids = torch.arange(3, 35)
    (losses,) = perplexity.ours(tmp_path, "none", [ids.tolist()])
    model = perplexity.load_model(tmp_path)
    positions = torch.arange(32)
    logits = model.logits(model.forward(ids, positions, perplexity.PlainAttend(model, positions, [32])))
    wanted = -logits.log_softmax(-1)[15:31].gather(1, ids[16:, None]).squeeze(1)
    torch.testing.assert_close(losses, wanted)


def test_every_model_has_the_formats_that_are_asked_for(tmp_path: Path) -> None:
    for model in MODELS.values():
        assert set(FORMATS) <= set(model(tmp_path, tmp_path).formats) <= set(tables.ORDER)
    assert RandomShape(tmp_path, tmp_path).vocab == 32000
