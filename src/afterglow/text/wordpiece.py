"""BERT's tokenizer from its `vocab.txt`, for checkpoints that have no `tokenizer.json`."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers.implementations.bert_wordpiece import BertWordPieceTokenizer

from afterglow.errors import ModelError

_TOKENS = ("[UNK]", "[CLS]", "[SEP]")


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
    unknown, first, last = (_named(config, key, token) for key, token in zip(_KEYS, _TOKENS, strict=True))
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


_KEYS = ("unk_token", "cls_token", "sep_token")


def _named(config: Mapping[str, Any], key: str, default: str) -> str:
    value = config.get(key, default)
    text = value.get("content") if isinstance(value, Mapping) else value
    return text if isinstance(text, str) else default
