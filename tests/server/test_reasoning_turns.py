"""Conversations with models that think: what templates leave out of the history is computed while the engine is idle, so that in
every turn nothing but the new message is computed."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import count, takewhile
from pathlib import Path
from typing import Any

import httpx
import pytest

from afterglow.errors import ModelError
from afterglow.library.locate import find_model
from afterglow.request import Request, SamplingParams
from tests import doors
from tests import reasoning_templates as kit
from tests.reasoning_templates import FORMATS
from tests.scripted_model import Scripted, scripted
from tests.waiting import wait_for

CALL = '<tool_call>\n{"name": "f", "arguments": {"n":1}}\n</tool_call>'  # not as the template spaces it
TOOLS = [{"type": "function", "function": {"name": "f", "description": "Counts."}}]


_numbers = count()


class Trace:
    """A conversation whose client sends reasoning back, or not, and what was computed for it."""

    def __init__(self, server: Scripted, returns: bool, **fields: Any) -> None:
        self.server, self.returns, self.fields = server, returns, fields
        more = fields.setdefault("extra_body", {})
        more["cache_salt"] = f"trace {next(_numbers)}"  # other traces' rows are not found
        self.messages: list[Any] = []
        self.computed: list[list[int]] = []
        self.ahead: list[list[int]] = []  # computed while idle

    def turn(self, said: dict[str, Any], reply: str) -> Any:
        """Send a message, check what was cached, and take the reply into the history."""
        server = self.server
        self.messages.append(said)
        server.say(reply)
        before = len(server.engine.expected)  # type: ignore[attr-defined]
        answer = server.client.chat.completions.create(
            model="model", messages=self.messages, temperature=0, **self.fields
        )
        prompt = list(server.requests[-1].prompt)
        known = max((_common(prompt, rows) for rows in (*self.computed, *self.ahead)), default=0)
        cached = answer.usage.prompt_tokens_details.cached_tokens
        assert cached == min(known, len(prompt) - 1)
        if self.computed:
            new = server.tokenizer.decode(prompt[cached:], False)
            assert len(new) <= len(said["content"]) + 100, new  # the message, and the marks around it
        self.computed.append([*prompt, *server.said[-1]])
        settle(server)
        for each in server.engine.expected[before:]:  # type: ignore[attr-defined]
            self.ahead += [list(request.prompt) for request in each]
        message = answer.choices[0].message.model_dump(exclude_none=True)
        if not self.returns:
            message.pop("reasoning_content", None)
        self.messages.append(message)
        return answer.choices[0].message


def settle(server: Scripted) -> None:
    """Wait until next turns are rendered and computed."""
    wait_for(lambda: not server.service.state.kept_replies.busy)
    server.engine.settle()
    assert len(server.engine.loop.upcoming) == 0


def _common(a: list[int], b: list[int]) -> int:
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(a, b, strict=False)))


def watched(server: Scripted) -> Scripted:
    """Note what the engine is told to expect."""
    expect = server.engine.expect
    server.engine.expected = []  # type: ignore[attr-defined]

    def note(prompts: list[Request], after: str) -> None:
        server.engine.expected.append(prompts)  # type: ignore[attr-defined]
        expect(prompts, after)

    server.engine.expect = note  # type: ignore[method-assign,assignment]
    return server


@pytest.fixture(scope="module", params=list(FORMATS))
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Scripted, str]]:
    template, specials, eos, thought = FORMATS[request.param]
    with scripted(tmp_path_factory.mktemp(request.param), template, specials, eos) as server:
        yield watched(server), thought


@pytest.fixture(scope="module")
def qwen(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Scripted]:
    with scripted(tmp_path_factory.mktemp("qwen"), kit.QWEN) as server:
        yield watched(server)


def user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


@pytest.mark.parametrize("returns", [True, False])
def test_every_turn_computes_its_message_alone(model: tuple[Scripted, str], returns: bool) -> None:
    server, thought = model
    trace = Trace(server, returns)
    for number in range(4):
        message = trace.turn(user(f"Question {number}, client {returns}?"), f"{thought}Answer {number}, {returns}.")
        assert message.reasoning_content == kit.THOUGHT
    kept = server.tokenizer.chat_template.source == kit.KEPT  # type: ignore[union-attr]
    assert bool(trace.ahead) or (kept and returns)


@pytest.mark.parametrize("returns", [True, False])
def test_turns_with_calls_and_results_too(qwen: Scripted, returns: bool) -> None:
    """While calls go on the template keeps their reasoning, and forgets it with the next question."""
    trace = Trace(qwen, returns, tools=TOOLS)
    for number in range(2):
        said: dict[str, Any] = user(f"Count {number}, {returns}.")
        for _ in range(2):
            (call,) = trace.turn(said, kit.TAGGED + CALL).tool_calls
            said = {"role": "tool", "tool_call_id": call.id, "content": f"result {number}"}
        trace.turn(said, f"{kit.TAGGED}It is {number}.")
    if returns:
        spliced = [r for r in trace.computed if _common(r, trace.computed[-1]) == len(r)]
        assert spliced, "replies of a turn that goes on are continued with the tokens that were generated"


def test_a_turn_without_thinking(qwen: Scripted) -> None:
    """The generation prompt ends the reasoning that it begins, and the history has none."""
    trace = Trace(qwen, True, extra_body={"enable_thinking": False})
    for number in range(3):
        trace.turn(user(f"Say {number}."), f"Here is {number}.")
    assert len(trace.ahead) == 3


def test_responses_go_on_by_id(qwen: Scripted) -> None:
    previous = None
    for number in range(3):
        qwen.say(f"{kit.TAGGED}Response {number}.")
        reply = qwen.client.responses.create(
            model="model", input=f"Ask by id {number}", previous_response_id=previous, temperature=0
        )
        if previous is not None:
            assert reply.usage.input_tokens - reply.usage.input_tokens_details.cached_tokens < 45
        previous = reply.id
        settle(qwen)


def test_a_plain_model_expects_nothing(tmp_path: Path) -> None:
    with scripted(tmp_path) as server:
        trace = Trace(watched(server), True)
        trace.turn(user("Hi"), "Hello.")
        trace.turn(user("How are you?"), "Fine.")
        assert not trace.ahead


def test_idle_work_makes_way(tmp_path: Path) -> None:
    """A request stops it, and gets the rows that were computed so far; another conversation's work goes on afterwards."""
    with scripted(tmp_path, kit.QWEN) as server:
        engine, runner = server.engine, server.runner
        upcoming = engine.loop.upcoming
        long = [7 + n % 200 for n in range(1500)]
        seen = hold_idle_work(server, 2, 3)
        engine.expect([Request("next", long)])
        wait_for(seen.stopped.is_set)
        seen.stopped.clear()
        server.client.chat.completions.create(model="model", messages=[user("Hi")], max_tokens=2, temperature=0)
        wait_for(seen.stopped.is_set)
        assert len(upcoming) == 1, "it goes on"
        seen.go_on()
        engine.settle()
        assert len(upcoming) == 0
        assert sum(seen.rows) == len(long), "no row was computed twice"
        (done,) = engine.generate([_plain("after", [*long, 5])])
        assert done.cached.total == len(long)
        assert runner is not None


def test_a_turn_that_comes_early_takes_the_rows_over(tmp_path: Path) -> None:
    with scripted(tmp_path, kit.QWEN) as server:
        engine = server.engine
        long = [9 + n % 200 for n in range(1500)]
        seen = hold_idle_work(server, 2)
        engine.expect([Request("next", long), Request("other", [*long[:900], 3, 4])])
        wait_for(seen.stopped.is_set)
        (done,) = engine.generate([_plain("turn", [*long, 5])])
        assert 0 < done.cached.total == sum(seen.rows) < len(long)
        engine.settle()
        assert len(engine.loop.upcoming) == 0
        assert sum(seen.rows) == done.cached.total, "the other beginning is of no use any more"


def test_what_is_deleted_is_not_computed(tmp_path: Path) -> None:
    with scripted(tmp_path, kit.QWEN) as server:
        engine = server.engine
        long = [9 + n % 200 for n in range(1500)]
        seen = hold_idle_work(server, 1)
        engine.expect([Request("next", long, session_id="s")])
        wait_for(seen.stopped.is_set)
        with ThreadPoolExecutor(1) as pool:
            forgotten = pool.submit(engine.forget_session, "", "s")
            wait_for(engine.parts.inbox.pressed)  # the engine answers between two steps
            seen.go_on()
            assert forgotten.result(20)
        engine.settle()
        assert len(engine.loop.upcoming) == 0
        assert sum(seen.rows) < len(long)
        assert engine.sessions("") == []


def test_what_was_deleted_during_the_reply_is_not_computed(tmp_path: Path) -> None:
    with scripted(tmp_path, kit.QWEN) as server:
        engine = server.engine
        server.runner.free = True
        engine.generate([Request("first", [5, 6, 7, 8], SamplingParams(max_tokens=1), session_id="s")])
        deleting, steps = threading.Event(), count()
        run: Callable[..., Any] = server.runner.run

        def waiting(step: Any) -> Any:
            if next(steps) == 10:  # the reply does not end before
                deleting.wait(20)
            return run(step)

        server.runner.run = waiting  # type: ignore[method-assign]
        params = SamplingParams(max_tokens=30, ignore_eos=True)
        for number, _ in enumerate(engine.outputs([Request("turn", [5, 6, 7, 9], params, session_id="s")])):
            if number == 0:
                with ThreadPoolExecutor(1) as pool:
                    forgotten = pool.submit(engine.forget_session, "", "s")
                    wait_for(lambda done=forgotten.done: engine.parts.inbox.pressed() or done())
                    deleting.set()
                    assert forgotten.result(20)
        engine.expect([Request("next", [5, 6, 7, 9, 10], session_id="s")], "turn")
        engine.settle()
        assert engine.sessions("") == []
        engine.expect([Request("next", [5, 6, 7, 9, 10], session_id="s")], "another turn")
        engine.settle()
        assert len(engine.sessions("")) == 1


def test_idle_work_takes_no_place_of_callers(tmp_path: Path) -> None:
    with scripted(tmp_path, kit.QWEN) as server:
        engine = server.engine
        doors.shorten_queue(engine, 1)
        seen = hold_idle_work(server, 1)
        engine.expect([Request("next", [7 + n % 200 for n in range(1500)])])
        wait_for(seen.stopped.is_set)
        (done,) = engine.generate([_plain("caller", [5, 6, 7])])
        assert done.finish_reason == "stop"


def test_what_can_never_be_computed_keeps_nothing_waiting(tmp_path: Path) -> None:
    with scripted(tmp_path, kit.QWEN) as server:
        engine = server.engine
        for number, bad in enumerate([[5, engine.vocab_size], [5] * (engine.max_model_len + 1)]):
            engine.expect([Request(f"bad {number}", bad)])
            engine.expect([Request("next", [5, 6, 7, 8, number], session_id=f"s{number}")])
            engine.settle()
            assert len(engine.loop.upcoming) == 0
        assert len(engine.sessions("")) == 2


@pytest.mark.parametrize("name", ["afterglow-small", pytest.param("smollm2-135m-instruct", marks=pytest.mark.long)])
def test_what_was_computed_ahead_is_exact(tmp_path: Path, name: str) -> None:
    """A real model says the same over rows that were computed while it was idle as over a prompt computed at once."""
    try:
        found = find_model(name)
    except ModelError:
        pytest.skip(f"{name} is not installed")
    end = "<|end|>" if name == "afterglow-small" else "<|im_end|>"
    with scripted(tmp_path, kit.QWEN.replace("<|im_end|>", end), eos=end, model=found) as server:
        engine = server.engine
        trace = Trace(watched(server), False)
        for text in ("My favorite color is teal.", "I live in Lisbon."):
            trace.turn(user(text), f"{kit.TAGGED}I see.")
        assert len(trace.ahead) == 2
        server.runner.free = True
        prompt = server.tokenizer.encode_chat([*trace.messages, user("What is my favorite color?")]).ids
        params = SamplingParams(max_tokens=12, temperature=0, logprobs=0)
        (over,) = engine.generate([Request("over", prompt, params, salt=server.requests[-1].salt)])
        (cold,) = engine.generate([Request("cold", prompt, params, reuse=False)])
        assert over.cached.total >= max(len(rows) for rows in trace.ahead)
        assert over.tokens == cold.tokens
        for left, right in zip(over.logprobs, cold.logprobs, strict=True):
            assert left.logprob == pytest.approx(right.logprob, abs=1e-4)  # sums in other pieces


def test_anthropics_clients_find_it_too(qwen: Scripted) -> None:
    """They send thoughts back."""
    messages: list[Any] = []
    for number in range(3):
        messages.append(user(f"Message {number}"))
        qwen.say(f"{kit.TAGGED}Reply {number}.")
        body = {"model": "model", "max_tokens": 99, "temperature": 0, "messages": messages, "cache_salt": "anthropic"}
        answer = httpx.post(f"{qwen.url}/v1/messages", json=body).json()
        assert [block["type"] for block in answer["content"]] == ["thinking", "text"]
        prompt = list(qwen.requests[-1].prompt)
        new = qwen.tokenizer.decode(prompt[answer["usage"]["cache_read_input_tokens"] :], False)
        assert f"Message {number}" in new
        assert "Reply" not in new
        messages.append({"role": "assistant", "content": answer["content"]})
        settle(qwen)


def _plain(name: str, prompt: list[int]) -> Request:
    return Request(name, prompt, SamplingParams(max_tokens=1, temperature=0))


class Held:
    """Passes of idle work: their rows, and stops after some of them."""

    def __init__(self, stops: Sequence[int]) -> None:
        self.rows: list[int] = []
        self.stopped = threading.Event()
        self._stops = stops
        self._gate = threading.Event()

    def passed(self, rows: int) -> None:
        self.rows.append(rows)
        if len(self.rows) in self._stops:
            self._gate.clear()
            self.stopped.set()
            assert self._gate.wait(20)

    def go_on(self) -> None:
        self._gate.set()


def hold_idle_work(server: Scripted, *stops: int) -> Held:
    """Stop the engine's thread after so many passes of idle work until it is told to go on, or a request arrives."""
    held = Held(stops)
    engine = server.engine
    run: Callable[..., Any] = server.runner.run
    accept = engine.loop.accept

    def noted(step: Any) -> Any:
        out = run(step)
        own = [each for each in step.runs if engine.loop.requests.by_job[each.job].spec.aside]
        if own:
            held.passed(sum(len(each.tokens) for each in own))
        return out

    def accepted(prepared: Sequence[Any]) -> None:
        accept(prepared)
        held.go_on()

    server.runner.run = noted  # type: ignore[method-assign]
    engine.loop.accept = accepted  # type: ignore[method-assign]
    return held
