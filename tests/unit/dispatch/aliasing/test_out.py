"""`out=`: results go where the user wants them, in whatever layout that is, or nothing is written at all."""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from compare import as_tensors, check_shards
from sweep import normal
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

import shardwise as sw
from shardwise import Partial, Replicate, Shard
from shardwise.debug import CommDebugMode
from shardwise.dispatch.aliasing.out import COMPUTED_AS_OUT
from shardwise.errors import FallbackWarning, InPlaceError

MESH = sw.simulate((2, 2), ("a", "b"))
R, S0, S1, P = Replicate(), Shard(0), Shard(1), Partial()
X = normal(5, 4)

MAX, MIN, AVG = Partial("max"), Partial("min"), Partial("avg")
INS = [(R, R), (S0, R), (S1, S0), (P, S0)]
OUTS = [(R, R), (S0, R), (R, S0), (S0, S0), (P, R), (S0, P), (MAX, R), (MIN, S0)]

CALLS: dict[str, Callable[..., Any]] = {
    "add": lambda x, out: torch.add(x, 2, out=out),
    "sum": lambda x, out: torch.sum(x, 0, out=out),
    "mm": lambda x, out: torch.mm(x, x.t(), out=out),
    "matmul": lambda x, out: torch.matmul(x, x.t(), out=out),
    "cumsum": lambda x, out: torch.cumsum(x, 0, out=out),
    "softmax": lambda x, out: torch.softmax(x, 1, out=out),
    "narrow_copy": lambda x, out: torch.narrow_copy(x, 0, 1, 3, out=out),
    "diag": lambda x, out: torch.diag(x, 1, out=out),
    "sort": lambda x, out: torch.sort(x, 0, out=out),
    "max": lambda x, out: torch.max(x, 1, out=out),
    "frexp": lambda x, out: torch.frexp(x, out=out),
    "qr": lambda x, out: torch.linalg.qr(x.t().mm(x), out=out),
    "masked_select": lambda x, out: torch.masked_select(x, x > 0, out=out),
    "geqrf": lambda x, out: torch.geqrf(x, out=out),
    "unbind_copy": lambda x, out: torch.unbind_copy(x, 1, out=out),
}


def outs_for(results: Any, place: Callable[[Tensor], Tensor]) -> Any:
    """Tensors like the results, full of something else."""
    made = [place(torch.full_like(x, 7)) for x in as_tensors(results)]
    return made[0] if isinstance(results, Tensor) else made


def whole(x: Any) -> Tensor:
    return x.full_tensor()


@pytest.mark.parametrize("name", CALLS)
def test_results_go_to_any_layout(name: str) -> None:
    expected = CALLS[name](X, None)
    plainly = CALLS[name](X, outs_for(expected, lambda x: x))
    for where, there in itertools.product(INS, OUTS):
        x = sw.distribute_tensor(X, MESH, where)
        out = outs_for(expected, lambda x, there=there: sw.distribute_tensor(x, MESH, there))
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FallbackWarning)
            returned = CALLS[name](x, out)
        assert type(returned) is type(plainly) or isinstance(returned, Tensor)
        assert all(given is target for given, target in zip(as_tensors(returned), as_tensors(out)))
        for target, value in zip(as_tensors(out), as_tensors(expected), strict=True):
            check_shards(target)
            assert target.placements == there
            torch.testing.assert_close(whole(target), value)


def test_an_argument_may_be_the_target() -> None:
    x, y = (sw.distribute_tensor(X, MESH, where) for where in ([S0, R], [S1, S0]))
    assert torch.mul(x, y, out=x) is x
    torch.testing.assert_close(whole(x), X * X)


def test_element_wise_calls_write_at_once() -> None:
    """Where all tensors lie alike, as in an optimizer's step, there is no result to be copied."""
    x, y = (sw.distribute_tensor(t, MESH, [S0, S1]) for t in (X, X.flip(0)))
    ops: list[str] = []

    class Seen(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            ops.append(func._schema.name)
            return func(*args, **(kwargs or {}))

    torch.maximum(x, y, out=y)
    with Seen():
        torch.maximum(x, y, out=y)
    assert ops == ["aten::maximum"] * 4  # once on each rank
    torch.testing.assert_close(whole(y), torch.maximum(X, X.flip(0)))


def test_names_of_results() -> None:
    x = sw.distribute_tensor(X, MESH, [S0, S1])
    values, indices = (sw.distribute_tensor(t, MESH, [S0, R]) for t in (torch.zeros(4).double(), torch.zeros(4).long()))
    found = torch.min(x, 0, out=(values, indices))
    assert found.values is values and found.indices is indices
    torch.testing.assert_close(whole(values), X.amin(0))


def test_a_pending_target_costs_nothing_more() -> None:
    """What torch writes over is not read, so nothing is reduced; and terms of a sum are written as they are."""
    a, b = sw.distribute_tensor(X, MESH, [R, S1]), sw.distribute_tensor(X.t().contiguous(), MESH, [R, S0])
    x, target = sw.distribute_tensor(X, MESH), sw.distribute_tensor(X, MESH, [P, R])
    out = sw.distribute_tensor(torch.ones(5, 5).double(), MESH, [R, P])
    with CommDebugMode() as comm:
        torch.mm(a, b, out=out)
        torch.add(x, 1, out=target)
    assert not comm.comms and out.placements == (R, P)
    torch.testing.assert_close(whole(out), X @ X.t())


def test_a_pending_target_has_its_own_dtype() -> None:
    for where in ([P, R], [P, AVG], [AVG, S1], [MIN, MIN]):
        out = sw.distribute_tensor(torch.ones(5, 4), MESH, where)
        torch.exp(sw.distribute_tensor(X, MESH, [S0, R]), out=out)
        assert torch.equal(whole(out), X.exp().float()) and list(out.placements) == where


@pytest.mark.parametrize("placement", [Partial("product"), Partial("norm", 2)], ids=str)
def test_terms_that_values_are_not_taken_apart_into(placement: Partial) -> None:
    out = sw.DTensor.from_local(torch.ones(5, 4).double(), MESH, [placement, R])
    torch.exp(sw.distribute_tensor(X, MESH, [S0, R]), out=out)
    torch.testing.assert_close(whole(out), X.exp())
    assert out.placements == (R, R)


# Refused, and nothing written


@pytest.mark.parametrize("where", [[R, R], [S0, R], [S1, R], [P, S0]], ids=str)
@pytest.mark.parametrize("shape", [(0,), (5,), (4, 5), (5, 4, 1)])
def test_a_target_of_another_shape(shape: tuple[int, ...], where: list[Any]) -> None:
    """Torch would resize it."""
    old = torch.ones(shape).double()
    x, out = (
        sw.distribute_tensor(X, MESH, [S1, R]),
        sw.distribute_tensor(old, MESH, where if len(shape) > 1 else [R, R]),
    )
    with CommDebugMode() as comm, pytest.raises(InPlaceError) as error:
        torch.exp(x, out=out)
    assert str(error.value) == (
        f"exp cannot write a result of shape [5, 4] and torch.float64 to out= of shape {list(shape)} and "
        f"torch.float64; DTensors are not resized. Nothing was written; give out= a tensor that fits, or call exp "
        f"without out="
    )
    assert not comm.comms and torch.equal(whole(out), old)


def test_one_target_of_several_that_does_not_fit() -> None:
    values, indices = (sw.distribute_tensor(t, MESH, [R, S0]) for t in (torch.zeros(4).double(), torch.zeros(3).long()))
    with pytest.raises(InPlaceError):
        torch.max(sw.distribute_tensor(X, MESH, [S0, S1]), 0, out=(values, indices))
    assert not whole(values).any()


def test_a_shape_that_depends_on_the_data() -> None:
    x, out = sw.distribute_tensor(X, MESH, [S0, R]), sw.distribute_tensor(torch.ones(21).double(), MESH, [S0, R])
    with pytest.raises(InPlaceError, match="masked_select cannot write a result of shape"):
        torch.masked_select(x, x > 0, out=out)
    assert torch.equal(whole(out), torch.ones(21).double())


def test_running_statistics_are_left_alone() -> None:
    mean, var = (sw.distribute_tensor(t, MESH) for t in (torch.zeros(4).double(), torch.ones(4).double()))
    shapes = ((5, 4), [S0, R]), ((4, 4), [S1, R]), ((4,), [R, R])
    outs = [sw.distribute_tensor(torch.zeros(shape).double(), MESH, where) for shape, where in shapes]
    with pytest.raises(InPlaceError, match="cannot write a result of shape"):
        torch.native_batch_norm(
            sw.distribute_tensor(X, MESH, [S0, R]), None, None, mean, var, True, 0.5, 1e-5, out=tuple(outs)
        )
    assert not whole(mean).any() and torch.equal(whole(var), torch.ones(4).double())


@pytest.mark.parametrize("training", [True, False])
def test_statistics_that_are_none_in_evaluation(training: bool) -> None:
    """Torch's kernel for meta tensors says that there are some."""
    given = None, None, torch.zeros(4).double(), torch.ones(4).double(), training, 0.5, 1e-5
    plain = [torch.empty(shape).double() for shape in ((5, 4), *[(4 * training,)] * 2)]
    dist = [sw.distribute_tensor(x, MESH, [S0, P]) for x in plain]
    torch.native_batch_norm(X, *given, out=tuple(plain))
    given = [sw.distribute_tensor(x, MESH) if isinstance(x, Tensor) else x for x in given]
    torch.native_batch_norm(sw.distribute_tensor(X, MESH, [S0, S1]), *given, out=tuple(dist))
    for mine, expected in zip(dist, plain, strict=True):
        torch.testing.assert_close(whole(mine), expected)


def test_gradients_are_refused() -> None:
    x, out = (
        sw.distribute_tensor(X, MESH).requires_grad_(),
        sw.distribute_tensor(torch.ones(5, 4).double(), MESH, [S0, R]),
    )
    with pytest.raises(RuntimeError, match="out= is not differentiable"):
        torch.exp(x, out=out)
    assert torch.equal(whole(out), torch.ones(5, 4).double())
    with torch.no_grad():
        torch.exp(x, out=out)
    torch.testing.assert_close(whole(out), X.exp())


# Dtypes


def test_a_result_is_converted() -> None:
    x, out = (
        sw.distribute_tensor(X.float(), MESH, [S0, R]),
        sw.distribute_tensor(torch.zeros(5, 4).double(), MESH, [S1, R]),
    )
    torch.exp(x, out=out)
    assert torch.equal(whole(out), X.float().exp().double())


@pytest.mark.parametrize(
    "call", [lambda x, out: torch.add(x, 1.5, out=out), lambda x, out: torch.mm(x, x.t(), out=out)]
)
def test_a_result_that_cannot_be_converted(call: Callable) -> None:
    for on in (lambda x: x, lambda x: sw.distribute_tensor(x, MESH), lambda x: sw.distribute_tensor(x, MESH, [S0, S1])):
        out = on(torch.zeros(4, 4).long())
        with pytest.raises(RuntimeError):
            call(on(X[:4]), out)
        assert not whole(out).any() if isinstance(out, sw.DTensor) else True


@pytest.mark.parametrize("name", sorted(COMPUTED_AS_OUT))
def test_reductions_compute_in_the_dtype_of_the_target(name: str) -> None:
    """A sum in single precision, converted, would be another number."""
    function = getattr(torch, name)
    x = (X.float() + 1000) / 3
    expected = function(x, dim=0, out=torch.empty_like(function(X, dim=0)))
    assert not torch.equal(expected, function(x, dim=0).double())
    for where in ([S0, R], [S1, S0], [R, R]):
        out = sw.distribute_tensor(torch.empty_like(expected), MESH, [S0, R])
        function(sw.distribute_tensor(x, MESH, where), dim=0, out=out)
        torch.testing.assert_close(whole(out), expected, atol=0, rtol=1e-14)


def test_an_overload_with_out_is_an_op_like_others() -> None:
    a, b, out = (sw.distribute_tensor(normal(4, 4), MESH, [place, R]) for place in (S0, R, S0))
    torch.ops.aten.mm.out(a, b, out=out)
    torch.testing.assert_close(out.full_tensor(), a.full_tensor() @ b.full_tensor())
