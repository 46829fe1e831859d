"""Ranks that are about to change their modules: all of them, in the same way, or none."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from typing import TypeVar

import torch

from shardwise.comm.record import off_the_record
from shardwise.errors import ShardwiseError
from shardwise.layout import Mesh

_T = TypeVar("_T")


def agreed(
    mesh: Mesh, find: Callable[[], _T], facts: Callable[[_T], object], elsewhere: ShardwiseError, differ: ShardwiseError
) -> _T:
    """What `find` finds, once every rank of a mesh has found something, with facts that read alike. Else each rank
    raises: what `find` raised here, `elsewhere` where it raised on another rank only, or `differ`."""
    found, refused = None, None
    try:
        found = find()
    except Exception as error:
        refused = error
    different, somewhere = _compared(mesh, 0 if found is None else _digest(facts(found)), refused is not None)
    if refused is not None:
        raise refused
    if somewhere or different:
        raise elsewhere if somewhere else differ
    assert found is not None
    return found


def first_difference(mesh: Mesh, facts: Sequence[object]) -> int:
    """The number of the first of some facts that do not read alike on all ranks of a mesh; their count, if all do.
    There must be as many everywhere."""
    numbers = [_digest(fact) for fact in facts]
    ends = _largest(mesh, [*numbers, *(~number for number in numbers)])
    high, low = ends[: len(facts)], ends[len(facts) :]
    return next((i for i, (most, least) in enumerate(zip(high, low)) if most != ~least), len(facts))


def least(mesh: Mesh, number: int) -> int:
    """The least of the ranks' numbers."""
    return ~_largest(mesh, [~number])[0]


def _digest(facts: object) -> int:
    return int.from_bytes(hashlib.sha256(repr(facts).encode()).digest()[:7], "big")


def _compared(mesh: Mesh, number: int, flag: bool) -> tuple[bool, bool]:
    """Whether the ranks' numbers differ, and whether any flag is set."""
    # the largest of `~number` is that of the smallest: one reduction finds both ends
    high, low, flags = _largest(mesh, [number, ~number, flag])
    return high != ~low, bool(flags)


def _largest(mesh: Mesh, numbers: Sequence[int]) -> list[int]:
    """Of each number, the largest that a rank has."""
    if len(mesh.held) >= mesh.size() or mesh.device_type == "meta":
        return list(numbers)
    own = torch.tensor(numbers, dtype=torch.int64, device=mesh.device_type)
    with off_the_record():
        return mesh.port.all_reduce([own], mesh, tuple(range(mesh.ndim)), "max")[0].tolist()
