"""Whether ranks are about to do the same: one small reduction, which is nobody's program. It is neither recorded nor
captured."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from contextlib import nullcontext

import torch
from torch.utils._python_dispatch import _disable_current_modes

from shardwise.comm.captured import running_mesh
from shardwise.comm.record import off_the_record
from shardwise.layout import Mesh


def digest(facts: object) -> int:
    """A number for facts that are written with the same words on every rank."""
    return int.from_bytes(hashlib.sha256(repr(facts).encode()).digest()[:7], "big")


def compared(mesh: Mesh, number: int, flag: bool = False) -> tuple[bool, bool]:
    """Whether the ranks' numbers differ, and whether any flag is set. Those of one process need not be asked."""
    if _is_of_one_process(running_mesh(mesh)):
        return False, False
    # the largest of `~number` is that of the smallest: one reduction finds both ends
    high, low, flags = largest(mesh, [number, ~number, flag])
    return high != ~low, bool(flags)


def largest(mesh: Mesh, numbers: Sequence[int]) -> list[int]:
    """Of each number, the largest that a rank has."""
    mesh = running_mesh(mesh)
    if _is_of_one_process(mesh):
        return list(numbers)
    unseen = _disable_current_modes if torch._C._len_torch_dispatch_stack() else nullcontext
    with off_the_record(), unseen(), torch._C.DisableTorchFunctionSubclass():
        own = torch.tensor(numbers, dtype=torch.int64, device=mesh.device_type)
        found: list[int] = mesh.port.all_reduce([own], mesh, tuple(range(mesh.ndim)), "max")[0].tolist()
    return found


def _is_of_one_process(mesh: Mesh) -> bool:
    return len(mesh.held) >= mesh.size() or mesh.device_type == "meta"
