"""A decoder whose layers are modules of transformers: slower than `model.decoder`, and for many more architectures.

A pass goes through all layers at once. Rows of several requests are one flat batch here too, with their own positions.
"""

from __future__ import annotations

import copy
import threading
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers.utils import ModelOutput

from afterglow.errors import ModelError
from afterglow.kernels.rope import LayerRopes
from afterglow.model.decoder import Attend, Decoder, Hidden
from afterglow.model.fallback.handing import HandingCache, Turning
from afterglow.model.spec import ModelSpec


@dataclass(slots=True, eq=False)
class FlatBatch(Hidden):
    """Rows that have not gone through the modules: `x` is empty, `normed` the result. `ids` and `positions`: int64 [rows]."""

    ids: Tensor = torch.empty(0)
    positions: Tensor = torch.empty(0)


@dataclass
class _Outputs(ModelOutput):  # type: ignore[misc]
    """What a head reads of its decoder's outputs."""

    last_hidden_state: Tensor | None = None
    past_key_values: Any = None
    hidden_states: Any = None
    attentions: Any = None
    cross_attentions: Any = None
    router_logits: Any = None


class _Given(nn.Module):
    """What stands for the layers where only the head is to compute: it hands through the rows that it is given."""

    def forward(self, *args: Any, inputs_embeds: Tensor, **kwargs: Any) -> _Outputs:
        return _Outputs(last_hidden_state=inputs_embeds)


class FallbackDecoder(Decoder):
    """A causal language model of transformers, with our attention and our cache."""

    divisible = False

    def __init__(self, spec: ModelSpec, model: Any, turning: Turning) -> None:
        """Take a `model` of class `...ForCausalLM`, in evaluation mode, whose attention is `handing.ATTENTION`."""
        self.spec, self.quantization = spec, "none"
        self.dtype, self.device = model.dtype, model.device
        of_layer = [None if layer in spec.unturned else 0 for layer in range(spec.layers)]
        self.rope = None if turning.table is None else LayerRopes([turning.table], of_layer)
        self._turning = turning
        self._layers_module = getattr(model, model.base_model_prefix)
        self._head_module = _head_of(model)
        self._cache = HandingCache(spec, turning)
        for module in model.modules():
            module.afterglow = self._cache
        self._one_pass = threading.Lock()  # modules find the pass through the one cache

    @property
    def windows(self) -> dict[int, int]:
        """Return the windows that modules have asked for, by layer."""
        return self._cache.windows

    @property
    def arithmetic(self) -> str:
        """See `Decoder`."""
        import transformers

        order = "as they are" if self.rope is None else "turned back"
        reordered = "" if self._turning.order is None else ", reordered"
        return f"transformers {transformers.__version__}, keys {order}{reordered}, unturned {self.spec.unturned}"

    @torch.inference_mode()
    def begin(self, ids: Tensor, positions: Tensor) -> Hidden:
        """See `Decoder`. The modules embed the rows later."""
        empty = torch.empty(0, dtype=self.dtype, device=self.device)
        return FlatBatch(empty, empty, 0, ids, positions)

    @torch.inference_mode()
    def go_on(self, hidden: Hidden, attend: Attend, wanted: Tensor | None = None, stop: int | None = None) -> None:
        """Take the rows through all layers. Such a pass cannot be left between layers."""
        assert isinstance(hidden, FlatBatch)
        assert stop is None or stop == self.spec.layers, "a pass through modules cannot be left between layers"
        with self._one_pass, self._cache.passing(hidden.positions, attend):
            out = self._layers_module(
                input_ids=hidden.ids[None],
                position_ids=hidden.positions[None],
                past_key_values=self._cache,
                use_cache=True,
            )
            if self._cache.layers_done != self.spec.layers:
                raise ModelError(
                    f"{self._cache.layers_done} layers attended, and its config describes {self.spec.layers}"
                )
        rows = out.last_hidden_state[0]
        hidden.normed = rows if wanted is None else rows[wanted]
        hidden.layer = self.spec.layers

    @torch.inference_mode()
    def logits(self, hidden: Tensor) -> Tensor:
        """See `Decoder`. The model's own head computes them, with its scales and caps."""
        logits: Tensor = self._head_module(inputs_embeds=hidden[None], use_cache=False).logits[0]
        return logits.float()


def _head_of(model: Any) -> Any:
    """Return a model with the head of `model`, and `_Given` for its layers. Weights are shared."""
    head = copy.copy(model)
    head._modules = {**model._modules, model.base_model_prefix: _Given()}
    return head
