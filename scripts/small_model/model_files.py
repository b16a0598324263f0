"""The model as a transformers directory: written and read."""

from __future__ import annotations

import json
import os
from dataclasses import asdict
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer

from scripts.small_model.model import ModelConfig, SmallLlama
from scripts.small_model.tokenizer import BOS, CHAT_TEMPLATE, END, PAD


def atomic_write(path: Path, data: bytes) -> None:
    """Write a file so that readers see the old or the new one, never a part."""
    temporary = path.with_name(path.name + ".tmp")
    temporary.write_bytes(data)
    os.replace(temporary, path)


def export(model: SmallLlama, tokenizer: Tokenizer, out: Path) -> None:
    """Write a transformers directory."""
    out.mkdir(parents=True, exist_ok=True)
    c = model.config
    state = {("model." + k): v.detach().to("cpu", torch.bfloat16).contiguous() for k, v in model.state_dict().items()}
    temporary = out / "model.safetensors.tmp"
    save_file(state, str(temporary), metadata={"format": "pt"})
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        **asdict(c),
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
        "attention_dropout": 0.0,
        "initializer_range": 0.02,
        "rope_parameters": {"rope_theta": c.rope_theta, "rope_type": "default"},
        "tie_word_embeddings": True,
        "use_cache": True,
        "bos_token_id": BOS,
        "eos_token_id": END,
        "pad_token_id": PAD,
        "dtype": "bfloat16",
        "torch_dtype": "bfloat16",
    }
    tokenizer_config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": "<|bos|>",
        "eos_token": "<|end|>",
        "pad_token": "<|pad|>",
        "additional_special_tokens": ["<|system|>", "<|user|>", "<|assistant|>"],
        "clean_up_tokenization_spaces": False,
        "model_max_length": c.max_position_embeddings,
        "chat_template": CHAT_TEMPLATE,
    }
    generation = {
        "bos_token_id": BOS,
        "eos_token_id": END,
        "pad_token_id": PAD,
        "do_sample": False,
        "max_new_tokens": 64,
    }
    files = {"config.json": config, "tokenizer_config.json": tokenizer_config, "generation_config.json": generation}
    for name, content in files.items():
        atomic_write(out / name, (json.dumps(content, indent=2) + "\n").encode())
    atomic_write(out / "tokenizer.json", (tokenizer.to_str(pretty=False) + "\n").encode())
    temporary.chmod(0o644)
    os.replace(temporary, out / "model.safetensors")


def load(directory: Path) -> tuple[SmallLlama, Tokenizer]:
    """Read a directory that `export` wrote."""
    raw = json.loads((directory / "config.json").read_text())
    names = ModelConfig.__dataclass_fields__
    model = SmallLlama(ModelConfig(**{k: v for k, v in raw.items() if k in names}))
    state = load_file(str(directory / "model.safetensors"))
    model.load_state_dict({k.removeprefix("model."): v.float() for k, v in state.items()})
    return model, Tokenizer.from_file(str(directory / "tokenizer.json"))
