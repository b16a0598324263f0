"""What models bring for their tokenizers: the files of a model directory, or the metadata of a GGUF file.

BERT's checkpoints may have a `vocab.txt` alone.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers.implementations.bert_wordpiece import BertWordPieceTokenizer

from afterglow.errors import ModelError
from afterglow.gguf_file import is_gguf, read_metadata
from afterglow.text import gguf_tokenizer
from afterglow.text.chat_template import find_chat_template

_NAMED = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
_FLAGS = ("single_word", "lstrip", "rstrip", "normalized", "special")


@dataclass(frozen=True, slots=True, eq=False)
class TokenizerParts:
    """`fast` knows all added tokens. `special_tokens`: texts by the names that chat templates use. `chat_template` is its
    source, `tool_template` that of the one for requests with tools, where there is one of its own. `response_template`
    describes replies, for transformers."""

    fast: tokenizers.Tokenizer
    special_tokens: Mapping[str, str]
    chat_template: str | None
    tool_template: str | None = None
    response_template: Mapping[str, Any] | None = None


def read_parts(model: Path) -> TokenizerParts:
    """Read the tokenizer of a model directory (`tokenizer.json`, or BERT's `vocab.txt`) or of a GGUF file.

    Raises: ModelError.
    """
    if is_gguf(model):
        return _read_gguf(model)
    fast = _load_fast(model)
    config = _read_json(model / "tokenizer_config.json")
    named = {**_read_json(model / "special_tokens_map.json"), **config}
    special_tokens = {name: text for name in _NAMED if (text := _token_text(named.get(name)))}
    try:
        _add_missing_tokens(fast, config, special_tokens)
    except (TypeError, ValueError) as error:  # a key that is no number, a flag that is no boolean, text that is none
        raise ModelError(f"{model / 'tokenizer_config.json'}: an added token is damaged ({_line(error)})") from None
    described = config.get("response_template")
    return TokenizerParts(
        fast,
        special_tokens,
        find_chat_template(model, config),
        find_chat_template(model, config, "tool_use"),
        described if isinstance(described, dict) else None,
    )


def _read_gguf(path: Path) -> TokenizerParts:
    metadata = read_metadata(path)
    try:
        vocabulary = gguf_tokenizer.GgufVocabulary(metadata)
        fast = gguf_tokenizer.build_tokenizer(vocabulary)
    except ModelError as error:
        raise ModelError(f"{path}: {error}") from None
    tool_template = metadata.get("tokenizer.chat_template.tool_use")
    return TokenizerParts(
        fast,
        vocabulary.special_tokens(),
        gguf_tokenizer.chat_template(metadata),
        tool_template if isinstance(tool_template, str) else None,
    )


def _add_missing_tokens(
    fast: tokenizers.Tokenizer, config: Mapping[str, Any], special_tokens: Mapping[str, str]
) -> None:
    """Add tokens that only the configuration knows: otherwise a chat template's markers would be cut up."""
    decoder = config.get("added_tokens_decoder")
    entries = [decoder[key] for key in sorted(decoder, key=int)] if isinstance(decoder, dict) else []
    entries += list(special_tokens.values())
    for entry in entries:
        text = _token_text(entry)
        if not text or fast.token_to_id(text) is not None:
            continue
        options = {k: v for k, v in entry.items() if k in _FLAGS} if isinstance(entry, dict) else {}
        special = options.pop("special", True) or text in special_tokens.values()
        fast.add_tokens([tokenizers.AddedToken(text, special=special, **options)])


def _line(error: Exception) -> str:
    return " ".join(str(error).split())


def _load_fast(folder: Path) -> tokenizers.Tokenizer:
    path = folder / "tokenizer.json"
    if not path.is_file():
        if not folder.is_dir():
            raise ModelError(f"{folder} is not a model directory")
        if (folder / "vocab.txt").is_file():
            return from_vocab(folder / "vocab.txt", _read_json(folder / "tokenizer_config.json"))
        remedy = "copy it there from where the model came from"
        if any((folder / name).is_file() for name in ("tokenizer.model", "spiece.model", "vocab.json")):
            remedy = (
                "the older tokenizer files in it are not read; write one with "
                f"transformers.AutoTokenizer.from_pretrained('{folder}').save_pretrained('{folder}')"
            )
        raise ModelError(f"{folder} has no tokenizer.json: {remedy}")
    try:
        fast = tokenizers.Tokenizer.from_file(str(path))
    except Exception as error:  # the library raises plain Exception
        raise ModelError(f"{path} is not a tokenizer: {error}") from error
    fast.no_truncation()  # left-overs of training; a server must see the whole prompt
    fast.no_padding()
    return fast


def _read_json(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    try:
        value = json.loads(path.read_text("utf-8"))
    except (ValueError, RecursionError) as error:
        raise ModelError(f"{path} is not valid JSON: {error}") from error
    return value if isinstance(value, dict) else {}


def _token_text(entry: object) -> str | None:
    """Return the text of a token, which is written as a string or as an object with its flags."""
    text = entry.get("content") if isinstance(entry, dict) else entry
    return text if isinstance(text, str) else None


def from_vocab(path: Path, config: Mapping[str, Any]) -> tokenizers.Tokenizer:
    """Make a tokenizer of `path`, a `vocab.txt` with a piece per line, and of `config`, a `tokenizer_config.json`, whose
    defaults are BERT's.

    Raises: ModelError, if the file is not such a vocabulary.
    """
    try:
        pieces = path.read_text("utf-8").split("\n")
    except (OSError, UnicodeDecodeError) as error:
        raise ModelError(f"{path} cannot be read: {error}") from None
    if not pieces[-1]:
        pieces.pop()
    vocab = {piece.removesuffix("\r"): index for index, piece in enumerate(pieces)}
    usual = {"unk_token": "[UNK]", "cls_token": "[CLS]", "sep_token": "[SEP]"}
    named = {key: _token_text(config.get(key)) for key in usual}
    unknown, first, last = (usual[key] if text is None else text for key, text in named.items())
    missing = [token for token in (unknown, first, last) if token not in vocab]
    if missing:
        raise ModelError(f"{path} lacks {missing[0]}, so it is not the vocabulary of a BERT tokenizer")
    fast = BertWordPieceTokenizer(
        vocab,
        unk_token=unknown,
        cls_token=first,
        sep_token=last,
        handle_chinese_chars=config.get("tokenize_chinese_chars", True),
        strip_accents=config.get("strip_accents"),
        lowercase=config.get("do_lower_case", True),
    )
    return tokenizers.Tokenizer.from_str(fast.to_str())
