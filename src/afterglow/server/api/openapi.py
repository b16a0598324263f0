"""`/openapi.json`: the requests and answers of the server, for code generators and for `/docs`.

A table of its own, since routes read and write JSON themselves. A test compares both.

`/docs` is a page that shows it and loads nothing from other servers.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from importlib.resources import files
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from afterglow.server.api.openapi_schemas import (
    COMPONENTS,
    COUNT,
    DELETED,
    FIELDS,
    FLAG,
    NULL,
    OPTIONAL,
    RANGES,
    SOME_TEXT,
    TEXT,
    Schema,
    any_of,
    list_of,
    object_of,
    page,
    ref,
)
from afterglow.server.bodies.json_body import JsonBody
from afterglow.server.bodies.limits import MAX_MESSAGES
from afterglow.server.bodies.message_bodies import CountTokensBody, MessagesBody
from afterglow.server.bodies.reply_bodies import ChatBody, CompletionBody, ResponseBody
from afterglow.server.bodies.text_bodies import DetokenizeBody, EmbeddingBody, PromptBody, RerankBody, TokenizeBody
from afterglow.server.json_responses import to_json
from afterglow.server.metrics.collector import CONTENT_TYPE
from afterglow.server.state import state_and_record
from afterglow.version import __version__

ERRORS = {
    400: "The request is wrong: the message names the field, the value and what would be right.",
    401: "The API key is missing or wrong.",
    403: "This is for another key, or the browser's page may not ask.",
    404: "There is no such model, response, conversation or path.",
    405: "The path does not answer this method.",
    408: "The request did not arrive in time.",
    409: "The name belongs to something else.",
    413: "The body is larger than --max-body.",
    415: "The body is no JSON by its content type.",
    429: "Too many requests wait already; try again later.",
    500: "The server failed.",
    503: "The server is starting, stopping, too busy, or has partly failed; try again later.",
    507: "A system prompt could not be kept on disk.",
}


@dataclass(frozen=True, slots=True)
class Endpoint:
    method: str
    path: str
    summary: str
    reply: Schema
    body: type[JsonBody] | None = None
    query: Mapping[str, Schema] = field(default_factory=dict)
    stream: str = ""  # its events, if it has `stream`
    media: str = "application/json"
    open: bool = False  # needs no key
    error_names: str = ""  # before the names of its error responses, where they have a form of their own


ANTHROPIC = "anthropic_"
_SALT = {"cache_salt": TEXT}
_RANKS = [
    Endpoint("POST", path, "Rank documents by a query", ref("Ranking"), RerankBody)
    for path in ("/v1/rerank", "/rerank", "/v2/rerank")
]
ENDPOINTS: Sequence[Endpoint] = (
    Endpoint(
        "POST", "/v1/chat/completions", "Answer a conversation", ref("ChatCompletion"), ChatBody,
        stream="chat.completion.chunk objects, then [DONE]",
    ),
    Endpoint(
        "POST", "/v1/completions", "Go on with a text", ref("Completion"), CompletionBody,
        stream="text_completion objects, then [DONE]",
    ),
    Endpoint(
        "POST", "/v1/responses", "Answer, and keep the conversation", ref("Response"), ResponseBody,
        stream="response.* events",
    ),
    Endpoint(
        "POST", "/v1/messages", "Answer a conversation, as Anthropic's API does", ref("AnthropicMessage"), MessagesBody,
        stream="message_start, content_block_* and message_* events", error_names=ANTHROPIC,
    ),
    Endpoint(
        "POST", "/v1/messages/count_tokens", "Count the tokens of a conversation", object_of({"input_tokens": COUNT}),
        CountTokensBody, error_names=ANTHROPIC,
    ),
    Endpoint(
        "GET", "/v1/responses/{response}", "Show a stored response", ref("Response"), query={"stream": {"enum": ["false"]}}
    ),
    Endpoint("DELETE", "/v1/responses/{response}", "Delete a stored response", object_of(DELETED)),
    Endpoint(
        "GET", "/v1/responses/{response}/input_items", "List the items that a response answered", ref("InputItems"),
        query={
            "order": {"enum": ["asc", "desc"], "default": "desc"},
            "limit": {"type": "integer", "minimum": 1, "maximum": 100, "default": 20},
            "after": TEXT,
        },
    ),
    Endpoint("POST", "/v1/embeddings", "Embed texts", ref("Embeddings"), EmbeddingBody),
    *_RANKS,
    Endpoint("POST", "/tokenize", "Turn text into token ids", ref("Tokens"), TokenizeBody),
    Endpoint("POST", "/detokenize", "Turn token ids into text", ref("Text"), DetokenizeBody),
    Endpoint("GET", "/v1/models", "List the models", page(ref("Model"))),
    Endpoint("GET", "/v1/models/{model}", "Show a model", ref("Model")),
    Endpoint("GET", "/v1/cache/sessions", "List cached conversations", page(ref("Session")), query=_SALT),
    Endpoint(
        "DELETE", "/v1/cache/sessions/{name}", "Forget a cached conversation",
        object_of({"object": {"const": "cache.session"}, "name": TEXT, "deleted": FLAG}), query=_SALT,
    ),
    *(
        Endpoint(
            "POST", f"/v1/cache/sessions/{{name}}/{verb}", f"{verb.capitalize()} a cached conversation",
            object_of({"object": {"const": "cache.session"}, "name": TEXT, "pinned": FLAG}), query=_SALT,
        )
        for verb in ("pin", "unpin")
    ),
    Endpoint("GET", "/v1/cache/prompts", "List registered system prompts", page(ref("Prompt")), query=_SALT),
    Endpoint("PUT", "/v1/cache/prompts/{name}", "Register a system prompt", ref("Prompt"), PromptBody, query=_SALT),
    Endpoint(
        "DELETE", "/v1/cache/prompts/{name}", "Let a system prompt go",
        object_of({"object": {"const": "cache.prompt"}, "name": TEXT, "deleted": FLAG}), query=_SALT,
    ),
    Endpoint("GET", "/v1/cache/stats", "Count cached conversations and tokens", ref("CacheStats"), query=_SALT),
    Endpoint(
        "POST", "/reset_prefix_cache", "Clear the cache",
        object_of({"status": {"const": "ok"}, "cleared": {"enum": ["all", "own"]}}), query=_SALT,
    ),
    Endpoint("GET", "/health", "Say whether the server is there", object_of({"status": {"enum": ["ok", "draining"]}}), open=True),
    Endpoint("GET", "/version", "Show Afterglow's version", object_of({"version": TEXT})),
    Endpoint("GET", "/metrics", "Show Prometheus metrics", TEXT, media=CONTENT_TYPE.partition(";")[0]),
)  # fmt: skip


def document(keys: bool) -> dict[str, Any]:
    """Build the whole document. `keys`: requests need an API key."""
    schemas = {**COMPONENTS}
    paths: dict[str, dict[str, Any]] = {}
    for endpoint in ENDPOINTS:
        if endpoint.body is not None:
            schemas |= _body(endpoint.body)
        paths.setdefault(endpoint.path, {})[endpoint.method.lower()] = _operation(endpoint)
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "Afterglow",
            "version": __version__,
            "description": "OpenAI's API, Anthropic's messages, and what Afterglow adds to it: the cache, prompts that stay, ranking.",
            "license": {"name": "Apache-2.0", "identifier": "Apache-2.0"},
        },
        "servers": [{"url": "/"}],
        "paths": paths,
        "components": {
            "schemas": schemas,
            "responses": {
                f"{prefix}{status}": {"description": text, "content": {"application/json": {"schema": ref(name)}}}
                for prefix, name in (("", "Error"), (ANTHROPIC, "AnthropicError"))
                for status, text in ERRORS.items()
            },
            "securitySchemes": {
                "key": {
                    "type": "http",
                    "scheme": "bearer",
                    "description": "An --api-key. Servers that were started without one need none.",
                }
            },
        },
        "security": [{"key": []}] if keys else [{}, {"key": []}],
    }


def _operation(endpoint: Endpoint) -> dict[str, Any]:
    names = [part[1:-1] for part in endpoint.path.split("/") if part.startswith("{")]
    content = {endpoint.media: {"schema": endpoint.reply}}
    if endpoint.stream:
        content["text/event-stream"] = {"schema": {"description": f"With stream: true, {endpoint.stream}."}}
    errors = {str(status): {"$ref": f"#/components/responses/{endpoint.error_names}{status}"} for status in ERRORS}
    said: dict[str, Any] = {
        "summary": endpoint.summary,
        "operationId": _name(endpoint),
        "parameters": [
            {"name": name, "in": "path", "required": True, "schema": SOME_TEXT} for name in names
        ] + [{"name": name, "in": "query", "schema": schema} for name, schema in endpoint.query.items()],
        "responses": {"200": {"description": "Done.", "content": content}, **errors},
    }  # fmt: skip
    if endpoint.body is not None:
        said["requestBody"] = {
            "required": True,
            "content": {"application/json": {"schema": ref(endpoint.body.__name__)}},
        }
    if endpoint.open:
        said["security"] = []
    return said


def _name(endpoint: Endpoint) -> str:
    words = "".join(char if char.isalnum() else " " for char in endpoint.path).split()
    return "_".join([endpoint.method.lower(), *words])


def _body(body: type[JsonBody]) -> dict[str, Schema]:
    """Return the schema of a body and the schemas that it refers to, by name."""
    schema = body.model_json_schema(ref_template="#/components/schemas/{model}")
    found: dict[str, Schema] = schema.pop("$defs", {})
    own = FIELDS.get(body, {})
    for name, given in own.items():
        schema["properties"][name] = given
    schema["properties"] |= {
        name: any_of(value, NULL) for name, value in RANGES.items() if name in schema["properties"]
    }
    required = [name for name in own if name not in OPTIONAL]
    if required:
        schema["required"] = required
    if body is TokenizeBody:
        schema["properties"]["messages"] = any_of(list_of(ref("Message"), minItems=1, maxItems=MAX_MESSAGES), NULL)
        schema["oneOf"] = [
            {"required": ["prompt"], "properties": {"prompt": TEXT, "messages": NULL}},
            {"required": ["messages"], "properties": {"messages": {"type": "array"}, "prompt": NULL}},
        ]
    return {**found, body.__name__: schema}


POLICY = (
    "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; connect-src 'self'; base-uri 'none'"
)


async def openapi(http: Request) -> Response:
    """Describe the server's requests and answers."""
    state, _ = state_and_record(http)
    return Response(_written(bool(state.config.api_key or state.config.admin_key)), media_type="application/json")


async def docs(http: Request) -> Response:
    """Show the description as a page."""
    headers = {"Content-Security-Policy": POLICY, "X-Content-Type-Options": "nosniff"}
    page = files("afterglow.server").joinpath("static/docs.html").read_bytes()
    return Response(page, media_type="text/html; charset=utf-8", headers=headers)


@cache
def _written(keys: bool) -> bytes:
    return to_json(document(keys=keys))
