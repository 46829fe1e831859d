"""Ranks that are about to change their modules: all of them, in the same way, or none."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

from shardwise.comm.agreement import compared, digest, largest
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
    different, somewhere = compared(mesh, 0 if found is None else digest(facts(found)), refused is not None)
    if refused is not None:
        raise refused
    if somewhere or different:
        raise elsewhere if somewhere else differ
    assert found is not None
    return found


def first_difference(mesh: Mesh, facts: Sequence[object]) -> int:
    """The number of the first of some facts that do not read alike on all ranks of a mesh; their count, if all do.
    There must be as many everywhere."""
    numbers = [digest(fact) for fact in facts]
    ends = largest(mesh, [*numbers, *(~number for number in numbers)])
    high, low = ends[: len(facts)], ends[len(facts) :]
    return next((i for i, (most, least) in enumerate(zip(high, low)) if most != ~least), len(facts))


def least(mesh: Mesh, number: int) -> int:
    """The least of the ranks' numbers."""
    return ~largest(mesh, [~number])[0]
