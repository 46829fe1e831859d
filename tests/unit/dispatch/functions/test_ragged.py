"""Results as large as the data say: they stay where they were found, and the program goes on with them."""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any

import pytest
import torch
from compare import beside, check_shards
from sweep import mesh_of, normal, place, sweep
from torch import Tensor

import shardwise as sw
from shardwise.debug import CommDebugMode
from shardwise.dispatch import call
from shardwise.layout import Layout
from shardwise.redistribute import kernels, planner

R, S, P = sw.Replicate(), sw.Shard, sw.Partial
aten = torch.ops.aten
X, DEEP = normal(5, 3), normal(3, 4, 5)
ROWS, COLUMNS, LAST = torch.tensor([1, 0, 1]).bool(), DEEP[0, :, 0] > 0, torch.tensor([1, 0, 0, 0, 1]).bool()
NUMBERS = torch.tensor([3, 0, 3, 3, 1, 1, 1, 1, 0, 5, 5])
ROWS5 = torch.tensor([1, 0, 1, 1, 0]).bool()
TIMES = torch.tensor([2, 0, 1, 3, 1])

Case = tuple[Callable[..., Any], list[Tensor]]

# In every layout, on one axis and on several, pending ones included; and nothing may ask for a gather

CASES: dict[str, Case] = {
    "nonzero": (lambda x: (x > 0).nonzero(), [X]),
    "nonzero of numbers": (lambda x: x.nonzero(), [NUMBERS]),
    "nonzero of bytes": (lambda x: torch.nonzero(x), [NUMBERS.byte().reshape(1, 11)]),
    "nonzero of floats": (lambda x: torch.nonzero(input=x.detach()), [X.relu()]),
    "nonzero, tuple": (lambda x: (x > 0).nonzero(as_tuple=True), [DEEP]),
    "nonzero of one": (lambda x: ((x.sum() > 0).nonzero(), (x.sum() > 0).nonzero(as_tuple=True)), [X]),
    "nonzero of none": (lambda x: (x > 99).nonzero(), [X]),
    "nonzero of nothing": (lambda x: x.detach()[:, :0].nonzero(), [X]),
    "argwhere": (lambda x: torch.argwhere(x > 0), [DEEP]),
    "where": (lambda x: torch.where(x > 0), [X]),
    "mask": (lambda x: x[x > 0], [X]),
    "mask of none": (lambda x: x[x > 99], [X]),
    "mask of two dims": (lambda x, m: x[m], [DEEP, DEEP.amax(2) > 0.8]),
    "mask of rows": (lambda x, m: x[m], [DEEP, ROWS]),
    "mask of bytes": (lambda x, m: x[m.byte()], [DEEP, ROWS]),
    "mask of the last dims": (lambda x, m: x[:, m], [DEEP, DEEP[0] > 0]),
    "mask of the middle dim": (lambda x, m: x[:, m, 1:], [DEEP, COLUMNS]),
    "mask and int": (lambda x, m: (x[m, 0], x[1, :3, 2:][m], x[m, -1, 2]), [DEEP, ROWS]),
    "mask after int": (lambda x, m: (x[0, m], x[:, m, 2], x[..., m, -1]), [DEEP, COLUMNS]),
    "mask and None": (lambda x, m: (x[None, m], x[m, None], x[m, :, None]), [DEEP, ROWS]),
    "mask and True": (lambda x, m: (x[True, m], x[m, True]), [DEEP, ROWS]),
    "mask and slices": (lambda x, m: (x[m, ::2], x[m, ..., 1:3]), [DEEP, ROWS]),
    "mask and numbers": (lambda x, m, i: (x[m, i], x[m, :, i]), [DEEP, ROWS, torch.tensor([2, 0])]),
    "two masks": (lambda x, m, n: (x[m, :, n], x[..., n]), [DEEP, ROWS, LAST]),
    "mask in a list": (lambda x: x[[True, False, True, False, False]], [X]),
    "aten.index": (lambda x, m: torch.ops.aten.index.Tensor(x, [None, m]), [DEEP, COLUMNS]),
    "masked_select": (lambda x, m: x.masked_select(m), [DEEP, DEEP > 0]),
    "masked_select by columns": (lambda x, m: torch.masked_select(x, mask=m), [X, X[:, :1] > 0]),
    "masked_select by rows": (lambda x, m: torch.masked_select(x, m), [X, X[0] > 0]),
    "masked_select of a row": (lambda x, m: torch.masked_select(x, m), [X[0], X > 0]),
    "masked_select of one": (lambda x: x.sum().masked_select(x.sum() > -99), [X]),
    "bincount": (lambda x: (x.bincount(), torch.bincount(x, minlength=20), x.bincount(minlength=2)), [NUMBERS]),
    "bincount of few": (lambda x: (x.bincount(), x[:0].bincount(minlength=3)), [NUMBERS[:3]]),
    "bincount, weighted": (lambda x, w: torch.bincount(x, w.detach()), [NUMBERS, normal(11)]),
    "bincount, whole weights": (lambda x, w: torch.bincount(x[:3], w[:3]), [NUMBERS, NUMBERS + 1]),
}

# Rarer: gathered, and right in every layout

GATHERED: dict[str, Case] = {
    "nonzero_static": (lambda x: ((x > 0).nonzero_static(size=4), (x > 0).nonzero_static(size=20, fill_value=7)), [X]),
    "repeat_interleave": (lambda x, n: x.repeat_interleave(n, 0), [X, TIMES]),
    "repeat_interleave of a later dim": (lambda x, n: x.repeat_interleave(n, -1), [X, TIMES[:3]]),
    "repeat_interleave, flat": (lambda x, n: x.repeat_interleave(n), [X, torch.arange(15) % 3]),
    "repeat_interleave, as often": (
        lambda x, n: (x.repeat_interleave(n, 1), x.repeat_interleave(n[0], 0)),
        [X, TIMES[:1]],
    ),
    "repeat_interleave of places": (lambda n: torch.repeat_interleave(n), [TIMES]),
    "one_hot": (lambda x: torch.nn.functional.one_hot(x), [NUMBERS]),
    "combinations": (lambda x: (torch.combinations(x, 3), torch.combinations(x, with_replacement=True)), [normal(6)]),
    "histogram": (lambda x: (x.detach().histogram(4), torch.histogram(x.detach(), 3, range=(-0.5, 1.0))), [X]),
    "histogram, weighted": (lambda x, w: torch.histogram(x.detach(), 4, weight=w.detach(), density=True), [X, X * X]),
    "histogram between edges": (
        lambda x, e: torch.histogram(x.detach(), e.detach()),
        [X, torch.arange(-2, 3).double()],
    ),
    "histogram, by name": (lambda x: aten.histogram.bin_ct(x.detach(), 4, range=(-1.0, 1.0)), [X]),
    "histogramdd": (lambda x: (torch.histogramdd(x.detach(), [2, 3, 4]), torch.histogramdd(x.detach(), 2)), [X]),
    "histogramdd of many dims": (lambda x: torch.histogramdd(x.detach(), 2, density=True), [normal(1, 4, 3, 2)]),
    "histogramdd, weighted": (
        lambda x, w: torch.histogramdd(x.detach(), 2, range=[-1.0, 0, 0, 1, 0, 2], weight=w.detach(), density=True),
        [X, normal(5)],
    ),
    "histogramdd between edges": (
        lambda x, e: torch.histogramdd(x.detach(), [e.detach(), e.detach() * 2, e[1:].detach()]),
        [X, torch.arange(-2, 3).double()],
    ),
    "histogramdd, by name": (
        lambda x: (
            aten._histogramdd_from_bin_cts(x.detach(), [2, 3, 4]),
            aten._histogramdd_bin_edges.default(x.detach(), [2, 3, 4]),
        ),
        [X],
    ),
    "unique": (lambda x: (x.unique(), torch.unique(x, sorted=False)), [NUMBERS]),
    "unique, all": (lambda x: torch.unique(x, return_inverse=True, return_counts=True), [NUMBERS.view(11, 1) % 3]),
    "unique of floats": (lambda x: x.detach().round().unique(return_counts=True), [DEEP]),
    "unique of bools": (lambda x: (x > 0).unique(return_inverse=True), [X]),
    "unique of many floats": (
        lambda x: (x.detach().unique(return_counts=True), (x > 0).unique(False, False, True)),
        [X],
    ),
    "unique, by name": (
        lambda x: (aten._unique2(x), aten._unique2.default(x, True, True, True), torch._unique(x, True, True)),
        [NUMBERS],
    ),
    "unique rows, by name": (
        lambda x: (aten.unique_dim(x > 0, 0), aten.unique_dim_consecutive.default(x > 0, 0)),
        [normal(9, 2)],
    ),
    "unique_consecutive, by name": (
        lambda x: (aten.unique_consecutive(x), aten.unique_consecutive(x, True)),
        [NUMBERS],
    ),
    "unique rows": (lambda x: (x > 0).unique(True, True, True, dim=0), [normal(9, 2)]),
    "unique columns": (lambda x: (x > 0).long().unique(return_inverse=True, dim=-1), [normal(2, 9)]),
    "unique of one column": (
        lambda x: (x.unique(True, True, True, 1), x.unique_consecutive(dim=1)),
        [NUMBERS.view(11, 1)],
    ),
    "unique_consecutive": (lambda x: torch.unique_consecutive(x), [NUMBERS]),
    "unique_consecutive, all": (lambda x: x.unique_consecutive(True, True), [torch.tensor([[1, 1], [1, 1], [1, 2]])]),
    "unique_consecutive rows": (lambda x: (x > 0).unique_consecutive(True, True, dim=0), [normal(9, 1)]),
    "unique_consecutive columns": (lambda x: (x > 0.5).unique_consecutive(True, True, dim=1), [normal(2, 9)]),
    "unique_consecutive of one value": (lambda x: (x * 0).unique_consecutive(True, True), [NUMBERS]),
}


@pytest.mark.filterwarnings("ignore:indexing with dtype torch.uint8 is now deprecated")
@pytest.mark.parametrize("name", CASES)
def test_every_layout_keeps_its_shards(name: str) -> None:
    function, inputs = CASES[name]
    with sw.strict():
        sweep(function, *inputs)


@pytest.mark.filterwarnings("ignore::shardwise.errors.FallbackWarning")
@pytest.mark.parametrize("name", GATHERED)
def test_what_is_gathered_is_right_in_every_layout(name: str) -> None:
    function, inputs = GATHERED[name]
    sweep(function, *inputs)


# What goes on with such results

PROGRAMS: dict[str, Callable[[Tensor], Any]] = {
    "reductions": lambda x: (x[x > 0].sum(), x[x > 0].mean(), x[x > 0].std(), x[x > 0].max()),
    "the same mask": lambda x: x[x > 0] * x.exp()[x > 0] + 1,
    "another mask": lambda x: x[x > 0][:4] * x[x < 0][:4],
    "cat": lambda x: torch.cat([x[x > 0], x[x < 0]]),
    "stack": lambda x: torch.stack([x[x > 0], x[x > 0] * 2], 1),
    "index": lambda x: (x[x > 0][2], x[x > 0][-3:], x[x[:, 0] > 0][:, 1], x[x[:, 0] > 0, 1:].T),
    "mask again": lambda x: x[x > -0.5][x[x > -0.5] < 0.5],
    "sort": lambda x: (x[x > 0].sort().values, x[x > 0].topk(2).values, x[x > 0].cumsum(0)),
    "matmul": lambda x: x[x[:, 0] > 0] @ x.T,
    "take": lambda x: x[torch.where(x > 0)],
    "index_select": lambda x: x.index_select(0, (x[:, 0] > 0).nonzero().squeeze(1)),
    "softmax": lambda x: x[x > 0].softmax(0),
    "reshape": lambda x: x[x[:, 0] > 0].reshape(-1) * 2,
    "size": lambda x: x[x > 0].sum() / len(x[x > 0]) + x.nonzero().shape[0],
    "positions": lambda x: (x > 0).nonzero().double().mean(0) * x.sum(),
}


@pytest.mark.parametrize("name", PROGRAMS)
def test_programs(name: str) -> None:
    sweep(PROGRAMS[name], normal(7, 3))


def filled(x: Tensor, mask: Tensor, value: Tensor) -> Tensor:
    x = x.clone()
    x[mask] = value[mask]
    x[mask, ...] *= 2
    x[~mask] = 1.5
    return x


def filled_rows(x: Tensor, mask: Tensor, value: Tensor) -> Tensor:
    x = x.clone()
    rows = mask[:, 0]
    x[rows] = value[rows] + 1
    x[rows, 1] = value[rows, 0]
    x[:, mask[1]] = value[:, mask[1]]
    x[:, mask[0]] = beside(x, torch.tensor(0.25, dtype=torch.float64))
    return x


def put(x: Tensor, mask: Tensor, value: Tensor) -> tuple[Tensor, ...]:
    rows, last = mask[:, 0], mask[0]
    return (
        x.index_put((mask,), value[mask]),
        torch.index_put(x, (rows,), value[rows], accumulate=True),
        x.clone().index_put_((rows,), value[rows]),
        x.index_put((rows, (~last).nonzero()[:1, 0]), value[rows, 0]),
        torch.index_put(x, (mask,), value[0, 0]),
        x.masked_scatter(mask, value[mask]),
    )


@pytest.mark.parametrize("function", [filled, filled_rows, put])
def test_masked_writes(function: Callable[..., Tensor]) -> None:
    sweep(function, X, X > 0, normal(5, 3) * 2, partial=False)


def test_gradients_of_gradients() -> None:
    def function(x: Tensor) -> Tensor:
        (grad,) = torch.autograd.grad((x[x > 0] ** 3).sum(), x, create_graph=True)
        return grad[x > 0.5].sum() + grad.sum()

    sweep(function, X, partial=False)


# Where results lie, and what is communicated: the numbers of what was found, and no data


def rows(x: Tensor) -> Tensor:
    """A mask of rows, which all ranks know."""
    mask = torch.tensor([1, 1, 0, 1, 0]).bool()
    return sw.distribute_tensor(mask, x.device_mesh, src_data_rank=None)


LIE: dict[str, tuple[Callable[[Any], Any], Any, str]] = {
    "some rows": (lambda x: x[x[:, 0] > 0], (S(0), R), "[2,3] S(0=0+2)@a"),
    "rows of columns": (lambda x: x[rows(x)], (S(0), S(1)), "[3,3] S(0)@a S(1)@b"),
    "columns": (lambda x: x[:, rows(x)[:3]], (S(0), R), "[5,2] S(0)@a"),
    "two axes": (lambda x: x[x > 0], (S(0), S(0)), "[5] S(0=1+0+1+3)@a,b"),
    "two axes in another order": (lambda x: x[x > 0], {0: ("b", "a")}, "[5] S(0=1+0+1+3)@b,a"),
    "nonzero": (lambda x: (x > 0).nonzero(), (R, S(0)), "[5,2] S(0=1+4)@b"),
    "whole": (lambda x: x[x > 0], (R, R), "[5] R"),
    "pending": (lambda x: x[rows(x)], (P(), R), "[3,3] P(sum)@a"),
    "bincount": (lambda x: (x * 0).long().flatten().bincount(), (S(0), R), "[1] P(sum)@a"),
}
NOTHING_TO_SAY = ("columns", "whole", "pending")


@pytest.mark.parametrize("name", LIE)
def test_results_stay_where_they_were_found(name: str) -> None:
    function, placements, layout = LIE[name]
    d = sw.distribute_tensor(X, mesh_of((2, 2)), placements)
    with CommDebugMode() as comm, sw.strict():
        found = function(d)
    assert str(found.layout_on_mesh) == layout
    assert [(c.kind, c.bytes <= 16) for c in comm.comms] == [("all_gather", True)] * (name not in NOTHING_TO_SAY)


def test_another_dim_is_exchanged_not_gathered() -> None:
    d = place(normal(8, 6), S(1))
    with CommDebugMode() as comm, sw.strict():
        found = d[d > 0]
    assert [c.kind for c in comm.comms] == ["all_to_all", "all_to_all", "all_gather"]
    assert comm.comms[-1].bytes == 8 and found.placements == (S(0),)


def test_writing_what_was_chosen_moves_nothing() -> None:
    """As a layer does that treats some of the rows in a way of their own."""
    x = normal(20, 3)
    d, rows = place(x.clone(), S(0), mesh=(4,)), x[:, 0] > 0
    mask = place(rows, S(0), mesh=(4,))
    with CommDebugMode() as comm, sw.strict():
        d[mask] = d[mask] * 2
    assert [(c.kind, c.bytes) for c in comm.comms] == [("all_gather", 8)] * 2
    x[rows] *= 2
    assert torch.equal(d.full_tensor(), x)


def test_what_others_have_found_is_part_of_the_graph() -> None:
    """A rank without any of the chosen elements takes part in the backward pass."""
    d = place(torch.arange(8.0), S(0), mesh=(4,)).requires_grad_()
    (d[d > 6] * 2).sum().backward()
    assert d.grad.full_tensor().tolist() == [0.0] * 7 + [2.0]
    check_shards(d.grad)


def test_plain_masks_mix_as_elsewhere() -> None:
    d = place(X, S(0))
    for function in (lambda: d[ROWS5], lambda: d.masked_select(ROWS5[:, None]), lambda: d[ROWS5, 0]):
        with pytest.raises(sw.errors.MixedTensorError, match="is a plain torch"):
            function()
    with sw.experimental.implicit_replication(), sw.strict():
        assert torch.equal(d[ROWS5].full_tensor(), X[ROWS5])
        assert torch.equal(d.masked_select(ROWS5[:, None]).full_tensor(), X.masked_select(ROWS5[:, None]))
        assert torch.equal(X[d > 0].full_tensor(), X[X > 0])


BAD: dict[str, Callable[[Tensor], Any]] = {
    "a mask of another shape": lambda x: x[x[:3] > 0],
    "a mask of too many dims": lambda x: x[x > 0, 0],
    "indices that do not go together": lambda x: x[x[:, 0] > 0, (x > 0).nonzero()[:, 1]],
    "masked_select": lambda x: x.masked_select(x[:, :2] > 0),
    "index_put": lambda x: x.index_put((x[:4, 0] > 0,), x[0]),
    "as many values": lambda x: x.clone().__setitem__(x > 0, x.flatten()[:3]),
    "bincount": lambda x: torch.bincount((x[:, 0] * 9).long()),
    "bincount of two dims": lambda x: torch.bincount((x > 0).long()),
    "repeat_interleave": lambda x: x.repeat_interleave((x[:, 0] * 9).long(), 0),
    "one_hot": lambda x: torch.nn.functional.one_hot((x * 9).long()),
}


@pytest.mark.filterwarnings("ignore::shardwise.errors.FallbackWarning")
@pytest.mark.parametrize("name", BAD)
def test_errors_are_of_torchs_type(name: str) -> None:
    with pytest.raises(Exception) as said:
        BAD[name](X)
    for placement in (S(0), S(1)):
        with pytest.raises(type(said.value)):
            BAD[name](place(X, placement))


def test_out() -> None:
    d, out = place(X, S(0)), place(torch.zeros(5, dtype=torch.float64), S(0))
    assert torch.masked_select(d, d > 0, out=out) is out
    assert torch.equal(out.full_tensor(), X[X > 0])


def test_sizes_that_never_come_again_are_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    """Plans, paths and their kernels are bounded in number, and nothing else keeps layouts."""
    monkeypatch.setattr(call, "MAX_PLANS", 50)
    caches = [f for module in (planner, kernels) for f in vars(module).values() if hasattr(f, "cache_clear")]
    assert len(caches) > 3 and all(cache.cache_info().maxsize for cache in caches)
    d, numbers = place(normal(1000, 2), S(0)), place(torch.arange(1000), S(0))

    def kept() -> int:
        call.clear_cache()
        for cache in caches:
            cache.cache_clear()
        gc.collect()
        return len(Layout._interned)

    before = kept()
    for size in range(1000):
        found = d[numbers < size] * 2
        assert len(found) == size and call.cache_info().size <= 50
        if size % 100 == 0:
            found.full_tensor()
    assert kept() - before < 10
