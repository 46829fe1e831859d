"""Ranks that are about to change their modules: all of them, in the same way, or none."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from shardwise.comm.agreement import compared, digest
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
