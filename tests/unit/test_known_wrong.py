"""Cases that other sharded-tensor systems got silently wrong: values, by their numbers in the project's list."""

# ruff: noqa: B023 (functions made in loops are called in them)

from __future__ import annotations

import itertools
from collections.abc import Callable

import pytest
import torch
from compare import beside, compare
from features import differentiates
from torch import Tensor
from torch.nn import functional as F

import shardwise as sw
from shardwise import DTensor, Partial, Replicate, Shard
from shardwise.comm import ranked

PAIR = sw.simulate((2,), ("tp",))
LINE = sw.simulate((4,), ("tp",))
GRID = sw.simulate((2, 2), ("dp", "tp"))
R, S0, S1, P = Replicate(), Shard(0), Shard(1), Partial()


def numbers(*shape: int) -> Tensor:
    return torch.arange(float(torch.Size(shape).numel()), dtype=torch.float64).view(shape)


def data(*shape: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64)


def pending(*terms: list[float]) -> DTensor:
    return DTensor.from_local(ranked([torch.tensor(t, dtype=torch.float64) for t in terms]), PAIR, [P])


@pytest.mark.parametrize("mesh", [PAIR, LINE, sw.simulate((5,), ("tp",))], ids=str)
def test_1_mean_over_uneven_and_empty_shards(mesh: sw.Mesh) -> None:
    d = sw.distribute_tensor(numbers(3, 4), mesh, [S0]).requires_grad_()
    mean = d.mean()
    assert mean.item() == 5.5
    mean.backward()
    torch.testing.assert_close(d.grad.full_tensor(), torch.full((3, 4), 1 / 12, dtype=torch.float64))
    for relative in (torch.nanmean, torch.std, torch.var_mean, torch.logsumexp, torch.median, F.normalize):
        compare(lambda t, f=relative: f(t, dim=0), [data(3, 4)], mesh, [[S0]])


def test_2_a_scalar_added_to_a_pending_sum_counts_once() -> None:
    d = sw.distribute_tensor(numbers(10, 1), PAIR, [S0])
    assert (d.sum() + 10).item() == 55
    assert (10 + d.sum()).item() == 55 and (d.sum() - 5).item() == 40 and (100 - d.sum()).item() == 55
    for add in (
        lambda t: t + torch.tensor(10.0, dtype=torch.float64),
        lambda t: torch.add(t, 10, alpha=3),
        lambda t: torch.rsub(t, 10),
        lambda t: torch.add(t, t, alpha=2) + 1,
        lambda t: t.lerp(t + 10, 0.25),
        lambda t: (2 * t + 1) / 2 - 3,
    ):
        for reduction in (P, Partial("avg"), Partial("max")):
            compare(add, [data(3)], PAIR, [[reduction]])


def test_3_a_number_is_not_part_of_a_stale_plan() -> None:
    d = pending([1.0, 3.0], [2.0, 1.0])
    for factor in (-5, 2, -5.0, 2.0, 0.5):
        assert (factor * d).tolist() == [3.0 * factor, 4.0 * factor]
        assert (d + factor).tolist() == [3.0 + factor, 4.0 + factor]
        assert d.pow(factor).tolist() == pytest.approx([3.0**factor, 4.0**factor])


STALE: list[Callable[[Tensor, float], Tensor]] = [
    lambda t, v: torch.add(t, t, alpha=v),
    lambda t, v: t.clamp(min=v),
    lambda t, v: F.softplus(t, beta=v),
    lambda t, v: F.layer_norm(t, (3,), eps=v),
    lambda t, v: t.norm(v),
    lambda t, v: torch.full_like(t, v) * t,
    lambda t, v: F.pad(t, (1, 1), value=v),
    lambda t, v: torch.quantile(t, v / 4),
    lambda t, v: torch.where(t > 0, t, v),
    lambda t, v: t.masked_fill(t > 0, v),
    lambda t, v: torch.cdist(t, t + 1, p=v),
    lambda t, v: t.renorm(2.0, 0, v),
    lambda t, v: torch.histc(t.detach(), 4, -v, v),
    lambda t, v: F.interpolate(t[None], scale_factor=v, mode="linear"),
]


@pytest.mark.parametrize("placement", [S0, S1, P, R])
def test_3_nor_are_the_numbers_of_other_functions(placement: sw.Placement) -> None:
    for function, value in itertools.product(STALE, (1.0, 2.0, 3.5)):
        compare(lambda t, f=function, v=value: f(t, v), [data(4, 3)], PAIR, [[placement]], backward=value != 1.0)


def test_3_nor_their_types() -> None:
    """1 == 1.0 == True, and 0.0 == -0.0."""
    d = sw.distribute_tensor(torch.arange(4), PAIR, [S0])
    for factor in (1, 1.0, True, 1j):
        assert (d * factor).dtype == (torch.arange(4) * factor).dtype
    for zero in (0.0, -0.0):
        assert torch.equal((1 / (d * zero)).full_tensor(), 1 / (torch.arange(4) * zero))


def test_4_norm_of_a_pending_sum() -> None:
    d = pending([1.0, 3.0], [2.0, 1.0]).requires_grad_()
    norm = d.norm()
    assert norm.item() == 5.0
    norm.backward()
    torch.testing.assert_close(d.grad.full_tensor(), torch.tensor([0.6, 0.8], dtype=torch.float64))
    for p in (0.0, 1.0, 2.0, 3.0, float("inf"), float("-inf")):
        compare(lambda t, p=p: torch.linalg.vector_norm(t, p), [data(4)], PAIR, [[P]])
        compare(lambda t, u, p=p: torch.dist(t, u, p), [data(4), data(4)], PAIR, [[P], [S0]], backward=p != 0)


def test_5_argmax_and_indices_are_global() -> None:
    assert sw.distribute_tensor(torch.tensor([10.0, 5, 3, 8]), PAIR, [S0]).argmax().item() == 0
    assert sw.distribute_tensor(torch.tensor([3.0, 5, 10, 8]), PAIR, [S0]).argmax().item() == 2
    x = data(3, 7)
    for placement, dim in itertools.product([S0, S1], [0, 1]):
        compare(lambda t, dim=dim: t.max(dim=dim), [x], LINE, [[placement]])
        compare(lambda t, dim=dim: t.argmin(dim), [x], LINE, [[placement]], backward=False)
        for relative in (torch.sort, torch.median, torch.cummax, torch.min, torch.argsort, torch.aminmax):
            run = lambda t, f=relative, dim=dim: f(t, dim=dim)  # noqa: E731
            compare(run, [x], LINE, [[placement]], backward=differentiates(run, x))
        compare(lambda t, dim=dim: (t.topk(2, dim), t.kthvalue(2, dim), t.mode(dim)), [x], LINE, [[placement]])
    for placement in (S0, S1, Shard(2)):
        pool = lambda t: F.max_pool2d(t, 2, stride=1, return_indices=True)  # noqa: E731
        compare(pool, [data(2, 5, 6)], PAIR, [[placement]])


def test_6_nonlinear_functions_of_a_pending_sum_reduce_first() -> None:
    x = sw.distribute_tensor(data(4, 4), PAIR, [S0])
    assert x.max().item() == x.full_tensor().max().item()
    d = pending([-4.0, 3.0], [2.0, 1.0])
    assert d.abs().tolist() == [2.0, 4.0] and d.clamp(min=0.0).tolist() == [0.0, 4.0]
    assert d.abs().sqrt().tolist() == pytest.approx([2**0.5, 2.0])
    edges = sw.distribute_tensor(torch.tensor([-3.0, 0.0, 3.5], dtype=torch.float64), PAIR)
    assert torch.bucketize(d, edges).tolist() == [1, 3]
    for function in (torch.abs, torch.square, torch.exp, torch.max, torch.sort, torch.sign, torch.prod, F.relu):
        compare(function, [data(4)], LINE, [[P]])


@pytest.mark.parametrize("placement", [S0, S1])
def test_7_views_that_cross_shards(placement: sw.Placement) -> None:
    for shape in ((16, 6), (96,), (2, 6, 8), (24, 4), (4, 24), (8, 12)):
        compare(lambda t, s=shape: t.view(s), [data(12, 8)], LINE, [[placement]])


def test_8_expand_of_a_dim_of_size_one() -> None:
    for placement in (S0, S1, P, R):
        compare(lambda t: t.expand(4, 4), [data(1, 4)], LINE, [[placement]])
        compare(lambda t: t.repeat(4, 2), [data(1, 4)], LINE, [[placement]])
        compare(lambda t, u: t * u, [data(1, 4), data(4, 4)], LINE, [[placement], [S0]])


@pytest.mark.parametrize("accumulate", [False, True])
@pytest.mark.parametrize("placements", list(itertools.product([R, S0, S1], [R, S0])), ids=str)
def test_9_index_put_of_a_diagonal(placements: tuple, accumulate: bool) -> None:
    def put(t: Tensor, values: Tensor) -> Tensor:
        rows = beside(t, torch.arange(4))
        return torch.index_put(t, (rows, rows), values, accumulate=accumulate)

    out = compare(put, [torch.zeros(4, 4, dtype=torch.float64), numbers(4) + 1], LINE, [[p] for p in placements])
    assert torch.equal(out[0].full_tensor(), torch.diag(numbers(4) + 1))


@pytest.mark.parametrize("mesh", [PAIR, LINE], ids=str)
@pytest.mark.parametrize("ignore", [-100, 1])
@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_10_and_19_weighted_losses(mesh: sw.Mesh, ignore: int, smoothing: float) -> None:
    target, weight = torch.tensor([0, 1, 2, 2, 3]), data(4).abs()
    for placement in (S0, S1, R, P):
        rows = S0 if placement == S0 else R

        def losses(t: Tensor) -> list[Tensor]:
            at, w = beside(t, target, rows), beside(t, weight)
            entropy = F.cross_entropy(t, at, weight=w, ignore_index=ignore, label_smoothing=smoothing)
            return [entropy, F.nll_loss(t, at, weight=w, ignore_index=ignore)]

        compare(losses, [data(5, 4)], mesh, [[placement]])


@pytest.mark.parametrize("placement", [S0, S1, R])
def test_10_relatives(placement: sw.Placement) -> None:
    target, weight, wide = torch.tensor([0, 1, 2, 2, 3]), data(4).abs(), data(5, 4).sigmoid()

    def losses(t: Tensor) -> list[Tensor]:
        rows, w = beside(t, target, S0 if placement == S0 else R), beside(t, weight)
        soft = beside(t, wide, placement)
        return [
            F.multi_margin_loss(t, rows, weight=w),
            F.binary_cross_entropy(t.sigmoid(), soft, weight=soft),
            F.binary_cross_entropy_with_logits(t, soft, pos_weight=w),
            F.cross_entropy(t, soft, weight=w, label_smoothing=0.1),
            F.cross_entropy(t, rows * 0 - 100, weight=w),  # of nothing: not a number
            F.nll_loss(t.unsqueeze(2).expand(5, 4, 3), rows.unsqueeze(1).expand(5, 3), weight=w, ignore_index=2),
        ]

    compare(losses, [data(5, 4)], LINE, [[placement]])


def test_11_clamping_a_pending_sum_in_place() -> None:
    d = DTensor.from_local(torch.tensor(1.5), PAIR, [P])
    assert d.clamp_(max=2) is d and d.placements == (P,)
    assert d.item() == 2.0


WRITES = {
    "add_": lambda t: t.add_(1),
    "mul_": lambda t: t.mul_(-2),
    "abs_": lambda t: t.abs_(),
    "relu": lambda t: F.relu(t, inplace=True),
    "slice": lambda t: t[1:].exp_(),
    "setitem": lambda t: t.__setitem__(0, 7.0),
    "masked_fill_": lambda t: t.masked_fill_(t > 0, 3.0),
    "zero_": lambda t: t.zero_(),
    "copy_": lambda t: t.copy_(t.exp()),
    "out": lambda t: torch.exp(t.clone(), out=t),
}


@pytest.mark.parametrize("write", WRITES.values(), ids=WRITES)
@pytest.mark.parametrize("placement", [P, Partial("avg"), Partial("max"), S0])
def test_11_every_write_is_right_or_refused(write: Callable, placement: sw.Placement) -> None:
    x = torch.tensor([1.5, -2.0, 0.5], dtype=torch.float64)
    d, expected = sw.distribute_tensor(x, PAIR, [placement]), x.clone()
    write(expected)
    try:
        write(d)
    except sw.errors.InPlaceError:
        assert isinstance(placement, Partial)
        expected = x
    assert d.placements == (placement,)
    torch.testing.assert_close(d.full_tensor(), expected)


READS: dict[str, Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]] = {
    "index": lambda t, i, j, s: t[i],
    "index_select": lambda t, i, j, s: t.index_select(0, i),
    "gather": lambda t, i, j, s: t.gather(0, j),
    "take_along_dim": lambda t, i, j, s: t.take_along_dim(j, 0),
    "take": lambda t, i, j, s: t.take(j),
    "places": lambda t, i, j, s: t[i, i % 4],
    "scatter_add": lambda t, i, j, s: t.scatter_add(0, j, s),
    "scatter_reduce": lambda t, i, j, s: t.scatter_reduce(0, j, s, "amax"),
    "index_add": lambda t, i, j, s: t.index_add(0, i[:2], s),
    "index_copy": lambda t, i, j, s: t.index_copy(0, i[:2], s),
    "index_put": lambda t, i, j, s: t.index_put((i[:2],), s, accumulate=True),
    "embedding": lambda t, i, j, s: F.embedding(j, t),
}


@pytest.mark.parametrize("name", READS)
@pytest.mark.parametrize("placement", [S0, S1, R, P])
def test_12_indices_that_cross_shards(name: str, placement: sw.Placement) -> None:
    rows, wide = torch.tensor([5, 0, 3, 3]), torch.tensor([[5, 0, 3, 3], [1, 2, 2, 0]])
    for where in (R, S0):
        read = lambda t, s: READS[name](t, beside(t, rows, where), beside(t, wide, where), s)  # noqa: E731
        compare(read, [data(6, 4), data(2, 4)], LINE, [[placement], [R]])
        compare(read, [data(6, 4), data(2, 4)], LINE, [[placement], [S1]])


@pytest.mark.parametrize("placement", [S0, S1, Shard(2), Shard(3), R])
def test_convolution_with_a_sharded_dim(placement: sw.Placement) -> None:
    inputs = [data(2, 3, 6, 5), data(4, 3, 3, 3)]
    for options in ({"padding": 1}, {"stride": 2}, {"dilation": 2, "padding": "same"}):
        compare(lambda t, w, o=options: F.conv2d(t, w, **o), inputs, PAIR, [[placement], [R]])
    compare(lambda t, w: F.conv_transpose2d(t, w[:3], stride=2), inputs, PAIR, [[placement], [R]])
    compare(lambda t, w: F.conv2d(t, w, w[:, 0, 0, 0], padding=1), inputs, GRID, [[placement, S1], [R, R]])
    for pool in (F.max_pool2d, F.avg_pool2d):
        compare(lambda t, w, f=pool: f(t, 3, 2, 1), inputs, PAIR, [[placement], [R]])


@pytest.mark.parametrize("loss", [F.mse_loss, F.smooth_l1_loss, F.l1_loss, F.huber_loss], ids=lambda f: f.__name__)
@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_gradients_of_losses_over_rows(loss: Callable, reduction: str) -> None:
    for rows, (a, b) in itertools.product((4, 5, 3), itertools.product([R, S0, S1], repeat=2)):
        compare(lambda t, u: loss(t, u, reduction=reduction), [data(rows, 3), data(rows, 3)], LINE, [[a], [b]])


def test_amax_of_ties_has_a_gradient() -> None:
    for values in ([0.0, 0, 0, 5], [5.0, 0, 0, 5], [0.0, 0, 0, 0]):
        x = torch.tensor(values, dtype=torch.float64)
        for function in (torch.amax, torch.amin, torch.max, torch.min):
            compare(lambda t, f=function: f(t), [x], LINE, [[S0]])
            compare(lambda t, f=function: f(torch.stack([t, -t], 1), 0), [x], LINE, [[S0]])
        compare(lambda t: (t.maximum(t.flip(0)), t.clamp(max=0), t.cummax(0)), [x], LINE, [[S0]])
        compare(torch.aminmax, [x], LINE, [[S0]], backward=differentiates(torch.aminmax, x))


@pytest.mark.parametrize("placements", list(itertools.product([R, S0, S1], repeat=2)), ids=str)
def test_gather_with_a_shorter_index(placements: tuple) -> None:
    """Along dims that are not gathered, the index covers only the beginning."""
    wide = torch.tensor([[3, 0], [1, 2], [0, 0]])
    for dim, source in itertools.product((0, 1), (data(3, 2), data(5, 3))):
        functions: list[Callable[[Tensor, Tensor, Tensor], Tensor]] = [
            lambda t, i, s: t.gather(dim, i),
            lambda t, i, s: t.scatter_add(dim, i, s),
            lambda t, i, s: t.scatter(dim, i, s),
            lambda t, i, s: t.scatter_reduce(dim, i, s, "mean"),
        ]
        for function in functions:
            run = lambda t, s, f=function: f(t, beside(t, wide, placements[1]), s)  # noqa: E731
            # torch has no gradient for a source that is longer than the index
            compare(run, [data(7, 5), source], LINE, [[placements[0]], [R]], backward=source.shape == wide.shape)


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
    compare(EMPTY[name], [data(2, 3)], LINE, [[S0]], backward=backward)
    compare(EMPTY[name], [data(2, 3)], GRID, [[S0, S0]], backward=backward)
