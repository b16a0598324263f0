"""BERT's tokenizer from its `vocab.txt`, for checkpoints that have no `tokenizer.json`."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import decoders, models, normalizers, pre_tokenizers, processors

from afterglow.errors import ModelError

_TOKENS = ("[UNK]", "[CLS]", "[SEP]")


def from_vocab(path: Path, config: Mapping[str, Any]) -> tokenizers.Tokenizer:
    """`path`: a `vocab.txt`, a piece per line; `config`: `tokenizer_config.json`, whose defaults are BERT's.

    Raises ModelError where the file is no such vocabulary.
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
    fast = tokenizers.Tokenizer(models.WordPiece(vocab, unk_token=unknown))
    fast.normalizer = normalizers.BertNormalizer(
        clean_text=True,
        handle_chinese_chars=config.get("tokenize_chinese_chars", True),
        strip_accents=config.get("strip_accents"),
        lowercase=config.get("do_lower_case", True),
    )
    fast.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    fast.decoder = decoders.WordPiece()
    fast.post_processor = processors.TemplateProcessing(
        single=f"{first} $A {last}",
        pair=f"{first} $A {last} $B:1 {last}:1",
        special_tokens=[(first, vocab[first]), (last, vocab[last])],
    )
    marks = [token for token in ("[PAD]", unknown, first, last, "[MASK]") if token in vocab]
    fast.add_special_tokens([tokenizers.AddedToken(token, special=True, normalized=False) for token in marks])
    return fast


_KEYS = ("unk_token", "cls_token", "sep_token")


def _named(config: Mapping[str, Any], key: str, default: str) -> str:
    value = config.get(key, default)
    text = value.get("content") if isinstance(value, Mapping) else value
    return text if isinstance(text, str) else default
