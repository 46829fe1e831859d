"""Ports: where a program runs and how its ranks exchange data."""

import torch
from torch.distributed import device_mesh
from torch.distributed.device_mesh import DeviceMesh

from shardwise.comm.captured import captured_mesh, noters, running_mesh
from shardwise.comm.port import Handle, Port
from shardwise.comm.process_group import ProcessGroupPort, mesh_of
from shardwise.comm.ranked import PerRank, Ranked, local_tensor, per_rank, ranked, shards_of
from shardwise.comm.recording import RecordingPort, rebuild_recording, recording
from shardwise.comm.simulated import SimulatedPort, rebuild_simulated, simulate
from shardwise.errors import MeshError
from shardwise.layout import Mesh, entered_mesh

__all__ = [
    "AnyMesh",
    "Handle",
    "PerRank",
    "Port",
    "ProcessGroupPort",
    "Ranked",
    "RecordingPort",
    "SimulatedPort",
    "as_mesh",
    "captured_mesh",
    "local_tensor",
    "mesh_of",
    "noters",
    "per_rank",
    "ranked",
    "recording",
    "running_mesh",
    "shards_of",
    "simulate",
]

AnyMesh = Mesh | DeviceMesh
"""What users may pass for a mesh."""


def as_mesh(mesh: AnyMesh | None) -> Mesh:
    """Our mesh for whatever the user passed: one of ours, torch's DeviceMesh, or None for that of the `with` block."""
    if mesh is None:
        mesh = entered_mesh() or _entered_in_torch()
    if not isinstance(mesh, Mesh) and isinstance(mesh, DeviceMesh):
        mesh = mesh_of(mesh)
    if isinstance(mesh, Mesh):
        return captured_mesh(mesh) if noters else mesh
    if mesh is None:
        raise MeshError("no mesh was given: pass device_mesh=, or make it inside `with mesh:`")
    raise MeshError(f"expected a mesh from shardwise.simulate or a torch DeviceMesh, got {type(mesh).__name__}")


def _entered_in_torch() -> DeviceMesh | None:
    entered = device_mesh._mesh_resources.mesh_stack
    return entered[-1] if entered else None


# What torch.load(weights_only=True) may call to make a mesh again.
torch.serialization.add_safe_globals([DeviceMesh, mesh_of, rebuild_recording, rebuild_simulated])
