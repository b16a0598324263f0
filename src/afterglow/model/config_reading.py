"""What the readers of `config.json` share: required keys, activations, windows. And what a family is."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from afterglow.errors import ModelError
from afterglow.model.names import Names
from afterglow.model.spec import Activation, ModelSpec

Config = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Family:
    """The way to read `config.json` of one model type. An encoder's `read` gives all fields of its shape; `usual`, `renamed` and
    `honoured` are for decoders."""

    architecture: str
    read: Callable[[Config], dict[str, Any]]  # fields that differ from Llama's reading
    names: Names | Callable[[ModelSpec], Names] = Names()
    usual: Config = field(default_factory=dict)  # values of keys that are left out
    renamed: Mapping[str, str] = field(default_factory=dict)  # its names of common keys
    honoured: frozenset[str] = frozenset()  # keys of refusals.UNSUPPORTED that this family does honour

    def names_of(self, spec: ModelSpec) -> Names:
        return self.names(spec) if callable(self.names) else self.names


MOST_LAYERS = 100_000
ACTIVATIONS: dict[str, Activation] = {
    "silu": "silu",
    "swish": "silu",
    "gelu": "gelu",
    "gelu_python": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_fast": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "relu": "relu",
}


@contextlib.contextmanager
def reading() -> Iterator[None]:
    """Turn what a value of another kind than its key has leads to into one line. Raises: ModelError."""
    try:
        yield
    except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
        raise ModelError(f"a value in config.json is damaged ({error}); download the model again") from None


def need(config: Config, key: str) -> Any:
    """Return the value of a required key. Raises: ModelError if it is missing."""
    if config.get(key) is None:
        raise ModelError(f"config.json lacks {key!r}; the model directory is incomplete")
    return config[key]


def need_layers(config: Config) -> int:
    """Return the number of layers. Raises: ModelError if it is missing or no model's: lists of that length are built next."""
    layers = need(config, "num_hidden_layers")
    if type(layers) is not int or not 1 <= layers <= MOST_LAYERS:
        raise ModelError(
            f"num_hidden_layers in config.json must be a number from 1 to {MOST_LAYERS}, not {layers!r:.60}"
        )
    return layers


def read_activation(name: Any) -> Activation:
    """Return our name of an activation. Raises: ModelError if it is not known."""
    if name not in ACTIVATIONS:
        raise ModelError(f"activation {name!r} is not supported; supported are {', '.join(ACTIVATIONS)}")
    return ACTIVATIONS[name]


def every_layer(config: Config) -> Iterable[int] | None:
    """Return all layers; None where `max_window_layers` is negative: it is not known which of them have a window."""
    return range(need(config, "num_hidden_layers")) if config.get("max_window_layers", 0) >= 0 else None


def windowed(fields: dict[str, Any], window: int | None, layers: Iterable[int] | None) -> dict[str, Any]:
    """Return `fields` with a sliding window in these `layers`. None: it is not known in which; then contexts end with the window, since
    within it windowed and full attention are the same."""
    if window is None or window >= fields.get("position_limit", 1 << 62):
        return fields
    if layers is not None:
        sliding = tuple(layers)
        return fields | {"window": window, "sliding": sliding} if sliding else fields
    reason = f"sliding-window attention ({window} tokens) is not supported"
    return fields | {"position_limit": window, "position_limit_reason": reason}


def head_dim(config: Config) -> int:
    return int(config.get("head_dim") or need(config, "hidden_size") // need(config, "num_attention_heads"))


def token_ids(value: Any, where: str = "bos_token_id or eos_token_id in config.json") -> tuple[int, ...]:
    """Return one id, several, or none as a tuple. Raises: ModelError, which names `where`, if one is no whole number."""
    if value is None:
        return ()
    ids = tuple(value) if isinstance(value, list | tuple) else (value,)
    if not all(isinstance(each, int) and not isinstance(each, bool) for each in ids):
        raise ModelError(f"{where} must be a token id or a list of them, not {value!r:.60}")
    return ids


def refuse_architecture(config: Config, expected: str) -> None:
    """Refuse a checkpoint of another class than `expected`, or with code of its own. Raises: ModelError."""
    for name in config.get("architectures") or ():
        if name.lower() != expected.lower():
            raise ModelError(
                f"architecture {name!r} of model type {config['model_type']!r} writes no text, or is not known here; "
                f"use a checkpoint that was saved as {expected}"
            )
    own_code = (config.get("auto_map") or {}).get("AutoModelForCausalLM")
    if own_code and own_code.rsplit(".", 1)[-1] != expected:
        raise ModelError(f"the model brings its own code ({own_code}), which is never run; use a plain checkpoint")
