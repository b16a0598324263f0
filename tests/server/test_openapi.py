"""`/openapi.json` is valid, complete and true; `/docs` shows it and asks no other server."""

from __future__ import annotations

import re
from typing import Any

import pytest
from openapi_spec_validator import OpenAPIV31SpecValidator
from starlette.routing import Route

from afterglow.server.api.openapi import ENDPOINTS, ERRORS, document
from afterglow.server.app import create_app
from tests.server.conftest import Running


def test_it_is_valid(server: Running) -> None:
    found = server.http().get("/openapi.json").json()
    assert [str(error) for error in OpenAPIV31SpecValidator(found).iter_errors()] == []
    assert found["components"]["securitySchemes"]["key"]["scheme"] == "bearer"
    assert {} in found["security"]
    assert document(keys=True)["security"] == [{"key": []}]


def test_it_has_every_route_and_nothing_else(server: Running) -> None:
    app = create_app(server.engine, server.tokenizer)
    routes = {
        (method, re.sub(r"{(\w+):path}", r"{\1}", route.path))
        for route in app.routes
        if isinstance(route, Route) and route.path not in ("/openapi.json", "/docs", "/dashboard/data")
        for method in route.methods
    }
    assert routes == {(endpoint.method, endpoint.path) for endpoint in ENDPOINTS}


def test_paths_bodies_and_errors_are_said(server: Running) -> None:
    found = server.http().get("/openapi.json").json()
    for path, methods in found["paths"].items():
        for said in methods.values():
            names = {one["name"] for one in said["parameters"] if one["in"] == "path" and one["required"]}
            assert names == set(re.findall(r"{(\w+)}", path))
            assert {str(status) for status in ERRORS} < set(said["responses"])
            (schema, *_) = [one["schema"] for one in said["responses"]["200"]["content"].values()]
            assert schema, path
    schemas = found["components"]["schemas"]
    wanted = {
        name: schemas[name]["required"] for name in ("ChatBody", "CompletionBody", "ResponseBody", "EmbeddingBody")
    }
    assert wanted == {
        "ChatBody": ["messages"],
        "CompletionBody": ["prompt"],
        "ResponseBody": ["input"],
        "EmbeddingBody": ["input"],
    }
    assert schemas["ChatBody"]["properties"]["messages"]["type"] == "array"
    assert list(found["paths"]["/metrics"]["get"]["responses"]["200"]["content"]) == ["text/plain"]


@pytest.mark.parametrize("path", ["/docs", "/openapi.json"])
def test_docs_need_no_key_and_no_internet(server: Running, path: str) -> None:
    answer = server.http().get(path)
    assert answer.status_code == 200
    # Addresses within the page are its own; the schema of JSON Schema is a name and no address.
    assert not re.search(r"https?://", answer.text)
    if path == "/docs":
        assert "default-src 'none'" in answer.headers["content-security-policy"]
        assert 'fetch("openapi.json")' in answer.text


def test_replies_are_as_the_document_says(server: Running) -> None:
    from jsonschema import Draft202012Validator

    found = server.http().get("/openapi.json").json()

    def check(method: str, path: str, answer: Any, template: str = "") -> None:
        assert answer.status_code == 200, answer.text
        said = found["paths"][template or path][method.lower()]["responses"]["200"]["content"]["application/json"]
        Draft202012Validator({**said["schema"], "components": found["components"]}).validate(answer.json())

    http = server.http()
    hi = [{"role": "user", "content": "hi"}]
    posts: list[tuple[str, dict[str, Any]]] = [
        ("/v1/chat/completions", {"messages": hi, "logprobs": True, "top_logprobs": 2, "session_id": "s"}),
        ("/v1/completions", {"prompt": ["a", "b"], "logprobs": 1}),
        ("/v1/responses", {"input": "hi"}),
        ("/tokenize", {"prompt": "hi"}),
        ("/detokenize", {"tokens": [5]}),
        ("/reset_prefix_cache", {}),
    ]
    for path, body in posts[:-1]:
        check("POST", path, http.post(path, json=body))
    response = http.post("/v1/responses", json={"input": "hi"}).json()["id"]
    check("GET", f"/v1/responses/{response}", http.get(f"/v1/responses/{response}"), "/v1/responses/{response}")
    items = f"/v1/responses/{response}/input_items"
    check("GET", items, http.get(items), "/v1/responses/{response}/input_items")
    prompt = "/v1/cache/prompts/default2"
    check("PUT", prompt, http.put(prompt, json={"text": "Be brief."}), "/v1/cache/prompts/{name}")
    for path in ("/v1/cache/sessions", "/v1/cache/prompts", "/v1/cache/stats", "/v1/models", "/health", "/version"):
        check("GET", path, http.get(path))
    check("DELETE", prompt, http.delete(prompt), "/v1/cache/prompts/{name}")
    check("POST", "/reset_prefix_cache", http.post("/reset_prefix_cache"))
