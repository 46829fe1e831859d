"""Ports: where a program runs and how its ranks exchange data."""

from typing import Any

from torch.distributed.device_mesh import DeviceMesh

from shardwise.comm.port import Port
from shardwise.comm.process_group import ProcessGroupPort, mesh_of
from shardwise.comm.ranked import PerRank, Ranked, per_rank, ranked, shards_of
from shardwise.comm.recording import RecordingPort, recording
from shardwise.comm.simulated import SimulatedPort, simulate
from shardwise.errors import MeshError
from shardwise.layout import Mesh

__all__ = [
    "PerRank",
    "Port",
    "ProcessGroupPort",
    "Ranked",
    "RecordingPort",
    "SimulatedPort",
    "as_mesh",
    "mesh_of",
    "per_rank",
    "ranked",
    "recording",
    "shards_of",
    "simulate",
]


def as_mesh(mesh: Any) -> Mesh:
    """Our mesh for whatever the user passed: one of ours, or torch's DeviceMesh."""
    if isinstance(mesh, Mesh):
        return mesh
    if isinstance(mesh, DeviceMesh):
        return mesh_of(mesh)
    raise MeshError(f"expected a mesh from shardwise.simulate or a torch DeviceMesh, got {type(mesh).__name__}")
