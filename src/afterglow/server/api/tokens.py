"""`/tokenize` and `/detokenize`."""

from __future__ import annotations

from starlette.requests import Request as HttpRequest
from starlette.responses import Response

from afterglow.errors import RequestError
from afterglow.server.bodies.reader import read_body
from afterglow.server.bodies.text_bodies import DetokenizeBody, TokenizeBody
from afterglow.server.state import State


async def tokenize(http: HttpRequest) -> Response:
    """Turn a text, or a conversation, into token ids."""
    state: State = http.app.state.afterglow
    body = await read_body(http, TokenizeBody)
    state.models.check(body.model, generate=False)

    def work() -> list[int]:
        if body.prompt is not None:
            return state.tokenizer.encode(body.prompt, add_special_tokens=body.add_special_tokens)
        return state.tokenizer.encode_chat(
            body.messages,
            tools=body.tool_use.tools,
            add_generation_prompt=body.add_generation_prompt,
            variables=body.chat_template_kwargs,
        ).ids

    ids = await state.text_threads.run(body.size, work)
    answer = {"count": len(ids), "max_model_len": state.engine.max_model_len, "tokens": ids}
    return await state.text_threads.respond(len(ids), lambda: answer)


async def detokenize(http: HttpRequest) -> Response:
    """Turn token ids into text."""
    state: State = http.app.state.afterglow
    body = await read_body(http, DetokenizeBody)
    state.models.check(body.model, generate=False)
    if body.tokens and not 0 <= min(body.tokens) <= max(body.tokens) < state.engine.vocab_size:
        raise RequestError(f"tokens must be between 0 and {state.engine.vocab_size - 1}", param="tokens")
    text = await state.text_threads.run(len(body.tokens), lambda: state.tokenizer.decode(body.tokens, False))
    return await state.text_threads.respond(len(text), lambda: {"prompt": text})
