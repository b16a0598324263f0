"""What a layer does after attention, in one call."""

import pytest
import torch
import torch.nn.functional as F

from afterglow.kernels.block import Block, ExpertPanels, Pair
from afterglow.kernels.built import native
from afterglow.kernels.matrix import BytePanels, Panels, has_bytes
from afterglow.kernels.packed import PackedPanels
from afterglow.kernels.passes import gated_clamped, gated_silu, rms_norm
from tests.kernels.test_packed import random_blocks

pytestmark = pytest.mark.skipif(native() is None, reason="nothing has been built here")
HIDDEN, WIDTH, FFN = 100, 48, 132


def case(rows: int, bias: bool) -> tuple[list[tuple[torch.Tensor, torch.Tensor | None]], list[torch.Tensor]]:
    generator = torch.Generator().manual_seed(rows)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator)

    shapes = [(HIDDEN, WIDTH), (2 * FFN, HIDDEN), (HIDDEN, FFN)]
    matrices = [(random(*shape) / 10, random(shape[0]) if bias else None) for shape in shapes]
    return matrices, [random(HIDDEN) for _ in range(2)] + [random(rows, HIDDEN), random(rows, 2 * WIDTH)[:, :WIDTH]]


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("rows", [0, 1, 5, 13, 241, 500])
def test_it_is_what_its_parts_are(rows: int, bias: bool) -> None:
    ((out, b), (mlp_in, c), (mlp_out, d)), (before, after, x, attended) = case(rows, bias)
    block = Block(Panels(out, b), (before, 1e-5), Pair(Panels(mlp_in, c), Panels(mlp_out, d)), (after, 1e-6))
    wanted = x.double() + F.linear(attended.double(), out.double(), None if b is None else b.double())
    inner = F.linear(
        F.rms_norm(wanted, (HIDDEN,), before.double(), 1e-5), mlp_in.double(), None if c is None else c.double()
    )
    gate, up = inner.chunk(2, -1)
    wanted += F.linear(F.silu(gate) * up, mlp_out.double(), None if d is None else d.double())
    normed = block(x, attended)
    torch.testing.assert_close(x.double(), wanted, atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(
        normed.double(), F.rms_norm(wanted, (HIDDEN,), after.double(), 1e-6), atol=1e-4, rtol=1e-4
    )


@pytest.mark.parametrize("kind", [Panels, BytePanels])
def test_a_row_is_the_same_whatever_its_batch(kind: type[Panels | BytePanels]) -> None:
    if kind is BytePanels and not has_bytes():
        pytest.skip("no such products on this machine")
    matrices, (before, after, x, attended) = case(300, bias=True)
    out, mlp_in, mlp_out = (kind(weight, bias) for weight, bias in matrices)
    block = Block(out, (before, 1e-5), Pair(mlp_in, mlp_out), (after, 1e-6))
    alone = x[[0, 7, 250, 299]]
    normed_alone = torch.cat([block(alone[i : i + 1], attended[row][None]) for i, row in enumerate((0, 7, 250, 299))])
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(3)
        normed = block(x, attended)
    finally:
        torch.set_num_threads(threads)
    assert torch.equal(x[[0, 7, 250, 299]], alone)
    assert torch.equal(normed[[0, 7, 250, 299]], normed_alone)


@pytest.mark.skipif(not has_bytes(), reason="no such products on this machine")
@pytest.mark.parametrize("inputs", [30, 64])
def test_what_is_no_number_stays_none_in_8_bits(inputs: int) -> None:
    matrix = BytePanels(torch.randn(40, inputs, generator=torch.Generator().manual_seed(0)))
    assert matrix(torch.ones(inputs, inputs).fill_diagonal_(torch.nan)).isnan().all()
    assert not matrix(torch.ones(inputs, inputs).fill_diagonal_(torch.inf)).isfinite().any()


def test_matrices_that_do_not_follow_each_other() -> None:
    matrices, (before, after, _, _) = case(1, bias=False)
    out, mlp_in, _ = (Panels(weight, bias) for weight, bias in matrices)
    with pytest.raises(ValueError, match=f"{HIDDEN} -> {2 * FFN}"):
        Block(out, (before, 1e-5), Pair(mlp_in, out), (after, 1e-6))


@pytest.mark.parametrize("rows", [1, 13, 250])
def test_matrices_in_blocks(rows: int) -> None:
    """What their products, one after another, come to; a row alone as in its batch."""
    shapes = {"Q6_K": (256, 512), "Q4_K": (2 * 352, 256), "Q4_0": (256, 352)}
    out, mlp_in, mlp_out = (
        PackedPanels(random_blocks(block_format, *shape), block_format, shape[1], torch.arange(shape[0]) / 100.0)
        for block_format, shape in shapes.items()
    )
    generator = torch.Generator().manual_seed(rows)
    before, after, x, attended = (
        torch.randn(shape, generator=generator) for shape in (256, 256, (rows, 256), (rows, 512))
    )
    wanted = x + out(attended)
    wanted += mlp_out(gated_silu(mlp_in(rms_norm(wanted, before, 1e-5))))
    alone = x[-1:].clone()
    block = Block(out, (before, 1e-5), Pair(mlp_in, mlp_out), (after, 1e-6))
    normed = block(x, attended)
    torch.testing.assert_close(x, wanted, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(normed, rms_norm(wanted, after, 1e-6), atol=1e-5, rtol=1e-5)
    assert torch.equal(block(alone, attended[-1:]), normed[-1:])
    assert torch.equal(alone, x[-1:])


COUNT, CHOSEN = 6, 2


def mixture(kind: str, clamp: tuple[float, float] | None, shared: bool) -> ExpertPanels:
    """Experts of 64 numbers and a width of 96, in floats, bytes or blocks."""
    generator = torch.Generator().manual_seed(5)

    def matrix(outputs: int, inputs: int) -> Panels | BytePanels | PackedPanels:
        weight, bias = (torch.randn(shape, generator=generator) for shape in ((outputs, inputs), (outputs,)))
        if kind == "blocks":
            return PackedPanels(random_blocks("Q4_0", outputs, inputs), "Q4_0", inputs, bias)
        return (Panels if kind == "floats" else BytePanels)(weight / 8, bias)

    def pair() -> Pair:
        return Pair(matrix(192, 64), matrix(64, 96))

    router = Panels(torch.randn(COUNT, 64, generator=generator), torch.randn(COUNT, generator=generator))
    gate = Panels(torch.randn(1, 64, generator=generator)) if shared else None
    normed = clamp is not None
    return ExpertPanels(router, [pair() for _ in range(COUNT)], CHOSEN, normed, pair() if shared else None, gate, clamp)


def by_parts(experts: ExpertPanels, x: torch.Tensor) -> torch.Tensor:
    """What the experts of each row compute, row after row, by the products and gates alone."""
    scores = experts.router(x)
    weights, chosen = scores.softmax(-1).topk(CHOSEN)
    if experts.normed:
        weights = weights / weights.sum(-1, keepdim=True)

    def mlp(pair: Pair, row: torch.Tensor) -> torch.Tensor:
        inner = pair.wide(row)
        return pair.narrow(gated_silu(inner) if experts.clamp is None else gated_clamped(inner, *experts.clamp))

    out = torch.zeros_like(x)
    for i in range(len(x)):
        row = x[i : i + 1]
        for expert, weight in zip(chosen[i].tolist(), weights[i], strict=True):
            out[i] += (mlp(experts.experts[expert], row) * weight)[0]
        if experts.shared is not None and experts.shared_gate is not None:
            out[i] += (mlp(experts.shared, row) * experts.shared_gate(row).sigmoid())[0]
    return out


@pytest.mark.parametrize("rows", [1, 7, 500])
@pytest.mark.parametrize(
    ("kind", "clamp", "shared"),
    [("floats", None, False), ("floats", (1.7, 0.5), True), ("bytes", None, True), ("blocks", (1.7, 0.5), False)],
)
def test_experts_are_what_their_parts_are(
    kind: str, clamp: tuple[float, float] | None, shared: bool, rows: int
) -> None:
    """And a row alone is the same as in its batch."""
    if kind == "bytes" and not has_bytes():
        pytest.skip("no such products on this machine")
    generator = torch.Generator().manual_seed(rows)
    weight, before, after, x, attended = (
        torch.randn(shape, generator=generator) for shape in ((64, 48), 64, 64, (rows, 64), (rows, 48))
    )
    experts = mixture(kind, clamp, shared)
    out = Panels(weight / 8)
    block = Block(out, (before, 1e-5), experts, (after, 1e-6))
    wanted = x + out(attended)
    wanted += by_parts(experts, rms_norm(wanted, before, 1e-5))
    alone = x[-1:].clone()
    normed = block(x, attended)
    torch.testing.assert_close(x, wanted, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(normed, rms_norm(wanted, after, 1e-6), atol=1e-5, rtol=1e-5)
    assert torch.equal(block(alone, attended[-1:]), normed[-1:])
    assert torch.equal(alone, x[-1:])


def test_scores_that_are_no_numbers_choose_and_yield_none() -> None:
    experts, before = mixture("floats", None, False), torch.ones(64)
    block = Block(Panels(torch.eye(64)), (before, 1e-5), experts, (before, 1e-6))
    x = torch.full((3, 64), torch.nan)
    assert block(x, torch.zeros(3, 64)).isnan().all()


def test_experts_that_do_not_follow() -> None:
    experts, norm = mixture("floats", None, False), (torch.ones(64), 1e-5)
    with pytest.raises(ValueError, match="experts of 64 numbers cannot follow 48"):
        Block(Panels(torch.ones(48, 64)), norm, experts, norm)
    wrong = experts._replace(
        experts=[*experts.experts[1:], Pair(Panels(torch.ones(192, 48)), Panels(torch.ones(64, 96)))]
    )
    with pytest.raises(ValueError, match="64 numbers, 48 -> 192, 96 -> 64"):
        Block(Panels(torch.eye(64)), norm, wrong, norm)


@pytest.mark.parametrize("rows", [1, 3])
def test_only_chosen_experts_are_read(rows: int) -> None:
    """What the others hold leaves no trace, not even where it is no number."""
    experts, norm = mixture("floats", None, False), (torch.ones(64), 1e-5)
    generator = torch.Generator().manual_seed(rows)
    x = torch.randn(rows, 64, generator=generator)
    chosen = set(experts.router(rms_norm(x, *norm)).topk(CHOSEN).indices.flatten().tolist())
    assert len(chosen) < COUNT
    broken = Pair(Panels(torch.full((192, 64), torch.nan)), Panels(torch.full((64, 96), torch.nan)))
    pairs = [pair if i in chosen else broken for i, pair in enumerate(experts.experts)]
    results = [
        Block(Panels(torch.eye(64)), norm, experts._replace(experts=each), norm)(x.clone(), torch.zeros(rows, 64))
        for each in (experts.experts, pairs)
    ]
    assert torch.equal(*results)
    assert results[1].isfinite().all()
