"""Bad arguments: samples of torch's operators with one thing spoilt. What torch refuses is refused on all ranks alike,
before anything is communicated or written, whatever the layouts. (What it takes, `shardwise coverage` tries.)
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from bad_calls import BadCall, check_refused, refused
from torch import Tensor

from shardwise.dispatch import clear_cache
from shardwise.proof.coverage.command import assignments
from shardwise.proof.kit.placing import mesh_of
from shardwise.proof.kit.samples import Operator, Sample, operators, replaced

PARTS, EVERY = 8, 6
"""The tests try every so many-th operator of torch, in so many parts."""

LARGE = 1000
"""Elements of a sample that is not tried."""

UNSAFE = ("_segment_reduce.lengths", "_segment_reduce.offsets")
"""Operators that crash for some bad input."""

OF_SEVERAL_CALLS = frozenset(
    {
        *("svd_lowrank", "pca_lowrank", "__rdiv__", "masked.norm", "_unsafe_masked_index_put_accumulate"),
        *("nn.functional.linear_cross_entropy.chunked", "nn.functional.linear_cross_entropy.chunked_none"),
        *("lu_unpack", "multinomial", "nn.functional.conv_transpose2d", "nn.functional.conv_transpose3d"),
    }
)
"""Operators that may communicate before a bad call is found out: functions in Python of which a later call is bad, and
those that are not tried out, for the rows that pivots name, or for the size of the result."""

Spoiler = Callable[[Tensor], Tensor | None]


def longer(x: Tensor) -> Tensor | None:
    """One more row."""
    return torch.cat([x, x[-1:]]) if x.dim() and x.numel() else None


def wider(x: Tensor) -> Tensor | None:
    return torch.cat([x, x[..., -1:]], -1) if x.dim() > 1 and x.numel() else None


def deeper(x: Tensor) -> Tensor | None:
    """More dims than anyone expects."""
    return x.expand(3, 3, 3, 3, *x.shape).contiguous() if x.numel() < LARGE // 81 else None


def flatter(x: Tensor) -> Tensor | None:
    """No dims."""
    return x.reshape(-1)[0].clone() if x.dim() and x.numel() else None


def of_other_numbers(x: Tensor) -> Tensor | None:
    """Where floats are expected, complex numbers; where integers, floats."""
    if x.is_complex():
        return x.real.long()
    return x.to(torch.complex128) if x.is_floating_point() else x.to(torch.float64)


def with_last(value: float) -> Spoiler:
    """The last element, of the last rank, out of range: too large for an index, negative, or no number."""

    def spoil(x: Tensor) -> Tensor | None:
        if not x.numel() or x.is_complex() or x.dtype in (torch.bool, torch.uint8, torch.int8):
            return None
        if value != value and not x.is_floating_point():
            return None
        flat = x.reshape(-1).clone()
        flat[-1] = value
        return flat.reshape(x.shape)

    return spoil


SPOILERS: tuple[Spoiler, ...] = (
    *(longer, wider, deeper, flatter, of_other_numbers),
    *(with_last(1000), with_last(-100), with_last(float("nan"))),
)


def other_numbers(value: Any) -> list[Any]:
    """Integers out of any range, and words that mean nothing."""
    match value:
        case bool():
            return []
        case int():
            return [value + 100, -value - 100]
        case str():
            return ["nonsense"]
        case [int(), *_] if type(value) in (list, tuple) and not isinstance(value[0], bool):
            return [type(value)([value[0] + 100, *value[1:]])]
    return []


def spoilt(sample: Sample) -> Iterator[Sample]:
    """Calls that differ from a sample in one thing."""
    tensors = {id(x): x for x in sample.tensors}
    for x in sample.tensors:
        for image in (spoil(x.detach()) for spoil in SPOILERS):
            if image is not None:
                images = {**tensors, id(x): image}
                yield Sample(-1, replaced(sample.args, images), replaced(sample.kwargs, images))
    for position, arg in enumerate(sample.args):
        for other in other_numbers(arg):
            yield Sample(-1, (*sample.args[:position], other, *sample.args[position + 1 :]), sample.kwargs)
    for name, arg in sample.kwargs.items():
        for other in other_numbers(arg):
            yield Sample(-1, sample.args, {**sample.kwargs, name: other})


def bad_calls(op: Operator) -> Iterator[BadCall]:
    """What torch refuses of the spoilt images of one sample, the first that has such."""
    for sample in op.samples(4, 0):
        usable = sample.tensors and all(x.layout is torch.strided and x.device.type == "cpu" for x in sample.tensors)
        if usable and sum(x.numel() for x in sample.tensors) <= LARGE:
            found = [bad for other in spoilt(sample) if (bad := refused(op.function, other)) is not None]
            if found:
                yield from found
                return


@pytest.mark.parametrize("part", range(PARTS))
def test_what_torch_refuses_is_refused(part: int) -> None:
    tried, chance = 0, random.Random(part)
    for op in operators()[part * EVERY :: PARTS * EVERY]:
        for bad in bad_calls(op) if op.name not in UNSAFE else ():
            clear_cache()  # plans may hold for all dtypes, and torch is asked when they are made
            for shape in ((2,), (2, 2)):
                way = chance.choice(assignments(bad.sample.tensors, len(shape), 6, chance))
                check_refused(bad, mesh_of(shape), way, may_move=op.name in OF_SEVERAL_CALLS)
                tried += 1
    assert tried > 50
