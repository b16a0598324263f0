"""The requests for an idle engine with which the next turn of a conversation finds its rows."""

from __future__ import annotations

from afterglow.request import Request
from afterglow.text import ChatPrompt, Tokenizer
from afterglow.text.detokenizer import Assembler
from afterglow.text.next_turn import next_prompts


def expected_turn(tokenizer: Tokenizer, prompt: ChatPrompt, request: Request, reply: Assembler) -> list[Request]:
    """List the prompts that may begin the next turn after a reply, as far as they part from what was computed for it. None
    where the prompt was truncated, or the reply was cut off before its answer."""
    cut = reply.finish == "length" and not (reply.content or reply.calls)
    if cut or reply.truncation is not None or reply.finish is None:
        return []
    found = next_prompts(tokenizer, prompt, reply.tokens, reply.content, reply.calls, reply.reasoning)
    return [
        Request(
            f"next-{number}-{request.id}",
            ids,
            salt=request.salt,
            session_id=request.session_id,
            ttl_s=request.ttl_s,
            volatile=request.volatile,
        )
        for number, ids in enumerate(found)
    ]
