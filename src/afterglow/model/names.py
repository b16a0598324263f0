"""Where the weights of a model are found in its files, and how they lie there."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Names:
    """Module names in the checkpoint, `{l}` being the layer, `{e}` the expert, `{h}` the head; `.weight` and `.bias` are appended.

    `qkv`: q, k and v, or one module of all three: q, k and v one below the other, or, with `grouped`, per KV head its query
    heads, its key and its value.
    `mlp`: gate and up, in two modules or in one; or the first layer of a plain MLP.
    `neighbours`: rotary pairs are neighbours in the rows of q and k; the decoder has them half a head apart.
    `transposed`: matrices of layers are [inputs, outputs].
    `gates_in_turn`: in the first matrix of an expert, gates and the numbers that they let through take turns.
    `sinks`: a tensor, by its whole name.
    """

    embed: str = "model.embed_tokens"
    positions: str = "model.embed_positions"
    attn_norm: str = "model.layers.{l}.input_layernorm"
    attn_after: str = ""
    mlp_norm: str = "model.layers.{l}.post_attention_layernorm"
    mlp_after: str = ""
    qkv: tuple[str, ...] = tuple(f"model.layers.{{l}}.self_attn.{x}_proj" for x in "qkv")
    q_norm: str = "model.layers.{l}.self_attn.q_norm"
    k_norm: str = "model.layers.{l}.self_attn.k_norm"
    out: str = "model.layers.{l}.self_attn.o_proj"
    mlp: tuple[str, ...] = ("model.layers.{l}.mlp.gate_proj", "model.layers.{l}.mlp.up_proj")
    mlp_out: str = "model.layers.{l}.mlp.down_proj"
    router: str = "model.layers.{l}.mlp.gate"
    expert_mlp: tuple[str, ...] = tuple(f"model.layers.{{l}}.mlp.experts.{{e}}.{x}_proj" for x in ("gate", "up"))
    expert_mlp_out: str = "model.layers.{l}.mlp.experts.{e}.down_proj"
    shared_mlp: tuple[str, ...] = tuple(f"model.layers.{{l}}.mlp.shared_expert.{x}_proj" for x in ("gate", "up"))
    shared_mlp_out: str = "model.layers.{l}.mlp.shared_expert.down_proj"
    shared_gate: str = "model.layers.{l}.mlp.shared_expert_gate"
    final_norm: str = "model.norm"
    head: str = "lm_head"
    token_types: str = ""  # encoders only, as is the norm after the embeddings
    embed_norm: str = ""
    grouped: bool = False
    neighbours: bool = False
    transposed: bool = False
    gates_in_turn: bool = False
    sinks: str = ""
