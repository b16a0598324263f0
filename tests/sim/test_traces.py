"""Readers of traces: identity of tokens, order of arrivals, damage."""

from __future__ import annotations

import gzip
import json
import os
import tracemalloc
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest

from afterglow.errors import ConfigError
from afterglow.sim.scenario import source_of
from afterglow.sim.scenario_options import Scenario, WorkloadConfig
from afterglow.sim.workload.traces import TraceSource
from afterglow.sim.workload.turns import TraceTurn, Workload, token_bytes

FOLDER = os.environ.get("AFTERGLOW_DATA", "")
DATA = Path(FOLDER)

MOONCAKE = {"timestamp": 0, "input_length": 700, "output_length": 5, "hash_ids": [0, 1]}
AGENTIC = {
    "id": "one",
    "block_size": 64,
    "tool_tokens": 70,
    "system_tokens": 60,
    "requests": [
        {"t": 0.0, "type": "n", "in": 200, "out": 20, "hash_ids": [1, 2, 3], "api_time": 2.0, "think_time": 0.0},
        {"t": 9.0, "type": "s", "in": 300, "out": 10, "hash_ids": [1, 2, 3, 4], "api_time": 1.0, "think_time": None},
        {"t": 15.0, "type": "n", "in": 100, "out": 0, "hash_ids": [1], "think_time": 4.0},
    ],
}
OWN = {"time": 100.0, "session": "s", "prompt_tokens": 10, "new_tokens": 10, "output_tokens": 4}
AZURE = "TIMESTAMP,ContextTokens,GeneratedTokens\r\n2023-11-16 18:15:46.6805900,374,44\r\n2023-11-16 18:15:50.9951690,396,0\r\n"


def write(path: Path, rows: Iterable[object]) -> Path:
    path.write_text("".join(f"{row if isinstance(row, str) else json.dumps(row)}\n" for row in rows))
    return path


def turns(path: Path, **options: Any) -> list[TraceTurn]:
    return [turn for conversation in TraceSource(path, **options) for turn in conversation.turns]


def prompt(turn: TraceTurn) -> bytes:
    return token_bytes(turn.prompt)


def context(turn: TraceTurn) -> bytes:
    return prompt(turn) + token_bytes(turn.reply)


def common(a: bytes, b: bytes) -> int:
    """Tokens of the longest common prefix."""
    return next((i // 4 for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)) // 4)


# ------------------------------------------------------------------------------------------------- formats


def test_mooncake_shares_what_its_blocks_share(tmp_path: Path) -> None:
    rows = [
        MOONCAKE,
        {**MOONCAKE, "timestamp": 1500, "input_length": 1300, "hash_ids": [0, 1, 7]},
        {**MOONCAKE, "timestamp": 1500, "input_length": 1024, "output_length": 0, "hash_ids": [0, 9]},
    ]
    source = TraceSource(write(tmp_path / "t", rows))
    assert source.format == "mooncake"
    one, two, three = (turn for conversation in source for turn in conversation.turns)
    assert [one.prompt_tokens, two.prompt_tokens, three.prompt_tokens] == [700, 1300, 1024]
    assert [one.output_tokens, two.output_tokens, three.output_tokens] == [5, 5, 0]
    assert [one.arrival, two.arrival, three.arrival] == [0.0, 1.5, 1.5]
    assert common(prompt(one), prompt(two)) == 700
    assert common(prompt(one), prompt(three)) == 512
    assert len({one.session, two.session, three.session}) == 3
    assert source.fraction == 1.0
    assert source.conversations == 3


@pytest.mark.parametrize("first", [-7_000, 1_700_000_000_000])
def test_mooncake_times_count_from_the_first_one(tmp_path: Path, first: int) -> None:
    source = TraceSource(write(tmp_path / "t", [{**MOONCAKE, "timestamp": first + 1500 * n} for n in range(3)]))
    assert [c.start for c in source] == [0.0, 1.5, 3.0]
    assert [turn.arrival for c in source for turn in c.turns] == [0.0, 1.5, 3.0]


def test_azure_has_arrivals_and_lengths(tmp_path: Path) -> None:
    path = tmp_path / "t.csv"
    path.write_bytes(AZURE.encode())
    source = TraceSource(path)
    assert source.format == "azure"
    one, two = (turn for conversation in source for turn in conversation.turns)
    assert (one.prompt_tokens, one.output_tokens, one.arrival) == (374, 44, 0.0)
    assert (two.prompt_tokens, two.output_tokens) == (396, 0)
    assert two.arrival == pytest.approx(4.314579)
    assert common(prompt(one), prompt(two)) == 0


def test_an_agents_replies_and_history_come_back(tmp_path: Path) -> None:
    source = TraceSource(write(tmp_path / "t", [AGENTIC]), rate=1.0)
    assert source.format == "agentic"
    (conversation,) = source
    one, two, three = conversation.turns
    assert [t.prompt_tokens for t in (one, two, three)] == [200, 300, 100]
    assert [t.output_tokens for t in (one, two, three)] == [20, 10, 0]
    assert common(context(one), prompt(two)) == 220  # all of the first turn, its reply as well
    assert [t.new_tokens for t in (one, two)] == [200, 80]
    assert common(prompt(two), prompt(three)) == 64  # it went back
    assert [t.think for t in (one, two, three)] == [0.0, 7.0, 4.0]  # unknown: the rest of the time between
    start = conversation.start
    assert start > 0
    assert [t.arrival for t in (one, two, three)] == [start, start + 9.0, start + 15.0]
    assert [t.index for t in (one, two, three)] == [0, 1, 2]


def test_agents_share_tools_and_system_prompts_of_equal_length_only(tmp_path: Path) -> None:
    rows = [
        AGENTIC,
        {**AGENTIC, "id": "two"},
        {**AGENTIC, "id": "three", "system_tokens": 61},
        {**AGENTIC, "id": "four", "tool_tokens": 71},
    ]
    found = [next(iter(c.turns)) for c in TraceSource(write(tmp_path / "t", rows))]
    assert [common(prompt(found[0]), prompt(other)) for other in found[1:]] == [128, 70, 0]


def test_agents_that_an_agent_starts_come_in_order_of_time(tmp_path: Path) -> None:
    shared = {"tool_tokens": 70, "system_tokens": 60}
    child = {"t": 50.0, "type": "subagent", "agent_id": "x", "requests": AGENTIC["requests"], **shared}
    rows = [{**AGENTIC, "requests": [*AGENTIC["requests"], child]}, {**AGENTIC, "id": "two"}]  # type: ignore[misc]
    found = list(TraceSource(write(tmp_path / "t", rows), rate=1.0))
    assert [c.name for c in found] == ["one (session 1)", "two (session 2)", "one (session 1)/x (3)"]
    assert [c.start for c in found] == sorted(c.start for c in found)
    first, child_first = next(iter(found[0].turns)), next(iter(found[2].turns))
    assert found[2].start == found[0].start + 50.0 == child_first.arrival
    assert common(prompt(first), prompt(child_first)) == 200  # hashes are the trace's


@pytest.mark.parametrize("name", ["one", None])
def test_each_line_of_agents_is_a_session_whatever_its_id(tmp_path: Path, name: str | None) -> None:
    child = {"t": 1.0, "type": "subagent", "agent_id": name, "requests": AGENTIC["requests"]}
    rows = [{**AGENTIC, "id": name, "requests": [*AGENTIC["requests"], child, child]}] * 2  # type: ignore[misc]
    found = list(TraceSource(write(tmp_path / "t", rows), rate=1.0))
    assert len({c.name for c in found}) == 6
    one, other = [next(iter(c.turns)) for c in found if "/" not in c.name]
    assert common(prompt(one), prompt(other)) == 128


def test_an_agent_that_begins_anew_has_left_its_system_prompt(tmp_path: Path) -> None:
    requests = [*AGENTIC["requests"], {"t": 20.0, "in": 150, "out": 1, "hash_ids": [1, 9]}]  # type: ignore[misc]
    (conversation,) = TraceSource(write(tmp_path / "t", [{**AGENTIC, "requests": requests}]))
    first, *_, last = conversation.turns
    assert common(prompt(first), prompt(last)) == 64


def test_the_first_conversations_come_with_all_their_parts(tmp_path: Path) -> None:
    said = [("a", 0.0), ("b", 1.0), (None, 2.0), ("a", 3.0), ("c", 4.0), ("b", 5.0), (None, 6.0)]
    path = write(tmp_path / "t", [{**OWN, "session": name, "time": time} for name, time in said])
    for count, starts in ((1, [0, 3]), (2, [0, 1, 3, 5]), (3, [0, 1, 2, 3, 5]), (9, [0, 1, 2, 3, 4, 5, 6])):
        _, source = source_of(Scenario(workload=str(path), source=WorkloadConfig(conversations=count)), 2048)
        for _ in range(2):  # it can be read again
            assert [c.start for c in source] == starts
            assert source.fraction == 1.0


def test_the_first_of_single_requests_end_the_reading(tmp_path: Path) -> None:
    path = write(tmp_path / "t", [MOONCAKE, MOONCAKE, "{broken"])
    _, source = source_of(Scenario(workload=str(path), source=WorkloadConfig(conversations=2)), 2048)
    assert len(list(source)) == 2


def test_sessions_begin_as_often_as_asked_for(tmp_path: Path) -> None:
    path = write(tmp_path / "t", [{**AGENTIC, "id": str(n)} for n in range(400)])
    for rate in (0.5, 4.0):
        starts = [c.start for c in TraceSource(path, rate=rate, seed=3)]
        assert starts[-1] == pytest.approx(400 / rate, rel=0.15)
    assert [c.start for c in TraceSource(path, seed=1)] != [c.start for c in TraceSource(path, seed=2)]


# ---------------------------------------------------------------------------------------- Afterglow's own


def test_a_session_without_hashes_goes_on_where_it_was(tmp_path: Path) -> None:
    rows = [
        OWN,
        {**OWN, "time": 110.0, "prompt_tokens": 20, "new_tokens": 6, "output_tokens": 5, "think_time": 2.5},
        {**OWN, "time": 120.0, "prompt_tokens": 30, "new_tokens": 12, "output_tokens": 1},  # the last 7 were edited
        {**OWN, "time": 130.0, "session": "other"},
        {**OWN, "time": 140.0, "prompt_tokens": 40, "new_tokens": None},  # as much as there is
    ]
    source = TraceSource(write(tmp_path / "t", rows))
    assert source.format == "afterglow"
    one, two, three, other, four = (turn for conversation in source for turn in conversation.turns)
    assert common(context(one), prompt(two)) == 14
    assert common(context(two), prompt(three)) == 18
    assert common(context(three), prompt(four)) == 31
    assert common(prompt(one), prompt(other)) == 0
    assert [t.index for t in (one, two, three, other, four)] == [0, 1, 2, 0, 3]
    assert [t.new_tokens for t in (one, two, three, other, four)] == [10, 6, 12, 10, 9]
    assert [t.arrival for t in (one, two, three, other, four)] == [0.0, 10.0, 20.0, 30.0, 40.0]
    assert two.think == 2.5


def test_equal_hashes_are_equal_tokens_whoever_asks(tmp_path: Path) -> None:
    rows = [
        {**OWN, "prompt_tokens": 150, "output_tokens": 10, "block_hashes": ["a", "b"]},
        {
            **OWN,
            "time": 101.0,
            "session": "t",
            "prompt_tokens": 130,
            "output_tokens": 70,
            "block_hashes": ["a", "b", "c"],
        },
        {**OWN, "time": 102.0, "session": None, "prompt_tokens": 100, "output_tokens": 0, "block_hashes": ["a"]},
        {**OWN, "time": 103.0, "session": None, "prompt_tokens": 100, "output_tokens": 0, "block_hashes": ["z"]},
    ]
    one, two, three, four = turns(write(tmp_path / "t", rows))
    assert common(prompt(one), prompt(two)) == 128
    assert common(prompt(one), prompt(three)) == 64
    assert common(prompt(one), prompt(four)) == 0
    assert three.session != four.session


@pytest.mark.parametrize("cover_replies", [True, False])
def test_turns_shorter_than_a_block_lose_nothing(cover_replies: bool, tmp_path: Path) -> None:
    """Hashes are of whole blocks, of prompts and replies or of prompts alone: what lies behind the last one is found again
    by the next turn, and by the session that has its blocks then."""
    rows, length, time = [], 0, 0.0
    for new, output in ((100, 30), (10, 7), (9, 60), (30, 5), (200, 1)):
        known = (length + new + (output if cover_replies else 0)) // 64
        rows.append(
            {
                "time": time,
                "session": "s",
                "prompt_tokens": length + new,
                "new_tokens": new,
                "output_tokens": output,
                "block_hashes": [f"h{n}" for n in range(known)],
            }
        )
        length += new + output
        time += 1.0
    last = rows[-1]
    rows.append({**last, "session": "fork", "time": time, "new_tokens": last["prompt_tokens"]})
    found = turns(write(tmp_path / "t", rows))
    for before, after in zip(found[:4], found[1:5], strict=True):
        assert prompt(after).startswith(context(before))
    fork, kept = found[5], found[4]
    assert common(prompt(fork), prompt(kept)) == kept.prompt_tokens // 64 * 64


def test_lines_are_read_in_order_of_arrival_as_far_as_they_promise(tmp_path: Path) -> None:
    """They are written when turns end: 1 ends last, having arrived first."""
    rows = [
        {**OWN, "session": "2", "time": 12.0, "complete_until": 10.0},
        {**OWN, "session": "3", "time": 14.0, "complete_until": 10.0},
        {**OWN, "session": "1", "time": 10.0, "complete_until": 20.0},
        {**OWN, "session": "5", "time": 33.0, "complete_until": 31.0},
        {**OWN, "session": "4", "time": 31.0, "complete_until": 40.0},
    ]
    path = write(tmp_path / "t", rows)
    found = list(TraceSource(path))
    assert [(c.name, c.start) for c in found] == [("1", 0.0), ("2", 2.0), ("3", 4.0), ("4", 21.0), ("5", 23.0)]
    arrivals = Workload(TraceSource(path), pace="open").take(100.0)
    assert [a.turn.session for a in arrivals] == ["1", "2", "3", "4", "5"]


# -------------------------------------------------------------------------------------------------- damage

BAD = [
    (MOONCAKE, "not json at all", "it is not JSON"),
    (MOONCAKE, "[]", r"it must be a JSON object, not \[\]"),
    (MOONCAKE, {**MOONCAKE, "timestamp": "soon"}, 'timestamp must be a number, not "soon"'),
    (MOONCAKE, {**MOONCAKE, "timestamp": -5}, r"it is at -0\.005 s, earlier than the lines before it"),
    (MOONCAKE, {**MOONCAKE, "input_length": 0}, "input_length must be a whole number from 1 to .*, not 0"),
    (MOONCAKE, {**MOONCAKE, "input_length": 10**12}, "input_length must be a whole number"),
    (MOONCAKE, {**MOONCAKE, "output_length": -1}, "output_length must be a whole number from 0"),
    (MOONCAKE, {**MOONCAKE, "output_length": 1.5}, "output_length must be a whole number"),
    (MOONCAKE, {**MOONCAKE, "hash_ids": [0]}, "1 hash_ids are for 512 tokens, the input has 700"),
    (MOONCAKE, {**MOONCAKE, "hash_ids": [0, 1, 2]}, "hash_ids has 3 hashes, and there are 2 blocks"),
    (MOONCAKE, {**MOONCAKE, "hash_ids": [0, None]}, "hash_ids must be a list of whole numbers"),
    (MOONCAKE, {**MOONCAKE, "hash_ids": [0, -7]}, "hash_ids must be numbers from 0 to .*, not -7 to 0"),
    (MOONCAKE, {"timestamp": 0}, "input_length must be a whole number .* and is missing"),
    (AGENTIC, {**AGENTIC, "requests": []}, "it has no requests"),
    (AGENTIC, {**AGENTIC, "requests": {}}, "requests must be a list"),
    (AGENTIC, {**AGENTIC, "requests": [3]}, "a request must be an object, not 3"),
    (AGENTIC, {**AGENTIC, "block_size": 16}, "block_size must be 64, not 16"),
    (AGENTIC, {**AGENTIC, "requests": AGENTIC["requests"][::-1]}, "a request at 9 s follows one at 15 s"),  # type: ignore[index]
    (OWN, {**OWN, "new_tokens": 11}, "new_tokens is 11, more than the 10 of the prompt"),
    (OWN, {**OWN, "session": 3}, "session must be a string or null, not 3"),
    (OWN, {**OWN, "time": float("inf")}, "time must be a number"),
    (OWN, {**OWN, "time": True}, "time must be a number, not true"),
    (OWN, {**OWN, "time": 99.0}, "it is at -1 s, earlier than the lines before it"),
    (OWN, {**OWN, "block_hashes": ["a"]}, "block_hashes has 1 hashes, and there are 0 blocks"),
    (OWN, "[" * 100_000, "it is not JSON"),
]


@pytest.mark.parametrize(("good", "bad", "reason"), BAD)
def test_a_bad_line_is_named_or_counted(good: object, bad: object, reason: str, tmp_path: Path) -> None:
    path = write(tmp_path / "t", [good, "", bad, good])
    with pytest.raises(ConfigError, match=rf"t, line 3: {reason}.*\(--skip-bad leaves such lines out\)"):
        turns(path)
    source = TraceSource(path, skip_bad=True)
    for _ in range(2):  # it can be read again
        assert sum(1 for _ in source) == 2
        assert source.skipped == 1
        assert source.first_bad is not None
        assert "line 3" in source.first_bad


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        ("2023-11-16 18:15:46,374", "it has 2 cells"),
        ("yesterday,374,1", 'TIMESTAMP must be a date and time, not "yesterday"'),
        ("2023-11-16 18:15:46,many,1", 'ContextTokens must be a whole number .*, not "many"'),
        ("2023-11-16 18:15:46,-3,1", 'ContextTokens must be a whole number .*, not "-3"'),
        ("2023-11-16 18:15:46,3,²", "GeneratedTokens must be a whole number"),
        ("2023-11-16 18:15:45,374,1", r"it is at -1\.68059 s, earlier"),
    ],
)
def test_a_bad_row_of_a_table_is_named_or_counted(row: str, reason: str, tmp_path: Path) -> None:
    path = tmp_path / "t"
    path.write_text(AZURE + row + "\n")
    with pytest.raises(ConfigError, match=f"line 4: {reason}"):
        turns(path)
    assert len(turns(path, skip_bad=True)) == 2


def test_bytes_that_are_no_text_are_a_bad_line(tmp_path: Path) -> None:
    path = tmp_path / "t"
    path.write_bytes(json.dumps(OWN).encode() + b"\n\xff\xfe\x00\n")
    with pytest.raises(ConfigError, match="line 2: it is not UTF-8"):
        turns(path)
    assert len(turns(path, skip_bad=True)) == 1


def test_the_format_shows_in_spite_of_a_bad_first_line(tmp_path: Path) -> None:
    path = write(tmp_path / "t", ["{broken", MOONCAKE])
    with pytest.raises(ConfigError, match="line 1: it is not JSON"):
        turns(path)
    assert len(turns(path, skip_bad=True)) == 1


def test_a_file_that_is_no_trace_is_refused(tmp_path: Path) -> None:
    for text in ("", "\n\n"):
        (tmp_path / "t").write_text(text)
        with pytest.raises(ConfigError, match="is empty: a trace has a line for each request"):
            TraceSource(tmp_path / "t")
    for text in ("hello\n", '{"a": 1}\n'):
        (tmp_path / "t").write_text(text)
        with pytest.raises(ConfigError, match=r"cannot tell what kind of trace .* afterglow, mooncake, agentic, azure"):
            TraceSource(tmp_path / "t")
    with pytest.raises(ConfigError, match=r"unknown trace format 'moncake': did you mean mooncake\?"):
        TraceSource(tmp_path / "t", format="moncake")
    (tmp_path / "t").write_text(AZURE.splitlines()[0])
    with pytest.raises(ConfigError, match="has no requests in it"):
        turns(tmp_path / "t")
    for rate in (0.0, -1.0, float("nan")):
        with pytest.raises(ConfigError, match="the rate must be a positive number"):
            TraceSource(tmp_path / "t", rate=rate)
    with pytest.raises(ConfigError, match=r"cannot read .*nowhere: No such file"):
        TraceSource(tmp_path / "nowhere")
    with pytest.raises(ConfigError, match=r"cannot read .*: Is a directory"):
        TraceSource(tmp_path)


def test_a_format_that_is_named_is_believed(tmp_path: Path) -> None:
    path = write(tmp_path / "t", [MOONCAKE])
    with pytest.raises(ConfigError, match="line 1: time must be a number, and is missing"):
        turns(path, format="afterglow")


def test_compressed_traces(tmp_path: Path) -> None:
    text = "".join(json.dumps({**OWN, "session": str(n), "time": float(n)}) + "\n" for n in range(500)).encode()
    path = tmp_path / "t.gz"
    path.write_bytes(gzip.compress(text))
    source = TraceSource(path)
    assert len(list(source)) == 500
    assert source.fraction == 1.0
    path.write_bytes(gzip.compress(text)[:-200])
    with pytest.raises(ConfigError, match=r"after line \d+: the compressed data is damaged"):
        turns(path)
    path.write_bytes(b"\x28\xb5\x2f\xfd" + bytes(20))
    with pytest.raises(ConfigError, match="compressed with zstd; decompress it first"):
        TraceSource(path)


def test_a_long_trace_is_not_held_in_memory(tmp_path: Path) -> None:
    """Of a long trace no more is kept than of a short one, but for what sessions are remembered by."""
    used = []
    for count in (500, 8000):
        rows = ({**OWN, "time": float(n), "session": None, "prompt_tokens": 100} for n in range(count))
        source = TraceSource(write(tmp_path / "t", rows))
        tracemalloc.start()
        for conversation in source:
            assert conversation.turns
        used.append(tracemalloc.get_traced_memory()[1])
        tracemalloc.stop()
    assert used[1] < 1.5 * used[0] + 100_000


# ------------------------------------------------------------------------------------------ recorded traces

needs_data = pytest.mark.skipif(not (FOLDER and DATA.is_dir()), reason="no AFTERGLOW_DATA")


@needs_data
def test_an_hour_of_mooncake() -> None:
    path = DATA / "mooncake/conversation_trace.jsonl"
    if not path.is_file():
        pytest.skip("no mooncake trace in AFTERGLOW_DATA")
    source = TraceSource(path)
    blocks: set[int] = set()
    again = tokens = requests = 0
    for conversation in source:
        for turn in conversation.turns:
            requests += 1
            tokens += turn.prompt_tokens
            names = [n // 512 for part in turn.prompt for n in range(part.start, part.start + part.length, 512)]
            again += sum(name in blocks for name in names)
            blocks.update(names)
    assert (source.format, requests, source.skipped) == ("mooncake", 12031, 0)
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    assert tokens == sum(row["input_length"] for row in rows)
    ids = [block for row in rows for block in row["hash_ids"]]
    assert again == len(ids) - len(set(ids))


@needs_data
def test_sessions_of_coding_agents() -> None:
    path = DATA / "agentic/sample_small_traces.jsonl"
    if not path.is_file():
        pytest.skip("no agentic traces in AFTERGLOW_DATA")
    source = TraceSource(path)
    found = {c.name: list(c.turns) for c in source}
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    assert source.format == "agentic"
    assert len(found) == len(rows) == 40
    for row in rows:
        own = found[row["id"]]
        assert [t.prompt_tokens for t in own] == [r["in"] for r in row["requests"]]
        assert [t.output_tokens for t in own] == [r["out"] for r in row["requests"]]
    reused = sum(t.prompt_tokens - t.new_tokens for own in found.values() for t in own[1:])
    total = sum(t.prompt_tokens for own in found.values() for t in own[1:])
    assert 0.9 < reused / total < 1  # agents send their history again


@needs_data
def test_arrivals_of_azure() -> None:
    path = DATA / "azure_llm_2023/AzureLLMInferenceTrace_conv.csv"
    if not path.is_file():
        pytest.skip("no azure trace in AFTERGLOW_DATA")
    source = TraceSource(path)
    found = list(source)
    assert (source.format, len(found)) == ("azure", 19366)
    assert [c.start for c in found] == sorted(c.start for c in found)
    assert 3400 < found[-1].start < 3600
