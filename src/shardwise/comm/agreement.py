"""Whether ranks are about to do the same: one small reduction, which is nobody's program. It is neither recorded nor
captured."""

from __future__ import annotations

import hashlib

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
    mesh = running_mesh(mesh)
    if len(mesh.held) >= mesh.size() or mesh.device_type == "meta":
        return False, False
    with off_the_record(), _disable_current_modes(), torch._C.DisableTorchFunctionSubclass():
        # the largest of `~number` is that of the smallest: one reduction finds both ends
        ends = torch.tensor([number, ~number, flag], dtype=torch.int64, device=mesh.device_type)
        high, low, flags = mesh.port.all_reduce([ends], mesh, tuple(range(mesh.ndim)), "max")[0].tolist()
    return high != ~low, bool(flags)
