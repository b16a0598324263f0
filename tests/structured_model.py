"""A small model with random weights and a tokenizer, for replies that must follow a grammar."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import torch
from safetensors.torch import save_file

from afterglow.text import Tokenizer
from tests.text import toys

HIDDEN, HEADS, INNER, LAYERS = 32, 4, 48, 2


def random_model(
    folder: Path,
    *,
    spread: float = 0.3,
    context: int = 2048,
    template: str = toys.CHATML,
    specials: Sequence[str] = (),
    eos: str = "<|im_end|>",
) -> Path:
    """Write a Llama of random weights with 2 layers, and a byte-level tokenizer of 400 tokens. `spread`: of the weights.
    `specials`: further special tokens."""
    toys.byte_level(folder, template=template, specials=specials, eos=eos)
    tokenizer = Tokenizer(folder)
    vocab = tokenizer.vocab_size
    (end,) = tokenizer.encode(eos, add_special_tokens=False)
    config = {
        "model_type": "llama",
        "architectures": ["LlamaForCausalLM"],
        "vocab_size": vocab,
        "hidden_size": HIDDEN,
        "intermediate_size": INNER,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": HEADS,
        "num_key_value_heads": HEADS // 2,
        "max_position_embeddings": context,
        "rms_norm_eps": 1e-5,
        "hidden_act": "silu",
        "rope_theta": 10000.0,
        "tie_word_embeddings": False,
        "eos_token_id": end,
        "bos_token_id": None,
        "torch_dtype": "float32",
    }
    (folder / "config.json").write_text(json.dumps(config))
    random = torch.Generator().manual_seed(7)

    def matrix(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=random) * spread

    weights = {"model.embed_tokens.weight": matrix(vocab, HIDDEN), "lm_head.weight": matrix(vocab, HIDDEN)}
    weights["model.norm.weight"] = torch.ones(HIDDEN)
    for layer in range(LAYERS):
        at = f"model.layers.{layer}"
        for name, rows in (("q", HIDDEN), ("k", HIDDEN // 2), ("v", HIDDEN // 2), ("o", HIDDEN)):
            weights[f"{at}.self_attn.{name}_proj.weight"] = matrix(rows, HIDDEN)
        weights[f"{at}.mlp.gate_proj.weight"] = matrix(INNER, HIDDEN)
        weights[f"{at}.mlp.up_proj.weight"] = matrix(INNER, HIDDEN)
        weights[f"{at}.mlp.down_proj.weight"] = matrix(HIDDEN, INNER)
        weights[f"{at}.input_layernorm.weight"] = torch.ones(HIDDEN)
        weights[f"{at}.post_attention_layernorm.weight"] = torch.ones(HIDDEN)
    save_file(weights, folder / "model.safetensors")
    return folder
