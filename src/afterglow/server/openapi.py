"""`/openapi.json`: what the server accepts and answers, for code generators and for `/docs`.

Written here as a table and not taken from the routes, which read and write JSON themselves. A test compares both.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from afterglow import __version__
from afterglow.request import MAX_BIAS, MAX_LOGPROBS, MAX_PENALTY
from afterglow.server.limits import MAX_INPUTS, MAX_MESSAGES, MAX_NAME
from afterglow.server.metrics import CONTENT_TYPE
from afterglow.server.schema import (
    LONGEST_TTL_S,
    MAX_CHOICES,
    MAX_SESSION_NAME,
    MAX_STOPS,
    PRIORITIES,
    ChatBody,
    CompletionBody,
    DetokenizeBody,
    EmbeddingBody,
    JsonBody,
    PromptBody,
    RerankBody,
    ResponseBody,
    TokenizeBody,
)

Schema = dict[str, Any]

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
    503: "The server is starting, stopping, too busy, or a part of it has failed; try again later.",
}


def _object(required: Mapping[str, Schema], optional: Mapping[str, Schema] | None = None) -> Schema:
    return {"type": "object", "required": list(required), "properties": {**required, **(optional or {})}}


def _list(items: Schema, **more: Any) -> Schema:
    return {"type": "array", "items": items, **more}


def _any(*schemas: Schema) -> Schema:
    return {"anyOf": list(schemas)}


def _ref(name: str) -> Schema:
    return {"$ref": f"#/components/schemas/{name}"}


TEXT: Schema = {"type": "string"}
SOME_TEXT: Schema = {"type": "string", "minLength": 1}
FLAG: Schema = {"type": "boolean"}
COUNT: Schema = {"type": "integer", "minimum": 0}
NAME: Schema = {"type": "string", "minLength": 1, "maxLength": MAX_NAME}
NUMBER: Schema = {"type": "number"}
NULL: Schema = {"type": "null"}
ANY: Schema = {"type": "object"}
IDS = _list(COUNT, minItems=1)
TIERS = _object({"device": COUNT, "host": COUNT, "disk": COUNT})


def _page(items: Schema, **more: Schema) -> Schema:
    return _object({"object": {"const": "list"}, "data": _list(items), **more})


def _choice(**fields: Schema) -> Schema:
    finish = _any({"enum": ["stop", "length"]}, NULL)
    required = {"index": COUNT, **fields, "logprobs": _any(ANY, NULL), "finish_reason": finish}
    return _list(_object(required, {"token_ids": _list(COUNT), "prompt_token_ids": _list(COUNT)}))


def _completion(kind: str, choices: Schema) -> Schema:
    head = {"id": TEXT, "object": {"const": kind}, "created": COUNT, "model": TEXT}
    return _object({**head, "choices": choices, "usage": _ref("Usage")}, {"prompt_token_ids": _list(COUNT)})


_PART = _object({"text": TEXT}, {"type": {"enum": ["text", "input_text", "output_text"]}})
_ITEM_PART = _object({"type": {"enum": ["input_text", "output_text", "text"]}, "text": TEXT})
_DELETED = {"id": TEXT, "object": {"const": "response"}, "deleted": FLAG}

COMPONENTS: dict[str, Schema] = {
    "Error": _object(
        {
            "error": _object(
                {"message": TEXT, "type": TEXT, "param": _any(TEXT, NULL), "code": _any(TEXT, NULL)},
            )
        }
    ),
    "Message": _object(
        {"role": SOME_TEXT},
        {"content": _any(TEXT, NULL, _list(_any(TEXT, _PART)))},
    ),
    "Item": _object(
        {
            "role": {"enum": ["user", "assistant", "system", "developer"]},
            "content": _any(TEXT, _list(_ITEM_PART)),
        },
        {"type": {"const": "message"}, "id": TEXT},
    ),
    "Usage": _object(
        {"prompt_tokens": COUNT, "total_tokens": COUNT},
        {
            "completion_tokens": COUNT,
            "prompt_tokens_details": _object({"cached_tokens": COUNT}),
            "cached_tokens_details": TIERS,
            "missed_tokens_details": {"type": "object", "additionalProperties": COUNT},
            "replies_details": _object({"spliced": COUNT, "retokenised": COUNT}),
            "truncation": ANY,
            "kv_selection": ANY,
            "memo_hits": COUNT,
        },
    ),
    "ChatCompletion": _completion(
        "chat.completion",
        _choice(message=_object({"role": {"const": "assistant"}, "content": TEXT, "refusal": NULL})),
    ),
    "Completion": _completion("text_completion", _choice(text=TEXT)),
    "Response": _object(
        {
            "id": TEXT,
            "object": {"const": "response"},
            "created_at": COUNT,
            "status": {"enum": ["completed", "incomplete", "in_progress", "failed"]},
            "model": TEXT,
            "output": _list(ANY),
            "usage": _any(ANY, NULL),
            "store": FLAG,
            "previous_response_id": _any(TEXT, NULL),
        }
    ),
    "InputItems": _page(ANY, first_id=_any(TEXT, NULL), last_id=_any(TEXT, NULL), has_more=FLAG),
    "Embeddings": _page(
        _object({"object": {"const": "embedding"}, "index": COUNT, "embedding": _any(_list(NUMBER), TEXT)}),
        model=TEXT,
        usage=_ref("Usage"),
    ),
    "Ranking": _object(
        {
            "id": TEXT,
            "model": TEXT,
            "results": _list(
                _object({"index": COUNT, "relevance_score": NUMBER}, {"document": _object({"text": TEXT})})
            ),
            "usage": _ref("Usage"),
        }
    ),
    "Tokens": _object({"count": COUNT, "max_model_len": COUNT, "tokens": _list(COUNT)}),
    "Text": _object({"prompt": TEXT}),
    "Model": _object(
        {"id": TEXT, "object": {"const": "model"}, "created": COUNT, "owned_by": TEXT},
        {"root": TEXT, "max_model_len": _any(COUNT, NULL)},
    ),
    "Session": _object(
        {
            "object": {"const": "cache.session"},
            "name": TEXT,
            "tokens": COUNT,
            "cached_tokens": TIERS,
            "last_used": NUMBER,
            "expires": _any(NUMBER, NULL),
            "pinned": FLAG,
        }
    ),
    "Prompt": _object(
        {
            "object": {"const": "cache.prompt"},
            "name": TEXT,
            "tokens": COUNT,
            "cached_tokens": TIERS,
            "shared": FLAG,
            "pinned": FLAG,
        },
        {"prefilled_tokens": COUNT},
    ),
    "CacheStats": _object(
        {"object": {"const": "cache.stats"}, "sessions": ANY, "since_start": ANY, "responses": ANY, "prompts": ANY},
        {"engine": ANY},
    ),
}

# What the bodies' own types do not say, since they take inputs of several forms and check them afterwards.
_TEXTS = _any(TEXT, _list(TEXT, minItems=1), IDS, _list(IDS, minItems=1))
FIELDS: dict[type[JsonBody], dict[str, Schema]] = {
    ChatBody: {"messages": _list(_ref("Message"), minItems=1, maxItems=MAX_MESSAGES)},
    CompletionBody: {"prompt": _TEXTS},
    ResponseBody: {"input": _any(TEXT, _list(_ref("Item"), minItems=1, maxItems=MAX_MESSAGES))},
    EmbeddingBody: {
        "input": _any(
            SOME_TEXT,
            IDS,
            _list(SOME_TEXT, minItems=1, maxItems=MAX_INPUTS),
            _list(IDS, minItems=1, maxItems=MAX_INPUTS),
        ),
        "encoding_format": _any({"enum": ["float", "base64"]}, NULL),
    },
    PromptBody: {"text": SOME_TEXT},
    RerankBody: {
        "query": SOME_TEXT,
        "documents": _list(_any(SOME_TEXT, _object({"text": SOME_TEXT})), minItems=1, maxItems=MAX_INPUTS - 1),
    },
}
RETENTION: Schema = _any(
    {"enum": ["in_memory", "24h"]}, {"type": "number", "exclusiveMinimum": 0, "maximum": LONGEST_TTL_S}
)


def _number(low: float, high: float, kind: str = "number") -> Schema:
    return {"type": kind, "minimum": low, "maximum": high}


# Of fields that may be null, in every body that has them; what depends on the model is not here.
RANGES: dict[str, Schema] = {
    "prompt_cache_retention": RETENTION,
    "temperature": _number(0, 100),
    "top_p": {"type": "number", "exclusiveMinimum": 0, "maximum": 1},
    "top_k": _number(-1, 2**31 - 1, "integer"),
    "min_p": _number(0, 1),
    "presence_penalty": _number(-MAX_PENALTY, MAX_PENALTY),
    "frequency_penalty": _number(-MAX_PENALTY, MAX_PENALTY),
    "repetition_penalty": {"type": "number", "exclusiveMinimum": 0},
    "logit_bias": {
        "type": "object",
        "propertyNames": {"pattern": "^(0|[1-9][0-9]{0,18})$"},
        "additionalProperties": _number(-MAX_BIAS, MAX_BIAS),
        "maxProperties": MAX_NAME,
    },
    "priority": _number(-PRIORITIES, PRIORITIES, "integer"),
    "kv_retention": {"type": "number", "exclusiveMinimum": 0, "maximum": 1},
    "min_tokens": COUNT,
    "max_tokens": COUNT,
    "max_completion_tokens": COUNT,
    "max_output_tokens": {"type": "integer", "minimum": 1},
    "n": _number(1, MAX_CHOICES, "integer"),
    "top_logprobs": _number(0, MAX_LOGPROBS, "integer"),
    "stop": _any(NAME, _list(NAME, maxItems=MAX_STOPS)),
    "stop_token_ids": _list(COUNT, maxItems=MAX_NAME),
    "model": NAME,
    "user": NAME,
    "cache_salt": NAME,
    "prompt_cache_key": NAME,
    "session_id": {"type": "string", "minLength": 1, "maxLength": MAX_SESSION_NAME},
    "metadata": {
        "type": "object",
        "maxProperties": 16,
        "propertyNames": {"maxLength": 64},
        "additionalProperties": {"type": "string", "maxLength": 512},
    },
    "top_n": {"type": "integer", "minimum": 1},
}


@dataclass(frozen=True, slots=True)
class Endpoint:
    method: str
    path: str
    summary: str
    reply: Schema
    body: type[JsonBody] | None = None
    query: Mapping[str, Schema] = field(default_factory=dict)
    stream: str = ""  # what its events are, where it has `stream`
    media: str = "application/json"
    open: bool = False  # needs no key


_SALT = {"cache_salt": TEXT}
_RANKS = [
    Endpoint("POST", path, "Rank documents by a query", _ref("Ranking"), RerankBody)
    for path in ("/v1/rerank", "/rerank", "/v2/rerank")
]
ENDPOINTS: Sequence[Endpoint] = (
    Endpoint(
        "POST", "/v1/chat/completions", "Answer a conversation", _ref("ChatCompletion"), ChatBody,
        stream="chat.completion.chunk objects, then [DONE]",
    ),
    Endpoint(
        "POST", "/v1/completions", "Go on with a text", _ref("Completion"), CompletionBody,
        stream="text_completion objects, then [DONE]",
    ),
    Endpoint(
        "POST", "/v1/responses", "Answer, and keep the conversation", _ref("Response"), ResponseBody,
        stream="response.* events",
    ),
    Endpoint(
        "GET", "/v1/responses/{response}", "Show a stored response", _ref("Response"), query={"stream": {"enum": ["false"]}}
    ),
    Endpoint("DELETE", "/v1/responses/{response}", "Delete a stored response", _object(_DELETED)),
    Endpoint(
        "GET", "/v1/responses/{response}/input_items", "Show what a response answered", _ref("InputItems"),
        query={
            "order": {"enum": ["asc", "desc"], "default": "desc"},
            "limit": {"type": "integer", "minimum": 1, "maximum": 100, "default": 20},
            "after": TEXT,
        },
    ),
    Endpoint("POST", "/v1/embeddings", "Embed texts", _ref("Embeddings"), EmbeddingBody),
    *_RANKS,
    Endpoint("POST", "/tokenize", "Turn text into token ids", _ref("Tokens"), TokenizeBody),
    Endpoint("POST", "/detokenize", "Turn token ids into text", _ref("Text"), DetokenizeBody),
    Endpoint("GET", "/v1/models", "List the models", _page(_ref("Model"))),
    Endpoint("GET", "/v1/models/{model}", "Show a model", _ref("Model")),
    Endpoint("GET", "/v1/cache/sessions", "List cached conversations", _page(_ref("Session")), query=_SALT),
    Endpoint(
        "DELETE", "/v1/cache/sessions/{name}", "Forget a cached conversation",
        _object({"object": {"const": "cache.session"}, "name": TEXT, "deleted": FLAG}), query=_SALT,
    ),
    *(
        Endpoint(
            "POST", f"/v1/cache/sessions/{{name}}/{verb}", f"{verb.capitalize()} a cached conversation",
            _object({"object": {"const": "cache.session"}, "name": TEXT, "pinned": FLAG}), query=_SALT,
        )
        for verb in ("pin", "unpin")
    ),
    Endpoint("GET", "/v1/cache/prompts", "List registered system prompts", _page(_ref("Prompt")), query=_SALT),
    Endpoint("PUT", "/v1/cache/prompts/{name}", "Register a system prompt", _ref("Prompt"), PromptBody, query=_SALT),
    Endpoint(
        "DELETE", "/v1/cache/prompts/{name}", "Let a system prompt go",
        _object({"object": {"const": "cache.prompt"}, "name": TEXT, "deleted": FLAG}), query=_SALT,
    ),
    Endpoint("GET", "/v1/cache/stats", "Count what is cached", _ref("CacheStats"), query=_SALT),
    Endpoint(
        "POST", "/reset_prefix_cache", "Clear the cache",
        _object({"status": {"const": "ok"}, "cleared": {"enum": ["all", "own"]}}), query=_SALT,
    ),
    Endpoint("GET", "/health", "Say whether the server is there", _object({"status": {"enum": ["ok", "draining"]}}), open=True),
    Endpoint("GET", "/version", "Show Afterglow's version", _object({"version": TEXT})),
    Endpoint("GET", "/metrics", "Show Prometheus metrics", TEXT, media=CONTENT_TYPE.partition(";")[0]),
)  # fmt: skip


def document(keys: bool) -> dict[str, Any]:
    """The whole document. `keys`: requests need one."""
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
            "description": "OpenAI's API, and what Afterglow adds to it: the cache, prompts that stay, ranking.",
            "license": {"name": "Apache-2.0", "identifier": "Apache-2.0"},
        },
        "servers": [{"url": "/"}],
        "paths": paths,
        "components": {
            "schemas": schemas,
            "responses": {
                str(status): {"description": text, "content": {"application/json": {"schema": _ref("Error")}}}
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
    errors = {str(status): {"$ref": f"#/components/responses/{status}"} for status in ERRORS}
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
            "content": {"application/json": {"schema": _ref(endpoint.body.__name__)}},
        }
    if endpoint.open:
        said["security"] = []
    return said


def _name(endpoint: Endpoint) -> str:
    words = "".join(char if char.isalnum() else " " for char in endpoint.path).split()
    return "_".join([endpoint.method.lower(), *words])


def _body(body: type[JsonBody]) -> dict[str, Schema]:
    """A body's schema, and those that it refers to, by name."""
    schema = body.model_json_schema(ref_template="#/components/schemas/{model}")
    found: dict[str, Schema] = schema.pop("$defs", {})
    own = FIELDS.get(body, {})
    for name, given in own.items():
        schema["properties"][name] = given
    schema["properties"] |= {name: _any(value, NULL) for name, value in RANGES.items() if name in schema["properties"]}
    required = [name for name in own if name != "encoding_format"]
    if required:
        schema["required"] = required
    if body is TokenizeBody:
        schema["properties"]["messages"] = _any(_list(_ref("Message"), minItems=1, maxItems=MAX_MESSAGES), NULL)
        schema["oneOf"] = [
            {"required": ["prompt"], "properties": {"prompt": TEXT, "messages": NULL}},
            {"required": ["messages"], "properties": {"messages": {"type": "array"}, "prompt": NULL}},
        ]
    return {**found, body.__name__: schema}
