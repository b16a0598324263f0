"""GGUF files as files: metadata and tensors as the library's own reader has them, split models, and damage of every kind."""

from __future__ import annotations

import struct
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from gguf import GGMLQuantizationType, GGUFReader, GGUFWriter
from gguf.quants import quantize

from afterglow.errors import ModelError
from afterglow.gguf_file import is_gguf, open_gguf, part_paths, read_metadata

TEXTS = ["<s>", "", "Ġthe", "ü", "a b"]


def weights(seed: int, *shape: int) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape, dtype=np.float32)


def write(path: Path, **split: int) -> Path:
    """Write a small file with values of every kind and tensors of four types."""
    writer = GGUFWriter(path, "llama", split_max_tensors=split.get("tensors", 0))
    writer.add_array("tokenizer.ggml.tokens", TEXTS)
    writer.add_array("tokenizer.ggml.scores", [0.5, -1.0, 2.0])
    writer.add_array("tokenizer.ggml.token_type", [3, 1, 1, 1, 1])
    writer.add_bool("tokenizer.ggml.add_bos_token", True)
    writer.add_float32("llama.rope.freq_base", 5e5)
    writer.add_chat_template("{{ messages }}")
    for number, kind in enumerate(("F32", "Q4_0", "Q8_0", "F16")):
        dense = weights(number, 6, 64)
        quantised = quantize(dense, GGMLQuantizationType[kind])
        writer.add_tensor(f"blk.{number}.weight", quantised, raw_dtype=GGMLQuantizationType[kind])
    writer.add_tensor("norm.weight", weights(9, 64))
    writer.write_header_to_file(path)
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.fixture
def small(tmp_path: Path) -> Path:
    return write(tmp_path / "small.gguf")


def test_metadata_is_as_the_library_reads_it(small: Path) -> None:
    found = read_metadata(small)
    fields = GGUFReader(small).fields
    expected = {name: field.contents() for name, field in fields.items() if not name.startswith("GGUF.")}
    assert dict(found) == expected
    assert found["tokenizer.ggml.tokens"] == TEXTS
    assert "tokenizer.ggml.merges" not in found


def test_tensors_are_the_bytes_of_the_library(small: Path) -> None:
    found = open_gguf(small).tensors
    tensors = GGUFReader(small).tensors
    assert list(found) == [tensor.name for tensor in tensors]
    for tensor in tensors:
        mine = found[tensor.name]
        assert mine.blocks.tobytes() == tensor.data.tobytes()
        assert mine.block_format == tensor.tensor_type.name
        assert mine.shape == tuple(reversed(tensor.shape.tolist()))
    assert found["blk.1.weight"].blocks.shape == (6, 64 // 32 * 18)
    assert found["norm.weight"].blocks.shape == (1, 256)


def test_a_split_model_is_one_file(tmp_path: Path) -> None:
    whole = open_gguf(write(tmp_path / "small.gguf"))
    write(tmp_path / "parts.gguf", tensors=2)
    first = tmp_path / "parts-00001-of-00003.gguf"
    split = open_gguf(first)
    assert [path.name for path in split.paths] == [f"parts-0000{n}-of-00003.gguf" for n in (1, 2, 3)]
    assert split.metadata["tokenizer.ggml.tokens"] == TEXTS
    assert list(split.tensors) == list(whole.tensors)
    assert all(split.tensors[name].blocks.tobytes() == whole.tensors[name].blocks.tobytes() for name in whole.tensors)


def test_parts_that_are_missing_late_or_renamed(tmp_path: Path) -> None:
    write(tmp_path / "parts.gguf", tensors=2)
    first, second, third = (tmp_path / f"parts-0000{n}-of-00003.gguf" for n in (1, 2, 3))
    with pytest.raises(ModelError, match=r"is part 2 of 3; name the first, parts-00001-of-00003\.gguf"):
        open_gguf(second)
    third.rename(tmp_path / "lone.gguf")
    with pytest.raises(ModelError, match=r"split into 3 files, and parts-00003-of-00003\.gguf is missing"):
        part_paths(first)
    with pytest.raises(ModelError, match="is part 3 of a model of 3 files, which must be named"):
        open_gguf(tmp_path / "lone.gguf")
    write(tmp_path / "other.gguf").rename(third)
    with pytest.raises(ModelError, match="is in two parts of the model"):
        open_gguf(first)


@pytest.mark.parametrize("name", ["m-00001-of-00000.gguf", "m-00000-of-00000.gguf", "m-00003-of-00002.gguf"])
def test_a_name_of_a_part_that_cannot_be_is_refused(small: Path, name: str) -> None:
    path = small.rename(small.with_name(name))
    with pytest.raises(
        ModelError, match=r"is named as part \d of \d, which is impossible; give the file its name back"
    ):
        open_gguf(path)


def test_every_truncation_is_refused(small: Path, tmp_path: Path) -> None:
    data = small.read_bytes()
    header = open_gguf(small).tensors["blk.0.weight"].blocks.tobytes()
    start = data.index(header)
    cut = tmp_path / "cut.gguf"
    for length in [*range(0, start, 7), *range(start, len(data) - 256, 97), len(data) - 256 + 255]:
        cut.write_bytes(data[:length])
        with pytest.raises(ModelError, match=r"truncated|no GGUF file|its version is 0") as caught:
            open_gguf(cut)
        assert "\n" not in str(caught.value)


def test_foreign_files_are_refused(small: Path, tmp_path: Path) -> None:
    foreign = tmp_path / "foreign.gguf"
    data = small.read_bytes()
    for start, message in [
        (b"PK\3\4" + bytes(60), r"no GGUF file \(it begins with b'PK"),
        (b"", "no GGUF file"),
        (b"GGUF" + struct.pack("<I", 1), "its version is 1"),
        (b"GGUF" + struct.pack(">I", 3), "big-endian"),
        (b"GGUF" + struct.pack("<IQQ", 3, 1 << 60, 1 << 60), "truncated or damaged"),
    ]:
        foreign.write_bytes(start)
        with pytest.raises(ModelError, match=message):
            open_gguf(foreign)
    with pytest.raises(ModelError, match="no such GGUF file"):
        open_gguf(tmp_path / "absent.gguf")
    foreign.write_bytes(data.replace(b"blk.2.weight", b"blk.1.weight"))
    with pytest.raises(ModelError, match="duplicated tensor"):
        open_gguf(foreign)
    foreign.write_bytes(data.replace("ü".encode(), b"\xff\xff"))
    with pytest.raises(ModelError, match=r"tokenizer\.ggml\.tokens is not UTF-8"):
        read_metadata(foreign)["tokenizer.ggml.tokens"]


def test_an_unknown_block_type_is_named(small: Path) -> None:
    data = bytearray(small.read_bytes())
    at = data.index(b"blk.1.weight") + len("blk.1.weight") + 4 + 16  # after the number of sizes and both sizes
    assert struct.unpack_from("<I", data, at) == (GGMLQuantizationType.Q4_0,)
    struct.pack_into("<I", data, at, 999)
    small.write_bytes(data)
    with pytest.raises(ModelError, match=r"blk\.1\.weight has the unknown block type 999"):
        open_gguf(small)


def test_a_tensor_without_weights_is_damage(small: Path, tmp_path: Path) -> None:
    data = small.read_bytes()
    at = data.index(b"blk.1.weight") + len("blk.1.weight") + 4
    for place in (at, at + 8):
        empty = tmp_path / "empty.gguf"
        empty.write_bytes(data[:place] + bytes(8) + data[place + 8 :])
        with pytest.raises(ModelError, match=r"blk\.1\.weight has the shape \[.*: damaged"):
            open_gguf(empty)


@pytest.mark.parametrize("name", ["split.no", "split.count", "split.tensors.count"])
def test_a_split_that_is_no_number_is_damage(name: str, tmp_path: Path) -> None:
    path = tmp_path / "odd.gguf"
    writer = GGUFWriter(path, "llama")
    writer.add_string(name, "many")
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with pytest.raises(ModelError, match=rf"{name} = 'many'; it must be a whole number"):
        open_gguf(path)


def test_tensors_beyond_4_gib_of_a_file_that_names_its_alignment(tmp_path: Path) -> None:
    path, rows = tmp_path / "large.gguf", (4 << 30) // 1088 + 1
    writer = GGUFWriter(path, "llama")
    writer.add_custom_alignment(64)
    for name, shape in {"large": (rows, 1088), "last": (2, 34)}.items():
        writer.add_tensor_info(
            name, shape, np.dtype(np.uint8), shape[0] * shape[1], raw_dtype=GGMLQuantizationType.Q8_0
        )
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    assert writer.fout is not None
    start = -(-writer.fout[0].tell() // 64) * 64
    last = -(-rows * 1088 // 64) * 64
    writer.fout[0].seek(start + last)
    writer.fout[0].write(bytes(range(68)))  # the rest is a hole
    writer.close()
    assert open_gguf(path).tensors["last"].blocks.tobytes() == bytes(range(68))


INTERESTING = (0, 1, 9, 255, 1 << 31, (1 << 32) - 1, 1 << 63, (1 << 64) - 1)


def test_no_damage_of_a_header_is_anything_but_refused_or_read(small: Path, tmp_path: Path) -> None:
    """Bits flipped, numbers replaced, bytes left out and put in: 600 files."""
    data, random = small.read_bytes(), np.random.default_rng(0)
    header = len(data) - sum(tensor.n_bytes for tensor in GGUFReader(small).tensors)
    damaged, refusals = tmp_path / "damaged.gguf", list[str]()
    for number in range(600):
        one, at = bytearray(data), int(random.integers(8, header))
        match number % 4:
            case 0:
                one[at] ^= 1 << int(random.integers(8))
            case 1:
                size = int(random.choice([4, 8]))
                one[at : at + size] = (int(random.choice(INTERESTING)) & (1 << 8 * size) - 1).to_bytes(size, "little")
            case 2:
                del one[at : at + int(random.integers(1, 16))]
            case 3:
                one[at:at] = random.bytes(int(random.integers(1, 16)))
        damaged.write_bytes(one)
        try:
            list(open_gguf(damaged).metadata.values())
        except ModelError as error:
            refusals.append(str(error))
    assert not any("\n" in refusal for refusal in refusals)
    assert 300 < len(refusals) < 600


def test_where_a_gguf_is_meant(small: Path, tmp_path: Path) -> None:
    assert is_gguf(small)
    assert is_gguf(tmp_path / "absent.gguf")
    assert not is_gguf(tmp_path)
    folder = tmp_path / "folder.gguf"
    folder.mkdir()
    assert not is_gguf(folder)


def test_the_library_is_imported_when_a_file_is_opened() -> None:
    code = "import sys, afterglow.gguf_file; assert not {'gguf', 'numpy'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)
