"""Ways from a DTensor to plain values. Those that C++ takes without asking the tensor see one shard: here is a list."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import numpy
import pytest
import torch
from torch import Tensor

import shardwise as sw

WHOLE = torch.arange(8.0).view(4, 2)


def sharded() -> sw.DTensor:
    mesh = sw.simulate((2, 2), ("a", "b"))
    return sw.distribute_tensor(WHOLE, mesh, [sw.Shard(0), sw.Shard(1)])


ASKED: dict[str, Callable[[Any], Any]] = {
    "full_tensor": lambda d: d.full_tensor() if isinstance(d, sw.DTensor) else d,
    "tolist": lambda d: d.tolist(),
    "numpy": lambda d: d.numpy(),
    "numpy.asarray": lambda d: numpy.asarray(d),
    "item": lambda d: d.sum().item(),
    "float": lambda d: float(d.sum()),
    "int": lambda d: int(d.sum()),
    "format": lambda d: float(f"{d.sum():.1f}"),
    "list": lambda d: [float(x) for x in d.sum(1)],
    "number in a tensor": lambda d: torch.tensor([d.sum().item(), 1.0]),
}

NOT_ASKED: dict[str, Callable[[Any], Any]] = {
    "tensor": lambda d: torch.tensor(d),
    "as_tensor": lambda d: torch.as_tensor(d, dtype=torch.float64),
    "Tensor": lambda d: torch.Tensor(d),
    "new_tensor": lambda d: torch.ones(1).new_tensor(d),
    "tensor of a pending number": lambda d: torch.tensor(d.sum()),
    "full": lambda d: torch.full((2,), d.sum()),
}


def same(function: Callable[[Any], Any]) -> bool:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch advises against some of these
        mine, theirs = function(sharded()), function(WHOLE)
    plain = mine.full_tensor() if isinstance(mine, sw.DTensor) else mine
    return numpy.array_equal(*(x.detach().numpy() if isinstance(x, Tensor) else x for x in (plain, theirs)))


@pytest.mark.parametrize("name", ASKED)
def test_the_whole_leaves(name: str) -> None:
    assert same(ASKED[name])


@pytest.mark.xfail(strict=True, raises=AssertionError, reason="torch reads the shard in C++ and asks nobody")
@pytest.mark.parametrize("name", NOT_ASKED)
def test_what_sees_one_shard(name: str) -> None:
    assert same(NOT_ASKED[name])
