"""Ranks that are about to change their modules: all of them, in the same way, or none."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
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


def _digest(facts: object) -> int:
    return int.from_bytes(hashlib.sha256(repr(facts).encode()).digest()[:7], "big")


def _compared(mesh: Mesh, number: int, flag: bool) -> tuple[bool, bool]:
    """Whether the ranks' numbers differ, and whether any flag is set."""
    if len(mesh.held) >= mesh.size() or mesh.device_type == "meta":
        return False, False
    # the largest of `~number` is that of the smallest: one reduction finds both ends
    ends = torch.tensor([number, ~number, flag], dtype=torch.int64, device=mesh.device_type)
    with off_the_record():
        high, low, flags = mesh.port.all_reduce([ends], mesh, tuple(range(mesh.ndim)), "max")[0].tolist()
    return high != ~low, bool(flags)
