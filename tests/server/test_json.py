"""JSON that is written in pieces is the JSON that is written at once."""

from __future__ import annotations

import json
from typing import Any

import pytest

from afterglow.server.json_responses import AT_ONCE, to_json, write_json
from tests.server.conftest import Running

DEEP: Any = [[[[[[[[{"a": [1, [2]]}]]]]]]]]


@pytest.mark.parametrize(
    "value",
    [
        {},
        [],
        [{}, [], None, "ü\u2028"],
        {"a": [], "b": {}, "c": [[1, 2], [3]], "d": None, 'e"': "\ud800"},
        list(range(2 * AT_ONCE + 1)),
        [1.5, {"a": 1}],
        DEEP,
        {"choices": [{"logprobs": {"content": [{"token": "a", "top_logprobs": [{"bytes": [1]}] * 3}] * 5}}] * 2},
    ],
)
def test_pieces_are_the_whole(value: Any) -> None:
    assert write_json(value) == to_json(value)
    assert json.loads(write_json(value)) == json.loads(to_json(value))


@pytest.mark.parametrize(
    ("method", "path", "methods"),
    [("TRACE", "/health", "GET"), ("PUT", "/v1/responses/x", "DELETE, GET"), ("GET", "/v1/chat/completions", "POST")],
)
def test_a_wrong_method_is_told_the_right_ones(server: Running, method: str, path: str, methods: str) -> None:
    answer = server.http().request(method, path)
    assert (answer.status_code, answer.headers["allow"]) == (405, methods)
