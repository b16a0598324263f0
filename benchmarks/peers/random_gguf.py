"""Writes a GGUF file of random weights of a Llama shape, in any block format, within seconds: blocks are drawn, no floats quantised.

    python -m benchmarks.peers.random_gguf OUT.gguf --block-format Q4_0

The weights have about the spread of trained ones, so that what a model computes with them is finite. Tokens are words (`t259`,
...) and bytes, in the manner of SentencePiece; llama.cpp reads the file as well.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from pathlib import Path

import numpy as np
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType, GGUFWriter, LlamaFileType, TokenType

from afterglow.model.spec import ModelSpec, RopeSpec

SHAPE_1B = ModelSpec(
    family="llama",
    layers=22,
    hidden=2048,
    heads=32,
    kv_heads=4,
    head_dim=64,
    ffn=5632,
    vocab=32000,
    max_positions=2048,
    rope=RopeSpec(dim=64, base=10000.0),
    norm_eps=1e-5,
    bos_id=1,
    eos_ids=(2,),
)
SPREAD = 0.02  # standard deviation of the weights
PIECE = 1 << 22  # bytes of blocks that are drawn at a time

# Where a block has float16 numbers, and each in units of the standard deviation of scale 1: (offset, factor).
_HALVES: dict[str, tuple[tuple[int, float], ...]] = {
    "Q8_0": ((0, 1 / 74),),
    "Q4_0": ((0, 1 / 4.6),),
    "Q4_1": ((0, 1 / 4.6), (2, -7.5 / 4.6)),
    "Q5_0": ((0, 1 / 9.2),),
    "Q5_1": ((0, 1 / 9.2), (2, -15.5 / 9.2)),
    "Q4_K": ((0, 1 / 4.6 / 32), (2, 7.5 / 4.6 / 32)),
    "Q5_K": ((0, 1 / 9.2 / 32), (2, 15.5 / 9.2 / 32)),
    "Q6_K": ((208, 1 / 18.5 / 74),),
    "MXFP4": (),
}
# Bytes that are no random ones: all scales and minima of Q4_K and Q5_K are 32 of 63, the exponent of MXFP4 is -8.
_K_SCALES = [(place, 0xA0) for place in range(4, 12)] + [(place, 0) for place in range(12, 16)]
_FIXED: dict[str, list[tuple[int, int]]] = {"Q4_K": _K_SCALES, "Q5_K": _K_SCALES, "MXFP4": [(0, 120)]}


def random_blocks(rng: np.random.Generator, block_format: str, rows: int, inputs: int) -> np.ndarray:
    """Draw a matrix in blocks: uint8 [rows, bytes of a row]. Scales differ by 20 %."""
    weights, size = GGML_QUANT_SIZES[GGMLQuantizationType[block_format]]
    out = np.empty((rows * (inputs // weights), size), np.uint8)
    for start in range(0, len(out), PIECE // size):
        part = out[start : start + PIECE // size]
        part[:] = np.frombuffer(rng.bytes(part.size), np.uint8).reshape(part.shape)
        about = SPREAD * rng.uniform(0.8, 1.2, len(part))
        for offset, factor in _HALVES[block_format]:
            part[:, offset : offset + 2] = (about * factor).astype("<f2")[:, None].view(np.uint8)
        for place, value in _FIXED.get(block_format, ()):
            part[:, place] = value
    return out.reshape(rows, -1)


def write_random(
    path: Path, spec: ModelSpec, block_format: str, *, head_format: str | None = None, seed: int = 0
) -> None:
    """Write a file of a Llama shape; `head_format`: of the head, if it is another one. A tied head is not written."""
    rng = np.random.default_rng(seed)
    writer = GGUFWriter(path, "llama")
    _describe(writer, spec)
    matrices = dict(_matrices(spec))
    formats = dict.fromkeys(matrices, block_format) | ({"output.weight": head_format} if head_format else {})
    for name, (rows, inputs) in matrices.items():
        if rows == 1:
            writer.add_tensor_info(name, (inputs,), np.dtype(np.float32), inputs * 4)
            continue
        kind = GGMLQuantizationType[formats[name]]
        weights, size = GGML_QUANT_SIZES[kind]
        row_bytes = inputs // weights * size
        writer.add_tensor_info(name, (rows, row_bytes), np.dtype(np.uint8), rows * row_bytes, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    for name, (rows, inputs) in matrices.items():
        if rows == 1:
            writer.write_tensor_data(rng.uniform(0.9, 1.1, inputs).astype(np.float32))
        else:
            writer.write_tensor_data(random_blocks(rng, formats[name], rows, inputs))
    writer.close()


def _matrices(spec: ModelSpec) -> Iterator[tuple[str, tuple[int, int]]]:
    """Yield the tensors by llama.cpp's names, with rows and inputs; norms have one row."""
    width, kv = spec.heads * spec.head_dim, spec.kv_heads * spec.head_dim
    yield "token_embd.weight", (spec.vocab, spec.hidden)
    for layer in range(spec.layers):
        for name, shape in {
            "attn_norm": (1, spec.hidden),
            "attn_q": (width, spec.hidden),
            "attn_k": (kv, spec.hidden),
            "attn_v": (kv, spec.hidden),
            "attn_output": (spec.hidden, width),
            "ffn_norm": (1, spec.hidden),
            "ffn_gate": (spec.ffn, spec.hidden),
            "ffn_up": (spec.ffn, spec.hidden),
            "ffn_down": (spec.hidden, spec.ffn),
        }.items():
            yield f"blk.{layer}.{name}.weight", shape
    yield "output_norm.weight", (1, spec.hidden)
    if not spec.tied_embeddings:
        yield "output.weight", (spec.vocab, spec.hidden)


def _describe(writer: GGUFWriter, spec: ModelSpec) -> None:
    assert spec.rope is not None
    writer.add_name("random weights")
    writer.add_context_length(spec.max_positions)
    writer.add_embedding_length(spec.hidden)
    writer.add_block_count(spec.layers)
    writer.add_feed_forward_length(spec.ffn)
    writer.add_head_count(spec.heads)
    writer.add_head_count_kv(spec.kv_heads)
    writer.add_rope_dimension_count(spec.head_dim)
    writer.add_rope_freq_base(spec.rope.base)
    writer.add_layer_norm_rms_eps(spec.norm_eps)
    writer.add_vocab_size(spec.vocab)
    writer.add_file_type(LlamaFileType.GUESSED)
    special = ["<unk>", "<s>", "</s>"]
    own = [f"<0x{byte:02X}>" for byte in range(256)]
    words = [f"\N{LOWER ONE EIGHTH BLOCK}t{token}" for token in range(len(special) + len(own), spec.vocab)]
    kinds = [TokenType.UNKNOWN, TokenType.CONTROL, TokenType.CONTROL, *[TokenType.BYTE] * 256]
    writer.add_tokenizer_model("llama")
    writer.add_token_list([*special, *own, *words])
    writer.add_token_scores([-float(token) for token in range(spec.vocab)])
    writer.add_token_types([*kinds, *[TokenType.NORMAL] * len(words)])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_unk_token_id(0)
    writer.add_add_bos_token(True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("path", type=Path)
    parser.add_argument("--block-format", default="Q4_0", choices=sorted(_HALVES))
    parser.add_argument("--head-format", choices=sorted(_HALVES), help="of the head (default: the same)")
    parser.add_argument("--tied", action="store_true", help="without a head of its own")
    for name in ("layers", "hidden", "heads", "kv_heads", "ffn", "vocab"):
        parser.add_argument(f"--{name.replace('_', '-')}", type=int, default=getattr(SHAPE_1B, name))
    parser.add_argument("--seed", type=int, default=0)
    given = vars(parser.parse_args())
    path, block_format, head_format, seed = (
        given.pop(name) for name in ("path", "block_format", "head_format", "seed")
    )
    spec = ModelSpec(
        family="llama",
        tied_embeddings=given.pop("tied"),
        head_dim=given["hidden"] // given["heads"],
        max_positions=SHAPE_1B.max_positions,
        rope=RopeSpec(dim=given["hidden"] // given["heads"], base=10000.0),
        norm_eps=SHAPE_1B.norm_eps,
        **given,
    )
    write_random(path, spec, block_format, head_format=head_format, seed=seed)


if __name__ == "__main__":
    main()
