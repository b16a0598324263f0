"""`afterglow simulate` and `afterglow plan` as a user meets them."""

from __future__ import annotations

import io
import json
import re
import signal
import subprocess
import sys
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import fields
from pathlib import Path
from typing import NamedTuple
from unittest import mock

import pytest
from typer.testing import CliRunner

from afterglow.cli import main, simulate
from afterglow.cli.commands import app
from afterglow.cli.terminal import Report
from afterglow.sim.machine.catalogue import all_hardware, all_prices, model
from afterglow.sim.machine.timing import Calibrated, Calibration
from afterglow.sim.scenario_options import EngineModel, option_kinds

SMALL = ("sharegpt-atc", "--conversations", "20", "--think", "5")


class Ran(NamedTuple):
    code: int
    out: str
    err: str


def afterglow(*args: str) -> Ran:
    """The command line in this process."""
    out, err = io.StringIO(), io.StringIO()
    code: object = 0
    with mock.patch("sys.argv", ["afterglow", *args]), redirect_stdout(out), redirect_stderr(err):
        try:
            main()
        except SystemExit as end:
            code = end.code
    return Ran(int(str(code or 0)), out.getvalue(), err.getvalue())


def test_the_table_has_what_was_promised() -> None:
    ran = afterglow("simulate", *SMALL)
    assert ran.code == 0
    assert ran.out.startswith(
        "LLaMA-13B on 2 A100-80G, 128.0 GiB of host memory, 10.0 TiB of disk, lookahead, sharegpt-atc\n"
    )
    names = [line[:20].strip() for line in ran.out.splitlines()[1:]]
    assert names == [
        "turns", "window", "hit rate", "by tier", "TTFT", "from admission on", "prefill throughput", "device time",
        "queue", "bytes moved", "cost",
    ]  # fmt: skip
    assert "storage" in ran.out.splitlines()[-1]
    assert "(16.4 %)" in ran.out  # as in the papers, two devices


def test_a_trace_beyond_the_window_says_how_much_of_it_is_cut(tmp_path: Path) -> None:
    trace = tmp_path / "azure.csv"  # prompts without text, one turn each
    rows = [(0, 100), (1, 3000), (2, 900), (3, 3000)]
    lines = [f"2023-11-16 18:17:0{at}.0000000,{tokens},10" for at, tokens in rows]
    trace.write_text("\n".join(["TIMESTAMP,ContextTokens,GeneratedTokens", *lines]) + "\n")
    ran = afterglow("simulate", str(trace), "--window", "1000", "--json", str(tmp_path / "cut.json"))
    (point,) = json.loads((tmp_path / "cut.json").read_text())["points"]
    figures = point["figures"]
    prompts = figures["history_tokens"] + sum(tokens for _, tokens in rows) - figures["cut_tokens"]
    assert (figures["cut_turns"], figures["window"]) == (2, 1000)
    assert figures["cut_tokens"] >= 2 * (3000 - 1000)
    assert figures["cut_of_prompts"] == pytest.approx(figures["cut_tokens"] / (prompts + figures["cut_tokens"]))
    (line,) = [line for line in ran.out.splitlines() if line.startswith("window ")]
    assert "2 of 4 turns did not fit and were cut" in line
    assert f"{figures['cut_tokens']:,}" in line
    swept = afterglow("simulate", str(trace), "--sweep", "window=1000,8192").out.splitlines()
    assert "cut" in swept[0].split()
    wide = afterglow("simulate", str(trace), "--window", "8192", "--json", "-")
    assert json.loads(wide.out)["points"][0]["figures"]["cut_turns"] == 0
    assert "window " not in afterglow("simulate", str(trace), "--window", "8192").out


def test_json_to_standard_output_and_to_a_file(tmp_path: Path) -> None:
    printed = afterglow("simulate", *SMALL, "--json", "-")
    file = tmp_path / "figures.json"
    beside = afterglow("simulate", *SMALL, "--json", str(file))
    found = json.loads(printed.out)
    assert found == json.loads(file.read_text())
    assert beside.out.startswith("LLaMA-13B")
    assert found["options"]["disk"] == 10 * 2**40
    (point,) = found["points"]
    figures = point["figures"]
    assert figures["complete"]
    assert figures["turns"] > 20
    assert 0 < figures["hit_rate"] <= 1
    assert figures["cost"]["dollars"] == pytest.approx(figures["cost"]["devices"] + figures["cost"]["storage"])


def test_a_sweep_has_a_row_for_each_point() -> None:
    ran = afterglow(
        "simulate", *SMALL, "--no-retain", "--sweep", "disk=0,100G", "--sweep", "policy=lru,lookahead", "--dram", "8G"
    )
    heads, *rows = [line.split() for line in ran.out.splitlines()]
    assert heads[:2] == ["disk", "policy"]
    assert [row[:2] for row in rows] == [["0", "lru"], ["0", "lookahead"], ["100G", "lru"], ["100G", "lookahead"]]
    rates = [float(row[2]) for row in rows]
    assert min(rates[2:]) > max(rates[:2])


def test_costs_say_whose_prices_they_are_of() -> None:
    wanted = ("simulate", *SMALL, "--conversations", "5")
    assert "(prices: aws)" in afterglow(*wanted, "--hardware", "H200").out
    unknown = afterglow(*wanted, "--hardware", "CPU-2", "--model", "Llama-3.2-3B")
    assert (
        "not known for this device: give --prices a TOML file with dram_gb_hour, ssd_gb_hour and [devices]"
        in unknown.out
    )
    one = afterglow(*wanted, "--sweep", "hardware=A100-80G,H100").out
    assert one.splitlines()[0].endswith("cost (aws)")
    several = afterglow(*wanted, "--sweep", "prices=aws,relayattention").out.splitlines()
    assert [line.rpartition("(")[2] for line in several[1:]] == ["aws)", "relayattention)"]


def test_traces_without_history_have_no_hit_rate_of_it(tmp_path: Path) -> None:
    ran = afterglow("simulate", mooncake(tmp_path / "trace.jsonl"))
    assert re.search(r"^hit rate +4\d\.\d % of all prompt tokens$", ran.out, re.MULTILINE)
    assert "conversations' history" not in ran.out


def test_help_names_the_devices_and_prices_that_there_are() -> None:
    text = {f.name: f.metadata["help"] for f in fields(EngineModel)}
    assert all(name in text["hardware"] for name in all_hardware())
    assert all(name in text["prices"] for name in all_prices())


def test_engines_and_a_shared_store() -> None:
    ran = afterglow("simulate", *SMALL, "--engines", "3", "--router", "random", "--shared-tier", "1T", "--json", "-")
    found = json.loads(ran.out)["points"][0]["figures"]
    assert found["cluster"]["engines"] == 3
    assert found["cluster"]["network_out_bytes"] > found["cluster"]["network_in_bytes"] > 0
    assert found["bytes_moved"]["network to engine"] == found["cluster"]["network_in_bytes"]


def test_pictures_are_drawn(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    afterglow("simulate", *SMALL, "--plot", str(tmp_path / "one"))
    afterglow(
        "simulate", *SMALL, "--sweep", "disk=0,1G,100G", "--sweep", "policy=lru,fifo", "--plot", str(tmp_path / "many")
    )
    afterglow("plan", *SMALL, "--hit-rate", "0.5", "--plot", str(tmp_path / "plan"))
    drawn = {path.parent.name + "/" + path.stem for path in tmp_path.glob("*/*.svg")}
    assert drawn == {
        "one/ttft", "one/tiers", "many/hit_rate", "many/ttft", "many/throughput", "many/cost", "plan/plan_hit_rate", "plan/plan_ttft",
    }  # fmt: skip
    assert "disk" in (tmp_path / "many/ttft.svg").read_text()


BARE = """
import sys

class Absent:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in ("torch", "numpy", "safetensors", "tokenizers", "starlette", "matplotlib"):
            raise ModuleNotFoundError(f"{name} is not installed", name=name)
        return None

sys.meta_path.insert(0, Absent())
from afterglow.cli import main
main()
"""


def bare(*args: str) -> subprocess.CompletedProcess[str]:
    """In an installation without torch, numpy and matplotlib."""
    command = [sys.executable, "-c", BARE, *args]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)


def test_neither_command_needs_torch() -> None:
    assert "hit rate" in bare("simulate", *SMALL).stdout
    assert "cheapest" in bare("plan", *SMALL, "--hit-rate", "0.5", "--max-devices", "1").stdout


def test_plots_without_matplotlib_are_refused_at_once(tmp_path: Path) -> None:
    ran = bare("simulate", *SMALL, "--plot", str(tmp_path))
    assert ran.returncode == 2
    assert ran.stderr == "afterglow: error: --plot needs matplotlib; pip install matplotlib brings it\n"


def interrupted_after(calls: int) -> object:
    """Ctrl-C, when the progress bar has moved so often."""
    tell = simulate._tell
    left = [calls]

    def interrupting(report: Report, number: int, count: int, part: float) -> None:
        tell(report, number, count, part)
        left[0] -= 1
        if not left[0]:
            signal.raise_signal(signal.SIGINT)

    return mock.patch.object(simulate, "_tell", interrupting)


def test_ctrl_c_prints_what_is_known(tmp_path: Path) -> None:
    args = ("simulate", "sharegpt-atc", "--conversations", "5000", "--json", str(tmp_path / "part.json"))
    with interrupted_after(2):  # type: ignore[attr-defined]
        ran = afterglow(*args)
    assert ran.code == 130
    assert "hit rate" in ran.out
    assert "interrupted: 0 of 1 simulations are complete" in ran.err
    (point,) = json.loads((tmp_path / "part.json").read_text())["points"]
    assert not point["figures"]["complete"]
    assert 0 < point["figures"]["fraction"] < 0.2
    assert point["figures"]["turns"] > 0


def test_ctrl_c_in_a_sweep_keeps_the_points_before() -> None:
    with interrupted_after(2):  # type: ignore[attr-defined]
        ran = afterglow("simulate", "sharegpt-atc", "--sweep", "conversations=10,5000,6000")
    assert ran.code == 130
    rows = [line.split()[0] for line in ran.out.splitlines()[1:]]
    assert rows == ["10", "5000"]
    assert "(in part)" in ran.out
    assert "1 of 3 simulations are complete" in ran.err


def mooncake(path: Path, *bad: str) -> str:
    good = [
        json.dumps({"timestamp": 1000 * i, "input_length": 1024, "output_length": 20, "hash_ids": [0, i + 1]})
        for i in range(8)
    ]
    path.write_text("\n".join([*good[:2], *bad, *good[2:]]) + "\n")
    return str(path)


def test_a_trace_of_single_requests(tmp_path: Path) -> None:
    ran = afterglow("simulate", mooncake(tmp_path / "trace.jsonl"), "--json", "-")
    figures = json.loads(ran.out)["points"][0]["figures"]
    assert figures["turns"] == 8
    assert figures["history_tokens"] == 0
    assert figures["cached_of_prompts"] == pytest.approx(7 / 16, abs=0.01)


def test_a_malformed_line_is_named_or_left_out(tmp_path: Path) -> None:
    trace = mooncake(tmp_path / "trace.jsonl", '{"timestamp": 2000, "input_length": -5}')
    ran = afterglow("simulate", trace)
    assert ran.code == 2
    assert f"{trace}, line 3: " in ran.err
    assert "(--skip-bad leaves such lines out)" in ran.err
    (tmp_path / "empty.jsonl").touch()
    assert (
        "empty.jsonl is empty: a trace has a line for each request"
        in afterglow("simulate", str(tmp_path / "empty.jsonl")).err
    )
    left_out = afterglow("simulate", trace, "--skip-bad")
    assert left_out.code == 0
    assert "left out" in left_out.out
    assert f"1 bad line; the first: {trace}, line 3" in left_out.out
    assert "8 in " in left_out.out


def calibration(path: Path, name: str) -> str:
    timing = Calibrated((0.01, 1e-4, 0.0, 0.0), (0.02, 1e-3, 0.0))
    measured = Calibration(timing, 1e9, 1e9, 0.0, name, model(name).kv_bytes_per_token("float16"))
    path.write_text(json.dumps(measured.packed()))
    return str(path)


def test_a_calibration_takes_the_place_of_the_model(tmp_path: Path) -> None:
    file = calibration(tmp_path / "machine.json", "Llama-3-8B")
    ran = afterglow(
        "simulate", *SMALL, "--model", "Llama-3-8B", "--calibration", file, "--max-batch", "1", "--json", "-"
    )
    figures = json.loads(ran.out)["points"][0]["figures"]
    decodes = figures["steps"] * 0.021
    assert figures["decode_seconds"] == pytest.approx(decodes, rel=0.05)
    other = afterglow("simulate", *SMALL, "--calibration", file)
    assert other.code == 2
    assert "was measured with Llama-3-8B, 131072 bytes of KV per token; LLaMA-13B" in other.err


@pytest.mark.parametrize(
    ("args", "said"),
    [
        (("simulate", "sharegpt-act"), "unknown workload 'sharegpt-act': did you mean sharegpt-atc"),
        (("simulate", *SMALL, "--model", "Lama-13"), "unknown model 'Lama-13': did you mean LLaMA-13B"),
        (("simulate", *SMALL, "--hardware", "A100"), "unknown hardware 'A100': did you mean"),
        (("simulate", *SMALL, "--prices", "cachedatention"), "unknown prices 'cachedatention': did you mean cachedattention"),
        (("simulate", *SMALL, "--hardware", "H100", "--prices", "cachedattention"), "have none for H100"),
        (("simulate", *SMALL, "--model", "LLaMA-65B", "--devices", "1"), "LLaMA-65B does not fit"),
        (("simulate", *SMALL, "--model", "LLaMA-65B", "--devices", "1"), "take 2 A100-80G, not 1"),
        (("simulate", *SMALL, "--disk", "-5G"), "a size cannot be negative, got '-5G'; write 0 or more, such as 8G"),
        (("simulate", *SMALL, "--sweep", "disk=1T,-5G"), "a size cannot be negative, got '-5G'"),
        (("simulate", *SMALL, "--disk-bandwidth", "-1"), "--disk-bandwidth must be more than 0, got -1"),
        (("simulate", *SMALL, "--engines", "0"), "--engines must be 1 or more, got 0"),
        (("simulate", *SMALL, "--rate", "0"), "--rate must be more than 0, got 0"),
        (("simulate", *SMALL, "--think", "nan"), "--think must be 0 or more, got nan"),
        (("simulate", *SMALL, "--dram", "1K"), "1.0 KiB of host memory is less than 4 blocks of 50.0 MiB; give 209715200 or more"),
        (("simulate", *SMALL, "--model", ""), "unknown model ''"),
        (("simulate", ""), "unknown workload ''"),
        (("simulate", *SMALL, "--policy", "lry"), "'lry' is not one of"),
        (("simulate", *SMALL, "--sweep", "policy=lru,lry"), "--policy must be one of lookahead, lru, fifo, lfu, got 'lry'"),
        (("simulate", *SMALL, "--shared-tier", "1T", "--disk", "0"), "--shared-tier needs a --disk"),
        (("simulate", *SMALL, "--warm-up", "100000"), "nothing to count: the warm-up took"),
        (("simulate", *SMALL, "--json", "/nowhere/x.json"), "there is no folder /nowhere"),
        (("simulate",), "give a workload: a trace file, or a preset"),
        (("simulate", *SMALL, "--prefix", "64"), "--prefix belongs to --operator"),
        (("simulate", "--operator", "rely"), "unknown operator 'rely': did you mean relay"),
        (("simulate", "--operator", "relay", "--dram", "1G"), "--dram means nothing to --operator"),
        (("simulate", "sharegpt-atc", "--operator", "relay"), "a workload means nothing to --operator"),
        (("simulate", "--replay", "/nowhere.jsonl"), "--replay /nowhere.jsonl cannot be read: No such file"),
        (("simulate", "sharegpt-atc", "--replay", "x"), "a workload means nothing to --replay"),
        (("plan", *SMALL, "--hit-rate", "0.5", "--hardware", "CPU-2"), "what an hour of CPU-2 costs is not known; give --prices"),
        (("plan", *SMALL), "a plan needs a goal"),
        (("plan", *SMALL, "--hit-rate", "1.5"), "--hit-rate must lie between 0 and 1, got 1.5; 90 % are 0.9"),
        (("plan", *SMALL, "--ttft", "0.00001", "--max-devices", "1"), "cannot be met: the TTFT (p99) down to 0.1"),
        (("plan", *SMALL, "--ttft", "1", "--model", "GPT-3", "--max-devices", "4"), "GPT-3 does not fit: it takes 5 A100-80G"),
    ],
)  # fmt: skip
def test_mistakes_are_one_line_and_exit_code_2(args: tuple[str, ...], said: str) -> None:
    ran = afterglow(*args)
    assert ran.code == 2
    (line,) = ran.err.splitlines()
    assert line.startswith("afterglow: error: ")
    assert said in line


def test_plan_prints_its_reasoning(tmp_path: Path) -> None:
    ran = afterglow("plan", *SMALL, "--hit-rate", "0.8", "--no-retain", "--json", str(tmp_path / "plan.json"))
    assert ran.code == 0
    for name in ("working set", "CCpUT", "RCC", "cheapest", "per hour", "this workload", "simulated:", "met, cheapest"):
        assert name in ran.out
    found = json.loads((tmp_path / "plan.json").read_text())
    assert found["met"]
    assert found["best"]["hit_rate"] >= 0.8
    assert found["best"] in found["trials"]
    assert found["working_set"]["ccput_bytes"] == 20 * 2048 * 819200
    assert (
        found["rcc_over_ccput"] == (found["best"]["dram"] + found["best"]["disk"]) / found["working_set"]["ccput_bytes"]
    )


def test_an_unmet_plan_shows_what_it_tried() -> None:
    ran = afterglow(
        "plan", *SMALL, "--hit-rate", "1", "--max-disk", "0", "--max-dram", "4G", "--max-devices", "1", "--no-retain"
    )
    assert ran.code == 2
    assert "missed" in ran.out
    assert "cannot be met: the hit rate gets up to" in ran.err


def test_one_operator_instead_of_a_workload() -> None:
    ran = afterglow("simulate", "--operator", "importance", "--prefix", "1024")
    assert ran.out.startswith("first token after a cached prefix: OPT-30B on A100-80G")  # the paper's set-up
    other = afterglow("simulate", "--operator", "importance", "--prefix", "1024", "--model", "OPT-13B", "--json", "-")
    (table,) = json.loads(other.out)["tables"]
    assert "OPT-13B" in table["title"]
    assert {row["prefix"] for row in table["rows"]} == {1024}


@pytest.mark.parametrize("command", ["simulate", "plan"])
def test_help_is_sentences_with_defaults(command: str) -> None:
    result = CliRunner().invoke(app, [command, "--help"], env={"COLUMNS": "80", "TERM": "dumb"})
    assert result.exit_code == 0
    assert max(map(len, result.output.splitlines())) <= 80


def test_every_option_is_a_flag() -> None:
    text = CliRunner().invoke(app, ["simulate", "--help"], env={"COLUMNS": "200", "TERM": "dumb"}).output
    assert all("--" + name.replace("_", "-") in text for name in option_kinds())
    assert "[default: 10T]" in text
