"""The bidirectional encoders: BERT's family, from `config.json` to an EncoderSpec and the names of its weights.

A row says how a family differs from BERT. A key that changes the arithmetic and is not honoured is refused by name, as
for decoders.
"""

from __future__ import annotations

from typing import Any

from afterglow.errors import ModelError
from afterglow.model.config_reading import Config, Family, need, read_activation, reading
from afterglow.model.names import Names
from afterglow.model.refusals import refuse_keys
from afterglow.model.spec import EncoderSpec

# What a checkpoint may have been saved as: the encoder alone, or below a head that is not needed. Heads that make
# something else of the states (classes, answers) belong to models whose plain states mean little.
HEADS = ("Model", "ForMaskedLM", "ForPreTraining")


def encoder_from_config(config: Config) -> tuple[EncoderSpec, Names]:
    """Return the spec and weight names of a parsed `config.json` whose `model_type` is one of ENCODERS.

    Raises: ModelError that names the key that is missing or not honoured.
    """
    with reading():
        return _read(config, ENCODERS[config["model_type"]])


def _read(config: Config, family: Family) -> tuple[EncoderSpec, Names]:
    kind = config["model_type"]
    refuse_keys(config, frozenset(("is_causal",)))  # which is false, and right
    known = [family.architecture + head for head in HEADS]
    for name in config.get("architectures") or ():
        if name not in known:
            raise ModelError(
                f"architecture {name!r} does not embed; for model type {kind!r} it must be {', '.join(known)}"
            )
    if config.get("is_decoder"):
        raise ModelError(f"config.json says is_decoder = True, and a {kind} model is only known as an encoder")
    positions = config.get("position_embedding_type") or "absolute"
    if positions != "absolute":
        raise ModelError(f"{positions!r} positions are not supported for {kind} models, only 'absolute' ones are")
    dtype = str(config.get("dtype") or config.get("torch_dtype") or "float32").removeprefix("torch.")
    spec = EncoderSpec(
        family=kind,
        vocab=need(config, "vocab_size"),
        dtype=dtype,
        positions="learned",
        norm="layer",
        gated_mlp=False,
        qkv_bias=True,
        out_bias=True,
        mlp_bias=True,
        tied_embeddings=True,
        **family.read(config),
    )
    return spec, family.names_of(spec)


def _bert(config: Config) -> dict[str, Any]:
    hidden, heads = need(config, "hidden_size"), need(config, "num_attention_heads")
    if hidden % heads:
        raise ModelError(f"a hidden size of {hidden} is not a multiple of {heads} heads; config.json is damaged")
    return {
        "layers": need(config, "num_hidden_layers"),
        "hidden": hidden,
        "heads": heads,
        "kv_heads": heads,
        "head_dim": hidden // heads,
        "ffn": need(config, "intermediate_size"),
        "max_positions": config.get("max_position_embeddings") or 512,
        "norm_eps": config.get("layer_norm_eps", 1e-12),
        "activation": read_activation(config.get("hidden_act", "gelu")),
        "token_types": config.get("type_vocab_size", 2),
    }


def _roberta(config: Config) -> dict[str, Any]:
    """Read RoBERTa: positions begin after the padding token's id, and the table has as many rows more."""
    padding = config.get("pad_token_id")
    offset = (1 if padding is None else padding) + 1
    rows = need(config, "max_position_embeddings")
    return _bert(config) | {"position_offset": offset, "max_positions": rows - offset}


def _distilbert(config: Config) -> dict[str, Any]:
    config = {key: value for key, value in config.items() if value is not None}
    hidden = config.get("dim", 768)
    return _bert(
        {
            "num_hidden_layers": config.get("n_layers", 6),
            "hidden_size": hidden,
            "num_attention_heads": config.get("n_heads", 12),
            "intermediate_size": config.get("hidden_dim", 4 * hidden),
            "hidden_act": config.get("activation", "gelu"),
            "type_vocab_size": 0,
        }
    ) | {"max_positions": config.get("max_position_embeddings", 512)}


def _bert_names(outer: str) -> Names:
    """Return the names of BERT's weights. `outer`: the module's name in checkpoints with a head; the bare model lacks it."""
    layer = outer + ".encoder.layer.{l}."
    return Names(
        embed=f"{outer}.embeddings.word_embeddings",
        positions=f"{outer}.embeddings.position_embeddings",
        token_types=f"{outer}.embeddings.token_type_embeddings",
        embed_norm=f"{outer}.embeddings.LayerNorm",
        attn_norm=layer + "attention.output.LayerNorm",
        mlp_norm=layer + "output.LayerNorm",
        qkv=tuple(f"{layer}attention.self.{x}" for x in ("query", "key", "value")),
        out=layer + "attention.output.dense",
        mlp=(layer + "intermediate.dense",),
        mlp_out=layer + "output.dense",
    )


_LAYER = "distilbert.transformer.layer.{l}."
_DISTILBERT_NAMES = Names(
    embed="distilbert.embeddings.word_embeddings",
    positions="distilbert.embeddings.position_embeddings",
    embed_norm="distilbert.embeddings.LayerNorm",
    attn_norm=_LAYER + "sa_layer_norm",
    mlp_norm=_LAYER + "output_layer_norm",
    qkv=tuple(f"{_LAYER}attention.{x}_lin" for x in "qkv"),
    out=_LAYER + "attention.out_lin",
    mlp=(_LAYER + "ffn.lin1",),
    mlp_out=_LAYER + "ffn.lin2",
)

# Architectures are the class's name without the head.
ENCODERS: dict[str, Family] = {
    "bert": Family("Bert", _bert, _bert_names("bert")),
    "roberta": Family("Roberta", _roberta, _bert_names("roberta")),
    "xlm-roberta": Family("XLMRoberta", _roberta, _bert_names("roberta")),
    "distilbert": Family("DistilBert", _distilbert, _DISTILBERT_NAMES),
}
