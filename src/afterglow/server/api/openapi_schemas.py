"""The schemas of `/openapi.json`: answers, and fields of bodies that their types do not describe."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from afterglow.request import MAX_BIAS, MAX_LOGPROBS, MAX_PENALTY
from afterglow.server.bodies.json_body import EFFORTS, MAX_SESSION_NAME, JsonBody
from afterglow.server.bodies.limits import MAX_INPUTS, MAX_MESSAGES, MAX_NAME
from afterglow.server.bodies.message_bodies import CountTokensBody, MessagesBody
from afterglow.server.bodies.reply_bodies import (
    LONGEST_TTL_S,
    MAX_CHOICES,
    MAX_STOPS,
    PRIORITIES,
    ChatBody,
    CompletionBody,
    ResponseBody,
)
from afterglow.server.bodies.text_bodies import EmbeddingBody, PromptBody, RerankBody

Schema = dict[str, Any]


def object_of(required: Mapping[str, Schema], optional: Mapping[str, Schema] | None = None) -> Schema:
    return {"type": "object", "required": list(required), "properties": {**required, **(optional or {})}}


def list_of(items: Schema, **more: Any) -> Schema:
    return {"type": "array", "items": items, **more}


def any_of(*schemas: Schema) -> Schema:
    return {"anyOf": list(schemas)}


def ref(name: str) -> Schema:
    return {"$ref": f"#/components/schemas/{name}"}


TEXT: Schema = {"type": "string"}
SOME_TEXT: Schema = {"type": "string", "minLength": 1}
FLAG: Schema = {"type": "boolean"}
COUNT: Schema = {"type": "integer", "minimum": 0}
NAME: Schema = {"type": "string", "minLength": 1, "maxLength": MAX_NAME}
NUMBER: Schema = {"type": "number"}
NULL: Schema = {"type": "null"}
ANY: Schema = {"type": "object"}
IDS = list_of(COUNT, minItems=1)
TIERS = object_of({"device": COUNT, "host": COUNT, "disk": COUNT}, {"shared": COUNT})


def page(items: Schema, **more: Schema) -> Schema:
    return object_of({"object": {"const": "list"}, "data": list_of(items), **more})


def _choice(**fields: Schema) -> Schema:
    finish = any_of({"enum": ["stop", "length", "tool_calls"]}, NULL)
    required = {"index": COUNT, **fields, "logprobs": any_of(ANY, NULL), "finish_reason": finish}
    return list_of(object_of(required, {"token_ids": list_of(COUNT), "prompt_token_ids": list_of(COUNT)}))


def _completion(kind: str, choices: Schema) -> Schema:
    head = {"id": TEXT, "object": {"const": kind}, "created": COUNT, "model": TEXT}
    return object_of({**head, "choices": choices, "usage": ref("Usage")}, {"prompt_token_ids": list_of(COUNT)})


_PART = object_of({"text": TEXT}, {"type": {"enum": ["text", "input_text", "output_text"]}})
_ITEM_PART = object_of({"type": {"enum": ["input_text", "output_text", "text"]}, "text": TEXT})
DELETED = {"id": TEXT, "object": {"const": "response"}, "deleted": FLAG}

COMPONENTS: dict[str, Schema] = {
    "Error": object_of(
        {
            "error": object_of(
                {"message": TEXT, "type": TEXT, "param": any_of(TEXT, NULL), "code": any_of(TEXT, NULL)},
            )
        }
    ),
    "AnthropicError": object_of(
        {"type": {"const": "error"}, "error": object_of({"type": TEXT, "message": TEXT}), "request_id": TEXT}
    ),
    "Message": object_of(
        {"role": SOME_TEXT},
        {
            "content": any_of(TEXT, NULL, list_of(any_of(TEXT, _PART))),
            "tool_calls": any_of(list_of(ref("ToolCall")), NULL),
            "tool_call_id": any_of(TEXT, NULL),
            "reasoning_content": any_of(TEXT, NULL),
        },
    ),
    "ToolCall": object_of(
        {"id": TEXT, "type": {"const": "function"}, "function": object_of({"name": TEXT, "arguments": TEXT})}
    ),
    "Item": any_of(
        object_of(
            {
                "role": {"enum": ["user", "assistant", "system", "developer"]},
                "content": any_of(TEXT, list_of(_ITEM_PART)),
            },
            {"type": {"const": "message"}, "id": TEXT},
        ),
        object_of(
            {"type": {"const": "function_call"}, "call_id": SOME_TEXT, "name": SOME_TEXT, "arguments": TEXT},
            {"id": TEXT},
        ),
        object_of(
            {
                "type": {"const": "function_call_output"},
                "call_id": SOME_TEXT,
                "output": any_of(TEXT, list_of(_ITEM_PART)),
            },
            {"id": TEXT},
        ),
        object_of(
            {"type": {"const": "reasoning"}, "content": list_of(object_of({"type": TEXT, "text": TEXT}))},
            {"id": TEXT, "summary": ANY},
        ),
    ),
    "Usage": object_of(
        {"prompt_tokens": COUNT, "total_tokens": COUNT},
        {
            "completion_tokens": COUNT,
            "completion_tokens_details": object_of({"reasoning_tokens": COUNT}),
            "prompt_tokens_details": object_of({"cached_tokens": COUNT}),
            "cached_tokens_details": TIERS,
            "kv_dtype": TEXT,
            "missed_tokens_details": {"type": "object", "additionalProperties": COUNT},
            "replies_details": object_of({"spliced": COUNT, "retokenised": COUNT}),
            "truncation": ANY,
            "kv_selection": ANY,
            "memo_hits": COUNT,
        },
    ),
    "ChatCompletion": _completion(
        "chat.completion",
        _choice(
            message=object_of(
                {"role": {"const": "assistant"}, "content": any_of(TEXT, NULL), "refusal": NULL},
                {"tool_calls": list_of(ref("ToolCall")), "reasoning_content": TEXT},
            )
        ),
    ),
    "Completion": _completion("text_completion", _choice(text=TEXT)),
    "Response": object_of(
        {
            "id": TEXT,
            "object": {"const": "response"},
            "created_at": COUNT,
            "status": {"enum": ["completed", "incomplete", "in_progress", "failed"]},
            "model": TEXT,
            "output": list_of(ANY),
            "usage": any_of(ANY, NULL),
            "store": FLAG,
            "previous_response_id": any_of(TEXT, NULL),
        }
    ),
    "AnthropicMessage": object_of(
        {
            "id": TEXT,
            "type": {"const": "message"},
            "role": {"const": "assistant"},
            "model": TEXT,
            "content": list_of(object_of({"type": {"enum": ["text", "tool_use", "thinking"]}})),
            "stop_reason": {
                "enum": ["end_turn", "max_tokens", "stop_sequence", "tool_use", "model_context_window_exceeded"]
            },
            "stop_sequence": any_of(TEXT, NULL),
            "usage": object_of(
                {
                    "input_tokens": COUNT,
                    "cache_creation_input_tokens": COUNT,
                    "cache_read_input_tokens": COUNT,
                    "cache_creation": object_of(
                        {"ephemeral_5m_input_tokens": COUNT, "ephemeral_1h_input_tokens": COUNT}
                    ),
                    "output_tokens": COUNT,
                }
            ),
        }
    ),
    "InputItems": page(ANY, first_id=any_of(TEXT, NULL), last_id=any_of(TEXT, NULL), has_more=FLAG),
    "Embeddings": page(
        object_of({"object": {"const": "embedding"}, "index": COUNT, "embedding": any_of(list_of(NUMBER), TEXT)}),
        model=TEXT,
        usage=ref("Usage"),
    ),
    "Ranking": object_of(
        {
            "id": TEXT,
            "model": TEXT,
            "results": list_of(
                object_of({"index": COUNT, "relevance_score": NUMBER}, {"document": object_of({"text": TEXT})})
            ),
            "usage": ref("Usage"),
        }
    ),
    "Tokens": object_of({"count": COUNT, "max_model_len": COUNT, "tokens": list_of(COUNT)}),
    "Text": object_of({"prompt": TEXT}),
    "Model": object_of(
        {"id": TEXT, "object": {"const": "model"}, "created": COUNT, "owned_by": TEXT},
        {"root": TEXT, "max_model_len": any_of(COUNT, NULL)},
    ),
    "Session": object_of(
        {
            "object": {"const": "cache.session"},
            "name": TEXT,
            "tokens": COUNT,
            "cached_tokens": TIERS,
            "last_used": NUMBER,
            "expires": any_of(NUMBER, NULL),
            "pinned": FLAG,
        }
    ),
    "Prompt": object_of(
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
    "CacheStats": object_of(
        {"object": {"const": "cache.stats"}, "sessions": ANY, "since_start": ANY, "responses": ANY, "prompts": ANY},
        {"engine": ANY},
    ),
}

# Fields whose types in the bodies are loose: their inputs come in several forms and are checked afterwards.
_TEXTS = any_of(TEXT, list_of(TEXT, minItems=1), IDS, list_of(IDS, minItems=1))
_MARK = any_of(object_of({"type": {"const": "ephemeral"}}, {"ttl": any_of({"enum": ["5m", "1h"]}, NULL)}), NULL)
_TEXT_BLOCK = object_of({"type": {"const": "text"}, "text": TEXT}, {"cache_control": _MARK})
_BLOCK = object_of({"type": {"enum": ["text", "tool_use", "tool_result", "thinking", "redacted_thinking"]}})
_TURN = object_of({"role": {"enum": ["user", "assistant", "system"]}, "content": any_of(TEXT, list_of(_BLOCK))})
_TOOL = object_of(
    {"name": SOME_TEXT, "input_schema": ANY}, {"description": TEXT, "type": {"const": "custom"}, "cache_control": _MARK}
)
_CONVERSATION: dict[str, Schema] = {
    "messages": list_of(_TURN, minItems=1, maxItems=MAX_MESSAGES),
    "system": any_of(TEXT, list_of(_TEXT_BLOCK), NULL),
    "tools": any_of(list_of(_TOOL), NULL),
    "tool_choice": any_of(object_of({"type": {"enum": ["auto", "any", "tool", "none"]}}), NULL),
    "cache_control": _MARK,
}
OPTIONAL = ("encoding_format", "system", "tools", "tool_choice", "cache_control")
FIELDS: dict[type[JsonBody], dict[str, Schema]] = {
    MessagesBody: {**_CONVERSATION, "max_tokens": COUNT},
    CountTokensBody: _CONVERSATION,
    ChatBody: {"messages": list_of(ref("Message"), minItems=1, maxItems=MAX_MESSAGES)},
    CompletionBody: {"prompt": _TEXTS},
    ResponseBody: {"input": any_of(TEXT, list_of(ref("Item"), minItems=1, maxItems=MAX_MESSAGES))},
    EmbeddingBody: {
        "input": any_of(
            SOME_TEXT,
            IDS,
            list_of(SOME_TEXT, minItems=1, maxItems=MAX_INPUTS),
            list_of(IDS, minItems=1, maxItems=MAX_INPUTS),
        ),
        "encoding_format": any_of({"enum": ["float", "base64"]}, NULL),
    },
    PromptBody: {"text": SOME_TEXT},
    RerankBody: {
        "query": SOME_TEXT,
        "documents": list_of(any_of(SOME_TEXT, object_of({"text": SOME_TEXT})), minItems=1, maxItems=MAX_INPUTS - 1),
    },
}
RETENTION: Schema = any_of(
    {"enum": ["in_memory", "24h"]}, {"type": "number", "exclusiveMinimum": 0, "maximum": LONGEST_TTL_S}
)


def _number(low: float, high: float, kind: str = "number") -> Schema:
    return {"type": kind, "minimum": low, "maximum": high}


# Ranges of fields that may be null, in every body that has the field; limits of the model are not here.
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
    "reasoning_effort": {"enum": list(EFFORTS)},
    "top_logprobs": _number(0, MAX_LOGPROBS, "integer"),
    "stop": any_of(NAME, list_of(NAME, maxItems=MAX_STOPS)),
    "stop_token_ids": list_of(COUNT, maxItems=MAX_NAME),
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
