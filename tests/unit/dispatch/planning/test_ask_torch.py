"""Dtypes that torch has no kernel for: refused whatever the layout, on all ranks, before anything is communicated.

Kernels for meta tensors, on which calls are traced, take most of these.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from bad_calls import BadCall, check_refused, refused
from sweep import mesh_of
from torch import Tensor

import shardwise as sw
from shardwise.dispatch import clear_cache
from shardwise.proof.kit.samples import Sample

pytestmark = pytest.mark.filterwarnings("ignore::shardwise.errors.FallbackWarning")

R, S = sw.Replicate(), sw.Shard
BOOL, BYTE, LONG = torch.bool, torch.uint8, torch.int64
HALF, BRAIN, COMPLEX = torch.float16, torch.bfloat16, torch.complex64

TARGET = torch.tensor([0, 2, 1, 0, 2])
CASES: dict[str, tuple[Callable[[Tensor], Any], tuple[int, ...], tuple[torch.dtype, ...]]] = {
    "median": (torch.median, (5, 3), (BOOL, COMPLEX)),
    "nanmedian": (torch.nanmedian, (5, 3), (BOOL,)),
    "trace": (torch.trace, (5, 5), (BOOL,)),
    "argmax": (torch.argmax, (5, 3), (BOOL, COMPLEX)),
    "argmin of rows": (lambda x: x.argmin(1), (5, 3), (BOOL,)),
    "cross_entropy": (lambda x: F.cross_entropy(x, like(x, TARGET)), (5, 3), (BYTE, LONG)),
    "nll_loss": (lambda x: F.nll_loss(x, like(x, TARGET), reduction="sum"), (5, 3), (BYTE, LONG)),
    "log_softmax": (lambda x: x.log_softmax(1), (5, 3), (BYTE, LONG)),
    "mm": (lambda x: x @ x, (5, 5), (BOOL,)),
    "nextafter": (lambda x: torch.nextafter(x, x), (5, 3), (BOOL, LONG, COMPLEX)),
    "special": (lambda x: torch.special.hermite_polynomial_h(x, x), (5, 3), (HALF, BRAIN, COMPLEX)),
    "cdist": (lambda x: torch.cdist(x, x, p=1.0), (5, 4, 3), (HALF, BRAIN, LONG)),
    "fft": (lambda x: torch.fft.fft(x, dim=1), (5, 3), (HALF, BRAIN)),
    "cholesky": (torch.linalg.cholesky, (3, 4, 4), (HALF, BRAIN)),
    "lu": (torch.linalg.lu_factor, (3, 4, 4), (HALF, BRAIN, LONG)),
    "max_pool1d": (lambda x: F.max_pool1d(x, 2), (3, 6), (BOOL,)),
    "max_pool2d": (lambda x: F.max_pool2d(x, 2), (3, 2, 6, 6), (BOOL, COMPLEX)),
    "adaptive_avg_pool2d": (lambda x: F.adaptive_avg_pool2d(x, 3), (3, 2, 6, 6), (BOOL, LONG)),
    "interpolate": (lambda x: F.interpolate(x, scale_factor=2), (3, 2, 4), (BOOL, LONG)),
    "reflected": (lambda x: F.pad(x, (1, 1), mode="reflect"), (3, 6), (BOOL,)),
    "conv_transpose1d": (lambda x: F.conv_transpose1d(x, x), (3, 3, 3), (BOOL, BYTE)),
}


def like(x: Tensor, value: Tensor) -> Tensor:
    """`value` on the mesh of `x`, if that is on one."""
    return sw.distribute_tensor(value, x.device_mesh, src_data_rank=None) if isinstance(x, sw.DTensor) else value


def numbers(shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    return torch.arange(torch.Size(shape).numel()).reshape(tuple(shape)).remainder(5).to(dtype)


def bad_call(name: str, dtype: torch.dtype) -> BadCall:
    function, shape, _ = CASES[name]
    found = refused(function, Sample(0, (numbers(shape, dtype),)))
    assert found is not None and not found.of_data
    return found


def layouts(shape: Sequence[int]) -> list[tuple[int, sw.Placement]]:
    """Ways to lay a tensor out on so many ranks: whole, uneven, and with ranks that hold nothing."""
    return [(2, R), *((ranks, S(dim)) for ranks in (2, 4) for dim in range(len(shape)))]


EACH = [pytest.param(name, dtype, id=f"{name}-{dtype}") for name, case in CASES.items() for dtype in case[2]]


@pytest.mark.parametrize(("name", "dtype"), EACH)
def test_never_seen(name: str, dtype: torch.dtype) -> None:
    call = bad_call(name, dtype)
    for ranks, placement in layouts(CASES[name][1]):
        clear_cache()
        check_refused(call, mesh_of((ranks,)), ((placement,),))


@pytest.mark.parametrize(("name", "dtype"), EACH)
def test_planned_in_another_dtype(name: str, dtype: torch.dtype) -> None:
    """A plan that begins with a move, and holds for all dtypes, moves first; all ranks raise alike nevertheless."""
    function, shape, _ = CASES[name]
    call = bad_call(name, dtype)
    for ranks, placement in layouts(shape):
        clear_cache()
        mesh = mesh_of((ranks,))
        matrix = torch.eye(4).expand(3, 4, 4) if name == "cholesky" else numbers(shape, torch.float32)
        function(sw.distribute_tensor(matrix, mesh, [placement]))
        check_refused(call, mesh, ((placement,),), may_move=True)


WITHOUT_MOVES = ("argmin of rows", "cdist", "fft", "log_softmax", "max_pool1d", "max_pool2d", "lu", "reflected")


@pytest.mark.parametrize("ranks", [2, 3, 4])
@pytest.mark.parametrize("name", WITHOUT_MOVES)
def test_planned_in_another_dtype_where_nothing_moves(name: str, ranks: int) -> None:
    function, shape, dtypes = CASES[name]
    clear_cache()
    mesh = mesh_of((ranks,))
    function(sw.distribute_tensor(numbers(shape, torch.float32), mesh, [S(0)]))
    for dtype in dtypes:
        check_refused(bad_call(name, dtype), mesh, ((S(0),),))


# What is not refused


def lengths(x: Tensor) -> Tensor:
    """Neither zeros nor ones are good lengths, so what torch says to them is not of dtypes."""
    return torch.segment_reduce(x, "sum", lengths=like(x, torch.tensor([3, 0, 2])))


TAKEN: dict[str, tuple[Callable[[Tensor], Any], Tensor]] = {
    "lengths": (lengths, numbers((5,), BRAIN)),
    "integers by integers": (lambda x: x // (x + 1), numbers((5, 3), LONG)),
    "a system": (lambda x: torch.linalg.solve(x, x), torch.eye(4).expand(3, 4, 4).to(COMPLEX)),
    "a definite matrix": (torch.linalg.cholesky, torch.eye(4).expand(3, 4, 4).to(COMPLEX)),
    "many rows": (lambda x: torch.cdist(x, x), numbers((30, 3), HALF)),
    "groups": (lambda x: F.group_norm(x, 5), numbers((3, 10, 2), BRAIN)),
    "a wide pool": (lambda x: F.avg_pool1d(x, 7, padding=3), numbers((3, 2, 9), BRAIN)),
    "a sum of a mask": (torch.sum, numbers((5, 3), BOOL)),
}


@pytest.mark.filterwarnings("ignore::shardwise.errors.FallbackWarning")
@pytest.mark.parametrize(("function", "x"), TAKEN.values(), ids=TAKEN)
def test_what_torch_takes(function: Callable[[Tensor], Any], x: Tensor) -> None:
    expected = function(x)
    for placement in (R, S(0)):
        for ranks in (2, 4):
            clear_cache()
            found = function(sw.distribute_tensor(x, mesh_of((ranks,)), [placement]))
            assert found.dtype == expected.dtype
            torch.testing.assert_close(found.full_tensor(), expected)
