"""Replies as text, while they are generated and at their end; and the requests with which the next turn finds its rows."""

from __future__ import annotations

from collections.abc import Generator, Iterator, Sequence
from contextlib import closing
from math import inf
from typing import TYPE_CHECKING

from afterglow.errors import RequestError
from afterglow.field_types import packed, refuse
from afterglow.request import CachedTokens, Completion, Content, Output, Part, Request, TokenLogprob
from afterglow.text import ChatPrompt, Tokenizer
from afterglow.text.detokenizer import Assembler
from afterglow.text.next_turn import next_prompts
from afterglow.text.reasoning import ReasoningFormat
from afterglow.text.tool_calls.harmony import HarmonyParser

if TYPE_CHECKING:
    from afterglow.engine.engine import Engine


class TextReply:
    """One reply: iterate over it for pieces of its text as they are generated; `completion` has the whole reply.

    Closing the iterator, or leaving its loop, cancels the request.
    """

    def __init__(
        self,
        engine: Engine,
        tokenizer: Tokenizer,
        request: Request,
        stop: str | Sequence[str] | None = (),
        chat: ChatPrompt | None = None,
        reasoning: ReasoningFormat | None = None,
    ) -> None:
        """`stop`: a string that ends the reply, and is left out of its text, or several. `chat`: the conversation that it answers, where its
        token ids are to be known when it comes back as text; `reasoning`: how the model marks what is none of its answer."""
        stops = (stop,) if isinstance(stop, str) else stop or ()
        if not isinstance(stops, Sequence) or not all(isinstance(each, str) for each in stops):
            refuse("stop", "text, or a sequence of texts", stop)
        packed(request.prompt)  # the tokenizer would say it in its own words
        self.request = request
        self.prompt_tokens = len(request.prompt)
        self.ttft_s: float | None = None
        self._engine = engine
        self._tokenizer = tokenizer
        self._chat = chat
        told = reasoning if chat is not None else None
        self._assembler = Assembler(
            tokenizer,
            request.prompt,
            stops,
            skip_special_tokens=told is None or not told.special,
            min_tokens=request.sampling.min_tokens,
            parser=HarmonyParser({}) if told is not None and told.name == "openai" else None,
            splitter=told.splitter(chat.text, chat.beginning) if told is not None and chat is not None else None,
        )
        self._thinks = told is not None
        self._logprobs: list[TokenLogprob] = []
        self._begun = False

    def __iter__(self) -> Iterator[str]:
        """Generate the reply and yield its text. Raises: RequestError."""
        with closing(self.parts()) as parts:
            for part in parts:
                if isinstance(part, Content):
                    yield part.text

    def parts(self) -> Generator[Part]:
        """Generate the reply and yield its text (`Content`), and before it what the model wrote for itself (`Reasoning`).
        Raises: RequestError."""
        if self.ended:  # and has been told
            return
        if self._begun:
            raise RequestError(
                "this reply was begun already, and ended where its loop was left; go through it once, or ask anew"
            )
        self._begun = True
        with closing(generated(self._engine, [self])) as pieces:
            for _, piece in pieces:
                yield from piece.parts

    @property
    def text(self) -> str:
        """The text so far."""
        return self._assembler.content

    @property
    def reasoning(self) -> str:
        """What the model wrote for itself so far."""
        return self._assembler.reasoning

    @property
    def tokens(self) -> list[int]:
        """The tokens so far."""
        return self._assembler.tokens

    @property
    def cached(self) -> CachedTokens:
        """The prompt tokens that came from the cache; zero before the first token."""
        return self._assembler.cached

    @property
    def ended(self) -> bool:
        """Has a stop string, a stop token or the length ended the reply?"""
        return self._assembler.finish is not None

    @property
    def completion(self) -> Completion:
        """The reply as far as it was generated; `cancelled` if it has not ended by itself."""
        found = self._assembler
        return Completion(
            tokens=tuple(found.tokens),
            finish_reason=found.finish or "cancelled",
            cached=found.cached,
            ttft_s=self.ttft_s or 0.0,
            logprobs=tuple(self._logprobs),
            prompt_logprobs=found.prompt_logprobs,
            truncation=found.truncation,
            selected=found.selected,
            missed=found.missed,
            text=found.content,
            reasoning=found.reasoning,
        )

    def _feed(self, at: float, output: Output) -> Output:
        """Add an output that came `at` seconds after the request; returns what it adds. Raises: RequestError."""
        if self.ttft_s is None and output.tokens:
            self.ttft_s = at
        piece = self._assembler.feed(output)
        self._logprobs.extend(piece.logprobs)
        return piece

    def _remember(self) -> None:
        """Have the tokenizer use the generated ids where the reply comes back as text, and the engine compute while it is idle
        what the next turn has of it."""
        found = self._assembler
        if self._chat is None:
            return
        if found.reasoning or not found.reasoned:
            parts = (found.content, found.calls, found.reasoning)
            self._tokenizer.remember(self._chat, found.text, self.tokens, inf, *parts)
        if self._thinks:
            self._engine.expect(expected_turn(self._tokenizer, self._chat, self.request, found), self.request.id)


def generated(engine: Engine, replies: Sequence[TextReply]) -> Generator[tuple[TextReply, Output]]:
    """Generate replies together, and yield each piece with the reply it belongs to.

    Raises: RequestError.
    """
    unfinished = {reply.request.id: reply for reply in replies}
    outputs = engine.outputs([reply.request for reply in replies])
    try:
        for at, output in outputs:
            reply = unfinished.get(output.request_id)
            if reply is None:  # a stop string has ended the reply before the engine did
                continue
            piece = reply._feed(at, output)
            if reply.ended:
                del unfinished[output.request_id]
                if output.finish_reason is None:
                    engine.cancel(output.request_id)
            if piece.parts:
                yield reply, piece
    finally:
        outputs.close()
        for reply in replies:
            reply._remember()


def expected_turn(tokenizer: Tokenizer, prompt: ChatPrompt, request: Request, reply: Assembler) -> list[Request]:
    """List the prompts that may begin the next turn after a reply, as far as they part from what was computed for it: an idle
    engine computes them. None where the prompt was truncated, where the reply was cut off before its answer, or where it went on within
    reasoning: the client's next message does not show then which part that was."""
    cut = reply.finish == "length" and not (reply.content or reply.calls)
    cut = cut or (prompt.asked.continues and bool(reply.reasoning))
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
