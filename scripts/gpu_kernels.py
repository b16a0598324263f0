"""`python -m scripts.gpu_kernels`: compile Triton's kernels for two architectures, without a GPU: registers, spills and shared memory.

The launching functions are called as the engine calls them, on small tensors; what they launch is compiled, and nothing runs. Ends
with 1 if a kernel spills registers, or takes more shared memory than a block may have. Cells: registers of a thread / bytes spilled / bytes
of shared memory.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch

ARCHITECTURES = {80: 163 * 1024, 90: 227 * 1024}  # the most shared memory of a block, in bytes
OF_FLOAT8 = {89: 99 * 1024, 90: 227 * 1024}  # older ones convert no floats of 8 bits
SHAPES = {
    # heads, KV heads, head_dim, hidden
    "Llama-3-8B": (32, 8, 128, 4096),
    "SmolLM2-135M": (9, 3, 64, 576),
    "Phi-2": (32, 32, 80, 2560),
    "Gemma-2-9B": (16, 8, 256, 3584),
    "small heads": (4, 2, 8, 512),
}
EXPERTS = ("8 bits", "float8", "Q4_K", "Q6_K", "MXFP4")  # kinds of their weights


class Compiled(NamedTuple):
    """What a kernel takes, for one architecture."""

    registers: int
    spills: int  # bytes, stored and loaded
    shared: int  # bytes
    load: int  # bytes of the widest load that a thread makes of the device's memory


def cases(shape: str, dtype: torch.dtype) -> dict[str, Callable[[], object]]:
    """Return calls that launch the kernels for a model's shape, by name."""
    from afterglow.kernels import (
        triton_attention,
        triton_column_sums,
        triton_experts,
        triton_gather,
        triton_merge,
        triton_passes,
        triton_products,
        triton_rows,
    )
    from afterglow.kernels.context_pages import Pages
    from afterglow.kernels.device_blocks import device_matrix
    from afterglow.kernels.device_experts import ExpertTables, PlainMatrix
    from afterglow.kernels.device_products import RoundedMatrix, rounded_rows
    from afterglow.kernels.packed import BLOCK_FORMATS
    from afterglow.kernels.paged_parts import PartTables, part_of, row_places, suited
    from afterglow.kernels.stored_rows import stored_width

    heads, kv_heads, head_dim, hidden = SHAPES[shape]
    pages = Pages.of(torch.zeros(2, 2, kv_heads, 300, head_dim, dtype=dtype))
    qkv = torch.zeros(40, heads + 2 * kv_heads, head_dim, dtype=dtype)
    q, k, v = torch.split(qkv, [heads, kv_heads, kv_heads], 1)
    out, lse = torch.zeros(40, heads, head_dim), torch.zeros(40, heads)
    x, weight = torch.zeros(3, 2 * hidden, dtype=dtype), torch.zeros(hidden, dtype=dtype)
    angles = torch.zeros(40, head_dim), torch.zeros(40, head_dim)
    chosen, shares = torch.zeros(3, 2, dtype=torch.int64), torch.zeros(3, 2, dtype=dtype)
    found: dict[str, Callable[[], object]] = {
        "rotate and append": lambda: triton_rows.place(row_places([(pages, 0, 40)]), 1, q, k, v, angles),
        "add and RMS norm": lambda: triton_passes.add_rms_norm(x[:, :hidden], x[:, hidden:], weight, 1e-5),
        "gated SiLU": lambda: triton_passes.gated_silu(x),
        "merge of two": lambda: triton_merge.merge_onto(out, lse, q, lse),
    }
    table = torch.zeros(20, 5, dtype=torch.int64)
    for name, kind in (("stored rows", dtype), ("stored rows in 8 bits", torch.int8)):
        stored = torch.zeros(2, 2, 64, kv_heads, stored_width(head_dim, kind), dtype=kind)
        found[f"gather of {name}"] = partial(triton_gather.gather, stored, pages.data, 1, table, angles, 0, 0)
    matrices = {
        name: RoundedMatrix(*rounded_rows(torch.zeros(64, hidden), bits, grouped, floats), hidden, weight[:64])
        for name, bits, grouped, floats in (
            ("8 bits", 8, False, False),
            ("8 bits in groups", 8, True, False),
            ("4 bits in groups", 4, True, False),
            ("float8", 8, False, True),
        )
    }
    for name in ("Q4_1", "Q4_K", "Q5_1", "Q6_K", "MXFP4", "A4", "A8"):
        inputs = hidden - hidden % BLOCK_FORMATS[name].weights
        # Any bytes that are finite as scales: which dtypes these get depends on them.
        blocks = torch.randint(1, 60, (64, BLOCK_FORMATS[name].row_bytes(inputs)), dtype=torch.uint8)
        matrices[name] = device_matrix(blocks, name, inputs, torch.device("cpu"))
    for name, matrix in matrices.items():
        found[f"product of 1 row, {name}"] = partial(triton_products.multiply, x[:1, : matrix.inputs], matrix)
        many = x[:1, : matrix.inputs].expand(40, -1)
        found[f"product of 40 rows, {name}"] = partial(triton_products.multiply, many, matrix)
    of_experts: dict[str, PlainMatrix | RoundedMatrix] = {name: matrices[name] for name in EXPERTS}
    of_experts |= {
        "as rows are": PlainMatrix(torch.zeros(64, hidden, dtype=dtype)),
        "MXFP4": matrices["MXFP4"].with_bias(weight[:64]),
    }
    for name, expert in of_experts.items():
        tables = ExpertTables([expert], [expert], (1.702, 7.0) if name == "MXFP4" else None)  # as gpt-oss has them
        found[f"experts, {name}"] = partial(triton_experts.chosen_experts, x[:, :hidden], shares, chosen, tables)
    if suited(dtype, head_dim, heads // kv_heads):
        found["column sums"] = lambda: triton_column_sums.column_sums(q, pages.read(0, 0, 300)[0], lse, 0.1)
        for name, queries in (("one query", 1), ("40 queries", 40)):
            parts = PartTables.of([part_of(pages, 0, 300, range(queries))], heads // kv_heads)
            found[f"attention of {name}"] = partial(triton_attention.attend_parts, parts, 1, q, 0.1, 0.0, out, lse)
    return found


class _Driver:
    """Stands for the driver of a GPU that is not there."""

    def __init__(self, capability: int) -> None:
        self._capability = capability

    def get_current_device(self) -> int:
        return self._capability  # kernels are kept by device

    def get_current_stream(self, device: int) -> int:
        return 0

    def get_current_target(self) -> Any:
        from triton.backends.compiler import GPUTarget

        return GPUTarget("cuda", self._capability, 32)


def compiled(call: Callable[[], object], capability: int) -> dict[str, Compiled]:
    """Compile all kernels that `call` launches: by function."""
    import triton
    from triton.runtime.jit import JITFunction

    found: dict[str, Any] = {}
    run = JITFunction.run

    def only_compile(self: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> None:
        found[self.fn.__name__] = run(self, *args, grid=grid, warmup=True, **kwargs)

    triton.runtime.driver.set_active(_Driver(capability))
    JITFunction.run = only_compile
    try:
        call()
    finally:
        JITFunction.run = run
    return {
        name: Compiled(
            *_assembled(kernel.asm["ptx"], capability), kernel.metadata.shared, _widest_load(kernel.asm["ptx"])
        )
        for name, kernel in found.items()
    }


def _assembled(ptx: str, capability: int) -> tuple[int, int]:
    """Return the registers of a thread and the bytes that it spills."""
    from triton.backends.nvidia.compiler import get_ptxas

    target = re.search(r"\.target (\w+)", ptx)
    assert target is not None
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder, "kernel.ptx")
        source.write_text(ptx)
        command = [
            get_ptxas(capability).path,
            "-v",
            f"--gpu-name={target[1]}",
            str(source),
            "-o",
            str(source.with_suffix(".cubin")),
        ]
        said = subprocess.run(command, capture_output=True, text=True, check=True).stderr
    spills = sum(int(number) for number in re.findall(r"(\d+) bytes spill", said))
    registers = re.search(r"Used (\d+) registers", said)
    assert registers is not None, said
    return int(registers[1]), spills


def _widest_load(ptx: str) -> int:
    loads = re.findall(r"ld\.global[\w.:]*?(?:\.v(\d))?\.b(\d+)", ptx)
    copies = re.findall(r"cp\.async\.c[ag]\.shared\.global.*?, (0x\w+)", ptx)
    return max(
        [int(count or 1) * int(bits) // 8 for count, bits in loads] + [int(size, 16) for size in copies], default=0
    )


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--shapes", nargs="+", choices=SHAPES, default=list(SHAPES))
    parser.add_argument("--dtypes", nargs="+", choices=["bfloat16", "float32"], default=["bfloat16", "float32"])
    asked = parser.parse_args(argv)
    print("| shape | kernel | sm_80 (float8: sm_89) | sm_90 | widest load there |")
    print("|---|---|---|---|---|")
    wrong = False
    for shape in asked.shapes:
        for dtype in asked.dtypes:
            for name, call in cases(shape, getattr(torch, dtype)).items():
                limits = OF_FLOAT8 if "float8" in name else ARCHITECTURES
                takes = {each: compiled(call, each) for each in limits}
                for kernel in takes[min(limits)]:
                    row = [found[kernel] for found in takes.values()]
                    print(
                        f"| {shape}, {dtype} | {name}: `{kernel}` | "
                        + " | ".join(f"{each.registers} / {each.spills} / {each.shared}" for each in row)
                        + f" | {row[-1].load} |",
                        flush=True,
                    )
                    wrong |= any(each.spills for each in row)
                    wrong |= any(each.shared > most for each, most in zip(row, limits.values(), strict=True))
    return int(wrong)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
