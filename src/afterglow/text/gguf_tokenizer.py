"""The tokenizer that a GGUF file's metadata describes: byte-level BPE, or SentencePiece's BPE.

Equal to the tokenizer that `transformers` makes of the same file, but for words that llama.cpp knows to cut otherwise
(`pre_tokenizers.py`), and for `add_space_prefix`, which `transformers` does not read.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import tokenizers
from tokenizers import decoders, models, pre_tokenizers, processors

from afterglow.errors import ModelError
from afterglow.text.pre_tokenizers import PreTokenizer, pre_tokenizer

_KINDS = {"gpt2": "byte-level BPE", "llama": "SentencePiece's BPE"}
_CONTROL, _USER_DEFINED = 3, 4  # of the values of `token_type`; 1 normal, 2 unknown, 5 unused, 6 byte
_NAMED = {
    "bos_token": "bos_token_id",
    "eos_token": "eos_token_id",
    "unk_token": "unknown_token_id",
    "sep_token": "seperator_token_id",  # the format's own spelling
    "pad_token": "padding_token_id",
    "mask_token": "mask_token_id",
}
_SENTENCEPIECE_IDS = {"bos_token_id": 1, "eos_token_id": 2, "unknown_token_id": 0}  # where a file says nothing
# Tokens that end a reply whatever the file says of them: converters forget to name them.
_ENDS = frozenset(
    [
        "<|eot_id|>",
        "<|im_end|>",
        "<|end|>",
        "<|return|>",
        "<|call|>",
        "<|endoftext|>",
        "<|eom_id|>",
        "<|end_of_text|>",
        "<｜end▁of▁sentence｜>",
        "<end_of_turn>",
        "<EOT>",
        "[EOT]",
        "[EOS]",
        "<eos>",
        "</s>",
        "<end_of_utterance>",
    ]
)


class GgufVocabulary:
    """The tokens of a GGUF file with their types and special ids, checked."""

    def __init__(self, metadata: Mapping[str, Any]) -> None:
        """Read the metadata. Raises: ModelError if it has no vocabulary of a known kind, or a damaged one."""
        self._metadata = metadata
        self.kind = str(self.value("model", "none"))
        if self.kind not in _KINDS:
            known = " and ".join(f"{kind!r} ({what})" for kind, what in _KINDS.items())
            raise ModelError(f"tokenizer kind {self.kind!r} (tokenizer.ggml.model) is not supported, but {known}")
        texts = self._list("tokens", None)
        self.texts = [str(text) or f"[EMPTY_{number}]" for number, text in enumerate(texts)]
        self.ids = {text: number for number, text in enumerate(self.texts)}
        if len(self.ids) != len(self.texts):
            twice = next(text for number, text in enumerate(self.texts) if self.ids[text] != number)
            raise ModelError(f"token {twice!r} is twice in the vocabulary (tokenizer.ggml.tokens); the file is damaged")
        self.types = self._list("token_type", 1)
        self.pre = pre_tokenizer(str(self.value("pre", "default"))) if self.kind == "gpt2" else None

    def value(self, name: str, default: object = None) -> Any:
        """Return what the file says about its tokenizer under a name."""
        return self._metadata.get(f"tokenizer.ggml.{name}", default)

    def id_of(self, name: str) -> int | None:
        """Return a special token's id (`bos_token_id`, ...), or None if there is no such token."""
        default = _SENTENCEPIECE_IDS.get(name) if self.kind == "llama" else None
        number = self.value(name, default)
        return int(number) if isinstance(number, int) and 0 <= number < len(self.texts) else None

    def special_tokens(self) -> dict[str, str]:
        """Return the special tokens' texts by the names that chat templates use."""
        found = {name: self.id_of(key) for name, key in _NAMED.items()}
        return {name: self.texts[number] for name, number in found.items() if number is not None}

    def end_tokens(self) -> tuple[int, ...]:
        """Return the ids of the tokens that end a reply, the end-of-text token first."""
        named = [self.id_of(name) for name in ("eos_token_id", "eot_token_id", "eom_token_id")]
        ends = [self.ids[text] for text in sorted(_ENDS & self.ids.keys(), key=self.ids.__getitem__)]
        calls = {"<|return|>", "<|call|>"} <= self.ids.keys()  # such models end thoughts by <|end|>, and go on
        return tuple(
            dict.fromkeys(
                number
                for number in [*named, *filter(self._is_marker, ends)]
                if number is not None and not (calls and self.texts[number] == "<|end|>")
            )
        )

    def scores(self) -> list[float]:
        """Return a number for each token: those of higher numbers are merged first."""
        return [float(score) for score in self._list("scores", 0.0)]

    def merges(self) -> list[tuple[str, str]]:
        """Return the merges that the file lists, the first to be applied first."""
        listed = self.value("merges")
        if not isinstance(listed, Sequence) or isinstance(listed, str):
            raise ModelError("the vocabulary has no merges (tokenizer.ggml.merges); convert the model again")
        at = [(merge, merge.find(" ", 1)) for merge in map(str, listed)]
        return [(merge[:space], merge[space + 1 :]) for merge, space in at]

    def added_tokens(self) -> list[tokenizers.AddedToken]:
        """Return the tokens that are found in a text before it is cut into words; the special ones are hidden in replies."""
        special = {*self.special_tokens().values(), *(self.texts[number] for number in self.end_tokens())}
        return [
            tokenizers.AddedToken(text, special=kind == _CONTROL or text in special, normalized=False)
            for text, kind in zip(self.texts, self.types, strict=True)
            if kind in (_CONTROL, _USER_DEFINED) or text in special
        ]

    def _is_marker(self, number: int) -> bool:
        """Tell a marker from a token that was learned, such as HTML's `</s>` in a vocabulary that ends texts otherwise."""
        return self.types[number] in (_CONTROL, _USER_DEFINED) or self.texts[number].startswith(("<|", "<｜"))

    def _list(self, name: str, default: object) -> list[Any]:
        """Return a value for each token; all are `default` where the file has none."""
        values = self.value(name)
        tokens = self.value("tokens")
        size = len(tokens) if isinstance(tokens, Sequence) else 0
        if values is None and default is not None:
            return [default] * size
        if not isinstance(values, Sequence) or isinstance(values, str) or len(values) != size or not size:
            given = f"{len(values)} values" if isinstance(values, Sequence) else "no list"
            raise ModelError(f"tokenizer.ggml.{name} has {given} for {size} tokens; the file is damaged")
        return list(values)


def build_tokenizer(vocabulary: GgufVocabulary) -> tokenizers.Tokenizer:
    """Make the tokenizer of a GGUF file's vocabulary. Raises: ModelError, if it is damaged."""
    try:
        fast = _byte_level(vocabulary, vocabulary.pre) if vocabulary.pre is not None else _sentencepiece(vocabulary)
        fast.add_tokens(vocabulary.added_tokens())
        _add_ends(fast, vocabulary)
    except ModelError:
        raise
    except Exception as error:  # the library raises plain Exception
        raise ModelError(f"the vocabulary of the GGUF file makes no tokenizer: {error}; the file is damaged") from None
    return fast


def _byte_level(vocabulary: GgufVocabulary, pre: PreTokenizer) -> tokenizers.Tokenizer:
    model = models.BPE(vocab=vocabulary.ids, merges=vocabulary.merges(), ignore_merges=pre.whole_words)
    fast = tokenizers.Tokenizer(model)
    fast.pre_tokenizer = pre.build()
    fast.decoder = decoders.ByteLevel()
    return fast


def _sentencepiece(vocabulary: GgufVocabulary) -> tokenizers.Tokenizer:
    unknown = vocabulary.special_tokens().get("unk_token")
    merges = _merges_by_score(vocabulary)
    fast = tokenizers.Tokenizer(
        models.BPE(vocab=vocabulary.ids, merges=merges, unk_token=unknown, fuse_unk=True, byte_fallback=True)
    )
    prefix = bool(vocabulary.value("add_space_prefix", True))
    fast.pre_tokenizer = pre_tokenizers.Metaspace("▁", prepend_scheme="first" if prefix else "never", split=False)
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    fast.decoder = decoders.Sequence([*steps, decoders.Strip(" ", 1, 0)] if prefix else steps)
    return fast


def _merges_by_score(vocabulary: GgufVocabulary) -> list[tuple[str, str]]:
    """List the ways to put tokens together from two others. SentencePiece makes the token of the highest score first."""
    if vocabulary.value("merges") is not None:
        return vocabulary.merges()
    ids = {text: number for text, number in vocabulary.ids.items() if vocabulary.types[number] != _CONTROL}
    ways: list[tuple[float, int, int, str, str]] = []
    for text, score in zip(vocabulary.texts, vocabulary.scores(), strict=True):
        if text in ids:
            halves = ((text[:at], text[at:]) for at in range(1, len(text)))
            known = sorted(
                (ids[left], ids[right], left, right) for left, right in halves if left in ids and right in ids
            )
            ways += [(score, len(left), len(right), left, right) for _, _, left, right in known]
    ways.sort(key=lambda way: way[:3], reverse=True)
    return [(left, right) for *_, left, right in ways]


def _add_ends(fast: tokenizers.Tokenizer, vocabulary: GgufVocabulary) -> None:
    """Have the tokenizer write the tokens with which texts begin and end, as the file wants it."""
    begins = vocabulary.pre.begins if vocabulary.pre is not None else True
    tokens = vocabulary.special_tokens()
    wanted = {
        "bos_token": vocabulary.value("add_bos_token", begins),
        "eos_token": vocabulary.value("add_eos_token", False),
    }
    # By names of our own: the library would read a token's text as a part of the template, such as `$A`, or refuse its colon.
    named = [name for name in wanted if wanted[name] and name in tokens]
    if named:
        fast.post_processor = processors.TemplateProcessing(
            single=[name for name in ("bos_token", "$A", "eos_token") if name == "$A" or name in named],
            special_tokens=[
                {"id": name, "ids": [vocabulary.ids[tokens[name]]], "tokens": [tokens[name]]} for name in named
            ],
        )


def chat_template(metadata: Mapping[str, Any]) -> str | None:
    """Return the source of the chat template in a GGUF file's metadata, or None."""
    for name in ("tokenizer.chat_template", "tokenizer.chat_template.default"):
        found = metadata.get(name)
        if isinstance(found, str):
            return found
    return None
