"""Bodies of requests that generate nothing: tokens, system prompts, embeddings, ranking."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import FailFast

from afterglow.errors import RequestError
from afterglow.server.bodies.json_body import (
    NOT_SUPPORTED,
    Int,
    JsonBody,
    Name,
    Unused,
    check_variables,
    read_begun,
)
from afterglow.server.bodies.limits import (
    MAX_VALUES,
    check_chars,
    check_ids,
    check_messages,
    read_documents,
    read_inputs,
    wrong,
)
from afterglow.server.bodies.tool_fields import read_tool_use


class TokenizeBody(JsonBody):
    """`/tokenize`."""

    model: Name | None = None
    prompt: str | None = None
    messages: Any = None
    add_special_tokens: bool = True
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = False
    chat_template_kwargs: dict[str, Any] | None = None
    tools: Any = None

    def check(self) -> None:
        if (self.prompt is None) == (self.messages is None):
            raise RequestError("give either prompt or messages", param="prompt")
        self.messages, self.continue_final_message = read_begun(
            self.messages, self.continue_final_message, self.add_generation_prompt
        )
        if self.continue_final_message and self.messages is None:
            raise RequestError("continue_final_message needs messages", param="continue_final_message")
        check_chars(len(self.prompt or ""), "prompt")
        variables = check_variables(self.chat_template_kwargs)
        self._tool_use = read_tool_use(self.tools, None, None)
        messages = check_messages(self.messages) + self._tool_use.size + variables
        self._size = len(self.prompt) if self.prompt is not None else messages


class PromptBody(JsonBody):
    """`PUT /v1/cache/prompts/NAME`."""

    text: str

    def check(self) -> None:
        check_chars(len(self.text), "text")


class DetokenizeBody(JsonBody):
    """`/detokenize`."""

    most_values = MAX_VALUES

    model: Name | None = None
    tokens: Annotated[list[Int], FailFast()]

    def check(self) -> None:
        check_ids(len(self.tokens), "tokens")


class EmbeddingBody(JsonBody):
    """`/v1/embeddings`. `user` is ignored, and so are unknown fields that change no vector."""

    most_values = MAX_VALUES

    input: Any = None  # once it is checked, a list of texts or of lists of token ids
    model: Name | None = None
    encoding_format: Any = None
    dimensions: Int | None = None
    truncate_prompt_tokens: Int | None = None

    @classmethod
    def refused(cls) -> Unused:
        return {**NOT_SUPPORTED, "input_type": ()}

    def check(self) -> None:
        self.input = read_inputs(self.input)


class RerankBody(JsonBody):
    """`/v1/rerank`."""

    model: Name | None = None
    query: Any = None
    documents: Any = None  # once it is checked, a list of texts
    top_n: Int | None = None
    return_documents: bool | None = None
    truncate_prompt_tokens: Int | None = None
    max_tokens_per_doc: Int | None = None  # Cohere's name: documents are cut off there

    def check(self) -> None:
        if self.max_tokens_per_doc is not None and self.max_tokens_per_doc < 1:
            raise wrong("max_tokens_per_doc", "must be 1 or more", self.max_tokens_per_doc)
        if not isinstance(self.query, str) or not self.query:
            raise wrong("query", "must be a non-empty string", self.query)
        check_chars(len(self.query), "query")
        self.documents = read_documents(self.documents)
        if self.top_n is not None and self.top_n < 1:
            raise wrong("top_n", "must be 1 or more", self.top_n)
