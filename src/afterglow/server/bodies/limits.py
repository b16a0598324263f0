"""Limits of one request, each with an error that says so; inputs that come in several forms are normalised.

Bodies are checked before any work is done on them: the shape of the JSON before it is parsed, then the number of
messages, texts, tokens and characters.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from itertools import islice
from typing import Any

from afterglow.errors import RequestError
from afterglow.text.chat_template import shown
from afterglow.text.messages import MAX_NESTING, texts_in

MAX_VALUES = 2_000_000  # of a body whose values may be token ids
MAX_CHAT_VALUES = 250_000  # of other bodies
MAX_MESSAGES = 16_384  # of a conversation; parts of messages count as well
MAX_CHARS = 4 * 1024**2  # of a conversation, or of one text: some seconds' work for a tokenizer
MAX_IDS = 1024**2  # token ids in one request
MAX_PROMPTS = 2048  # of one request for completions
MAX_INPUTS = 2048  # of one request to embed, as OpenAI has it
MAX_NAME = 4096  # characters of names, keys and stop strings
MESSAGE_CHARS = 64  # a message is as much work as so many characters of text


def wrong(where: str, wanted: str, got: object) -> RequestError:
    """Make the error for a field that is not as it must be. `where`: its path."""
    return RequestError(f"{where} {wanted}, got {shown(got)}", param=where)


def unsupported(where: str) -> RequestError:
    """Make the error for a field that would change what a reply means, and is not honoured."""
    return RequestError(f"{where} is not supported; leave it out", param=where, code="unsupported_parameter")


def count_values(data: bytes | bytearray) -> int:
    """Count the values of a JSON text, at most. Cheap: commas and brackets in strings count too."""
    return data.count(b",") + data.count(b"[") + data.count(b"{") + 1


def check_shape(data: bytes | bytearray, most_values: int) -> None:
    """Refuse a JSON text with too many values, or nested too deeply, without parsing it. Raises: RequestError."""
    few = count_values(data) <= most_values
    if few and data.count(b"[") + data.count(b"{") <= MAX_NESTING:
        return
    # The JSON without its strings; escaped quotes are removed first.
    bare = b"".join(data.replace(b"\\\\", b"").replace(b'\\"', b"").split(b'"')[::2])
    if (count := count_values(bare)) > most_values:
        raise RequestError(
            f"the request body holds {count} JSON values, and at most {most_values} are read at once; "
            "send it in parts, or leave old messages out",
            code="body_too_large",
        )
    brackets = bare.translate(_SQUARE, _OTHERS)
    for _ in range(MAX_NESTING):
        if not brackets:
            return
        brackets = brackets.replace(b"[]", b"")  # the innermost ones
    if b"[]" in brackets or len(brackets) > MAX_NESTING:
        raise RequestError(
            f"the request body is nested too deeply: more than {MAX_NESTING} arrays and objects within each other; "
            "send a flatter one",
            param=_deep_path(data),
            code="invalid_json",
        )


def _deep_path(data: bytes | bytearray) -> str | None:
    """Name the field that is nested too deeply, by the beginning of its path; None where it does not come soon."""
    path: list[str | int] = []
    before = b""
    for token in islice(_TOKENS.finditer(data), SEARCHED_TOKENS):
        part = token[0]
        if part in b"[{":
            path.append(0 if part == b"[" else "")
        elif part in b"]}":
            del path[-1:]
        elif part == b":" and path:
            path[-1] = before[1:-1].decode("utf-8", "replace")
        elif part == b"," and path and isinstance(path[-1], int):
            path[-1] += 1
        before = part
        if len(path) > MAX_NESTING:
            named = "".join(f"[{each}]" if isinstance(each, int) else f".{each}" for each in path[:-1]).lstrip(".")
            return named if len(named) <= SHOWN_PATH else f"{named[:SHOWN_PATH]}..."
    return None


_TOKENS = re.compile(rb'"(?:[^"\\]|\\.)*+"|[][{},:]', re.DOTALL)
SEARCHED_TOKENS = 20_000  # of a body that is nested too deeply
SHOWN_PATH = 200  # characters
_SQUARE = bytes.maketrans(b"{}", b"[]")
_OTHERS = bytes(set(range(256)) - set(b"[]{}"))


def check_messages(messages: object, name: str = "messages") -> int:
    """Estimate the work of a conversation, in characters; malformed messages count nothing. Raises: RequestError, if
    the conversation is too long."""
    if not isinstance(messages, list):
        return 0
    count = len(messages)
    for message in messages:
        content = message.get("content") if isinstance(message, dict) else None
        count += len(content) - 1 if isinstance(content, list) and content else 0
    if count > MAX_MESSAGES:
        raise RequestError(
            f"{name}: at most {MAX_MESSAGES} messages, or parts of messages, are read at once, got {count}; leave the oldest "
            "out, or join them",
            param=name,
            code="context_length_exceeded",
        )
    chars = sum(map(len, texts_in([*map(_read, messages)])))
    check_chars(chars, name)
    return chars + MESSAGE_CHARS * count


def _read(message: object) -> object:
    """Leave out of a message the parts of its content that have no text, such as images: they are refused by name."""
    content = message.get("content") if isinstance(message, dict) else None
    if not isinstance(message, dict) or not isinstance(content, list):
        return message
    return {**message, "content": [part for part in content if not isinstance(part, dict) or "text" in part]}


def check_chars(count: int, name: str, param: str | None = None) -> None:
    """Refuse a text with too many characters. Raises: RequestError."""
    if count > MAX_CHARS:
        raise RequestError(
            f"{name}: at most {MAX_CHARS} characters are tokenised at once, got {count}; shorten it, or send it in parts",
            param=param or name,
            code="context_length_exceeded",
        )


def read_prompts(given: Any) -> list[Any]:
    """Normalise the field `prompt` of completions to a list of texts, or of lists of token ids. Raises:
    RequestError."""
    if is_ids(given) or isinstance(given, str):
        found = [given]
    elif isinstance(given, list) and given and (_are(str, given) or all(map(is_ids, given))):
        found = given
    else:
        raise RequestError(
            "prompt must be a string, a list of strings, a list of token ids, or a list of such lists; "
            "none may be empty",
            param="prompt",
        )
    if len(found) > MAX_PROMPTS:
        raise RequestError(f"at most {MAX_PROMPTS} replies per request, got {len(found)} prompts", param="prompt")
    _check_sizes(found, "prompt")
    return found


def read_inputs(given: Any) -> list[Any]:
    """Normalise the field `input` of embeddings to a list of texts, or of lists of token ids. Raises: RequestError."""
    if given is None:
        raise RequestError("input is required", param="input")
    if isinstance(given, str):
        given = [given]
    elif isinstance(given, list):
        if not given:
            raise RequestError("input is an empty list; give at least one text", param="input")
        if _are(int, given):
            given = [given]
        if len(given) > MAX_INPUTS:
            raise RequestError(
                f"at most {MAX_INPUTS} inputs can be embedded at once, got {len(given)}; send them in parts",
                param="input",
            )
    if not isinstance(given, list) or not (_are(str, given) or all(item == [] or is_ids(item) for item in given)):
        raise RequestError(
            f"input must be a string, a list of strings, a list of token ids, or a list of such lists, {_mistake(given)}",
            param="input",
        )
    _check_sizes(given, "input")
    return given


def read_documents(given: Any) -> list[str]:
    """Read the texts of documents: strings, or objects with a `text`. Raises: RequestError."""
    if not isinstance(given, list) or not given:
        got = "an empty one" if given == [] else shown(given)
        raise RequestError(f"documents must be a list of at least one text, got {got}", param="documents")
    if len(given) > MAX_INPUTS - 1:
        raise RequestError(
            f"at most {MAX_INPUTS - 1} documents can be ranked at once, got {len(given)}; send them in parts",
            param="documents",
        )
    texts = []
    for index, item in enumerate(given):
        text = item.get("text") if isinstance(item, dict) else item
        if not isinstance(text, str):
            raise RequestError(
                f"documents[{index}] must be a string, or an object with a text, got {shown(item)}", param="documents"
            )
        texts.append(text)
    _check_sizes(texts, "documents")
    return texts


def check_ids(count: int, name: str) -> None:
    """Refuse too many token ids. Raises: RequestError."""
    if count > MAX_IDS:
        raise RequestError(
            f"{name}: at most {MAX_IDS} tokens are read at once, got {count}; send them in parts", param=name
        )


def is_ids(value: object) -> bool:
    """Check whether a value is a list of token ids, and not empty."""
    return isinstance(value, list) and bool(value) and _are(int, value)


def _are(kind: type, values: Sequence[object]) -> bool:
    """Check whether all values have exactly this type."""
    return set(map(type, values)) == {kind}  # True does not count as 1


def _check_sizes(items: Sequence[Any], name: str) -> None:
    check_ids(sum(len(item) for item in items if isinstance(item, list)), name)
    for index, item in enumerate(items):
        if isinstance(item, str):
            check_chars(len(item), name if len(items) == 1 else f"{name}[{index}]", name)


def _mistake(given: Any) -> str:
    """Describe the mistake in an input for an error message."""
    if not isinstance(given, list):
        return f"got {shown(given)}"
    first = given[0]
    for index, item in enumerate(given):
        if (
            (item == [] or is_ids(item))
            if isinstance(first, list)
            else type(item) in (str, int) and type(item) is type(first)
        ):
            continue
        return f"and input[{index}] is {shown(item)}"
    return f"got {shown(given)}"
