"""Make small engines over random models of every family, and ask them."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import contextmanager
from itertools import count
from pathlib import Path
from typing import Any

import pytest

from afterglow.config import CacheConfig, EngineConfig
from afterglow.engine.engine import Completion, Engine
from afterglow.request import Output, Request, SamplingParams
from tests.engine.fallback_kit import fallback_config

VOCAB = 20  # as many as log-probabilities a request can ask for: the whole distribution is compared

LLAMA: dict[str, Any] = {
    "model_type": "llama",
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-5,
    "hidden_act": "silu",
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
    "eos_token_id": None,
    "bos_token_id": None,
    "pad_token_id": None,
}

MOE = {"num_experts": 5, "num_experts_per_tok": 2, "moe_intermediate_size": 16}

FAMILIES: dict[str, dict[str, Any]] = {
    "llama": LLAMA,
    "mistral": {**LLAMA, "model_type": "mistral", "sliding_window": None},
    "mistral-window": {**LLAMA, "model_type": "mistral", "head_dim": 16, "sliding_window": 60},
    "qwen2": {**LLAMA, "model_type": "qwen2"},
    "qwen3": {**LLAMA, "model_type": "qwen3", "head_dim": 8},
    "phi": {
        **LLAMA,
        "model_type": "phi",
        "num_key_value_heads": 4,
        "hidden_act": "gelu_new",
        "partial_rotary_factor": 0.5,
        "layer_norm_eps": 1e-5,
    },
    "mixtral": {**LLAMA, "model_type": "mixtral", "num_local_experts": 4},
    "qwen2_moe": {**LLAMA, **MOE, "model_type": "qwen2_moe", "shared_expert_intermediate_size": 24},
    "qwen3_moe": {**LLAMA, **MOE, "model_type": "qwen3_moe", "head_dim": 8, "norm_topk_prob": True},
    "olmoe": {**LLAMA, **MOE, "model_type": "olmoe"},
    "gpt_oss": {**LLAMA, "model_type": "gpt_oss", "head_dim": 16, "num_local_experts": 4, "sliding_window": 40},
    "phi3": {**LLAMA, "model_type": "phi3", "partial_rotary_factor": 0.5},
    "smollm3": {**LLAMA, "model_type": "smollm3", "no_rope_layers": [1, 0]},
    "olmo2": {**LLAMA, "model_type": "olmo2"},
    "granite": {
        **LLAMA,
        "model_type": "granite",
        "embedding_multiplier": 3.0,
        "attention_multiplier": 0.3,
        "residual_multiplier": 0.4,
        "logits_scaling": 2.5,
    },
    "glm": {**LLAMA, "model_type": "glm", "head_dim": 8},
    "glm4": {**LLAMA, "model_type": "glm4", "head_dim": 8},
    "ministral": {
        **LLAMA,
        "model_type": "ministral",
        "head_dim": 8,
        "sliding_window": 512,
        "layer_types": ["sliding_attention", "full_attention"],
    },
    "ministral3": {
        **{key: value for key, value in LLAMA.items() if key != "rope_theta"},
        "model_type": "ministral3",
        "head_dim": 8,
        "rope_parameters": {
            "rope_type": "yarn",
            "rope_theta": 10000.0,
            "factor": 2.0,
            "original_max_position_embeddings": 512,
            "beta_fast": 32.0,
            "beta_slow": 1.0,
            "mscale": 1.0,
            "mscale_all_dim": 1.0,
            "llama_4_scaling_beta": 0.1,
        },
    },
    "cohere": {**LLAMA, "model_type": "cohere", "use_qk_norm": True, "logit_scale": 0.5, "layer_norm_eps": 1e-5},
    "stablelm": {
        **LLAMA,
        "model_type": "stablelm",
        "qk_layernorm": True,
        "use_qkv_bias": True,
        "use_parallel_residual": True,
        "partial_rotary_factor": 0.5,
        "layer_norm_eps": 1e-5,
    },
    "starcoder2": {**LLAMA, "model_type": "starcoder2", "hidden_act": "gelu_pytorch_tanh", "norm_epsilon": 1e-5},
    "gpt_neox": {
        **LLAMA,
        "model_type": "gpt_neox",
        "num_key_value_heads": 4,
        "hidden_act": "gelu",
        "rotary_pct": 0.5,
        "layer_norm_eps": 1e-5,
    },
    "gpt2": {
        "model_type": "gpt2",
        "vocab_size": VOCAB,
        "n_embd": 32,
        "n_layer": 2,
        "n_head": 4,
        "n_positions": 512,
        "bos_token_id": None,
        "eos_token_id": None,
    },
    "falcon": {
        "model_type": "falcon",
        "vocab_size": VOCAB,
        "hidden_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_kv_heads": 2,
        "new_decoder_architecture": True,
        "multi_query": True,
        "parallel_attn": True,
        "bias": False,
        "alibi": False,
        "max_position_embeddings": 512,
        "eos_token_id": None,
        "bos_token_id": None,
    },
    "gemma": {**LLAMA, "model_type": "gemma", "head_dim": 8, "hidden_act": "gelu_pytorch_tanh"},
    # Windows shorter than what the tests ask about. Heads of 16 numbers go through the compiled kernels.
    "gemma2": {**LLAMA, "model_type": "gemma2", "head_dim": 16, "sliding_window": 40, "attn_logit_softcapping": 2.0},
    "gemma3_text": {**LLAMA, "model_type": "gemma3_text", "head_dim": 8, "sliding_window": 40, "num_hidden_layers": 6},
    "olmo3": {**LLAMA, "model_type": "olmo3", "hidden_size": 64, "sliding_window": 70, "num_hidden_layers": 4},
    "exaone4": {**LLAMA, "model_type": "exaone4", "head_dim": 16, "sliding_window": 33, "num_hidden_layers": 4},
    "cohere2": {
        **LLAMA,
        "model_type": "cohere2",
        "hidden_size": 64,
        "sliding_window": 20,
        "num_hidden_layers": 4,
        "logit_scale": 0.5,
        "layer_norm_eps": 1e-5,
    },
    "opt": {
        "model_type": "opt",
        "vocab_size": VOCAB,
        "hidden_size": 32,
        "ffn_dim": 48,
        "word_embed_proj_dim": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "max_position_embeddings": 512,
        "activation_function": "relu",
        "do_layer_norm_before": True,
        "eos_token_id": None,
        "bos_token_id": None,
    },
}

_ids = count()


def submit_at_once(engine: Engine, asked: Iterable[tuple[Request, Callable[[Output], object]]]) -> None:
    """Submit requests with their sinks from the engine's thread, which takes all of them in before its next step: from another
    thread, which may be slow, one may have ended when the next one comes."""
    engine.ask(lambda: [engine.submit(request, sink) for request, sink in asked])


class Handle:
    """An engine under test and the shortest way to ask it something."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine

    def ask(self, prompt: list[int], reuse: bool = True, max_tokens: int = 4, **sampling: Any) -> Completion:
        params = SamplingParams(max_tokens=max_tokens, temperature=0, logprobs=VOCAB, ignore_eos=True, **sampling)
        (done,) = self.engine.generate([Request(f"t{next(_ids)}", prompt, params, reuse=reuse)])
        return done


@pytest.fixture
def start() -> Iterator[Callable[..., Handle]]:
    """Start engines that are closed, and whose plan is checked, when the test ends."""
    with starting() as begin:
        yield begin


@contextmanager
def starting() -> Iterator[Callable[..., Handle]]:
    """Start engines as `start` does, in a process without fixtures."""
    engines: list[Engine] = []

    def begin(model: str | Path, cache_dir: Path | None = None, **options: Any) -> Handle:
        cache = {
            "device_cache": 1024**2 * 4,
            "host_cache": 1024**2 * 4,
            "disk_cache": 1024**2 * 64 if cache_dir else 0,
            "cache_dir": cache_dir,
            "source": "load",  # models this small are always faster to compute than to load
            "warm_start": False,
        }
        cache.update({k: options.pop(k) for k in list(options) if k in CacheConfig.__dataclass_fields__})
        engine = Engine.load(model, EngineConfig(cache=CacheConfig(**cache), **options))
        engine.start()
        engines.append(engine)
        return Handle(engine)

    yield begin
    for engine in engines:
        assert engine.loop.failure is None
        engine.close(flush=False)
        engine.parts.scheduler.check()


# Each of these differs from the others in how it attends or in what follows; the rest repeat them, in the long runs.
QUICK = (
    "llama",
    "mistral",
    "qwen2",
    "qwen3",
    "falcon",
    "phi",
    "opt",
    "cohere",
    "glm4",
    "mixtral",
    "smollm3",
    "gemma2",
    "gemma3_text",
)
# Windows, caps, sinks: not what importance is computed by.
OTHER_SCORES = ("mistral-window", "gemma2", "gemma3_text", "olmo3", "exaone4", "cohere2", "gpt_oss")
# What they do others do in every run.
REPEATED = ("glm", "ministral", "ministral3", "mistral-window", "gemma", "olmo3", "exaone4", "cohere2")


def in_turn(families: Iterable[str], quick: Collection[str] = QUICK) -> list[Any]:
    """List families as parameters of a test; those that are not `quick` are long."""
    return [name if name in quick else pytest.param(name, marks=pytest.mark.long) for name in families]


def write_model(config: dict[str, Any], folder: Path) -> Path:
    """Write a random model, as transformers does."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(7)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**config))
    for parameter in model.parameters():  # biases and norms start as constants: make them matter
        torch.nn.init.normal_(parameter, std=0.3) if parameter.ndim > 1 else parameter.data.add_(
            torch.randn_like(parameter) * 0.1
        )
    model.save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def model_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """A random model of a family, as a Hugging Face directory written by transformers itself."""
    made: dict[str, Path] = {}

    def make(family: str) -> Path:
        if family not in made:
            config = FAMILIES[family] if family in FAMILIES else fallback_config(family, LLAMA)
            made[family] = write_model(config, tmp_path_factory.mktemp(family))
        return made[family]

    return make
