"""Bodies about rules that communicate: what one rank looks up, slides over or sums up of what others hold."""

from __future__ import annotations

import itertools
import math
import warnings
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from compare import beside, check_shards, compare
from torch import Tensor, nn

import shardwise as sw
from bodies import P, R, S, assert_close, body, doubles, everywhere, held, leaf
from bodies_ops import ONE_AXIS, TWO_AXES, Case, run_cases
from shardwise.comm.cause import listeners
from shardwise.debug import CommDebugMode

DEEP = [[S(0)], [S(1)], [S(2)], [R]]
DEEP_TWO = [[S(0), S(2)], [S(2), S(1)], [S(2), S(2)], [R, S(2)], [R, S(0)]]


def at(*index: int) -> Tensor:
    return torch.tensor(index)


def scans() -> list[Case]:
    a = doubles(5, 3)
    return [
        (lambda x: x.cumsum(0), [a]),
        (lambda x: x.cos().cumprod(1), [a]),
        (lambda x: x.logcumsumexp(0), [a]),
        (lambda x: (x.cummax(0), x.cummin(1)), [a]),
        (lambda x: torch.diff(x, dim=0), [a]),
    ]


def sorting() -> list[Case]:
    a, line = doubles(5, 3), doubles(11)
    return [
        (lambda x: x.sort(0), [a]),
        (lambda x: x.argsort(1), [a]),
        (lambda x: x.topk(2, 0), [a]),
        (lambda x: x.sort(descending=True), [line]),
        (lambda x: x.topk(4), [line]),
        (lambda x: x.kthvalue(6), [line]),
        (lambda x: (x.median(), x.median(0)), [line]),
        (lambda x: torch.quantile(x, 0.3), [line]),
    ]


def windows() -> list[Case]:
    a = doubles(5, 4)
    return [
        (lambda x: x.roll(2, 0), [a]),
        (lambda x: x.roll((1, -1), (0, 1)), [a]),
        (lambda x: x.flip(0), [a]),
        (lambda x: x.rot90(), [a]),
        (lambda x: F.pad(x, (1, 2, 3, 0), value=0.5), [a]),
        (lambda x: F.pad(x, (1, 1), mode="reflect"), [a]),
        (lambda x: F.pad(x, (2, 1), mode="circular"), [a]),
        (lambda x: F.pad(x[:, 1:], (0, 2), mode="replicate"), [a]),
        (lambda x: x.unfold(0, 2, 1), [a]),
        (lambda x: torch.cat(x.tensor_split([1, 3])[::-1]), [a]),
    ]


def halos() -> list[Case]:
    x, weight = doubles(3, 2, 7), doubles(4, 2, 3)
    return [
        (lambda x, w: F.conv1d(x, w, padding=1), [x, weight]),
        (lambda x, w: F.conv1d(x, w, stride=2, dilation=2), [x, weight]),
        (lambda x, w: F.conv_transpose1d(x, w[:2], stride=2), [x, weight]),
        (lambda x: F.max_pool1d(x, 3, 2, padding=1, return_indices=True), [x]),
        (lambda x: F.avg_pool1d(x, 3, 1, padding=1), [x]),
        (lambda x: F.adaptive_avg_pool1d(x, 3), [x]),
        (lambda x: F.interpolate(x, size=5, mode="linear"), [x]),
    ]


def tables() -> list[Case]:
    table, index, flat = doubles(7, 4), at(0, 6, 3, 3, 2, 6).view(3, 2), at(0, 6, 3, 3, 2, 6)
    return [
        (lambda i, w: F.embedding(i, w, padding_idx=3), [index, table]),
        (lambda i, w: F.embedding_bag(i, w, mode="mean"), [index, table]),
        (lambda i, w: F.embedding_bag(i, w, beside(w, at(0, 4)), mode="max"), [flat, table]),
        (lambda i, w, s: F.embedding_bag(i, w, mode="sum", per_sample_weights=s), [index, table, doubles(3, 2)]),
    ]


def lookups() -> list[Case]:
    a, rows, wide, source = doubles(5, 3), at(4, 0, 3, 3), at(4, 0, 3, 1, 2, 2).view(2, 3), doubles(2, 3)
    mask = torch.tensor([True, False, True, True, False])
    return [
        (lambda x, i: x[i], [a, rows]),
        (lambda x, i: x[:, i % 3], [a, rows]),
        (lambda x, i: x[i, i % 3], [a, rows]),
        (lambda x, i: x.index_select(0, i), [a, rows]),
        (lambda x, i: x.take(i), [a, rows]),
        (lambda x, i: x.gather(0, i), [a, wide]),
        (lambda x, i, s: x.scatter_add(0, i, s), [a, wide, source]),
        (lambda x, i, s: x.scatter(0, i, s), [a, wide, source]),
        (lambda x, i, s: x.scatter_reduce(0, i, s, "amax"), [a, wide, source]),
        (lambda x, i, s: x.index_add(0, i[:2], s), [a, rows, source]),
        (lambda x, i, s: x.index_put((i[:2],), s, accumulate=True), [a, rows, source]),
        (lambda x, m: (x[m], x.masked_fill(m.unsqueeze(1), 0.5)), [a, mask]),
    ]


def statistics() -> list[Case]:
    a = doubles(5, 4, 3)
    return [
        (lambda x: F.batch_norm(x, None, None, training=True), [a]),
        (lambda x, w: F.group_norm(x, 2, w), [a, doubles(4)]),
        (lambda x: F.instance_norm(x), [a]),
        (lambda x, y: F.mse_loss(x, y), [a, doubles(5, 4, 3)]),
        (lambda x, y: F.smooth_l1_loss(x, y), [a, doubles(5, 4, 3)]),
        (lambda x: torch.std_mean(x, (0, 2)), [a]),
        (lambda x, y: torch.cdist(x, y), [a, doubles(5, 2, 3)]),
    ]


FLAT = (scans, sorting, windows, tables, lookups)
FAMILIES = [*((family, ONE_AXIS, TWO_AXES) for family in FLAT), *((f, DEEP, DEEP_TWO) for f in (halos, statistics))]


def _make(family: Callable[[], list[Case]], one: list[Any], two: list[Any]) -> None:
    def on_one_axis(mesh: Any) -> None:
        run_cases(mesh, family(), one)

    def on_two_axes(mesh: Any) -> None:
        run_cases(mesh, family(), two)

    on_one_axis.__name__, on_two_axes.__name__ = f"{family.__name__}_on_one_axis", f"{family.__name__}_on_two_axes"
    body(2)(on_one_axis)
    body(2, 2)(on_two_axes)


for _entry in FAMILIES:
    _make(*_entry)


# What is communicated


@body(2)
def cross_entropy_over_a_sharded_vocabulary(mesh: Any) -> None:
    """Two small reductions forward, none backward."""
    logits, target = doubles(6, 9), at(0, 8, 4, 4, 1, 7)
    for options in ({}, {"reduction": "sum"}, {"label_smoothing": 0.1}):
        plain, x = logits.clone().requires_grad_(), leaf(logits, mesh, [S(1)])
        labels = sw.distribute_tensor(target, mesh)
        with CommDebugMode() as forward:
            loss = F.cross_entropy(x, labels, **options)
        with CommDebugMode() as backward:
            loss.backward()
        assert forward.get_comm_counts() == {"all_reduce": 2}, options
        assert not backward.get_comm_counts(), options
        F.cross_entropy(plain, target, **options).backward()
        assert_close(x.grad, plain.grad, options)


@body(2, 2)
def clipping_needs_one_reduction(mesh: Any) -> None:
    shapes = [(5, 3), (3, 4), (2,), (4, 4)]
    plain = [nn.Parameter(doubles(*shape)) for shape in shapes]
    wheres = ([S(0), S(1)], [S(1), S(0)], [S(0), S(0)], [S(0), S(1)])
    params = [nn.Parameter(sw.distribute_tensor(p.detach(), mesh, w)) for p, w in zip(plain, wheres, strict=True)]
    for group in (plain, params):
        for p in group:
            p.grad = p.detach() * 3
    expected = nn.utils.clip_grad_norm_(plain, 1.0, foreach=True)
    with CommDebugMode() as comm:
        total = nn.utils.clip_grad_norm_(params, 1.0, foreach=True)
    assert comm.get_comm_counts() == {"all_reduce": 1}
    assert_close(total, expected)
    for p, q in zip(params, plain, strict=True):
        assert_close(p.grad, q.grad)


@body(2, 2)
def clipping_on_the_shards(mesh: Any) -> None:
    """Nobody watches, so the shards are looked at as they are: uneven, empty, replicated; torch's way those of several
    dtypes."""
    shapes = [(5, 3), (3, 4), (1,), (4, 4), (2, 2)]
    wheres = ([S(0), S(1)], [R, S(0)], [S(0), S(0)], [R, R], [S(1), R])
    ways = itertools.product((2.0, 1.0, 0.5, math.inf), (None, False), (torch.float64, torch.float32))
    for order, foreach, dtype in ways:
        plain = [nn.Parameter(doubles(*shape)) for shape in shapes]
        plain[3].data = plain[3].data.to(dtype)
        params = [nn.Parameter(sw.distribute_tensor(p.detach(), mesh, w)) for p, w in zip(plain, wheres, strict=True)]
        for group in (plain, params):
            for p in group[1:]:
                p.grad = p.detach() * 3
        expected = nn.utils.clip_grad_norm_(plain, 1.0, order, foreach=foreach)
        heard: list[Any] = []
        listeners.append(heard)
        try:
            total = sw.parallel.clip_grad_norm_(params, 1.0, order, foreach=foreach)
        finally:
            listeners.remove(heard)
        assert [comm.kind for comm in heard] == ["all_reduce"]
        torch.testing.assert_close(total.full_tensor(), expected)
        for p, q in zip(params[1:], plain[1:], strict=True):
            torch.testing.assert_close(p.grad.full_tensor(), q.grad)
        assert params[0].grad is None
        assert sw.parallel.clip_grad_norm_(params, 100.0).item() > 0
        torch.testing.assert_close(params[1].grad.full_tensor(), plain[1].grad)


@body(2, 2)
def batch_statistics_are_those_of_the_whole_batch(mesh: Any) -> None:
    layer = nn.BatchNorm1d(3, dtype=torch.float64)
    ours = sw.distribute_module(nn.BatchNorm1d(3, dtype=torch.float64), mesh)
    for step in range(3):
        x = doubles(5, 3) * (step + 1) + step
        d = leaf(x, mesh, [S(0), S(0)])
        x.requires_grad_()
        weight = doubles(5, 3)
        (layer(x) * weight).sum().backward()
        (ours(d) * sw.distribute_tensor(weight, mesh)).sum().backward()
        assert_close(d.grad, x.grad)
    for ours_too, theirs in zip(ours.state_dict().values(), layer.state_dict().values(), strict=True):
        assert_close(ours_too, theirs)
    assert_close(ours.weight.grad, layer.weight.grad)


# Errors: on all ranks alike


def refused(call: Callable[[], Any], mesh: Any) -> set[tuple[str, str]]:
    """The errors of all ranks. All of them must have one."""
    error = ""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", sw.errors.FallbackWarning)
        try:
            call()
        except Exception as raised:
            error = f"{type(raised).__name__}: {str(raised).splitlines()[0]}"
    errors = set(everywhere(dict.fromkeys(sw.comm.as_mesh(mesh).held, error)).values())
    assert "" not in errors, f"some ranks do not refuse, of {errors}"
    return errors


@body(2, 2)
def indices_out_of_range_are_refused_alike(mesh: Any) -> None:
    x, bad = doubles(5, 3), at(0, 1, 3, 7)
    calls: list[Callable[[Tensor, Tensor], Any]] = [
        lambda x, i: x[i],
        lambda x, i: x.index_select(0, i),
        lambda x, i: x.gather(0, i.view(4, 1)),
        lambda x, i: x.scatter(0, i.view(4, 1), 1.0),
        lambda x, i: x.index_add(0, i, x[:4]),
        lambda x, i: x.index_put((i,), x[0]),
        lambda x, i: x.put(i * 3, x[:4, 0]),
        lambda x, i: x.index_fill_(0, i, 0.5),
        lambda x, i: F.one_hot(i, 5),
    ]
    for call in calls:
        for where in ([S(0), R], [S(0), S(1)], [S(1), S(0)], [R, R]):
            for index in ([R, R], [S(0), R], [S(0), S(0)]):
                check_refused(mesh, call, x, where, bad, index)


@body(2, 2)
def rows_of_tables_out_of_range_are_refused_alike(mesh: Any) -> None:
    x, bad = doubles(5, 3), at(0, 1, 3, 7)
    calls: list[Callable[[Tensor, Tensor], Any]] = [
        lambda x, i: F.embedding(i, x),
        lambda x, i: F.embedding(i, x, scale_grad_by_freq=True),
        lambda x, i: F.embedding(i, x, max_norm=0.1),
        *(lambda x, i, mode=mode: F.embedding_bag(i.view(2, 2), x, mode=mode) for mode in ("sum", "mean", "max")),
        lambda x, i: F.embedding_bag(i, x, beside(x, at(0, 2))),
    ]
    for call in calls:
        for where in ([S(0), R], [S(0), S(1)], [S(1), S(0)], [S(1), S(1)], [R, S(0)], [R, R]):
            for index in ([R, R], [S(0), R], [R, S(0)], [S(0), S(0)]):
                check_refused(mesh, call, x, where, bad, index)


@body(2, 2)
def targets_out_of_bounds_are_refused_alike(mesh: Any) -> None:
    x, bad, ignored = doubles(4, 3), at(0, 1, 2, 7), at(7, 1, -2, 7)
    calls: list[Callable[[Tensor, Tensor], Any]] = [
        *(lambda x, i, kind=kind: F.cross_entropy(x, i, reduction=kind) for kind in ("none", "sum", "mean")),
        *(lambda x, i, kind=kind: F.nll_loss(x, i, reduction=kind) for kind in ("none", "sum", "mean")),
        lambda x, i: F.cross_entropy(x, i, label_smoothing=0.1),
        lambda x, i: F.nll_loss(x.view(2, 3, 2), i.view(2, 2)),
    ]
    for where in ([S(0), R], [S(0), S(0)], [S(0), S(1)], [S(1), S(0)], [R, S(1)], [S(1), S(1)], [R, R]):
        for index in ([R, R], [S(0), R], [R, S(0)], [S(0), S(0)]):
            for call in calls:
                check_refused(mesh, call, x, where, bad, index)
            check_refused(mesh, lambda x, i: F.cross_entropy(x, i, ignore_index=7), x, where, ignored, index)


def check_refused(mesh: Any, call: Callable, x: Tensor, where: list[Any], bad: Tensor, index: list[Any]) -> None:
    expected = ""
    try:
        call(x.clone(), bad)
    except Exception as error:
        expected = f"{type(error).__name__}: {str(error).splitlines()[0]}"
    d, i = sw.distribute_tensor(x, mesh, where), sw.distribute_tensor(bad, mesh, index)
    (found,) = refused(lambda: call(d, i), mesh)
    assert found == expected or found.startswith("IndexRangeError: "), (found, where, index)


@body(2, 2)
def matrices_that_cannot_be_factored_are_refused_alike(mesh: Any) -> None:
    """Only one rank has the bad one."""
    x = torch.eye(3, dtype=torch.float64).repeat(4, 1, 1)
    x[2] = 0
    calls: list[Callable[[Tensor], Any]] = [
        torch.linalg.cholesky,
        torch.linalg.inv,
        lambda x: torch.linalg.solve(x, x),
    ]
    for call in calls:
        for where in ([S(0), S(0)], [S(0), R], [R, S(1)]):
            d = sw.distribute_tensor(x, mesh, where)
            (error,) = refused(lambda d=d, f=call: f(d), mesh)
            assert error.startswith("_LinAlgError: ") and "(Batch element 2)" in error, error


@body(2, 2)
def refused_writes_change_nothing(mesh: Any) -> None:
    x = doubles(5, 3)
    writes: list[Callable[[Tensor], Any]] = [
        lambda t: t.mul_(-2),
        lambda t: t.add_(1),
        lambda t: t.clamp_(max=0),
        lambda t: t[1:4].exp_(),
        lambda t: t.__setitem__((slice(1, 3), 0), 0.5),
        lambda t: t.__setitem__(beside(t, at(4, 0)), 0.25),
        lambda t: t.zero_(),
    ]
    for write in writes:
        for where in ([P, R], [P, S(0)], [S(1), P], [S(0), S(0)]):
            d, expected, error = sw.distribute_tensor(x, mesh, where), x.clone(), ""
            try:
                write(d)
                write(expected)
            except sw.errors.InPlaceError as raised:
                error = str(raised)
            assert set(everywhere(dict.fromkeys(sw.comm.as_mesh(mesh).held, error)).values()) == {error}
            assert d.placements == tuple(where)
            assert_close(d, expected, where)


# Writing to parts


@body(2, 2)
def assignments_at_indices(mesh: Any) -> None:
    rows, some = at(4, 0, 3), torch.tensor([True, False, True, True, False])
    for where in ([S(0), R], [S(0), S(1)], [S(0), S(0)], [R, S(1)]):
        x = doubles(5, 3)
        d = sw.distribute_tensor(x, mesh, where)
        values = doubles(3, 3)
        for t in (x, d):
            t[beside(t, rows)] = beside(t, values)
            t[beside(t, some)] = 0.5
            t[[1, 2], [0, 2]] = 1.5
            t[2, 1:] = 2.5
            t[beside(t, rows[:1])] += 1
        assert_close(d, x, where)
        assert_close(d[beside(d, rows)], x[rows], where)


@body(2, 2)
def writes_through_copied_views(mesh: Any) -> None:
    writes: list[Callable[[Tensor], Any]] = [
        lambda t: t.view(24).zero_(),
        lambda t: t.view(3, 8).add_(1).mul_(2),
        lambda t: t[1].copy_(t[0]),
        lambda t: t[:, 2].mul_(3),
        lambda t: t.view(24)[3:7].zero_(),
        lambda t: t.select(0, -1).fill_(7),
    ]
    for where in ([S(0), R], [S(1), S(0)], [S(0), S(0)], [R, S(1)]):
        for write in writes:
            x = doubles(4, 6)
            d = sw.distribute_tensor(x, mesh, where)
            write(x)
            write(d)
            assert_close(d, x, where)
        view = d.view(3, 8)
        d.add_(1)
        assert_close(view * 1, x.view(3, 8) + 1, where)


# Random numbers


@body(2, 2)
def replicas_draw_alike(mesh: Any) -> None:
    torch.manual_seed(7)
    x = doubles(6, 4).abs()
    draws: list[Callable[[Tensor], Tensor]] = [
        lambda t: F.dropout(t, 0.5),
        lambda t: torch.bernoulli(t.sigmoid()),
        lambda t: torch.rand_like(t),
        lambda t: t.clone().normal_(),
        lambda t: torch.multinomial(t, 2),
        lambda t: F.gumbel_softmax(t),
        lambda t: F.rrelu(-t, training=True),
        lambda t: torch.poisson(t),
    ]
    for draw in draws:
        for where in ([R, R], [S(0), R], [R, S(1)], [S(1), S(0)]):
            d = sw.distribute_tensor(x, mesh, where)
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", sw.errors.FallbackWarning)
                out = draw(d)
            check_shards(out)
            layout = out.layout_on_mesh
            boxes: dict[Any, Tensor] = {}
            for coordinate, shard in everywhere(held(out)).items():
                assert torch.equal(boxes.setdefault(layout.box(coordinate), shard), shard), (where, coordinate)
            compare(lambda t: t * 2, [x], mesh, [where])  # and stay in step
