"""Matrix products."""

import pytest
import torch
import torch.nn.functional as F
from sweep import normal, place, sweep, sweep_in_place

import shardwise as sw
from shardwise.debug import CommDebugMode

R, S, P = sw.Replicate(), sw.Shard, sw.Partial

PRODUCTS = {
    "mm": (torch.mm, (5, 3), (3, 4)),
    "mm with itself": (lambda a: a @ a, (5, 5)),
    "bmm": (torch.bmm, (3, 5, 2), (3, 2, 4)),
    "mv": (torch.mv, (5, 3), (3,)),
    "dot": (torch.dot, (5,), (5,)),
    "vdot": (torch.vdot, (5,), (5,)),
    "outer": (torch.outer, (5,), (3,)),
    "matmul broadcast": (torch.matmul, (2, 1, 5, 3), (3, 3, 4)),
    "vector @ batch": (torch.matmul, (3,), (2, 3, 4)),
    "batch @ vector": (torch.matmul, (2, 4, 3), (3,)),
    "addmm": (lambda c, a, b: torch.addmm(c, a, b, beta=2, alpha=3), (5, 4), (5, 3), (3, 4)),
    "addmm bias": (torch.addmm, (4,), (5, 3), (3, 4)),
    "addmm without": (lambda c, a, b: torch.addmm(c, a, b, beta=0), (5, 1), (5, 3), (3, 4)),
    "addmv": (torch.addmv, (5,), (5, 3), (3,)),
    "addmv bias": (torch.addmv, (1,), (3, 2), (2,)),
    "addmv number": (lambda c, a, b: torch.addmv(c, a, b, beta=2), (), (2, 3), (3,)),
    "addr": (torch.addr, (5, 3), (5,), (3,)),
    "baddbmm": (lambda c, a, b: torch.baddbmm(c, a, b, beta=2), (1, 4), (3, 5, 2), (3, 2, 4)),
    "addbmm": (lambda c, a, b: torch.addbmm(c, a, b, beta=2, alpha=-3), (5, 4), (3, 5, 2), (3, 2, 4)),
    "addbmm bias": (torch.addbmm, (4,), (3, 5, 2), (3, 2, 4)),
    "bilinear": (F.bilinear, (5, 3), (5, 2), (4, 3, 2)),
    "bilinear bias": (lambda a, b, w: F.bilinear(a, b, w, w[:, 0, 0]), (2, 3, 3), (2, 3, 1), (4, 3, 1)),
    "ger": (torch.ger, (5,), (3,)),
    "linear": (F.linear, (2, 5, 3), (4, 3)),
    "linear bias": (F.linear, (5, 3), (4, 3), (4,)),
    "linear vector": (F.linear, (3,), (4, 3), (4,)),
    "einsum": (lambda a, b: torch.einsum("bij,kj->bik", a, b), (3, 5, 2), (4, 2)),
    "einsum chain": (lambda a, b, c: torch.einsum("ij,jk,kl->il", a, b, c), (5, 3), (3, 2), (2, 4)),
    "einsum heads": (lambda a, b: torch.einsum("bqhd,bkhd->bhqk", a, b), (2, 3, 5, 2), (2, 4, 5, 2)),
    "einsum sum": (lambda a: torch.einsum("ij->", a), (5, 3)),
    "tensordot": (lambda a, b: torch.tensordot(a, b, ([1], [0])), (5, 3), (3, 4)),
}


@pytest.mark.parametrize(("op", "shapes"), [(op, shapes) for op, *shapes in PRODUCTS.values()], ids=PRODUCTS)
def test_product(op, shapes):
    sweep(op, *(normal(*shape) for shape in shapes))


@pytest.mark.parametrize("k", [0, 1])
def test_short_contraction(k):
    """Ranks that hold none of the contracted dim contribute zeros."""
    sweep(torch.mm, normal(3, k), normal(k, 2))
    sweep(F.linear, normal(3, k), normal(2, k), normal(2))


def test_in_place():
    addmm_ = lambda c, a, b: c.addmm_(a, b)  # noqa: E731
    accepted = [tuple(p for (p,) in way) for way in sweep_in_place(addmm_, normal(5, 4), normal(5, 3), normal(3, 4))]
    assert accepted and any(c == S(0) for c, _, _ in accepted) and any(c == P() for c, _, _ in accepted)


LAYOUTS = {
    "column parallel": (torch.mm, R, S(1), S(1)),
    "row parallel": (torch.mm, S(1), S(0), P()),
    "data parallel": (torch.mm, S(0), R, S(0)),
    "linear column": (F.linear, R, S(0), S(1)),
    "linear row": (F.linear, S(1), S(1), P()),
    "matmul column": (torch.matmul, R, S(1), S(1)),
    "matmul row": (torch.matmul, S(1), S(0), P()),
}


@pytest.mark.parametrize(
    ("op", "left", "right", "out"),
    [
        *(pytest.param(*case, id=name) for name, case in LAYOUTS.items()),
        pytest.param(torch.mm, P(), R, P(), id="pending"),
    ],
)
def test_nothing_moves(op, left, right, out):
    shapes = ((64, 32), (48, 32)) if op is F.linear else ((64, 32), (32, 48))
    a, b = (place(normal(*shape), where) for shape, where in zip(shapes, (left, right), strict=True))
    with CommDebugMode() as comm:
        result = op(a, b)
    assert result.placements == (out,)
    assert comm.get_total_counts() == 0
    torch.testing.assert_close(result.full_tensor(), op(normal(*shapes[0]), normal(*shapes[1])))


def test_row_parallel_bias_counts_once():
    x, w, b = normal(64, 32), normal(48, 32), normal(48)
    left, right, bias = place(x, S(1)), place(w, S(1)), place(b, R).requires_grad_()
    with CommDebugMode() as comm:
        out = F.linear(left, right, bias)
    assert out.placements == (P(),) and comm.get_total_counts() == 0
    torch.testing.assert_close(out.full_tensor(), F.linear(x, w, b))
    out.sum().backward()
    torch.testing.assert_close(bias.grad.full_tensor(), torch.full((48,), 64.0, dtype=torch.float64))


def test_an_addend_counts_once():
    """A contraction split into terms, with `beta` and `alpha`: the addend is one of them, on one rank."""
    c, a, b = normal(5, 4), normal(5, 6), normal(6, 4)
    for beta, alpha in ((1, 1), (2, 3), (0.5, -2.0), (0, 1)):
        d = [place(x, where) for x, where in ((c, R), (a, S(1)), (b, S(0)))]
        out = torch.addmm(*d, beta=beta, alpha=alpha)
        assert out.placements == (P(),)
        torch.testing.assert_close(out.full_tensor(), torch.addmm(c, a, b, beta=beta, alpha=alpha))


def test_two_axes_column_and_data_parallel():
    x, w = place(normal(64, 32), S(0), R, mesh=(2, 2)), place(normal(32, 48), R, S(1), mesh=(2, 2))
    with CommDebugMode() as comm:
        out = x @ w
    assert out.placements == (S(0), S(1)) and comm.get_total_counts() == 0
    torch.testing.assert_close(out.full_tensor(), normal(64, 32) @ normal(32, 48))


def test_contraction_split_in_different_places():
    """Explicit pieces on one side: the other is brought to them."""
    x, w = normal(4, 9), normal(9, 5)
    a, b = place(x, S(1))[:, 2:8], place(w, S(0))[2:8]
    assert (str(a._layout), str(b._layout)) == ("[4,6] S(1)@a", "[6,5] S(0)@a")
    torch.testing.assert_close((a @ b).full_tensor(), x[:, 2:8] @ w[2:8])
    torch.testing.assert_close((a @ place(w[2:8], S(0))).full_tensor(), x[:, 2:8] @ w[2:8])


def test_activated_product():
    """torch has no gradient for it."""
    gated = lambda c, a, b: torch._addmm_activation(c, a, b, use_gelu=True)  # noqa: E731
    sweep(gated, normal(4), normal(5, 3), normal(3, 4), backward=False)
