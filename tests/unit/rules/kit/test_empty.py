"""Ranks that hold nothing: empty results that every rank's backward pass goes through."""

import pytest
import torch
from sweep import mesh_of

from shardwise.layout import Layout
from shardwise.rules import Call, Local, Rule, Value, replicated
from shardwise.rules.kit.empty import connected_zeros, has_empty, skipping_empty

aten = torch.ops.aten


def refusing(x: torch.Tensor, *rest: object) -> torch.Tensor:
    assert x.numel(), "not to be called on nothing"
    return x * 2


def local_call(dtype: torch.dtype) -> Local:
    """The local call of an op whose kernel refuses what is empty, on four ranks of which two hold nothing."""
    value = Value(0, (2, 3), torch.float32)
    call = Call(aten.relu.default, (value,), {}, (value,), (Value(1, (2, 3), dtype),))
    layout = Layout(mesh_of((4,)), (2, 3), [(0,), ()])
    rule = skipping_empty(Rule(lambda call: [replicated(call)], lambda *_: Local(refusing, [value])))
    found = rule.local(call, [layout], [layout])
    assert found is not None
    return found


@pytest.mark.parametrize(
    ("planned", "given", "expected"),
    [
        (torch.float32, torch.bfloat16, torch.bfloat16),
        (torch.complex64, torch.float64, torch.complex128),
        (torch.float32, torch.complex64, torch.float32),
        (torch.int64, torch.float32, torch.int64),
    ],
    ids=str,
)
def test_an_empty_result_has_the_dtype_that_others_have(planned, given, expected):
    found = local_call(planned)
    function, shapes, *rest, _ = found.args
    assert [shape for (shape,) in shapes.values] == [(1, 3), (1, 3), (0, 3), (0, 3)]
    out = found.function(function, shapes.values[3], *rest, torch.zeros(0, 3, dtype=given))
    assert out.shape == (0, 3) and out.dtype == expected
    assert torch.equal(found.function(function, shapes.values[0], *rest, torch.ones(1, 3)), torch.full((1, 3), 2.0))


@pytest.mark.parametrize("saves", [True, False])
def test_zeros_are_connected_to_all_tensors_and_read_none(saves):
    x = torch.full((0, 2), 1.0, requires_grad=True)
    w = torch.full((3,), float("nan"), dtype=torch.complex64, requires_grad=True)
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        out = connected_zeros(x, (2, 0), w, None, saves=saves)
    assert bool(kept) == saves
    out.sum().backward()
    assert x.grad.shape == x.shape and torch.equal(w.grad, torch.zeros_like(w))
    assert torch.equal(connected_zeros(x, (2,), w), torch.zeros(2))


def test_which_layouts_leave_ranks_with_nothing():
    mesh = mesh_of((4,))
    few, many, none = (Layout(mesh, (size, 2), [(0,), ()]) for size in (2, 8, 0))
    assert has_empty([many, few]) and not has_empty([many]) and has_empty([none])
    assert few.held_starts == ((0, 0), (1, 0), (2, 0), (2, 0))
    assert few.held_intervals(0) == [(0, 1), (1, 2), (2, 2), (2, 2)] and few.intervals(1) == ((0, 2),)
