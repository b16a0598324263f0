"""Small tokenizers made on the spot, written as model directories."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from tokenizers import (
    AddedToken,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
    trainers,
)

from afterglow import text
from afterglow.text.chat_template import Message
from afterglow.text.messages import flatten_messages

CORPUS = [
    "Ada keeps her red kite in the old mill, and the mill is near the river.",
    "What colour is the kite? The kite is red, of course; the boat is blue.",
    "Grüße aus Köln! 你好，世界。 naïve café — “quotes” … 🙂🙃 👩‍👩‍👧 done.",
    "def main():\n    return 1 + 2  # spaces   and\ttabs\n",
] * 4

CHATML = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\\n' + m['content'] + '<|im_end|>' + '\\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
INST = (
    "{{ bos_token }}{% for m in messages %}"
    "{% if m['role'] == 'user' %}{{ '[INST] ' + m['content'] + ' [/INST]' }}"
    "{% elif m['role'] == 'assistant' %}{{ ' ' + m['content'] | trim + ' ' + eos_token }}"
    "{% else %}{{ raise_exception('Only user and assistant roles are supported!') }}{% endif %}{% endfor %}"
)


def byte_level(
    folder: Path,
    *,
    template: str | None = CHATML,
    vocab_size: int = 400,
    specials: Sequence[str] = (),
    eos: str = "<|im_end|>",
) -> Path:
    """Byte-level BPE with ChatML markers, as Qwen and the bundled model have it. `specials`: further special tokens."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=["<|endoftext|>", "<|im_start|>", "<|im_end|>", *specials],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    return _write(folder, tokenizer, {"eos_token": eos, "pad_token": "<|endoftext|>"}, template)


def metaspace(folder: Path, *, byte_fallback: bool = True, template: str | None = INST) -> Path:
    """A SentencePiece-like BPE with `▁` for spaces and a beginning-of-text token, as Llama 2 has it."""
    specials = ["<unk>", "<s>", "</s>"]
    alphabet = [f"<0x{byte:02X}>" for byte in range(256)] if byte_fallback else []
    trained = Tokenizer(models.BPE(unk_token="<unk>"))
    trained.pre_tokenizer = pre_tokenizers.Metaspace()
    trained.train_from_iterator(
        CORPUS[:2] + CORPUS[3:4],
        trainers.BpeTrainer(vocab_size=200, special_tokens=specials + alphabet, show_progress=False),
    )
    state = json.loads(trained.to_str())
    state["added_tokens"] = []
    state["model"] |= {"byte_fallback": byte_fallback, "fuse_unk": True}
    tokenizer = Tokenizer.from_str(json.dumps(state))
    tokenizer.add_special_tokens([AddedToken(s, special=True, normalized=False) for s in specials])
    if byte_fallback:
        tokenizer.pre_tokenizer = None
        tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
        tokenizer.decoder = decoders.Sequence(
            [
                decoders.Replace("▁", " "),
                decoders.ByteFallback(),
                decoders.Fuse(),
                decoders.Strip(content=" ", left=1, right=0),
            ]
        )
    else:
        tokenizer.decoder = decoders.Metaspace()
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A", pair="<s> $A <s> $B", special_tokens=[("<s>", tokenizer.token_to_id("<s>"))]
    )
    return _write(folder, tokenizer, {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}, template)


def _write(folder: Path, tokenizer: Tokenizer, named: dict[str, str], template: str | None) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    config: dict[str, object] = {"tokenizer_class": "PreTrainedTokenizerFast", **named}
    if template is not None:
        config["chat_template"] = template
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder


def token_id(tokenizer: text.Tokenizer, text_of_token: str) -> int | None:
    """Find the token that stands for a text, or None."""
    return next((i for i in range(tokenizer.vocab_size) if tokenizer.token_bytes(i) == text_of_token.encode()), None)


def render(tokenizer: text.Tokenizer, messages: Sequence[Message], tools: Sequence[Message] = ()) -> str:
    """Write messages with the model's template, without hiding markers in them."""
    assert tokenizer.chat_template is not None
    return tokenizer.chat_template.render(flatten_messages(messages), tools=tools)
