"""The fused merge in Triton's interpreter, on the CPU. In a process of its own: the interpreter is chosen at import."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys

import pytest

PROGRAM = """
import itertools
import torch
from afterglow.kernels.attention import attend, merge, merge_into
from afterglow.kernels.triton_merge import merge_onto

generator = torch.Generator().manual_seed(0)

def draw(*shape):
    return torch.randn(*shape, generator=generator)

def expected(out, lse, part, part_lse, rows):
    parts = torch.stack((lse[rows].double(), part_lse.double()))
    total = parts.logsumexp(0)
    weights = (parts - total).exp().nan_to_num(0)[..., None]
    outs = torch.stack((out[rows].double(), part.double()))
    outs = torch.where(weights == 0, 0.0, outs)  # what weighs nothing may hold anything
    out, lse = out.double(), lse.double()
    out[rows], lse[rows] = (weights * outs).sum(0), total
    return out, lse

places = torch.tensor([5, 1, 0, 3])
for d, dtype, rows in itertools.product((1, 16, 40, 64, 128), (torch.float32, torch.bfloat16), (None, places)):
    out, lse = draw(7, 3, 2 * d)[:, :, d:], draw(7, 3) * 5  # rows and heads with strides of their own
    part, part_lse = draw(3, 4, d).transpose(0, 1).to(dtype), (draw(3, 4) * 5).t()
    lse[1], out[1] = -torch.inf, torch.nan
    part_lse[1, 0] = part_lse[3, 1] = lse[3, 2] = -torch.inf
    wanted = expected(out, lse, part, part_lse, slice(0, 4) if rows is None else rows)
    merge_onto(out, lse, part, part_lse, rows)
    torch.testing.assert_close(out.double(), wanted[0], atol=1e-5, rtol=0, equal_nan=True)
    torch.testing.assert_close(lse.double(), wanted[1], atol=1e-5, rtol=0)

# Scores that exp cannot hold, and an accumulator that is rounded once.
out, lse = torch.zeros(2, 1, 16, dtype=torch.bfloat16), torch.tensor([[300.0], [-300.0]])
merge_onto(out, lse, torch.ones(2, 1, 16), torch.tensor([[300.0], [-500.0]]))
assert out[0].eq(0.5).all() and out[1].eq(0).all(), out
torch.testing.assert_close(lse, torch.tensor([[300.0 + 0.6931472], [-300.0]]))

# As `merge` and `merge_into` use it, on parts as attention yields them.
q, keys, values = draw(5, 8, 16), draw(90, 2, 16), draw(90, 2, 16)
parts = [attend(q, keys[a:b], values[a:b], scale=0.3, causal=False) for a, b in ((0, 0), (0, 1), (1, 64), (64, 90))]
plain = merge(parts)
out, lse = torch.zeros(5, 8, 16), torch.full((5, 8), -torch.inf)
for part in parts:
    merge_onto(out, lse, *part)
torch.testing.assert_close(out, plain[0], atol=1e-5, rtol=0)
torch.testing.assert_close(lse, plain[1], atol=1e-5, rtol=0)

for bad, words in (
    (lambda: merge_onto(out.transpose(1, 2), lse, *parts[1]), "side by side"),
    (lambda: merge_onto(out, lse.double(), *parts[1]), "float64"),
):
    try:
        bad()
    except ValueError as e:
        assert words in str(e), e
    else:
        raise AssertionError("not refused")
merge_onto(out, lse, parts[1][0][:0], parts[1][1][:0])
print("merged")
"""


@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="Triton is not installed (the extra gpu)")
def test_the_fused_merge_is_the_formula() -> None:
    ran = subprocess.run(
        [sys.executable, "-c", PROGRAM],
        env={**os.environ, "TRITON_INTERPRET": "1"},
        capture_output=True,
        text=True,
        check=False,
        timeout=90,
    )
    assert ran.returncode == 0, ran.stderr
    assert ran.stdout.strip() == "merged"
