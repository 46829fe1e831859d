"""Collectives that are started and finished apart, on a group whose work is complete when it is told so."""

from __future__ import annotations

import copy
import gc
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from groups import Mirror, alone_in
from torch import Tensor, nn

import shardwise as sw
from shardwise.debug import CommDebugMode
from shardwise.tensor import InFlight

R, S, P = sw.Replicate(), sw.Shard, sw.Partial


@pytest.fixture
def made() -> Iterator[list[Mirror]]:
    """The groups that are made: both ranks bring what this one does, and nothing arrives before it is told to."""
    with alone_in(Mirror, told=False) as groups:
        yield groups
        tell(groups)


def tell(groups: list[Mirror]) -> None:
    for group in groups:
        for work in group.works:
            work.tell()


def works(groups: list[Mirror]) -> list[Any]:
    return [work for group in groups for work in group.works]


def mesh_of_two() -> Any:
    return sw.init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))


def is_under_way(x: Any) -> bool:
    return type(x) is InFlight


USES: dict[str, Callable[[Any], Any]] = {
    "a method": lambda y: y.exp(),
    "an operator": lambda y: y + 1,
    "an operator, as the second operand": lambda y: 1 + y,
    "beside another": lambda y: sw.ones(4, 2, device_mesh=y.device_mesh) * y,
    "a function": lambda y: torch.exp(y),
    "a function in Python": lambda y: F.layer_norm(y, (2,)),
    "in a list": lambda y: torch.cat([sw.ones(4, 2, device_mesh=y.device_mesh), y]),
    "by name": lambda y: torch.exp(input=y),
    "an op": lambda y: torch.ops.aten.exp.default(y),
    "written to": lambda y: y.add_(1),
    "an item": lambda y: y[0],
    "to_local": lambda y: y.to_local(),
    "full_tensor": lambda y: y.full_tensor(),
    "moved on": lambda y: y.redistribute(placements=[S(1)]),
    "detached": lambda y: y.detach(),
    "its data": lambda y: y.data,
    "a parameter": lambda y: nn.Parameter(y),
    "printed": repr,
    "copied": lambda y: copy.deepcopy(y.detach()),
    "a number": lambda y: y.sum().item(),
    "as a gradient": lambda y: y.sum().backward(),
    "its strides": lambda y: y.stride(),
    "compared": lambda y: torch.equal(y, y),
    "in a loop": lambda y: list(y),
    "summed up": lambda y: torch._foreach_add([y], 1.0),
    "its layout": lambda y: y.layout_on_mesh,
}


@pytest.mark.parametrize("name", USES)
def test_the_first_use_waits(made: list[Mirror], name: str) -> None:
    x = sw.DTensor.from_local(torch.arange(4.0).view(2, 2), mesh_of_two(), [S(0)]).requires_grad_()
    y = x.redistribute(placements=[R], async_op=True)
    assert is_under_way(y) and isinstance(y, sw.DTensor)
    assert y.shape == (4, 2) and y.ndim == 2 and y.placements == (R,) and y.device_mesh is x.device_mesh
    assert is_under_way(y) and [work.num_waits for work in works(made)] == [0]
    tell(made)
    for group in made:
        group.at_once = True
    with torch.set_grad_enabled(name != "written to"):
        USES[name](y)
    assert type(y) is sw.DTensor and works(made)[0].num_waits == 1
    if name != "written to":
        assert torch.equal(y.detach().to_local(), torch.arange(4.0).view(2, 2).repeat(2, 1))


@pytest.mark.parametrize("name", USES)
def test_a_use_before_the_data_are_there_would_be_noticed(made: list[Mirror], name: str) -> None:
    """The group refuses to be waited for too early, so a use that does not wait would not raise."""
    x = sw.DTensor.from_local(torch.arange(4.0).view(2, 2), mesh_of_two(), [S(0)])
    y = x.redistribute(placements=[R], async_op=True)
    with pytest.raises(AssertionError, match="before it was complete"):
        USES[name](y)


def test_several_are_under_way_and_used_in_any_order(made: list[Mirror]) -> None:
    mesh, a, b = mesh_of_two(), torch.randn(2, 3), torch.randn(4, 2)
    gathered = sw.DTensor.from_local(a, mesh, [S(0)]).redistribute(placements=[R], async_op=True)
    reduced = sw.DTensor.from_local(b, mesh, [P("sum")]).redistribute(placements=[R], async_op=True)
    scattered = sw.DTensor.from_local(b, mesh, [P("avg")]).redistribute(placements=[S(0)], async_op=True)
    turned = sw.DTensor.from_local(b, mesh, [S(0)]).redistribute(placements=[S(1)], async_op=True)
    assert all(map(is_under_way, (gathered, reduced, scattered, turned))) and len(works(made)) == 4
    for work in reversed(works(made)):
        work.tell()
    assert torch.equal(turned.to_local(), b[:, :1].repeat(2, 1))
    assert torch.equal(reduced.to_local(), 2 * b) and is_under_way(gathered)
    torch.testing.assert_close(scattered.to_local(), b[:2])
    assert torch.equal(gathered.to_local(), a.repeat(2, 1))


def test_what_is_sent_may_be_written_to_meanwhile(made: list[Mirror]) -> None:
    for where, to in (([S(0)], [R]), ([P("sum")], [R]), ([P("sum")], [S(0)]), ([S(0)], [S(1)])):
        x = sw.DTensor.from_local(torch.ones(2, 2), mesh_of_two(), where)
        y = x.redistribute(placements=to, async_op=True)
        x.zero_()
        tell(made)
        assert y.to_local().min() >= 1, (where, to)


def test_one_that_nobody_wants_is_waited_for_before_its_memory_goes(made: list[Mirror]) -> None:
    x = sw.DTensor.from_local(torch.ones(2, 2), mesh_of_two(), [S(0)])
    y = x.redistribute(placements=[R], async_op=True)
    tell(made)
    assert works(made)[0].num_waits == 0
    del y
    gc.collect()
    assert works(made)[0].num_waits == 1


def test_groups_wait_for_what_is_under_way_before_they_go() -> None:
    with alone_in(Mirror, told=False) as made:
        x = sw.DTensor.from_local(torch.ones(2, 2), mesh_of_two(), [P("sum")])
        y = x.redistribute(placements=[R], async_op=True)
        tell(made)
    assert not dist.is_initialized() and works(made)[0].num_waits == 1 and is_under_way(y)
    assert torch.equal(y.to_local(), torch.full((2, 2), 2.0))


@pytest.mark.parametrize("cast", [None, torch.float64])
@pytest.mark.parametrize(
    ("before", "after"),
    [(S(0), R), (P("sum"), R), (P("avg"), R), (P("sum"), S(0)), (S(0), S(1)), (S(0), P("sum")), (R, S(0))],
    ids=str,
)
def test_gradients(before: Any, after: Any, cast: torch.dtype | None, made: list[Mirror]) -> None:
    """Those of the same call that waits, as is what is recorded; a write to the source in between changes nothing."""
    found: list[list[Tensor]] = []
    records = []
    for asynchronous in (False, True):
        for group in made:
            group.at_once = not asynchronous
        leaf = sw.DTensor.from_local(torch.arange(8.0).view(4, 2), mesh_of_two(), [before]).requires_grad_()
        x = leaf * 2
        made[0].at_once = not asynchronous
        with CommDebugMode() as comm:
            y = x.redistribute(placements=[after], async_op=asynchronous, backward_dtype=cast)
            assert is_under_way(y) == (asynchronous and len(comm.comms) > 0)
            x.mul_(5)
            tell(made)
            for group in made:
                group.at_once = True
            (y * y).to_local().sum().backward()
        found.append([y.detach().to_local(), leaf.grad.to_local()])
        records.append([(c.kind, c.bytes, c.backward) for c in comm.comms])
    for expected, value in zip(*found, strict=True):
        torch.testing.assert_close(value, expected)
    assert records[0] == records[1]


def test_second_gradients(made: list[Mirror]) -> None:
    made[0].at_once = True
    found = []
    for asynchronous in (False, True):
        x = sw.DTensor.from_local(torch.arange(1.0, 5.0).view(2, 2), mesh_of_two(), [S(0)]).requires_grad_()
        y = x.redistribute(placements=[R], async_op=asynchronous)
        (first,) = torch.autograd.grad((y**3).sum(), x, create_graph=True)
        (second,) = torch.autograd.grad((first**2).sum(), x)
        found.append([first.to_local().detach(), second.to_local()])
    for expected, value in zip(*found, strict=True):
        torch.testing.assert_close(value, expected)


@pytest.mark.parametrize("op", ["max", "min"])
def test_what_must_be_known_for_its_gradient_is_waited_for(op: str, made: list[Mirror]) -> None:
    with pytest.raises(AssertionError, match="before it was complete"):
        x = sw.DTensor.from_local(torch.ones(2, 2), mesh_of_two(), [P(op)]).requires_grad_()
        x.redistribute(placements=[R], async_op=True)


@pytest.mark.parametrize("make", [sw.simulate, sw.recording])
def test_elsewhere_everything_is_complete_at_once(make: Callable[..., Any]) -> None:
    mesh = make((2, 2), ("dp", "tp"))
    x = sw.distribute_tensor(torch.arange(16.0).view(4, 4), mesh, [S(0), S(1)]).requires_grad_()
    y = x.redistribute(placements=[R, R], async_op=True)
    assert type(y) is sw.DTensor
    (y * y).sum().backward()
    if make is sw.simulate:
        assert torch.equal(x.grad.full_tensor(), 2 * torch.arange(16.0).view(4, 4))


def test_a_failure_is_told_to_whoever_uses_the_result(made: list[Mirror]) -> None:
    x = sw.DTensor.from_local(torch.ones(2, 2), mesh_of_two(), [S(0)])
    y = x.redistribute(placements=[R], async_op=True)
    for _ in range(2):
        with pytest.raises(AssertionError, match="before it was complete"):
            y.exp()
    assert is_under_way(y)
