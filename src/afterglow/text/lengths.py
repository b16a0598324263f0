"""Long texts and tokenizers: tokenising without blocking other threads, and texts that are certainly too long."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import tokenizers

LONG = 16 * 1024  # characters, or ids, that keep a tokenizer busy for more than a few milliseconds

# How much a step before the model shortens a text: at most so many characters become one. A composed character stands for
# four at most. Steps that are not named may drop any number of characters.
_NORMALIZERS = {"NFC": 4, "NFKC": 4, "NFD": 1, "NFKD": 1, "Prepend": 1, "ByteLevel": 1, "Lowercase": 1}
_PRE_TOKENIZERS = {"ByteLevel", "Metaspace", "Digits", "UnicodeScripts"}  # cut, and drop nothing
_CUTTERS = {"Split", "Punctuation"}  # drop their matches where `behavior` says so


def encode(fast: tokenizers.Tokenizer, text: str, add_special_tokens: bool) -> tokenizers.Encoding:
    """Encode a text. A long text is encoded as a batch, since only batches let other threads run meanwhile."""
    if len(text) <= LONG:
        return fast.encode(text, add_special_tokens=add_special_tokens)
    return fast.encode_batch([text], add_special_tokens=add_special_tokens)[0]


def decode(fast: tokenizers.Tokenizer, ids: Sequence[int], skip_special_tokens: bool) -> str:
    """Decode ids. Many ids are decoded as a batch, since only batches let other threads run meanwhile."""
    if len(ids) <= LONG:
        return fast.decode(ids, skip_special_tokens=skip_special_tokens)
    return fast.decode_batch([list(ids)], skip_special_tokens=skip_special_tokens)[0]


def most_chars(state: Mapping[str, Any], byte_of: Mapping[str, int]) -> int | None:
    """Compute from a `tokenizer.json` how many characters of a text one token covers at most, None if that is not
    certain.

    The bound is certain where every character ends up in some token: with byte-level tokenizers, and with tokenizers
    that fall back to bytes.
    """
    model = state["model"]
    vocab = model.get("vocab")
    if model.get("type") != "BPE" or not isinstance(vocab, dict):
        return None
    steps = list(_steps(state.get("normalizer"), "normalizers"))
    cutters = list(_steps(state.get("pre_tokenizer"), "pretokenizers"))
    byte_level = any(step["type"] == "ByteLevel" for step in (*steps, *cutters))
    if byte_level:
        complete = all(char in vocab for char in byte_of)
    else:
        complete = bool(model.get("byte_fallback")) and all(f"<0x{byte:02X}>" in vocab for byte in range(256))
    if not complete or any(token["lstrip"] or token["rstrip"] for token in state["added_tokens"]):
        return None
    shrinks = 1
    for step in steps:
        factor = _NORMALIZERS.get(step["type"])
        if step["type"] == "Replace":  # such as a space by a visible mark
            pattern = step["pattern"].get("String")
            factor = 1 if pattern is not None and 0 < len(pattern) <= len(step["content"]) else None
        if factor is None:
            return None
        shrinks *= factor
    for step in cutters:
        removes = step["type"] not in _CUTTERS or step.get("behavior") == "Removed"
        if step["type"] not in _PRE_TOKENIZERS and removes:
            return None
    added = [len(token["content"]) for token in state["added_tokens"]]
    own = (_first_bytes(text, byte_of) if byte_level else len(text) for text in vocab)
    return shrinks * max(*own, *added, 1, 1)


def _first_bytes(text: str, byte_of: Mapping[str, int]) -> int:
    """Count the bytes of a byte-level token with which a character begins. Summed over the tokens of a text, the counts
    give its characters."""
    return sum(byte_of.get(char, 0) & 0xC0 != 0x80 for char in text)


def _steps(step: Mapping[str, Any] | None, parts: str) -> list[Mapping[str, Any]]:
    if step is None:
        return []
    if step["type"] == "Sequence":
        return [inner for part in step[parts] for inner in _steps(part, parts)]
    return [step]
