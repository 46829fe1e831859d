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


# Targets of another shape


@pytest.mark.parametrize("placements", [[R, R], [S0, R], [R, S0], [P, S0], [MAX, R]], ids=str)
@pytest.mark.parametrize("shape", [(0,), (5,), (4, 5), (5, 4, 1)])
def test_tensors_are_resized_as_torch_does(shape: tuple[int, ...], placements: list[Any]) -> None:
    """They keep their placements, and torch's warning tells of those that were not empty."""
    plain = torch.ones(shape).double()
    x, out = sw.distribute_tensor(X, MESH, [S1, R]), sw.distribute_tensor(plain, MESH, placements)
    said = []
    for a, b in ((X, plain), (x, out)):
        with warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("always")
            assert torch.exp(a, out=b) is b
        said.append([(w.category, str(w.message).split("(Triggered")[0].strip(), w.filename) for w in told])
    assert said[0] == said[1] and len(said[0]) == (0 not in shape)
    check_shards(out)
    assert out.shape == (5, 4) and list(out.placements) == placements
    assert torch.equal(whole(out), X.exp())
    out.mul_(2)
    assert torch.equal(whole(out), X.exp() * 2)


def test_results_of_which_some_are_resized() -> None:
    x, values = sw.distribute_tensor(X, MESH, [S0, S1]), sw.distribute_tensor(torch.zeros(0).double(), MESH, [S0, R])
    indices = sw.distribute_tensor(torch.zeros(4).long(), MESH, [R, S0])
    torch.max(x, 0, out=(values, indices))
    torch.testing.assert_close(whole(values), X.amax(0))
    assert torch.equal(whole(indices), X.argmax(0)) and values.placements == (S0, R)


def test_a_shape_that_placements_do_not_fit() -> None:
    x, out = sw.distribute_tensor(X, MESH, [S0, R]), sw.distribute_tensor(torch.ones(5, 4).double(), MESH, [R, S1])
    with pytest.raises(InPlaceError) as error:
        torch.sum(x, 0, out=out)
    assert str(error.value) == (
        "sum cannot write a result of shape [4] to out= that lies as [5,4] S(1)@b: its placements do not fit (S(1) "
        "names dim 1, but the tensor has 1 dims: [4]). Nothing was changed; give it a tensor of that shape"
    )
    assert torch.equal(whole(out), torch.ones(5, 4).double())


@pytest.mark.parametrize("part", [lambda x: x[:2], lambda x: x.view(20), lambda x: x.reshape(4, 5)])
def test_a_view_is_not_resized(part: Callable[[Tensor], Tensor]) -> None:
    """On one device what it is a view of would show some of what is written."""
    for where in ([R, R], [S0, R], [S1, R]):
        source = sw.distribute_tensor(torch.ones(5, 4).double(), MESH, where)
        with pytest.raises(InPlaceError, match="it is a view, and what it is a view of would not show"):
            torch.exp(sw.distribute_tensor(X, MESH), out=part(source))
        assert torch.equal(whole(source), torch.ones(5, 4).double())


def test_a_copied_view_of_a_resized_target_shows_what_was_written() -> None:
    out = sw.distribute_tensor(torch.ones(4, 5).double(), MESH, [S1, R])
    row = out.reshape(20)  # a copy, of data of other ranks
    with pytest.warns(UserWarning, match="was resized"):
        torch.exp(sw.distribute_tensor(X, MESH), out=out)
    torch.testing.assert_close(row.full_tensor(), X.exp().reshape(20))


@pytest.mark.parametrize("placement", [Partial("product"), Partial("norm", 2)], ids=str)
def test_terms_that_values_are_not_taken_apart_into(placement: Partial) -> None:
    out = sw.DTensor.from_local(torch.ones(5, 4).double(), MESH, [placement, R])
    torch.exp(sw.distribute_tensor(X, MESH, [S0, R]), out=out)
    torch.testing.assert_close(whole(out), X.exp())
    assert out.placements == (R, R)


# Refused, and nothing written


def test_running_statistics_are_left_alone() -> None:
    mean, var = (sw.distribute_tensor(t, MESH) for t in (torch.zeros(4).double(), torch.ones(4).double()))
    shapes = ((5, 4), [S0, R]), ((4, 4), [S1, R]), ((4,), [R, R])
    outs = [sw.distribute_tensor(torch.zeros(shape).double(), MESH, where) for shape, where in shapes]
    with pytest.raises(InPlaceError, match="its placements do not fit"):
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


OVERLAPPING: dict[str, Callable[[Tensor], Any]] = {
    "gather": lambda x: torch.gather(x, 0, x.long(), out=x),
    "take": lambda x: torch.take(x, x.long(), out=x),
    "cat": lambda x: torch.cat([x], out=x),
    "masked_select": lambda x: torch.masked_select(x, x > 1, out=x),
}


@pytest.mark.parametrize("name", OVERLAPPING)
def test_functions_that_must_not_write_to_an_argument(name: str) -> None:
    said = []
    for x in (torch.ones(4, 4), *(sw.distribute_tensor(torch.ones(4, 4), MESH, [p, R]) for p in (R, S0, P))):
        with pytest.raises(RuntimeError, match="unsupported operation") as error:
            OVERLAPPING[name](x)
        said.append(str(error.value))
    assert len(set(said)) == 1


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
