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
from shardwise.dispatch.outs import COMPUTED_AS_OUT
from shardwise.errors import FallbackWarning, InPlaceError

MESH = sw.simulate((2, 2), ("a", "b"))
R, S0, S1, P = Replicate(), Shard(0), Shard(1), Partial()
X = normal(5, 4)

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
    for where, there in itertools.product([(R, R), (S0, R), (S1, S0), (P, S0)], [(R, R), (S0, R), (R, S0), (S0, S0)]):
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


# Refused, and nothing written


@pytest.mark.parametrize("shape", [(0,), (5,), (4, 5), (5, 4, 1)])
def test_tensors_are_not_resized(shape: tuple[int, ...]) -> None:
    x, out = sw.distribute_tensor(X, MESH, [S0, R]), sw.distribute_tensor(torch.ones(shape).double(), MESH)
    with pytest.raises(InPlaceError, match=r"cannot write a result of shape \[5, 4\] to out= of shape"):
        torch.exp(x, out=out)
    assert out.shape == shape and torch.equal(whole(out), torch.ones(shape).double())


def test_a_pending_sum_is_not_written_to() -> None:
    x, out = sw.distribute_tensor(X, MESH, [S0, R]), sw.distribute_tensor(torch.ones(5, 4).double(), MESH, [P, R])
    with pytest.raises(InPlaceError, match="cannot write to out= that lies as"):
        torch.exp(x, out=out)
    assert torch.equal(whole(out), torch.ones(5, 4).double())


def test_running_statistics_are_left_alone() -> None:
    mean, var = (sw.distribute_tensor(t, MESH) for t in (torch.zeros(4).double(), torch.ones(4).double()))
    outs = [sw.distribute_tensor(torch.zeros(n).double(), MESH) for n in (3, 4, 4)]
    with pytest.raises(InPlaceError):
        torch.native_batch_norm(
            sw.distribute_tensor(X, MESH, [S0, R]), None, None, mean, var, True, 0.5, 1e-5, out=tuple(outs)
        )
    assert not whole(mean).any() and torch.equal(whole(var), torch.ones(4).double())


def test_gradients_are_refused_as_torch_does() -> None:
    x, out = X.clone().requires_grad_(), torch.empty(5, 4).double()
    said = []
    for a, b in ((x, out), (sw.distribute_tensor(X, MESH).requires_grad_(), sw.distribute_tensor(out, MESH))):
        with pytest.raises(RuntimeError, match="don't support automatic differentiation") as error:
            torch.exp(a, out=b)
        said.append(str(error.value))
    assert said[0] == said[1]


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
    said = []
    for on in (lambda x: x, lambda x: sw.distribute_tensor(x, MESH)):
        with pytest.raises(RuntimeError) as error:
            call(on(X[:4]), on(torch.zeros(4, 4).long()))
        said.append(str(error.value))
    assert said[0] == said[1]


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
