"""Bodies about results as large as the data say: ranks find different numbers of things, and go on in step."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from compare import beside
from torch import Tensor

import shardwise as sw
from bodies import R, S, assert_close, body, doubles, leaf
from bodies_ops import ONE_AXIS, TWO_AXES, Case, run_cases
from bodies_rules import check_refused
from shardwise.debug import CommDebugMode


def chosen() -> list[Case]:
    a = doubles(5, 3)
    rows = torch.tensor([True, False, False, True, True])
    return [
        (lambda x: (x > 0).nonzero(), [a]),
        (lambda x: torch.where(x > 0.5), [a]),
        (lambda x: x[x > 0] * x.exp()[x > 0], [a]),
        (lambda x: x[x > 99], [a]),
        (lambda x, m: (x[m], x[m, 0], x[m].sum(0)), [a, rows]),
        (lambda x, m: x[:, m[:3]], [a, rows]),
        (lambda x, m: torch.cat([x[m], x[~m]]), [a, rows]),
        (lambda x, m: x[m, beside(x, torch.tensor([2, 0, 1]))], [a, rows]),
        (lambda x: x.masked_select(x[:, :1] > 0).mean(), [a]),
    ]


def counted() -> list[Case]:
    line = torch.tensor([3, 3, 3, 3, 3, 3, 0, 3, 1])
    return [
        (lambda x: (x.bincount(), x.bincount(minlength=9)), [line]),
        (lambda x, w: x.bincount(w.detach()), [line, doubles(9)]),
    ]


def _make(family: Callable[[], list[Case]]) -> None:
    def on_one_axis(mesh: Any) -> None:
        with sw.strict():
            run_cases(mesh, family(), ONE_AXIS)

    def on_two_axes(mesh: Any) -> None:
        with sw.strict():
            run_cases(mesh, family(), TWO_AXES)

    on_one_axis.__name__, on_two_axes.__name__ = f"{family.__name__}_on_one_axis", f"{family.__name__}_on_two_axes"
    body(2)(on_one_axis)
    body(2, 2)(on_two_axes)


for _family in (chosen, counted):
    _make(_family)


@body(2, 1, 2)
def ranks_that_find_nothing_stay_in_step(mesh: Any) -> None:
    x = torch.arange(8.0, dtype=torch.float64).view(4, 2)
    for where in ([S(0), R, S(0)], [S(1), R, S(0)], [R, S(0), R], [S(0), R, S(1)]):
        plain, d = x.clone().requires_grad_(), leaf(x, mesh, where)
        for t in (plain, d):
            found = t[t > 5.5]
            (found * 3).sum().backward()
        assert len(found) == 2
        assert_close(d.grad, plain.grad, where)
        with torch.no_grad():
            for t in (plain, d):
                t[t > 5.5] = t[t < 1.5] - 1
        assert_close(d, plain, where)


@body(2, 2)
def what_is_found_is_told_in_eight_bytes(mesh: Any) -> None:
    d = sw.distribute_tensor(doubles(100, 3), mesh, [S(0), S(0)])
    with CommDebugMode() as comm, sw.strict():
        found = d[d > 0]
        d[d[:, 0] > 0].sum(0)
    assert [(c.kind, c.bytes) for c in comm.comms] == [("all_gather", 8)] * 2
    assert found.layout_on_mesh.splits == ((0, 1),)


@body(2, 2)
def negative_numbers_are_refused_alike(mesh: Any) -> None:
    """Only one rank has one."""
    x, bad = doubles(4, 3), torch.tensor([0, 1, 2, -1])
    calls: list[Callable[[Tensor, Tensor], Any]] = [
        lambda x, i: torch.bincount(i),
        lambda x, i: x.repeat_interleave(i, 0),
        lambda x, i: torch.repeat_interleave(i),
        lambda x, i: torch.nn.functional.one_hot(i),
    ]
    for call in calls:
        for where in ([S(0), R], [S(1), S(0)], [R, R]):
            for index in ([S(0), S(0)], [R, S(0)], [R, R]):
                check_refused(mesh, call, x, where, bad, index)
