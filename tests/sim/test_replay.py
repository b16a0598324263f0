"""`afterglow simulate --replay`: a journal leads to the steps that were taken, or the first that differs is told."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path

import pytest

from afterglow.cli.option_sources import Given
from afterglow.errors import ConfigError
from afterglow.plan.journal.replaying import RecordingScheduler
from afterglow.plan.options import SchedulerOptions
from afterglow.plan.scheduler import NO_GUESSES
from afterglow.plan.step import Step
from afterglow.sim.scenario import setup_of, source_of
from afterglow.sim.scenario_options import ClusterConfig, EngineModel, Scenario, TierConfig, WorkloadConfig
from afterglow.sim.simulator import Simulation, replay_journal
from afterglow.sim.workload.turns import Workload

GIB = 2**30


class OneByOne(RecordingScheduler):
    """As an engine records: every step once."""

    def schedule(self, now: float, repeat_limit: int = 1, guesses: Mapping[int, Sequence[int]] = NO_GUESSES) -> Step:
        return super().schedule(now, 1)


@pytest.fixture(scope="module")
def journal() -> list[str]:
    """Of a small workload that moves rows between all tiers."""
    wanted = Scenario(
        workload="sharegpt-atc",
        source=WorkloadConfig(conversations=8, rate=5.0, think=1.0),
        engine=EngineModel(model="Llama-3-8B", retain=False),
        tiers=TierConfig(devices=1, dram=GIB // 2, disk=8 * GIB),
        cluster=ClusterConfig(),
    )
    setup = setup_of(wanted)
    lines: list[str] = []
    recording = OneByOne(
        setup.capacity,
        SchedulerOptions(
            policy=setup.policy,
            prefill_chunk=setup.prefill_chunk,
            max_batch=setup.max_batch,
            max_model_len=setup.longest,
            digest="simulated",
            retain=False,
        ),
        lines.append,
    )
    Simulation(setup, Workload(source_of(wanted, setup.longest)[1]), scheduler=recording).run()
    return lines


def written(path: Path, lines: list[str]) -> Path:
    path.write_text("\n".join(lines) + "\n")
    return path


def test_the_same_steps_however_many_are_taken_at_once(journal: list[str]) -> None:
    one, many = replay_journal(journal, limit=1), replay_journal(journal)
    assert one.different is None
    assert asdict(one) == asdict(many)
    assert one.steps == sum('"op":"schedule"' in line for line in journal) > 100
    assert one.moves > 10


def test_the_first_step_that_differs_is_told(journal: list[str]) -> None:
    places = [i for i, line in enumerate(journal) if '"op":"schedule"' in line]
    entry = json.loads(journal[places[40]])
    changed = [*journal]
    changed[places[40]] = json.dumps(entry | {"step": "0123456789abcdef"})
    found = replay_journal(changed)
    assert found.steps == 41
    assert found.different is not None
    assert found.recorded == "0123456789abcdef"


def test_another_policy_takes_other_steps(journal: list[str]) -> None:
    first = json.loads(journal[0])
    first["settings"] |= {"max_batch": 1}
    found = replay_journal([json.dumps(first), *journal[1:]])
    assert found.different is not None


def test_the_command(journal: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from afterglow.cli.replay_journal import replay

    path, out = written(tmp_path / "journal.jsonl", journal), tmp_path / "found.json"
    assert replay(path, Given(frozenset({"replay", "json"}), {}), str(out)) == 0
    assert "all as the engine recorded them" in capsys.readouterr().out
    same = json.loads(out.read_text())
    assert same["different"] is None
    assert same["steps"] > 100
    place = next(i for i, line in enumerate(journal) if '"op":"schedule"' in line and i > 50)
    written(path, [*journal[:place], journal[place].replace('"step":"', '"step":"f'), *journal[place + 1 :]])
    assert replay(path, Given(frozenset({"replay", "json"}), {}), str(out)) == 1
    different = json.loads(out.read_text())["different"]
    assert different["recorded"] == "f" + different["replayed"]
    assert f"step {different['step']} differs" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("lines", "said"),
    [
        (["{"], "line 1 of the journal is not JSON"),
        (['{"now": 3}'], "line 1 of the journal has no `op`"),
        (['{"op": "schedule", "now": 0, "step": ""}'], "a journal begins with a `plan` line"),
        (['{"op": "plan", "format": 99}'], "format 99"),
        (['{"op": "plan"}'], "a line that no engine wrote"),
        ([""], "line 1 of the journal is not JSON"),
        ([], "has no steps"),
    ],
)
def test_what_is_no_journal(lines: list[str], said: str, tmp_path: Path) -> None:
    from afterglow.cli.replay_journal import replay

    path = tmp_path / "journal.jsonl"
    path.write_text("".join(f"{line}\n" for line in lines))
    with pytest.raises(ConfigError, match=said) as raised:
        replay(path, Given(frozenset({"replay"}), {}), None)
    assert str(path) in str(raised.value)


def test_a_journal_that_was_cut_or_whose_lines_are_none(journal: list[str], tmp_path: Path) -> None:
    from afterglow.cli.replay_journal import replay

    cut = written(tmp_path / "cut.jsonl", [*journal[:30], journal[30][:20]])
    with pytest.raises(ConfigError, match="line 31 of the journal is not JSON"):
        replay(cut, Given(frozenset({"replay"}), {}), None)
    strange = written(
        tmp_path / "strange.jsonl", [*journal[:1], '{"op": "submit", "now": 0, "spec": {"prompt": "00"}}']
    )
    with pytest.raises(ConfigError, match="after 0 steps the journal has a line that no engine wrote"):
        replay(strange, Given(frozenset({"replay"}), {}), None)
    (tmp_path / "bytes").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ConfigError, match="is no whole journal"):
        replay(tmp_path / "bytes", Given(frozenset({"replay"}), {}), None)
    with pytest.raises(ConfigError, match=r"cannot be read: No such file"):
        replay(tmp_path / "nowhere", Given(frozenset({"replay"}), {}), None)
    with pytest.raises(ConfigError, match="--dram means nothing to --replay"):
        replay(cut, Given(frozenset({"replay", "dram"}), {}), None)
