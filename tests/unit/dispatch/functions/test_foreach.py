"""`_foreach_*`: one call for many tensors, each with a layout of its own."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import pytest
import torch
from compare import check_shards
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

import shardwise as sw
from shardwise import Partial, Replicate, Shard
from shardwise.debug import CommDebugMode

MESH = sw.simulate((2, 2), ("dp", "tp"))
R, S0, S1, P = Replicate(), Shard(0), Shard(1), Partial()
PAIRS = list(itertools.product([R, S0, S1, P], repeat=2))

SHAPES = ((3, 4), (5, 2), (1, 2))  # the last has empty shards


def lists() -> tuple[list[Tensor], list[Tensor]]:
    make = [[torch.randn(shape, dtype=torch.float64) for shape in SHAPES] for _ in range(2)]
    return make[0], make[1]


CALLS: dict[str, Callable[[list[Tensor], list[Tensor]], list[Tensor]]] = {
    "add": lambda a, b: torch._foreach_add(a, b, alpha=2),
    "add number": lambda a, b: torch._foreach_add(a, 1.5),
    "mul": lambda a, b: torch._foreach_mul(a, b),
    "mul numbers": lambda a, b: torch._foreach_mul(a, [2.0, 3.0, 4.0]),
    "mul scalar": lambda a, b: torch._foreach_mul(a, b[0].sum()),
    "addcmul": lambda a, b: torch._foreach_addcmul(a, b, b, value=0.5),
    "lerp": lambda a, b: torch._foreach_lerp(a, b, 0.3),
    "maximum": lambda a, b: torch._foreach_maximum(a, b),
    "sqrt": lambda a, b: torch._foreach_sqrt(torch._foreach_mul(a, a)),
    "max": lambda a, b: torch._foreach_max(a),
    "powsum": lambda a, b: torch._foreach_powsum(a, 3),
    "sub": lambda a, b: torch._foreach_sub(a, b, alpha=0.5),
    "div numbers": lambda a, b: torch._foreach_div(a, [2.0, 3.0, 4.0]),
    "addcdiv numbers": lambda a, b: torch._foreach_addcdiv(a, b, torch._foreach_exp(b), [0.5, 2.0, -1.0]),
    "addcmul keyword": lambda a, b: torch._foreach_addcmul(a, a, b, scalars=[0.5, 2.0, -1.0]),
    "clamp_min": lambda a, b: torch._foreach_clamp_min(a, 0.1),
    "clamp_max": lambda a, b: torch._foreach_clamp_max(a, b),
    "minimum numbers": lambda a, b: torch._foreach_minimum(a, [0.1, 0.2, 0.3]),
    "lerp tensors": lambda a, b: torch._foreach_lerp(a, b, torch._foreach_sigmoid(a)),
    "pow": lambda a, b: torch._foreach_pow(torch._foreach_exp(a), b),
    "pow of a number": lambda a, b: torch._foreach_pow(2.0, a),
    "clone": lambda a, b: torch._foreach_clone(a),
    "unary": lambda a, b: torch._foreach_round(torch._foreach_sign(torch._foreach_neg(torch._foreach_tanh(a)))),
    "0-dim partners": lambda a, b: torch._foreach_mul(a, [x.sum() for x in b]),
    "rows": lambda a, b: torch._foreach_mul(a, [x[0] for x in b]),
    "columns": lambda a, b: torch._foreach_addcmul(a, b, [x[:, :1] for x in b], value=2),
    "wider": lambda a, b: torch._foreach_add([x[0] for x in a], b),
    "mm": lambda a, b: torch._foreach_mm(a, [x.t() for x in b]),
    "one list": lambda a, b: torch._foreach_add(a, a),
    **{f"norm {p:g}": lambda a, b, p=p: torch._foreach_norm(a, p) for p in (2.0, 1.0, 3.0, 0.0)},
    **{f"norm {p:g}": lambda a, b, p=p: torch._foreach_norm(a, p) for p in (float("inf"), float("-inf"))},
}


@pytest.mark.parametrize("name", CALLS)
def test_each_element_is_as_on_one_device(name: str) -> None:
    if not hasattr(torch, f"_foreach_{name}") and name in ("clone", "mm"):
        pytest.skip(f"this torch has no _foreach_{name}")
    a, b = lists()
    expected = CALLS[name](a, b)
    for p, q in itertools.product(PAIRS, [(R, R), (S0, S1), (P, S0)]):
        found = CALLS[name](
            [sw.distribute_tensor(x, MESH, where) for x, where in zip(a, (p, q, p), strict=True)],
            [sw.distribute_tensor(x, MESH, where) for x, where in zip(b, (q, p, q), strict=True)],
        )
        for x, y in zip(expected, found, strict=True):
            check_shards(y)
            torch.testing.assert_close(y.full_tensor(), x)


DIFFERENTIABLE = ("mul", "addcmul", "lerp", "max", "norm 2", "norm 3", "0-dim partners", "rows")


@pytest.mark.parametrize("name", DIFFERENTIABLE)
def test_gradients(name: str) -> None:
    plain = [x.requires_grad_() for tensors in lists() for x in tensors]
    weights = [torch.randn_like(x) for x in CALLS[name](plain[:3], plain[3:])]
    sum((x * w).sum() for x, w in zip(CALLS[name](plain[:3], plain[3:]), weights, strict=True)).backward()
    for where in itertools.product([(R, R), (S0, S1), (S0, R), (S0, S0)], repeat=2):
        places = itertools.islice(itertools.cycle([*where, (R, S1)]), 6)
        d = [sw.distribute_tensor(x.detach(), MESH, p).requires_grad_() for x, p in zip(plain, places, strict=True)]
        out = CALLS[name](d[:3], d[3:])
        sum((x * sw.distribute_tensor(w, MESH)).sum() for x, w in zip(out, weights, strict=True)).backward()
        for x, y in zip(plain, d, strict=True):
            assert (x.grad is None) == (y.grad is None)
            if x.grad is not None:
                torch.testing.assert_close(y.grad.full_tensor(), x.grad)


def test_the_gradient_of_a_shared_number() -> None:
    """Elements in layouts of their own: it gets the gradient of all of them. (torch has none for its own lists.)"""
    a, number = lists()[0], torch.tensor(3.0, dtype=torch.float64, requires_grad=True)
    sum((x * number).sum() for x in a).backward()
    d = [sw.distribute_tensor(x, MESH, where) for x, where in zip(a, [(R, R), (S0, S1), (S1, R)], strict=True)]
    shared = sw.distribute_tensor(number.detach(), MESH).requires_grad_()
    sum(x.sum() for x in torch._foreach_mul(d, shared)).backward()
    torch.testing.assert_close(shared.grad.full_tensor(), number.grad)


def test_ties_share_the_gradient_of_a_maximum() -> None:
    x = torch.tensor([1.0, 5, 5, 5]).requires_grad_()
    d = sw.distribute_tensor(x.detach(), MESH, [S0, R]).requires_grad_()
    for tensor in (x, d):
        torch._foreach_max([tensor])[0].backward()
    torch.testing.assert_close(d.grad.full_tensor(), x.grad)


def test_one_call_for_all() -> None:
    """Lists that lie alike run in one local call, and nothing moves."""
    d = [sw.distribute_tensor(x, MESH, where) for x, where in zip(lists()[0], [(R, R), (S0, S1), (S1, R)], strict=True)]
    ops: list[str] = []

    class Seen(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            ops.append(func._schema.name)
            return func(*args, **(kwargs or {}))

    with Seen(), CommDebugMode() as comm:
        torch._foreach_addcmul_(d, d, d, value=0.5)
        torch._foreach_norm(d)
    assert not comm.get_comm_counts()
    assert ops.count("aten::_foreach_addcmul_") == ops.count("aten::_foreach_norm") == 4  # once on each rank
    assert set(ops) == {"aten::_foreach_addcmul_", "aten::_foreach_norm"}


@pytest.mark.parametrize("where", list(itertools.product([R, S0, S1], repeat=2)), ids=str)
def test_writing_in_place_keeps_the_layout(where: tuple) -> None:
    a, b = lists()
    d = [sw.distribute_tensor(x, MESH, where) for x in a]
    e = [sw.distribute_tensor(x, MESH, [S1, P]) for x in b]
    for x, y in ((a, b), (d, e)):
        torch._foreach_mul_(x, 0.5)
        torch._foreach_add_(x, y)
        torch._foreach_addcdiv_(x, y, torch._foreach_add(torch._foreach_abs(y), 1.0), value=-0.1)
    for x, y in zip(a, d, strict=True):
        check_shards(y)
        assert y.placements == where
        torch.testing.assert_close(y.full_tensor(), x)


def test_copying_and_clearing() -> None:
    a, b = lists()
    d = [sw.distribute_tensor(x, MESH, [S0, P]) for x in a]
    torch._foreach_zero_(d)
    assert all(not x.full_tensor().any() and x.placements == (S0, P) for x in d)
    d = [sw.distribute_tensor(x, MESH, [S0, S1]).float() for x in a]
    torch._foreach_copy_(d, [sw.distribute_tensor(x, MESH, [P, R]) for x in b])
    for x, y in zip(b, d, strict=True):
        assert y.dtype == torch.float32
        torch.testing.assert_close(y.full_tensor(), x.float())


def test_what_is_written_to_is_not_moved() -> None:
    d = [sw.ones(4, 2, device_mesh=MESH, placements=[S0, P])]
    torch._foreach_exp_(d)
    assert d[0].placements == (S0, P)
    torch.testing.assert_close(d[0].full_tensor(), torch.ones(4, 2).exp())
    p = [sw.ones(4, 2, device_mesh=MESH, placements=[S0, R])]
    state = [sw.ones(4, 2, device_mesh=MESH, placements=[S1, R])]
    options = {"lr": 0.1, "weight_decay": 0.0, "momentum": 0.9, "dampening": 0.0, "nesterov": False, "maximize": False}
    with pytest.raises(sw.errors.InPlaceError, match="cannot write to momentum_buffer_list"):
        torch._fused_sgd_(p, p, state, is_first_step=False, **options)
    assert torch.equal(p[0].full_tensor(), torch.ones(4, 2))


def test_dtypes_mix() -> None:
    a, b = lists()
    a[1], b[1] = a[1].float(), b[1].float()
    d, e = ([sw.distribute_tensor(x, MESH, [S0, S1]) for x in xs] for xs in (a, b))
    for x, y in zip(torch._foreach_mul(a, b), torch._foreach_mul(d, e), strict=True):
        assert x.dtype == y.dtype and torch.equal(y.full_tensor(), x)


def test_meshes_mix() -> None:
    a, b = lists()
    meshes = [MESH, sw.simulate((3,), ("ep",)), MESH]
    d, e = (
        [sw.distribute_tensor(x, mesh, [S0] * mesh.ndim) for x, mesh in zip(xs, meshes, strict=True)] for xs in (a, b)
    )
    for x, y in zip(torch._foreach_mul(a, b), torch._foreach_mul(d, e), strict=True):
        torch.testing.assert_close(y.full_tensor(), x)
    torch._foreach_mul_(d, e[0].sum())
    for x, y, mesh in zip(a, d, meshes, strict=True):
        assert y.device_mesh == mesh
        torch.testing.assert_close(y.full_tensor(), x * b[0].sum())


def test_elements_that_are_plain_in_all_lists_are_computed_as_they_are() -> None:
    (a, *_), (b, *_) = lists()
    d, e = (sw.distribute_tensor(x, MESH, [S0] * MESH.ndim) for x in (a, b))
    out = torch._foreach_mul([d, a, d], [e, b, e])
    assert type(out[1]) is torch.Tensor and torch.equal(out[1], a * b)
    assert torch.equal(out[2].full_tensor(), a * b)
    written = a.clone()
    torch._foreach_add_([written, d], d.sum())
    torch.testing.assert_close(written, a + a.sum())
    torch.testing.assert_close(d.full_tensor(), written)


def test_a_plain_tensor_that_meets_a_dtensor_is_refused() -> None:
    d = sw.ones(4, device_mesh=MESH, placements=[S0, R])
    for others in ([torch.ones(4), torch.ones(4)], [d, d], [torch.ones(4), d]):
        with pytest.raises(sw.errors.MixedTensorError):
            torch._foreach_add_([d, torch.ones(4)], others)
    assert torch.equal(d.full_tensor(), torch.ones(4))
