"""How byte-level tokenizers cut a text into words before merges are applied, by the names that GGUF files give to it.

The names and the patterns are those of llama.cpp. Patterns are applied one after the other, each to the pieces that the one before
has left; both matches and the text between them are pieces. Where llama.cpp simplifies a pattern of the model's own `tokenizer.json`, the
original is here.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import tokenizers
from tokenizers import pre_tokenizers

from afterglow.errors import ModelError


@dataclass(frozen=True, slots=True)
class PreTokenizer:
    """`patterns` cut the text. `whole_words`: a word that is a token is not merged from parts. `begins`: a text begins with a
    beginning-of-text token, unless the file says otherwise."""

    patterns: tuple[str, ...]
    whole_words: bool = False
    begins: bool = False

    def build(self) -> tokenizers.pre_tokenizers.PreTokenizer:
        """Return the library's object, which also writes bytes in the byte-level alphabet."""
        cuts = [pre_tokenizers.Split(tokenizers.Regex(pattern), "isolated") for pattern in self.patterns]
        return pre_tokenizers.Sequence([*cuts, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])


def _characters(ranges: str) -> str:
    """Write ranges of code points as a pattern's class does."""
    return "".join("-".join(chr(int(end, 16)) for end in part.split("-")) for part in ranges.split())


_ENGLISH = "(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_LINES = r"\s*[\r\n]+|\s+(?!\S)|\s+"
_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_WORDS = r"[^\r\n\p{L}\p{N}]?\p{L}+"
_MARKS = r" ?[^\s\p{L}\p{N}]+[\r\n]*"
_LLAMA3 = rf"{_ENGLISH}|{_WORDS}|\p{{N}}{{1,3}}|{_MARKS}|{_LINES}"
_QWEN2 = rf"{_ENGLISH}|{_WORDS}|\p{{N}}|{_MARKS}|{_LINES}"
_QWEN35 = rf"{_ENGLISH}|[^\r\n\p{{L}}\p{{N}}]?[\p{{L}}\p{{M}}]+|\p{{N}}| ?[^\s\p{{L}}\p{{M}}\p{{N}}]+[\r\n]*|{_LINES}"
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_CASED = rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+", rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*"
_PATHS = r" ?[^\s\p{L}\p{N}]+[\r\n/]*"
_TEKKEN = rf"{_CASED[0]}|{_CASED[1]}|\p{{N}}|{_PATHS}|{_LINES}"
_GPT4O = rf"{_CASED[0]}{_ENGLISH}?|{_CASED[1]}{_ENGLISH}?|\p{{N}}{{1,3}}|{_PATHS}|{_LINES}"
_DEEPSEEK3 = (
    r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"
    rf"| ?[\p{{P}}\p{{S}}]+[\r\n]*|{_LINES}"
)
_ASIAN = "[一-龥ࠀ-一가-퟿]+"
# Letters with a case, in the scripts that DeepSeek lists: code points, first and last.
_CASED_LETTERS = (
    "41-5A 61-7A B5 C0-D6 D8-F6 F8-1BA 1BC-1BF 1C4-293 295-2AF 370-373 376 377 37B-37D 37F 386 388-38A 38C 38E-3A1 "
    "3A3-3F5 3F7-481 48A-52F 531-556 10A0-10C5 13A0-13F5 13F8-13FD 1C90-1CBA 1CBD-1CBF 1D00-1D2B 1D6B-1D77 1D79-1D9A "
    "1E00-1F15 1F18-1F1D 1F20-1F45 1F48-1F4D 1F50-1F57 1F59 1F5B 1F5D 1F5F-1F7D 1F80-1FB4 1FB6-1FBC 1FBE 1FC2-1FC4 "
    "1FC6-1FCC 1FD0-1FD3 1FD6-1FDB 1FE0-1FEC 1FF2-1FF4 1FF6-1FFC 2102 2107 210A-2113 2115 2119-211D 2124 2126 2128 "
    "212A-212D 212F-2134 2139 213C-213F 2145-2149 214E 2183 2184 2C00-2C7B 2C7E-2CE4 2CEB-2CEE 2CF2 2CF3 A640-A66D "
    "A680-A69B A722-A76F A771-A787 A78B-A78E AB70-ABBF FB00-FB06 FB13-FB17 FF21-FF3A FF41-FF5A 10400-1044F "
    "104B0-104D3 104D8-104FB 10C80-10CB2 10CC0-10CF2 118A0-118DF 1E900-1E943"
)
_DEEPSEEK = (
    r"[\r\n]",
    rf"\s?[{_characters(_CASED_LETTERS)}]+",
    "\\s?[!-/:-~！-／：-～‘-‟\u3000-。]+",
    r"\s+$",
    _ASIAN,
    r"\p{N}+",
)
_SYMBOLS = r"\p{P}\$\+<=>\^~\|"
_SENTENCES = r" ?[^(\s|.,!?…。，、।۔،)]+"

_BY_KIND: Mapping[PreTokenizer, str] = {
    PreTokenizer((rf"[{_SYMBOLS}]+", _GPT2, r"\p{N}+", "[0-9][0-9][0-9]")): "default",
    PreTokenizer((rf"[{_SYMBOLS}`]+", _GPT2, "[0-9][0-9][0-9]")): "falcon",
    PreTokenizer((_GPT2,)): (
        "gpt-2 phi-2 mpt olmo jais trillion granite-docling exaone4 gigachat mellum a.x-4.0 modern-bert jina-es jina-de "
        "jina-v2-es jina-v2-de jina-v1-en jina-v2-code roberta-bpe"
    ),
    PreTokenizer((r"\p{N}", _GPT2)): "smollm starcoder refact command-r codeshell exaone minerva-7b mellum2",
    PreTokenizer((_LLAMA3,), whole_words=True, begins=True): (
        "llama-bpe llama3 llama-v3 falcon3 falcon-h1 pixtral midm-2.0 lfm2 jina-v5-nano"
    ),
    PreTokenizer((_LLAMA3,)): "dbrx smaug-bpe glm4 chatglm-bpe",
    PreTokenizer((_QWEN2,)): "qwen2 deepseek-r1-qwen kormo f2llmv2 stablelm2 megrez hunyuan solar-open grok-2",
    PreTokenizer((_QWEN35,)): "qwen35",
    PreTokenizer((_TEKKEN,), whole_words=True, begins=True): "tekken",
    PreTokenizer((_GPT4O,)): "gpt-4o llama4 kanana2 talkie minimax-m2",
    PreTokenizer(_DEEPSEEK): "deepseek-llm",
    PreTokenizer((r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", _ASIAN, r"\p{N}")): "deepseek-coder",
    PreTokenizer((r"\p{N}{1,3}", "[一-龥぀-ゟ゠-ヿ]+", _DEEPSEEK3)): "deepseek-v3 hunyuan-dense joyai-llm hy_v4",
    PreTokenizer((_SENTENCES,)): "poro-chat bloom gpt3-finnish",
    PreTokenizer((_SENTENCES, r"\p{N}")): "viking",
}
_BY_NAME = {name: kind for kind, names in _BY_KIND.items() for name in names.split()}


def pre_tokenizer(name: str) -> PreTokenizer:
    """Return the pre-tokenizer of a name in `tokenizer.ggml.pre`. Raises: ModelError if there is none of that name."""
    found = _BY_NAME.get(name)
    if found is None:
        raise ModelError(
            f"unknown pre-tokenizer {name!r} (tokenizer.ggml.pre); known are {', '.join(sorted(_BY_NAME))}; "
            "use the model's safetensors, or convert it again"
        )
    return found
