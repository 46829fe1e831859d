"""Bad arguments that the kernels for meta tensors of some versions of torch let pass: torch's own error, of no data."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from sweep import normal, place

import shardwise as sw
from shardwise.debug import CommDebugMode
from shardwise.rules import Call, Value
from shardwise.rules.kit.refusals import refuse

aten = torch.ops.aten

BAD: dict[str, tuple[Any, tuple, tuple[int, ...]]] = {
    "rows named by floats": (aten.embedding.default, (normal(5, 4), normal(5, 4)), (5, 4, 4)),
    "a divisor of zero": (aten.avg_pool2d.default, (normal(3, 3, 3), [2], [2], [0], False, True, 0), (3, 1, 1)),
    "and in three dims": (aten.avg_pool3d.default, (normal(3, 3, 3, 3), [2], [2], [0], False, True, 0), (3, 1, 1, 1)),
}
GOOD: dict[str, tuple[Any, tuple, tuple[int, ...]]] = {
    "rows named by integers": (aten.embedding.default, (normal(5, 4), torch.tensor([4, 0])), (2, 4)),
    "a divisor of one": (aten.avg_pool2d.default, (normal(3, 3, 3), [2], [2], [0], False, True, 1), (3, 1, 1)),
}


def as_call(op: Any, args: tuple, shape: tuple[int, ...]) -> Call:
    """A call as a trace has it that saw nothing wrong."""
    given = [Value(i, tuple(x.shape), x.dtype) if isinstance(x, torch.Tensor) else x for i, x in enumerate(args)]
    inputs = tuple(x for x in given if isinstance(x, Value))
    return Call(op, tuple(given), {}, inputs, (Value(len(args), shape, torch.float64),))


@pytest.mark.parametrize("name", BAD)
def test_what_torch_refuses(name: str) -> None:
    op, args, shape = BAD[name]
    with pytest.raises(RuntimeError) as expected:
        op(*args)
    with pytest.raises(RuntimeError) as raised:
        refuse(as_call(op, args, shape))
    assert str(raised.value) == str(expected.value)


@pytest.mark.parametrize("name", GOOD)
def test_what_torch_takes(name: str) -> None:
    refuse(as_call(*GOOD[name]))


NOTHING: dict[str, tuple[Any, tuple[tuple[int, ...], ...]]] = {
    "no outputs": (lambda x, w: F.conv_transpose2d(x, w, padding=1), ((2, 2, 1, 1), (2, 2, 2, 2))),
    "no outputs along one dim": (lambda x, w: F.conv_transpose2d(x, w, padding=(1, 0)), ((2, 2, 1, 1), (2, 2, 2, 2))),
    "no outputs in space": (lambda x, w: F.conv_transpose3d(x, w, padding=1), ((2, 2, 1, 1, 1), (2, 2, 2, 2, 2))),
    "no inputs": (F.conv_transpose2d, ((2, 2, 1, 0), (2, 2, 2, 2))),
    **{
        f"an image of nothing, {mode}": (
            lambda x, mode=mode: F.interpolate(x, scale_factor=0.1, mode=mode),
            ((2, 2, *[4] * num_dims),),
        )
        for mode, num_dims in (("linear", 1), ("bilinear", 2), ("bicubic", 2), ("trilinear", 3))
    },
    "no channels": (lambda x: F.interpolate(x, size=2, mode="trilinear"), ((2, 0, 3, 3, 3),)),
    "averages of nothing": (lambda x: F.adaptive_avg_pool3d(x, 2), ((2, 0, 3, 3, 3),)),
}


@pytest.mark.parametrize(("function", "shapes"), NOTHING.values(), ids=NOTHING)
def test_of_nothing(function: Any, shapes: tuple[tuple[int, ...], ...]) -> None:
    """Kernels for meta tensors give an empty result where others complain."""
    inputs = [normal(*shape) for shape in shapes]
    given = [place(x, sw.Shard(0)) for x in inputs]
    with pytest.raises(RuntimeError) as expected:
        function(*inputs)
    with CommDebugMode() as comm, pytest.raises(RuntimeError) as raised:
        function(*given)
    assert str(raised.value) == str(expected.value) and not comm.get_total_counts()
