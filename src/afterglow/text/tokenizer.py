"""The tokenizer of a model: text to ids and back, and conversations through the model's chat template."""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import cache, cached_property, partial
from math import inf
from pathlib import Path
from typing import Any

from afterglow.errors import RequestError
from afterglow.request import ContextWindow, ToolCall
from afterglow.text import lengths
from afterglow.text.chat_template import ChatTemplate, Message, shown
from afterglow.text.detokenizer import IncrementalDecoder
from afterglow.text.markers import Encoded, Markers, Rendered
from afterglow.text.messages import check_begun, flatten_messages, message_of
from afterglow.text.reply_memory import (
    Asked,
    ChatPrompt,
    Reply,
    ReplyMemory,
    Segment,
    chains,
    parts_digest,
    rows_at,
    splice,
)
from afterglow.text.reply_places import place_replies
from afterglow.text.tokenizer_files import read_parts
from afterglow.text.turns import TOKENS, BlockMark, Turns, find_marks, find_turns, rows_before

ROLES = ("system", "developer", "user", "assistant", "tool")


class Tokenizer:
    """Turns text to ids and back, as `transformers` does with the same model directory or GGUF file.

    Beginning-of-text tokens are added by the post-processor (`add_bos_token` is ignored beside a `tokenizer.json`, as
    in transformers 5); chat templates write their special tokens themselves.
    """

    def __init__(self, model: str | Path) -> None:
        parts = read_parts(Path(model))
        self._fast = parts.fast
        self.special_tokens = parts.special_tokens
        self._added: dict[int, str] = {i: token.content for i, token in self._fast.get_added_tokens_decoder().items()}
        self._special = {
            token.content: i for i, token in self._fast.get_added_tokens_decoder().items() if token.special
        }
        state = json.loads(self._fast.to_str())
        decoder = state.get("decoder")
        self.byte_level = "ByteLevel" in _kinds(decoder)
        self._byte_fallback = "ByteFallback" in _kinds(decoder)
        self._most_chars = lengths.most_chars(state, _BYTE_OF)
        self.chat_template = (
            ChatTemplate(parts.chat_template, self.special_tokens, parts.tool_template)
            if parts.chat_template is not None
            else None
        )
        self.response_template = parts.response_template  # how to read replies, for transformers
        self.markers = Markers(self._fast, self._marker_ids(), _unknown(state["model"]))
        self.replies = ReplyMemory()
        self.spliced = 0  # replies in prompts whose generated ids were used, since the start
        self.retokenised = 0

    # ------------------------------------------------------------------------------------------- plain text

    @property
    def vocab_size(self) -> int:
        """Return the number of tokens, added ones included."""
        return self._fast.get_vocab_size(with_added_tokens=True)

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Turn a text into ids."""
        return lengths.encode(self._fast, valid(text), add_special_tokens).ids

    def least_tokens(self, text: str) -> int:
        """Compute a lower bound of a text's tokens without tokenising it."""
        return -(-len(text) // self._most_chars) if self._most_chars is not None else 0

    def check_length(self, text: str, window: ContextWindow, param: str) -> None:
        """Refuse a text that is certain to be longer than the window. Raises: RequestError."""
        least = self.least_tokens(text)
        if least > window.limit:
            raise window.error(f"the prompt has {len(text)} characters, which are at least {least} tokens", param)

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """Turn ids into a text."""
        return lengths.decode(self._fast, ids, skip_special_tokens)

    def token_bytes(self, token: int) -> bytes:
        """Return the bytes of one token within a text, which may be a part of a character."""
        if token in self._added:
            return self._added[token].encode()
        text = self._fast.id_to_token(token)
        if text is None:  # the model's vocabulary is often padded beyond the tokenizer's
            return b""
        if self.byte_level:
            return b"".join(_BYTE_OF[c].to_bytes(1, "big") if c in _BYTE_OF else c.encode() for c in text)
        if self._byte_fallback and len(text) == 6 and text.startswith("<0x"):
            return bytes.fromhex(text[3:5])
        return text.replace("\u2581", " ").encode()

    def is_special(self, text: str) -> bool:
        """Check whether a text is a special token, which is hidden in decoded text unless that is asked for."""
        return text in self._special

    def in_grammar(self, mark: str) -> str:
        """Write a mark in a grammar (Lark): as a token where it is a special one, and as text otherwise. For llguidance all added
        tokens in angle brackets are special."""
        ids = self.encode(mark, add_special_tokens=False)
        special = mark in self._special or (mark.startswith("<") and mark.endswith(">"))
        return f"<[{ids[0]}]>" if len(ids) == 1 and ids[0] in self._added and special else json.dumps(mark)

    def serialized(self) -> str:
        """Write the tokenizer, with all its added tokens, as the text of a `tokenizer.json`."""
        return str(self._fast.to_str())

    # ------------------------------------------------------------------------------------------------ chat

    def encode_chat(
        self,
        messages: Sequence[Message],
        *,
        salt: str = "",
        tools: Sequence[Mapping[str, Any]] = (),
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        variables: Mapping[str, object] | None = None,
        replies: Mapping[int, Reply] | None = None,
        cut_over: int | None = None,
        window: ContextWindow | None = None,
        marks: Sequence[BlockMark] = (),
    ) -> ChatPrompt:
        """Tokenise a conversation up to the next reply, with the generated ids of earlier replies where they fit.

        `tools`: those that the model may call, as OpenAI describes them. `replies` are replies that another store kept, by
        the numbers of their messages. If the prompt has more than
        `cut_over` tokens, the rows at which turns begin are found as well. Text in a message that looks like a special
        token remains text. `marks`: blocks whose last rows are wanted, see `ChatPrompt.marks`. `continue_final_message`: the last
        message is the beginning of the reply, and the prompt ends with its content.

        Raises: RequestError, also for a prompt that is certainly longer than `window`: such a prompt is not tokenised.
        """
        asked = Asked(flatten_messages(messages), tools, variables, replies or {}, continue_final_message)
        self.check_roles(asked.messages)
        if continue_final_message:
            check_begun(asked.messages)
        write = partial(self._write, asked, add_generation_prompt or continue_final_message)
        rendered = self.markers.render(lambda said, tools: write(said, tools=tools), asked.messages, tools)
        if window is not None:
            self.check_length(rendered.text, window, "messages")
        encoded: dict[int, Encoded] = {}
        prompt, segments = self._encode(asked, salt, rendered, write, encoded if marks else None)
        self.spliced += prompt.spliced
        self.retokenised += prompt.retokenised
        if marks:
            chars = find_marks(partial(self._write, asked), asked.messages, tools, rendered.text, marks)
            ends = (rows_before(segments, char, lambda part, char: encoded[part.start].ended(char)) for char in chars)
            prompt = replace(prompt, marks=tuple(ends))
        if cut_over is None or len(prompt.ids) <= cut_over:
            return prompt

        def write_prompt(messages: Sequence[Message], prompt: bool) -> str:
            return self._write(asked, prompt, messages)

        turns = find_turns(write_prompt, asked.messages, rendered.text, self.special_tokens.get("bos_token", ""))
        return self._with_turns(prompt, turns, segments, rendered)

    def check_roles(self, messages: object) -> None:
        """Refuse roles that the chat template does not know and leaves out, or that hold a special token. Raises: RequestError."""
        for number, message in enumerate(messages if isinstance(messages, list | tuple) else ()):
            role = message.get("role") if isinstance(message, Mapping) else None
            if not isinstance(role, str) or not role or role in ROLES:
                continue
            if self.markers.mentioned_in(role) or not self._template().knows_role(role):
                where = f"messages[{number}].role"
                raise RequestError(
                    f"{where}: the model's chat template knows no role {shown(role)}; there are {', '.join(ROLES)}",
                    param=where,
                )

    def encode_up_to(self, place: str, messages: Sequence[Message], before: ChatPrompt) -> list[int]:
        """Tokenise a conversation that follows a prompt, up to the last `place` in its text: the tokens with which all such
        conversations begin that have another text there. Empty where the place does not show.

        Raises: RequestError.
        """
        asked = replace(before.asked, messages=flatten_messages(messages), continues=False)
        write = partial(self._write, asked, True)
        rendered = self.markers.render(lambda said, tools: write(said, tools=tools), asked.messages, asked.tools)
        at = rendered.text.rfind(place)
        if at < 0:
            return []
        prompt, segments = self._encode(asked, before.salt, rendered, write)
        ((rows, _),) = rows_at(segments, (at,), partial(self._starts_of, rendered))
        return prompt.ids[:rows]

    def _write(
        self,
        asked: Asked,
        generation: bool,
        messages: Sequence[Message],
        tools: Sequence[Mapping[str, Any]] | None = None,
    ) -> str:
        """Render messages, and the generation prompt, or the last message without its end where that goes on. `tools`: instead of
        those of the request."""
        text = self._template().render(
            messages,
            tools=asked.tools if tools is None else tools,
            add_generation_prompt=generation,
            continue_final_message=generation and asked.continues,
            variables=asked.variables,
        )
        return valid(text)

    def _encode(
        self,
        asked: Asked,
        salt: str,
        rendered: Rendered,
        write: Callable[[Sequence[Message]], str],
        encoded: dict[int, Encoded] | None = None,
    ) -> tuple[ChatPrompt, list[Segment]]:
        """Tokenise a rendered conversation, with the generated ids of the replies that fit. `encoded` gets what was tokenised,
        by its first character."""
        flat = asked.messages
        *before, chain = chains(salt, flat, asked.tools)
        begun = len(flat) - 1 if asked.continues else None
        known = {
            number: reply
            for number, (message, key) in enumerate(zip(flat, before, strict=True))
            if message["role"] == "assistant"
            for reply in (asked.replies.get(number), self.replies.get(key))  # the last one counts
            if reply is not None and reply.answers(message) and not rendered.in_literal(reply.prompt_chars)
        }

        def encode(start: int, stop: int, lead: str) -> list[int]:
            found = self.markers.encode(rendered, start, stop, lead)
            if encoded is not None:
                encoded[start] = replace(found, offsets=cache(found.offsets))
            return found.ids

        marker_at = partial(self.markers.at, rendered)
        num_replies = sum(message["role"] == "assistant" for message in flat)
        segments, used = splice(
            rendered.text,
            place_replies(known, write, flat, rendered.text, self._ends_of, marker_at, begun),
            encode,
            marker_at,
            self._added.__getitem__,
        )
        ids = [token for segment in segments for token in segment.ids]
        goes_on = None
        if begun is not None:
            spliced = begun in known and segments[-1].whole
            goes_on = known[begun] if spliced else Reply.begin(flat[begun]["content"], rendered.text)
            chain, num_replies = before[begun], num_replies - (not spliced)
        replies, names = (used, num_replies - used), tuple(before[number] for number in known)
        return ChatPrompt(ids, rendered.text, salt, chain, *replies, names, asked=asked, begun=goes_on), segments

    def remember(
        self,
        prompt: ChatPrompt,
        text: str,
        generated: Sequence[int],
        expires: float = inf,
        content: str | None = None,
        calls: Sequence[ToolCall] = (),
        reasoning: str = "",
    ) -> Reply | None:
        """Keep the ids of a reply whose text the client got, and the replies before it, until `expires` at least.

        `content`, `calls` and `reasoning`: what the client got instead of `text`, where that is something else. Returns None if no prefix
        of the ids decodes to the text (a stop string that ends within a token, hidden special tokens), or if a reply that went on
        has further reasoning."""
        if prompt.asked.continues:
            if reasoning:
                return None
            reasoning = prompt.asked.messages[-1].get("reasoning_content", "")
        count = self._matching(prompt.ids, text, generated)
        if count is None:
            return None
        rest = generated[count:]
        end = rest[0] if rest and self._added.get(rest[0]) in self._special else None
        if content is None or (content == text and not calls and not reasoning):
            return self.replies.put(prompt, text, generated[:count], end, expires)
        parts = parts_digest(message_of(content, calls, reasoning))
        return self.replies.put(prompt, content, generated[:count], end, expires, parts)

    # ---------------------------------------------------------------------------------------------- inside

    def _ends_of(self, reply: Reply) -> list[str]:
        """List the special tokens with which a template may end a reply: the one that was generated, and its own."""
        generated = None if reply.end is None else self._added.get(reply.end)
        ends = (generated, self.special_tokens.get("eos_token"), self._end_of_turn)
        return [end for end in ends if end is not None]

    @cached_property
    def _end_of_turn(self) -> str | None:
        """The special token that the template writes behind a reply; None if it writes none."""
        said = [{"role": role, "content": text} for role, text in (("user", "a"), ("assistant", _PROBE), ("user", "b"))]
        try:
            written = Rendered(self._template().render(said))
        except RequestError:
            return None
        place = written.text.find(_PROBE)
        found = self.markers.at(written, place + len(_PROBE)) if place >= 0 else None
        return None if found is None else self._added.get(found)

    def _matching(self, context: Sequence[int], text: str, generated: Sequence[int]) -> int | None:
        """Count the generated ids that make up exactly `text`. Hidden special tokens would not come back with the text,
        so they count as text here."""
        ended = bool(generated) and self._added.get(generated[-1]) in self._special
        count = len(generated) - ended
        decoder = IncrementalDecoder(self, context, skip_special_tokens=False)
        before = self.decode(context[-16:], False) if context else ""
        if self.decode([*context[-16:], *generated[:count]], False) == before + text:
            return count  # nearly always; the rest is for replies that a stop string has cut
        seen, count = "", 0
        while count < len(generated) and (len(seen) < len(text) or decoder.holding):
            seen += decoder.push(generated[count : count + 1])
            count += 1
        return count if seen == text and not decoder.holding else None

    def _template(self) -> ChatTemplate:
        if self.chat_template is None:
            raise RequestError(
                "this model has no chat template; use /v1/completions, or add a chat_template.jinja "
                "to the model directory",
                param="messages",
                code="no_chat_template",
            )
        return self.chat_template

    def _with_turns(
        self, prompt: ChatPrompt, turns: Turns, segments: Sequence[Segment], rendered: Rendered
    ) -> ChatPrompt:
        rows = rows_at(segments, turns.starts or (turns.head,), partial(self._starts_of, rendered))
        uncut = turns.why_not
        if turns.starts and not rows[0][1]:
            uncut = TOKENS
        whole = rows[:1] if uncut else [rows[0], *(row for row in rows[1:] if row[1])]
        return replace(prompt, turns=tuple(dict.fromkeys(row for row, _ in whole)), uncut=uncut)

    def _starts_of(self, rendered: Rendered, segment: Segment) -> list[int]:
        """List the characters at which the tokens of a segment begin."""
        return self.markers.encode(rendered, segment.start, segment.stop, segment.lead).starts()

    def _marker_ids(self) -> dict[str, int]:
        """Collect special tokens, and the other added tokens that the template writes around messages: some models do
        not declare their markers as special."""
        text = ""
        if self.chat_template is not None:
            with contextlib.suppress(RequestError):
                text = self.chat_template.render([{"role": "user", "content": ""}])
        # A word that happens to be an added token is no marker, though a template may write it too.
        shown = {added: i for i, added in self._added.items() if _BRACKETED.fullmatch(added) and added in text}
        return {**self._special, **shown}


_PROBE = "probe of a reply"
_BRACKETED = re.compile(r"[<\[{|].*[>\]}|]", re.DOTALL)


def _unknown(model: Mapping[str, Any]) -> str | None:
    """Return the token that a model writes for unknown characters."""
    number = model.get("unk_id")  # of a list of pieces
    return model["vocab"][number][0] if isinstance(number, int) else model.get("unk_token")


def _kinds(decoder: object) -> set[str]:
    if not isinstance(decoder, dict):
        return set()
    return {str(decoder.get("type"))}.union(*map(_kinds, decoder.get("decoders", ())))


def valid(text: str) -> str:
    """Replace lone surrogates, which JSON can carry and UTF-8 cannot, by question marks."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return text.encode("utf-8", "replace").decode()
    return text


def _byte_alphabet() -> dict[str, int]:
    """Map the characters of byte-level tokenizers to bytes: printable characters of Latin-1 stand for themselves, the
    other bytes have, in order, the characters from U+0100 on."""
    visible = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    hidden = [byte for byte in range(256) if byte not in visible]
    return {chr(b): b for b in visible} | {chr(0x100 + i): b for i, b in enumerate(hidden)}


_BYTE_OF = _byte_alphabet()
