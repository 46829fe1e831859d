"""Tracing: what functions do besides calling ops on their arguments."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from sweep import normal, place, sweep
from torch import Tensor
from torch.overrides import handle_torch_function, has_torch_function

import shardwise as sw
from shardwise.dispatch.planning.trace import LARGE, Trace, trace_call

R, S = sw.Replicate(), sw.Shard
CPU = torch.device("cpu")


def traced(function: Callable[..., Any], *shapes: tuple[int, ...]) -> Trace:
    metas = [torch.empty(shape, device="meta") for shape in shapes]
    return trace_call(function, metas, {}, metas, CPU)


def whole(function: Callable[..., Any]) -> Callable[..., Any]:
    """A function that reaches dispatch as one call, as torch's own functions do."""

    def call(*args: Tensor) -> Any:
        return handle_torch_function(call, args, *args) if has_torch_function(args) else function(*args)

    return call


# Tensors of the function's own


def test_the_numbers_of_a_function_are_constants_of_its_trace() -> None:
    trace = traced(lambda x: x[torch.tensor([1, 0, 1])] * torch.tensor(2.0), (2, 3))
    assert [call.name for call in trace.calls] == ["index", "mul"]
    assert [constant.tolist() for _, constant in trace.constants] == [[1, 0, 1], 2.0]
    assert [value for value, _ in trace.constants] == [call.inputs[1] for call in trace.calls]


def changing(x: Tensor) -> Tensor:
    number = torch.zeros(())
    number += 5
    y = x - number
    number.sub_(1)
    return y + number


def test_numbers_are_written_down_when_they_are_used() -> None:
    """Until then the function may still change them; after that, what it makes of them is another constant."""
    trace = traced(changing, (2, 3))
    assert [call.name for call in trace.calls] == ["sub", "add"]
    assert [constant.item() for _, constant in trace.constants] == [5.0, 4.0]
    sweep(whole(changing), normal(5, 3))


def test_what_is_random_or_large_is_made_again_in_every_call() -> None:
    for function, calls in (
        (lambda x: x + torch.rand(()), ["rand", "detach", "add"]),
        (lambda x: x[torch.arange(LARGE)], ["arange", "detach", "index"]),
        (lambda x: x[torch.arange(LARGE // 4)], ["index"]),
    ):
        assert [call.name for call in traced(function, (LARGE,)).calls] == calls


def test_new_tensors_are_made_where_the_shards_are() -> None:
    made = traced(lambda x: torch.zeros(3, device=x.device) + x, (2, 3)).calls[0]
    assert made.kwargs["device"] == CPU


LENGTHS = ((7, 6, 7), (3, 2, 3))
TARGETS = torch.tensor([[1, 2, 3], [2, 1, 2], [3, 3, 1]])

OWN: dict[str, tuple[Callable[..., Any], list[Tensor]]] = {
    "ctc_loss": (lambda x, t: F.ctc_loss(x.log_softmax(2), t, *LENGTHS), [normal(7, 3, 5), TARGETS]),
    "unravel_index": (lambda i: torch.unravel_index(i, (3, 4)), [torch.tensor([[3, 7], [11, 0], [5, 5]])]),
    "quantile": (lambda x: torch.quantile(x, 0.3, dim=1, keepdim=True), [normal(5, 3)]),
    "quantiles": (lambda x, q: torch.nanquantile(x, q.sigmoid(), dim=0), [normal(5, 3), normal(2)]),
    "stft": (lambda x, w: torch.stft(x, 4, window=w, return_complex=True).real, [normal(3, 9), normal(4)]),
    "circular": (lambda x: F.pad(x, (2, 1, 1, 1), mode="circular"), [normal(2, 3, 4)]),
    "gradient": (lambda x: torch.gradient(x, spacing=2.0, dim=1), [normal(5, 4)]),
    "block_diag": (torch.block_diag, [normal(2, 3), normal(3, 2)]),
    "cartesian_prod": (torch.cartesian_prod, [normal(3), normal(2)]),
    "masked var": (lambda x: torch.masked.var(x, 1, mask=x > 0), [normal(5, 4)]),
    "masked softmax": (lambda x: torch.masked.softmax(x, 0, mask=x > -1), [normal(5, 4)]),
}  # fmt: skip


@pytest.mark.parametrize("name", OWN)
def test_functions_that_make_tensors_of_their_own(name: str) -> None:
    function, inputs = OWN[name]
    sweep(function, *inputs)


# Temporaries that change their shape, and writes to them


def reshaping(x: Tensor) -> Tensor:
    y = x * 2
    y.unsqueeze_(0)
    y.transpose_(0, 1)
    y.squeeze_(1)
    return y.t_() + 1


def test_temporaries_may_change_their_shape_in_place() -> None:
    trace = traced(reshaping, (2, 3))
    assert [call.name for call in trace.calls] == ["mul", "unsqueeze", "transpose", "squeeze", "t", "add"]
    assert trace.output.shape == (3, 2)
    sweep(whole(reshaping), normal(5, 3))


@pytest.mark.parametrize("placement", [R, S(0), S(1)], ids=str)
def test_arguments_may_too_where_their_memory_stays(placement: sw.Placement) -> None:
    d, expected = place(normal(5, 3), placement), normal(5, 3)
    for t in (d, expected):
        assert t.unsqueeze_(0).transpose_(1, 2).squeeze_(0) is t
    assert d.shape == (3, 5) and torch.equal(d.full_tensor(), expected)
    for resize in (lambda: d.resize_(5, 2), lambda: d.resize_as_(d[:2])):
        with pytest.raises(sw.errors.InPlaceError) as error:
            resize()
        text = "an op that changes the shape of a DTensor in place is not available; use its result"
        assert str(error.value) == text
    assert d.shape == (3, 5) and torch.equal(d.full_tensor(), expected)


def filling(x: Tensor) -> Tensor:
    out = x.new_empty(x.shape[0] + 2, x.shape[1])
    out[1:-1] = x
    out[0] = x[-1]
    out[-1].copy_(x[0])
    return out


def adding_to_parts(x: Tensor) -> Tensor:
    y = x * 1
    y[1:].add_(1)
    y.select(1, 0).mul_(3)
    y.t()[-1].copy_(y[:, 0])
    return y


def rows_and_columns(x: Tensor) -> Tensor:
    y = x + 0
    for row in range(y.shape[0]):
        y[row].mul_(row)
    for column in range(y.shape[1]):
        y.narrow(1, column, 1).sub_(column)
    return y


@pytest.mark.parametrize("function", [filling, adding_to_parts, rows_and_columns], ids=lambda f: f.__name__)
def test_functions_that_write_through_views_of_their_own(function: Callable[[Tensor], Tensor]) -> None:
    sweep(whole(function), normal(5, 3))


def test_views_of_what_is_written_to_form_a_family() -> None:
    trace = traced(lambda x: (y := x * 2, y.t()[1:].add_(1), x.t())[0], (2, 3))
    product, turned, part = (call.outputs[0].index for call in trace.calls[:3])
    assert trace.written_families == {product: product, turned: product, part: product}


# Memory


COPIES: dict[str, Callable[[Tensor], Tensor]] = {
    "contiguous": lambda x: x.mT.contiguous(),
    "contiguous columns": lambda x: x[:, 1:3].contiguous(),
    "contiguous rows": lambda x: x[::2].contiguous(),
    "contiguous of equals": lambda x: x[:1].expand(4, 4).contiguous(),
    "reshape": lambda x: x.mT.reshape(16),
    "reshape of columns": lambda x: x[:, :2].reshape(8),
    "reshape of rows": lambda x: x[::2].reshape(8),
    "flatten": lambda x: x.mT.flatten(),
}
VIEWS: dict[str, Callable[[Tensor], Tensor]] = {
    "contiguous": lambda x: x.contiguous(),
    "reshape": lambda x: x.reshape(16),
    "turned twice": lambda x: x.mT.reshape(4, 4),
    "unflatten": lambda x: x.mT.unflatten(0, (2, 2)),
}


def check_writes(take: Callable[[Tensor], Tensor]) -> None:
    for placement in (R, S(0), S(1)):
        x, d = normal(4, 4), place(normal(4, 4), placement)
        taken, ours = take(x).add_(1), take(d).add_(1)
        assert torch.equal(ours.full_tensor(), taken), placement
        assert torch.equal(d.full_tensor(), x), placement


@pytest.mark.parametrize("take", VIEWS.values(), ids=VIEWS)
def test_what_torch_makes_a_view_is_written_through(take: Callable[[Tensor], Tensor]) -> None:
    check_writes(take)


@pytest.mark.parametrize("take", COPIES.values(), ids=COPIES)
def test_what_torch_makes_a_copy_is_not(take: Callable[[Tensor], Tensor]) -> None:
    check_writes(take)


# Modules


@pytest.mark.parametrize("kind", [torch.nn.LSTM, torch.nn.GRU, torch.nn.RNN])
@pytest.mark.parametrize("placement", [R, S(0), S(1), S(2)])
def test_a_recurrent_module_makes_its_own_first_state(kind: Any, placement: sw.Placement) -> None:
    theirs = kind(3, 4, num_layers=2, batch_first=True, bidirectional=True, dtype=torch.float64)
    mesh = place(normal(2), R).device_mesh
    ours = sw.distribute_module(
        kind(3, 4, num_layers=2, batch_first=True, bidirectional=True, dtype=torch.float64), mesh
    )
    with torch.no_grad():
        for p, q in zip(ours.parameters(), theirs.parameters(), strict=True):
            p.copy_(sw.distribute_tensor(q, mesh))
    x = normal(4, 5, 3).requires_grad_()
    d = place(normal(4, 5, 3), placement).requires_grad_()
    expected, found = theirs(x)[0], ours(d)[0]
    torch.testing.assert_close(found.detach().full_tensor(), expected.detach())
    expected.square().sum().backward()
    found.square().sum().backward()
    torch.testing.assert_close(d.grad.full_tensor(), x.grad)
    for p, q in zip(ours.parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(p.grad.full_tensor(), q.grad)
