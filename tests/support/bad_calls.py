"""Calls that torch refuses, and what they must do on DTensors: raise on all ranks alike, with nothing moved or written.

Words may be other than torch's. Its data may have to be looked at together, and then something is communicated.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor

from shardwise.debug import CommDebugMode
from shardwise.layout import Mesh
from shardwise.proof.coverage.command import Assignment
from shardwise.proof.kit.compare import same, shards
from shardwise.proof.kit.placing import place
from shardwise.proof.kit.samples import Sample, replaced, seeded
from shardwise.proof.kit.together import ranks_compared

FAMILY = (RuntimeError, TypeError, ValueError, IndexError)
"""What torch raises for bad arguments."""


@dataclass(frozen=True)
class BadCall:
    """A call that torch refuses; whether its data is to blame, or already shapes and numbers are; and whether torch
    itself writes to its arguments before it refuses."""

    function: Callable[..., Any]
    sample: Sample
    of_data: bool
    writes: bool


def refused(function: Callable[..., Any], sample: Sample) -> BadCall | None:
    """The call, if torch refuses it."""
    images = [_copy(x) for x in sample.tensors]
    error = _error(function, sample, images)
    if not isinstance(error, FAMILY):
        return None
    others = [
        _error(function, sample, [image(x).requires_grad_(x.requires_grad) for x in sample.tensors])
        for image in (torch.zeros_like, torch.ones_like, _noise)
    ]
    of_data = any(str(other) != str(error) for other in others)
    return BadCall(function, sample, of_data, writes=not all(map(same, sample.tensors, images)))


def check_refused(bad: BadCall, mesh: Mesh, way: Assignment, *, may_move: bool = False) -> None:
    """Make a bad call with its inputs laid out so."""
    inputs = [place(x, mesh, where, i) for i, (x, where) in enumerate(zip(bad.sample.tensors, way, strict=True))]
    before = [shard.detach().clone() for x in inputs for shard in shards(x)]
    with warnings.catch_warnings(action="ignore"), CommDebugMode() as comm, ranks_compared(), pytest.raises(FAMILY):
        _call(bad.function, bad.sample, inputs)
    after = [shard.detach() for x in inputs for shard in shards(x)]
    assert bad.writes or all(map(same, before, after)), "written to before it was refused"
    assert bad.of_data or may_move or not comm.comms, f"{comm.get_comm_counts()} before it was refused"


def _call(function: Callable[..., Any], sample: Sample, images: Sequence[Tensor]) -> Any:
    by_id = {id(x): image for x, image in zip(sample.tensors, images, strict=True)}
    with seeded("call", 0):
        return function(*replaced(sample.args, by_id), **replaced(sample.kwargs, by_id))


def _error(function: Callable[..., Any], sample: Sample, images: Sequence[Tensor]) -> Exception | None:
    try:
        with warnings.catch_warnings(action="ignore"):
            _call(function, sample, images)
    except Exception as error:
        return error.with_traceback(None)
    return None


def _copy(x: Tensor) -> Tensor:
    return x.detach().clone().requires_grad_(x.requires_grad)


def _noise(x: Tensor) -> Tensor:
    """Other numbers; as matrices they are regular."""
    if not (x.is_floating_point() or x.is_complex()):
        return torch.zeros_like(x)
    return torch.linspace(0.1, 0.9, x.numel(), dtype=torch.float64).reshape(x.shape).cos().pow(9).to(x.dtype)
