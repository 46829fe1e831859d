"""Results on meta tensors without torch's kernels for them: exactly theirs, and not by way of them."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from shardwise.dispatch.planning.meta_results import run_on_meta
from shardwise.dispatch.planning.trace import flat_tensors

aten = torch.ops.aten


def meta(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


class Slow(TorchDispatchMode):
    """Hears of every op that is left to torch's kernels for meta tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.ops: list[Any] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(x.is_meta for x in flat_tensors((args, kwargs))) and func is not aten.new_empty.default:
            self.ops.append(func)
        return func(*args, **(kwargs or {}))


def check(op: Any, *args: Any, quick: bool, **kwargs: Any) -> None:
    """The result is torch's own, and it took the quick way, or not."""
    expected = op(*args, **kwargs)
    with Slow() as slow:
        found = run_on_meta(op, args, kwargs)
    assert type(found) is type(expected)
    facts: Callable = lambda out: [(x.shape, x.dtype, x.stride(), x.device) for x in flat_tensors(out)]  # noqa: E731
    assert facts(found) == facts(expected)
    assert slow.ops == ([] if quick else [op])


DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.int64, torch.uint8, torch.bool, torch.complex64)
SHAPES: Sequence[tuple[tuple[int, ...], tuple[int, ...]]] = [
    ((4, 3), (4, 3)),
    ((4, 3), (3,)),
    ((4, 1), (1, 3)),
    ((4, 3), ()),
    ((), (4, 3)),
    ((0, 3), (1, 3)),
    ((2, 1, 5), (7, 5)),
]


@pytest.mark.parametrize(
    "op", [aten.add.Tensor, aten.mul.Tensor, aten.div.Tensor, aten.eq.Tensor, aten.pow.Tensor_Tensor]
)
def test_two_operands_of_all_shapes_and_dtypes(op: Any) -> None:
    for (left, right), (a, b) in product(SHAPES, product(DTYPES, repeat=2)):
        x, y = meta(*left, dtype=a), meta(*right, dtype=b)
        try:
            expected = op(torch.ones(left, dtype=a), torch.ones(right, dtype=b))
        except RuntimeError:  # refused for such dtypes: by whom, and in what words, is torch's affair
            continue
        check(op, x, y, quick=True)
        assert run_on_meta(op, (x, y), {}).dtype == expected.dtype


@pytest.mark.parametrize(
    ("op", "args", "kwargs"),
    [
        (aten.exp.default, (meta(4, 3, dtype=torch.int64),), {}),
        (aten.add.Scalar, (meta(4, dtype=torch.int64), 0.5), {}),
        (aten.add.Tensor, (meta(4), meta(4)), {"alpha": 2}),
        (aten.where.self, (meta(4, 1, dtype=torch.bool), meta(3), meta(4, 3, dtype=torch.float64)), {}),
        (aten.clamp.default, (meta(4, 3), 0.0, None), {}),
        (aten.frexp.Tensor, (meta(4, 3),), {}),
        (aten.isnan.default, (meta(2, 2),), {}),
        (aten.abs.default, (meta(2, 2, dtype=torch.complex64),), {}),
        (aten.upsample_bilinear2d.default, (meta(2, 3, 4, 5), [7, 9], False), {}),
        (aten.upsample_bicubic2d.default, (meta(2, 3, 4, 5), [7, 9], True, 2.0, 2.0), {}),
        (aten.upsample_trilinear3d.default, (meta(2, 3, 4, 5, 6), [7, 9, 2], False), {}),
        (aten.upsample_linear1d.default, (meta(0, 3, 4), [7], False), {}),
        (aten.grid_sampler_2d.default, (meta(2, 3, 4, 5), meta(2, 6, 7, 2), 0, 1, False), {}),
        (aten.linalg_vector_norm.default, (meta(4, 3), 3, [0]), {}),
        (aten.linalg_vector_norm.default, (meta(1, 0), 1, [0]), {}),
    ],
    ids=str,
)
def test_quick_ones(op: Any, args: Any, kwargs: Any) -> None:
    check(op, *args, quick=True, **kwargs)


@pytest.mark.parametrize(
    ("shape", "dims", "left"),
    [((1,), [-1], ()), ((2, 1), [-1], (2,)), ((1, 2, 1, 3), [-4, 2], (2, 3)), ((1, 0), [-2], (0,))],
)
def test_norms_drop_dims_of_one_index(shape: Any, dims: Any, left: Any) -> None:
    """Torch 2.11's own kernel does not, where they are counted from the end."""
    for order in (1, 2, 3):
        assert run_on_meta(aten.linalg_vector_norm.default, (meta(*shape), order, dims), {}).shape == left


@pytest.mark.parametrize(
    ("op", "args", "kwargs"),
    [
        (aten.add.Tensor, (meta(3, 4).t(), meta(4, 3)), {}),  # how the result lies in memory is torch's affair
        (aten.add.Tensor, (meta(), meta()), {}),
        (aten.add_.Tensor, (meta(4, 3), meta(3)), {}),
        (aten.clone.default, (meta(2, 3, 4, 5),), {"memory_format": torch.channels_last}),
        (aten.bernoulli.p, (meta(4), 0.5), {}),
        (aten.mm.default, (meta(4, 3), meta(3, 4)), {}),
        (aten.copy.default, (meta(4, 3), meta(3)), {}),
        (aten.linalg_vector_norm.default, (meta(4, 3), 2, [0], True), {}),
        (aten.linalg_vector_norm.default, (meta(4, 3, dtype=torch.complex64), 2, [0]), {}),
        (aten.linalg_vector_norm.default, (meta(0, 3), math.inf, [1]), {}),
    ],
    ids=str,
)
def test_what_is_left_to_torch(op: Any, args: Any, kwargs: Any) -> None:
    check(op, *args, quick=False, **kwargs)


@pytest.mark.parametrize(
    ("op", "args"),
    [
        (aten.add.Tensor, (meta(4, 3), meta(4))),
        (aten.upsample_bilinear2d.default, (meta(2, 3, 4), [7, 9], False)),
        (aten.grid_sampler_2d.default, (meta(2, 3, 4, 5), meta(2, 6, 7, 3), 0, 1, False)),
        (aten.where.self, (meta(4), meta(4), meta(5))),
        (aten.linalg_vector_norm.default, (meta(4, 3), 2, [2])),
        (aten.linalg_vector_norm.default, (meta(4, 3), 2, [1, -1])),
    ],
    ids=str,
)
def test_complaints_are_torchs_own(op: Any, args: Any) -> None:
    try:
        op(*args)
        raised = None
    except Exception as error:
        raised = error
    if raised is None:
        check(op, *args, quick=False)
        return
    with pytest.raises(type(raised)) as found:
        run_on_meta(op, args, {})
    assert str(found.value) == str(raised)
