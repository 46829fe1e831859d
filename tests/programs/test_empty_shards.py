"""Ranks that hold nothing, and tensors of nothing: no rank raises or rounds alone."""

from __future__ import annotations

from collections.abc import Callable
from itertools import product
from typing import Any

import pytest
import torch
from compare import beside, compare
from features import differentiates
from meshes import GRID, LINE, PAIR, data, numbers
from sweep import normal, place, same
from torch import Tensor
from torch.nn import functional as F

import shardwise as sw
from shardwise.comm import ranked

R, S, P = sw.Replicate(), sw.Shard, sw.Partial


def _convolution(x: Tensor, **how: Any) -> Tensor:
    weight, bias = beside(x, torch.ones(3, x.shape[1], 2).double()), beside(x, torch.ones(3).double())
    return F.conv1d(x, weight.requires_grad_(), bias.requires_grad_(), **how)


OF_NOTHING: dict[str, Callable[[Tensor], Tensor]] = {
    "group norm": lambda x: F.group_norm(x, 2),
    "scaled group norm": lambda x: F.group_norm(x, 2, x.detach().sum((0, 2)), x.detach().sum((0, 2))),
    "interpolate": lambda x: F.interpolate(x, scale_factor=2),
    "interpolate to a size": lambda x: F.interpolate(x, size=5, mode="linear"),
    "area": lambda x: F.interpolate(x, size=5, mode="area"),
    "convolution": _convolution,
    "padded convolution": lambda x: _convolution(x, padding=1),
}


@pytest.mark.filterwarnings("ignore::shardwise.errors.FallbackWarning")
@pytest.mark.parametrize("shape", [(0, 4, 6), (2, 0, 6), (2, 4, 0), (0, 4, 0)], ids=str)
@pytest.mark.parametrize("name", OF_NOTHING)
def test_layers_of_nothing(name: str, shape: tuple[int, ...]) -> None:
    def program(x: Tensor) -> tuple[Any, ...]:
        y = OF_NOTHING[name](x)
        y.sum().backward()
        return y, x.grad

    x = torch.empty(shape, dtype=torch.float64)
    try:
        program(x.clone().requires_grad_())
    except (RuntimeError, ValueError):
        pytest.skip("torch refuses it")
    for placement in (S(0), S(1), S(2), P(), R):
        same(program, x, placement)


@pytest.mark.filterwarnings("ignore::shardwise.errors.FallbackWarning")
@pytest.mark.parametrize("padding", ["same", 1])
def test_a_convolution_of_no_channels(padding: Any) -> None:
    """Torch gives it no channels, however many filters there are."""

    def program(x: Tensor) -> tuple[Tensor]:
        return (F.conv1d(x.new_zeros(1, 0, 3), x.new_zeros(3, 0, 1), x[1:], padding=padding),)

    same(program, normal(4), S(0))


def test_windows_of_nothing_are_not_expanded() -> None:
    """Torch refuses to write to expanded tensors, and would do so on the ranks that hold nothing alone."""
    x = torch.arange(4.0)
    d = place(x, S(0), mesh=(2,))
    windows = d[:2].unfold(0, 2, 1)
    with torch._C.DisableTorchFunctionSubclass():
        shards = [windows, *windows._peers]
        assert [tuple(torch._C.TensorBase.size(shard)) for shard in shards] == [(1, 2), (0, 2)]
        assert [shard.stride() for shard in shards] == [(1, 1), (1, 1)]


@pytest.mark.parametrize("loss", [F.multi_margin_loss, F.multilabel_margin_loss])
@pytest.mark.parametrize("reduction", ["sum", "mean", "none"])
def test_losses_of_no_rows(loss: Any, reduction: str) -> None:
    """Torch leaves the sum of none to chance."""
    x = normal(1, 7)
    target = torch.tensor([3]) if loss is F.multi_margin_loss else torch.tensor([[3, 1, -1, 0, 0, 0, 0]])
    for _ in range(20):
        torch.full((64,), 7e77, dtype=torch.float64)  # what memory may hold
        found = loss(place(x, S(0)), place(target, S(0)), reduction=reduction)
        torch.testing.assert_close(found.full_tensor(), loss(x, target, reduction=reduction))


@pytest.mark.parametrize("mesh", [PAIR, LINE, sw.simulate((5,), ("tp",))], ids=str)
def test_mean_over_uneven_and_empty_shards(mesh: sw.Mesh) -> None:
    d = sw.distribute_tensor(numbers(3, 4), mesh, [S(0)]).requires_grad_()
    mean = d.mean()
    assert mean.item() == 5.5
    mean.backward()
    torch.testing.assert_close(d.grad.full_tensor(), torch.full((3, 4), 1 / 12, dtype=torch.float64))
    for relative in (torch.nanmean, torch.std, torch.var_mean, torch.logsumexp, torch.median, F.normalize):
        compare(lambda t, f=relative: f(t, dim=0), [data(3, 4)], mesh, [[S(0)]])


EMPTY: dict[str, Callable[[Tensor], Tensor | tuple]] = {
    **{f.__name__: f for f in (torch.amax, torch.max, torch.sum, torch.mean, torch.argmax, torch.std, torch.aminmax)},
    "max over rows": lambda t: t.max(0),
    "argmin over rows": lambda t: t.argmin(0),
    "sort": lambda t: t.sort(0),
    "topk": lambda t: t.topk(1, 0),
    "median": lambda t: t.median(0),
    "cumsum": lambda t: t.cumsum(0),
    "quantile": lambda t: torch.quantile(t, 0.5, dim=0),
    "softmax": lambda t: t.softmax(0),
    "norm": lambda t: torch.linalg.vector_norm(t, float("inf"), 0),
    "index": lambda t: t[beside(t, torch.tensor([1, 0, 1]))],
    "conv1d": lambda t: F.conv1d(t.t().unsqueeze(0), beside(t, torch.ones(2, 3, 2, dtype=torch.float64)), padding=1),
    "max_pool1d": lambda t: F.max_pool1d(t.t(), 2),
    "batch_norm": lambda t: F.batch_norm(t, None, None, training=True),
    "group_norm": lambda t: F.group_norm(t, 3),
    "cross_entropy": lambda t: F.cross_entropy(t, beside(t, torch.tensor([2, 0]))),
    "nll_loss": lambda t: F.nll_loss(t, beside(t, torch.tensor([2, 0]))),
    "svd": lambda t: torch.linalg.svdvals(t.unsqueeze(1)),
    "interpolate": lambda t: F.interpolate(t.t().unsqueeze(0), size=5),
    "fft": lambda t: torch.fft.rfft(t, dim=0).real,
    "sdpa": lambda t: F.scaled_dot_product_attention(t.unsqueeze(1), t.unsqueeze(1), t.unsqueeze(1)),
}


@pytest.mark.parametrize("name", EMPTY)
def test_empty_shards_raise_on_no_rank_alone(name: str) -> None:
    backward = differentiates(EMPTY[name], data(2, 3))
    compare(EMPTY[name], [data(2, 3)], LINE, [[S(0)]], backward=backward)
    compare(EMPTY[name], [data(2, 3)], GRID, [[S(0), S(0)]], backward=backward)


def test_strides_of_what_a_call_returns_besides_its_writes() -> None:
    """The first rank holds nothing: no rank may take a view for possible that another refuses."""

    def program(x: Tensor) -> Tensor:
        mean, variance = beside(x, torch.zeros(3).double()), beside(x, torch.ones(3).double())
        return F.batch_norm(x[1::2].T, mean, variance, training=True).view(9, 1)

    whole = normal(7, 3)
    dist = sw.DTensor.from_local(ranked([whole[:, :0].clone(), whole.clone()]), PAIR, [S(1)])
    torch.testing.assert_close(program(dist).full_tensor(), program(whole))


@pytest.mark.parametrize("rows", [(0, 2), (2, 0)])
def test_nothing_attended_to(rows: tuple[int, int]) -> None:
    """Whether a mask then has a gradient depends on the version of torch."""

    def program(mask: Tensor) -> tuple[Any, ...]:
        query, key = (beside(mask, normal(1, 1, size, 3)).requires_grad_() for size in rows)
        F.scaled_dot_product_attention(query, key, key, mask).sum().backward()
        return query.grad, key.grad

    for placement in (S(0), S(1), R):
        same(program, normal(*rows), placement)


UNSAVED: dict[str, tuple[tuple[int, ...], Callable[[Tensor], Tensor]]] = {
    "interpolate": ((1, 1, 2), lambda x: F.interpolate(x, scale_factor=2, mode="nearest")),
    "bias": ((2,), lambda x: F.group_norm(beside(x, normal(1, 2, 1, 2)), 2, beside(x, normal(2)), x)),
    "mask": ((1, 1), lambda x: F.scaled_dot_product_attention(*(beside(x, t) for t in [normal(1, 1, 1, 1)] * 3), x)),
    "pad": ((1, 2), lambda x: F.pad(x, (1, 1))),
}


@pytest.mark.parametrize("name", UNSAVED)
def test_what_an_op_does_not_save_may_be_written_to_where_nothing_is_held(name: str) -> None:
    shape, function = UNSAVED[name]

    def program(x: Tensor) -> tuple[Any, ...]:
        y = function(x)
        with torch.no_grad():
            x.zero_()
        y.sin().sum().backward()
        return y, x.grad

    for dim, ranks in product(range(len(shape)), (3, 4)):
        same(program, normal(*shape), S(dim), mesh=(ranks,))


@pytest.mark.parametrize("function", [torch.cummax, torch.cummin], ids=["cummax", "cummin"])
def test_gradients_of_nothing_are_no_arguments(function: Callable[..., Any]) -> None:
    """Whoever writes to one writes to nothing that a later pass needs."""

    def program(x: Tensor) -> tuple[Any, ...]:
        y, _ = function(x, 1)
        (grad,) = torch.autograd.grad(y.square().sum(), [x], retain_graph=True)
        grad.neg_()
        y.sum().backward()
        return grad, x.grad

    same(program, normal(1, 3), S(0))
