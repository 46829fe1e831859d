"""Softmax, normalisation and attention."""

import math

import pytest
import torch
import torch.nn.functional as F
from sweep import normal, place, sweep

import shardwise as sw
from shardwise.debug import CommDebugMode

R, S, P = sw.Replicate(), sw.Shard, sw.Partial
inf = math.inf

SOFTMAX = {"softmax": torch.softmax, "log_softmax": torch.log_softmax, "softmin": F.softmin}


@pytest.mark.parametrize("op", SOFTMAX.values(), ids=SOFTMAX)
@pytest.mark.parametrize("dim", [0, -1])
@pytest.mark.parametrize("shape", [(5, 3), (2, 1)], ids=str)
def test_softmax(op, dim, shape):
    sweep(lambda a: op(a, dim=dim), normal(*shape))


@pytest.mark.parametrize("op", SOFTMAX.values(), ids=SOFTMAX)
def test_softmax_of_few_elements(op):
    sweep(lambda a: op(a, dim=0), normal())
    sweep(lambda a: op(a, dim=0), normal(0, 3))
    sweep(lambda a: op(a, dim=1), normal(0, 3))


@pytest.mark.parametrize("eps", [None, 1e-3])
@pytest.mark.parametrize("inner", [(3,), (4, 3)], ids=str)
def test_rms_norm(inner, eps):
    sweep(lambda a: F.rms_norm(a, inner, eps=eps), normal(2, 4, 3))
    sweep(lambda a, w: F.rms_norm(a, inner, w, eps), normal(2, 4, 3), normal(*inner))


def test_rms_norm_in_half_precision_has_the_epsilon_of_single():
    x = (normal(4, 6) * 1e-2).bfloat16()
    for placement in (R, S(0), S(1)):
        torch.testing.assert_close(F.rms_norm(place(x, placement), (6,)).full_tensor(), F.rms_norm(x, (6,)))


@pytest.mark.parametrize("op", [torch.softmax, torch.log_softmax])
@pytest.mark.parametrize(
    "rows", [[[1, inf], [2, 3], [4, 5]], [[-inf, 1], [-inf, -inf], [-inf, 0]], [[1, math.nan]] * 3]
)
def test_softmax_of_special_values(op, rows):
    sweep(lambda a: op(a, dim=0), torch.tensor(rows, dtype=torch.float64))


@pytest.mark.parametrize("op", [torch.softmax, torch.log_softmax])
@pytest.mark.parametrize("size", [5, 300])
def test_softmax_over_a_sharded_dim_gathers_nothing(op, size):
    x = place(normal(3, size), S(1)).requires_grad_()
    with CommDebugMode() as comm:
        out = op(x, dim=1)
    assert comm.get_comm_counts() == {"all_reduce": 2}
    assert out.placements == (S(1),)
    with CommDebugMode() as comm:
        (out * out).sum().backward()
    assert set(comm.get_comm_counts()) <= {"all_reduce"}
    assert x.grad.placements == (S(1),)


def test_softmax_over_another_dim_moves_nothing():
    x = place(normal(6, 4), S(0))
    with CommDebugMode() as comm:
        out = x.softmax(1)
    assert comm.get_total_counts() == 0 and out.placements == (S(0),)


def test_gradient_of_weighted_log_softmax():
    x, w = normal(4, 7), normal(7)
    d = place(x, S(1)).requires_grad_()
    (d.log_softmax(1) * place(w, S(0))).sum().backward()
    torch.testing.assert_close(d.grad.full_tensor(), w - x.softmax(1) * w.sum())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    "op", [lambda a: a.softmax(1), lambda a: a.log_softmax(1), lambda a: F.layer_norm(a, (600,), None, None)]
)
def test_half_precision_is_as_exact_as_torch(op, dtype):
    x = (normal(4, 600) * 3).to(dtype)
    exact, plain, sharded = op(x.double()), op(x), op(place(x, S(1), mesh=(4,))).full_tensor()
    assert sharded.dtype == plain.dtype
    assert (sharded - exact).abs().max() <= 1.01 * (plain - exact).abs().max()


def test_softmax_with_a_dtype():
    x = normal(4, 6).float()
    for where in (R, S(0), S(1)):
        out = torch.softmax(place(x, where), 1, dtype=torch.float64)
        assert out.dtype == torch.float64
        torch.testing.assert_close(out.full_tensor(), torch.softmax(x, 1, dtype=torch.float64))


NORMS = {
    "layer": (lambda a: F.layer_norm(a, (4,)), (5, 3, 4)),
    "layer affine": (lambda a, w, b: F.layer_norm(a, (4,), w, b), (5, 3, 4), (4,), (4,)),
    "layer weight": (lambda a, w: F.layer_norm(a, (4,), w), (5, 4), (4,)),
    "layer two dims": (lambda a, w, b: F.layer_norm(a, (3, 4), w, b), (5, 3, 4), (3, 4), (3, 4)),
    "layer narrow": (lambda a, w, b: F.layer_norm(a, (3,), w, b, 1e-3), (2, 3), (3,), (3,)),
    "rms": (lambda a: F.rms_norm(a, (4,)), (5, 4)),
    "rms weight": (lambda a, w: F.rms_norm(a, (4,), w, 1e-3), (5, 3, 4), (4,)),
    "group": (lambda a: F.group_norm(a, 2), (3, 4, 2)),
    "group affine": (lambda a, w, b: F.group_norm(a, 2, w, b), (3, 4, 2), (4,), (4,)),
    "group per channel": (lambda a, w, b: F.group_norm(a, 3, w, b), (2, 3, 2, 2), (3,), (3,)),
    "normalize": (lambda a: F.normalize(a, dim=0), (5, 3)),
    "cosine": (lambda a, b: F.cosine_similarity(a, b, dim=0), (5, 3), (5, 3)),
}


@pytest.mark.parametrize(("op", "shapes"), [(op, shapes) for op, *shapes in NORMS.values()], ids=NORMS)
def test_norm(op, shapes):
    sweep(op, *(normal(*shape) for shape in shapes))


@pytest.mark.parametrize(("where", "out", "reductions"), [(S(0), S(0), 0), (S(1), S(1), 0), (S(2), S(2), 2)], ids=str)
def test_layer_norm_stays_where_it_is(where, out, reductions):
    x = place(normal(6, 4, 8), where)
    w = place(normal(8), S(0) if where == S(2) else R)
    with CommDebugMode() as comm:
        result = F.layer_norm(x, (8,), w)
    assert result.placements == (out,)
    assert comm.get_comm_counts() == ({"all_reduce": reductions} if reductions else {})


def test_rms_norm_of_rows_moves_nothing():
    x, w = place(normal(6, 4, 8), S(1)), place(normal(8), R)
    with CommDebugMode() as comm:
        result = F.rms_norm(x, (8,), w)
    assert result.placements == (S(1),) and comm.get_total_counts() == 0


def test_rms_norm_over_a_sharded_dim_gathers_nothing():
    x = place(normal(6, 8), S(1))
    with CommDebugMode() as comm:
        result = F.rms_norm(x, (8,))
    assert comm.get_comm_counts() == {"all_reduce": 1} and result.placements == (S(1),)


def test_group_norm_keeps_whole_groups():
    x, w = normal(2, 8, 3), normal(8)
    d, weight = place(x, S(1)), place(w, S(0))
    with CommDebugMode() as comm:
        result = F.group_norm(d, 4, weight)
    assert result.placements == (S(1),) and comm.get_total_counts() == 0
    torch.testing.assert_close(F.group_norm(d, 1, weight).full_tensor(), F.group_norm(x, 1, w))


def attend(**options):
    return lambda q, k, v: F.scaled_dot_product_attention(q, k, v, **options)


QKV = [(2, 4, 3, 2), (2, 4, 5, 2), (2, 4, 5, 2)]
ATTENTION = {
    "plain": (attend(), *QKV),
    "scale": (attend(scale=0.3), *QKV),
    "causal": (attend(is_causal=True), (2, 3, 4, 2), (2, 3, 4, 2), (2, 3, 4, 2)),
    "three dims": (attend(), (3, 4, 2), (3, 5, 2), (3, 5, 3)),
    "grouped": (attend(enable_gqa=True), (2, 4, 3, 2), (2, 2, 5, 2), (2, 2, 5, 2)),
    "batch of one": (attend(), (2, 4, 3, 2), (1, 4, 5, 2), (1, 4, 5, 2)),
    "fewer dims": (attend(), (2, 4, 3, 2), (4, 5, 2), (4, 5, 2)),
    "fewer query dims": (attend(), (4, 3, 2), (2, 4, 5, 2), (2, 4, 5, 2)),
}
MASKS = {"per head": (4, 3, 5), "full": (2, 4, 3, 5), "broadcast": (2, 1, 1, 5), "matrix": (3, 5)}


@pytest.mark.parametrize(("op", "shapes"), [(op, shapes) for op, *shapes in ATTENTION.values()], ids=ATTENTION)
def test_attention(op, shapes):
    sweep(op, *(normal(*shape) for shape in shapes))


@pytest.mark.parametrize("shape", MASKS.values(), ids=MASKS)
def test_attention_with_a_mask(shape):
    attend = lambda q, k, v, mask: F.scaled_dot_product_attention(q, k, v, attn_mask=mask)  # noqa: E731
    sweep(attend, *(normal(*s) for s in QKV), normal(*shape))
    sweep(lambda q, k, v, mask: attend(q, k, v, mask > -1), *(normal(*s) for s in QKV), normal(*shape), partial=False)


@pytest.mark.parametrize("where", [S(0), S(1)], ids=str)
def test_attention_by_batch_and_heads_moves_nothing(where):
    q, k, v = (place(normal(*shape), where) for shape in QKV)
    with CommDebugMode() as comm:
        out = F.scaled_dot_product_attention(q, k, v)
    assert out.placements == (where,) and comm.get_total_counts() == 0
